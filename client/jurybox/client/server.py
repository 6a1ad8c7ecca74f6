"""Connect to a server: models, publishers, weights, status and administration."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jurybox.client.in_flight import seconds
from jurybox.client.lane import Lane
from jurybox.client.model import Model
from jurybox.protocol.address import NOT_LINUX, default_address
from jurybox.protocol.errors import ModelFailed, Refused, Timeout
from jurybox.protocol.forks import Closing
from jurybox.protocol.spec import ModelSpec

# ZeroMQ and protobuf come with the first connection: their import costs as much as the rest of the client's.
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
    server_key: str | None = None,
    client_key: str | None = None,
    token: str | None = None,
    tls_ca: str | bytes | None = None,
) -> Server:
    """Connect to a server, waiting up to `timeout` seconds for one that is still starting.

    Args:
        address: of the server. Defaults to JURYBOX_ADDRESS, then to the default ipc address. ``ipc://`` is on this
            host, ``tcp://host:port`` and ``grpc://host:port`` (``grpcs://`` with TLS) on any.
        transport: on this host: "auto" (the fastest available), "zmq" or "shm".
        timeout: seconds; also the default time-out of every later call.
        server_key: for tcp://, the server's public CURVE key or its .key file. Defaults to JURYBOX_SERVER_KEY.
        client_key: for tcp://, the .key_secret file with this client's pair. Defaults to JURYBOX_CLIENT_KEY. A
            temporary pair is generated if the server does not authenticate clients.
        token: for grpc://, the server's token. Defaults to JURYBOX_TOKEN.
        tls_ca: for grpcs://, the certificate of the server's authority: a PEM file, or its content as bytes. Defaults
            to JURYBOX_TLS_CA.

    Raises:
        ServerGone: no server answered in time.
        ProtocolMismatch: the server has another protocol version.
        Refused: the token is missing or wrong, or a key file does not exist.
        ValueError: an unknown transport or kind of address.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: expected one of {', '.join(map(repr, TRANSPORTS))}")
    timeout = seconds(timeout)
    where = address or default_address()
    if where.startswith("ipc://"):
        if sys.platform != "linux":
            raise Refused(f"{where} is for clients on the server's own host: {NOT_LINUX}")
        from jurybox.client.local_link import LocalLink

        return Server(where, LocalLink(where, transport, timeout), timeout)
    if transport != "auto":
        raise ValueError(f"transport={transport!r} is for ipc:// addresses: {where} chooses its own")
    if where.startswith("tcp://"):
        from jurybox.client.remote.connection import keys
        from jurybox.client.remote.tcp import TcpLink

        return Server(where, TcpLink(where, keys(server_key, client_key), timeout), timeout)
    if where.startswith(("grpc://", "grpcs://")):
        try:
            from jurybox.client.remote.grpc_link import GrpcLink
        except ModuleNotFoundError as error:
            raise Refused("grpc:// addresses need grpcio, not installed here: pip install 'jurybox[grpc]'") from error
        return Server(where, GrpcLink(where, token, timeout, tls_ca), timeout)
    raise ValueError(f"{where!r} is no address: expected ipc:///path, tcp://host:port, grpc://host:port or grpcs://")


class Server(Closing):
    """A connection to one server. Close it, or use it in a ``with``.

    A connection, like a model, also closes when it is garbage-collected. In a forked child it reconnects on first use,
    except over grpc://, where it raises Refused.
    """

    def __init__(self, address: str, link: Link, timeout: float) -> None:
        self.address = address
        self.timeout = seconds(timeout)
        self._link = link
        self._models: weakref.WeakSet[Model] = weakref.WeakSet()
        # Who drops an end gives its place back.
        self._ends: weakref.WeakSet[Publisher | RemotePublisher] = weakref.WeakSet()

    # ---- what the server offers

    def model(self, name: str, *, rows: int = 0, timeout: float | None = None) -> Model:
        """Lease a lane of a model, waiting while the model is still loading.

        Args:
            rows: rows that may be in flight at once. 0: the server's default, a few rows, which grows when an `infer`
                brings more.
            timeout: seconds to wait. Defaults to the connection's.

        Raises:
            ModelNotFound: the server has no such model; the message lists those it has.
            ModelFailed: the model could not be loaded; the message says why.
            Busy: the arena has no free rows.
            Timeout: the model is still loading.
        """
        wait = self.timeout if timeout is None else seconds(timeout)
        model = Model(name, lambda n, patient: self._lease(name, n, wait if patient else 0.0), rows, self.timeout)
        self._models.add(model)
        return model

    def device_rows(self, name: str, rows: int, *, device: int = 0, timeout: float | None = None) -> DeviceRows:
        """Hold rows of a model in the memory of its GPU, for a process whose inputs are already there.

        Args:
            rows: how many.
            device: the GPU's number among those that this process sees.
            timeout: seconds in total. Defaults to the connection's.

        Example:
            with server.device_rows("photo", 8) as rows:
                images = torch.as_tensor(rows.inputs["image"], device="cuda")     # the same memory
                images.copy_(rendered)
                rows.infer()
                scores = torch.as_tensor(rows.outputs["score"], device="cuda")

        Raises:
            Refused: the server is elsewhere, there is no CUDA driver, or an engine cannot open this GPU's memory.
            ModelNotFound, ModelFailed, Busy, Timeout: as `model`.
        """
        from jurybox.client.device_rows import DeviceRows
        from jurybox.protocol.device_memory import driver

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
        """Like `device_rows`, in memory that another process exported; for gateways and proxies.

        Args:
            inputs: of every input the handle (64 bytes, CUDA's) and the byte at which its first row begins.
            outputs: the same of the outputs that are wanted.
            event: handle of an event that the inputs are there after; empty: they are when a request is sent.
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

        A model that is serving goes on serving until the new one is ready, and after a failure. Settings name code to
        run: servers take them from clients on their own host, for the factories of `server.factories`, and from others
        with `keep` and for those of `server.remote_factories`.

        Args:
            keep: seconds after which the server unloads the model unless it is asked to `keep` it on: a client that was
                killed then leaves none behind. None: it stays until it is unloaded.
            remote: the request came from another host; set by gateways that forward it.

        Raises:
            ModelFailed: it could not be loaded; Timeout: not within `timeout` seconds; Refused: the configuration does
                not allow it, and the message says which line to add.
        """
        told = json.dumps(settings) if settings is not None else ""
        self._open_link().load(name, told, self.timeout, keep=keep or 0.0, remote=remote)
        message = self._settled(name, timeout)
        if message.reason:
            raise ModelFailed(f"model {name!r} could not be loaded: {message.reason}")

    def keep(self, name: str, seconds: float) -> None:
        """Keep a model that was loaded with `keep` for this many more seconds. Raises ModelNotFound, Refused."""
        self._open_link().keep(name, seconds, self.timeout)

    def unload(self, name: str) -> None:
        """Unload a model; tickets that wait for it are refused. Raises ModelNotFound."""
        self._open_link().unload(name, self.timeout)

    def sleep(self, name: str, *, timeout: float = 60.0) -> None:
        """Move a model's weights from the device to host memory, to make room there for others, until `wake`.

        Requests to it raise Refused (code SLEEPING) meanwhile; the server stays healthy, and clients keep their rows.
        Weights published meanwhile are adopted when it wakes. No effect on a model that already sleeps.

        Raises:
            ModelNotFound; Refused: it is loading, or one of a group; ModelFailed: it could not be moved and serves on;
            Timeout: not within `timeout` seconds.

        Example:
            server.sleep("geneval")       # the trainer's step needs the memory
            trainer.step()
            server.wake("geneval")
        """
        self._open_link().sleep(name, self.timeout)
        message = self._settled(name, timeout)
        if message.state != "sleeping":
            raise ModelFailed(f"model {name!r} does not sleep, it is {message.state}: {message.reason}")

    def wake(self, name: str, *, timeout: float = 60.0) -> None:
        """Move a sleeping model back to the device, with the newest weights. No effect on a model that is awake.

        Raises:
            ModelNotFound; ModelFailed: it could not be moved, perhaps for lack of device memory, and stays asleep;
            Timeout: not within `timeout` seconds.
        """
        self._open_link().wake(name, self.timeout)
        message = self._settled(name, timeout)
        if message.reason or message.state != "ready":
            raise ModelFailed(f"model {name!r} could not be woken, it is {message.state}: {message.reason}")

    @contextlib.contextmanager
    def pause(self, *, timeout: float = 10.0) -> Iterator[None]:
        """Pause the engines inside the ``with``, so that this process has the device to itself.

        Running batches end first. Requests wait meanwhile, up to their own time-outs; weights are still adopted. Use it
        for the steps of a trainer that shares the GPU: two processes that compute at once are time-sliced, and both
        get slower. One process can pause the engines at a time; if it is killed, they continue.

        Raises:
            Busy: another process kept them paused. Timeout: an engine did not finish its batch in time.
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
            transfer: over grpc://, what is sent: "exact", all of it; "changed", what changed since the last
                publication, as exact; "bfloat16", half the bytes of float32, and less precise. On the server's host
                publications are memory, and exact.
            device: number of the GPU on which the published tensors lie. Engines on that GPU then copy them there, and
                not from the host; it costs twice the weights' bytes of its memory, until this process ends.

        Raises:
            ModelNotFound; Refused: the model takes no publications, or has a living publisher; or the address is tcp://.
        """
        if device is None:
            publisher = self._open_link().publisher(name, transfer, self.timeout)
        else:
            from jurybox.protocol.device_memory import driver

            publisher = self._open_link().publisher(name, transfer, self.timeout, driver(device))
        self._ends.add(publisher)
        return publisher

    def weights(self, name: str) -> WeightsReader | RemoteWeightsReader:
        """Open an actor's end of a model's weights channel, for actors that run the policy themselves.

        Raises:
            ModelNotFound; Refused: the model takes no publications; or the address is tcp://.
        """
        return self._open_link().weights(name, self.timeout)

    def close(self) -> None:
        """Release every lane and close every socket. May be called more than once.

        Raises:
            Timeout: a model is still in use by another thread. The others are closed, and close() may be called again.
        """
        if self._link.closed:
            return
        used: Timeout | None = None
        for model in list(self._models):
            try:
                model.close()
            except Timeout as error:
                used = error
        for publisher in list(self._ends):
            publisher.close()
        if used is not None:
            raise used
        self._link.close()

    # ---- inside

    def _open_link(self) -> Link:
        if self._link.closed:
            raise Refused("this connection was closed: connect again")
        return self._link

    def _settled(self, name: str, timeout: float) -> ModelDescription:
        """A model once all engines have done what was ordered."""
        from jurybox.client.link import POLL

        deadline = time.monotonic() + seconds(timeout)
        while not (message := self.describe(name)).settled:
            if time.monotonic() > deadline:
                raise Timeout(f"model {name!r} is still {message.state} after {timeout:.1f} s")
            time.sleep(POLL)
        return message

    def _lease(self, name: str, rows: int, timeout: float) -> tuple[Lane, ModelSpec, int]:
        return self._open_link().lease(name, rows, timeout)
