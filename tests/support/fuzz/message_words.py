"""What ranks say to each other, as hypothesis draws it: well formed, damaged, whole but strange, and random."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from swiftspec.distributed.draft.trace_codec import COUNTS, pack_record
from swiftspec.distributed.group.request_state import ModelLimits
from swiftspec.distributed.transport.codec import Words, bytes_to_words, pack_message, text_to_words
from swiftspec.distributed.transport.opcodes import Opcode
from swiftspec.messages import DraftProbs, Proposal, RequestStart, VerifyResult
from swiftspec.params import SamplingParams

BOUNDS = ModelLimits(vocab_size=40, max_model_len=30, max_nodes=6)
TEXT = (3, 1, 4)  # the request that is open; its root is the last token
EDGES = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 4, 5, 39, 40, 64, 65, 2**24, 2**31 - 1])
WORD = EDGES | st.integers(-(2**31), 2**31 - 1)
NEARLY = st.sampled_from([1.5, "1", True, [1], ["a"], [1.5], {"1": "a"}, {"5": 1}])  # of another type than it should be
VALUES = NEARLY | st.recursive(
    st.none() | st.booleans() | st.integers(-(10**400), 10**400) | EDGES | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
Message = tuple[int, Words]


def proposal() -> st.SearchStrategy[Proposal]:
    """Valid ones for the open request, some with what they were drawn from."""

    @st.composite
    def made(draw: st.DrawFn) -> Proposal:
        count = draw(st.integers(1, BOUNDS.max_nodes))
        parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, count)))
        tokens = (TEXT[-1], *draw(st.lists(st.integers(5, 39), min_size=count - 1, max_size=count - 1, unique=True)))
        return Proposal(1, 0, 2, tokens, parents, draw(st.none() | st.just(_drawn(tokens, parents))))

    return made()


def _drawn(tokens: Sequence[int], parents: Sequence[int]) -> DraftProbs | None:
    """Each row names all children, so that every child can have been drawn there."""
    rows = len({*parents[1:]})
    if rows == 0:
        return None
    named = np.tile(np.array(tokens[1:], np.int32), (rows, 1))
    return DraftProbs(named, np.full(named.shape, 1 / named.shape[1], np.float32))


SAMPLING = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.5, 1]),
    top_k=st.integers(0, 9),
    logit_bias=st.dictionaries(st.integers(0, 39), st.floats(-5, 5), max_size=3),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    max_tokens=st.none() | st.integers(1, 9),
    negative_prompt_ids=st.lists(st.integers(0, 39), max_size=3).map(tuple),
)
STEPS = st.sampled_from(["", "eager", "x"])
KEPT = st.sampled_from([None, (), (0,), (0, 0), (2,), (1, 1)])
OPENINGS = st.builds(RequestStart, st.just(1), st.just(TEXT), SAMPLING, st.integers(1, 3), STEPS, KEPT)
TOKENS = st.lists(st.integers(0, 39), min_size=1, max_size=3)
RESULTS = TOKENS.map(lambda tokens: VerifyResult(1, 0, 2, tuple(range(len(tokens))), tuple(tokens)))
JUNK = ("", "[", "[" * 50_000, "{}", "1", '{"request": 1, "round": []}', "\0", "NaN", "9" * 5000)
JUNK_TEXT = st.integers(0, len(JUNK) - 1).map(JUNK.__getitem__)
LINES = JUNK_TEXT.map(text_to_words)


@st.composite
def damaged(draw: st.DrawFn, sound: st.SearchStrategy[Words]) -> Words:
    """Words with a few of them changed, lost or put in."""
    words = list(draw(sound))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(len(words) - 1, 0)))
        words[at : at + draw(st.integers(0, 2))] = draw(st.lists(WORD, max_size=2))
    return words


@st.composite
def bent_opening(draw: st.DrawFn) -> Words:
    """An opening whose parameters are JSON, but of any kind."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(SamplingParams())))
    for name in draw(st.lists(st.sampled_from([*values, "more"]), max_size=2)):
        values[name] = draw(VALUES)
    told = {"steps": draw(st.sampled_from(["", "eager"])), "kept": draw(st.just([0]) | VALUES), "sampling": values}
    whole = st.just(json.dumps(told))
    text = draw(whole | whole | JUNK_TEXT).encode()
    return [1, 2, len(TEXT), *TEXT, len(text), *bytes_to_words(text)]


TOKEN = st.integers(0, 39) | EDGES
PLACE = st.tuples(st.sampled_from([1, 1, 1, 2]), st.just(0), st.sampled_from([2, 2, 2, 3]))  # request, round, prefix


@st.composite
def strange(draw: st.DrawFn) -> Words:
    """A proposal that is whole, but may be about something else, from another root, too large or of no tokens."""
    count = draw(st.integers(1, 8))
    parents = (-1, *(draw(st.integers(0, i - 1)) for i in range(1, count)))
    root = draw(st.just(TEXT[-1]) | TOKEN)
    return pack_message(Proposal(*draw(PLACE), (root, *(draw(TOKEN) for _ in parents[1:])), parents))


@st.composite
def strange_result(draw: st.DrawFn) -> Words:
    """As `strange`."""
    count = draw(st.integers(1, 3) | st.just(40))
    path = draw(st.just(tuple(range(count))) | st.lists(EDGES, min_size=count, max_size=count).map(tuple))
    return pack_message(VerifyResult(*draw(PLACE), path, tuple(draw(TOKEN) for _ in path)))


@st.composite
def strange_opening(draw: st.DrawFn) -> Words:
    """As `strange`."""
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=4) | st.just([1] * 99))
    bias = draw(st.dictionaries(TOKEN, st.just(1.0), max_size=1))
    negative = tuple(draw(st.lists(TOKEN, max_size=1)))
    sampling = SamplingParams(logit_bias=bias, negative_prompt_ids=negative, top_k=draw(st.sampled_from([0, 9, 41])))
    return pack_message(RequestStart(1, tuple(tokens), sampling, 1, draw(STEPS)))


@st.composite
def records(draw: st.DrawFn) -> Words:
    """A round of the draft's lane, whose tree may be none."""
    count, moment = draw(st.integers(1, 4)), st.just(0.5) | st.floats()
    parents = [-1, *(draw(st.integers(-1, i)) for i in range(count - 1))]
    tree = {
        "tokens": np.array([draw(st.integers(-1, 40)) for _ in parents], np.int32),
        "parents": np.array(parents, np.int32), "expanded": np.array(parents) < 0,
        "logprobs": np.array([draw(st.just(0.0) | st.floats(width=32)) for _ in parents], np.float32),
    }  # fmt: skip
    head = {name: draw(st.integers(-1, 3)) for name in COUNTS}
    spans = draw(st.fixed_dictionaries({}, optional={"grow": st.tuples(moment, moment)}))
    forwards = draw(st.lists(st.tuples(moment, moment, EDGES), max_size=2))
    return pack_record(1, draw(st.integers(-1, 2)), head | spans | {"forwards": forwards, "tree": tree})


RANDOM = st.lists(WORD, max_size=20)
OPENING_WORDS = damaged(OPENINGS.map(pack_message)) | bent_opening() | strange_opening() | RANDOM
PROPOSAL_WORDS = damaged(proposal().map(pack_message)) | strange() | RANDOM
RESULT_WORDS = damaged(RESULTS.map(pack_message)) | strange_result() | RANDOM
KIND = st.sampled_from([*map(int, Opcode)]) | WORD
RECORDS = damaged(records()) | records()
BODY = st.one_of(RANDOM, OPENING_WORDS, PROPOSAL_WORDS, RESULT_WORDS, LINES)
DRAFT_SAYS = st.one_of(
    st.tuples(st.just(int(Opcode.PROPOSAL)), st.builds(lambda spent, words: [spent, *words], EDGES, PROPOSAL_WORDS)),
    st.tuples(st.just(int(Opcode.TRACE_RECORD)), RECORDS | LINES),
    st.tuples(st.just(int(Opcode.ERROR)), RANDOM),
    st.tuples(KIND, BODY),
)
TARGET_SAYS = st.one_of(
    st.tuples(st.sampled_from([int(Opcode.DRAFTER_OPEN), int(Opcode.VERIFIER_OPEN)]), OPENING_WORDS),
    st.tuples(st.just(int(Opcode.VERIFY)), PROPOSAL_WORDS),
    st.tuples(st.just(int(Opcode.OBSERVE)), RESULT_WORDS),
    st.tuples(
        st.sampled_from([int(Opcode.SET_DRAFT_STEPS), int(Opcode.MEASURE_STEP), int(Opcode.SET_TRACE)]),
        st.lists(EDGES, max_size=2),
    ),
    st.tuples(KIND, BODY),
)
DRAFT = st.lists(DRAFT_SAYS, max_size=4)
TIMES = st.lists(st.tuples(st.sampled_from([int(Opcode.STEP_TIMES), 99]), st.lists(EDGES, max_size=3)), max_size=2)
NONE_KEPT = OPENINGS.map(lambda o: replace(o, executor="eager", num_cached_tokens=(0,)))
OPENED = NONE_KEPT.map(lambda o: (int(Opcode.DRAFTER_OPEN), pack_message(o)))
OPENED_TARGET = NONE_KEPT.map(
    lambda o: (
        int(Opcode.VERIFIER_OPEN),
        pack_message(replace(o, num_cached_tokens=(0, 0) if o.sampling.guided else (0,))),
    )
)


def after(opened: st.SearchStrategy[Message]) -> st.SearchStrategy[list[Message]]:
    """What is said once a request is open, or before."""
    rest = st.lists(TARGET_SAYS, max_size=4)
    return st.builds(lambda first, more: [first, *more], opened, rest) | rest


NUMBER = st.sampled_from([1, 2])
SHAPE = st.sampled_from(['{"mode": "serial"}', '{"mode": "async", "draft_steps": 2}', '{"mode": 3}', "{", "[]"])
SESSION_SAYS = (
    st.builds(lambda number, text: (int(Opcode.SESSION_OPEN), [number, *text_to_words(text)]), NUMBER, SHAPE)
    | st.builds(lambda number: (int(Opcode.SESSION_SELECT), [number]), NUMBER)
    | st.tuples(
        st.sampled_from([int(Opcode.SESSION_OPEN), int(Opcode.SESSION_SELECT), int(Opcode.SESSION_CLOSE)]), RANDOM
    )
    | st.builds(lambda number: (int(Opcode.SESSION_CLOSE), [number]), NUMBER)
)
BEGUN = [(int(Opcode.SESSION_OPEN), [1, *text_to_words('{"mode": "serial"}')]), (int(Opcode.SESSION_SELECT), [1])]
SESSIONS = st.builds(
    lambda begun, more: [*begun, *more], st.sampled_from([BEGUN, BEGUN[:1], []]),
    st.lists(SESSION_SAYS | OPENED_TARGET | TARGET_SAYS, max_size=6),
)  # fmt: skip
