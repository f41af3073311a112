"""Writes tiny quantised checkpoints, each with its weights as dequantised by the library that wrote it.

The two libraries need two environments (the first as in quantize.py, the second with a current transformers):

    build/awq/bin/python -m tools.demo.quant_fixtures awq
    pip install torch==2.13.0 transformers compressed-tensors
    python -m tools.demo.quant_fixtures compressed-tensors

`dequantized.safetensors` in each checkpoint contains every quantised linear as `<module>.weight` with shape [in, out].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
GROUP = 128


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, mean=float(p.ndim == 1), std=0.05)
    return model


def tidy(out: Path) -> None:
    path = out / "config.json"
    config = json.loads(path.read_text())
    for key in ("_name_or_path", "_attn_implementation_autoset", "transformers_version"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "generation_config.json").unlink(missing_ok=True)
    for file in out.glob("*.safetensors"):
        file.chmod(0o644)


def make_awq(out: Path) -> None:
    from awq import AutoAWQForCausalLM  # pyright: ignore[reportMissingImports] # own environment
    from awq.utils.packing_utils import dequantize_gemm  # pyright: ignore[reportMissingImports] # own environment

    plain = out / "plain"
    tiny_llama().save_pretrained(plain)
    model = AutoAWQForCausalLM.from_pretrained(plain, device_map="cpu", torch_dtype=torch.float32)
    texts = torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(6)).tolist()
    settings = {"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"}
    model.quantize(None, quant_config=settings, calib_data=texts, max_calib_samples=8, max_calib_seq_len=64)
    model.model.half()
    model.save_quantized(str(out))
    for file in plain.iterdir():
        file.unlink()
    plain.rmdir()
    stored = load_file(out / "model.safetensors")
    names = [key.removesuffix(".qweight") for key in stored if key.endswith(".qweight")]
    parts = {n: [stored[f"{n}.{part}"] for part in ("qweight", "qzeros", "scales")] for n in names}
    weights = {f"{n}.weight": dequantize_gemm(*p, 4, GROUP).half().contiguous() for n, p in parts.items()}
    save_file(weights, out / "dequantized.safetensors")
    tidy(out)


def make_compressed_tensors(out: Path, preset: str) -> None:
    from compressed_tensors import ModelCompressor  # pyright: ignore[reportMissingImports] # own environment
    from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports] # own environment
        QuantizationConfig,
        QuantizationStatus,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import (  # pyright: ignore[reportMissingImports] # own environment
        calculate_qparams,
    )

    model = tiny_llama().bfloat16()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    quantised: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if hasattr(m, "weight_scale")]
    for _, module in quantised:
        groups = module.weight.data.unflatten(-1, (-1, GROUP))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))
    compressor.decompress_model(model)
    weights = {f"{n}.weight": m.weight.data.t().contiguous() for n, m in quantised}
    save_file(weights, out / "dequantized.safetensors")
    tidy(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", choices=["awq", "compressed-tensors"])
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args()
    if args.library == "awq":
        make_awq(args.out / "awq_gemm_tiny")
    else:
        make_compressed_tensors(args.out / "compressed_tensors_tiny" / "asymmetric", "W4A16_ASYM")
        make_compressed_tensors(args.out / "compressed_tensors_tiny" / "symmetric", "W4A16")


if __name__ == "__main__":
    main()
