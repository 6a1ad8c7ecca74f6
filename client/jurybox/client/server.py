"""Connect to a server: models, publishers, weights, status and administration."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jurybox.client.lane import Lane
from jurybox.client.model import Model
from jurybox.client.requests import Requests
from jurybox.client.row_allocator import MOST_ROWS, whole
from jurybox.protocol.address import NOT_LINUX, default_address
from jurybox.protocol.errors import Error, ModelFailed, Refused, ServerGone, Timeout
from jurybox.protocol.forks import Closing
from jurybox.protocol.locks import seconds
from jurybox.protocol.scoreboard import FIRST, LAST, NORMAL
from jurybox.protocol.spec import ModelSpec

# ZeroMQ and protobuf are imported on the first connection: importing them takes as long as the rest of the client.
if TYPE_CHECKING:
    from jurybox.client.device_rows import BoundRows, DeviceRows
    from jurybox.client.link import Link, ModelDescription, Transfer
    from jurybox.client.remote.weights import RemotePublisher, RemoteWeightsReader
    from jurybox.protocol.weights.publisher import Publisher
    from jurybox.protocol.weights.reader import WeightsReader

TRANSPORTS = ("auto", "zmq", "shm")


def connect(
    address: str | None = None,
    *,
    transport: str = "auto",
    timeout: float = 10.0,
    start_timeout: float | None = None,
    server_key: str | None = None,
    client_key: str | None = None,
    token: str | None = None,
    tls_ca: str | bytes | None = None,
    priority: int = NORMAL,
) -> Server:
    """Connect to a server, waiting up to `start_timeout` seconds for one that is still starting.

    Args:
        address: the server's address. Defaults to JURYBOX_ADDRESS, then to the default ipc address. ``ipc://`` is for
            a server on this host, ``tcp://host:port`` and ``grpc://host:port`` (``grpcs://`` with TLS) for any host.
        transport: for ipc://: "auto" (what the server is set to, by default the fastest available), "zmq" or "shm".
        timeout: seconds, the default time-out of all later calls.
        start_timeout: seconds to wait for the server. Defaults to `timeout`.
        server_key: for tcp://, the server's public CURVE key or its .key file. Defaults to JURYBOX_SERVER_KEY.
        client_key: for tcp://, the .key_secret file with this client's pair. Defaults to JURYBOX_CLIENT_KEY. A
            temporary pair is generated if the server does not authenticate clients.
        token: for grpc://, the server's token. Defaults to JURYBOX_TOKEN.
        tls_ca: for grpcs://, the certificate of the authority (CA) that signed the server's: a PEM file, or its content
            as bytes. Defaults to JURYBOX_TLS_CA.
        priority: the default of `Server.model`.

    Raises:
        ServerGone: no server answered in time.
        ProtocolMismatch: the server has another protocol version.
        Refused: the token is missing or wrong, or a key file does not exist.
        ValueError: the transport or the priority is unknown, or the address is of no known form.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: expected one of {', '.join(map(repr, TRANSPORTS))}")
    priority = whole(priority, "priority", FIRST, LAST)
    timeout = seconds(timeout)
    wait = timeout if start_timeout is None else seconds(start_timeout)
    where = address or default_address()
    again = {
        "transport": transport, "timeout": timeout, "start_timeout": wait, "server_key": server_key,
        "client_key": client_key, "token": token, "tls_ca": tls_ca, "priority": priority,
    }  # fmt: skip
    if where.startswith("ipc://"):
        if sys.platform != "linux":
            raise Refused(f"{where} is for clients on the server's own host: {NOT_LINUX}")
        from jurybox.client.local_link import LocalLink

        return Server(where, LocalLink(where, transport, wait), timeout, again, priority)
    if transport != "auto":
        raise ValueError(f"transport={transport!r} is for ipc:// addresses: {where} chooses its own")
    if where.startswith("tcp://"):
        if not re.fullmatch(r"tcp://[^/]+:\d{1,5}", where):
            raise _no_address(where)
        from jurybox.client.remote.keys import keys
        from jurybox.client.remote.tcp_link import TcpLink

        return Server(where, TcpLink(where, keys(server_key, client_key), wait), timeout, again, priority)
    if where.startswith(("grpc://", "grpcs://")):
        try:
            from jurybox.client.remote.grpc_link import GrpcLink
        except ModuleNotFoundError as error:
            from jurybox.protocol.revision import install_command

            raise Refused(f"grpc:// addresses need grpcio, not installed here: {install_command('grpc')}") from error
        return Server(where, GrpcLink(where, token, wait, tls_ca), timeout, again, priority)
    raise _no_address(where)


def _no_address(where: str) -> ValueError:
    """Return the error for an address that is of no form that clients use."""
    hint = ""
    if re.match(r"https?://|[\w.-]+:\d+$", where):
        hint = '; HTTP is for other programs: Python connects to the gRPC port, such as "grpc://127.0.0.1:8001"'
    return ValueError(
        f"{where!r} is no address: expected ipc:///path, tcp://host:port, grpc://host:port or grpcs://host:port{hint}"
    )


def _connected(address: str, options: dict[str, Any]) -> Server:
    return connect(address, **options)


class Server(Closing):
    """A connection to one server. Close it, or use it in a ``with`` statement.

    A connection, like a model, also closes when it is garbage-collected. In a forked child it reconnects on first use,
    except over grpc://, where it raises Refused. It can be pickled, as can a model: where it is unpickled it connects
    again, with the same arguments. A token that was given to `connect` is in the pickle, one of the environment is not.
    """

    def __init__(
        self,
        address: str,
        link: Link,
        timeout: float,
        again: Mapping[str, Any] | None = None,
        priority: int = NORMAL,
    ) -> None:
        self.address = address
        self._again = again
        self.timeout = seconds(timeout)
        self.priority = priority
        self._link = link
        # Weak references: what is garbage-collected releases its lane or its channel.
        self._requests: weakref.WeakSet[Requests] = weakref.WeakSet()  # of models and of sessions
        self._ends: weakref.WeakSet[Publisher | RemotePublisher] = weakref.WeakSet()

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self._again is None:
            return super().__reduce__()
        return _connected, (self.address, dict(self._again))

    def __repr__(self) -> str:
        return f"<Server {self.address}>"  # never a token

    # ---- the server's services

    def model(
        self,
        name: str,
        *,
        rows: int = 0,
        timeout: float | None = None,
        wait: bool = True,
        priority: int | None = None,
    ) -> Model:
        """Lease a lane of a model; wait if the model is still loading.

        Args:
            rows: maximum number of rows in flight. 0: the server's default, a few rows, which grows when an `infer`
                call passes more.
            timeout: seconds to wait. Defaults to the connection's.
            wait: False: wait only for the server's answer, not for a model that is loading or for rows in use.
            priority: of all its requests: 1 (first), 2 (normal) or 3 (last), as Triton numbers the levels. Of requests
                that wait for an engine, those of a lower number are computed first, but every ninth or tenth batch
                begins with those that were passed over. Defaults to the connection's, which is 2 by default.

        Example:
            evaluated = server.model("policy", priority=3)  # does not hold up the actors

        Raises:
            ModelNotFound: the server has no such model; the message lists its models.
            ModelFailed: the model could not be loaded; the message states the reason.
            Busy: the arena has no free rows.
            Timeout: the model is still loading.
            Refused: the server knows no priorities.
            ValueError: rows or priority is no such number.
        """
        rows = whole(rows, "rows", 0, MOST_ROWS)
        left = self.timeout if timeout is None else seconds(timeout)
        level = self.priority if priority is None else whole(priority, "priority", FIRST, LAST)

        def lease(n: int, patient: bool) -> tuple[Lane, ModelSpec, int]:
            return self._open_link().lease(name, n, left if patient else 0.0, wait=wait, priority=level)

        return Model(name, lease, rows, self.timeout, self._opened, (self.model, left, wait, level), self.address)

    def device_rows(self, name: str, rows: int, *, device: int = 0, timeout: float | None = None) -> DeviceRows:
        """Allocate rows of a model in GPU memory, for a process whose inputs are already on the model's GPU.

        Args:
            rows: number of rows.
            device: index of the GPU among those visible to this process.
            timeout: seconds in total. Defaults to the connection's.

        Example:
            with server.device_rows("photo", 8) as rows:
                images = torch.as_tensor(rows.inputs["image"], device="cuda")     # the same memory
                images.copy_(rendered)
                rows.infer()
                scores = torch.as_tensor(rows.outputs["score"], device="cuda")

        Raises:
            Refused: the server is on another host, there is no CUDA driver, or an engine cannot open this GPU's memory.
            ModelNotFound, ModelFailed, Busy, Timeout, ValueError: as in `model`.
        """
        from jurybox.client.device_rows import DeviceRows
        from jurybox.protocol.device_memory import driver

        rows = whole(rows, "rows", 1, MOST_ROWS)
        wait = self.timeout if timeout is None else seconds(timeout)
        link = self._open_link()
        memory = driver(device)
        model = self.model(name, rows=rows, timeout=wait)
        try:
            return DeviceRows(model, rows, memory, link.bind, wait)
        except BaseException:
            model.close()
            raise

    def bound_rows(
        self,
        name: str,
        rows: int,
        inputs: Mapping[str, tuple[bytes, int]],
        outputs: Mapping[str, tuple[bytes, int]],
        *,
        event: bytes = b"",
        timeout: float | None = None,
    ) -> BoundRows:
        """Like `device_rows`, but in memory that another process exported; for gateways and proxies.

        Args:
            inputs: for each input, its CUDA memory handle (64 bytes) and the byte offset of its first row.
            outputs: the same for each requested output.
            event: handle of the event that the inputs are ready after; empty: they are ready when a request is sent.
        """
        from jurybox.client.device_rows import BoundRows

        wait = self.timeout if timeout is None else seconds(timeout)
        model = self.model(name, rows=rows, timeout=wait)
        try:
            return BoundRows(model, rows, inputs, outputs, event, self._open_link().bind, wait)
        except BaseException:
            model.close()
            raise

    def models(self) -> list[str]:
        """Return the names of the server's models."""
        return self._open_link().models(self.timeout)

    def describe(self, name: str) -> ModelDescription:
        """Return the state, spec and weights digest of a model. Raises ModelNotFound."""
        from jurybox.client.link import described

        return described(self._open_link().describe(name, self.timeout))

    def engines(self, name: str) -> int:
        """Return the number of engines that compute a model: as many requests can be computed at the same time."""
        return len(self.describe(name).engines) or len(self.status()["engines"])

    def status(self) -> dict[str, Any]:
        """Return the server's status document, as ``jurybox status --json`` prints it."""
        document: dict[str, Any] = json.loads(self._open_link().status(self.timeout))
        return document

    def load(
        self,
        name: str,
        settings: dict[str, Any] | None = None,
        *,
        keep: float | None = None,
        timeout: float = 60.0,
        remote: bool = False,
    ) -> None:
        """Load a model, or load it again with new settings (those of the config's [models.NAME]).

        A model that is serving continues to serve until the new one is ready, and also if loading fails. Settings name
        code to run: a server accepts them from clients on its own host for the factories in `server.factories`, and
        from other hosts only with `keep` and for the factories in `server.remote_factories`.

        Args:
            keep: seconds after which the server unloads the model unless `keep` is called: a client that is killed then
                leaves no model behind. None: the model stays until it is unloaded.
            remote: the request came from another host; set by gateways that forward it.

        Raises:
            ModelFailed: the model could not be loaded.
            Timeout: it was not loaded within `timeout` seconds.
            Refused: the configuration does not allow it; the message states which line to add.
        """
        settings_json = json.dumps(settings) if settings is not None else ""
        until = time.monotonic() + seconds(timeout)
        self._open_link().load(name, settings_json, self._order(timeout), keep=keep or 0.0, remote=remote)
        message = self._settled(name, timeout, until)
        if message.reason:
            raise ModelFailed(f"model {name!r} could not be loaded: {message.reason}")

    def keep(self, name: str, seconds: float) -> None:
        """Keep a model that was loaded with `keep` for `seconds` more. Raises ModelNotFound, Refused."""
        self._open_link().keep(name, seconds, self.timeout)

    def unload(self, name: str) -> None:
        """Unload a model; its queued tickets are refused. Raises ModelNotFound."""
        self._open_link().unload(name, self.timeout)

    def sleep(self, name: str, *, timeout: float = 60.0) -> None:
        """Move a model's weights from the device to host memory, to free device memory until `wake`.

        Meanwhile requests to the model raise Refused (code SLEEPING); the server stays healthy, and clients keep their
        rows. Weights published meanwhile are adopted when the model wakes. No effect on a model that is asleep already.

        Raises:
            ModelNotFound: the server has no such model.
            Refused: the model is loading, or is part of a group.
            ModelFailed: it could not be moved, and continues to serve.
            Timeout: it was not moved within `timeout` seconds.

        Example:
            server.sleep("geneval")       # the trainer's step needs the memory
            trainer.step()
            server.wake("geneval")
        """
        until = time.monotonic() + seconds(timeout)
        self._open_link().sleep(name, self._order(timeout))
        message = self._settled(name, timeout, until)
        if message.state != "sleeping":
            raise ModelFailed(f"model {name!r} is {message.state}, not sleeping: {message.reason}")

    def wake(self, name: str, *, timeout: float = 60.0) -> None:
        """Move a sleeping model back to the device, with the newest weights. No effect on a model that is awake.

        Raises:
            ModelNotFound: the server has no such model.
            ModelFailed: it could not be moved, for example for lack of device memory, and stays asleep.
            Timeout: it was not moved within `timeout` seconds.
        """
        until = time.monotonic() + seconds(timeout)
        self._open_link().wake(name, self._order(timeout))
        message = self._settled(name, timeout, until)
        if message.reason or message.state != "ready":
            raise ModelFailed(f"model {name!r} could not be woken and is {message.state}: {message.reason}")

    @contextlib.contextmanager
    def pause(self, *, timeout: float = 10.0) -> Iterator[None]:
        """Pause the engines during the ``with`` block, so that this process has exclusive use of the device.

        Running batches finish first. Requests wait meanwhile, up to their own time-outs; weights are still adopted. Use
        it for the steps of a trainer that shares the GPU: two processes that compute at once are time-sliced, and both
        get slower. One process can pause the engines at a time; if it is killed, they continue. Pauses of one
        connection may be nested, or in several threads: the engines continue at the end of the last one.

        Raises:
            Busy: another process kept them paused.
            Timeout: an engine did not finish its batch in time.
            Refused: the server is on another host.

        Example:
            with server.pause():
                trainer.step()
                torch.cuda.synchronize()
        """
        go_on = self._open_link().pause(seconds(timeout))
        try:
            yield
        finally:
            go_on()

    def publisher(
        self, name: str, *, transfer: Transfer = "exact", device: int | None = None
    ) -> Publisher | RemotePublisher:
        """Open the learner's end of a model's weights channel. A model has one publisher at a time.

        Args:
            transfer: over grpc://, what is sent: "exact", all weights; "changed", only the 1 MiB chunks that changed
                since the last publication, also exact; "bfloat16", half the bytes of float32 at lower precision. On the
                server's host, publications go through shared memory and are exact.
            device: index of the GPU that holds the published tensors. Engines on that GPU then copy them on the device
                instead of from host memory. This takes twice the weights' bytes of device memory, until this process
                ends.

        Raises:
            ModelNotFound: the server has no such model.
            Refused: the model accepts no publications, or already has a live publisher; or the address is tcp://.
        """
        if device is None:
            publisher = self._open_link().publisher(name, transfer, self.timeout)
        else:
            from jurybox.protocol.device_memory import driver

            publisher = self._open_link().publisher(name, transfer, self.timeout, driver(device))
        self._ends.add(publisher)
        if self._link.closed:  # meanwhile
            publisher.close()
        self._open_link()
        return publisher

    def weights(self, name: str) -> WeightsReader | RemoteWeightsReader:
        """Open an actor's end of a model's weights channel, for actors that run the policy themselves.

        Raises:
            ModelNotFound: the server has no such model.
            Refused: the model accepts no publications; or the address is tcp://.
        """
        return self._open_link().weights(name, self.timeout)

    def close(self) -> None:
        """Release every lane, also those of sessions, and close every socket. May be called more than once.

        Raises:
            Timeout: a model is still in use by another thread. The others are closed, and close() may be called again.
            Refused: this is a signal handler or a destructor within a call of a model. The others are closed, and
                close() may be called again after that call.
        """
        if self._link.closed:
            return
        used: Error | None = None
        for requests in list(self._requests):
            try:
                requests.end()
            except (Timeout, Refused) as error:
                used = error
        for publisher in list(self._ends):
            try:
                publisher.close()
            except (Timeout, Refused) as error:
                used = error
        if used is not None:
            raise used
        self._link.close()

    # ---- private

    def _opened(self, requests: Requests) -> None:
        """Remember a lane to close, and close it now if the connection was closed meanwhile."""
        self._requests.add(requests)
        if self._link.closed:
            requests.end()
        self._open_link()

    def _open_link(self) -> Link:
        if self._link.closed:
            raise Refused("this connection was closed: connect again")
        return self._link

    def _order(self, timeout: float) -> float:
        """Return how long an order may take: to be carried out, or to be accepted."""
        return seconds(timeout) if self._open_link().waits else min(self.timeout, seconds(timeout))

    def _settled(self, name: str, timeout: float, deadline: float) -> ModelDescription:
        """Wait until all engines have carried out the order, then return the model's description."""
        from jurybox.client.link import POLL, described

        message: ModelDescription | None = None
        while True:
            left = max(POLL, min(self.timeout, deadline - time.monotonic()))
            try:
                if (message := described(self._open_link().describe(name, left))).settled:
                    return message
            except ServerGone:
                if message is None or time.monotonic() < deadline:
                    raise  # else it has answered, but had too little time to do so again
            if time.monotonic() > deadline:
                state = "loading" if message is None else message.state
                raise Timeout(f"model {name!r} is still {state} after {timeout:.1f} s")
            time.sleep(POLL)
