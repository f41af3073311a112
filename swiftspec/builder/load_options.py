"""Load options: how models are loaded and on what they run. Also checks the options and resolves their defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypedDict, get_args

import torch

from swiftspec.backends.cpu import cpu
from swiftspec.backends.cuda import cuda
from swiftspec.backends.families import compose
from swiftspec.backends.reference import Backend, reference
from swiftspec.backends.unfused import unfused
from swiftspec.builder.gpu_trial import GpuVerdict
from swiftspec.capabilities import Features, features_in
from swiftspec.distributed.transport.grpc.endpoint import RpcSecurity
from swiftspec.errors import UserError, truncated_repr
from swiftspec.model.checkpoint_files import Progress
from swiftspec.model.float8 import FLOAT8
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.loader import PackedWeightSource
from swiftspec.model.spec import ModelSpec
from swiftspec.model.tensor_parallel import TensorParallelGroup
from swiftspec.model.transformer import Transformer
from swiftspec.model.vocabulary import VocabularyIdentity
from swiftspec.observe.step_time_emulation import StepTimeEmulation

PREFIX_CACHE_MEMORY_MIB = 1024
OpsName = Literal["auto", "reference", "unfused", "cuda"]
ActivationsName = Literal["auto", "int8", "int16", "native"]
CacheName = Literal["auto", "fp8"]
TrialName = Literal["auto", "off", "again"]
Side = Literal["target", "draft"]
HeadName = Literal["auto", "int8", "int4", "native"]
NO_FALLBACKS = GpuVerdict()


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
    """Address of a worker, and how to connect to it.

    `url`: HOST:PORT, as the user wrote it.
    `flag`: the command-line flag that names the worker, for messages.
    `timeout`: seconds within which the worker must answer a round; a prefill may take ten times as long.
    `vocabulary`: the target's, which the worker's must match; None: any.
    """

    url: str
    flag: str
    security: RpcSecurity
    timeout: float
    vocabulary: VocabularyIdentity | None = None


class LoadOptions(TypedDict, total=False):
    """Options for loading the models. `max_model_len` and `vocab_size` default to the models' own values.

    The class is flat, since its fields are the keyword arguments of `LLMEngine`, `serve_rank` and `build_remote_roles`.
    `Plan` (builder/plan.py) groups their resolved values.

    `dtype`: of both models, a torch dtype or its name. "auto", the default, is bfloat16 for a target with 16-bit
    weights if bfloat16 is fast on the device, otherwise the target's own.
    `device`: "auto", the default, is cuda if PyTorch finds an NVIDIA GPU, otherwise cpu. With "cuda" each rank of a
    machine takes its own GPU.
    `threads`: CPU threads of one operator; by default this rank's share of the physical cores, at most 8.
    `set_torch_threads`: True, the default, sets torch's CPU threads for the whole process: to 1 if the models run on
    the native operators, otherwise to `threads`. False leaves them unchanged.
    `gpu_trial`: "auto", the default, tries the CUDA operators at start, once for each GPU and pair; "again" ignores an
    earlier verdict, "off" tries nothing. A verdict against early starts of kernels holds for the whole process, and
    sets its environment variable SWIFTSPEC_EARLY_STARTS.
    """

    dtype: torch.dtype | str | None
    device: torch.device | str
    threads: int | None
    set_torch_threads: bool
    share_device: bool  # allows more ranks than GPUs
    max_model_len: int | None  # maximum number of prompt and output tokens
    vocab_size: int | None  # the target's base vocabulary; logits beyond it count as -inf
    masked_tokens: tuple[int, ...]  # tokens below it that the draft never proposes (model/vocabulary.py)
    ops: OpsName  # default auto: the fastest that fit; see --ops of `swiftspec serve`
    activations: ActivationsName  # default auto: in a bfloat16 model on a CPU int16 for a small target, else int8
    kv_cache_dtype: CacheName  # default auto: the model's dtype; fp8: float8 e4m3
    head: HeadName  # default auto: int8 on a CPU for drafts and int4 targets, int4 on the CUDA operators for drafts
    load: LoadModel  # loads a model directory; default load_model
    emulate: StepTimeEmulation | None  # minimum time of each forward, to emulate larger models
    trace: Path | None  # trace file of rank 0; other ranks only check whether it is set
    progress: Progress | None  # called while models are loaded: description, step, number of steps
    note: Callable[[str], None] | None  # receives notices, such as a model that does not run on the fastest operators
    packed_cache: Path | None  # the disk cache of packed weights is the folder "packed" in it; default: no cache
    gpu_trial: TrialName
    trial_cache: Path | None  # folder of the verdicts of GPU trials; default: every start tries again
    only: Side | None  # the only model of the pair that this process loads; default both
    sessions: int  # maximum number of a worker's sessions, each with its own KV cache; default 1
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
        ops: Backend,
        max_positions: int,
        context: int | None,
        group: TensorParallelGroup | None,
        quantization: LoadTimeQuantization,
        cache_dtype: torch.dtype | None,
        progress: Progress | None,
        packed_cache: PackedWeightSource | None,
        hidden_layers: tuple[int, ...],
        vocab_rows: int,
    ) -> Transformer: ...


def select_operators(
    name: OpsName, spec: ModelSpec, dtype: torch.dtype, device: torch.device, verdict: GpuVerdict = NO_FALLBACKS
) -> Backend:
    """Returns the backend that a model runs on; the CUDA operators as the verdict of a GPU trial changes them. Raises
    UserError if the CUDA operators are requested and cannot run the model."""
    if name == "cuda":
        cuda.check_supported(spec, dtype, device)
        return cuda_operators(verdict)
    if name == "auto":
        on_gpu = device.type == "cuda"
        if why_not_native(spec, dtype, device) is not None:
            return unfused if on_gpu else reference
        return cuda_operators(verdict) if on_gpu else cpu
    return unfused if name == "unfused" else reference


def cuda_operators(verdict: GpuVerdict) -> Backend:
    """Returns the CUDA operators, with torch's own for the families that fall back, and with the tilings and kernel
    shapes of the verdict."""
    ops, tuning = compose(cuda, unfused, verdict.on_library), verdict.tuning
    if ops is unfused or not tuning:
        return ops
    return ops.with_operators(tilings=tuning.tilings, kernel_shapes=tuning.kernel_shapes)


def why_not_native(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """Returns the reason why the native operators of a device cannot run a model, in one line, or None if they can."""
    try:
        (cuda if device.type == "cuda" else cpu).check_supported(spec, dtype, device)
    except UserError as error:
        return str(error)
    return None


def option_features(options: LoadOptions, device: torch.device) -> Features:
    """Returns the features of the capability table (capabilities.py) that the options have on a device."""
    ops, activations, head = options.get("ops", "auto"), options.get("activations", "auto"), options.get("head", "auto")
    on_cpu = device.type == "cpu"
    found = {
        "CPU": on_cpu,
        "GPU": not on_cpu,
        "native operators": on_cpu and ops == "auto",
        "library operators": ops not in ("auto", "reference"),
        "rounded activations": activations in ("int8", "int16"),
        "exact activations": activations == "native",
        "int8 head": head == "int8",
        "float8 cache": options.get("kv_cache_dtype", "auto") == "fp8",
    }
    return features_in(found)


def resolve_cache_dtype(name: CacheName) -> torch.dtype | None:
    """Returns the dtype of cached keys and values, or None for the model's own. Raises UserError if the name is
    unknown."""
    if name not in get_args(CacheName):
        raise UserError(f"kv_cache_dtype must be one of {', '.join(get_args(CacheName))}, not {truncated_repr(name)}")
    return FLOAT8 if name == "fp8" else None


def rank_device(device: torch.device, ranks: RankLayout | None, share: bool) -> torch.device:
    """Returns the device of this rank: with device cuda, its own GPU among those of its machine, otherwise `device`. A
    GPU has an index. Raises UserError if there are more ranks than GPUs and `share` is False.

    If only one GPU is visible, the launcher may have hidden the other ranks' from each rank. Whether it has is checked
    when the ranks compare their configurations (`RankConfig.gpu`).
    """
    if device.type != "cuda" or device.index is not None:
        return device
    if ranks is None:
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    if ranks.local_size > count > 1 and not share:
        raise UserError(
            f"{ranks.local_size} ranks on a machine with {count} GPUs: start fewer ranks, or share GPUs with"
            " --share-gpus"
        )
    return torch.device("cuda", ranks.local_rank % count)
