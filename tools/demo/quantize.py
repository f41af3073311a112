"""Quantises the demo target to AutoAWQ's int4 ("gemm", groups of 128, zero points).

autoawq requires an older transformers than the rest of the project, so this runs in a separate environment:

    python3.11 -m venv build/awq
    build/awq/bin/pip install torch==2.13.0 transformers==4.51.3 accelerate datasets safetensors
    build/awq/bin/pip install --no-deps autoawq==0.2.9
    build/awq/bin/python -m tools.demo.quantize

The calibration texts come from the training files. The last training steps used weights rounded to int4, so the search
for AWQ's scales must be able to leave the weights unscaled. With `duo_scaling=False` that is always a candidate.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from tools.demo.data import DEMO, ROOT, library_files, tidy_config

QUANTISATION = {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}


def calibration_texts(tokenizer: PreTrainedTokenizerFast, count: int, length: int, seed: int) -> list[str]:
    """Returns pieces of the training files, each shorter than `length` tokens."""
    rng = random.Random(seed)
    files = [text for _, text in library_files()["library"] if len(text) > 4 * length]
    texts: list[str] = []
    while len(texts) < count:
        text = rng.choice(files)
        start = text.find("\n", rng.randrange(len(text) - 2 * length)) + 1
        piece = text[start : start + 2 * length]
        if len(tokenizer.encode(piece)) < length:
            texts.append(piece)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "demo" / "target")
    parser.add_argument("--out", type=Path, default=DEMO / "target")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    from awq import AutoAWQForCausalLM  # pyright: ignore[reportMissingImports] # own environment

    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    model = AutoAWQForCausalLM.from_pretrained(args.model, device_map="cpu", torch_dtype=torch.float32)
    model.quantize(
        tokenizer,
        quant_config=QUANTISATION,
        calib_data=calibration_texts(tokenizer, args.texts, args.length, args.seed),
        max_calib_samples=args.texts,
        max_calib_seq_len=args.length,
        duo_scaling=False,
    )
    model.model.half()
    model.save_quantized(str(args.out))
    tidy_config(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (args.out / name).write_bytes((args.model / name).read_bytes())

    path = args.out.parent / "provenance.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known["quantisation"] = {
        "command": "python -m tools.demo.quantize",
        "with": ["autoawq==0.2.9", "transformers==4.51.3", "torch==2.13.0"],
        "config": QUANTISATION,
        "calibration": {"texts": args.texts, "tokens_each_below": args.length, "seed": args.seed, "from": "library"},
    }
    path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
