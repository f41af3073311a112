"""How models are loaded and on what they run: the caller's options, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict, get_args

import torch

from swiftspec.backends import cpu, cuda, reference, unfused
from swiftspec.backends.cuda.devices import why_no_gpu
from swiftspec.distributed.rank_startup import Progress
from swiftspec.distributed.rpc.endpoint import RpcSecurity
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.config import ModelConfig
from swiftspec.model.float8 import FLOAT8
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.loader import PackedWeightSource
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import Transformer
from swiftspec.observe.step_time_emulation import StepTimeEmulation

PREFIX_CACHE_MEMORY_MIB = 1024
OpsName = Literal["auto", "reference", "unfused", "cuda"]
ActivationsName = Literal["auto", "int8", "native"]
CacheName = Literal["auto", "fp8"]
Side = Literal["target", "draft"]
HeadName = Literal["auto", "int8", "int4", "native"]
ROUNDING_OPS = ("auto", "reference")  # operators that multiply int8 activations, on a CPU


class RankLayout(Protocol):
    """A rank's position among the ranks of its job and of its machine."""

    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def local_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """A worker at HOST:PORT, as the user named it.

    `flag`: the command-line flag that named it, for messages.
    `timeout`: seconds per round.
    `tokenizer`: hash that the worker's tokenizer must have; None: any.
    """

    url: str
    flag: str
    security: RpcSecurity
    timeout: float
    tokenizer: bytes | None = None


class LoadOptions(TypedDict, total=False):
    """How the models are loaded. For an option that is absent or None the model's own value is used."""

    dtype: torch.dtype | None
    device: torch.device | str  # default cpu; with "cuda" each rank of a machine takes its own GPU
    share_device: bool  # allows more ranks than GPUs
    max_model_len: int | None
    vocab_size: int | None  # base vocabulary that both tokenizers share; logits beyond it count as -inf
    ops: OpsName  # default auto: the fastest that fit; see --ops of `swiftspec serve`
    activations: ActivationsName  # default auto: int8 for int4 weights in a bfloat16 model on a CPU
    kv_cache_dtype: CacheName  # default auto: the model's dtype; fp8: float8 e4m3
    head: HeadName  # default auto: draft only, int8 if activations are, int4 on the CUDA operators
    load: LoadModel  # loads a model directory; default load_model
    emulate: StepTimeEmulation | None  # minimum step times of the models
    trace: Path | None  # trace file of rank 0; other ranks only check whether it is set
    progress: Progress | None
    note: Callable[[str], None] | None  # receives a line if a model does not run on the fastest operators
    packed_cache: Path | None  # folder that keeps packed weights for the next start; default none
    only: Side | None  # the only model of the pair that this process runs, as a worker
    sessions: int  # number of caches of a worker's model; default 1
    draft_worker: WorkerAddress | None  # the worker that runs the draft, if it is remote
    prefix_cache_memory: int  # MiB for the prefix cache of both models on all ranks; default 1024


class LoadModel(Protocol):
    """The signature of `model.loader.load_model`."""

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
        quantization: LoadTimeQuantization,
        cache_dtype: torch.dtype | None,
        progress: Progress | None,
        packed_cache: PackedWeightSource | None,
    ) -> Transformer: ...


def select_operators(name: OpsName, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The operator module that a model runs on. Raises UserError if the requested operators cannot run it."""
    if name == "cuda":
        cuda.check_supported(config, dtype, device)
        return cuda
    if name == "auto" and device.type == "cuda":
        return cuda if why_not_cuda(config, dtype, device) is None else unfused
    if name == "unfused":
        return unfused
    return cpu if name == "auto" and cpu.fits(config, dtype, device) else reference


def why_not_cuda(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why the CUDA operators cannot run a model, in one line; None if they can."""
    try:
        cuda.check_supported(config, dtype, device)
    except UserError as error:
        return str(error)
    return None


def check_quantization(activations: ActivationsName, head: HeadName, ops: OpsName, device: torch.device) -> None:
    """Raises UserError if int8 is requested and the operators do not have it."""
    requested = {"activations": activations, "head": head}
    for name, value in requested.items():
        if value == "int8" and (device.type != "cpu" or ops not in ROUNDING_OPS):
            where = f"ops {ops}" if device.type == "cpu" else f"device {device.type}"
            raise UserError(f"{name} int8 is for the operators of a CPU, not for {where}: leave it out")
    if head == "int8" and activations == "native":
        raise UserError(
            "head int8 needs activations rounded to int8, and activations native does not round them: leave one out"
        )


def resolve_cache_dtype(name: CacheName, ops: OpsName, device: torch.device) -> torch.dtype | None:
    """The dtype of keys and values; None: the model's own. Raises UserError if the operators do not support it."""
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
        raise UserError(f"device cuda: PyTorch finds no NVIDIA GPU here; take device cpu, or fix this: {why_no_gpu()}")
    if device.index is not None or ranks is None:
        return device
    count = torch.cuda.device_count()
    if ranks.local_size > count and not share:
        raise UserError(
            f"{ranks.local_size} ranks on a machine with {count} GPUs: start fewer, or let ranks share one with"
            " --share-gpus"
        )
    return torch.device("cuda", ranks.local_rank % count)
