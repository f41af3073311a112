"""Data of the demo models: corpus, tokenizer patterns, training windows, and the provenance file.

The corpus is the standard library of the running interpreter (Python 3.11). The held-out files below are used only for
evaluation: the tokenizer, the training and the calibration of the quantiser do not read them. `train.py` lists the
commands.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "swiftspec" / "demo"
VOCAB = 4096
EOS = "<|endoftext|>"
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# a base model rarely generates the end token, so the length is limited
GENERATION = IDS | {"do_sample": True, "temperature": 0.7, "max_new_tokens": 256}

HELD_OUT = (
    "argparse.py", "asyncio/queues.py", "bisect.py", "calendar.py", "colorsys.py", "configparser.py", "csv.py",
    "dataclasses.py", "fractions.py", "getopt.py", "gzip.py", "heapq.py", "html/parser.py", "http/cookies.py",
    "json/decoder.py", "queue.py", "sched.py", "shutil.py", "statistics.py", "string.py", "tempfile.py", "textwrap.py",
    "urllib/robotparser.py", "wave.py", "zipfile.py",
)  # fmt: skip
TESTS = {"test", "tests", "idle_test"}
# installed packages, character tables, and text that is not source
SKIPPED = {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__", "config", "lib-dynload"}

# A newline is a separate piece, so that a prompt that ends in one continues like the training text. Indentation after a
# newline is one piece. A preceding space or punctuation mark belongs to the piece of the letters after it. Runs of
# marks are one piece.
PIECES = r"\n|(?<=\n)[ \t]+|[^\s\p{L}\p{N}]?\p{L}+| \p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\S\n]+(?!\S)|[^\S\n]"

CHAT_TEMPLATE = """\
{#- A base model of source code: the conversation is one text, which the model continues. -#}
{%- for message in messages -%}
{%- if message['content'] is string -%}{%- set text = message['content'] -%}
{%- else -%}{%- set text = message['content'] | map(attribute='text') | join('') -%}{%- endif -%}
{%- if message['role'] == 'system' -%}{%- set text = '# ' + text | trim | replace('\\n', '\\n# ') -%}{%- endif -%}
{{- text -}}
{%- if not loop.last and not text.endswith('\\n') -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
"""


def library_files() -> dict[str, list[tuple[str, str]]]:
    """Returns the library's sources as (name, text) in three lists: `library`, `tests` and `held_out`."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, list[tuple[str, str]]] = {"library": [], "tests": [], "held_out": []}
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if SKIPPED.intersection(name.parts) or name.name.startswith(("_sysconfigdata", "bad_coding")):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip() or len(text) > 400_000:
            continue
        where = "held_out" if name.as_posix() in HELD_OUT else "tests" if TESTS.intersection(name.parts) else "library"
        found[where].append((name.as_posix(), text))
    assert len(found["held_out"]) == len(HELD_OUT), "a held-out file is missing from this library"
    return found


def tokens_of(files: list[tuple[str, str]], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    eos = tokenizer.convert_tokens_to_ids(EOS)
    return np.array([i for ids in tokenizer([t for _, t in files])["input_ids"] for i in [eos, *ids]], dtype=np.int64)


class Windows:
    """Batches of random windows of the training tokens. `tests_share`: share of windows from the library's own tests.

    Each batch depends only on the seed and the step, so a resumed run gets the same ones.
    """

    def __init__(self, library: np.ndarray, tests: np.ndarray, seed: int, tests_share: float):
        self.library, self.tests, self.seed, self.tests_share = library, tests, seed, tests_share

    def __call__(self, step: int, tokens: int, length: int, share: float = 1.0) -> torch.Tensor:
        rng = np.random.default_rng((self.seed, step))
        rows = []
        for _ in range(tokens // length):
            text = self.tests if rng.random() < self.tests_share * share else self.library
            start = rng.integers(len(text) - length - 1)
            rows.append(text[start : start + length + 1])
        return torch.from_numpy(np.stack(rows))


def make_tokenizer(args: argparse.Namespace) -> None:
    files = library_files()
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(
        (text for _, text in files["library"]),
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False),
    )
    assert tok.get_vocab_size() == VOCAB and tok.token_to_id(EOS) == 0
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token=EOS, eos_token=EOS, pad_token=EOS, model_max_length=2048,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    fast.save_pretrained(args.work / "tokenizer")
    path = args.work / "tokenizer" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (args.work / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
    sizes: dict[str, Any] = {
        k: {"files": len(v), "bytes": sum(len(t.encode()) for _, t in v)} for k, v in files.items()
    }
    corpus = "".join(EOS + t for k in ("library", "tests") for _, t in files[k])
    record("data", args, source="CPython standard library", licence="PSF-2.0", python=sys.version.split()[0], **sizes,
           training_sha256=hashlib.sha256(corpus.encode()).hexdigest(), held_out_files=list(HELD_OUT))  # fmt: skip


def load_data(args: argparse.Namespace) -> tuple[Windows, tuple[np.ndarray, float]]:
    """Returns the training windows, and the held-out tokens with the factor from nats per token to bits per byte."""
    tokenizer = AutoTokenizer.from_pretrained(args.work / "tokenizer")
    files = library_files()
    ids = {k: tokens_of(v, tokenizer) for k, v in files.items()}
    size = sum(len(t.encode()) for _, t in files["held_out"])
    print({k: len(v) for k, v in ids.items()}, f"tokens; {size / len(ids['held_out']):.3f} bytes per held-out token")
    factor = len(ids["held_out"]) / size / math.log(2)
    return Windows(ids["library"], ids["tests"], args.seed, args.tests_share), (ids["held_out"], factor)


# -- files next to the weights


def tidy_config(out: Path) -> None:
    """Removes paths and library versions from config.json, and writes the generation defaults."""
    path = out / "config.json"
    config = json.loads(path.read_text())
    dtype = config.pop("torch_dtype", None) or config.pop("dtype", None)
    for key in ("_name_or_path", "_attn_implementation_autoset", "transformers_version", "use_cache", "dtype"):
        config.pop(key, None)
    config |= {"torch_dtype": dtype, **IDS}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")


def record(section: str, args: argparse.Namespace, module: str = "tools.demo.train", **facts: object) -> None:
    """Adds a section to the provenance file, with the command that produced it."""
    argv, skip = [], False
    for word in sys.argv[1:]:
        if not skip and word not in ("--work", "--out", "--resume", "--no-compile"):
            argv.append(word)
        skip = word in ("--work", "--out")
    path = args.out / "provenance.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[section] = {"command": " ".join(["python", "-m", module, *argv]), **facts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n")
