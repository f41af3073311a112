"""Lists the models on this machine that can draft for a target, with their predicted speed.

Looks into the local Hugging Face cache and the directories given. A draft needs a supported architecture, weights, the
ordinary tokens of the target, and fewer parameters than the target. Only configuration and tokenizers are read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.prediction import latency_model
from bench.prediction.machine import PredictedMachine, this_machine
from bench.prediction.predictor import Row, demo_acceptance, modelled_step_times, predict
from bench.prediction.simulation import RecordedAcceptance
from swiftspec import file_io
from swiftspec.cli.arguments import CommandParser
from swiftspec.errors import UserError
from swiftspec.model.checkpoint_files import open_tensors, read_config
from swiftspec.model.config import ModelConfig
from swiftspec.model.gguf.file import is_gguf
from swiftspec.model.spec import AttentionSpec, GatedDeltaSpec, LayerSpec
from swiftspec.model.vocabulary import Vocabulary, describe_masked
from swiftspec.serve.__main__ import run_guarded
from swiftspec.text.codec import TextCodec, has_tokenizer
from swiftspec.text.hub import locate_model

BS, W = 8, 8  # tree shape of the prediction; the recorded rounds of the demo models have it
MAX_MODEL_FOLDERS = 2000  # of a directory on the command line


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. `name`: hub id or path, as a command accepts it."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class PairedDraft:
    """A model that can draft for the target. `best`: the fastest prediction with it. `plain`: that without a draft.
    `note`: difference of its tokenizer, or None. The predictions are None if the machine is not known."""

    model: LocalModel
    parameters: int
    best: Row | None
    plain: Row | None
    note: str | None


@dataclass(frozen=True, slots=True)
class RefusedDraft:
    """A model that cannot draft for the target, and the reason in one line."""

    model: LocalModel
    reason: str


def cached_models() -> Iterator[LocalModel]:
    """Yields the models in the local Hugging Face cache, each at its revision "main", or else the latest one."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError, OSError):  # there is none, or it is not a cache
        return
    for repo in sorted(found.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            newest = max(repo.revisions, key=lambda each: ("main" in each.refs, each.last_modified))
            yield LocalModel(repo.repo_id, newest.snapshot_path)


def models_in(folder: Path) -> Iterator[LocalModel]:
    """Yields the model of a directory or GGUF file, or the GGUF files and the models of the sub-directories of a
    directory. Raises UserError if there is none, or if it cannot be read."""
    if is_gguf(folder):
        yield LocalModel(str(folder), folder)
        return
    if not file_io.is_folder(folder):
        raise UserError(f"{folder}: no such directory")
    if file_io.is_file(folder / "config.json"):
        yield LocalModel(str(folder), folder)
        return
    try:
        inside = sorted(folder.iterdir())[:MAX_MODEL_FOLDERS]
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None
    found = [each for each in inside if file_io.is_file(each / "config.json") or is_gguf(each)]
    if not found:
        raise UserError(f"{folder}: no model, and no directories with models")
    yield from (LocalModel(str(each), each) for each in found)


def parameters(config: ModelConfig) -> int:
    """Returns the number of weights of a model's matrices and of its embedding, and of its LM head unless it is
    tied."""
    spec = config.spec

    def vectors(layer: LayerSpec) -> int:
        """Returns the number of vectors of `hidden_size` weights in the matrices of a layer."""
        mlp = layer.mlp
        rows = _mixer_rows(layer.mixer) + 3 * mlp.num_experts * mlp.intermediate_size
        if mlp.experts is not None:
            rows += 3 * mlp.experts.shared_intermediate_size + mlp.experts.router_rows
        return rows

    layers = spec.hidden_size * sum(vectors(layer) for layer in spec.layers)
    layers += spec.per_layer_size * len(spec.layers) * (spec.vocab_size + 3 * spec.hidden_size)
    return layers + (1 if spec.tie_word_embeddings else 2) * spec.vocab_size * spec.hidden_size


def _mixer_rows(mixer: AttentionSpec | GatedDeltaSpec) -> int:
    """Returns the number of vectors of the hidden size in the projections of a mixer."""
    if isinstance(mixer, GatedDeltaSpec):
        return mixer.conv_size + 2 * mixer.v_size + 2 * mixer.num_v_heads
    return (2 if mixer.output_gate else 1) * mixer.q_size + mixer.qkv_size


class PairFinder:
    """Checks models against one target, and predicts the speed of the pairs. `machine`: None for no predictions."""

    def __init__(self, target: Path, machine: PredictedMachine | None) -> None:
        self.path, self.config = target, read_config(target)
        self._vocabulary: Vocabulary = TextCodec(target).vocabulary
        self._machine = machine
        self._acceptance: RecordedAcceptance = demo_acceptance()

    def check(self, model: LocalModel) -> PairedDraft | RefusedDraft:
        """Returns the model as a draft for the target, or the reason why it cannot be one."""
        try:
            config = read_config(model.path)
            count, most = parameters(config), parameters(self.config)
            if count >= most:
                raise UserError(f"not smaller than the target ({_billions(count)}, not below {_billions(most)})")
            open_tensors(model.path)
            note = self._check_tokenizer(model, config)
        except UserError as error:
            return RefusedDraft(model, str(error).replace(f"{model.path}/", "").removeprefix(f"{model.path}: "))
        best, plain = self._predict(config)
        return PairedDraft(model, count, best, plain, note)

    def _check_tokenizer(self, model: LocalModel, config: ModelConfig) -> str | None:
        """Returns a note about a tokenizer that differs in special tokens, or is missing. Raises UserError if the
        ordinary tokens differ."""
        rows, size = config.spec.vocab_size, self._vocabulary.size
        if not has_tokenizer(model.path):
            if rows < size:
                raise UserError(f"no tokenizer, and the target's has {size} tokens for {rows} rows of the LM head")
            return "no tokenizer: must have been trained with the target's"
        draft = TextCodec(model.path).vocabulary
        self._vocabulary.check_draft(draft)
        masked = self._vocabulary.masked_tokens(draft, rows)
        line = describe_masked(masked, self._vocabulary.added, draft.added)
        return None if line is None else line.removeprefix("the draft ")

    def _predict(self, draft: ModelConfig) -> tuple[Row | None, Row | None]:
        """Returns the predictions of the best split with this draft and of autoregressive decoding; None if the latency
        model does not know the machine or a kind of layer."""
        if self._machine is None or self.config.spec.delta_mixers or draft.spec.delta_mixers:
            return None, None
        step_times = modelled_step_times(self.config, draft, self._machine.ends, W)
        rows = predict(self._machine.ranks, self._acceptance, BS, W, step_times)
        plain = next(row for row in rows if row.mode == "ar")
        return next(row for row in rows if row.mode != "ar"), plain


def format_pairs(found: Iterable[PairedDraft | RefusedDraft], machine: PredictedMachine | None) -> str:
    """Formats the result: the drafts, the fastest first, and the others with the reason."""
    found = [*found]
    drafts = [each for each in found if isinstance(each, PairedDraft)]
    drafts.sort(key=lambda each: (-(each.best.speed if each.best is not None else 0.0), each.parameters))
    lines: list[str] = []
    if drafts:
        cells = [("draft", "weights", "run", "tok/s", "without", "gain")]
        for each in drafts:
            head = each.model.name, _billions(each.parameters)
            if each.best is None or each.plain is None:
                cells.append((*head, "", "", "", ""))
                continue
            gain = f"{each.best.speed / each.plain.speed:.2f}x"
            cells.append((*head, each.best.title, f"{each.best.speed:.1f}", f"{each.plain.speed:.1f}", gain))
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
        lines += [f"{each.model.name}: {each.note}" for each in drafts if each.note is not None]
    else:
        lines.append("no model on this machine can draft for this target")
    refused = [each for each in found if isinstance(each, RefusedDraft)]
    if refused:
        lines += ["", "not drafts:", *(f"  {each.model.name}: {each.reason}" for each in refused)]
    if drafts and machine is not None:
        lines += [
            "",
            f"tok/s: predicted for {machine.title}; acceptance: measured on the demo models, the same for all"
            " drafts; `swiftspec profile` measures a pair",
        ]
    return "\n".join(lines)


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the drafts and returns the exit code."""
    return run_guarded(lambda first: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(
        "python -m bench.pair", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", metavar="TARGET", help="directory or hub id; its weights are not needed")
    parser.add_argument(
        "folders",
        metavar="PATH",
        nargs="*",
        default=[],
        type=file_io.expand_user,
        help="further models, also GGUF files, or directories that contain models",
    )
    parser.add_argument(
        "--hardware",
        metavar="GPUxN",
        help=f"predict for these GPUs, such as h200x8, and not for this machine; GPUs: {', '.join(latency_model.GPUS)}",
    )
    args = parser.parse_args(argv)
    machine = this_machine() if args.hardware is None else _hardware(args.hardware)
    target = locate_model(args.target, weights=False)
    finder = PairFinder(target, machine)
    models = [*cached_models(), *(model for folder in args.folders for model in models_in(folder))]
    others = {model.path.resolve(): model for model in models if model.path.resolve() != target.resolve()}
    found = [finder.check(model) for model in others.values()]
    print(format_pairs(found, machine))
    if not found:
        print("the Hugging Face cache contains no other model; name directories that do")
    if machine is None:
        print("the latency model does not know this GPU: name another with --hardware, or use `swiftspec profile`")
    return 0


def _hardware(text: str) -> PredictedMachine:
    name, count = latency_model.parse_hardware(text)
    return PredictedMachine(text.lower(), latency_model.constants(latency_model.GPUS[name]), count)


if __name__ == "__main__":
    raise SystemExit(main())
