"""Command `swiftspec quantize`: rounds the weights of a model to int4, in the layout of AutoAWQ ("gemm" version).

Round-to-nearest: no calibration data, no scaling of channels, one scale and one zero point per group of inputs. The
matrices of the layers are quantised; embedding, norms, biases, routers, gates of shared experts, rates and LM head stay
dense. Tensors are read, quantised and written one after the other, so that memory does not depend on the size of the
model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from swiftspec import file_io
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import Progress, Tensors, open_tensors, read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats.int4 import AWQ_ORDER, GROUP_SIZES, pack_int4
from swiftspec.model.gguf.file import is_gguf
from swiftspec.model.tensor_names import TensorNames

SHARD_BYTES = 1 << 30  # size above which a file of the result ends; the tensors of one file are in memory
CHUNK_OUTPUTS = 1024  # outputs of a matrix that are rounded at a time, because intermediates are float32
MAX_CODE = 15
WIDE_FLOATS = (torch.float32, torch.float64)  # dense tensors of these dtypes are stored as float16, as AutoAWQ does
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # tensors of all experts of a layer
INDEX_NAME = "model.safetensors.index.json"
COPIED_PATTERNS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "LICENSE*", "NOTICE*")


@dataclass(frozen=True, slots=True)
class AwqMatrix:
    """A matrix [outputs, inputs] in AutoAWQ's layout, where groups = inputs / group size."""

    qweight: Tensor  # [inputs, outputs / 8] int32, eight outputs per word in AWQ_ORDER
    qzeros: Tensor  # [groups, outputs / 8] int32, packed like the codes
    scales: Tensor  # [groups, outputs] float16

    @staticmethod
    def of(dense: Tensor, group: int) -> AwqMatrix:
        """Rounds a dense matrix to nearest. The codes 0..15 of a group represent values from min(smallest, 0) to
        max(largest, 0). Raises ValueError if a weight is not finite or too large for a float16 scale."""
        outputs, inputs = dense.shape
        found = AwqMatrix(
            torch.empty(inputs, outputs // 8, dtype=torch.int32),
            torch.empty(inputs // group, outputs // 8, dtype=torch.int32),
            torch.empty(inputs // group, outputs, dtype=torch.float16),
        )
        for start in range(0, outputs, CHUNK_OUTPUTS):
            rows = slice(start, min(start + CHUNK_OUTPUTS, outputs))
            words = slice(rows.start // 8, rows.stop // 8)
            part = dense[rows].float().unflatten(1, (-1, group))
            low, high = part.amin(2).clamp_max_(0), part.amax(2).clamp_min_(0)
            scale = ((high - low) / MAX_CODE).half()
            if not scale.isfinite().all():
                raise ValueError("a weight is not finite, or too large for a float16 scale")
            inverse = torch.where(scale == 0, 0.0, 1 / scale.float())
            zero = (-low * inverse).round_().clamp_(0, MAX_CODE)
            codes = (part * inverse.unsqueeze(2)).round_().add_(zero.unsqueeze(2)).clamp_(0, MAX_CODE)
            found.qweight[:, words] = pack_int4(codes.flatten(1).T.to(torch.uint8).contiguous(), AWQ_ORDER)
            found.qzeros[:, words] = pack_int4(zero.T.to(torch.uint8).contiguous(), AWQ_ORDER)
            found.scales[:, rows] = scale.T
        return found

    def tensors(self, module: str) -> dict[str, Tensor]:
        """Returns the tensors of a checkpoint by name. `module`: name of the linear layer."""
        return {f"{module}.{part}": getattr(self, part) for part in ("qweight", "qzeros", "scales")}


class ShardWriter:
    """Writes tensors to numbered safetensors files of about SHARD_BYTES, and the index of the files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._files: list[list[str]] = []  # names of the tensors of each written file
        self.bytes = 0  # of all tensors

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Adds tensors, and writes a file if enough are held."""
        self._held |= tensors
        self.bytes += sum(tensor.nbytes for tensor in tensors.values())
        if sum(tensor.nbytes for tensor in self._held.values()) >= SHARD_BYTES:
            self._flush()

    def finish(self) -> None:
        """Writes the rest and the index, and gives the files their final names."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._partial(0).rename(self._folder / "model.safetensors")
            return
        places = dict[str, str]()
        for index, names in enumerate(self._files):
            name = f"model-{index + 1:05}-of-{count:05}.safetensors"
            self._partial(index).rename(self._folder / name)
            places |= dict.fromkeys(names, name)
        index_file = {"metadata": {"total_size": self.bytes}, "weight_map": places}
        file_io.write_text(self._folder / INDEX_NAME, json.dumps(index_file, indent=2) + "\n")

    def _flush(self) -> None:
        if self._held:
            save_file(self._held, self._partial(len(self._files)), metadata={"format": "pt"})
            self._files.append([*self._held])
            self._held = {}

    def _partial(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"


def quantized_tensors(tensors: Tensors, config: ModelConfig, group: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yields the tensors of the result that replace each tensor of the checkpoint, and whether it was quantised.

    Raises UserError if a matrix cannot be divided into groups, or contains a weight that int4 cannot represent.
    """
    shapes = tensors.shapes()
    names = config.names.found_in(tensors)
    parts = {
        name: tuple(part.shape)
        for joined, shape in sorted(shapes.items())
        for name, part in _split_experts(joined, torch.empty(shape, device="meta"), names)
    }
    matrices = {name: shape for name, shape in parts.items() if _is_matrix(name, shape, names)}
    _check_shapes(matrices, group)
    for joined, shape in shapes.items():
        for name, tensor in _split_experts(joined, tensors.take(joined, *shape), names):
            if name in matrices:
                try:
                    yield AwqMatrix.of(tensor, group).tensors(name.removesuffix(".weight")), True
                except ValueError as error:
                    raise UserError(f"{tensors.folder}: {name} cannot be quantised: {error}") from None
            else:
                exact = (f".{names.decay_log}", f".{names.correction}")
                wide = tensor.dtype in WIDE_FLOATS and not name.endswith(exact)
                yield {name: (tensor.half() if wide else tensor).contiguous()}, False


def _split_experts(name: str, tensor: Tensor, names: TensorNames) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the linear layers of single experts, by name, if `tensor` has those of all experts of a
    layer; otherwise the tensor itself."""
    prefix, found, kind = name.partition(f".{names.experts}.")
    matrix = kind.removesuffix("_bias")
    if matrix not in (GATE_UP, DOWN):
        yield name, tensor
        return
    modules = {"down_proj": tensor}
    if matrix == GATE_UP:
        halves = (tensor[..., ::2], tensor[..., 1::2]) if names.alternating_experts else tensor.chunk(2, 1)
        modules = dict(zip(("gate_proj", "up_proj"), halves, strict=True))
    for module, experts in modules.items():
        for expert, part in enumerate(experts):
            ending = "weight" if matrix == kind else "bias"
            transposed = ending == "weight" and names.alternating_experts
            yield f"{prefix}{found}{expert}.{module}.{ending}", part.T if transposed else part


def _is_matrix(name: str, shape: Sequence[int], names: TensorNames) -> bool:
    """Returns whether a tensor is the matrix of a linear layer of the decoder's layers. The few rows of the router of a
    mixture of experts, of the gate of its shared expert and of the rates of a delta layer, to which outputs are
    sensitive, stay dense."""
    dense = (names.router, names.shared_gate, names.update_rate, names.decay_rate, names.rates)
    kept = tuple(f".{module}.weight" for module in dense if module)
    inside = name.startswith(f"{names.layers}.") and not name.endswith(kept)
    return inside and name.endswith(".weight") and len(shape) == 2


def _check_shapes(matrices: dict[str, tuple[int, ...]], group: int) -> None:
    """Raises UserError unless all matrices [outputs, inputs] can be divided into groups of `group` inputs."""
    if not matrices:
        raise UserError("the checkpoint has no matrices to quantise")
    for name, (outputs, inputs) in matrices.items():
        if outputs % 8 == 0 and inputs % group == 0:
            continue
        fitting = [size for size in GROUP_SIZES if all(shape[1] % size == 0 for shape in matrices.values())]
        fix = f"use --group-size {max(fitting)}" if fitting and outputs % 8 == 0 else "its shape does not allow int4"
        raise UserError(f"{name} [{outputs}, {inputs}] cannot be divided into groups of {group} inputs: {fix}")


def quantize(model: Path, out: Path, group: int, on_tensor: Progress | None = None) -> tuple[int, int, int]:
    """Writes the quantised model to the new directory `out`. Returns the number of quantised matrices, and the bytes of
    all tensors before and after.

    `on_tensor`: called before each tensor, as `checkpoint_files.Progress`. Raises UserError if the model cannot be
    quantised or `out` cannot be written; `out` then does not exist.
    """
    config, out = read_config(model), out.resolve()
    if is_gguf(model):
        raise UserError(f"{model} is a GGUF file: use the safetensors checkpoint that it was made from")
    if config.quantization:
        method = str(config.quantization.get("quant_method"))
        raise UserError(f"{model} is quantised already ({method[:40]}): use the dense checkpoint that it was made from")
    _check_free(out)
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        try:
            draft.mkdir(parents=True)
            counts = _write(model, draft, config, group, on_tensor)
            if out.is_dir():
                out.rmdir()
            draft.rename(out)
            return counts
        except (OSError, SafetensorError) as error:
            raise UserError(f"{out} cannot be written: {file_io.one_line(error)}") from None
    finally:
        with suppress(OSError):
            shutil.rmtree(draft)


def _check_free(out: Path) -> None:
    """Raises UserError unless `out` does not exist or is an empty directory."""
    try:
        free = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    except OSError as error:
        raise UserError(f"{out} cannot be used: {error.strerror}") from None
    if not free:
        raise UserError(f"{out} exists already: choose a new directory")


def _write(
    model: Path, folder: Path, config: ModelConfig, group: int, on_tensor: Progress | None
) -> tuple[int, int, int]:
    writer, matrices = ShardWriter(folder), 0
    tensors = open_tensors(model, on_tensor)
    assert isinstance(tensors, Tensors)
    before = sum(size for size, *_ in tensors.facts.values())
    for written, quantised in quantized_tensors(tensors, config, group):
        writer.add(written)
        matrices += quantised
    writer.finish()
    for file in sorted({file for pattern in COPIED_PATTERNS for file in model.glob(pattern)}):
        if file_io.is_file(file) and file.name not in ("config.json", INDEX_NAME):
            shutil.copyfile(file, folder / file.name)
    file_io.write_text(folder / "config.json", json.dumps(_quantized_config(model, group), indent=2) + "\n")
    return matrices, before, writer.bytes


def _quantized_config(model: Path, group: int) -> dict[str, Any]:
    """Returns the config.json of the result."""
    config = file_io.read_object(model / "config.json")
    text = config.get("text_config")  # of a multimodal checkpoint
    for fields in (config, text if isinstance(text, dict) else {}):
        for name in ("torch_dtype", "dtype"):  # of transformers 4 and 5
            if fields.get(name) in ("float32", "float64"):
                fields[name] = "float16"
    if "torch_dtype" not in config and "dtype" not in config:
        config["torch_dtype"] = "float16"
    kind = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True}
    return config | {"quantization_config": kind | {"modules_to_not_convert": None}}


def main(argv: Sequence[str] | None = None, prog: str = "swiftspec quantize") -> int:
    """Runs the command `quantize` and returns its exit code."""
    from swiftspec.serve.__main__ import run_guarded

    return run_guarded(lambda first: _run(list(sys.argv[1:] if argv is None else argv), prog))


def _run(argv: Sequence[str], prog: str) -> int:
    from swiftspec.cli.arguments import CommandParser
    from swiftspec.cli.terminal import StartupProgress
    from swiftspec.startup.reporter import DOWNLOAD
    from swiftspec.startup.session import WeightProgress
    from swiftspec.text.hub import locate_model

    parser = CommandParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="directory or hub id of a model in bf16, fp16 or fp32")
    parser.add_argument("out", metavar="OUT", type=file_io.expand_user, help="new directory for the int4 model")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=sorted(GROUP_SIZES, reverse=True),
        default=max(GROUP_SIZES),
        help="inputs that share a scale and a zero point (default: %(default)s)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    args = parser.parse_args(argv)
    began, phases = time.monotonic(), StartupProgress()
    try:
        model = locate_model(args.model, args.revision, lambda: phases.begin(DOWNLOAD))
        progress = WeightProgress(phases, "quantising")
        matrices, before, after = quantize(model, args.out, args.group_size, progress)
    finally:
        phases.close()
    print(
        f"{args.out}: {matrices} matrices in int4, groups of {args.group_size}; {before / 1e9:.2f} GB became"
        f" {after / 1e9:.2f} GB in {time.monotonic() - began:.0f} s"
    )
    return 0
