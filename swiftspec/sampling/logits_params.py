"""Logits parameters of a request as scalars on the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from swiftspec.params import FILTERS, PENALTIES, SWITCHED_OFF, SamplingParams

RAW, PROCESSED = "raw", "processed"  # what scores are computed from: raw logits, or the output of `process_logits`
_NAMES = ("temperature", *PENALTIES, *FILTERS)


class ParameterTensors(Protocol):
    """Logits parameters by their names in SamplingParams: scalars [] for all rows, or tensors that are broadcast with
    the logits, whose dtype these have."""

    def __getitem__(self, name: str, /) -> Tensor: ...


class LogitsParams:
    """Temperature, penalties, filters and noise switch of a request, in one float64 tensor on the device.

    `params["top_p"]` is the scalar of the field of SamplingParams. Operators that take scalars from there compute the
    same for every request, so a CUDA graph captures them once. An operator rounds a float64 scalar [] to the dtype of
    the logits, as it would round a Python number. Temperature 0 is replaced by 1 and switches the filters off, since a
    greedy request needs neither.
    """

    def __init__(self, device: torch.device | str) -> None:
        count = len(_NAMES)
        self._values = torch.zeros(count + 6, dtype=torch.float64, device=device)
        self._loaded: list[float] = []
        self._scalars = dict(zip(_NAMES, self._values[:count].unbind(), strict=True))
        # temperature, tau and noise switch of the scores, see `reference.Scores.scalars`
        self.scores = {RAW: self._values[count : count + 3], PROCESSED: self._values[count + 3 :]}

    def __getitem__(self, name: str) -> Tensor:
        return self._scalars[name]

    def load(self, params: SamplingParams, *, noisy: bool, tau: float = 1.0) -> None:
        """Sets the parameters of a request. `noisy`: whether scores include noise. `tau`: calibration of the scores."""
        temperature = 1.0 if params.greedy else params.temperature
        found = params.values_of(_NAMES) | {"temperature": temperature}
        if params.greedy:
            found |= {name: SWITCHED_OFF[name] for name in FILTERS}
        # without noise one division by both temperatures: it rounds once
        raw = (temperature, tau, 1.0) if noisy else (temperature * tau, 1.0, 0.0)
        processed = (1.0, tau, 1.0) if noisy else (tau, 1.0, 0.0)
        values = [*found.values(), *raw, *processed]
        if values != self._loaded:
            self._values.copy_(torch.tensor(values, dtype=torch.float64))
            self._loaded = values
