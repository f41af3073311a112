"""Measures llama.cpp's autoregressive decoding through its Python package. Imports no torch, so that another Python can
run it.

python -m bench.baselines.llama_plain TASK.json        # started by bench/large.py: {"file": ..., "threads": ...}
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.baselines.build_llama import describe_build
from bench.workload import WARM_UP, Measured, Task, answer, peak_of
from swiftspec.errors import UserError

CONTEXT = 2048  # context length in tokens, prompt and answer together


def has_llama_cpp(python: str = sys.executable) -> bool:
    """Returns whether llama.cpp's package is installed for the interpreter `python`.

    Raises UserError if that interpreter cannot be run.
    """
    if python == sys.executable:
        return importlib.util.find_spec("llama_cpp") is not None
    test = "import importlib.util, sys; sys.exit(importlib.util.find_spec('llama_cpp') is None)"
    try:
        return subprocess.run([python, "-c", test], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise UserError(f"{python}: cannot run ({error.strerror})") from None


@dataclass(frozen=True)
class LlamaSampling:
    """Sampling parameters; temperature 0 is greedy. The repetition penalty covers all tokens of the context."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def samplers(self, c: Any, vocab_size: int) -> list[Any]:
        """Returns the samplers of llama.cpp's chain, in their order. `c`: its C interface."""
        steps = []
        if self.repetition_penalty != 1:
            steps.append(c.llama_sampler_init_penalties(vocab_size, CONTEXT, self.repetition_penalty, 0.0, 0.0))
        if not self.temperature:
            return [*steps, c.llama_sampler_init_greedy()]
        if self.top_k:
            steps.append(c.llama_sampler_init_top_k(self.top_k))
        if self.top_p < 1:
            steps.append(c.llama_sampler_init_top_p(self.top_p, 1))
        return [*steps, c.llama_sampler_init_temp(self.temperature), c.llama_sampler_init_dist(self.seed)]


GREEDY = LlamaSampling()


class LlamaCpp:
    """A GGUF model, loaded and run by llama.cpp.

    It is driven through the C interface with two calls per token, so the overhead of Python is negligible.
    """

    def __init__(self, file: Path, threads: int, sampling: LlamaSampling = GREEDY) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports] # optional

        self._c: Any = llama_cpp
        self._llama = self._c.Llama(
            str(file),
            n_ctx=CONTEXT,
            n_batch=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,  # never slower on the tested CPU, and a fifth faster with q8_0
            verbose=False,
        )
        self._sampler = self._c.llama_sampler_chain_init(self._c.llama_sampler_chain_default_params())
        for step in sampling.samplers(self._c, self._llama.n_vocab()):
            self._c.llama_sampler_chain_add(self._sampler, step)

    @property
    def version(self) -> str:
        """Version of the package, and whether it was built with AMX."""
        return describe_build(self._c.__version__, b"AMX_INT8 = 1" in self._c.llama_print_system_info())

    def generate(self, prompt: list[int], max_tokens: int) -> tuple[list[int], float, float]:
        """Generates exactly `max_tokens` tokens, starting from an empty cache.

        Returns the tokens, the seconds until the first token, and the seconds for all others.
        """
        self._c.llama_memory_clear(self._c.llama_get_memory(self._llama.ctx), False)
        began = time.perf_counter()
        tokens = [self._next(prompt)]
        prefilled = time.perf_counter()
        while len(tokens) < max_tokens:
            tokens.append(self._next(tokens[-1:]))
        return tokens, prefilled - began, time.perf_counter() - prefilled

    def logits(self, tokens: list[int]) -> Any:
        """Returns the logits after each of `tokens`, from an empty cache: a NumPy array [tokens, vocab] float32."""
        import numpy as np  # a dependency of llama.cpp's package

        self._c.llama_memory_clear(self._c.llama_get_memory(self._llama.ctx), False)
        batch = self._c.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, True
        failed = self._c.llama_decode(self._llama.ctx, batch)
        self._c.llama_batch_free(batch)
        assert not failed, f"llama_decode: {failed}"
        shape = len(tokens), self._llama.n_vocab()
        return np.ctypeslib.as_array(self._c.llama_get_logits(self._llama.ctx), shape).copy()

    def _next(self, tokens: list[int]) -> int:
        """Runs a forward over `tokens`, which are appended to the cache, and returns the sampled next token."""
        ids = (self._c.llama_token * len(tokens))(*tokens)
        failed = self._c.llama_decode(self._llama.ctx, self._c.llama_batch_get_one(ids, len(tokens)))
        assert not failed, f"llama_decode: {failed}"
        return self._c.llama_sampler_sample(self._sampler, self._llama.ctx, -1)


def main() -> None:
    """Runs a task and prints its measurements."""
    task = Task.given()
    began = time.monotonic()
    llama = LlamaCpp(Path(task.what["file"]), task.what["threads"])
    now = time.monotonic()
    measured = Measured(now - task.began, load=now - began, notes={"version": llama.version})
    llama.generate(task.work.short[0], WARM_UP)
    for prompt in task.work.long:
        measured.prompts.append(len(prompt) / llama.generate(prompt, 1)[1])
    for prompt in task.work.short:
        tokens, _, seconds = llama.generate(prompt, task.work.tokens)
        measured.texts.append(tokens)
        measured.rates.append((len(tokens) - 1) / seconds)
    measured.peak = peak_of()
    answer(measured)


if __name__ == "__main__":
    main()
