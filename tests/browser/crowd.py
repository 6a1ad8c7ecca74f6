"""A small crowd of clients and a learner, so that there is something to see."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from tests.serving import RunningServer

_ROWS = {"policy/agent0": 5, "photo": 2}


@contextmanager
def crowd(server: RunningServer, seconds: float = 90.0) -> Iterator[None]:
    """Five clients on two models and a learner that publishes every second."""
    stop, until = threading.Event(), time.monotonic() + seconds

    def ask(name: str) -> None:
        rng = np.random.default_rng()
        with server.connect() as connection:
            model = connection.model(name, rows=8)
            while not stop.is_set() and time.monotonic() < until:
                n = 1 + int(rng.integers(_ROWS[name]))
                shapes = {key: (n, *spec.shape) for key, spec in model.spec.inputs.items()}
                given = {key: np.ones(shapes[key], spec.numpy_dtype) for key, spec in model.spec.inputs.items()}
                model.infer(given, timeout=20)
                stop.wait(rng.exponential(0.006))

    def learn() -> None:
        with server.connect() as connection:
            publisher = connection.publisher("policy/agent0")
            while not stop.wait(1.0) and time.monotonic() < until:
                publisher.publish({"scale": np.float32(2.0), "offset": np.float32(1.0)})

    names = ["policy/agent0"] * 3 + ["photo"] * 2
    threads = [threading.Thread(target=ask, args=(name,)) for name in names] + [threading.Thread(target=learn)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
