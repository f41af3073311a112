"""Union of two proposals, compared with a set of paths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swiftspec.messages import NodeSource, Proposal
from swiftspec.tree.merged_proposal import merge_proposals

Path = tuple[int, ...]


@st.composite
def proposals(draw: st.DrawFn, source: NodeSource) -> Proposal:
    """Trees with few tokens, so that two of them share paths. Weights are multiples of 1/4."""
    tokens, parents, weights = [7], [-1], [0.0]
    for _ in range(draw(st.integers(0, 8))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 2))
        if (parent, token) in zip(parents, tokens, strict=True):
            continue
        tokens.append(token)
        parents.append(parent)
        weights.append(weights[parent] - draw(st.integers(0, 4)) / 4)
    sources = (NodeSource.ROOT, *(source,) * (len(tokens) - 1))
    return Proposal(3, 4, 5, tuple(tokens), tuple(parents), tuple(weights), sources)


def paths(proposal: Proposal) -> dict[Path, tuple[float, NodeSource]]:
    found: list[Path] = [()]
    for token, parent in zip(proposal.tokens[1:], proposal.parents[1:], strict=True):
        found.append((*found[parent], token))
    assert len({*found}) == len(found), "siblings have different tokens"
    return dict(zip(found, zip(proposal.weights, proposal.sources, strict=True), strict=True))


@given(proposals(NodeSource.DRAFT_MODEL), proposals(NodeSource.SUFFIX), st.integers(0, 20))
def test_the_best_paths_of_both(first: Proposal, second: Proposal, most: int) -> None:
    seen: list[float] = []

    def count(weights: object) -> int:
        assert isinstance(weights, list) and weights == sorted(weights, reverse=True)
        seen.extend(weights)
        return min(most, len(weights))

    merged = merge_proposals(first, second, count)
    want = paths(first)
    for path, (weight, source) in paths(second).items():
        if path not in want or weight > want[path][0]:
            want[path] = weight, source
    got = paths(merged)
    assert got.items() <= want.items()
    assert len(got) == min(most, len(want) - 1) + 1 and len(seen) == len(want) - 1
    assert merged.weights == (0.0, *seen[: len(got) - 1])
    assert all(parent < node for node, parent in enumerate(merged.parents))
    assert (merged.request, merged.round, merged.prefix_len, merged.tokens[0]) == (3, 4, 5, 7)


def test_a_path_is_matched_up_to_the_first_other_token() -> None:
    sources = (NodeSource.ROOT, *(NodeSource.SUFFIX,) * 4)
    proposal = Proposal(0, 0, 0, (9, 1, 2, 3, 3), (-1, 0, 0, 1, 2), (0.0,) * 5, sources)
    assert proposal.match_path([2, 3, 5]) == (2, 4)
    assert proposal.match_path([1, 1]) == (1,) and proposal.match_path([4]) == ()
