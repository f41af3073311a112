"""`LLM`: text in, text out. Loads a model pair with its tokenizer and decodes prompts and conversations."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from swiftspec.config import PARTICLES, SPECULATION
from swiftspec.engine import Stats
from swiftspec.errors import UserError, truncated_repr
from swiftspec.params import SamplingParams
from swiftspec.settings.flags import MODELS, NETWORK, SETTINGS, flag_name
from swiftspec.settings.other_flags import flag_hint
from swiftspec.settings.settings import Settings, UsageError
from swiftspec.settings_schema import require
from swiftspec.startup.remote_session import open_local_or_remote
from swiftspec.startup.reporter import LOG, LogReporter
from swiftspec.startup.session import Session
from swiftspec.text.codec import ChatMessage
from swiftspec.text.messages import template_messages
from swiftspec.text.outputs import DecodedTokens, OutputBuilder, RequestOutput, TextChunk, TextRequest
from swiftspec.token_engine import TokenEngine, token_ids

MIN_PROGRESS_PROMPTS = 4  # with fewer, no progress bar is shown
COMMAND_ONLY = ("raw", "system_prompt", "listen", "max_sessions", "tls_cert", "tls_key")
LLM_OPTIONS = [  # names of the options, in the order of --help
    name
    for name, flag in SETTINGS.items()
    if name == "seed" or (flag.setting.group in (MODELS, NETWORK, SPECULATION, PARTICLES) and name not in COMMAND_ONLY)
]

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}
Conversation = Sequence[ChatMessage]


class LLM:
    """A target model and optionally a draft model, which generate text from text.

        with LLM("path/or/hub-id", "path/to/draft") as llm:
            for output in llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, max_tokens=32)):
                print(output.outputs[0].text)

    Methods, parameters and outputs have the names of vLLM's, so that its offline examples run unchanged. The text is
    that of `swiftspec serve` for the same request. One call decodes at a time, in it up to `max_num_seqs` prompts
    together; a call from another thread waits for its turn. A thread that starts a request while it reads a stream ends
    that stream.

    Notices go to the logger "swiftspec".
    """

    def __init__(self, model: str | Path | None = None, draft_model: str | Path | None = None, **options: Any) -> None:
        """Loads the models.

        `model`: directory, hub id or GGUF file of the target, or "demo"; None: the built-in model.
        `draft_model`: the same for the draft, or "mtp", or "suffix" for suffix lookup without a draft model.
        `options`: the flags of `swiftspec serve` for models, workers and speculation, with underscores: `dtype`,
            `max_model_len`, `draft_steps`, ...; see docs/reference/flags.md. `speculative_config` takes vLLM's object.

        Raises UserError in one line if an option is unknown or invalid, or the models cannot be loaded.
        """
        settings = llm_settings({"model": model, "draft_model": draft_model, **options})
        self._init(open_local_or_remote(settings, LogReporter()), settings.seed)

    @classmethod
    def from_session(cls, session: Session) -> Self:
        """Returns an LLM on models that are loaded already."""
        self = cls.__new__(cls)
        self._init(session)
        return self

    def _init(self, session: Session, seed: int = 0) -> None:
        self.session, self._seed = session, seed
        self._close = weakref.finalize(self, session.close)  # also at the end of a program that does not call `close`
        self._turn, self._tokenizing = EngineTurn(), threading.Lock()
        self._text_of, self._numbers = DecodedTokens(session.codec), count()

    @property
    def llm_engine(self) -> TokenEngine:
        """The engine, which decodes token ids."""
        return self.session.llm

    def get_tokenizer(self) -> Any:
        """Returns the target's tokenizer, an object of transformers."""
        return self.session.codec.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that the target's generation_config.json recommends, with the
        option `seed`."""
        return SamplingParams(**{"seed": self._seed, **self.session.model_defaults})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues prompts, without a chat template, and returns their outputs in the same order.

        `prompts`: one prompt or a list: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
        `sampling_params`: one object for all prompts or one for each; None: `get_default_sampling_params()`.
        `use_tqdm`: show a progress bar for more than a few prompts.

        An output whose logits are not finite has the finish reason "error". Raises UserError before anything is decoded
        if a request cannot be served, for example because a prompt is empty or exceeds the context.
        """
        return self._decode(self._requests(_prompt_list(prompts), sampling_params, self._request), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, each a list of messages with `role` and `content`. The text is
        that of the model, including reasoning and tool calls as the model writes them.

        `tools`: JSON schemas of tools, for the chat template. `chat_template`: Jinja source of a template that replaces
        the model's. `chat_template_kwargs`: further variables of the template.
        `add_generation_prompt`: begin the assistant's message. `continue_final_message`: continue the last message
        instead. Other parameters and errors: see `generate`.
        """
        options = {
            "tools": tools,
            "variables": chat_template_kwargs,
            "continue_final_message": continue_final_message,
            "add_generation_prompt": add_generation_prompt,
            "template": chat_template,
        }

        def request(conversation: Conversation, sampling: SamplingParams) -> TextRequest:
            tokens = self._encode_chat(conversation, **options)
            return self._checked(None, tokens, sampling, continues_text=continue_final_message)

        conversations: Any = [messages] if len(messages) and isinstance(messages[0], Mapping) else messages
        return self._decode(self._requests(conversations, sampling_params, request), use_tqdm)

    def stream(
        self, prompt: Prompt | Conversation, sampling_params: SamplingParams | None = None
    ) -> Generator[TextChunk]:
        """Streams one request: yields what each round adds to the output. Closing the iterator ends the request.

        `prompt`: a prompt as for `generate`, or the messages of a conversation. `sampling_params`: see `generate`; `n`
        must be 1. Raises UserError before anything is decoded if the request cannot be served.
        """
        return self._stream(self.prepare_stream(prompt, sampling_params))

    def prepare_stream(
        self, prompt: Prompt | Conversation, sampling_params: SamplingParams | None = None
    ) -> OutputBuilder:
        """Checks a request as `stream` does and returns it with the builder of its output, for an engine that decodes
        elsewhere."""
        request = self._request(prompt, *self._samplings(sampling_params, 1))
        require(request.sampling.n == 1, f"a stream has one output, not n = {request.sampling.n}: use generate")
        return self._output_builder(request)

    def close(self) -> None:
        """Ends the running request and frees what the models need outside of Python. Later calls raise UserError."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _samplings(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, number: int
    ) -> list[SamplingParams]:
        """Returns the sampling parameters of each of `number` prompts."""
        if sampling is None:
            sampling = self.get_default_sampling_params()
        if isinstance(sampling, SamplingParams):
            return [sampling] * number
        several = isinstance(sampling, Sequence) and all(isinstance(each, SamplingParams) for each in sampling)
        require(several, f"sampling_params must be SamplingParams, or one per prompt, not {truncated_repr(sampling)}")
        same = len(sampling) == number
        require(same, f"got {len(sampling)} SamplingParams for {number} prompts: pass one, or one per prompt")
        return [*sampling]

    def _requests(
        self,
        prompts: Sequence[Any],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        create: Callable[[Any, SamplingParams], TextRequest],
    ) -> list[TextRequest]:
        """Returns a request for each prompt. Raises UserError, which names the prompt if there are several."""
        requests: list[TextRequest] = []
        for index, pair in enumerate(zip(prompts, self._samplings(sampling, len(prompts)), strict=True)):
            try:
                requests.append(create(*pair))
            except UserError as error:
                if len(prompts) == 1:
                    raise
                raise UserError(f"prompt {index}: {error}") from None
        return requests

    def _request(self, prompt: Prompt | Conversation, sampling: SamplingParams) -> TextRequest:
        """Encodes a prompt or a conversation. Raises UserError if the request cannot be served."""
        content: Any = _prompt_field(prompt) if isinstance(prompt, Mapping) else prompt
        require(_is_sequence(content), f"a prompt is text or token ids, not {truncated_repr(content)}")
        if isinstance(content, str):
            with self._tokenizing:
                tokens = self.session.codec.encode(content, self.llm_engine.max_model_len)
            return self._checked(content, tokens, sampling, continues_text=True)
        if len(content) and isinstance(content[0], Mapping):
            return self._checked(None, self._encode_chat(content), sampling, continues_text=False)
        return self._checked(None, [*token_ids(content)], sampling, continues_text=True)

    def _output_builder(self, request: TextRequest) -> OutputBuilder:
        return OutputBuilder(request, self.session.codec, self.llm_engine.eos_token_ids, self._text_of)

    def _encode_chat(self, messages: Conversation, **options: Any) -> list[int]:
        with self._tokenizing:
            return self.session.codec.encode_chat(template_messages(messages), self.llm_engine.max_model_len, **options)

    def _checked(
        self, prompt: str | None, tokens: list[int], sampling: SamplingParams, *, continues_text: bool
    ) -> TextRequest:
        """Returns a request. Raises UserError if the engine cannot serve it."""
        request = TextRequest.create(prompt, tokens, sampling, self.session.codec, continues_text=continues_text)
        self.llm_engine.roles.limits.check(tokens, request.sampling)
        return request

    def _decode(self, requests: Sequence[TextRequest], use_tqdm: bool) -> list[RequestOutput]:
        """Decodes requests to their ends, `max_num_seqs` outputs at a time."""
        samplings = [(request, sampling) for request in requests for sampling in request.samplings()]
        builders = [self._output_builder(request) for request, _ in samplings]
        if not builders:
            return []
        with (
            self._turn.take(),
            _progress_bar(len(builders), use_tqdm and len(requests) >= MIN_PROGRESS_PROMPTS) as done,
        ):
            decoding, chunks = self.llm_engine.batch(
                [request.prompt_token_ids for request, _ in samplings],
                [sampling for _, sampling in samplings],
                lambda index: builders[index].finish_reason is not None,
            )
            with closing(chunks):
                for engine_request, chunk in chunks:
                    builder = builders[engine_request.number]
                    if builder.finish_reason is None:
                        builder.push(chunk)
                        if builder.finish_reason is not None:
                            done()
                        if engine_request.error is not None:
                            LOG.warning("an output has ended early: %s", engine_request.error)
        outputs = zip(builders, (engine_request.stats for engine_request in decoding), strict=True)
        return [self._request_output(request, outputs) for request in requests]

    def _request_output(self, request: TextRequest, outputs: Iterator[tuple[OutputBuilder, Stats]]) -> RequestOutput:
        """Takes the outputs of a request from the iterator over those of all requests."""
        own = [next(outputs) for _ in range(request.sampling.n)]
        return RequestOutput(
            request_id=str(next(self._numbers)),
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=own[0][0].prompt_logprobs,
            outputs=[builder.output(index, stats) for index, (builder, stats) in enumerate(own)],
        )

    def _stream(self, builder: OutputBuilder) -> Generator[TextChunk]:
        request, engine = builder.request, self.llm_engine
        with self._turn.take(), closing(engine.stream(request.prompt_token_ids, request.sampling)) as chunks:
            for chunk in chunks:
                piece = builder.push(chunk)
                if builder.finish_reason is not None:
                    yield builder.with_stats(piece, engine.stats)
                    return
                yield piece


class EngineTurn:
    """The order in which threads use an engine, which decodes for one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: tuple[int, object] | None = None  # the thread, and an object that stands for its call

    @contextmanager
    def take(self) -> Iterator[None]:
        """Context manager that waits until no other thread has the turn, and holds it. A thread that has it already,
        for a stream that it reads, passes it on to its new call, because the engine ends that stream."""
        mine = threading.get_ident(), object()
        if self._holder is None or self._holder[0] != mine[0]:
            self._lock.acquire()
        self._holder = mine
        try:
            yield
        finally:
            if self._holder is mine:
                self._holder = None
                self._lock.release()


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[], object]]:
    """Context manager that shows a progress bar on stderr. Yields a function that counts one completed output."""
    if not shown:
        yield lambda: None
        return
    columns = TextColumn("outputs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _prompt_list(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts, of one prompt or a sequence of them."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    require(_is_sequence(prompts), f"prompts are text, token ids or a list of these, not {truncated_repr(prompts)}")
    listed = prompts.tolist() if isinstance(prompts, np.ndarray | torch.Tensor) else [*prompts]
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray | torch.Tensor)


def _prompt_field(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    """Returns the text or the token ids of a prompt that is a mapping."""
    for name in ("prompt_token_ids", "prompt"):
        if prompt.get(name) is not None:
            return prompt[name]
    raise UserError(f"a prompt needs prompt or prompt_token_ids, but has {truncated_repr([*prompt])}")


def llm_settings(values: Mapping[str, Any]) -> Settings:
    """Returns the settings of an `LLM`. `values`: its options by name. Raises UsageError, which names the option, if
    one is unknown or invalid."""
    for name in values:
        if name not in LLM_OPTIONS:
            raise UsageError(f"LLM has no option {truncated_repr(name)}{_option_hint(name)}")
    given = {name: _plain(value) for name, value in values.items() if value is not None}
    return Settings.create(given, str)


def _plain(value: Any) -> Any:
    """Returns the value of an option as the command line has it: a path and a dtype as text."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, Path) else value


def _option_hint(name: str) -> str:
    """Returns a clause about an unknown option."""
    if name in SETTINGS and SETTINGS[name].config is SamplingParams:
        return f": pass it as SamplingParams({name}=...)"
    if name in SETTINGS:
        return ": it is an option of `swiftspec serve` only"
    hint = flag_hint(flag_name(name), [*map(flag_name, LLM_OPTIONS)])
    return "" if hint is None else ": " + re.sub("--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), hint)
