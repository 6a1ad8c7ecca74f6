"""The limit: ready batches through the model in one process, without requests and copies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.serving.cases import Case, Sample
from benchmarks.serving.contender import Ask, Contender
from benchmarks.serving.models import build, forward

_PROBE = 0.3  # seconds for each batch size that is tried


class LimitAsk(Ask):
    """Forward of a ready batch, of as many requests as clients."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._module = build(case.model)

    def prepare(self, samples: Sequence[Sample], clients: int) -> tuple[list[Sample], int]:
        most = max(1, self._case.max_batch // self._case.rows)
        return self._batches(samples, min(clients, most)), min(clients, most)

    def __call__(self, inputs: NDArray[Any]) -> Sequence[NDArray[Any]]:
        return [output.numpy() for output in forward(self._module, torch.from_numpy(inputs))]

    def _batches(self, samples: Sequence[Sample], requests: int) -> list[Sample]:
        """Batches of `requests` samples, beginning with another one each."""
        case, batches = self._case, []
        for start in range(len(samples)):
            chosen = [samples[(start + i) % len(samples)] for i in range(requests)]
            inputs = np.concatenate([one.inputs[None] if case.single else one.inputs for one in chosen])
            expected = tuple(np.concatenate(parts) for parts in zip(*(one.expected for one in chosen), strict=True))
            batches.append(Sample(inputs, expected, tuple(limit * requests for limit in chosen[0].limits)))
        return batches


class LimitBestAsk(LimitAsk):
    """The same with the batch size that is fastest a row, of those that so many clients can fill."""

    def prepare(self, samples: Sequence[Sample], clients: int) -> tuple[list[Sample], int]:
        most = min(clients, max(1, self._case.max_batch // self._case.rows))
        sizes = sorted({min(2**power, most) for power in range(most.bit_length())} | {most})
        best = max(sizes, key=lambda size: size * self._rate(self._batches(samples[:2], size)))
        return self._batches(samples, best), best

    def _rate(self, batches: list[Sample]) -> float:
        calls, began = 0, time.monotonic()
        while (now := time.monotonic()) < began + _PROBE:
            self(batches[calls % len(batches)].inputs)
            calls += 1
        return calls / (now - began)


class Limit(Contender):
    title = "limit: ready batch of all clients"
    one_process = True

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return LimitAsk(case)


class LimitBest(Limit):
    title = "limit: best batch"

    @classmethod
    def client(cls, case: Case, index: int, endpoint: Any) -> Ask:
        return LimitBestAsk(case)
