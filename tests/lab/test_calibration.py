"""The fit of the calibration recovers the one that synthetic rounds were drawn with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swiftspec.lab.calibration import LEAST, MIN_CHOICES, MOST, fit_calibration, read_choices


def synthetic_rounds(calibration: float, count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rounds whose target draws each token with a probability proportional to exp(score / calibration). The tree has
    the best 6 of 50 tokens of the root and of its likeliest child."""
    rng, lines = np.random.default_rng(seed), []
    for _ in range(count):
        tokens, parents, logprobs = [0], [-1], [0.0]
        output: list[int] = []
        node = 0
        for _ in range(2):
            scores = rng.normal(0, 2, 50)
            scores -= np.log(np.exp(scores).sum())
            best = np.argsort(-scores)[:6]
            first = len(tokens)
            tokens += best.tolist()
            parents += [node] * 6
            logprobs += (logprobs[node] + scores[best]).tolist()
            shares = np.exp(scores / calibration)
            drawn = int(rng.choice(50, p=shares / shares.sum()))
            if len(output) == parents[first]:  # the text has followed the tree to this node
                output.append(drawn)
            node = first
            if drawn != best[0]:
                break
        tree = {"tokens": tokens, "parents": parents, "logprobs": logprobs}
        lines.append({"tokens": output, "draft": {"tree": tree}})
    return lines


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("calibration", "count"), [(0.4, 500), (1.0, 1000), (1.6, 2000)])
def test_the_calibration_of_synthetic_rounds_is_found(calibration: float, count: int) -> None:
    """The larger it is, the fewer draws are children of the tree, and the more rounds are needed."""
    rounds = synthetic_rounds(calibration, count)
    assert fit_calibration(rounds) == pytest.approx(calibration, rel=0.12)


def test_a_fit_is_limited_and_needs_enough_choices() -> None:
    def lines(token: int, count: int = MIN_CHOICES) -> list[dict[str, Any]]:
        tree = {
            "tokens": [9, 1, 2],
            "parents": [-1, 0, 0],
            "logprobs": [0.0, -0.1, -2.4],
            "expanded": [True, False, False],
        }
        return [{"tokens": [token], "draft": {"tree": tree}}] * count

    assert fit_calibration(lines(1)) == LEAST, "always the likeliest"
    assert fit_calibration(lines(2)) == MOST, "always the other one"
    assert fit_calibration(lines(1, MIN_CHOICES - 1)) is None
    assert fit_calibration(lines(7)) is None, "never a child"


def test_choices_follow_the_output_through_the_tree() -> None:
    tree = {"tokens": [5, 1, 2, 3, 4], "parents": [-1, 0, 0, 1, 1], "logprobs": [-1.0, -1.5, -2.0, -1.7, -4.0]}
    first, second = read_choices({"tokens": [1, 4, 8], "draft": {"tree": tree}})
    assert first.chosen == 0 and first.scores.tolist() == pytest.approx([-0.5, -1.0])
    assert second.chosen == 1 and second.scores.tolist() == pytest.approx([-0.2, -2.5])
    assert not [*read_choices({"tokens": [1]})] and not [*read_choices({"tokens": [1], "draft": {"nodes": 3}})]
