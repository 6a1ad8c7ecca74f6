"""A training's policy from a server, one that runs already or a private one: who publishes to it, who asks it.

Two runs never share a model: each registers its own, under a name that no other has, and takes it out again at its end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.client import Error, Refused, Reply, Timeout, connect
from jurybox.training.runtime.local_server import LocalServer
from jurybox.training.runtime.role_context import RoleContext

_ANSWER = 30.0  # seconds
_ADOPTED = 30.0  # seconds that the engines get to take over a publication; one that restarts imports torch
_LOOK = 0.0005
_LOADED = 90.0

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a policy is served.

    Attributes:
        address: of the server.
        model: its name there.
    """

    address: str
    model: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@contextmanager
def place_of(name: str, model: Mapping[str, Any], address: str | None, log: Path) -> Iterator[Place]:
    """A policy is served as long as the block.

    Args:
        name: what the model's name begins with; on a server of others' something follows that no other run has.
        model: as under [models.NAME] of a server's configuration.
        address: of a server that runs; None: a private one is started, which is stopped at the end.
        log: of the private one.

    Raises:
        ServerNotStarted: the private one did not come up.
        jurybox.client.Error: the other does not answer, or does not take the model.
    """
    if address is None:
        server = LocalServer({name: model}, log, http=False)
        try:
            server.start()
            server.wait()
            yield Place(server.address, name)
        finally:
            server.stop()
        return
    own = f"{name}-{secrets.token_hex(4)}"
    with connect(address) as connection:
        try:
            connection.load(own, dict(model), timeout=_LOADED)
        except Refused as error:
            raise Refused(f"the server at {address} does not take this training's policy: {error}") from error
        except BaseException:
            with suppress(Error):
                connection.unload(own)
            raise
    try:
        yield Place(address, own)
    finally:
        with suppress(Error), connect(address) as connection:
            connection.unload(own)


class ServedPublications:
    """The learner's end: what it publishes goes to the server as well. Use it in a ``with``."""

    def __init__(self, place: Place) -> None:
        with ExitStack() as undo:
            connection = undo.enter_context(connect(place.address))
            self._publisher = connection.publisher(place.model)  # closed with it
            self._resources = undo.pop_all()

    def publish(self, module: Any) -> int:
        """The module as it is now; the version that it got."""
        return self._publisher.publish(module)

    def __enter__(self) -> ServedPublications:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()


class _Told:
    """Follows a channel for what is published beside the weights."""

    def __init__(self, context: RoleContext, channel: str) -> None:
        self.version = 0
        self.extra: Mapping[str, Any] = {}
        self._reader = context.reader(channel)
        self._buffers = self._reader.buffers()

    def refresh(self, timeout: float = 1.0) -> bool:
        if not self._reader.newer_than(self.version):
            return False
        _, self.version, self.extra = self._reader.read(out=self._buffers, timeout=timeout)
        return True


class ServedPolicy:
    """What a worker asks a server for: outputs of the newest weights, or of some a few publications older.

    Args:
        channel: of the run, on which the learner publishes; beside the weights is the version that they got on the
            server ("served") and how often the learner had learned ("updates").
        rows: of a question.
        max_lag: publications that an answer may be behind; older ones are asked for again.
    """

    def __init__(self, place: Place, context: RoleContext, channel: str, *, rows: int, max_lag: int) -> None:
        self._told = _Told(context, channel)
        context.follow(channel, self._told)
        self._context, self._place, self._max_lag = context, place, max_lag
        self._behind = 0
        with ExitStack() as undo:
            connection = undo.enter_context(connect(place.address))
            self._model = undo.enter_context(connection.model(place.model, rows=rows))
            self._resources = undo.pop_all()

    @property
    def updates(self) -> int:
        """Of the learner, when the weights of the last answer were published."""
        return int(self._told.extra.get("updates", 0)) - self._behind

    def outputs(self, rows: Array) -> Mapping[str, Array]:
        """Outputs by name, for rows (n, ...)."""
        newest = int(self._told.extra["served"])
        reply = self._model.infer_reply(rows, timeout=_ANSWER)
        if self._late(reply, newest):
            until = time.monotonic() + _ADOPTED
            while self._late(reply, newest):
                if time.monotonic() > until:
                    raise Timeout(
                        f"{self._place.model} at {self._place.address} answers with version {reply.version} of its "
                        f"weights {_ADOPTED:g} s after version {newest} was published: its log says why"
                    )
                time.sleep(_LOOK)
                self._context.alive()
                reply = self._model.infer_reply(rows, timeout=_ANSWER)
        self._behind = max(0, newest - reply.version)
        found: Any = reply.outputs
        return found if isinstance(found, Mapping) else {self._only: np.asarray(found)}

    @property
    def _only(self) -> str:
        (name,) = self._model.spec.outputs
        return str(name)

    def _late(self, reply: Reply, newest: int) -> bool:
        return reply.version == 0 or newest - reply.version > self._max_lag

    def __enter__(self) -> ServedPolicy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()
