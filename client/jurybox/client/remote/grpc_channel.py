"""The gRPC connection to a server: TLS, the token, what its failures mean."""

from __future__ import annotations

import ipaddress
import json
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc

from jurybox.protocol import forks
from jurybox.protocol.errors import TABLE, Code, Error, Refused, error_for

CODE = "jurybox-code"  # trailing metadata: the number in errors.Code, of which several share a status of gRPC's
_MOST_BYTES = 1 << 30
# A gateway that was killed is back within seconds, and what is asked here may be asked twice.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "inference.GRPCInferenceService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.2s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2.0,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_OPTIONS = [
    ("grpc.max_receive_message_length", _MOST_BYTES),
    ("grpc.max_send_message_length", _MOST_BYTES),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_RETRIES)),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
# Where the server does not say more than gRPC's status.
_MEANING = {
    grpc.StatusCode.UNAVAILABLE: Code.SERVER_GONE,
    grpc.StatusCode.INVALID_ARGUMENT: Code.MALFORMED,
    grpc.StatusCode.UNIMPLEMENTED: Code.PROTOCOL_MISMATCH,
    grpc.StatusCode.CANCELLED: Code.SERVER_GONE,
}
_BY_STATUS = {row.grpc: code for code, row in reversed(TABLE.items())}


class _Core:
    """gRPC's core in this process: its threads do not survive a fork, and calls in the child would wait for them."""

    def __init__(self) -> None:
        self.forked = False
        self._channels: weakref.WeakSet[grpc.Channel] = weakref.WeakSet()
        self._used = False
        self._parents: list[grpc.Channel] = []
        forks.register(self)

    def using(self, channel: grpc.Channel) -> grpc.Channel:
        """Note that a channel was made."""
        self._used = True
        self._channels.add(channel)
        return channel

    def check(self) -> None:
        """Raises Refused where the core is a parent's."""
        if self.forked:
            raise Refused(
                "gRPC cannot be used in a process forked from one that has used it: start this process with spawn or "
                "forkserver, connect for the first time in the child, or use the server's ipc:// or tcp:// address"
            )

    def _after_fork_in_child(self) -> None:
        self.forked = self._used
        self._parents = list(self._channels)  # kept: collected, they would be closed by threads that are not here


CORE = _Core()


class Asker:
    """Starts calls in a thread of its own.

    gRPC takes locks in Python code, and a KeyboardInterrupt, which only ever comes to the main thread, can leave one
    taken for ever: every later call would hang.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Any, Any, float, Any, Callable[[Any], None]] | None] = SimpleQueue()
        threading.Thread(target=self._run, args=(self._asked,), name="jurybox-grpc", daemon=True).start()
        weakref.finalize(self, self._asked.put, None)

    def ask(self, method: Any, request: Any, timeout: float, metadata: Any, done: Callable[[Any], None]) -> None:
        """Start a call; `done` is called in a thread of gRPC's with it, or with None where it could not be started."""
        self._asked.put((method, request, timeout, metadata, done))

    @staticmethod
    def _run(asked: SimpleQueue[Any]) -> None:
        while (what := asked.get()) is not None:
            method, request, timeout, metadata, done = what
            try:
                method.future(request, timeout=timeout, metadata=metadata).add_done_callback(done)
            except Exception:  # noqa: BLE001  the channel was closed just now
                done(None)


def open_channel(address: str, tls_ca: str | bytes | None = None) -> grpc.Channel:
    """A channel to grpc://host:port, or with TLS to grpcs://host:port.

    Args:
        tls_ca: the authority's certificate, a PEM file or what stands in one; JURYBOX_TLS_CA without it.

    Raises:
        Refused: there is no such file, or this process was forked from one that has used gRPC.
    """
    CORE.check()
    return CORE.using(_open(address, tls_ca))


def _open(address: str, tls_ca: str | bytes | None) -> grpc.Channel:
    scheme, _, where = address.partition("://")
    if scheme == "grpc":
        return grpc.insecure_channel(where, _OPTIONS)
    if isinstance(tls_ca, bytes):
        return grpc.secure_channel(where, grpc.ssl_channel_credentials(tls_ca), _OPTIONS)
    authority = tls_ca or os.environ.get("JURYBOX_TLS_CA")
    try:
        roots = Path(authority).read_bytes() if authority else None
    except OSError as error:
        named = "tls_ca" if tls_ca else "JURYBOX_TLS_CA"
        raise Refused(f"{named}={authority!r} cannot be read: {error.strerror}; expected a PEM file") from error
    return grpc.secure_channel(where, grpc.ssl_channel_credentials(roots), _OPTIONS)


def token_metadata(address: str, token: str | None) -> list[tuple[str, str]]:
    """What every call carries to be let in. The variable's token is not sent over a network in the open.

    Args:
        token: as the caller gave it; JURYBOX_TOKEN without it.
    """
    if token is None and (address.startswith("grpcs://") or _is_loopback(address)):
        token = os.environ.get("JURYBOX_TOKEN")
    return [("authorization", f"Bearer {token}")] if token else []


def failure(error: Any) -> tuple[int, str]:
    """Code and message of a failed call."""
    told = dict(error.trailing_metadata() or ()).get(CODE, "")
    status = error.code()
    code = int(told) if told.isdigit() else _MEANING.get(status, _BY_STATUS.get(status.value[0], Code.SERVER_GONE))
    return code, error.details() or status.name


def raised(error: Any, address: str) -> Error:
    """The exception that a failed call stands for."""
    code, message = failure(error)
    return error_for(code, f"{address}: {message}" if code in (Code.SERVER_GONE, Code.UNAUTHENTICATED) else message)


def _is_loopback(address: str) -> bool:
    host = address.partition("://")[2].rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
