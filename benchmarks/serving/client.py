"""A client: send a request, wait, check the answer, repeat."""

from __future__ import annotations

import time
from array import array
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.serving.cases import Case, Sample, case_named, load_samples
from benchmarks.serving.contender import Ask, contender


class WrongAnswer(Exception):
    """A reply differs from the model's output."""


def run(name: str, case_name: str, samples: str, index: int, endpoint: Any, orders: Connection) -> None:
    """The client's process: obey the host until it hangs up.

    Orders are ("prepare", clients) and ("switch", case), both answered with "ready", and ("window", begin, end), in
    ns of CLOCK_MONOTONIC, answered with (requests per call, latencies in ns as bytes of uint64). A client that fails
    answers with the text of its exception.
    """
    try:
        asked = case_named(case_name)
        stored = load_samples(Path(samples), asked)
        ask = contender(name).client(asked, index, endpoint)
        orders.send("ready")
        while (order := orders.recv()) is not None:
            match order:
                case ("prepare", clients):
                    prepared, weight = ask.prepare(stored, clients)
                    orders.send("ready")
                case ("switch", other):
                    ask.close()
                    del ask  # and its model, before there is another
                    asked = case_named(other)
                    stored = load_samples(Path(samples), asked)
                    ask = contender(name).client(asked, index, endpoint)
                    orders.send("ready")
                case ("window", begin, end):
                    latencies = _ask_until(ask, asked, prepared, index, begin, end)
                    orders.send((weight, latencies.tobytes()))
        ask.close()
    except (EOFError, ConnectionError):
        return  # the host hung up
    except Exception as error:  # noqa: BLE001  whatever a contender's library raises is the finding
        orders.send(f"client {index}: {type(error).__name__}: {error}")


def _ask_until(ask: Ask, case: Case, samples: list[Sample], offset: int, begin: int, end: int) -> array[int]:
    """Send requests from now on; record the latencies of answers from `begin` to `end`."""
    clock = time.monotonic_ns
    latencies = array("Q")
    number, total = offset, len(samples)
    while True:
        sample = samples[number % total]
        asked = clock()
        outputs = ask(sample.inputs)
        answered = clock()
        for (name, _), output, expected, limit in zip(
            case.outputs, outputs, sample.expected, sample.limits, strict=True
        ):
            difference = output.reshape(-1) - expected
            if not difference.dot(difference) <= limit:  # so that NaN fails
                raise WrongAnswer(
                    f"sample {number % total}, {name}: expected {expected[:4]}..., came {np.ravel(output)[:4]}..."
                )
        if answered >= begin:
            if answered >= end:
                return latencies
            latencies.append(answered - asked)
        number += 1
