"""Vocabularies of a target and its draft: whether they match, and which tokens the draft must not propose.

A tokenizer has ordinary tokens, those of its model, and added tokens: special tokens such as `<|eot_id|>`, and others
that were added to a finished vocabulary. A pair needs equal ordinary tokens, id by id. Added tokens may differ in name
or number: the target's meaning holds, and the draft never proposes the ids on which the two disagree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swiftspec.errors import UserError

FOREIGN_SHARE = 0.5  # tokenizers that agree on fewer of their ordinary tokens count as different ones


@dataclass(frozen=True, slots=True)
class VocabularyIdentity:
    """What two processes compare instead of whole vocabularies.

    `ordinary`: SHA-256 of the ordinary tokens and their ids, in hexadecimal; a pair needs equal ones.
    `added`: the added tokens by id.
    `size`: the largest id of a token, plus one.
    """

    ordinary: str
    added: Mapping[int, str]
    size: int

    def masked_tokens(self, draft: VocabularyIdentity, draft_rows: int) -> tuple[int, ...]:
        """Returns the ids, ascending, that a draft with the same ordinary tokens must not propose for this target:
        those of added tokens on which the two disagree, added tokens beyond the `draft_rows` rows of the draft's LM
        head, and rows beyond this vocabulary."""
        known = self.added.keys() | draft.added.keys()
        found = {i for i in known if self.added.get(i) != draft.added.get(i) or i >= draft_rows}
        return (*sorted({i for i in found if i < self.size} | {*range(self.size, draft_rows)}),)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a tokenizer by id. `name`: of the tokenizer, for messages. `kind`: of the tokenizer, such as
    "Qwen2Tokenizer"."""

    name: str
    kind: str
    ordinary: Mapping[int, str]
    added: Mapping[int, str]

    @staticmethod
    def of(name: str, kind: str, tokens: Mapping[str, int], added: Iterable[int]) -> Vocabulary:
        """Returns the vocabulary of a tokenizer. `tokens`: ids by token. `added`: ids of the added tokens. If all
        tokens are added ones, they count as ordinary."""
        extra = frozenset(added)
        if extra.issuperset(tokens.values()):
            extra = frozenset()
        ordinary = {number: token for token, number in tokens.items() if number not in extra}
        return Vocabulary(name, kind, ordinary, {number: token for token, number in tokens.items() if number in extra})

    @property
    def size(self) -> int:
        """The largest id, plus one."""
        return max(max(self.ordinary, default=-1), max(self.added, default=-1)) + 1

    def identity(self) -> VocabularyIdentity:
        """Returns what other processes compare."""
        words = json.dumps(sorted(self.ordinary.items()), separators=(",", ":")).encode()
        return VocabularyIdentity(hashlib.sha256(words).hexdigest(), self.added, self.size)

    def check_draft(self, draft: Vocabulary) -> None:
        """Raises UserError unless `draft` has the ordinary tokens of this vocabulary. The message names the first one
        that differs."""
        ours, theirs = self.ordinary, draft.ordinary
        if ours == theirs:
            return
        first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
        at = f"id {first} is {self._describe(first)} in the target's, {draft._describe(first)} in the draft's"
        same = sum(theirs.get(i) == token for i, token in ours.items())
        if same < FOREIGN_SHARE * max(len(ours), len(theirs)):
            kinds = f"{self.kind} of {len(ours)} tokens and {draft.kind} of {len(theirs)}"
            raise UserError(
                f"target {self.name} and draft {draft.name} have different tokenizers ({kinds}; {at}): a heterogeneous"
                " vocabulary is not supported; use a draft of the target's family"
            )
        raise UserError(
            f"the tokenizers of target {self.name} and draft {draft.name} differ: {at}; use a draft with the same"
            " ordinary tokens"
        )

    def masked_tokens(self, draft: Vocabulary, draft_rows: int) -> tuple[int, ...]:
        """See `VocabularyIdentity.masked_tokens`; only ids of this vocabulary. Raises UserError if the LM head of the
        draft has no row for one of the ordinary tokens."""
        last = max(self.ordinary, default=-1)
        if last >= draft_rows:
            raise UserError(
                f"target {self.name} has {last + 1} ordinary tokens, but the LM head of draft {draft.name} has only"
                f" {draft_rows} rows"
            )
        own = VocabularyIdentity("", self.added, self.size)
        masked = own.masked_tokens(VocabularyIdentity("", draft.added, own.size), draft_rows)
        return tuple(token for token in masked if token < own.size)

    def _describe(self, number: int) -> str:
        if number in self.ordinary:
            return repr(self.ordinary[number])
        return f"the added token {self.added[number]!r}" if number in self.added else "unused"


def describe_masked(masked: tuple[int, ...], target: Mapping[int, str], draft: Mapping[int, str]) -> str | None:
    """Returns the line that reports masked tokens at start, or None if there are none. `target`, `draft`: added tokens
    by id; padding rows beyond the target's vocabulary are not reported."""
    named = [token for token in masked if token in target or token in draft]
    if not named:
        return None
    first = named[0]
    example = f"{target.get(first, 'unused')} in the target's tokenizer, {draft.get(first, 'unused')} in the draft's"
    count = "1 special token" if len(named) == 1 else f"{len(named)} special tokens"
    return f"the draft never proposes {count} on which the tokenizers differ, such as id {first}: {example}"
