"""Flags of vLLM, SGLang, llama.cpp and transformers that have another name here, or none."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from swiftspec.settings.flags import FLAGS, SETTINGS, flag_name

FORMAT = "the checkpoint determines the format of the weights"
MEMORY = "memory follows from --max-model-len and --prefix-cache-memory"
DRAFT = "--draft-model, --draft-steps and --verify-batch"
ALWAYS_ON = "always on"

OTHER_FLAGS = {  # flag of another engine: the flag here, or why there is none
    # vLLM
    "--tensor-parallel-size": "--target-tp",
    "-tp": "--target-tp",
    "--pipeline-parallel-size": "ranks split each layer: use --target-tp",
    "--data-parallel-size": "not supported: start one server per replica",
    "--gpu-memory-utilization": MEMORY,
    "--swap-space": MEMORY,
    "--cpu-offload-gb": MEMORY,
    "--speculative-model": "--draft-model",
    "--num-speculative-tokens": "--draft-steps",
    "--quantization": FORMAT,
    "-q": FORMAT,
    "--load-format": FORMAT,
    "--tokenizer": "the tokenizer is that of --model",
    "--trust-remote-code": "code of models is never executed",
    "--enable-prefix-caching": ALWAYS_ON,
    "--no-enable-prefix-caching": "--prefix-cache-memory 0",
    "--enable-chunked-prefill": ALWAYS_ON,
    "--enable-auto-tool-choice": ALWAYS_ON,
    "--tool-call-parser": "tool calls are parsed without a flag",
    "--reasoning-parser": "reasoning is parsed without a flag",
    "--max-num-batched-tokens": "--max-num-seqs",
    "--attention-backend": "--ops",
    "--kv-cache-memory-bytes": MEMORY,
    "--enable-lora": "LoRA adapters are not supported",
    "--lora-modules": "LoRA adapters are not supported",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--block-size": "it is --kv-events-config.block_size",
    "--ssl-keyfile": "the server has no TLS: use a reverse proxy",
    "--ssl-certfile": "the server has no TLS: use a reverse proxy",
    # SGLang
    "--model-path": "--model",
    "--tp-size": "--target-tp",
    "--tp": "--target-tp",
    "--context-length": "--max-model-len",
    "--mem-fraction-static": MEMORY,
    "--max-running-requests": "--max-num-seqs",
    "--max-queued-requests": "--max-queue",
    "--disable-radix-cache": "--prefix-cache-memory 0",
    "--speculative-algorithm": DRAFT,
    "--speculative-draft-model-path": "--draft-model",
    "--speculative-num-steps": "--draft-steps",
    "--speculative-eagle-topk": "--draft-leaves",
    "--speculative-num-draft-tokens": "--verify-batch",
    # llama.cpp
    "-m": "--model",
    "-hf": "--model",
    "-hfr": "--model",
    "--hf-repo": "--model",
    "--hf-repo-draft": "--draft-model",
    "-md": "--draft-model",
    "--model-draft": "--draft-model",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-n": "--max-tokens",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "-t": "--threads",
    "-p": "--prompt",
    "-f": "--prompt-file",
    "--file": "--prompt-file",
    "-s": "--seed",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-sys": "--system-prompt",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--draft": "--draft-steps",
    "--draft-n": "--draft-steps",
    "--draft-max": "--draft-steps",
    "-ngl": "all layers run on --device",
    "--gpu-layers": "all layers run on --device",
    "--n-gpu-layers": "all layers run on --device",
    "-fa": "the operators are selected by --ops",
    "--flash-attn": "the operators are selected by --ops",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-ctk": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "--chat-template-file": "--chat-template",
    "--jinja": ALWAYS_ON,
    "--lora": "LoRA adapters are not supported",
    "--cfg-scale": "--guidance-scale",
    "--cfg-negative-prompt": "--negative-prompt",
    "--grammar-file": "--grammar",
    # transformers
    "--model-name-or-path": "--model",
    "--assistant-model": "--draft-model",
    "--max-new-tokens": "--max-tokens",
}

OLD_SETTINGS = {  # setting of earlier versions: what replaces it
    "kept_memory": "it is now --prefix-cache-memory",
    "kv_events_endpoint": "it is now --kv-events-config.endpoint, with --kv-events-config.enable_kv_cache_events true",
    "kv_events_replay_endpoint": "it is now --kv-events-config.replay_endpoint",
    "kv_events_topic": "it is now --kv-events-config.topic",
    "kv_block_size": "it is now --kv-events-config.block_size",
    "response_store_memory": "the store has 256 MiB",
    "queue_timeout": "a request waits at most 60 s",
    "drain_timeout": "running requests have 20 s to finish",
    "session_idle": "an idle session is freed after 600 s",
}


def flag_hint(name: str, known: Collection[str]) -> str | None:
    """Returns a clause about an unknown flag: what replaces a flag of an earlier version, the flag of the same meaning
    among `known`, why there is none, or the flag with the most similar name. Returns None without such a flag."""
    old = name.removeprefix("--").removeprefix("no-").replace("-", "_")
    if old in OLD_SETTINGS:
        return OLD_SETTINGS[old]
    if old in SETTINGS and old not in FLAGS:
        python_only = SETTINGS[old].setting.python_only
        return f"it is now an option of swiftspec.LLM: {old}" if python_only else f"it is now {flag_name(old)}"
    other = OTHER_FLAGS.get(name.replace("_", "-"))
    if other is None:
        names = {flag.lstrip("-"): flag for flag in known}
        near = difflib.get_close_matches(name[:80].lstrip("-").replace("_", "-"), names, 1)
        return f"did you mean {names[near[0]]}?" if near else None
    if not other.startswith("--"):
        return other
    flags = [word.rstrip(",") for word in other.split() if word.startswith("--")]
    return f"did you mean {other}?" if all(flag in known for flag in flags) else None
