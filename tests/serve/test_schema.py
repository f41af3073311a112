"""The OpenAPI document: it is accurate, all values are bounded, and no request that it allows fails with a server
error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from pydantic import ValidationError

from swiftspec.serve.schema import Body
from tests.support.http import Player, application

PATHS = {
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/completions/render", "/v1/chat/completions/render", "/v1/models", "/v1/models/{model}", "/health",
    "/health/generate", "/version", "/tokenize", "/detokenize",
    "/metrics", "/v1/spec/events", "/v1/responses/input_tokens", "/v1/responses/{response_id}",
    "/v1/responses/{response_id}/input_items", "/ping", "/load",
    "/tokenizer_info", "/ready", "/live",
}  # fmt: skip

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]


@pytest.fixture(scope="module")
def document(plain_player: Player) -> dict[str, Any]:
    return application(plain_player).openapi()


def nodes(value: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a document, with its path."""
    if isinstance(value, dict):
        yield where, value
        for name, part in value.items():
            yield from nodes(part, f"{where}/{name}")
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from nodes(part, f"{where}/{at}")


def test_every_path_is_documented(document: dict[str, Any]) -> None:
    assert set(document["paths"]) == PATHS
    assert "422" not in str(document["paths"]), "what does not fit is a 400"


def test_every_number_has_a_range_and_every_list_a_maximum(document: dict[str, Any]) -> None:
    for where, node in nodes(document["components"]["schemas"]):
        if where.startswith("/Error"):
            continue
        if node.get("type") in ("integer", "number"):
            assert "minimum" in node or "exclusiveMinimum" in node, where
            assert "maximum" in node, where
        if node.get("type") == "array":
            assert "maxItems" in node, where
        if node.get("type") == "string" and "enum" not in node and "const" not in node:
            assert "maxLength" in node or "{1,128}$" in node.get("pattern", ""), where


@pytest.mark.slow
def test_random_requests_from_the_document(plain_player: Player) -> None:
    """Requests that it allows or forbids: no response is a 5xx, and all are as documented."""
    import schemathesis  # takes a second
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi import checks as known

    plain_player.prepare()
    schema = schemathesis.openapi.from_asgi("/openapi.json", application(plain_player))
    checks = [
        not_a_server_error, known.status_code_conformance, known.content_type_conformance,
        known.response_schema_conformance,
    ]  # fmt: skip

    found = [read.ok() for read in schema.get_all_operations() if isinstance(read, Ok)]
    assert {operation.path for operation in found} == PATHS
    for operation in found:
        if operation.path == "/v1/spec/events":  # its response does not end
            continue
        if operation.path == "/v1/responses/input_tokens":  # its body is that of /v1/responses
            continue
        for mode in schemathesis.GenerationMode:

            @given(operation.as_strategy(generation_mode=mode))
            @settings(max_examples=4, deadline=None, suppress_health_check=SLOW)
            def each(case: schemathesis.Case) -> None:
                case.call_and_validate(checks=checks)

            try:
                each()
            except Unsatisfiable:  # nothing that it forbids
                assert not operation.body


def models(base: type[Body]) -> Iterator[type[Body]]:
    for model in base.__subclasses__():
        yield model
        yield from models(model)


@pytest.mark.parametrize(
    "value",
    [[-1] * 2000, [[]] * 2000, [{}] * 2000, [""] * 2000, {str(i): -1e9 for i in range(2000)}, [[[-1] * 50] * 50]],
    ids=["numbers", "lists", "objects", "texts", "object", "nested"],
)
def test_validation_ends_at_the_first_invalid_item(document: dict[str, Any], value: Any) -> None:
    """An error for each of a million items would take seconds, during which the server serves nobody."""
    for model in {*models(Body)}:
        for name, field in model.model_fields.items():
            try:
                model.model_validate({field.alias or name: value})
            except ValidationError as error:
                assert error.error_count() < 80, (model.__name__, name)
