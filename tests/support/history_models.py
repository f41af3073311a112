"""Models whose next-token distribution is any function of the whole history, computed through a real KV cache, and
exact sums.

A slot's "key" is its token times a power of the base, so the visible keys of a row add up to a number that encodes its
history: a wrong mask, slot, position or token gives another number, hence another distribution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swiftspec.backends.reference import reference
from swiftspec.cache.model_cache import ModelCache
from swiftspec.config import PopulationConfig
from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.model.config_json import parse_config
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.params import SamplingParams
from swiftspec.runtime.executors.native import NativeModel
from tests.support.roles import SequentialScheduler, make_runner, make_scheduler, request_start

TextDistribution = dict[tuple[int, ...], float]  # text -> mass

POISON = 1e6
SPEC = parse_config(
    {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 2, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 2, "dtype": "float64",
    }
).spec  # fmt: skip


class HistoryModel:
    """Logits that depend on all previous tokens: `sharpness` times a value between -1 and 1."""

    dtype = cache_dtype = torch.float64
    group: TensorParallelGroup | None = None
    fused: NativeModel | None = None
    hidden_layers: tuple[int, ...] = ()
    kv_heads = 1
    cache_shapes = ((1, 1, 2),)  # layers, KV heads, head dimension
    delta_shape = None

    def __init__(self, vocab: int, seed: int, sharpness: float = 1.5, device: str = "cpu") -> None:
        self.spec = replace(SPEC, vocab_size=vocab)
        self.device = torch.device(device)
        self.vocab, self._sharpness = vocab, sharpness
        drawn = torch.rand(2, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self._turns, self._phases = (5 + 7 * drawn[0]).to(device), (6.28 * drawn[1]).to(device)
        self.forwards: list[int] = []

    def forward(self, batch: Batch, cache: ModelCache, *, head: bool = True) -> ForwardOutput:
        self.forwards.append(len(batch))
        keys = cache.kv.k[0, :, 0, :, 0]  # [S, capacity]
        keys.index_put_(
            (batch.sequence, batch.slots), (batch.tokens + 1) * (self.vocab + 1.0) ** batch.positions.double()
        )
        place = torch.arange(cache.capacity, device=self.device)
        width, end = batch.mask.shape[1], batch.kv_len[batch.sequence, None]
        column = place - end + width
        window = (column < 0) | batch.mask.gather(1, column.clamp(0, width - 1))
        window &= place < end
        return ForwardOutput(self.logits(torch.where(window, keys[batch.sequence], 0).sum(1)), None)

    def logits(self, spelled: Tensor) -> Tensor:
        return self._sharpness * torch.sin(spelled[:, None].remainder(1009) * self._turns + self._phases)

    def after(self, history: Sequence[int]) -> Tensor:
        """Logits [V] after a history, computed directly."""
        spelled = sum((token + 1) * (self.vocab + 1.0) ** place for place, token in enumerate(history))
        return self.logits(torch.tensor([spelled], dtype=torch.float64))[0]


def make_worker(
    target: HistoryModel,
    draft: HistoryModel,
    plan: PopulationConfig,
    *,
    max_tokens: int = 16,
    slots: int = 64,
    lag: int = 0,
) -> SequentialScheduler:
    runners = [make_runner(model, reference, context=max_tokens + 16, tree_slots=slots) for model in (target, draft)]
    for runner in runners:
        runner.cache.kv.k.fill_(POISON)
    return make_scheduler(runners[0], runners[1], plan, max_tokens=max_tokens, lag=lag)


def texts(model: HistoryModel, stops: set[int], limit: int) -> Iterator[tuple[int, ...]]:
    """All texts that end at a stop token or at the limit."""
    open_: list[tuple[int, ...]] = [()]
    while open_:
        text = open_.pop()
        for token in range(model.vocab):
            longer = (*text, token)
            if token in stops or len(longer) == limit:
                yield longer
            else:
                open_.append(longer)


def global_power(
    model: HistoryModel, prompt: Sequence[int], sampling: SamplingParams, power: float, stops: set[int], limit: int
) -> TextDistribution:
    """Unnormalised p(text)^power, by enumeration. Texts that the filters exclude are omitted."""
    out: TextDistribution = {}
    for text in texts(model, stops, limit):
        steps = [distribution_after(model, prompt, text[:at], sampling)[token] for at, token in enumerate(text)]
        mass = torch.stack(steps).prod().pow(power).item()
        if mass > 0:
            out[text] = mass
    return out


def local_power(
    model: HistoryModel, prompt: Sequence[int], sampling: SamplingParams, power: float, stops: set[int], limit: int
) -> TextDistribution:
    """The distribution in which each step is normalised separately."""
    out: TextDistribution = {}
    for text in texts(model, stops, limit):
        steps = [filtered(model.after([*prompt, *text[:at]]), sampling) ** power for at in range(len(text))]
        out[text] = torch.stack([p[token] / p.sum() for p, token in zip(steps, text, strict=True)]).prod().item()
    return out


def distribution_after(
    model: HistoryModel, prompt: Sequence[int], text: Sequence[int], sampling: SamplingParams
) -> Tensor:
    """The target's distribution [V] after a text."""
    return filtered(penalised(model.after([*prompt, *text]), prompt, text, sampling), sampling)


def penalised(logits: Tensor, prompt: Sequence[int], text: Sequence[int], p: SamplingParams) -> Tensor:
    """Bias and penalties by their definitions."""
    out = logits.clone()
    for token in range(len(out)):
        out[token] += p.logit_bias.get(token, 0.0)
        if token in (*prompt, *text):
            out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        count = text.count(token)
        out[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return out


def filtered(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The target's distribution [V], by the definitions: temperature, then min-p, top-k, top-p, renormalised each."""
    p = (logits / sampling.temperature).softmax(-1)
    p = torch.where(p < sampling.min_p * p.max(), 0, p)
    ranked = p.argsort(descending=True)
    if sampling.top_k:
        p[ranked[sampling.top_k :]] = 0
    p = p / p.sum()
    before = p[ranked].cumsum(0) - p[ranked]
    p[ranked[before >= sampling.top_p]] = 0
    return p / p.sum()


def normalised(law: TextDistribution) -> TextDistribution:
    whole = sum(law.values())
    return {text: mass / whole for text, mass in law.items()}


def distance(one: TextDistribution, other: TextDistribution) -> float:
    """Total variation."""
    return sum(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in {*one, *other}) / 2


def run(
    worker: SequentialScheduler, prompt: Sequence[int], sampling: SamplingParams, stops: set[int], limit: int
) -> None:
    """Runs to the end."""
    worker.open(request_start(prompt, sampling), stops, limit)
    while worker.launch():
        worker.collect()
    worker.drain()


def population(worker: SequentialScheduler, group: int = 0) -> TextDistribution:
    """The weighted distribution over texts of the group at that index, times its estimate of Z."""
    p = worker.particles
    shares = p.log_weights[group].softmax(0) * p.log_evidence()[group].exp()
    out: TextDistribution = {}
    for row, length, share in zip(p.tokens[group].tolist(), p.length[group].tolist(), shares.tolist(), strict=True):
        text = tuple(row[:length])
        out[text] = out.get(text, 0.0) + share
    return out
