"""Samples conversations from SmolLM2-135M-Instruct, with the target's distribution at every position.

    python -m tools.smollm2_draft.conversations SmolLM2-135M-Instruct.Q4_1.gguf --minutes 25

The target writes both sides: after the header of a user turn an instruction-tuned model writes a question, and after
its answer the next question (the method of the Magpie paper, arXiv 2406.08464). A third of the conversations begins
with a question from `prompts.py` instead. Both sides sample from the target's TOP_K most probable tokens: user turns at
temperature 1, answers at the row's own temperature, from 0 to 1.

Writes one file per batch: token ids and, for the token at each position, the target's most probable ids and
their log-probabilities at temperature 1. With --hidden-layers also the target's hidden states after these layers, which
tools.smollm2_head reads.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from swiftspec.backends.cpu import cpu
from swiftspec.model.batch import Batch, ForwardOutput
from swiftspec.model.formats.int8 import LoadTimeQuantization
from swiftspec.model.loader import load_model
from swiftspec.runtime.runner import Runner
from swiftspec.text.codec import TextCodec
from tools.smollm2_draft.prompts import questions

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""Default system message of the chat template."""
TOP_K = 16
"""Number of ids per position whose log-probabilities are kept."""
ANSWER_TEMPERATURES = (0.0, 0.4, 0.7, 1.0)


class BatchDecoder:
    """The target on the native CPU operators, which appends one token to each of its sequences in one forward.

    All sequences are at the same position.
    """

    def __init__(self, file: Path, sequences: int, length: int, hidden_layers: tuple[int, ...] = ()) -> None:
        """`hidden_layers`: the layers whose hidden states `step` returns."""
        quantization = LoadTimeQuantization(activations=2)  # as in the chat
        model = load_model(
            file, dtype=torch.bfloat16, ops=cpu, max_positions=length, quantization=quantization,
            hidden_layers=hidden_layers,
        )  # fmt: skip
        self.model, self.sequences, self.position = model, sequences, 0
        self.cache = Runner(model, cpu, model.spec.vocab_size, context=length, tree_slots=0).cache

    def reset(self) -> None:
        self.cache.reset(self.sequences)
        self.position = 0

    def step(self, tokens: Tensor) -> ForwardOutput:
        """Appends one token to each sequence (sequences,).

        Returns the logits (sequences, vocabulary) after it, and the hidden states (sequences, layers, hidden) there.
        """
        here = torch.full_like(tokens, self.position)
        self.position += 1
        mask, sequence = torch.ones(len(tokens), 1, dtype=torch.bool), torch.arange(len(tokens))
        batch = Batch(tokens, here, here, mask, sequence, here + 1)
        return self.model.forward(batch, self.cache)


class Roles:
    """Follows in every row whether the user or the assistant is writing."""

    def __init__(self, codec: TextCodec, rows: int) -> None:
        self.start, self.assistant = codec.vocab["<|im_start|>"], codec.encode("assistant")[0]
        self.answering = torch.zeros(rows, dtype=torch.bool)
        self.after_start = torch.zeros(rows, dtype=torch.bool)

    def update(self, tokens: Tensor) -> None:
        self.answering = torch.where(self.after_start, tokens == self.assistant, self.answering)
        self.after_start = tokens == self.start


@torch.inference_mode()
def sample_batch(
    decoder: BatchDecoder, codec: TextCodec, length: int, starts: Iterator[str], seed: int
) -> dict[str, Tensor]:
    """Samples a conversation of `length` tokens in each of the decoder's sequences, the rows of the result.

    Returns `tokens` (rows, length), and for the token at each position `ids` and `log_probs` (rows, length, TOP_K):
    what the target gives to its most probable tokens there. Positions of the given beginning have log-probabilities
    as well, except the first. With hidden layers also `hidden` (rows, length, layers, hidden), without the last
    position.
    """
    generator, rows = torch.Generator().manual_seed(seed), decoder.sequences
    header = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    forced = torch.full((rows, length), -1)
    for row in range(rows):
        begin = header if row % 3 else f"{header}{next(starts)}<|im_end|>\n<|im_start|>assistant\n"
        ids = codec.encode(begin)[:length]
        forced[row, : len(ids)] = torch.tensor(ids)
    answers = torch.tensor([ANSWER_TEMPERATURES[row // 3 % len(ANSWER_TEMPERATURES)] for row in range(rows)])
    roles = Roles(codec, rows)
    decoder.reset()
    tokens = forced.clone()
    kept_ids = torch.zeros(rows, length, TOP_K, dtype=torch.int32)
    kept_log_probs = torch.zeros(rows, length, TOP_K, dtype=torch.float16)
    batch = {"tokens": tokens, "ids": kept_ids, "log_probs": kept_log_probs}
    for position in range(1, length):
        roles.update(tokens[:, position - 1])
        logits, hidden = decoder.step(tokens[:, position - 1].contiguous())
        assert logits is not None
        if hidden is not None:
            kept_hidden = batch.setdefault("hidden", hidden.new_zeros(rows, length, *hidden.shape[1:]))
            kept_hidden[:, position - 1] = hidden
        values, ids = logits.log_softmax(-1).topk(TOP_K)
        kept_ids[:, position], kept_log_probs[:, position] = ids.int(), values.half()
        temperature = torch.where(roles.answering, answers, 1.0)[:, None]
        noise = -torch.empty_like(values).exponential_(generator=generator).log_()
        sampled = ids.gather(-1, (values + temperature * noise).argmax(-1, keepdim=True))[:, 0]
        tokens[:, position] = torch.where(forced[:, position] >= 0, forced[:, position], sampled)
    return batch | {"tokens": tokens.int()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path, help="GGUF file of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, default=Path("build/smollm2_draft/conversations"), help="output folder")
    parser.add_argument("--minutes", type=float, default=25.0, help="stop after the batch that exceeds this time")
    parser.add_argument("--rows", type=int, default=64, help="conversations per batch")
    parser.add_argument("--length", type=int, default=512, help="tokens per conversation")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden-layers", type=int, nargs="+", default=(), help="layers of the target, ascending")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cpu.set_threads(args.threads)
    decoder = BatchDecoder(args.target, args.rows, args.length, tuple(args.hidden_layers))
    codec = TextCodec(args.target)
    starts = questions(args.seed)
    began = time.monotonic()
    for number in itertools.count():
        batch = sample_batch(decoder, codec, args.length, starts, args.seed * 1000 + number)
        torch.save(batch, args.out / f"{args.seed:03}-{number:04}.pt")
        seconds = time.monotonic() - began
        speed = (number + 1) * args.rows * args.length / seconds
        print(f"{(number + 1) * args.rows} conversations, {speed:.0f} tokens/s", flush=True)
        if seconds > 60 * args.minutes:
            return


if __name__ == "__main__":
    main()
