"""LLM: text in, text out, with vLLM's interface; its outputs are those of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftspec import LLM, AsyncEngine, SamplingParams, StructuredOutputsParams, UserError
from swiftspec.serve.app import create_app
from swiftspec.text.outputs import TextChunk
from tests.support.cases import examples
from tests.support.smollm2 import smollm2
from tests.support.toy_pair import make_pair

SHAPE: dict[str, Any] = {"draft_steps": 2, "verify_batch": 8, "graft_suffix": False, "self_switch": False}


def params(**values: Any) -> SamplingParams:
    """Lists and None are converted, which the types of the fields do not allow."""
    return SamplingParams(**values)


GREEDY = params(temperature=0.0, max_tokens=12)
SAMPLED = params(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(*pair, dtype=torch.float64, **SHAPE) as llm:
        yield llm


def posted(pair: tuple[Path, Path], *bodies: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of the server on another engine."""

    async def main() -> list[dict[str, Any]]:
        async with AsyncEngine(*pair, dtype="float64", **SHAPE) as engine:
            transport = httpx.ASGITransport(create_app(engine))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                answers = [await client.post(path, json=body) for path, body in bodies]
        assert [answer.status_code for answer in answers] == [200] * len(answers), [each.text for each in answers]
        return [answer.json() for answer in answers]

    return asyncio.run(main())


@pytest.mark.slow
def test_outputs_equal_the_servers(llm: LLM, pair: tuple[Path, Path]) -> None:
    """Texts, token ids, reasons and log-probabilities of several choices, with a stop string, and of a chat."""
    (plain,) = llm.generate("def f", SAMPLED)
    stop = plain.outputs[0].text[2:4]
    sampling = params(
        temperature=0.9, seed=3, max_tokens=12, n=3, logprobs=2, prompt_logprobs=1, stop=stop, ignore_eos=True
    )
    shared: dict[str, Any] = {
        "temperature": 0.9, "seed": 3, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True
    }  # fmt: skip
    scored = {"n": 3, "logprobs": 2, "prompt_logprobs": 1, "stop": stop}
    completion, chat, bounded = posted(
        pair, ("/v1/completions", {"prompt": "def f", **shared, **scored}),
        ("/v1/chat/completions", {"messages": HELLO, **shared}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}, "seed": 5}),
    )  # fmt: skip
    (output,) = llm.generate("def f", sampling)
    assert (
        len(output.outputs) == 3 and output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason == stop
    )
    assert output.outputs[0].text == plain.outputs[0].text.partition(stop)[0]
    for ours, theirs in zip(output.outputs, completion["choices"], strict=True):
        assert (ours.index, ours.text, ours.token_ids) == (theirs["index"], theirs["text"], theirs["token_ids"])
        assert (ours.finish_reason, ours.stop_reason) == (theirs["finish_reason"], theirs["stop_reason"])
        assert ours.logprobs is not None and ours.cumulative_logprob is not None
        values = [one[token].logprob for token, one in zip(ours.token_ids, ours.logprobs, strict=True)]
        assert values == pytest.approx(theirs["logprobs"]["token_logprobs"])
        assert ours.cumulative_logprob == pytest.approx(sum(values)) and all(
            2 <= len(one) <= 3 for one in ours.logprobs
        )
        assert ours.stats.tokens == len(ours.token_ids)
    theirs = completion["choices"][0]["prompt_logprobs"]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is theirs[0] is None
    for mine, entry in zip(output.prompt_logprobs[1:], theirs[1:], strict=True):
        assert {str(token): one.rank for token, one in (mine or {}).items()} == {
            token: one["rank"] for token, one in entry.items()
        }
    (said,) = llm.chat(HELLO, SAMPLED)
    assert said.outputs[0].text == chat["choices"][0]["message"]["content"]
    assert said.outputs[0].token_ids == chat["choices"][0]["token_ids"]
    one_of = params(seed=5, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert llm.generate("x", one_of)[0].outputs[0].text == bounded["choices"][0]["text"]


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("def f")
    forms: list[Any] = ["def f", ids, {"prompt": "def f"}, {"prompt_token_ids": ids}, torch.tensor(ids)]
    alone = [llm.generate(form, GREEDY) for form in forms]
    together = llm.generate(["def f", "class", {"prompt_token_ids": ids}, ids], [GREEDY, SAMPLED, GREEDY, GREEDY])
    texts = {each.outputs[0].text for (each,) in alone}
    assert texts == {together[at].outputs[0].text for at in (0, 2, 3)} and len(texts) == 1
    assert [output.prompt for output in together] == ["def f", "class", None, None]
    assert together[0].prompt_token_ids == ids and together[0].finished and llm.generate([], GREEDY) == []
    numbers = [int(output.request_id) for output in together]
    assert numbers == [*range(numbers[0], numbers[0] + 4)]


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 200), max_tokens=st.integers(1, 24), stop=st.sampled_from(["", "e", "ab", "(", "\n "]),
    include=st.booleans(), special=st.booleans(), chat=st.booleans(),
)  # fmt: skip
def test_a_stream_is_the_output_in_pieces(
    llm: LLM, seed: int, max_tokens: int, stop: str, include: bool, special: bool, chat: bool
) -> None:
    """Never half a character, also at the end, and nothing of a stop string."""
    sampling = params(
        seed=seed, max_tokens=max_tokens, stop=[stop] if stop else [], include_stop_str_in_output=include,
        skip_special_tokens=special,
    )  # fmt: skip
    pieces = list(llm.stream(HELLO if chat else "def f", sampling))
    (whole,) = llm.chat(HELLO, sampling) if chat else llm.generate("def f", sampling)
    output, text = whole.outputs[0], "".join(piece.text for piece in pieces)
    assert text == output.text and [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert all(piece.finish_reason is None and piece.stats is None for piece in pieces[:-1])
    last = pieces[-1]
    assert (last.finish_reason, last.stop_reason) == (output.finish_reason, output.stop_reason)
    assert last.stats is not None and last.stats.tokens == len(output.token_ids) == output.stats.tokens
    assert sum(piece.accepted for piece in pieces) - last.stats.accepted in (0, 1)  # 1: cut within a round
    if stop:
        assert (stop in text) == (include and output.stop_reason == stop)


def test_a_stream_ends_when_it_is_closed_and_a_second_thread_waits(llm: LLM) -> None:
    expected = llm.generate("class", SAMPLED)[0].outputs[0].text
    found = list[str]()
    other = threading.Thread(target=lambda: found.append(llm.generate("class", SAMPLED)[0].outputs[0].text))
    with closing(llm.stream("def f", params(max_tokens=100, ignore_eos=True))) as pieces:
        next(pieces)
        other.start()
        other.join(0.05)
        assert next(pieces).token_ids and not found
    other.join(60)
    assert found == [expected]
    mine = llm.stream("def f", SAMPLED)
    next(mine)
    assert llm.generate("class", SAMPLED)[0].outputs[0].text == expected
    with pytest.raises(UserError, match="ended by a later one"):
        next(mine)


def test_async_pieces_equal_those_of_a_stream(pair: tuple[Path, Path]) -> None:
    prompts: list[Any] = ["def f", HELLO, {"prompt_token_ids": [5, 6]}]
    sampling = params(seed=4, max_tokens=20, stop=["e", "("], ignore_eos=True)

    def parts(pieces: list[TextChunk]) -> list[Any]:
        assert pieces[-1].stats is not None
        known = [(each.text, each.token_ids, each.accepted, each.finish_reason, each.stop_reason) for each in pieces]
        return [*known, pieces[-1].stats.tokens]

    async def main() -> None:
        llm = LLM(*pair, dtype="float64", **SHAPE)
        alone = [parts([*llm.stream(prompt, sampling)]) for prompt in prompts]
        async with AsyncEngine(llm) as engine:
            for prompt, expected in zip(prompts, alone, strict=True):
                assert parts([piece async for piece in engine.generate(prompt, sampling)]) == expected
            with pytest.raises(UserError, match="n = 2"):
                await anext(engine.generate("x", params(n=2)))

    asyncio.run(main())


def test_parameters_that_apply_to_text(llm: LLM) -> None:
    (free,) = llm.generate("def f", SAMPLED)
    tokenizer, tokens = llm.get_tokenizer(), free.outputs[0].token_ids
    word = next(text for token in tokens if (text := tokenizer.decode([token])).isascii() and text.strip())
    changed = [
        params(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, **more)
        for more in ({"bad_words": [word]}, {"detokenize": False})
    ]
    without, no_text = (output.outputs[0] for output in llm.generate(["def f", "def f"], changed))
    assert tokenizer.encode(word)[0] in tokens and tokenizer.encode(word)[0] not in without.token_ids
    assert no_text.text == "" and no_text.token_ids == tokens
    assert params(seed=None).seed != params(seed=None).seed
    assigned = params(seed=3, ignore_eos=True)
    assigned.temperature, assigned.max_tokens = 0.9, 12
    stream = llm.stream("def f", assigned)
    assigned.max_tokens = 1
    assert [token for piece in stream for token in piece.token_ids] == tokens
    assigned.max_tokens = 0
    with pytest.raises(UserError, match="max_tokens must"):
        llm.generate("def f", assigned)
    ended = llm.generate("def f", params(temperature=0.9, seed=3, stop_token_ids=[tokens[2]]))
    assert ended[0].outputs[0].stop_reason == tokens[2]


def test_default_parameters_are_the_models(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for file in pair[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "max_new_tokens": 3}')
    with LLM(tmp_path, seed=9) as llm:
        assert llm.get_default_sampling_params() == params(temperature=0.5, top_k=7, max_tokens=3, seed=9)
        assert len(llm.generate("def f")[0].outputs[0].token_ids) <= 3


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "int3"}, "dtype must be one of"),
    ({"temperature": 1.0}, r"pass it as SamplingParams\(temperature=...\)"),
    ({"tensor_parallel_size": 2}, "did you mean target_tp"),
    ({"gpu_memory_utilization": 0.9}, "memory follows from max_model_len"),
    ({"trust_remote_code": True}, "code of models is never executed"),
    ({"port": 8000}, "option of `swiftspec serve` only"),
    ({"draft_step": 3}, "did you mean draft_steps"),
    ({"kept_memory": 3}, "it is now prefix_cache_memory"),
    ({"speculative_config": {"method": "medusa"}}, "method 'medusa' is not supported"),
    ({"speculative_config": {"method": "eagle3"}}, "needs the field model"),
    ({"speculative_config": {"model": "x"}, "draft_model": "y"}, "set the same value"),
    ({"speculative_config": {"modle": "x"}}, "unknown field 'modle'"),
    ({"speculative_config": {"model": "x", "num_speculative_tokens": 0}}, "at least 1"),
]


@pytest.mark.parametrize(("options", "message"), INVALID)
def test_invalid_options_are_reported_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        LLM("demo", **options)
    assert "\n" not in str(error.value)


def test_invalid_requests_are_reported_before_anything_is_decoded(llm: LLM) -> None:
    wrong: list[tuple[Any, Any, str]] = [
        ("", GREEDY, "empty"),
        (["a", ""], GREEDY, "prompt 1: .*empty"),
        ([999], GREEDY, "outside"),
        ("a " * 300, GREEDY, "fit"),
        ({"text": "a"}, GREEDY, "a prompt needs prompt or prompt_token_ids"),
        (None, GREEDY, "prompts are text"),
        ([1.5], GREEDY, "a prompt is text"),
        (["a", "b"], [GREEDY], "got 1 SamplingParams for 2 prompts"),
        ("a", 0.8, "must be SamplingParams"),
        ("a", params(structured_outputs=StructuredOutputsParams(regex="(")), "structured_outputs"),
        ("a", params(bad_words=[" "]), "more than blanks"),
    ]
    for prompt, sampling, message in wrong:
        with pytest.raises(UserError, match=message):
            llm.generate(prompt, sampling)
    for messages, message in (([{"content": "x"}], "must have a role"), ([[]], "at least one message")):
        with pytest.raises(UserError, match=message):
            llm.chat(messages, GREEDY)
    with pytest.raises(UserError, match="exactly one of"):
        StructuredOutputsParams(regex="a", choice=["b"])


def vllm_basic(llm: LLM, sampling_params: SamplingParams) -> list[str]:
    """vLLM's offline examples: the import is the only change."""
    prompts = ["Hello, my name is", "The president of the United States is", "The capital of France is", "The future"]
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    return [output.outputs[0].text for output in outputs]


def test_vllms_basic_example_on_the_demo_models(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(model="demo", speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        texts = vllm_basic(llm, params(temperature=0.8, top_p=0.95, max_tokens=16))
        assert len({*texts}) == 4 and llm.session.draft_model == "suffix" and llm.llm_engine.config.verify_batch == 4
    assert "4/4" in capsys.readouterr().err


@pytest.mark.slow
def test_vllms_examples_on_smollm2() -> None:
    file = smollm2()
    llm = LLM(model=str(file))
    vllm_basic(llm, params(temperature=0.8, top_p=0.95, max_tokens=16))
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    sampling_params = llm.get_default_sampling_params()
    sampling_params.max_tokens = 16
    outputs = llm.chat([conversation for _ in range(4)], params(temperature=0.0, max_tokens=24), use_tqdm=True)
    assert len({output.outputs[0].text for output in outputs}) == 1 and "Paris" in outputs[0].outputs[0].text
    assert llm.chat(conversation, sampling_params, use_tqdm=False)[0].outputs[0].text
    llm.close()

    async def main() -> str:
        async with AsyncEngine(file) as engine:
            sampling = params(temperature=0.0, max_tokens=24)
            return "".join([piece.text async for piece in engine.generate(conversation, sampling)])

    assert asyncio.run(main()) == outputs[0].outputs[0].text
