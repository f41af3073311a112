"""Tokenizers of GGUF files: the ids of the original tokenizer, special tokens and chat templates."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from swiftspec.errors import UserError
from swiftspec.model.gguf.file import GgufFile
from swiftspec.model.gguf.tokenizer import (
    PRE_TOKENIZERS,
    SPACE,
    end_token_ids,
    has_vocabulary,
    missing_rule,
    tokenizer_json,
    tokenizer_settings,
)
from swiftspec.text.codec import TextCodec, has_tokenizer

TEXTS = [
    "Hello world! It's 12345 things, don't you think?", "def f(x):\n    return x + 1\n\n\n", "  two  spaces\t\ttabs ",
    "Gr\u00f6\u00dfe \u6771\u4eac \U0001f600 1a2b", "HELLO'S we'Ll", "", " ", "\r\n", "a\u0301",
    "\u0939\u093f\u0928\u094d\u0926\u0940 x\u0301!\u0301", "path/to\n//\n",
    "x=[1]; //TODO(me): \u3042\u30ab\u4e00 \uac00\uff01  ", "#include <a.h>\r\n\r\n  \u00bd\u00b2 3.14159",
]  # fmt: skip
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # as in the tokenizer.json of Llama 3
GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # as in the tokenizer.json of Phi-4-mini and of gpt-oss
QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # as in the tokenizer.json of Qwen3.5
SEED_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # as in the tokenizer.json of Seed-Coder
DEEPSEEK_V3_SPLITS = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # as in the tokenizer.json of DeepSeek-V3  # fmt: skip
DEEPSEEK_LLM_SPLITS = (
    r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)  # as in the tokenizer.json of DeepSeek LLM, which lists the letters  # fmt: skip
SPLITS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "gpt-4o": [
        pre_tokenizers.Split(Regex(GPT4O_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen35": [
        pre_tokenizers.Split(Regex(QWEN35_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "seed-coder": [
        pre_tokenizers.Split(Regex(SEED_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    **{
        name: [
            *(pre_tokenizers.Split(Regex(split), "isolated") for split in DEEPSEEK_V3_SPLITS),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        for name in ("deepseek-v3", "hunyuan-dense")
    },
    "deepseek-llm": [
        *(pre_tokenizers.Split(Regex(split), "isolated") for split in DEEPSEEK_LLM_SPLITS),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def byte_level(name: str) -> Tokenizer:
    """A tokenizer trained on TEXTS, as its model's tokenizer.json has it."""
    made = Tokenizer(BPE(ignore_merges=name == "llama-bpe"))
    made.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[name])
    made.decoder = decoders.ByteLevel()
    if name == "qwen35":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<unk>"]
    made.train_from_iterator(TEXTS * 4, BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet))
    return made


def write(
    path: Path, made: Tokenizer, pre: str | None, architecture: str = "llama", defined: tuple[str, ...] = (),
    ordinary: bool = False,    **metadata: Any,
) -> Path:  # fmt: skip
    """A GGUF file with the vocabulary of a tokenizer, and nothing else. `defined`: tokens that users defined.
    `ordinary`: none is a control token."""
    data = json.loads(made.to_str())
    vocab: dict[str, int] = data["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [TokenType.NORMAL if ordinary else TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3)
    for token in defined:
        types[vocab[token]] = TokenType.USER_DEFINED
    writer = GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2" if pre is not None else "llama")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, value in metadata.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", SPLITS)
def test_the_ids_are_those_of_the_original(tmp_path: Path, name: str) -> None:
    original = byte_level(name)
    ours = TextCodec(write(tmp_path / "a.gguf", original, name, add_add_bos_token=False))
    assert ours.vocab == original.get_vocab()
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == original.encode(text).ids and ours.decode(ids) == original.decode(ids)
        assert ours.decode(ids) == (unicodedata.normalize("NFC", text) if original.normalizer else text)
    assert ours.encode("<s>A</s>") == [0, *original.encode("A").ids, 1] and ours.special == {0, 1, 2}


def test_bos_and_eos(tmp_path: Path) -> None:
    original = byte_level("gpt-2")
    plain = original.encode("Hello").ids
    cases: list[tuple[str, dict[str, Any], list[int]]] = [
        ("gpt-2", {}, plain),
        (
            "llama3",
            {},
            [0, *TextCodec(write(tmp_path / "b.gguf", original, "llama3", add_add_bos_token=False)).encode("Hello")],
        ),
        ("gpt-2", {"add_add_bos_token": True, "add_add_eos_token": True}, [0, *plain, 1]),
    ]
    for pre, metadata, want in cases:
        codec = TextCodec(write(tmp_path / "a.gguf", original, pre, **metadata))
        assert codec.encode("Hello") == want
        assert codec.encode("Hello", add_special_tokens=False)[0] != 0


def sentence_piece() -> tuple[Tokenizer, list[float]]:
    """A tokenizer like Llama 2's, and the scores of its tokens."""
    made = Tokenizer(BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>", "<unk>", *data], limit_alphabet=60)
    made.train_from_iterator([text.replace(" ", SPACE) for text in TEXTS * 4], trainer)
    saved = json.loads(made.to_str())
    saved["added_tokens"] = saved["added_tokens"][:3]  # bytes are ordinary tokens of the vocabulary
    made = Tokenizer.from_str(json.dumps(saved))
    merged = {"".join(merge): -float(rank) for rank, merge in enumerate(saved["model"]["merges"], 1)}
    vocab: dict[str, int] = saved["model"]["vocab"]
    return made, [merged.get(token, -1000.0) for token in sorted(vocab, key=lambda token: vocab[token])]


def test_a_sentence_piece_vocabulary(tmp_path: Path) -> None:
    original, scores = sentence_piece()
    path = write(tmp_path / "a.gguf", original, None, add_token_scores=scores, add_unk_token_id=2)
    ours = TextCodec(path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == [0, *original.encode(text).ids] and ours.decode(ids) == text
    assert len(ours.byte_tokens) == 256


def test_a_sentence_piece_vocabulary_without_prefix(tmp_path: Path) -> None:
    """As Gemma's: no space before a text, and a run of spaces that is a token whatever the merges."""
    made, scores = sentence_piece()
    data, run = json.loads(made.to_str()), "  "
    data["normalizer"] = data["normalizer"]["normalizers"][1]
    data["decoder"]["decoders"].pop()
    data["model"]["vocab"][run] = len(scores)
    data["added_tokens"].append({**data["added_tokens"][0], "id": len(scores), "content": run, "special": False})
    original = Tokenizer.from_str(json.dumps(data))
    entries = {"add_token_scores": [*scores, -1000.0], "add_unk_token_id": 2, "add_add_space_prefix": False}
    ours = TextCodec(write(tmp_path / "a.gguf", original, None, "gemma3", (run,), **entries))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == [0, *original.encode(text).ids] and ours.decode(ids) == text
    assert ours.encode("a  b").count(len(scores)) == 1


def test_white_space_after_the_special_tokens_of_phi3(tmp_path: Path) -> None:
    """It is part of the tokens that end a turn, but not of <s>. No other architecture has that."""
    original, scores = sentence_piece()
    for architecture, space in (("phi3", False), ("llama", True)):
        path = write(tmp_path / f"{architecture}.gguf", original, None, architecture, add_token_scores=scores)
        codec = TextCodec(path)
        assert (codec.encode("</s>\n") != codec.encode("</s>")) == space
        assert codec.encode("<s>\n") != codec.encode("<s>")


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [0, 2]),
        (["<|endoftext|>", "<|end|>", "<|user|>"], [0, 1]),
        (["<|return|>", "<|end|>", "<|call|>"], [0, 2]),  # harmony: more messages follow <|end|>
        (["<eos>", "</s>", "<end_of_turn>"], [0, 2]),  # Gemma has HTML's </s>
        (["<s>", "</s>", "[INST]"], [1]),
    ],
)
def test_end_tokens_and_markers_by_their_text(tmp_path: Path, tokens: list[str], ends: list[int]) -> None:
    """Whatever the metadata say of the kinds of the tokens: those of the file are ordinary here."""
    made = byte_level("gpt-2")
    data = json.loads(made.to_str())
    names = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    data["model"]["vocab"] = {token: number for number, token in enumerate([*tokens, *names[3:]])}
    data["added_tokens"] = []
    path = write(tmp_path / "a.gguf", Tokenizer.from_str(json.dumps(data)), "gpt-2", ordinary=True)
    file = GgufFile.read(path)
    assert end_token_ids(file) == ends and missing_rule(file) is None
    codec = TextCodec(path)
    marked = [number for number, token in enumerate(tokens) if number in ends or token.startswith("<|")]
    assert codec.special == {0, 1, *marked}  # the metadata name the first two
    for number in marked:
        assert codec.encode(f"A{tokens[number]}") == [*codec.encode("A"), number]
    unnamed = {key: value for key, value in file.metadata.items() if key != "tokenizer.ggml.pre"}
    assert "does not name its pre-tokenizer" in str(missing_rule(GgufFile(path, unnamed, {})))


def test_special_tokens_and_templates(tmp_path: Path) -> None:
    one = {"add_chat_template": "{{ messages[0].content }}", "add_unk_token_id": 2, "add_pad_token_id": 9999}
    file = GgufFile.read(write(tmp_path / "a.gguf", byte_level("gpt-2"), "gpt-2", **one))
    template = "{{ messages[0].content }}"
    assert tokenizer_settings(file) == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}  # fmt: skip
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    path = write(tmp_path / "b.gguf", byte_level("gpt-2"), "gpt-2", add_chat_template=several)
    codec = TextCodec(path)
    assert codec.template_source() == "a" and codec.template_source([{}]) == "b"
    info = codec.tokenizer_info()
    assert info["tokenizer_class"] and has_tokenizer(path)
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")


def test_what_is_not_supported_gets_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", byte_level("gpt-2"), "gpt-2")
    good = GgufFile.read(path)
    key = "tokenizer.ggml."
    tokens = good.metadata[f"{key}tokens"]
    cases: list[tuple[dict[str, object], str]] = [
        ({f"{key}model": "bert"}, "tokenizer of kind 'bert' is not supported"),
        ({f"{key}model": 3}, "tokenizer of kind 3"),
        ({f"{key}pre": "klingon"}, "pre-tokenizer 'klingon' is not supported; default, gpt-2"),
        ({f"{key}pre": np.ones(2)}, "pre-tokenizer array"),
        ({f"{key}token_type": np.ones(3)}, "token_type does not fit"),
        ({f"{key}merges": 5}, "merges is not a list of strings"),
        ({f"{key}merges": type(tokens)(b"\1\0\0\0\0\0\0\0a", 1)}, "merge 'a' has no second part"),
        ({f"{key}tokens": type(tokens)(b"\1\0\0\0\0\0\0\0a" * 2, 2)}, "contains a token twice"),
        ({f"{key}model": "llama"}, "scores does not fit"),
        ({f"{key}model": "no_vocab"}, "no tokenizer in the metadata"),
    ]
    for change, words in cases:
        with pytest.raises(UserError) as caught:
            tokenizer_json(GgufFile(path, {**good.metadata, **change}, {}))
        assert words in str(caught.value) and str(caught.value).startswith(f"{path}: "), words
    assert not has_vocabulary(GgufFile(path, {}, {}))
    assert {"smollm", "qwen2", "llama-bpe"} <= {*PRE_TOKENIZERS}
