"""A client of `jurybox bench`: a process that sends requests in a loop and measures the latency of each."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.client import Error, Server, connect
from jurybox.processes import ControlPipe, attach, configuration
from jurybox.protocol.spec import ModelSpec

_REST = 0.01  # seconds of sleep after an error, so that a refusing server does not get a million requests
# Latencies are counted in classes: the lower bound of the first in seconds, and the ratio of two successive bounds.
_SHORTEST, _RATIO = 1e-6, 1.01


def rows_of(spec: ModelSpec, given: Mapping[str, npt.NDArray[Any]], n: int) -> dict[str, Any]:
    """Return n rows of each input: those given, repeated from the first if there are fewer; otherwise generated ones.

    Generated rows are random numbers between 0 and 1 for floating-point dtypes, zeros (`TensorSpec.zeros`) for other
    dtypes, and small zero rows for inputs with rows of variable size.

    Raises:
        ValueError: an array is not of an input of the model, or has no rows.
    """
    if wrong := sorted(set(given) - set(spec.inputs)):
        raise ValueError(f"the model has no input {wrong[0]!r}: expected {', '.join(spec.inputs)}")
    rng, rows = np.random.default_rng(0), dict[str, Any]()
    for name, tensor in spec.inputs.items():
        if (array := given.get(name)) is not None:
            if not array.ndim or not len(array):
                raise ValueError(f"the array for input {name!r} has no rows: expected at least one")
            rows[name] = array[np.arange(n) % len(array)]
        elif tensor.floating and not tensor.variable:
            rows[name] = rng.random((n, *tensor.shape)).astype(tensor.numpy_dtype)
        else:
            rows[name] = tensor.zeros(n)
    return rows


def classes(durations: npt.NDArray[np.float64]) -> dict[str, int]:
    """Return the number of durations, in seconds, in each class; a class is one per cent wide."""
    found = np.log(np.maximum(durations, _SHORTEST) / _SHORTEST) / np.log(_RATIO)
    numbers, counts = np.unique(found.astype(int), return_counts=True)
    return {str(number): int(count) for number, count in zip(numbers, counts, strict=True)}


def quantile(counts: Mapping[str, int], share: float) -> float | None:
    """Return the duration, in seconds, below which this share of all durations lies; None if there are none."""
    numbers = sorted((int(number), count) for number, count in counts.items())
    left = share * sum(count for _, count in numbers)
    for number, count in numbers:
        left -= count
        if left <= 0:
            return _SHORTEST * float(_RATIO ** (number + 0.5))
    return None


def _asking(server: Server, orders: Mapping[str, Any]) -> Callable[[], object]:
    name, n = str(orders["model"]), int(orders["rows"])
    given: dict[str, npt.NDArray[Any]] = {}
    if orders["inputs"]:
        with np.load(orders["inputs"], allow_pickle=False) as file:
            given = dict(file)
    model = server.model(name)
    inputs = rows_of(model.spec, given, n)
    if model.spec.state:
        sessions = model.sessions(n)
        return lambda: sessions.infer(inputs)
    return lambda: model.infer(inputs)


def _measured(ask: Callable[[], object], seconds: float) -> dict[str, Any]:
    durations, errors, first, clock = list[float](), Counter[str](), "", time.perf_counter
    until = clock() + seconds
    while (began := clock()) < until:
        try:
            ask()
        except Error as error:
            errors[type(error).__name__] += 1
            first = first or str(error)
            time.sleep(_REST)
        else:
            durations.append(clock() - began)
    return {"answers": len(durations), "classes": classes(np.array(durations)), "errors": errors, "first": first}


def main(pipe: ControlPipe) -> None:
    """Connect, report "ready", wait for the order to begin, measure, and send the results.

    Ends when the pipe is closed.
    """
    orders = configuration(pipe)
    if orders is None:
        return
    try:
        with connect(orders["address"], timeout=orders["timeout"]) as server:
            ask = _asking(server, orders)
            ask()
            pipe.send("ready")
            while (order := pipe.receive(30.0)) is None:
                continue
            pipe.send("done", **_measured(ask, order["seconds"]))
    except (Error, ValueError, OSError) as error:
        pipe.send("failed", reason=str(error))
    except EOFError:
        return


if __name__ == "__main__":
    main(attach(int(sys.argv[1])))
