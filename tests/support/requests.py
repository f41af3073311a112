"""Random requests and trees. For all of them the text equals that of autoregressive decoding."""

from __future__ import annotations

import random
from typing import Any

VOCAB = 64
Json = dict[str, Any]


def a_request(dice: random.Random) -> tuple[list[int], Json]:
    """A prompt and sampling parameters; most parameters keep their default."""

    def some(**values: Any) -> Json:
        return {name: value for name, value in values.items() if dice.random() < 0.35}

    def tokens(most: int) -> list[int]:
        return [dice.randrange(VOCAB) for _ in range(dice.randint(1, most))]

    sampling = {
        "seed": dice.randrange(2**64),
        "max_tokens": dice.randint(1, 30),
        **some(
            temperature=dice.choice([0, 0.001, 0.3, 1.0, 1.7, 100.0]),
            top_k=dice.choice([1, 2, 7, VOCAB]),
            top_p=dice.choice([1e-6, 0.1, 0.5, 0.95]),
            min_p=dice.choice([0.01, 0.3, 1.0]),
            repetition_penalty=dice.choice([0.5, 1.3, 100.0]),
            presence_penalty=dice.uniform(-2, 2),
            frequency_penalty=dice.uniform(-2, 2),
            logit_bias={token: dice.choice([-1e9, -3.0, 2.5]) for token in tokens(5)},
            guidance_scale=dice.choice([0.0, 0.5, 1.5, 7.0]),
            ignore_eos=True,
            stop_token_ids=tokens(3),
            logprobs=dice.choice([-1, 0, 2, 20]),
            allowed_token_ids=tokens(30),
            bad_words_ids=[tokens(3) for _ in range(dice.randint(1, 40))],
        ),
    }
    if dice.random() < 0.35 and "allowed_token_ids" not in sampling:
        sampling["min_tokens"] = dice.randint(1, sampling["max_tokens"])
    if {word[0] for word in sampling.get("bad_words_ids", ()) if len(word) == 1}.issuperset(
        sampling.get("allowed_token_ids", range(VOCAB))
    ):
        del sampling["bad_words_ids"]
    if "guidance_scale" in sampling:
        sampling |= some(negative_prompt_ids=tokens(8))
    return tokens(dice.choice([1, 5, 60])), sampling


def a_shape(dice: random.Random) -> Json:
    """A tree of any shape."""
    sizes = {name: dice.choice([1, 2, 5, 8, 16]) for name in ("verify_batch", "draft_leaves")}
    kind = {"proposal": dice.choice(["top", "coupled"]), "catch_up": dice.random() < 0.5}
    return {**sizes, **kind, "draft_steps": dice.randint(1, 5)}
