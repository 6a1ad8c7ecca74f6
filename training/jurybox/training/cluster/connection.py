"""Ray itself: joined, or started on this machine alone with nothing that a training does not need."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from jurybox.training.runtime.plan import RunError

_OBJECT_STORE_BYTES = 256 << 20
NAMESPACE = "jurybox"


class NoCluster(RunError):
    """There is no Ray cluster at that address."""


def connect(address: str | None) -> None:
    """Join the cluster at `address`, or start one of this machine alone; nothing is reported to anybody.

    Raises:
        NoCluster: nobody answers there.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _own_signals():
        _connect(address)


def _connect(address: str | None) -> None:
    quiet: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": logging.WARNING, "log_to_driver": False}
    if address is not None:
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise NoCluster(
                f"no Ray cluster at {address}: {error}; expected the host:port of its head ('ray start --head' prints "
                "it), or 'auto' on one of its machines"
            ) from error
        return
    # Ray lowers the priority of all that it starts (nice 15): roles would give way to whatever else runs here.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",  # one of its own, also where another runs or RAY_ADDRESS names one
        num_cpus=max(len(os.sched_getaffinity(0)), 64),  # the cores are shared as without Ray: nobody waits for one
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        **quiet,
    )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's way with SIGTERM, which Ray changes when it connects."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends."""
    ray.shutdown()
