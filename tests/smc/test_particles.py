"""The state of a population: genealogy, slots and KV, with each slot's KV replaced by a number that encodes its
path."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swiftspec.backends.reference import reference, resampling
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import PopulationConfig
from swiftspec.smc.particles import DEAD, LIVE, SHARED, Particles
from tests.support.cases import examples

N, K, VOCAB, STOP, LIMIT, SLOTS = 3, 2, 4, 3, 24, 48
PROMPT = [1, 2, 1]
POISON = -7.0


def spell(tokens: list[int]) -> float:
    """A number for a path, unique among paths of these lengths."""
    return float(sum((token + 1) * (VOCAB + 1) ** place for place, token in enumerate(tokens)))


@dataclass(frozen=True)
class Row:
    """The expected state of a row: its nodes (each is a sampled token) and whether it is unfinished."""

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    finished: bool = False
    weight: float = 0.0


class Population(RuleBasedStateMachine):
    """Fan-out, extend, resample, finish, commit and free, in any order, against a model in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = ModelCache(KVCache(1, 1, 1, 80, reference.make_slot_mover, dtype=torch.float64))
        self.particles = Particles(PopulationConfig(N, K), SLOTS, LIMIT)
        self.bytes_moved = 0
        self.fan_out()

    def fan_out(self) -> None:
        self.cache.reset()
        self.poison()
        first = self.cache.append_prefix(len(PROMPT) - 1)
        for place in range(first, len(PROMPT) - 1):
            self.kv[place] = spell(PROMPT[: place + 1])
        self.cache.append_tree(1)
        before = self.kv.clone()
        self.particles.open(0, PROMPT[-1], len(PROMPT) - 1, LIMIT)
        assert torch.equal(before, self.kv)
        self.rows: list[Row] = [Row((0,), ())] * N
        self.path = {0: list(PROMPT)}  # node -> all tokens up to it
        self.place = {0: 0}  # node -> tree slot; those promoted are negative
        self.written: set[int] = set()  # nodes with KV

    @property
    def kv(self) -> torch.Tensor:
        return self.cache.kv.k[0, 0, 0, :, 0]

    def poison(self) -> None:
        self.kv[self.cache.kv_len()[0] :] = POISON

    def tail(self, row: Row) -> tuple[int, int]:
        return row.nodes[-2:][0], row.nodes[-1]  # at the fan-out both are the last token of the prompt

    @rule()
    def start_over(self) -> None:
        self.fan_out()

    @precondition(lambda self: self.cache.tree_len + N * (K + 1) <= SLOTS)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        token = st.integers(0, VOCAB - 1) if data.draw(st.booleans()) else st.integers(0, STOP - 1)
        drafts = data.draw(st.lists(st.lists(token, min_size=K, max_size=K), min_size=N, max_size=N))
        accepted = data.draw(st.lists(st.integers(0, K), min_size=N, max_size=N))
        extra = data.draw(st.lists(token, min_size=N, max_size=N))
        p, base, start = self.particles, self.cache.append_tree(N * (K + 1)), self.cache.prefix_len[0]
        slots = p.new_slots()
        assert slots[0].tolist() == [[base + j * N + i for j in range(K + 1)] for i in range(N)]
        for i, row in enumerate(self.rows):  # the round writes the KV of the tails and of the draft tokens
            if not row.finished:
                assert p.tail_slots[0, i].tolist() == [self.place[node] for node in self.tail(row)]
                assert p.tail_tokens[0, i].tolist() == [self.path[node][-1] for node in self.tail(row)]
                assert p.tail_positions[0, i].tolist() == [len(self.path[node]) - 1 for node in self.tail(row)]
                for node in self.tail(row):
                    self.kv[start + self.place[node]] = spell(self.path[node])
                    self.written.add(node)
            for j in range(K):
                self.kv[start + base + j * N + i] = spell([*self.path[row.nodes[-1]], *drafts[i][: j + 1]])
        stops = torch.zeros(1, VOCAB, dtype=torch.bool)
        stops[0, STOP] = True
        terms = [[float(10 * i + j + 1) for j in range(K + 1)] for i in range(N)]
        log_terms = torch.tensor([terms], dtype=torch.float64)
        p.append_round(torch.tensor([drafts]), torch.tensor([accepted]), torch.tensor([extra]), log_terms, stops, SLOTS)
        for i, row in enumerate(self.rows):
            if not row.finished:
                new = [*drafts[i][: accepted[i]], extra[i]]
                self.rows[i] = self.longer(row, new, [base + j * N + i for j in (*range(accepted[i]), K)], terms[i])

    def longer(self, row: Row, new: list[int], slots: list[int], terms: list[float]) -> Row:
        nodes, tokens, weight = list(row.nodes), list(row.tokens), row.weight
        for j, token in enumerate(new):
            node = len(self.path)
            self.path[node], self.place[node] = [*self.path[nodes[-1]], token], slots[j]
            if j < len(new) - 1:
                self.written.add(node)
            nodes.append(node)
            tokens.append(token)
            weight += terms[j]
            if token == STOP or len(tokens) == LIMIT:
                return Row(tuple(nodes), tuple(tokens), True, weight)
        return Row(tuple(nodes), tuple(tokens), False, weight)

    @rule(
        values=st.lists(st.floats(-6, 6), min_size=N, max_size=N), uniform=st.floats(0.01, 0.99), always=st.booleans()
    )
    def resample(self, values: list[float], uniform: float, always: bool) -> None:
        p, before = self.particles, self.cache.kv.k.clone()
        p.log_weights.copy_(torch.tensor([values], dtype=torch.float64))
        rows = [replace(row, weight=value) for row, value in zip(self.rows, values, strict=True)]
        threshold = 1.0 if always else 0.5
        u = torch.tensor([uniform], dtype=torch.float64)
        shares = p.log_weights.softmax(-1)
        poor = float(resampling.effective_sample_size(shares)) < threshold * N
        source = resampling.systematic_resample(shares, u)[0].tolist()
        evidence = float(p.log_evidence())
        p.resample(threshold, u, SLOTS)
        self.rows = [replace(rows[i], weight=0.0) for i in source] if poor else rows
        assert abs(float(p.log_evidence()) - evidence) < 1e-9, "resampling changes no estimate"
        assert torch.equal(self.cache.kv.k, before), "resampling moves no KV"

    @rule()
    def promote_and_free(self) -> None:
        p = self.particles
        state = p.slot_states(SLOTS)[0][: self.cache.tree_len].tolist()
        live = [row for row in self.rows if not row.finished]
        path = [slot for slot, kind in enumerate(state) if kind == SHARED]
        keep = [slot for slot, kind in enumerate(state) if kind == LIVE]
        assert len(path) + len(keep) + state.count(DEAD) == self.cache.tree_len
        tails = {self.place[node] for row in live for node in self.tail(row)}
        assert not tails & set(path), "what is not written yet stays"
        self.cache.commit(path, keep)
        p.compact(0, path, keep)
        self.poison()
        moved = {old: new for new, old in enumerate(keep)} | dict.fromkeys(path, -1)
        nodes = {node for row in live for node in row.nodes}
        self.place = {node: moved[slot] if slot >= 0 else -1 for node, slot in self.place.items() if node in nodes}

    @invariant()
    def books_balance(self) -> None:
        p, start = self.particles, self.cache.prefix_len[0]
        counts = [0] * SLOTS
        hands: dict[int, int] = {}
        table = [row.nonzero().flatten().tolist() for row in p.mask[0, :, :SLOTS]]
        for i, row in enumerate(self.rows):
            length = int(p.length[0, i])
            assert p.tokens[0, i, :length].tolist() == list(row.tokens)
            assert bool(p.finished[0, i]) == row.finished and abs(float(p.log_weights[0, i]) - row.weight) < 1e-9
            assert bool(p.stopped[0, i]) == (row.tokens[-1:] == (STOP,))
            mine = [] if row.finished else [node for node in row.nodes if self.place[node] >= 0]
            slots = [self.place[node] for node in mine]
            assert p.mask[0, i].nonzero().flatten().tolist() == slots == sorted(slots)
            assert table[i] == slots
            for node, slot in zip(mine, slots, strict=True):
                counts[slot] += 1
                assert hands.setdefault(slot, node) == node, "a slot in two hands"
                if node in self.written:
                    assert float(self.kv[start + slot]) == spell(self.path[node])
            if not row.finished:  # and the promoted ones are the prefix
                whole = self.path[row.nodes[-1]]
                assert [float(x) for x in self.kv[:start]] == [spell(whole[: at + 1]) for at in range(start)]
        assert p.mask[0].sum(0).tolist() == counts

    def teardown(self) -> None:
        """When all have finished, all slots are free."""
        stops = torch.ones(1, VOCAB, dtype=torch.bool)
        self.promote_and_free()
        if self.cache.tree_len + N * (K + 1) <= SLOTS:
            self.cache.append_tree(N * (K + 1))
            zeros = torch.zeros(1, N, dtype=torch.int64)
            terms = torch.zeros(1, N, K + 1, dtype=torch.float64)
            self.particles.append_round(torch.zeros(1, N, K, dtype=torch.int64), zeros + K, zeros, terms, stops, SLOTS)
            assert (self.particles.slot_states(SLOTS)[0] == DEAD).all()


Population.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=15)
TestPopulation = Population.TestCase


def test_the_common_prefix_counts_finished_rows_too() -> None:
    """In two groups that differ only in the stop token of the first."""
    p = Particles(PopulationConfig(2, 1, smc_groups=2), 16, 8)
    for group in range(2):
        p.open(group, 0, 0, 8)
    stops = torch.tensor([[False, False, True], [False, False, False]])
    terms = torch.zeros(2, 2, 2, dtype=torch.float64)
    whole, ones = torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, 1, dtype=torch.int64)
    p.append_round(ones, whole, torch.tensor([[0, 2], [0, 2]]), terms, stops, 16)
    assert p.common_lengths().tolist() == [1, 1] and p.finished.tolist() == [[False, True], [False, False]]
    p.append_round(ones, whole, whole, terms, stops, 16)
    assert p.length.tolist() == [[4, 2], [4, 4]] and p.common_lengths().tolist() == [1, 1]


def test_a_group_is_resampled_by_its_own_weights() -> None:
    """A batch equals each group by itself; a flat one is unchanged."""
    dice = torch.Generator().manual_seed(1)
    weighed = 3 * torch.randn(4, 5, dtype=torch.float64, generator=dice)
    weighed[2] = 0
    uniform = torch.rand(4, dtype=torch.float64, generator=dice)
    together = Particles(PopulationConfig(5, 1, smc_groups=4), 16, 8)
    alone = [Particles(PopulationConfig(5, 1), 16, 8) for _ in range(4)]
    marks = torch.arange(20).view(4, 5, 1).expand_as(together.tokens)
    for p, some in [(together, slice(None)), *((p, slice(g, g + 1)) for g, p in enumerate(alone))]:
        p.log_weights.copy_(weighed[some])
        p.tokens.copy_(marks[some])
        p.resample(0.5, uniform[some], 16)
    assert torch.equal(together.tokens, torch.cat([p.tokens for p in alone]))
    assert torch.equal(together.log_z, torch.cat([p.log_z for p in alone]))
    assert together.resampled.tolist()[2] == 0 and torch.equal(together.tokens[2], marks[2])
