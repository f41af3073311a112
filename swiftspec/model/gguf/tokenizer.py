"""Tokenizer of a GGUF file: its vocabulary, merges and special tokens as a tokenizer.json.

llama.cpp names the rule that splits a text before the merges (`tokenizer.ggml.pre`); src/llama-vocab.cpp of llama.cpp
and the tokenizer.json of the models define what the names mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swiftspec.errors import UserError, truncated_repr
from swiftspec.file_io import damage_reported
from swiftspec.model.gguf.file import GgufFile, GgufStrings

KEY = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of tokens in `token_type`; others are ordinary, too
SPACE = "\u2581"  # stands for a space in a SentencePiece vocabulary
MAX_MERGED_CHARS = 256  # longer pieces of a SentencePiece vocabulary are not split into merges
MAX_MERGES = 1 << 21  # several times those of a vocabulary of 262,144 pieces
# tokens of Phi-3 after which white space belongs to the text; after the others, it is part of the token
PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
SPECIAL_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
TEMPLATE = "tokenizer.chat_template"
# Texts of tokens that end a generation, as llama.cpp knows them: metadata often name the end of a document only. The
# last two lines have those that separate the files of a repository.
END_TEXTS = frozenset(
    (
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "[e~[",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    )
)
# a token that chat templates write, whatever its kind in the file
MARKER = re.compile(r"<\|[^\s<>|]+\|>|<\uff5c[^\s<>\uff5c]+\uff5c>|<(start|end)_of_[a-z]+>")

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}"
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CAPITALISED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = rf"{CAPITALISED}{CONTRACTIONS}?|{CAPITALS}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{REST_WITH_SLASH}"
TEKKEN = rf"{CAPITALISED}|{CAPITALS}|\p{{N}}|{REST_WITH_SLASH}"
SEED = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r"[!\x22#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3 = (
    rf"{PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
CHINESE_KOREAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# letters with case, of the version of Unicode that DeepSeek LLM was trained with
CASED_LETTERS = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cb2\u2cb3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943]"
)
WESTERN_PUNCTUATION = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is split before the merges.

    `patterns`: regular expressions, each of which isolates its matches in the pieces of the previous one. `digits`:
    isolate each digit first. `nfc`: normalise the text to NFC. `whole_words`: a piece that is in the vocabulary is one
    token, whatever the merges. `bos`: whether texts begin with BOS if the metadata lack `add_bos_token`.
    """

    patterns: tuple[str, ...]
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


BY_DIGIT = PreTokenizer((GPT2,), digits=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2,)),
    "olmo": PreTokenizer((GPT2,)),
    "llama-bpe": PreTokenizer((LLAMA3,), whole_words=True, bos=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), PreTokenizer((LLAMA3,), whole_words=True, bos=True)
    ),
    "smaug-bpe": PreTokenizer((LLAMA3,)),
    "dbrx": PreTokenizer((LLAMA3,)),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((LLAMA3,), whole_words=True)),
    "chatglm-bpe": PreTokenizer((LLAMA3,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), PreTokenizer((GPT4O,))),
    "qwen2": PreTokenizer((QWEN2,), nfc=True),
    "qwen35": PreTokenizer((QWEN35,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer((QWEN2,), nfc=True),
    **dict.fromkeys(("stablelm2", "hunyuan", "megrez"), PreTokenizer((QWEN2,))),
    "hunyuan-dense": PreTokenizer((r"\p{N}{1,3}", CHINESE_JAPANESE, DEEPSEEK3)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", CHINESE_JAPANESE, DEEPSEEK3)),
    "seed-coder": PreTokenizer((SEED,)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{CASED_LETTERS}+", rf"\s?{WESTERN_PUNCTUATION}+", r"\s+$", CHINESE_KOREAN, r"\p{N}")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_KOREAN, r"\p{N}")),
    "tekken": PreTokenizer((TEKKEN,), whole_words=True, bos=True),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), BY_DIGIT),
}


def has_vocabulary(file: GgufFile) -> bool:
    """Returns whether a file contains a tokenizer. A file without one has the kind "no_vocab" or no tokens."""
    return f"{KEY}tokens" in file.metadata and _kind(file.metadata) != "no_vocab"


def _kind(metadata: Mapping[str, Any]) -> str | None:
    """Returns the kind of the vocabulary; None if it is missing or no string."""
    kind = metadata.get(f"{KEY}model")
    return kind if isinstance(kind, str) else None


def end_token_ids(file: GgufFile) -> list[int]:
    """Returns the ids of the tokens of a file that end a generation by their text. Raises UserError if the vocabulary
    is damaged."""
    if not has_vocabulary(file):
        return []
    with damage_reported(file.path):
        tokens = _strings(file.metadata, "tokens")
    ends = _end_texts(tokens)
    return [number for number, token in enumerate(tokens) if token in ends]


def missing_rule(file: GgufFile) -> str | None:
    """Returns a notice for a byte-level vocabulary without the name of its rule in the file; None for others."""
    if _kind(file.metadata) != "gpt2" or f"{KEY}pre" in file.metadata:
        return None
    return (
        f"{file.path} does not name its pre-tokenizer ({KEY}pre), so that texts, above all code, may get other tokens"
        " than in training; convert the model again"
    )


def _end_texts(tokens: Sequence[str]) -> frozenset[str]:
    """Returns the texts in a vocabulary that end a generation."""
    found = END_TEXTS.intersection(tokens)
    if {"<|return|>", "<|call|>"} <= found or {"<|flush|>", "<|calls|>"} <= found:
        found -= {"<|end|>"}  # harmony: of a message, after which others follow
    return found - {"</s>"} if "<eos>" in found else found  # Gemma: the end of struck text in HTML


def tokenizer_json(file: GgufFile) -> str:
    """Returns the tokenizer of a file in the format of tokenizer.json. Raises UserError if there is none, or one of a
    kind that is not supported."""
    with damage_reported(file.path):
        return json.dumps(_tokenizer(file))


def tokenizer_settings(file: GgufFile) -> dict[str, Any]:
    """Returns the special tokens and the chat template of a file, by their names in tokenizer_config.json."""
    tokens = _strings(file.metadata, "tokens")
    found: dict[str, Any] = {}
    for kind, name in SPECIAL_NAMES.items():
        number = _token_id(file.metadata, kind, len(tokens))
        if number is not None:
            found[name] = tokens[number]
    templates = {
        key.removeprefix(f"{TEMPLATE}.") if key != TEMPLATE else "default": text
        for key, text in file.metadata.items()
        if (key == TEMPLATE or key.startswith(f"{TEMPLATE}.")) and isinstance(text, str) and text.strip()
    }
    if templates:
        found["chat_template"] = templates["default"] if [*templates] == ["default"] else templates
    return found


def _tokenizer(file: GgufFile) -> dict[str, Any]:
    if not has_vocabulary(file):
        raise UserError("no tokenizer in the metadata")
    metadata = file.metadata
    tokens, kind = _strings(metadata, "tokens"), _kind(metadata)
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UserError("damaged: the vocabulary contains a token twice")
    types = _token_types(metadata, tokens)
    if kind == "gpt2":
        parts, bos = _byte_level(metadata, vocab)
    elif kind == "llama":
        parts, bos = _sentence_piece(metadata, tokens, vocab)
    else:
        found = truncated_repr(metadata.get(f"{KEY}model"))
        raise UserError(f"tokenizer of kind {found} is not supported; 'gpt2' (BPE) and 'llama' (SPM) are")
    strips = kind == "llama" and metadata.get("general.architecture") == "phi3"
    ends = {"add_bos_token": ("bos", bos), "add_eos_token": ("eos", False)}
    around = {
        name: _token_id(metadata, name, len(tokens))
        for key, (name, usual) in ends.items()
        if metadata.get(f"{KEY}{key}", usual) is True
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(
                number,
                tokens[number],
                special=int(types[number]) != USER_DEFINED,
                rstrip=strips and tokens[number] not in PHI3_KEEPS_SPACE,
            )
            for number in np.flatnonzero((types == CONTROL) | (types == USER_DEFINED) | (types == UNKNOWN)).tolist()
        ],
        "post_processor": _post_processor({name: n for name, n in around.items() if n is not None}, tokens),
        **parts,
    }


def _token_types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> np.ndarray:
    """Returns the kinds of the tokens. Those that end a generation, and ordinary ones that look like the markers of
    chat templates, are control tokens, as in llama.cpp."""
    types = metadata.get(f"{KEY}token_type", np.ones(len(tokens)))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise UserError(f"damaged: {KEY}token_type does not fit the {len(tokens)} tokens")
    types, ends = types.copy(), _end_texts(tokens)
    for number, token in enumerate(tokens):
        if token in ends or (types[number] == NORMAL and token[:1] == "<" and MARKER.fullmatch(token)):
            types[number] = CONTROL
    return types


def _byte_level(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> tuple[dict[str, Any], bool]:
    """Returns the parts of tokenizer.json of a byte-level BPE, and whether texts begin with BOS by default."""
    name = metadata.get(f"{KEY}pre", "default")
    rule = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise UserError(f"pre-tokenizer {truncated_repr(name)} is not supported; {known} are")
    merges = [_split_merge(merge) for merge in _strings(metadata, "merges")]
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if rule.digits else []
    steps += [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in rule.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    parts = {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "decoder": byte_level,
        "model": _bpe(vocab, merges, None, byte_fallback=False, ignore_merges=rule.whole_words),
    }
    return parts, rule.bos


def _split_merge(merge: str) -> tuple[str, str]:
    at = merge.find(" ", 1)
    if at < 0:
        raise UserError(f"damaged: merge {truncated_repr(merge)} has no second part")
    return merge[:at], merge[at + 1 :]


def _sentence_piece(
    metadata: Mapping[str, Any], tokens: Sequence[str], vocab: Mapping[str, int]
) -> tuple[dict[str, Any], bool]:
    """Returns the parts of tokenizer.json of a SentencePiece BPE, and whether texts begin with BOS by default. The
    pieces with the highest scores are merged first, as SentencePiece does."""
    scores = metadata.get(f"{KEY}scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise UserError(f"damaged: {KEY}scores does not fit the {len(tokens)} tokens")
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score in zip(tokens, scores.tolist()):
        if 1 < len(piece) <= MAX_MERGED_CHARS:
            for at in range(1, len(piece)):
                left, right = piece[:at], piece[at:]
                if left in vocab and right in vocab:
                    ranked.append((score, len(left), len(right), left, right))
        if len(ranked) > MAX_MERGES:
            raise UserError(f"damaged: the vocabulary has more than {MAX_MERGES} merges")
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    prefix = metadata.get(f"{KEY}add_space_prefix", True) is True
    replace_space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    replace_back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    number = _token_id(metadata, "unknown", len(tokens))
    merges = [(left, right) for *_, left, right in ranked]
    parts = {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": SPACE}] if prefix else []), replace_space],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [replace_back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(
            vocab, merges, None if number is None else tokens[number], byte_fallback=True, ignore_merges=False
        ),
    }
    return parts, True


def _bpe(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    unknown: str | None,
    *,
    byte_fallback: bool,
    ignore_merges: bool,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": dict(vocab),
        "merges": merges,
    }


def _added(number: int, content: str, *, special: bool, rstrip: bool) -> dict[str, Any]:
    """Returns an added token. `rstrip`: whether white space after it is part of it."""
    flags = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    return {"id": number, "content": content, **flags, "rstrip": rstrip, "special": special}


def _post_processor(around: Mapping[str, int], tokens: Sequence[str]) -> dict[str, Any] | None:
    """Returns the step that puts `around`, BOS or EOS, around a text; None if there are none."""
    if not around:
        return None

    def sequence(kind: str, index: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": kind, "type_id": index}}
        before, after = (
            [{"SpecialToken": {"id": tokens[around[name]], "type_id": index}}] if name in around else []
            for name in ("bos", "eos")
        )
        return [*before, text, *after]

    special = {tokens[n]: {"id": tokens[n], "ids": [n], "tokens": [tokens[n]]} for n in around.values()}
    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": special,
    }


def _token_id(metadata: Mapping[str, Any], kind: str, count: int) -> int | None:
    """Returns the id of the special token `kind`; None if there is none in a vocabulary of `count` tokens."""
    number = metadata.get(f"{KEY}{kind}_token_id")
    return number if type(number) is int and 0 <= number < count else None


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    found = metadata.get(f"{KEY}{name}")
    if not isinstance(found, GgufStrings):
        raise UserError(f"damaged: {KEY}{name} is not a list of strings")
    return found.decode()
