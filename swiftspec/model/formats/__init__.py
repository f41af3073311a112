"""Quantisation formats of checkpoints, by `quant_method` in config.json. A new format needs a module here and an entry
in FORMATS."""

from __future__ import annotations

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import Fields
from swiftspec.model.checkpoint import Format
from swiftspec.model.config import ModelConfig
from swiftspec.model.formats.awq import Awq
from swiftspec.model.formats.blocks import GGUF_METHOD, Blocks
from swiftspec.model.formats.compressed_tensors import CompressedTensors
from swiftspec.model.formats.float8_codes import Float8
from swiftspec.model.formats.gptq import Gptq
from swiftspec.model.formats.mxfp4 import Mxfp4

FORMATS = {
    "awq": Awq.of,
    "gptq": Gptq.of,
    "fp8": Float8.of,
    "fbgemm_fp8": Float8.of,
    "compressed-tensors": CompressedTensors.of,
    "mxfp4": Mxfp4.of,
    GGUF_METHOD: Blocks.of,
}


def format_of(config: ModelConfig) -> Format | None:
    """Returns the format of the quantised weights; None if all weights are dense. Raises UserError if the format is not
    supported."""
    if not config.quantization:
        return None
    method = Fields(config.quantization, "quantization_config.").string("quant_method", "none")
    if method not in FORMATS:
        *most, last = FORMATS
        known = f"{', '.join(most)} and {last}"
        raise UserError(f"quantisation method {truncated_repr(method)} is not supported; {known} are")
    return FORMATS[method](config.quantization)
