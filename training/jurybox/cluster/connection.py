"""Connects to a Ray cluster or starts one on this machine, and finds the addresses of a server for its machines."""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from jurybox.client import connect as connect_server
from jurybox.protocol.address import default_address
from jurybox.training.runtime.plan import RunError

_OBJECT_STORE_BYTES = 256 << 20
NAMESPACE = "jurybox"


class NoCluster(RunError):
    """There is no Ray cluster at that address."""


def failure_of(error: RayError) -> str | None:
    """Return what the code of a call or of an actor's constructor raised; None: the actor or its machine was lost."""
    if isinstance(error, RayTaskError):
        return None if isinstance(error.cause, RayError) else f"{type(error.cause).__name__}: {error.cause}"
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return str(error).rstrip().rpartition("\n")[2]  # the text ends with the traceback
    return None


def connect(address: str | None) -> None:
    """Join the cluster at `address`, or start one on this machine; without usage reports.

    Raises:
        NoCluster: no cluster answers there.
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
    # Ray lowers the priority of all that it starts (nice 15): roles would yield to all other processes.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",  # a new cluster, even if another runs or RAY_ADDRESS names one
        num_cpus=max(len(os.sched_getaffinity(0)), 64),  # the cores are shared as without Ray: no actor waits for one
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        **quiet,
    )


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's SIGTERM handler, which Ray replaces when it connects."""
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


_CREDENTIALS = ("JURYBOX_TOKEN", "JURYBOX_TLS_CA", "JURYBOX_SERVER_KEY", "JURYBOX_CLIENT_KEY")


class NoAddress(RunError):
    """The server can be reached from its own machine only."""


@dataclass(frozen=True, slots=True)
class ServerAddresses:
    """The addresses of a server.

    Attributes:
        local: for processes on its machine. network: for all others; empty if the server accepts no others.
        node: Ray's id of its machine; empty where `local` is valid on every machine.
        host: that machine's address, as Ray knows it.
    """

    local: str
    network: str = ""
    node: str = ""
    host: str = ""

    def resolve(self) -> str:
        """The address for this process, on any machine."""
        return self.from_node(*_this_node())

    def from_node(self, node: str, host: str) -> str:
        """The address for processes of a machine.

        Raises:
            NoAddress: there is none.
        """
        if self.node in ("", node):
            return self.local
        advice = "let it listen there (docs/security.md), and give the address with --network-address grpcs://HOST:PORT"
        if not self.network:
            raise NoAddress(
                f"an env worker on {host} cannot reach the server at {self.local}, which has no gRPC: {advice}"
            )
        if _is_loopback(self.network.partition("://")[2].rpartition(":")[0]) and host != self.host:
            raise NoAddress(
                f"an env worker on {host} cannot reach {self.network}, the loopback of {self.host}: {advice}"
            )
        return self.network


def addresses_of(address: str | None, network: str | None = None) -> ServerAddresses:
    """Find the addresses of the server at `address`.

    Args:
        network: its address for other machines; None: ask the server.

    Raises:
        jurybox.client.Error: it does not answer.
    """
    local = address or default_address()
    if not local.startswith("ipc://"):
        return ServerAddresses(local)
    node, host = _this_node()
    if network is None:
        with connect_server(local, timeout=10.0) as server:
            network = network_address(server.status()["server"]["grpc"], host)
    return ServerAddresses(local, network, node, host)


def network_address(listens: str, host: str) -> str:
    """Return the address for other machines of a server on `host` that listens on `listens` ("host:port").

    A server uses TLS for other machines, but not on its own loopback.
    """
    if not listens:
        return ""
    name, _, port = listens.rpartition(":")
    if name.strip("[]") in ("0.0.0.0", "::", ""):
        return f"grpcs://{host}:{port}"
    return f"grpc://{listens}" if _is_loopback(name) else f"grpcs://{listens}"


def credentials(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables with the credentials of clients."""
    return {name: environment[name] for name in _CREDENTIALS if name in environment}


def _this_node() -> tuple[str, str]:
    """Ray's id of this machine, and its address."""
    util: Any = ray.util
    return ray.get_runtime_context().get_node_id(), util.get_node_ip_address()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
