"""Quantization error as bits per byte on text held out from the training of the demo models.

python -m bench.quantization_error [--windows 120] [--model PATH] [--cache]

Each model reads the same windows of held-out files in four variants: unchanged, with activations rounded to int8, and
with the LM head rounded to int8 or int4 in addition. The demo draft is dense, so only its head can be rounded. --cache
compares keys and values in bfloat16 and float8 instead, on the reference operators.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from functools import partial
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.data.heldout import DEMO
from swiftspec.backends import cpu, reference
from swiftspec.model.checkpoint_files import read_config
from swiftspec.model.float8 import FLOAT8
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.loader import load_model
from swiftspec.runtime.runner import Runner

WINDOW = 512  # tokens
VARIANTS = {
    "native": LoadTimeQuantization(),
    "rows": LoadTimeQuantization(activations=True),
    "rows and head": LoadTimeQuantization(True, "int8"),
    "head int4": LoadTimeQuantization(head="int4"),
    "rows and head int4": LoadTimeQuantization(True, "int4"),
}
CACHES = {"bfloat16 cache": None, "float8 cache": FLOAT8}


def windows(tokenizer: Path, count: int) -> list[tuple[list[int], int]]:
    """Returns at most `count` disjoint windows of WINDOW tokens, spread over the held-out files.

    Each is a pair of its token ids and the bytes of its text without the first token.
    """
    names = json.loads((DEMO / "provenance.json").read_text())["data"]["held_out_files"]
    files = [Path(sysconfig.get_path("stdlib")) / name for name in names]
    encode = AutoTokenizer.from_pretrained(tokenizer)
    found = []
    for file in files:
        if file.is_file():
            ids = encode(file.read_text(encoding="utf-8"), verbose=False)["input_ids"]
            found += [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]
    chosen = found[:: max(1, len(found) // count)][:count]
    return [(ids, len(encode.decode(ids[1:]).encode())) for ids in chosen]


def rounded(path: Path, quantization: LoadTimeQuantization) -> Runner:
    """Loads a model on the native CPU operators, quantised at load as `quantization` requests."""
    model = load_model(path, dtype=torch.bfloat16, ops=cpu, max_positions=WINDOW + 8, quantization=quantization)
    return Runner(model, cpu, read_config(path).spec.vocab_size, context=WINDOW, tree_slots=8)


def cached(path: Path, cache_dtype: torch.dtype | None) -> Runner:
    """Loads a model on the reference operators with a KV cache of type `cache_dtype`, or of the model's type if
    None."""
    model = load_model(path, dtype=torch.bfloat16, ops=reference, max_positions=WINDOW + 8, cache_dtype=cache_dtype)
    return Runner(model, reference, read_config(path).spec.vocab_size, context=WINDOW, tree_slots=8)


def bits_a_byte(runner: Runner, texts: list[tuple[list[int], int]]) -> list[float]:
    """Returns the bits per byte of each window."""
    found = []
    for ids, size in texts:
        runner.cache.reset()
        logits = runner.logits(runner.chain_batch(ids))[:-1].double()
        nats = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
        found.append(float(nats) / math.log(2) / size)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--windows", type=int, default=120)
    parser.add_argument("--model", type=Path, action="append")
    parser.add_argument("--cache", action="store_true", help="compare KV cache dtypes")
    args = parser.parse_args()
    for path in args.model or [DEMO / "target", DEMO / "draft"]:
        texts = windows(path, args.windows)
        size = sum(bytes_ for _, bytes_ in texts)
        print(f"{path.name}: {len(texts)} windows of {WINDOW} tokens, {size} bytes")
        native: list[float] = []
        runners = {name: partial(cached, path, kind) for name, kind in CACHES.items()}
        if not args.cache:
            runners = {name: partial(rounded, path, quantization) for name, quantization in VARIANTS.items()}
        for name, make in runners.items():
            found = bits_a_byte(make(), texts)
            native = native or found
            mean, first = sum(found) / len(found), sum(native) / len(native)
            differences = torch.tensor(found) / torch.tensor(native) - 1
            error = float(differences.std()) / math.sqrt(len(found))
            print(f"  {name:14} {mean:.5f} bits/byte, {100 * (mean / first - 1):+.3f} % (error {100 * error:.3f} %)")


if __name__ == "__main__":
    main()
