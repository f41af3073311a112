"""Generates docs/reference/python.md, the Python API reference, from docstrings and signatures."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator

import swiftspec
from swiftspec.builder.load_options import LoadOptions
from swiftspec.engine import Completion, Stats, TokenChunk
from swiftspec.errors import UserError
from swiftspec.messages import Logprob
from swiftspec.settings_schema import Setting

HEAD = """\
<!-- Made by `python -m tools.docs`: do not edit. -->
# Python API

`LLM` decodes token ids, and `AsyncEngine` makes an `LLM` available to coroutines. Tokenize with the target's tokenizer,
for example `transformers.AutoTokenizer`. Importing `swiftspec` does not import torch; the first use of one of its names
does. [cli.md](cli.md) explains modes and settings, [examples/](../../examples/README.md) has programs.

```python
from swiftspec import LLM, EngineConfig, SamplingParams

llm = LLM("path/to/target", "path/to/draft", EngineConfig(draft_steps=4))
completion = llm.generate(prompt_ids, SamplingParams(temperature=0.8, seed=1))
print(completion.token_ids, completion.finish_reason, completion.stats.rounds)
llm.close()
```

With `AsyncEngine`, here in a notebook, whose cells can use `await`:

```python
import asyncio
from contextlib import aclosing

from swiftspec import LLM, AsyncEngine, SamplingParams
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

engine = AsyncEngine(LLM("path/to/target", "path/to/draft"))
tokenizer = Tokenizer.from_file("path/to/target/tokenizer.json")
completions = await asyncio.gather(*(engine.generate(ids) for ids in prompts))  # queued, or `max_num_seqs` at a time

text = DecodeStream(skip_special_tokens=True)  # a character can consist of the tokens of several chunks
async with aclosing(engine.stream(prompt_ids, SamplingParams(max_tokens=64))) as chunks:
    async for chunk in chunks:  # leaving the loop cancels the request
        print(*(text.step(tokenizer, token) or "" for token in chunk.token_ids), sep="", end="")

await engine.close()
```

[Embedding](../guides/serving.md#embedding) explains how an engine serves HTTP inside another application.
"""

NOTES = """\
## Notes

- One request at a time, or several with `max_num_seqs` or `smc_groups`. A call from a second thread during a request
  raises `UserError`, and so does any call after `close`. Token ids and sampling values may be NumPy or torch scalars.
- Closing the iterator of `stream` ends its request. Prefill happens in the iterator's first step; `cancelled` is called
  before each prompt chunk (256 tokens on a CPU, 1,024 on a GPU), and a true value ends the stream without a chunk.
- `SamplingParams(grammar=...)` takes a grammar of [llguidance](https://github.com/guidance-ai/llguidance) as text:
  Lark, or its JSON form, for example from `llguidance.LLMatcher.grammar_from_json_schema`. The answer matches the
  grammar and ends with finish reason "stop" where it can only end, even with `ignore_eos`. It needs the target's
  `tokenizer.json` and works in every mode except `smc`. An invalid or too complex grammar raises `UserError`.
- `min_tokens`, `allowed_token_ids` and `bad_words_ids` exclude tokens in every mode, with the text of autoregressive
  decoding; bad words of several tokens are not supported with sequence groups (`max_num_seqs` above 1, mode `smc`).
- `logprobs=k` adds log-probabilities to each chunk: the token's own and the k most likely, from the model's
  distribution after guidance and before grammar, token rules, bias, penalties and temperature; -1 adds those of the
  whole vocabulary, `logprob_token_ids` those of these tokens instead. `prompt_logprobs=k` adds those of the prompt to
  the first chunk; the prompt is then prefilled completely. `generate` returns neither.
"""


def page() -> str:
    """Returns the text of docs/reference/python.md."""
    parts = [HEAD, *_class(swiftspec.LLM, "LLM"), _options()]
    parts += [*_class(swiftspec.AsyncEngine, "AsyncEngine"), _config(swiftspec.EngineConfig, "EngineConfig")]
    parts += [_config(swiftspec.SamplingParams, "SamplingParams")]
    for kind in (Completion, TokenChunk, Stats, Logprob):
        parts.append(_dataclass(kind))
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


def _options() -> str:
    rows = "".join(f"| `{name}` | `{_name_of(kind)}` |\n" for name, kind in LoadOptions.__annotations__.items())
    return f"### Load options\n\n{_doc(LoadOptions)}\n\n| option | type |\n| --- | --- |\n{rows}"


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
