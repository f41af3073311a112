"""The native extension: it imports without torch, reports its build, and its noise is the documented hash."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec import _C

U32 = 2**32 - 1
U64 = 2**64 - 1
EDGES32 = [0, 1, 2**31 - 1, 2**31, U32]
Array = np.ndarray


def mix(x: Array) -> Array:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(15))
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def u32(value: int) -> Array:
    return np.array([value & U32], dtype=np.uint32)


def reference(seed: int, stream: int, positions: Array, vocab: int) -> Array:
    key = mix(mix(u32(seed) + u32(0x9E3779B9)) ^ u32(seed >> 32))
    key = mix(key + u32(stream * 0x9E3779B9))
    key = mix(key ^ positions.view(np.uint32))[:, None]
    tokens = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B9)
    return mix(mix(key + tokens) ^ key)


def native(seed: int, stream: int, positions: Array, vocab: int) -> Array:
    out = np.zeros((len(positions), vocab), dtype=np.uint32)
    _C.noise_bits(seed, stream, positions, out)
    return out


def as_int32(positions: list[int]) -> Array:
    return np.array(positions, dtype=np.uint32).view(np.int32)


@pytest.mark.parametrize("seed", [0, 1, U32, 2**32, 2**63, U64])
@pytest.mark.parametrize("stream", EDGES32)
def test_noise_at_the_edges(seed: int, stream: int) -> None:
    positions = as_int32(EDGES32)
    assert np.array_equal(native(seed, stream, positions, 67), reference(seed, stream, positions, 67))


@settings(deadline=None)
@given(
    seed=st.integers(0, U64),
    stream=st.integers(0, U32),
    positions=st.lists(st.integers(0, U32), max_size=5),
    vocab=st.integers(1, 300),
)
def test_noise_is_the_hash(seed: int, stream: int, positions: list[int], vocab: int) -> None:
    rows = as_int32(positions)
    assert np.array_equal(native(seed, stream, rows, vocab), reference(seed, stream, rows, vocab))


def test_known_values() -> None:
    """Golden values: the noise of a seed must never change, since outputs would change."""
    got = native(1234567890123456789, 3, as_int32([0, 4095]), 3)
    assert got.tolist() == [[3968807090, 3383403090, 2012174407], [1556007263, 859701007, 918547090]]


def test_noise_looks_uniform_and_independent() -> None:
    bits = native(7, 0, np.arange(64, dtype=np.int32), 4096)
    uniform = bits / 2.0**32
    assert abs(uniform.mean() - 0.5) < 4 / math.sqrt(12 * bits.size)
    for shift in (1, 2, 64):
        correlation = np.corrcoef(uniform[:, :-shift].ravel(), uniform[:, shift:].ravel())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(bits.size)
    assert abs(np.corrcoef(uniform[:-1].ravel(), uniform[1:].ravel())[0, 1]) < 5 / math.sqrt(bits.size)
    other = native(7, 1, np.arange(64, dtype=np.int32), 4096)
    assert not np.any(np.all(bits == other, axis=1))


@pytest.mark.parametrize("bits", [0, 1, 2**16, 2**31, U32 - 256, U32 - 1, U32])
def test_gumbel(bits: int) -> None:
    v32 = min((np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1 - 2.0**-24))
    got = np.zeros(1, np.float32)
    _C.gumbel_of(np.array([bits], np.uint32), got)
    assert float(got[0]) == pytest.approx(-math.log(-math.log1p(-float(v32))), rel=1e-5, abs=1e-6)
    assert math.isfinite(got[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"positions": np.zeros(2)}, ValueError, r"positions: expected int32\[\*\] on cpu, got float64\[2\]$"),
        ({"positions": np.zeros((2, 1), np.int32)}, ValueError, r"positions: .*, got int32\[2, 1\]$"),
        ({"positions": np.zeros(4, np.int32)[::2]}, ValueError, r"positions: .*, got int32\[2\], not contiguous$"),
        ({"out": np.zeros((3, 4), np.uint32)}, ValueError, r"out: expected int32\[2, \*\] on cpu, got uint32\[3, 4\]$"),
        ({"out": np.zeros((2, 4), np.float16)}, ValueError, r"out: .* got float16\[2, 4\]$"),
        ({"out": 4}, TypeError, "incompatible"),
        ({"out": None}, TypeError, "incompatible"),
        ({"seed": -1}, TypeError, "incompatible"),
        ({"seed": 2**64}, TypeError, "incompatible"),
        ({"stream": -1}, TypeError, "incompatible"),
        ({"stream": 2**32}, TypeError, "incompatible"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    out = np.full((2, 4), 99, dtype=np.uint32)
    good: dict[str, Any] = {"seed": 1, "stream": 0, "positions": np.zeros(2, dtype=np.int32), "out": out}
    with pytest.raises(error, match=message):
        _C.noise_bits(**(good | change))
    assert (out == 99).all()


def test_zero_rows_need_no_work() -> None:
    native(1, 0, np.zeros(0, np.int32), 10)


def test_build_info() -> None:
    assert "\n" not in _C.build_info
    if _C.cuda_built:
        assert _C.build_info.endswith(", ".join(f"sm_{arch}" for arch in _C.cuda_archs))
        assert hasattr(_C, "gumbel_rows_cuda")
    else:
        assert _C.build_info.startswith("CUDA kernels left out: ") and _C.cuda_archs == ()
        assert not hasattr(_C, "gumbel_rows_cuda")


@pytest.mark.slow
def test_extension_needs_no_torch_and_no_driver() -> None:
    code = "import sys, swiftspec._C; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert _C.__file__ is not None
    binary = Path(_C.__file__).read_bytes()
    for library in (b"libtorch", b"libc10", b"libcudart.so."):
        assert library not in binary
