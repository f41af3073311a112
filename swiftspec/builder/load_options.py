"""How models are loaded, and on what they run: what a caller may say, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, get_args

import torch

from swiftspec.backends import cpu, cuda, library, reference
from swiftspec.backends.cuda.devices import why_no_gpu
from swiftspec.distributed.rank_startup import Progress
from swiftspec.distributed.rpc.endpoint import RpcSecurity
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.config import ModelConfig
from swiftspec.model.float8 import FLOAT8
from swiftspec.model.formats.int8 import Rounding
from swiftspec.model.loader import Kept
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import Transformer
from swiftspec.observe.step_time_emulation import StepTimeEmulation

PREFIX_CACHE_MEMORY_MIB = 1024  # MiB
OpsName = Literal["auto", "reference", "unfused", "cuda"]
RoundingName = Literal["auto", "int8", "native"]
CacheName = Literal["auto", "fp8"]
Side = Literal["target", "draft"]
HeadName = Literal["auto", "int8", "int4", "native"]
ROUNDING_OPS = ("auto", "reference")  # those that multiply rows rounded to int8, on a CPU


class RankLayout(Protocol):
    """What of a job's ranks matters to one of them."""

    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker at HOST:PORT, as a person names it. `flag`: by which it was named. `tokenizer`: the hash that its own
    must have, None: any. `timeout`: seconds for a round."""

    url: str
    flag: str
    security: RpcSecurity
    timeout: float
    tokenizer: bytes | None = None


class LoadOptions(TypedDict, total=False):
    """How the models are loaded. What is left out, or None, is as the models say."""

    dtype: torch.dtype | None
    device: torch.device | str  # cpu if left out; with "cuda" each rank of a machine takes a GPU of its own
    share_device: bool  # more ranks than GPUs are fine
    max_model_len: int | None
    vocab_size: int | None  # the base vocabulary that both tokenizers share; beyond it a head's rows count as -inf
    ops: OpsName  # auto if left out: the fastest that fit; what serve's --ops says of the others
    activations: RoundingName  # auto if left out: int8 for int4 weights in a bfloat16 model on a CPU
    kv_cache_dtype: CacheName  # auto if left out: keys and values in the model's dtype. fp8: as float8 e4m3
    head: HeadName  # auto if left out: the draft's, int8 where activations are, int4 on the CUDA operators
    load: LoadModel  # what makes a model of a directory; load_model if left out
    emulate: StepTimeEmulation | None  # step times that the models are to take at least
    trace: Path | None  # the file for rank 0's rounds; other ranks only look whether there is one
    progress: Progress | None
    note: Callable[[str], None] | None  # hears in a line what the models run on where that is not what is fastest
    packed_cache: Path | None  # where what a CPU has packed is kept for the next start; nowhere if left out
    only: Side | None  # of the pair this process runs that one, as a worker
    sessions: int  # how many caches a worker's model has room for; 1 if left out
    draft_worker: WorkerAddress | None  # where the draft's model is, should it be at a worker's
    prefix_cache_memory: int  # MiB for keys and values of earlier texts, of both models and all their ranks; 1024 if left out


class LoadModel(Protocol):
    """What model.loader.load_model does."""

    def __call__(
        self,
        path: Path,
        /,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Any,
        max_positions: int,
        group: TensorParallelGroup | None,
        rounding: Rounding,
        cache_dtype: torch.dtype | None,
        progress: Progress | None,
        kept: Kept | None,
    ) -> Transformer: ...


def select_operators(name: OpsName, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The module of operators that a model runs on. Raises UserError where those that were asked for cannot run it."""
    if name == "cuda":
        cuda.check_supported(config, dtype, device)
        return cuda
    if name == "auto" and device.type == "cuda":
        return cuda if why_not_cuda(config, dtype, device) is None else library
    if name == "unfused":
        return library
    return cpu if name == "auto" and cpu.fits(config, dtype, device) else reference


def why_not_cuda(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the CUDA operators cannot run a model, in one line; None: they can."""
    try:
        cuda.check_supported(config, dtype, device)
    except UserError as error:
        return str(error)
    return None


def check_rounding(activations: RoundingName, head: HeadName, ops: OpsName, device: torch.device) -> None:
    """Raises UserError where int8 is asked for and the operators have none."""
    asked = {"activations": activations, "head": head}
    for name, value in asked.items():
        if value == "int8" and (device.type != "cpu" or ops not in ROUNDING_OPS):
            where = f"ops {ops}" if device.type == "cpu" else f"device {device.type}"
            raise UserError(f"{name} int8 is for the operators of a CPU, not for {where}: leave it out")
    if head == "int8" and activations == "native":
        raise UserError("head int8 rounds the rows that it meets, and activations native rounds none: leave one out")


def resolve_cache_dtype(name: CacheName, ops: OpsName, device: torch.device) -> torch.dtype | None:
    """The type of stored keys and values; None: as a model computes. Raises UserError on one that the operators do not
    have."""
    if name not in get_args(CacheName):
        raise UserError(f"kv_cache_dtype must be one of {', '.join(get_args(CacheName))}, not {truncated_repr(name)}")
    if name == "fp8" and device.type == "cpu" and ops == "auto":
        raise UserError("kv_cache_dtype fp8 is for a GPU, and on a CPU for ops reference: take that, or leave it out")
    return FLOAT8 if name == "fp8" else None


def rank_device(device: torch.device, ranks: RankLayout | None, share: bool) -> torch.device:
    """This rank's GPU among those of its machine."""
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError(f"device cuda: PyTorch finds no NVIDIA GPU here; take device cpu, or mend this: {why_no_gpu()}")
    if device.index is not None or ranks is None:
        return device
    count = torch.cuda.device_count()
    if ranks.local_size > count and not share:
        raise UserError(
            f"{ranks.local_size} ranks on a machine with {count} GPUs: start fewer, or let ranks share one with"
            " --share-gpus"
        )
    return torch.device("cuda", ranks.local_rank % count)
