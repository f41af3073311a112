"""Evaluates the demo models on the held-out files: bits per byte, and how often the draft agrees with the target.

python -m tools.demo.evaluate    # prints, and adds a section to swiftspec/demo/provenance.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from bench.data.heldout import read_prompts
from tools.demo.data import DEMO, ROOT, load_data, record
from tools.demo.train import make_model, nats

TOP = (1, 2, 4, 8)


def load_int4(path: Path) -> Any:
    """Loads the AWQ checkpoint as a dense float32 model.

    Each int32 packs the 4-bit codes of eight output columns in AutoAWQ's order.
    """

    def unpack(words: torch.Tensor) -> torch.Tensor:
        shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])
        return ((words[..., None] >> shifts) & 15).flatten(-2)

    model, stored = make_model("target", 0), load_file(path / "model.safetensors")
    state = {k: v.float() for k, v in stored.items() if v.dtype == torch.float16 and not k.endswith(".scales")}
    for name in [k.removesuffix(".qweight") for k in stored if k.endswith(".qweight")]:
        codes, zeros = unpack(stored[f"{name}.qweight"]), unpack(stored[f"{name}.qzeros"])
        scales = stored[f"{name}.scales"].float()
        group = len(codes) // len(scales)
        state[f"{name}.weight"] = ((codes - zeros.repeat_interleave(group, 0)) * scales.repeat_interleave(group, 0)).T
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model.eval()


@torch.no_grad()
def greedy_choice(target: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return target(input_ids=ids, use_cache=False).logits.argmax(-1)


@torch.no_grad()
def ranks(draft: LlamaForCausalLM, ids: torch.Tensor, wanted: torch.Tensor) -> np.ndarray:
    """Returns for each position the number of tokens that the draft ranks before the token in `wanted`."""
    logits = draft(input_ids=ids, use_cache=False).logits.float()
    return (logits > logits.gather(-1, wanted[..., None])).sum(-1).flatten().numpy()


def shares(found: np.ndarray) -> dict[str, float]:
    return {f"top{k}": round(float((found < k).mean()), 4) for k in TOP}


def measure(args: argparse.Namespace) -> None:
    _, (ids, factor) = load_data(args)
    target, facts = load_int4(args.out / "target"), {}
    draft = LlamaForCausalLM.from_pretrained(args.out / "draft", dtype=torch.float32).eval()
    exact = LlamaForCausalLM.from_pretrained(args.work / "target", dtype=torch.float32).eval()
    for name, model in {"target_before_quantisation": exact, "target_int4": target, "draft": draft}.items():
        for length in (1024, 256) if model is not exact else (1024,):
            value = nats(model, ids, length)
            facts[f"{name}_{length}"] = {"nats_a_token": round(value, 4), "bits_a_byte": round(value * factor, 4)}
            print(name, length, facts[f"{name}_{length}"], flush=True)

    windows = [torch.from_numpy(w) for w in np.array_split(ids[: len(ids) // 512 * 512].reshape(-1, 512)[::8], 8)]
    facts["agreement_on_text"] = shares(np.concatenate([ranks(draft, w, greedy_choice(target, w)) for w in windows]))
    tokenizer = AutoTokenizer.from_pretrained(args.out / "target")
    found = []
    for prompt in [torch.tensor([ids]) for ids in read_prompts(tokenizer)]:
        text = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=128, do_sample=False,
                               min_new_tokens=128, pad_token_id=0)  # fmt: skip
        found.append(ranks(draft, text[:, :-1], text[:, 1:])[prompt.shape[1] - 1 :])
    facts["agreement_on_greedy_continuations"] = shares(np.concatenate(found))
    print(json.dumps(facts, indent=1))
    windows_are = "disjoint, of the length in the name, all 25 files"
    record("held_out", args, "tools.demo.evaluate", windows=windows_are, **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "demo")
    parser.add_argument("--out", type=Path, default=DEMO)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    args.tests_share = 0.0
    measure(args)


if __name__ == "__main__":
    main()
