"""A model sharded over any number of ranks gives the logits of one rank, bitwise identical on all ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftspec import _C
from swiftspec.backends.cpu import cpu as host
from swiftspec.backends.reference import reference
from swiftspec.cache.kv import KVCache
from swiftspec.cache.model_cache import ModelCache
from swiftspec.distributed.collectives.torch_dist import sum_in_rank_order
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.loader import load_model
from swiftspec.model.packed_model import PackedMlp
from swiftspec.model.shard import Shard
from swiftspec.model.tensor_parallel import TensorParallelGroup
from tests.model.test_loader import quantise
from tests.support.ranks import Pool
from tests.support.thread_group import on_ranks
from tests.support.tiny_checkpoints import chain, make_checkpoint

TOKENS = [5, 17, 3, 29, 11, 8, 2, 30, 44, 1]
SIZES = range(1, 8)


def logits(
    path: Path, group: TensorParallelGroup | None, dtype: torch.dtype = torch.float64, ops: Any = reference
) -> Tensor:
    """All logits of a prompt, gathered: the first rows as one chunk, the rest row by row."""
    model = load_model(path, dtype=dtype, ops=ops, max_positions=64, group=group)
    spec, mixer = model.spec, model.spec.layer.attention
    cache = ModelCache(KVCache(len(spec.layers), model.kv_heads, mixer.head_dim, 32, ops.make_slot_mover, dtype=dtype))
    rows: list[Tensor] = []
    for first, last in ((0, 7), (7, 8), (8, len(TOKENS))):
        out = model.forward(chain(TOKENS[first:last], first), cache).logits
        assert out is not None
        rows.append(out)
    local = torch.cat(rows)
    if group is None:
        assert model.kv_heads == mixer.num_kv_heads and model.group is None
        return local
    whole = torch.cat(group.all_gather(local).unbind(0), -1)
    assert (whole[:, spec.vocab_size :] == 0).all(), "rows of the head beyond the vocabulary are zeros"
    return whole[:, : spec.vocab_size]


def equal_on_ranks(path: Path, sizes: Any = SIZES) -> None:
    want = logits(path, None)
    for size in sizes:
        ranks = on_ranks(size, lambda group: logits(path, group))
        for other in ranks[1:]:
            assert torch.equal(other, ranks[0])
        torch.testing.assert_close(ranks[0], want, rtol=1e-10, atol=1e-10)


CASES: list[dict[str, Any]] = [
    {"num_attention_heads": 8, "num_key_value_heads": 2},
    {"num_attention_heads": 8, "num_key_value_heads": 8, "tie": True, "vocab": 65},
    {"num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 48, "intermediate_size": 100},
    {"family": "qwen2", "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 56},
    {"family": "qwen2", "num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56, "tie": True},
    {"family": "qwen3", "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 16},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(v) for v in case.values()))
def test_any_number_of_ranks_equals_one(tmp_path: Path, case: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, dtype=torch.float64, **case)
    equal_on_ranks(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["awq", "pack-quantized"])
@pytest.mark.parametrize(("width", "group"), [(8, 32), (32, 32), (32, 64), (64, 64), (32, 128), (64, 128)])
def test_int4(tmp_path: Path, layout: str, width: int, group: int) -> None:
    path = tmp_path / "model"
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": width}
    make_checkpoint(path, dtype=torch.float64, layers=1, hidden_size=128, intermediate_size=384, **heads)
    quantise(path, layout, group=group)
    equal_on_ranks(path, (2, 3, 5))


def test_int4_with_biases_and_some_parts_dense(tmp_path: Path) -> None:
    path = tmp_path / "model"
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 16}
    make_checkpoint(path, family="qwen2", dtype=torch.float64, hidden_size=64, intermediate_size=96, **heads)
    quantise(path, "awq", ("k_proj", "layers.1.mlp.down"))
    equal_on_ranks(path)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_native_operators_on_a_shard(tmp_path: Path, size: int) -> None:
    """bfloat16 rounds each rank's partial sum, so the logits are close to those of one rank, not equal."""
    if _C.level() == "none":
        pytest.skip("there are no native operators here")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    make_checkpoint(tmp_path, family="qwen2", dtype=torch.float32, hidden_size=64, intermediate_size=112, **heads)
    exact = logits(tmp_path, None, torch.float32)
    one = logits(tmp_path, None, torch.bfloat16, host)
    ranks = on_ranks(size, lambda group: logits(tmp_path, group, torch.bfloat16, host))
    assert all(torch.equal(other, ranks[0]) for other in ranks)
    assert (ranks[0] - exact).norm() <= 1.5 * (one - exact).norm()


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_native_stack_sums_over_its_ranks_as_its_operators_do(
    tmp_path: Path, pool: Pool, dtype: str, family: str
) -> None:
    if _C.level() == "none":
        pytest.skip("there are no native operators here")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
    make_checkpoint(tmp_path, family=family, dtype=torch.float32, hidden_size=64, intermediate_size=112, **heads)
    work = {"model": str(tmp_path), "tokens": TOKENS, "dtype": dtype, "native": True}
    for size in (1, 2):
        fused, stepped = (pool.run(size, "logits", **work, fused=fused) for fused in (True, False))
        assert {rank["bits"] for rank in fused} == {stepped[0]["bits"]}


def test_padding_contributes_nothing(tmp_path: Path) -> None:
    """Every output that is padding is an exact zero, and the weights of the next product that correspond to it are
    zero."""
    make_checkpoint(tmp_path, dtype=torch.float64, num_attention_heads=7, num_key_value_heads=1, hidden_size=56,
                    attention_bias=True, mlp_bias=True)  # fmt: skip
    seen: list[str] = []

    class Spy:
        """The reference operators, with poison values wherever the shard has padding."""

        def __getattr__(self, name: str) -> Any:
            return getattr(reference, name)

        def __init__(self, shard: Shard) -> None:
            self.shard = shard.layers[0]

        def qkv_attention(self, x: Tensor, norm: Any, packed: Any, *rest: Any) -> Tensor:
            return self.tree_attention(reference.norm_linear(x, norm, packed), *rest)

        def tree_attention(self, qkv: Tensor, plan: Any, layer: int, *rest: Any) -> Tensor:
            assert (qkv[:, self.shard.qkv < 0] == 0).all()
            out = reference.tree_attention(qkv, plan, layer, *rest)
            out[:, self.shard.o < 0] = 1e30
            seen.append("heads")
            return out

        def mlp(self, x: Tensor, norm: Any, weights: PackedMlp, residual: Tensor, **rest: Any) -> Tensor:
            gated = reference.norm_swiglu(x, norm, weights.gate_up)
            assert (gated[:, self.shard.down < 0] == 0).all()
            gated[:, self.shard.down < 0] = 1e30
            seen.append("mlp")
            return reference.linear_residual(
                gated, weights.down, residual, rest["reduce"], rest["output_norm"], rest["multiplier"]
            )

    config = read_config(tmp_path)
    want = logits(tmp_path, None)
    for size in (3, 5):
        assert any((Shard.of(config, rank, size).layers[0].o < 0).any() for rank in range(size))
        got = on_ranks(size, lambda group: logits(tmp_path, group, ops=Spy(Shard.of(config, group.rank, group.size))))
        torch.testing.assert_close(got[0], want, rtol=1e-10, atol=1e-10)
    assert set(seen) == {"heads", "mlp"}


def test_hidden_states_are_complete_on_every_rank(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype=torch.float64, num_attention_heads=8, num_key_value_heads=2)

    def hidden(group: TensorParallelGroup | None) -> Tensor:
        model = load_model(
            tmp_path, dtype=torch.float64, ops=reference, max_positions=64, group=group, hidden_layers=(0, 1)
        )
        head_dim, hidden_size = model.spec.layer.attention.head_dim, model.spec.hidden_size
        kv = KVCache(2, model.kv_heads, head_dim, 32, reference.make_slot_mover, dtype=torch.float64)
        states = model.forward(chain(TOKENS), ModelCache(kv)).hidden
        assert states is not None and states.shape == (len(TOKENS), 2, hidden_size)
        return states

    one, other = on_ranks(2, hidden)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, hidden(None), rtol=1e-10, atol=1e-10)


def test_more_ranks_than_heads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(UserError, match="4 query heads cannot be sharded over 5 ranks; use at most 4"):
        on_ranks(5, lambda group: logits(tmp_path, group))


def test_sums_are_in_rank_order_and_rounded_once() -> None:
    parts = torch.tensor([[1e8, 256.0], [1.0, 1.0], [-1e8, 1.0]])
    assert sum_in_rank_order(parts).tolist() == [0.0, 258.0]
    assert sum_in_rank_order(parts.flip(0)).tolist() == [0.0, 258.0]
    assert sum_in_rank_order(parts[[0, 2, 1]]).tolist() == [1.0, 258.0]
    assert sum_in_rank_order(parts.bfloat16()[:, 1:]).tolist() == [258.0], "256 + 1 is 256 in bfloat16"
    assert sum_in_rank_order(parts.double()).tolist() == [1.0, 258.0]


@pytest.mark.parametrize("size", range(1, 9))
def test_sums_have_the_bits_of_additions_one_by_one(size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        parts = (torch.randn(size, 33, 7, dtype=torch.float64) * 1e3).to(dtype)
        want = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            want += part.to(wide)
        for one in (None, torch.ones(1, dtype=wide)):
            found = sum_in_rank_order(parts, one)
            assert found.dtype == dtype and torch.equal(found, want.to(dtype))


RANK = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from swiftspec.errors import RankLost
from swiftspec.distributed.collectives.torch_dist import TorchDistGroup
from swiftspec.distributed.collectives.torch_dist import sum_in_rank_order

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 3)
torch.set_num_threads(1)

def join(name, size, seconds):
    return TorchDistGroup.join(store, name, rank, size, device="cpu", timeout=timedelta(seconds=seconds))

def part(rank, dtype, rows=4):
    return torch.randn(rows, 33, generator=torch.Generator().manual_seed(rank)).mul(10).to(dtype)

for size in (3, 2):
    if rank >= size:
        sys.exit()
    group = join(f"of {size}", size, 60)
    assert (group.rank, group.size) == (rank, size) and not group.captures(torch.ones(1))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        parts = torch.stack([part(r, dtype) for r in range(size)])
        assert torch.equal(group.all_gather(part(rank, dtype)), parts)
        strided = part(rank, dtype).T.contiguous().T
        assert torch.equal(group.all_reduce(strided), sum_in_rank_order(parts))
        for rows in (32, 33, 70):  # the last are slices of the ranks, of which one is padded
            parts = torch.stack([part(r, dtype, rows) for r in range(size)])
            assert torch.equal(group.all_reduce(part(rank, dtype, rows).T.contiguous().T), sum_in_rank_order(parts))
    ids = torch.full((2, 3), rank)
    assert group.all_gather(ids)[:, 0, 0].tolist() == list(range(size))
    group.close()

def fails(name):
    try:
        group.all_reduce(torch.ones(1, 2))
    except RankLost as error:
        assert "\\n" not in str(error) and str(error).startswith(f"group {name}: rank 0 of 2: all_gather of [1, 2]")
        group.close()
    else:
        raise AssertionError("nobody answered, yet there is a sum")

group = join("silent", 2, 3)
if rank == 0:
    fails("silent")
    store.set("heard", "yes")
else:
    store.wait(["heard"])
    group.close()
group = join("killed", 2, 3600)  # the test ends after 100 s
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
fails("killed")
try:
    join("alone", 2, 1)
except RankLost as error:
    assert "\\n" not in str(error) and str(error).startswith("group alone: rank 0 of 2 could not join"), error
print("done")
"""


@pytest.mark.slow
def test_real_ranks(tmp_path: Path) -> None:
    """Three processes, then two of them: sums are bitwise identical; a silent or dead peer is an error within the
    timeout."""
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    try:
        results = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    codes = [process.returncode for process in ranks]
    assert codes == [0, -9, 0], b"\n".join(err for _, err in results).decode()[-3000:]
    assert results[0][0].strip() == b"done"
