"""The models of a run on a server: a running one, or a private one.

On a shared server the models have unique names, so that runs do not interfere, and are *kept*: the server unloads them
after `KEEP` seconds without a sign of life, or a few seconds after a killed run has lost its connections. A run unloads
them at its end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jurybox.client import Error, Model, ModelNotFound, Refused, Reply, Server, ServerGone, Timeout, connect
from jurybox.protocol.errors import SharedMemoryError
from jurybox.training import interrupts
from jurybox.training.runtime.local_server import LocalServer
from jurybox.training.runtime.plan import ConfigError, PolicyServer, load

if TYPE_CHECKING:
    from jurybox.client import Publisher
    from jurybox.client.remote.weights import RemotePublisher
    from jurybox.client.ticket import Ticket
    from jurybox.protocol.weights.reader import WeightsReader

_log = logging.getLogger("jurybox.training")

KEEP = 60.0  # seconds that a server holds a run's models without a word of it
_KEEP_EVERY = 1.0  # seconds between two words: fewer than a server waits for one after the end of a connection
_LOAD_TIMEOUT = 120.0  # seconds that a server gets to load a model: its engines may have to import torch
_MAX_VERSIONS = 64  # publications
CALL_TIMEOUT = 10.0
_UNLOAD_TIMEOUT = 5.0
_TIMEOUT, _PRIVATE_TIMEOUT = 60.0, 2.0  # seconds for a server that is away; a private one is not restarted
_RETRY_SECONDS = 0.2
_POLL_SECONDS = 0.001  # seconds between two requests for newer weights
_ADOPTED = 30.0  # seconds for a first publication: an engine that restarts imports torch before it adopts one
_LOOK_SECONDS = 1.0  # between two looks whether a server still has what was published to it
_LOOK_TIMEOUT = 2.0

# What a server gives that is away or was just started again; its memory may vanish between its answer and its use.
AWAY = (ServerGone, Timeout, ModelNotFound, SharedMemoryError)

Models = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models of a run on a server.

    Attributes:
        address: of the server.
        names: by the name that the training has for a model, its name there.
        private: whether the server is the run's own.
        http: its HTTP address, "host:port"; "" if it has none, or is a shared server.
    """

    address: str
    names: Mapping[str, str]
    private: bool
    http: str = ""

    def feed(self, models: Mapping[str, str]) -> PolicyServer:
        """For a plan: by channel, the model (as the training calls it) that gets its publications."""
        named = {channel: self.names[model] for channel, model in models.items()}
        return PolicyServer(self.address, named, _PRIVATE_TIMEOUT if self.private else _TIMEOUT)


@contextmanager
def served_models(
    models: Models,
    server: str | None = None,
    log: Path = Path("server.log"),
    *,
    http: bool = False,
    devices: list[str] | None = None,
    replicas: int = 1,
    group: str | None = None,
    factories: Sequence[str] = (),
) -> Iterator[ServedModels]:
    """Serve models; use it in a ``with``.

    Args:
        models: by name, what goes under [models.NAME] of a server's configuration.
        server: address of the one that shall have them; None: a private one is started, on the GPU where there is one.
        log: of a private server, in the folder of the run, or of several, which its live page shows.
        http: whether a private server serves HTTP, too, on a free port of this host.
        devices: of a private server, as in its configuration; None: the first GPU, without one the CPU.
        replicas: engines of a private server, on each device.
        group: see `grouped`.
        factories: of further models that clients of a private server may load.

    Raises:
        ServerGone: no server answers there. Refused: the server's configuration does not let the models in; the message
            says which line to add. ModelFailed: one could not be loaded. ServerNotStarted: a private one.
        ConfigError: weights cannot be published to that address.

    Example:
        with served_models({"policy": {"factory": "nets:policy"}}) as served, connect(served.address) as server:
            actions = server.model(served.names["policy"]).infer(observations)
    """
    models = models if group is None else grouped(models, group)
    if server is None:
        with _private(models, log, http, devices, replicas, factories) as served:
            yield served
        return
    check_address(server, models)
    run = secrets.token_hex(4)
    names = {name: f"{name}-{run}" for name in models}
    with ExitStack() as resources:
        loaded = _LoadedModels(server, {names[name]: dict(settings) for name, settings in models.items()})
        resources.callback(loaded.close)
        loaded.load()
        yield ServedModels(server, names, private=False)


def grouped(models: Models, group: str) -> dict[str, Mapping[str, Any]]:
    """Return the models with the group that each joins: one for each architecture, whose members share a forward.

    A model that keeps versions, or has a state, is served by itself.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, settings in models.items():
        arguments = settings.get("args", {})
        made = load(str(settings["factory"]))(**arguments)
        alone = settings.get("keep_versions") or getattr(made, "state", None)
        module = getattr(made, "module", made)
        shapes = {key: [str(tensor.dtype), *tensor.shape] for key, tensor in module.state_dict().items()}
        # The settings of an algorithm are mostly its learner's; what of them matters here is in the module.
        others = {key: value for key, value in arguments.items() if key != "settings"}
        mark = hashlib.sha256(json.dumps([settings["factory"], others, str(module), shapes]).encode()).hexdigest()[:12]
        found[name] = settings if alone else {**settings, "group": f"{group}-{mark}"}
    return found


def check_address(server: str, models: Models) -> None:
    """Raises ConfigError if weights cannot be published to the address."""
    if server.startswith("tcp://") and any(settings.get("publish") for settings in models.values()):
        raise ConfigError(
            f"{server} carries rows and no weights, and this training publishes its policy: give the server's ipc:// "
            "address on its own host, or its grpc:// address (server.grpc) from anywhere"
        )


@contextmanager
def _private(
    models: Models, log: Path, http: bool, devices: list[str] | None, replicas: int, factories: Sequence[str]
) -> Iterator[ServedModels]:
    log.parent.mkdir(parents=True, exist_ok=True)
    own: dict[str, Any] = {"devices": devices or _devices(), "replicas": replicas, "factories": factories}
    own["runs"] = str(log.parent.absolute())  # the live page shows what is trained
    running = LocalServer(models, log, http=http, server=own)
    try:
        running.start()
        running.wait()
        if http:
            _log.warning("the run's own server: http://%s/", running.http)
        yield ServedModels(running.address, {name: name for name in models}, private=True, http=running.http)
    finally:
        running.stop()


def _devices() -> list[str]:
    import torch

    return ["cuda:0"] if torch.cuda.device_count() else ["cpu"]


class _LoadedModels:
    """Loads models under their names, asks the server to keep them, and unloads them in the end.

    A server that was started again has none of them: they are loaded there again, and the learner publishes to them.
    """

    def __init__(self, address: str, models: Mapping[str, dict[str, Any]]) -> None:
        self._address, self._models = address, models
        self._loaded: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jurybox-models", daemon=True)

    def load(self) -> None:
        """Load all models, and keep them loaded."""
        with connect(self._address, timeout=CALL_TIMEOUT) as server:
            self._thread.start()  # a load may take longer than the server waits for a word
            for name, settings in self._models.items():
                server.load(name, settings, keep=KEEP, timeout=_LOAD_TIMEOUT)
                self._loaded.add(name)

    def close(self) -> None:
        """Unload the models; a server that does not answer forgets them by itself."""
        with interrupts.held():
            self._stop.set()
            if self._thread.is_alive():
                self._thread.join(_UNLOAD_TIMEOUT)
            with suppress(Error), connect(self._address, timeout=_UNLOAD_TIMEOUT) as server:
                for name in self._models:
                    with suppress(ModelNotFound):
                        server.unload(name)

    def _run(self) -> None:
        server: Server | None = None
        while not self._stop.wait(_RETRY_SECONDS if server is None else _KEEP_EVERY):
            try:
                server = server or connect(self._address, timeout=CALL_TIMEOUT)
                for name in self._models:
                    self._keep(server, name)
            except Error as error:
                _log.warning("the server at %s does not answer for now: %s", self._address, error)
                if server is not None:
                    server.close()
                server = None
        if server is not None:
            server.close()

    def _keep(self, server: Server, name: str) -> None:
        try:
            server.keep(name, KEEP)
        except ModelNotFound:
            if name in self._loaded and not self._stop.is_set():
                _log.warning("the server has lost %s, which is loaded again", name)
                server.load(name, self._models[name], keep=KEEP, timeout=_LOAD_TIMEOUT)


class ServedChannel:
    """A learner's end of a model that gets the publications of a channel.

    Args:
        alive: called while it waits for a server that went away.
    """

    def __init__(self, server: PolicyServer, channel: str, alive: Callable[[], None] = lambda: None) -> None:
        self._server, self._model, self._alive = server, server.models[channel], alive
        self._resources = ExitStack()
        self._publisher: Publisher | RemotePublisher | None = None
        self._looker: Server | None = None
        self._look_at = 0.0

    def publish(self, weights: Any, version: int) -> None:
        """Publish the channel's `version`, unless the server has had it.

        Raises:
            ServerGone, Timeout, ModelNotFound, SharedMemoryError, Refused: for longer than the server's time-out.
        """
        until = time.monotonic() + self._server.timeout
        while True:
            try:
                publisher = self._publisher or self._open()
                if version > publisher.version:
                    publisher.publish(weights, version=version)
                self._look_at = time.monotonic() + _LOOK_SECONDS
                return
            except (*AWAY, Refused):
                self._close_publisher()
                if time.monotonic() > until:
                    raise
                self._alive()
                time.sleep(_RETRY_SECONDS)

    def restore(self, published: WeightsReader) -> None:
        """Publish a channel's newest version again if the server has lost it, because it was started again.

        Without that, actors would wait for weights, and an idle learner for actors. It looks at most once a second, and
        tries once: while the server is away, the next look is the next attempt.
        """
        if time.monotonic() < self._look_at:
            return
        try:
            if published.newest > self._newest():
                self._close_publisher()  # of the server before
                publisher = self._open()
                state, version, _ = published.read(timeout=_LOOK_TIMEOUT)
                if version > publisher.version:
                    publisher.publish(state, version=version)
        except Error as error:
            _log.info("%s could not be published again for now: %s", self._model, error)
            self.close()
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def close(self) -> None:
        """Close the publisher, and the connection that looks."""
        self._close_publisher()
        looker, self._looker = self._looker, None
        if looker is not None:
            with suppress(Error):
                looker.close()

    def _close_publisher(self) -> None:
        self._publisher = None
        with suppress(Error):
            self._resources.close()

    def _newest(self) -> int:
        """The newest version that the server has now; 0 before the first."""
        # Asked anew: a channel of a server that is gone would go on showing the version it had.
        looker = self._looker = self._looker or connect(self._server.address, timeout=_LOOK_TIMEOUT)
        with looker.weights(self._model) as reader:
            return reader.newest

    def _open(self) -> Publisher | RemotePublisher:
        with ExitStack() as undo:
            connection = undo.enter_context(connect(self._server.address, timeout=CALL_TIMEOUT))
            publisher = self._publisher = connection.publisher(self._model)
            self._resources = undo.pop_all()
        return publisher


class LeasedModel:
    """A model of a server that is asked for actions. It connects again where the server goes away.

    Args:
        server: a plan's; None: `reach` finds it.
        channel: whose publications the model gets.
        rows: that are in flight at once.
        alive: called between two tries.
        name: the model's; None: that of the channel on the server.
        reach: connects to its server; None: to the address of `server`.
        timeout: see below; None: that of `server`.

    Attributes:
        timeout: seconds for which a server that went away is waited for.
    """

    _away: tuple[type[Exception], ...] = AWAY

    def __init__(
        self,
        server: PolicyServer | None,
        channel: str,
        rows: int,
        alive: Callable[[], None],
        *,
        name: str | None = None,
        reach: Callable[[], Server] | None = None,
        timeout: float | None = None,
    ) -> None:
        self._channel, self._rows, self._alive = channel, rows, alive
        self._where = f" at {server.address}" if server is not None and reach is None else ""
        if server is not None:
            reach = reach or partial(connect, server.address)
            name = name or server.models[channel]
            timeout = server.timeout if timeout is None else timeout
        assert reach is not None and name is not None and timeout is not None, "there is no server"
        self._reach, self._name, self.timeout = reach, name, timeout
        self._resources = ExitStack()
        self._model: Model | None = None

    @property
    def outputs(self) -> list[str]:
        """Names of the model's outputs; connects where it is not connected."""
        return list((self._model or self._open()).spec.outputs)

    def submit(
        self, rows: Any, fresh: Callable[[int], bool] = lambda version: True, version: int = 0
    ) -> Callable[[], Reply]:
        """Begin to infer; the function that is returned waits for the reply, and does what `infer` does.

        Raises:
            Refused: of the function that is returned: the server has no such version.
        """
        try:
            model = self._model or self._open()
            ticket = self._sent(model, rows, version)
        except self._away:
            self.close()
            return lambda: self.infer(rows, fresh, version)

        def reply() -> Reply:
            try:
                found = ticket.result(CALL_TIMEOUT)
            except self._away:
                if self._model is model:
                    self.close()
            else:
                if found.version and fresh(found.version):
                    return self._taken(found)
            return self.infer(rows, fresh, version)

        return reply

    def infer(self, rows: Any, fresh: Callable[[int], bool], version: int = 0) -> Reply:
        """Infer, again while the answer is of weights that are too old.

        Args:
            fresh: whether weights of a version are new enough; it may raise to give up.
            version: of the weights that are to compute it; 0: the newest.

        Raises:
            ServerGone, Timeout, ModelNotFound, SharedMemoryError: for longer than `timeout`.
            Timeout: the answers are of weights that nobody published, for longer than `timeout`, at least for 30 s.
        """
        until = time.monotonic() + self.timeout
        published_until: float | None = None  # from the first answer on: the server may have been away before
        while True:
            try:
                reply = self._asked(self._model or self._open(), rows, version)
            except self._away:
                self.close()
                published_until = None
                if time.monotonic() > until:
                    raise
            else:
                now = time.monotonic()
                if reply.version:
                    published_until = None
                    if fresh(reply.version):
                        return self._taken(reply)
                elif published_until is None:
                    published_until = now + max(self.timeout, _ADOPTED)
                elif now > published_until:
                    raise Timeout(
                        f"{self._name}{self._where} answers with the weights it "
                        f"was loaded with for {max(self.timeout, _ADOPTED):g} s: expected publications of "
                        f"{self._channel!r}; the logs of its learner and of the server say why there are none"
                    )
            self._alive()
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Release the lane."""
        self._model = None
        with suppress(Error):
            self._resources.close()

    def _sent(self, model: Model, rows: Any, version: int) -> Ticket:
        return model.submit(rows, timeout=CALL_TIMEOUT, version=version or None)

    def _asked(self, model: Model, rows: Any, version: int) -> Reply:
        return model.infer_reply(rows, timeout=CALL_TIMEOUT, version=version or None)

    def _taken(self, reply: Reply) -> Reply:
        """Return the reply that the caller gets."""
        return reply

    def _open(self) -> Model:
        with ExitStack() as undo:
            connection = undo.enter_context(self._reach())
            model = undo.enter_context(connection.model(self._name, rows=self._rows))
            self._opened(model, undo)
            self._resources = undo.pop_all()
        self._model = model
        return model

    def _opened(self, model: Model, undo: ExitStack) -> None:
        """The model was opened: open what else is asked; `undo` closes it."""


class UpdatesByVersion:
    """The number of a learner's updates at each of the last publications that a role has seen."""

    def __init__(self) -> None:
        self._updates: dict[int, int] = {}

    def note(self, version: int, updates: int) -> None:
        """A version was published after so many updates."""
        self._updates[version] = updates
        if len(self._updates) > _MAX_VERSIONS:
            del self._updates[min(self._updates)]

    def at(self, version: int) -> int:
        """The updates of a version, or of the newest known one before it; else of the oldest that is known."""
        return max((of for known, of in self._updates.items() if known <= version), default=min(self._updates.values()))
