"""Several choices per request: the fields `n` and `best_of`, and the seeds of independent samples."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from swiftspec.params import MAX_CHOICES
from swiftspec.serve.api.sampling import check_population
from swiftspec.serve.errors import ApiError, check_request_fields, unsupported
from swiftspec.serve.format.generation_output import GenerationRequest
from swiftspec.serve.link.frames import EngineInfo
from swiftspec.serve.schema import SamplingFields
from swiftspec.text.outputs import choice_seed


@dataclass(frozen=True, slots=True)
class RequestedChoices:
    """Numbers of texts for each prompt.

    `n`: number of choices that are returned.
    `num_samples`: number of independent samples, each with an engine request of its own.
    `population`: (number of texts to return, number to sample) of a particle population in mode smc; None: one text.
    """

    n: int = 1
    num_samples: int = 1
    population: tuple[int, int] | None = None


def requested_choices(
    body: SamplingFields,
    n: int | None,
    stream: bool | None,
    info: EngineInfo,
    *,
    num_prompts: int = 1,
    ranked: bool = False,
) -> RequestedChoices:
    """Returns the numbers of choices that a request asks for. With the field `smc` they are texts of one population,
    otherwise independent samples. Raises ApiError if they are invalid, too many or not supported with other fields.

    `ranked`: whether the endpoint supports `best_of` without `smc`, that is, ranks samples by log-probability.
    """
    n = 1 if n is None else n
    best_of = body.best_of or n
    if body.smc is not None and (n, best_of) != (1, 1):
        choices = _population_choices(body, n, best_of, stream, info)
    else:
        choices = RequestedChoices(n, best_of)
        if n < 1:
            raise ApiError(400, "n: must be at least 1", "n")
        if best_of != n:
            _check_best_of(n, best_of, stream, info, ranked)
    total = num_prompts * choices.num_samples
    if total > MAX_CHOICES:
        field = "n" if best_of == n else "best_of"
        prompts = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
        message = f"{choices.num_samples} choices{prompts} are more than {MAX_CHOICES} in total; send several requests"
        raise ApiError(400, f"{field}: {message}", field)
    return choices


def _population_choices(
    body: SamplingFields, n: int, best_of: int, stream: bool | None, info: EngineInfo
) -> RequestedChoices:
    check_population(body.smc, info)
    field = "best_of" if n == 1 else "n"
    particles = info.plan.get("population", {}).get("particles", 1)
    if not 1 <= n <= best_of <= particles:
        message = f"n must be in 1..best_of, and best_of at most {particles}, the particles of this server"
        raise ApiError(400, f"{field}: {message}", field)
    if stream:
        check_request_fields(field, "population choices", "stream")
    return RequestedChoices(n, 1, (n, best_of))


def _check_best_of(n: int, best_of: int, stream: bool | None, info: EngineInfo, ranked: bool) -> None:
    """Raises ApiError if the `n` best of `best_of` samples cannot be returned."""
    if not ranked:
        raise unsupported("best_of", 'only supported by /v1/completions, or in mode smc with "smc": {}; omit it')
    if best_of < n:
        raise ApiError(400, f"best_of: must be at least n, which is {n}", "best_of")
    check_request_fields("best_of", "best_of", f"mode {info.plan.get('mode')}", *(["stream"] if stream else []))


def sampled_requests(request: GenerationRequest, count: int, seeded: bool) -> list[GenerationRequest]:
    """Returns `count` requests that differ in their seeds. The first one is `request`; the seeds of the others are
    derived from its seed if the client has set it (`seeded`), otherwise they are random. Only the first one computes
    the log-probabilities of the prompt, so that the others can use the prefix cache."""
    engine_request, requests = request.engine_request, [request]
    for index in range(1, count):
        seed = choice_seed(engine_request.sampling.seed, index) if seeded else secrets.randbits(63)
        sampling = replace(engine_request.sampling, seed=seed, prompt_logprobs=None)
        requests.append(replace(request, engine_request=replace(engine_request, sampling=sampling)))
    return requests
