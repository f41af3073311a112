"""Generates docs/reference/python.md, the Python API reference, from docstrings and signatures."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator

import swiftspec
from swiftspec.engine import Stats
from swiftspec.errors import UserError
from swiftspec.settings_schema import Setting
from swiftspec.text.outputs import CompletionOutput, Logprob, RequestOutput, TextChunk

HEAD = """\
<!-- Made by `python -m tools.docs`: do not edit. -->
# Python API

`LLM` takes text and returns text, with the names of vLLM's `LLM`; `AsyncEngine` makes an `LLM` available to coroutines.
Importing `swiftspec` does not import torch; the first use of one of its names does. [flags.md](flags.md) lists the
options, [cli.md](cli.md) explains them, [examples/](../../examples/README.md) has programs.

```python
from swiftspec import LLM, SamplingParams

llm = LLM("path/or/hub-id", "path/to/draft", max_model_len=4096)
for output in llm.generate(["Hello, my name is", "The capital of France is"], SamplingParams(max_tokens=32)):
    print(output.prompt, output.outputs[0].text, output.outputs[0].stats.accepted)

(answer,) = llm.chat([{"role": "user", "content": "What is a fork?"}], SamplingParams(temperature=0.2))
for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=64, stop="The end")):
    print(piece.text, end="", flush=True)
llm.close()
```

With `AsyncEngine`, here in a notebook, whose cells can use `await`:

```python
from contextlib import aclosing

from swiftspec import AsyncEngine, SamplingParams

engine = AsyncEngine("path/to/target", "path/to/draft", max_num_seqs=4)
async with aclosing(engine.generate("Once upon a time", SamplingParams(max_tokens=64))) as pieces:
    async for piece in pieces:  # leaving the loop cancels the request
        print(piece.text, end="", flush=True)

await engine.close()
```

A function for a chat interface such as Gradio's `ChatInterface`, which shows the text so far:

```python
def answer(message, history):
    text = ""
    for piece in llm.stream([*history, {"role": "user", "content": message}]):
        text += piece.text
        yield text
```

[Embedding](../guides/serving.md#embedding) explains how an engine serves HTTP inside another application.
"""

NOTES = """\
## Notes

- vLLM's offline examples run after the import is changed. Differences: `SamplingParams` decodes up to the end of the
  context unless `max_tokens` is set (vLLM: 16 tokens), and its seed is 0, so that outputs are reproducible; `seed=None`
  draws one. Options of vLLM that have another name or no meaning here are refused in one line, with the name here if
  there is one. `speculative_config` is understood: `model`, `num_speculative_tokens` (`draft_steps`) and `method`:
  "ngram" and "suffix" are suffix lookup, "mtp", "eagle3", "dflash" and "draft_model" are supported.
- The text equals that of `swiftspec serve` for the same prompt, seed and parameters; several outputs (`n`) have the
  seeds of the server's choices. `chat` returns what the model writes, including reasoning and tool calls.
- Text never ends within a character: at `max_tokens` an incomplete one is left out, as in vLLM. `token_ids` has its
  tokens.
- One call decodes at a time; a call from another thread waits. In a call up to `max_num_seqs` prompts are decoded
  together. Closing the iterator of `stream` ends its request. A call after `close` raises `UserError`.
- `SamplingParams(structured_outputs=StructuredOutputsParams(json=...))`, or `regex`, `choice`, `grammar`, constrains
  the output, which ends with finish reason "stop" where the constraint can only end, even with `ignore_eos`. It works
  in every mode except `smc`. `grammar` takes a grammar of [llguidance](https://github.com/guidance-ai/llguidance).
- `min_tokens`, `allowed_token_ids` and bad words exclude tokens in every mode, with the text of autoregressive
  decoding; bad words of several tokens are not supported in mode `smc`.
- `logprobs=k`: the token's log-probability and those of the k most likely tokens, from the model's distribution after
  guidance and before grammar, token rules, bias, penalties and temperature; -1: of the whole vocabulary.
  `prompt_logprobs=k`: those of the prompt, which is then prefilled completely.
- Programs that start ranks themselves use the engine on token ids, `swiftspec.llm_engine.LLMEngine`
  ([ranks.md](../guides/ranks.md#other-launchers)).
"""


def page() -> str:
    """Returns the text of docs/reference/python.md."""
    parts = [HEAD, *_class(swiftspec.LLM, "LLM"), *_class(swiftspec.AsyncEngine, "AsyncEngine")]
    parts += [_config(swiftspec.SamplingParams, "SamplingParams")]
    parts += [_config(swiftspec.StructuredOutputsParams, "StructuredOutputsParams")]
    for kind in (RequestOutput, CompletionOutput, TextChunk, Logprob, Stats):
        parts.append(_dataclass(kind))
    parts += [_config(swiftspec.EngineConfig, "EngineConfig")]
    errors = UserError, swiftspec.InvalidRequestError, swiftspec.RequestRejectedError, swiftspec.GenerationFailedError
    parts += [f"## {error.__name__}\n\n{_doc(error)}\n" for error in errors]
    return "\n".join([*parts, NOTES])


def _doc(thing: object) -> str:
    return inspect.getdoc(thing) or ""


def _class(kind: type, name: str) -> Iterator[str]:
    yield f"## {name}\n\n```python\n{name}{_signature(kind.__init__)}\n```\n\n{_doc(kind)}\n"
    for attribute, value in inspect.getmembers(kind):
        if attribute.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"### `{name}.{attribute}`\n\n{_doc(value)}\n"
        elif inspect.isfunction(value):
            yield f"### `{name}.{attribute}`\n\n```python\n{attribute}{_signature(value)}\n```\n\n{_doc(value)}\n"


def _signature(function: object) -> str:
    signature = inspect.signature(typing.cast(typing.Callable[..., object], function))
    parameters = [each for name, each in signature.parameters.items() if name != "self"]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)).replace("'", "")
    return re.sub(r"<function .*?<lambda> at 0x[0-9a-f]+>", "...", text)


def _config(kind: type, name: str) -> str:
    lines = [f"## {name}\n\n{_doc(kind)}\n", "| field | default | meaning |\n| --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        setting = next((value for value in field.metadata.values() if isinstance(value, Setting)), None)
        text = setting.help if setting is not None and setting.help else ""
        lines.append(f"| `{field.name}` | `{_default(field)}` | {str(text).replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return repr(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "required"


def _dataclass(kind: type) -> str:
    fields = "".join(f"| `{each.name}` | `{_name_of(each.type)}` |\n" for each in dataclasses.fields(kind))
    members = "".join(
        f"| `{name}` | {_doc(value).splitlines()[0] if _doc(value) else ''} |\n"
        for name, value in inspect.getmembers(kind)
        if isinstance(value, property) and not name.startswith("_")
    )
    table = f"| field | type |\n| --- | --- |\n{fields}"
    return f"## {kind.__name__}\n\n{_doc(kind)}\n\n{table}" + (
        f"\n| property | meaning |\n| --- | --- |\n{members}" if members else ""
    )


def _name_of(kind: object) -> str:
    text = kind.__forward_arg__ if isinstance(kind, typing.ForwardRef) else kind if isinstance(kind, str) else None
    return str(text if text is not None else getattr(kind, "__name__", kind)).replace("|", r"\|")
