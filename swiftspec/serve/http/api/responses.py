"""/v1/responses: OpenAI's newer endpoint, without a memory: every request brings its whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from swiftspec.serve.http.api.generation import BOTH_WAYS, chat_job, respond
from swiftspec.serve.http.api.responses_writer import ResponseWriter
from swiftspec.serve.http.api.sampling import Grammar, grammar_asked
from swiftspec.serve.http.app_context import Server
from swiftspec.serve.http.errors import ApiError, unsupported
from swiftspec.serve.http.format.answer import Answer
from swiftspec.serve.http.format.conversation import (
    Content,
    Name,
    Talk,
    Talked,
    called,
    parsed_arguments,
    text_of,
    tool_of,
)
from swiftspec.serve.http.format.logprobs import Scores
from swiftspec.serve.http.schema import (
    NEVER,
    ONE_CHOICE,
    WHOLE,
    Body,
    Constrained,
    JsonSchema,
    Object,
    Positive,
    ResponseFormat,
    Sampled,
    Text,
    Variables,
    Word,
    refuse,
)
from swiftspec.serve.http.sse import ENCODER

LOGPROBS = "message.output_text.logprobs"
# With the values that ask for nothing.
NEVER_HERE: dict[str, tuple[Any, ...]] = {
    **NEVER, **ONE_CHOICE, "previous_response_id": (), "conversation": (), "background": (False,), "prompt": (),
    "max_tool_calls": (), "truncation": ("disabled",),
}  # fmt: skip


class Item(Body):
    """A message (`role`, `content`), a call (function_call), what it gave (function_call_output), or a thought."""

    type: Word | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: Word | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Content | None = None


class ResponseTool(Body):
    type: Word
    name: Name | None = None
    description: Text | None = None
    parameters: Object | None = None


class ChosenTool(Body):
    type: Literal["function"]
    name: Name


class TextFormat(JsonSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=32)] | None = None


class ResponsesRequest(Sampled, Constrained):
    """OpenAI's, with vLLM's sampling parameters."""

    model: Word | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    include: Annotated[list[Word], Field(max_length=32)] | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    chat_template_kwargs: Variables | None = None
    # What OpenAI has and this server does not: see NEVER_HERE.
    previous_response_id: Word | None = None
    conversation: Word | Object | None = None
    background: bool | None = None
    prompt: Object | None = None
    max_tool_calls: Positive | None = None
    truncation: Word | None = None


def talk_of(body: ResponsesRequest) -> Talk:
    """The conversation as chat templates take it. Raises ApiError on items that are not served."""
    talk: Talk = []
    if body.instructions:
        talk.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*talk, {"role": "user", "content": body.input}]
    thought = ""
    for at, item in enumerate(body.input):
        where = f"input.{at}"
        kind = item.type or "message"
        if kind == "reasoning":
            thought = "" if item.content is None else _thought(item)
            continue
        if kind == "function_call":
            _add_call(talk, item, where)
        elif kind == "function_call_output":
            talk.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output, where)})
        elif kind == "message" and item.role is not None:
            role = "system" if item.role == "developer" else item.role
            talk.append({"role": role, "content": text_of(item.content, f"{where}.content")})
        else:
            raise unsupported(where, f"an item of type {kind[:40]!r}, or a message without a role")
        if thought and talk[-1]["role"] == "assistant":
            talk[-1]["reasoning_content"] = thought
        thought = ""
    return talk


def _thought(item: Item) -> str:
    if isinstance(item.content, str):
        return item.content
    return "".join(part.text or "" for part in item.content or ())


def _add_call(talk: Talk, item: Item, where: str) -> None:
    """Calls are items of their own; templates have them with what the assistant says."""
    if item.name is None:
        raise ApiError(400, f"{where}.name: a call needs one", f"{where}.name")
    call = called(item.call_id, item.name, parsed_arguments(item.arguments or "", f"{where}.arguments"))
    if not talk or talk[-1]["role"] != "assistant":
        talk.append({"role": "assistant", "content": None})
    talk[-1].setdefault("tool_calls", []).append(call)


def talked_of(body: ResponsesRequest) -> Talked:
    """The conversation and its tools, for the chat template."""
    tools: list[dict[str, Any]] = []
    for at, tool in enumerate(body.tools or ()):
        if tool.type != "function" or tool.name is None:
            raise unsupported(f"tools.{at}", f"a tool of type {tool.type[:40]!r}; only functions of your own")
        tools.append(tool_of(tool.name, tool.description, tool.parameters))
    chosen = body.tool_choice
    choice = chosen.name if isinstance(chosen, ChosenTool) else chosen or "auto"
    effort = {} if body.reasoning is None or body.reasoning.effort is None else body.reasoning.model_dump()
    variables = {f"reasoning_{name}": value for name, value in effort.items()} | (body.chat_template_kwargs or {})
    return Talked(talk_of(body), tools, choice, variables, single=body.parallel_tool_calls is False)


def grammar_here(body: ResponsesRequest) -> Grammar | None:
    """As `grammar_asked`; here a format stands in `text`."""
    form = None if body.text is None else body.text.format
    if form is None:
        return grammar_asked(body)
    schema = form if form.type == "json_schema" else None
    asked = ResponseFormat.model_construct(type=form.type, json_schema=schema)
    found = grammar_asked(body.model_copy(update={"response_format": asked}))
    if found is None or found[2] != "response_format":
        return found
    return found[0], found[1], "text.format"


def router(server: Server) -> APIRouter:
    """The endpoint."""
    made = APIRouter()

    @made.post("/v1/responses", responses=BOTH_WAYS)
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        _, codec = server.ready()
        model = server.name(body.model)
        refuse(body, NEVER_HERE)
        top = body.top_logprobs or 0 if body.top_logprobs or LOGPROBS in (body.include or ()) else None
        job = await chat_job(
            server, request, body, talked_of(body), limit=body.max_output_tokens, grammar=grammar_here(body),
            logprobs=top,
        )  # fmt: skip
        answer = Answer.of(job, codec)
        given = {
            "instructions": body.instructions, "metadata": body.metadata or {}, "model": model,
            "temperature": job.ask.sampling.get("temperature", 1.0), "top_p": job.ask.sampling.get("top_p", 1.0),
            "max_output_tokens": body.max_output_tokens, "previous_response_id": None,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": "auto" if body.tool_choice is None else _plain(body.tool_choice),
            "tools": [{"strict": False, **_plain(tool)} for tool in body.tools or ()],
            "text": {"format": {"type": "text"}} if body.text is None else _plain(body.text),
            "reasoning": {} if body.reasoning is None else _plain(body.reasoning),
            "truncation": "disabled", "store": False, "background": False,
        }  # fmt: skip
        ENCODER.encode(given)  # what is no text shows before the engine is asked
        writer = ResponseWriter(answer, given, Scores(codec), top)
        return await respond(server, request, answer, writer, body.stream)

    return made


def _plain(value: Body | str) -> Any:
    return value if isinstance(value, str) else value.model_dump(exclude_none=True, by_alias=True)
