"""Capabilities: the one table of what works with what.

A *feature* is anything that a request, a setting, the engine or a model has: a grammar, `--verify reject`, a worker,
gated delta layers. `TABLE` holds the combinations of two features that are refused or have no effect; every other
combination works. `EXECUTORS` holds the features of a request that an executor does not run, so that a slower one does;
`OPERATORS` holds the traits of models that native operators compute, on which the fast executors depend.

The objects name their features (`SamplingParams.features`, `EngineConfig.features`, `Settings.features`, options of
`LLM` in `option_features` of builder/load_options.py), and `check_features` raises for a combination that is refused.
Flags, options of `LLM`, requests of the engine, of workers and of the HTTP server, the notes at start, the choice of
operators and executors, and docs/paths.md all use these tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from swiftspec.errors import UserError

Label = Callable[[str], str]  # returns the name under which a message shows a setting
Features = frozenset[str]  # keys of FEATURES
REMOVE, REMOVE_THEM = "remove it", "remove them"


@dataclass(frozen=True, slots=True)
class Feature:
    """A row or a column of the table. In all texts a name in braces is that of a setting.

    `title`: the feature as the subject of a sentence. `plural`: whether its verb is in the plural.
    `fix`: how a user avoids the feature.
    `where`: the feature at the end of a sentence, as a column; empty: "with" and the title.
    """

    title: str
    fix: str = REMOVE
    where: str = ""
    plural: bool = False


@dataclass(frozen=True, slots=True)
class Conflict:
    """A combination of two features that does not work. `ignored`: the row has no effect; otherwise it is refused.

    `cause`: the reason, as a clause after a comma. `fix`: the remedy; empty: the fix of the row or of the column.
    """

    cause: str = ""
    fix: str = ""
    ignored: bool = False


class NotSupported(UserError):
    """A combination of features is refused. `row`, `column`: their names. `template`: the message, in which names of
    settings are in braces."""

    def __init__(self, row: str, column: str, template: str) -> None:
        super().__init__(with_labels(template, str))
        self.row, self.column, self.template = row, column, template

    def shown(self, label: Label) -> str:
        """Returns the message with other names of the settings, such as those of the flags."""
        return with_labels(self.template, label)


def with_labels(template: str, label: Label) -> str:
    """Returns a text of the table in which `label` has replaced the names of settings."""
    return re.sub(r"{(\w+)}", lambda found: label(found[1]), template)


def features_in(found: Mapping[str, bool]) -> Features:
    """Returns the names of the features that are in use."""
    return frozenset(name for name, used in found.items() if used)


def check_features(found: Collection[str], label: Label = str) -> None:
    """Raises NotSupported for the first combination of the features `found` that is refused. `label`: see
    `with_labels`. A mapping gives other titles of features."""
    for row, column, conflict in conflicts(found):
        if not conflict.ignored:
            error = NotSupported(row, column, conflict_text(row, column, conflict, found))
            raise NotSupported(row, column, error.template if label is str else error.shown(label))


def ignored_features(found: Collection[str], label: Label = str) -> list[str]:
    """Returns a note on each of the features `found` that has no effect. See `check_features`."""
    notes = (conflict_text(*each, found) for each in conflicts(found) if each[2].ignored)
    return [with_labels(note, label) for note in notes]


def conflicts(found: Collection[str]) -> Iterator[tuple[str, str, Conflict]]:
    """Yields row and column of each entry of the table for which the features `found` contain both."""
    for column, entries in TABLE.items():
        if column in found:
            yield from ((row, column, conflict) for row, conflict in entries.items() if row in found)


def conflict_text(row: str, column: str, conflict: Conflict, found: Collection[str] = ()) -> str:
    """Returns the message for an entry of the table, in which names of settings are in braces. A mapping `found` gives
    other titles of rows, which are lists separated by commas."""
    left, right = FEATURES[row], FEATURES[column]
    title, plural = left.title, left.plural
    if isinstance(found, Mapping) and (own := found[row]):
        title, plural = own, "," in own
    where = (right.where or f"with {right.title}") + (f", {conflict.cause}" if conflict.cause else "")
    if conflict.ignored:
        return f"{title} {'have' if plural else 'has'} no effect {where}"
    other = f"remove {right.title}" if right.fix in (REMOVE, REMOVE_THEM) else right.fix
    fix = conflict.fix or f"{left.fix}, or {other}"
    return f"{title} {'are' if plural else 'is'} not supported {where}; {fix}"


REQUEST_FEATURES = {
    "greedy": Feature("temperature 0", "raise it"),
    "filters": Feature("filters of the distribution", REMOVE_THEM, plural=True),
    "deep top-k": Feature("top-k of 64 or more for each rank of a group"),
    "penalties": Feature("penalties", REMOVE_THEM, plural=True),
    "guidance": Feature("guidance", "set {guidance_scale} to 1"),
    "grammar": Feature("a grammar or output format"),
    "excluded tokens": Feature("allowed_token_ids or bad_words_ids", REMOVE_THEM, plural=True),
    "path rules": Feature("min_tokens, or a bad word of several tokens", REMOVE_THEM, plural=True),
    "bad sequences": Feature("bad words of several tokens", REMOVE_THEM, plural=True),
    "log-probabilities": Feature("log-probabilities", REMOVE_THEM, plural=True),
    "prompt log-probabilities": Feature("log-probabilities of the prompt", "remove prompt_logprobs", plural=True),
    "listed log-probabilities": Feature("logprob_token_ids", REMOVE_THEM, plural=True),
    "no log-probabilities": Feature("no logprobs", "set logprobs", "without logprobs"),
    "request shape": Feature("verify_batch and draft_steps of a request", REMOVE_THEM, plural=True),
    "request draft": Feature("verify_batch above 1 and draft_steps of a request", REMOVE_THEM, plural=True),
    "best_of": Feature("ranking by log-probabilities", "use n"),
    "top log-probabilities": Feature("top_logprobs"),
    "echoed log-probabilities": Feature("echo with logprobs"),
    "population choices": Feature("n or best_of with smc"),
    "truncation": Feature("truncate_prompt_tokens"),
    "suffix": Feature("suffix", "omit suffix"),
    "stream": Feature("stream", "omit stream"),
    "company": Feature("other requests at the same time", "use {max_num_seqs} 1", plural=True),
    "stop strings": Feature("stop strings", REMOVE_THEM, plural=True),
    "no text": Feature("detokenize false", "set it to true"),
    "structured outputs": Feature("structured_outputs", plural=True),
}
MODES = {
    "mode ar": Feature("{mode} ar", "use {mode} serial", "in mode ar"),
    "mode serial": Feature("{mode} serial", "use {mode} ar", "in mode serial"),
    "mode async": Feature("{mode} async", "use {mode} serial", "in mode async"),
    "mode smc": Feature("{mode} smc", "use {mode} serial", "in mode smc"),
}
ENGINE_FEATURES = {
    **MODES,
    "overlap": Feature("{mode} async on one rank", "start two ranks"),
    "no draft": Feature("no draft model", "specify one with {draft_model}", "without a draft model"),
    "several requests": Feature("{max_num_seqs} above 1", "use {max_num_seqs} 1"),
    "verify reject": Feature("{verify} reject", "use {verify} match"),
    "proposal top": Feature("{proposal} top", "use another {proposal}"),
    "proposal coupled": Feature("{proposal} coupled", "use another {proposal}"),
    "proposal sample": Feature("{proposal} sample", "use {proposal} coupled and {verify} match"),
    "self-switch": Feature("{self_switch}", "turn it off"),
    "adapted shape": Feature("adaptation of {draft_steps} and {verify_batch}", "turn it off"),
    "synthetic acceptance": Feature("{synthetic_acceptance_length}"),
    "suffix lookup": Feature("suffix lookup", "use a draft model"),
    "grafting": Feature("suffix lookup with a draft model ({graft_suffix})", "turn it off"),
    "draft head": Feature("a draft head", "use a draft model"),
    "target worker": Feature("{target_url}"),
    "draft worker": Feature("{draft_url}"),
    "several ranks": Feature("several ranks", "start one rank"),
    "one rank": Feature("one rank", "start it with torchrun --standalone --nproc-per-node 2"),
}
SETTING_FEATURES = {  # the first six: given settings of a part of the engine (`Setting.applies_to`)
    "draft": Feature("settings of the draft", REMOVE_THEM, plural=True),
    "draft tree": Feature("settings of the draft tree", REMOVE_THEM, plural=True),
    "tree that grows during a verification": Feature("settings of its growth", REMOVE_THEM, plural=True),
    "population": Feature("settings of the population", REMOVE_THEM, plural=True),
    "draft forwards": Feature("settings of trees that a draft model expands", REMOVE_THEM, plural=True),
    "draft group": Feature("{draft_tp}"),
    "target group": Feature("{target_tp} below the number of ranks"),
    "revision": Feature("{revision}"),
    "model on disk": Feature("a model on this machine"),
    "negative prompt": Feature("{negative_prompt}"),
    "no guidance": Feature("no guidance", where="at {guidance_scale} 1"),
    "profile": Feature("{plan}"),
    "adaptation": Feature("{adapt}"),
    "given shape": Feature("{draft_steps} and {verify_batch}", REMOVE_THEM, plural=True),
    "local target": Feature("{model}"),
    "local draft": Feature("{draft_model}"),
    "shared GPUs": Feature("{share_gpus}"),
    "server": Feature("{port}", where="by a server"),
    "KV events": Feature("{kv_events_config}"),
    "no prefix cache": Feature("{prefix_cache_memory} 0"),
    "rounded activations": Feature("{activations} int8 or int16"),
    "exact activations": Feature("{activations} native"),
    "int8 head": Feature("{head} int8"),
    "float8 cache": Feature("{kv_cache_dtype} fp8"),
}
COMMAND_FEATURES = {
    "command chat": Feature("`swiftspec chat`", where="by `swiftspec chat`"),
    "command generate": Feature("`swiftspec generate`", where="by `swiftspec generate`"),
    "worker": Feature("a worker", where="by a worker"),
    "local command": Feature("a command that runs the target", where="by a command that runs the target"),
    "profile sweep": Feature("a profile", where="by a sweep of profiles"),
    "exactness test": Feature("the exactness test", where="by the exactness test"),
    "prompt flags": Feature("--prompt, --prompt-file and --json", REMOVE_THEM, plural=True),
    "JSON output": Feature("--json"),
    "pair settings": Feature("settings of the other model", plural=True),
    "request settings": Feature("settings of a request", plural=True),
    "system prompt": Feature("{system_prompt}"),
    "chat template": Feature("{chat_template}"),
    "raw prompt": Feature("{raw}"),
}
MACHINE_FEATURES = {
    "CPU": Feature("a CPU", "use a GPU", "on a CPU"),
    "GPU": Feature("a GPU", "use {device} cpu", "on a GPU"),
    "native operators": Feature("the native operators of a CPU", "use {ops} reference"),
    "library operators": Feature("{ops} unfused or cuda", "use {ops} auto or reference"),
}
# by trait: the name of an optional field of a model's spec (model/spec.py), with the value where other values are other
# traits, or `gated_delta`
MODEL_FEATURES = {
    "gated_delta": Feature("gated delta layers"),
    "qk_norm": Feature("norm of query and key heads"),
    "qk_norm=projection": Feature("norm of whole query and key projections"),
    "norm_after_rope": Feature("norm of query and key heads after RoPE"),
    "v_norm": Feature("norm of value heads"),
    "window": Feature("sliding window"),
    "scale": Feature("scale of attention scores"),
    "softcap": Feature("soft cap of attention scores"),
    "query_scale_beta": Feature("scale of queries by position"),
    "output_gate": Feature("gate of the attention output"),
    "sinks": Feature("attention sinks"),
    "shares_kv": Feature("shared KV layers"),
    "activation": Feature("activation other than SiLU"),
    "activation=relu": Feature("ReLU"),
    "experts": Feature("mixture of experts"),
    "shared_intermediate_size": Feature("shared expert"),
    "sigmoid": Feature("choice of experts by sigmoid scores"),
    "norms": Feature("norms after attention and MLP"),
    "norms=after": Feature("norms after attention and MLP only", where="without a norm before attention"),
    "residual_multiplier": Feature("residual multiplier"),
    "output_scale": Feature("scale of a layer's output"),
    "norm_unit_offset": Feature("norms with 1 + weight"),
    "embedding_multiplier": Feature("embedding multiplier"),
    "logit_multiplier": Feature("logit multiplier"),
    "logit_softcap": Feature("soft cap of logits"),
    "per_layer_size": Feature("per-layer embeddings"),
    "draft_head": Feature("draft heads"),
}
FEATURES: Mapping[str, Feature] = {
    **REQUEST_FEATURES, **ENGINE_FEATURES, **SETTING_FEATURES, **COMMAND_FEATURES, **MACHINE_FEATURES, **MODEL_FEATURES,
}  # fmt: skip


NO_TREE = "which has no draft tree"
NO_TARGET_GROUP = Conflict("whose target uses all ranks", REMOVE)
NO_POPULATION = Conflict("which has no population", REMOVE)
NEEDS_DRAFT = Conflict(fix="specify one with {draft_model}, or use {mode} ar")
EXCLUDED = Conflict("since tokens that are excluded would be accepted", REMOVE)
# column -> row -> what does not work; a combination that is not listed works
TABLE: Mapping[str, Mapping[str, Conflict]] = {
    "no draft": {
        "mode serial": NEEDS_DRAFT,
        "mode async": NEEDS_DRAFT,
        "mode smc": NEEDS_DRAFT,
        "grafting": Conflict(),
        "profile": Conflict(),
    },
    "mode ar": {
        "request draft": Conflict(fix=REMOVE_THEM),
        "synthetic acceptance": Conflict(NO_TREE),
        "profile": Conflict(NO_TREE, REMOVE),
        "population": NO_POPULATION,
        "draft group": Conflict("which has no draft group", REMOVE),
        "target group": NO_TARGET_GROUP,
        "draft": Conflict("which has no draft", ignored=True),
        "draft tree": Conflict(NO_TREE, ignored=True),
        "tree that grows during a verification": Conflict(NO_TREE, ignored=True),
    },
    "mode serial": {
        "population": NO_POPULATION,
        "draft group": Conflict("which has no draft group", REMOVE),
        "target group": NO_TARGET_GROUP,
        "tree that grows during a verification": Conflict(
            "whose tree does not grow during a verification", ignored=True
        ),
    },
    "mode async": {
        "one rank": Conflict(),
        "suffix lookup": Conflict(fix="use {mode} serial"),
        "draft head": Conflict(fix="use {mode} serial"),
        "population": NO_POPULATION,
    },
    "mode smc": {
        "log-probabilities": Conflict(),
        "prompt log-probabilities": Conflict(),
        "best_of": Conflict(),
        "request shape": Conflict(),
        "grammar": Conflict(),
        "bad sequences": Conflict(),
        "synthetic acceptance": Conflict(),
        "suffix lookup": Conflict(),
        "grafting": Conflict(),
        "draft head": Conflict(),
        "target worker": Conflict(),
        "draft worker": Conflict(),
        "profile": Conflict(NO_TREE, REMOVE),
        "greedy": Conflict(),
        "guidance": Conflict(),
        "several requests": Conflict(fix="use {smc_groups}"),
        "draft tree": Conflict(NO_TREE, REMOVE),
        "tree that grows during a verification": Conflict(NO_TREE, REMOVE),
        "draft group": Conflict("which has no draft group", REMOVE),
        "target group": NO_TARGET_GROUP,
    },
    "several requests": {
        "profile": Conflict("since it holds the tree of a single request", REMOVE),
        "overlap": Conflict(),
        "target worker": Conflict(),
        "draft worker": Conflict(),
    },
    "verify reject": {
        "proposal top": Conflict(fix="use {proposal} sample, or {verify} match"),
        "proposal coupled": Conflict(fix="use {proposal} sample, or {verify} match"),
        "adapted shape": Conflict("because the text would depend on measured times"),
        "adaptation": Conflict("because the text would depend on measured times", "remove one of them"),
        "synthetic acceptance": Conflict("which accepts by rejection sampling"),
        "suffix lookup": Conflict("whose proposals are sampled from a distribution"),
        "grafting": Conflict("whose proposals are sampled from a distribution"),
        "draft head": Conflict(fix="use {verify} match"),
    },
    "proposal sample": {"greedy": Conflict()},
    "self-switch": {"synthetic acceptance": Conflict("since rounds of the same shape are to be compared")},
    "adapted shape": {"synthetic acceptance": Conflict("since rounds of the same shape are to be compared")},
    "synthetic acceptance": {"grammar": EXCLUDED, "excluded tokens": EXCLUDED, "path rules": EXCLUDED},
    "suffix lookup": {
        "grafting": Conflict(fix="remove one of them"),
        "draft forwards": Conflict("which has no draft forwards", ignored=True),
    },
    "several ranks": {"target worker": Conflict(), "draft worker": Conflict()},
    "target worker": {
        "local target": Conflict("which specifies the same model", "remove one of them"),
        "suffix lookup": Conflict(),
        "grafting": Conflict(),
        "draft head": Conflict("since it runs on the ranks of its target"),
        "KV events": Conflict("whose worker has the prefix cache", REMOVE),
    },
    "draft worker": {
        "local draft": Conflict("which specifies the same model", "remove one of them"),
        "suffix lookup": Conflict(),
        "grafting": Conflict(),
        "draft head": Conflict("since it runs on the ranks of its target"),
    },
    "given shape": {"adaptation": Conflict(ignored=True)},
    "no prefix cache": {"KV events": Conflict(fix="remove one of them")},
    "command chat": {
        "prompt flags": Conflict(fix="use `swiftspec generate`"),
        "server": Conflict(fix="remove it, or use `swiftspec serve`"),
    },
    "command generate": {"server": Conflict(fix="remove it, or use `swiftspec serve`")},
    "server": {
        "prompt flags": Conflict(fix=REMOVE_THEM),
        "system prompt": Conflict("whose clients send it as a message", REMOVE),
        "request settings": Conflict("whose clients set it per request", REMOVE),
    },
    "worker": {
        "prompt flags": Conflict(fix=REMOVE_THEM),
        "pair settings": Conflict("which runs only {model}", REMOVE),
        "synthetic acceptance": Conflict(fix="set it on the clients"),
    },
    "local command": {"target worker": Conflict(fix="specify {model}, or use `swiftspec chat` or `generate`")},
    "profile sweep": {
        "suffix lookup": Conflict("which measures a draft model", "use a draft model"),
        "no draft": Conflict("which measures a draft model", "specify one with {draft_model}"),
    },
    "exactness test": {
        "mode ar": Conflict("since it does not use speculation"),
        "mode smc": Conflict("since it is approximate by design"),
        "synthetic acceptance": Conflict("since its output is not the target's", REMOVE),
        "JSON output": Conflict("whose result is a table and the exit code", REMOVE),
    },
    "raw prompt": {
        "system prompt": Conflict("which has no chat template", "remove one of them"),
        "chat template": Conflict("which has no chat template", "remove one of them"),
    },
    "CPU": {
        "overlap": Conflict(),
        "shared GPUs": Conflict(ignored=True),
    },
    "GPU": {"rounded activations": Conflict(), "int8 head": Conflict()},
    "library operators": {"rounded activations": Conflict(), "int8 head": Conflict()},
    "native operators": {"float8 cache": Conflict()},
    "exact activations": {"int8 head": Conflict(fix="remove one of them")},
    "gated_delta": {"float8 cache": Conflict(fix="remove {kv_cache_dtype}")},
    "shares_kv": {"float8 cache": Conflict(fix="remove {kv_cache_dtype}")},
    "norms=after": {"float8 cache": Conflict(fix="remove {kv_cache_dtype}")},
    "guidance": {"prompt log-probabilities": Conflict()},
    "no guidance": {"negative prompt": Conflict(ignored=True)},
    "model on disk": {"revision": Conflict("which has one version", REMOVE)},
    "no text": {"stop strings": Conflict()},
    "structured outputs": {"grammar": Conflict(fix="remove one of them")},
    "no log-probabilities": {"listed log-probabilities": Conflict(), "top log-probabilities": Conflict()},
    "suffix": {"truncation": Conflict(), "echoed log-probabilities": Conflict()},
    "stream": {
        "prompt log-probabilities": Conflict(fix="omit stream"),
        "population choices": Conflict("since the texts are selected at the end", "omit stream"),
        "best_of": Conflict("since the best choices are known at the end", "omit stream"),
    },
}


# backend of native operators -> the traits of models that it computes; models with others, and with sizes that it does
# not support (`check_spec`), run on torch's own operators, which compute all
OPERATORS: Mapping[str, Features] = {
    "cpu": frozenset((
        "activation", "draft_head", "embedding_multiplier", "experts", "gated_delta", "logit_multiplier",
        "logit_softcap", "norm_after_rope", "norm_unit_offset", "norms", "norms=after", "output_gate", "output_scale",
        "per_layer_size", "qk_norm", "qk_norm=projection", "query_scale_beta", "residual_multiplier", "scale",
        "shared_intermediate_size", "shares_kv", "sigmoid", "sinks", "softcap", "v_norm", "window",
    )),
    "cuda": frozenset(("qk_norm",)),
}  # fmt: skip


# executor -> feature of a request that it does not run, so that a slower executor of the phase does -> the reason
ON_HOST = "the host computes the excluded tokens between forwards."
JOINT = "concurrent requests share a graph of the forward, after which each {} by itself."
EXECUTORS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "graph of expansions": {
        "proposal sample": "sampled children are drawn on the host.",
        "filters": "the tree on the device ranks children without filters.",
        "penalties": "the tree on the device ranks children without penalties.",
        "grammar": ON_HOST,
        "path rules": ON_HOST,
        "company": JOINT.format("ranks its children"),
    },
    "graph of a verification": {
        "deep top-k": "the ranks of a group exchange too few tokens for it.",
        "log-probabilities": "they are computed from the logits, after the forward.",
        "grammar": ON_HOST,
        "path rules": ON_HOST,
        "company": JOINT.format("samples"),
    },
    "graph of one sequence": {
        "several requests": "concurrent requests have a sequence each, and a CUDA graph with torch's own operators has"
        " one.",
        "guidance": "a guided request has two sequences, and a CUDA graph with torch's own operators has one.",
    },
}


def why_slower(executors: Collection[str], required: Collection[str]) -> str | None:
    """Returns why an executor does not run a request with the `required` features, or None if it does. `executors`: its
    columns of EXECUTORS."""
    reasons = (why for name in executors for feature, why in EXECUTORS[name].items() if feature in required)
    return next(reasons, None)
