"""Pairs of vocabularies: which are accepted, which tokens are masked, and what the refusal of others names."""

from __future__ import annotations

import pytest

from swiftspec.errors import UserError
from swiftspec.model.vocabulary import Vocabulary, describe_masked

WORDS = {"a": 0, "b": 1, "c": 2, "d": 3}


def vocabulary(special: dict[str, int], words: dict[str, int] | None = None, name: str = "T") -> Vocabulary:
    words = WORDS if words is None else words
    return Vocabulary.of(name, "Toy", {**words, **special}, special.values())


def masked(target: Vocabulary, draft: Vocabulary, rows: int = 64) -> tuple[int, ...]:
    """Those of a local draft, after the checks."""
    target.check_draft(draft)
    assert target.identity().ordinary == draft.identity().ordinary, "workers compare the same thing"
    return target.masked_tokens(draft, rows)


def test_equal_tokenizers_mask_nothing() -> None:
    both = vocabulary({"<s>": 4, "</s>": 5})
    assert masked(both, both) == () and describe_masked((), both.added, both.added) is None


def test_special_tokens_of_other_names_are_masked() -> None:
    """Llama 3 and Llama 3.2: two of the special tokens were renamed."""
    target = vocabulary({"<|begin|>": 4, "<|reserved_2|>": 5, "<|end|>": 6, "<|reserved_3|>": 7})
    draft = vocabulary({"<|begin|>": 4, "<|pad|>": 5, "<|end|>": 6, "<|eom|>": 7})
    assert masked(target, draft) == (5, 7)
    line = describe_masked((5, 7), target.added, draft.added)
    assert line is not None and "2 special tokens" in line and "id 5: <|reserved_2|>" in line and "<|pad|>" in line


@pytest.mark.parametrize(
    ("target", "draft", "wanted"),
    [
        ({"<s>": 4, "<tool>": 5, "<image>": 6}, {"<s>": 4}, (5, 6)),  # Qwen2.5 and Qwen2: the target has more
        ({"<s>": 4}, {"<s>": 4, "<tool>": 5}, ()),  # beyond the target's vocabulary, whose size holds anyway
        ({"<s>": 4, "<x>": 9}, {"<s>": 4, "<y>": 6}, (6, 9)),  # ids between them are padding of both
        ({"<s>": 5}, {"<s>": 4}, (4, 5)),  # moved
    ],
)
def test_added_tokens_of_another_number(target: dict[str, int], draft: dict[str, int], wanted: tuple[int, ...]) -> None:
    assert masked(vocabulary(target), vocabulary(draft)) == wanted


def test_added_tokens_beyond_the_rows_of_the_draft_are_masked() -> None:
    """A padding token that was added without resizing the model."""
    both = vocabulary({"<s>": 4, "<pad>": 5})
    assert masked(both, both, rows=5) == (5,)
    with pytest.raises(UserError, match="4 ordinary tokens, but the LM head of draft T has only 3 rows"):
        masked(both, both, rows=3)


def test_padding_rows_of_a_worker_are_masked() -> None:
    """A worker does not know the target's vocabulary, so its sessions use all rows of the LM head."""
    target, draft = vocabulary({"<s>": 4, "<a>": 5}).identity(), vocabulary({"<s>": 4, "<b>": 5}).identity()
    assert target.masked_tokens(draft, 8) == (5, 6, 7)
    assert target.masked_tokens(target, 6) == ()
    assert describe_masked((6, 7), target.added, draft.added) is None, "padding is not reported"


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ({"a": 0, "b": 1, "d": 2, "c": 3}, "id 2 is 'c' in the target's, 'd' in the draft's"),
        ({"a": 0, "b": 1, "c": 2}, "id 3 is 'd' in the target's, unused in the draft's"),
        ({"a": 0, "b": 1, "c": 2, "d": 3, "e": 9}, "id 9 is unused in the target's, 'e' in the draft's"),
        ({"a": 0, "b": 1, "c": 2, "d": 5}, "id 3 is 'd' in the target's, the added token '<s>' in the draft's"),
    ],
)
def test_the_first_ordinary_token_that_differs_is_named(words: dict[str, int], first: str) -> None:
    special = {"<s>": 3} if 5 in words.values() else {"<s>": 4}
    target, draft = vocabulary({"<s>": 4}), vocabulary(special, words, "D")
    with pytest.raises(UserError, match="the tokenizers of target T and draft D differ") as caught:
        target.check_draft(draft)
    assert first in str(caught.value) and "\n" not in str(caught.value)
    assert target.identity().ordinary != draft.identity().ordinary


def test_different_tokenizers_are_refused_by_name() -> None:
    target = Vocabulary.of("T", "Qwen2Tokenizer", WORDS, ())
    draft = Vocabulary.of("D", "LlamaTokenizer", {"<unk>": 0, "x": 1, "c": 2}, (0,))
    with pytest.raises(UserError, match="have different tokenizers") as caught:
        target.check_draft(draft)
    words = str(caught.value)
    assert "Qwen2Tokenizer of 4 tokens and LlamaTokenizer of 2" in words and "heterogeneous vocabulary" in words
    assert "id 0 is 'a' in the target's, the added token '<unk>' in the draft's" in words


def test_a_tokenizer_of_added_tokens_only_has_ordinary_ones() -> None:
    """Otherwise any two of them would match."""
    one, other = (Vocabulary.of(name, "Toy", {name: 0}, (0,)) for name in "ab")
    with pytest.raises(UserError, match="id 0 is 'a' in the target's, 'b' in the draft's"):
        one.check_draft(other)
