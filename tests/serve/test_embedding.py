"""`create_app(AsyncEngine(llm))` inside another FastAPI application: every endpoint, in one process."""

from __future__ import annotations

import asyncio
import re
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from swiftspec import LLM, AsyncEngine, SamplingParams, TextChunk
from swiftspec.errors import UserError
from swiftspec.serve.app import create_app
from swiftspec.serve.middleware.security import SecurityMiddleware
from tests.support.clients import anthropic, openai
from tests.support.http import Player, serving
from tests.support.toy_pair import make_pair

HELLO: Any = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"prompt": "def f", "temperature": 0.0, "max_tokens": 9}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> Iterator[AsyncEngine]:
    """One engine for the event loops of all tests."""
    engine = AsyncEngine(LLM(*pair, draft_steps=2, verify_batch=8, graft_suffix=False, self_switch=False))
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def outer(engine: AsyncEngine) -> FastAPI:
    """An application of a user, with an endpoint of its own and the server below /llm."""
    app = FastAPI()

    @app.get("/own")
    async def own() -> str:
        return "answer"

    app.mount("/llm", create_app(engine))
    return app


def run(app: Any, scene: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Runs a scene with an HTTP client of an application in this process."""

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await asyncio.wait_for(scene(client), 100)

    asyncio.run(main())


@pytest.fixture(scope="module")
def url(outer: FastAPI) -> Iterator[str]:
    """The outer application behind a server in a thread."""
    with serving(outer) as url:
        yield f"{url}/llm"


def test_acceptance_is_counted_for_output_tokens_only(pair: tuple[Path, Path]) -> None:
    """tokens = rounds + accepted: in usage, timings, metrics and by position, wherever the answer ends in a round."""
    total = {"tokens": 0, "rounds": 0, "accepted": 0}

    async def scene(client: httpx.AsyncClient) -> None:
        async def complete(**fields: Any) -> Any:
            response = await client.post("/v1/completions", json={**GREEDY, "max_tokens": 24, **fields})
            answer = response.json()
            usage, timings = answer["usage"], answer["timings"]
            spec = answer["metrics"]["speculative_decoding"]
            details, done = usage["completion_tokens_details"], usage["completion_tokens"]
            assert done == timings["predicted_n"] == spec["num_spec_steps"] + spec["num_accepted_draft_tokens"]
            assert details["accepted_prediction_tokens"] == timings["draft_n_accepted"]
            assert timings["draft_n_accepted"] == spec["num_accepted_draft_tokens"]
            assert sum(details[f"{name}_prediction_tokens"] for name in ("accepted", "rejected")) == timings["draft_n"]
            assert sum(spec["num_accepted_tokens_per_pos"]) == spec["num_accepted_draft_tokens"]
            assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
            total["tokens"] += done
            total["rounds"] += spec["num_spec_steps"]
            total["accepted"] += spec["num_accepted_draft_tokens"]
            return answer

        text = (await complete())["choices"][0]["text"]
        for max_tokens in (1, 2, 3):
            await complete(max_tokens=max_tokens)
        for at in (1, 4, 7):  # in one round, over two, and near the end
            stopped = await complete(stop=text[at : at + 2])
            assert stopped["choices"][0]["finish_reason"] == "stop"
        exported = (await client.get("/metrics")).text
        for name, value in (
            ("generation_tokens_total", total["tokens"]),
            ("spec_decode_num_drafts_total", total["rounds"]),
        ):
            assert f'swiftspec:{name}{{model_name="target"}} {value:.1f}' in exported
        by_depth = re.findall(r"swiftspec:spec_decode_num_accepted_tokens_per_pos_total\{.*\} (\S+)", exported)
        assert sum(map(float, by_depth)) == total["accepted"] > 10
        assert 'draft_acceptance_low{model_name="target"} 0.0' in exported

    async def main() -> None:
        async with AsyncEngine(pair[0], pair[0], draft_steps=8, verify_batch=16, self_switch=False) as engine:
            transport = httpx.ASGITransport(create_app(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await asyncio.wait_for(scene(client), 100)

    asyncio.run(main())


@pytest.mark.slow
def test_synthetic_acceptance_is_stated_in_every_answer(pair: tuple[Path, Path]) -> None:
    """Not in that of a request without the draft, which has the target's text. A grammar is refused."""
    marks = {"exact": False, "synthetic_acceptance_length": 2.0}

    async def scene(client: httpx.AsyncClient) -> None:
        async def ask(path: str, **fields: Any) -> Any:
            return await client.post(path, json={"max_tokens": 12, "temperature": 0.0, **fields})

        chat: dict[str, Any] = {"messages": HELLO}
        for path, fields in (
            ("/v1/completions", {"prompt": "def f"}), ("/v1/chat/completions", chat), ("/v1/messages", chat),
            ("/v1/responses", {"input": "hello", "max_tokens": None, "max_output_tokens": 16}),
        ):  # fmt: skip
            answer = (await ask(path, **fields)).json()
            assert {name: answer.get(name) for name in marks} == marks, path
            stream = (await ask(path, stream=True, **fields)).text
            assert '"exact":false,"synthetic_acceptance_length":2.0' in stream, path
        alone = (await ask("/v1/completions", prompt="def f", verify_batch=1)).json()
        assert not marks.keys() & alone.keys()
        assert (await client.get("/v1/models")).json()["data"][0]["synthetic_acceptance_length"] == 2.0
        for path, fields in (
            ("/v1/completions", {"prompt": "def f", "structured_outputs": {"regex": "a+"}}),
            ("/v1/chat/completions", {**chat, "response_format": {"type": "json_object"}}),
            ("/v1/completions", {"prompt": "def f", "min_tokens": 3}),
        ):
            answer = await ask(path, **fields)
            assert answer.status_code == 400
            assert " not supported with synthetic_acceptance_length, " in answer.json()["error"]["message"]

    async def main() -> None:
        async with AsyncEngine(*pair, synthetic_acceptance_length=2) as engine:
            transport = httpx.ASGITransport(create_app(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await asyncio.wait_for(scene(client), 100)

    asyncio.run(main())


def test_the_openai_client(url: str, engine: AsyncEngine) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    (model,) = client.models.list().data
    assert model.id == "target"
    text = client.completions.create(model=model.id, **GREEDY)
    parts = client.completions.create(model=model.id, stream=True, **GREEDY)
    assert "".join(part.choices[0].text for part in parts if part.choices) == text.choices[0].text
    assert text.usage is not None and text.usage.completion_tokens == 9

    async def generate() -> list[TextChunk]:
        return [chunk async for chunk in engine.generate("def f", SamplingParams(temperature=0.0, max_tokens=9))]

    assert "".join(chunk.text for chunk in asyncio.run(generate())) == text.choices[0].text
    chat = client.chat.completions.create(model=model.id, messages=HELLO, max_tokens=5, seed=1)
    assert chat.choices[0].finish_reason in ("stop", "length") and chat.usage is not None
    response = client.responses.create(model=model.id, input="hello", max_output_tokens=5)
    assert response.usage is not None and response.usage.output_tokens <= 5
    assert client.responses.retrieve(response.id) == response
    with pytest.raises(openai.BadRequestError, match="leaves no room"):
        client.completions.create(model=model.id, prompt=[5] * 5000)


@pytest.mark.slow
def test_the_anthropic_client_and_errors_in_its_schema(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="-")
    message = client.messages.create(model="target", messages=HELLO, max_tokens=5)
    assert message.usage.output_tokens <= 5
    wrong = httpx.post(f"{url}/v1/messages", json={"model": "other", "messages": HELLO, "max_tokens": 5})
    assert (wrong.status_code, wrong.json()["type"], wrong.json()["error"]["type"]) == (404, "error", "not_found_error")


def test_other_endpoints_and_the_outer_application(outer: FastAPI) -> None:
    async def scene(client: httpx.AsyncClient) -> None:
        assert (await client.get("/own")).json() == "answer"
        health = (await client.get("/llm/health")).json()
        assert (health["status"], health["mode"], health["running"]) == ("ok", "serial", 0)
        assert (await client.get("/llm/health/generate")).json()["status"] == "ok"
        body = {"prompt": "x", "max_tokens": 20, "guided_choice": ["yes", "no"]}
        text = (await client.post("/llm/v1/completions", json=body)).json()["choices"][0]["text"]
        assert text in ("yes", "no")
        metrics = (await client.get("/llm/metrics")).text
        assert 'swiftspec:ready{model_name="target"} 1.0' in metrics and 'mode="serial"' in metrics
        assert (await client.get("/llm/")).text.count('"page/app.js"') == 1
        assert (await client.get("/llm/page/app.js")).status_code == 200

    run(outer, scene)


def test_choices_and_prompts_equal_requests_with_one(outer: FastAPI) -> None:
    body: dict[str, Any] = {
        "temperature": 0.9,
        "max_tokens": 8,
        "seed": 3,
        "logprobs": 1,
        "echo": True,
        "ignore_eos": True,
    }
    prompts = ["def f", "class", [5, 6]]

    async def scene(client: httpx.AsyncClient) -> None:
        async def answer(**more: Any) -> dict[str, Any]:
            response = await client.post("/llm/v1/completions", json=body | more)
            assert response.status_code == 200, response.text
            return response.json()

        def without_stats(choice: dict[str, Any]) -> dict[str, Any]:
            return {name: choice[name] for name in ("text", "logprobs", "finish_reason")}

        alone = [await answer(prompt=prompt) for prompt in prompts]
        together = await answer(prompt=["def f", "class"])
        assert [without_stats(choice) for choice in together["choices"]] == [
            without_stats(each["choices"][0]) for each in alone[:2]
        ]
        assert together["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone[:2])
        samples = await answer(prompt="def f", n=4)
        assert without_stats(samples["choices"][0]) == without_stats(alone[0]["choices"][0])
        assert len({choice["text"] for choice in samples["choices"]}) > 1
        assert [without_stats(choice) for choice in (await answer(prompt="def f", n=4))["choices"]] == [
            without_stats(choice) for choice in samples["choices"]
        ]
        best = await answer(prompt="def f", best_of=4, echo=False)

        def mean(choice: dict[str, Any]) -> float:
            return statistics.fmean(choice["logprobs"]["token_logprobs"][-8:])

        likeliest = max(samples["choices"], key=mean)
        assert best["choices"][0]["text"] == likeliest["text"].removeprefix("def f")

    run(outer, scene)


def test_trace_events_of_a_request(url: str) -> None:
    kinds = list[str]()
    with httpx.Client(base_url=url, timeout=60) as client, client.stream("GET", "/v1/spec/events") as events:
        for line in events.iter_lines():
            if line.startswith("event: "):
                kinds.append(line.removeprefix("event: "))
                if kinds == ["head"]:
                    assert client.post("/v1/completions", json=GREEDY).status_code == 200
            if kinds[-1:] == ["end"]:
                break
    assert kinds[:2] == ["head", "begin"] and "round" in kinds


def test_the_lifespan_of_the_outer_application_closes_the_engine(pair: tuple[Path, Path]) -> None:
    engines = list[AsyncEngine]()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncEngine(LLM(*pair)) as engine:
            engines.append(engine)
            app.mount("/llm", create_app(engine))
            yield

    app = FastAPI(lifespan=lifespan)

    async def scene(client: httpx.AsyncClient) -> None:
        async with app.router.lifespan_context(app):
            assert (await client.post("/llm/v1/completions", json=GREEDY)).status_code == 200
        closed = await client.post("/llm/v1/completions", json=GREEDY)
        assert closed.status_code == 503 and "the engine has exited: it was closed" in closed.text

    run(app, scene)
    assert engines[0].state.phase == "dead"


def test_the_security_middleware_can_be_added(engine: AsyncEngine) -> None:
    app = create_app(engine, model_names=["mine"])
    app.add_middleware(SecurityMiddleware, api_keys=["key"])
    outer = FastAPI()
    outer.mount("/llm", app)

    async def scene(client: httpx.AsyncClient) -> None:
        assert (await client.get("/llm/v1/models")).status_code == 401
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/")).status_code == 200
        models = await client.get("/llm/v1/models", headers={"Authorization": "Bearer key"})
        assert [each["id"] for each in models.json()["data"]] == ["mine"]

    run(outer, scene)


def test_defaults_need_a_loaded_model(player: Player) -> None:
    player.prepare(info=None)
    with pytest.raises(UserError, match="the model is being loaded: pass `codec` and `model_names`"):
        create_app(player)
