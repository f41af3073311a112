"""Logits parameters of a request as scalars on the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swiftspec.params import SamplingParams

RAW, PROCESSED = "raw", "processed"  # what scores are computed from: raw logits, or the output of `process_logits`
_NAMES = ("temperature", "repetition", "presence", "frequency", "top_k", "top_p", "log_min_p")


class LogitsParams:
    """Temperature, penalties, filters and noise switch of a request, in one float64 tensor on the device.

    Operators that take them from there compute the same for every request, so a CUDA graph captures them once. An
    operator rounds a float64 scalar [] to the dtype of the logits, as it would round a Python number. Parameters that
    have no effect have neutral values: temperature 1, penalties 1 and 0, top_k 0, top_p 1 and log(min_p) -inf.
    """

    temperature: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor  # 0: no limit
    top_p: Tensor
    log_min_p: Tensor

    def __init__(self, device: torch.device | str) -> None:
        count = len(_NAMES)
        self._values = torch.zeros(count + 6, dtype=torch.float64, device=device)
        self._loaded: list[float] = []
        for name, scalar in zip(_NAMES, self._values[:count].unbind(), strict=True):
            setattr(self, name, scalar)
        # temperature, tau and noise switch of the scores, see `reference.Scores.scalars`
        self.scores = {RAW: self._values[count : count + 3], PROCESSED: self._values[count + 3 :]}

    def load(self, params: SamplingParams, *, noisy: bool, tau: float = 1.0) -> None:
        """Sets the parameters of a request. `noisy`: whether scores include noise. `tau`: calibration of the scores."""
        greedy = params.greedy
        temperature = 1.0 if greedy else params.temperature
        filters = (0, 1.0, 0.0) if greedy else (params.top_k, params.top_p, params.min_p)
        log_min_p = float(torch.tensor(filters[2]).log()) if filters[2] > 0 else -math.inf
        penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        # without noise one division by both temperatures: it rounds once
        raw = (temperature, tau, 1.0) if noisy else (temperature * tau, 1.0, 0.0)
        processed = (1.0, tau, 1.0) if noisy else (tau, 1.0, 0.0)
        values = [temperature, *penalties, *filters[:2], log_min_p, *raw, *processed]
        if values != self._loaded:
            self._values.copy_(torch.tensor(values, dtype=torch.float64))
            self._loaded = values
