"""Feeds an engine from a run: publications of its channels, and its past policies.

The engine is another reader on its machine, and the machine gets the weights once for all readers. Does not import Ray.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from jurybox.client import Refused, Server, connect
from jurybox.cluster.endpoints import Feeds
from jurybox.cluster.host import Folders
from jurybox.protocol.errors import Error
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import State, WeightsReader
from jurybox.training.checkpoints import StateDamaged, read_state
from jurybox.training.runtime.shared_resources import SharedResources

_POLL_SECONDS = 0.02  # seconds
_ADOPT_TIMEOUT = 5.0  # seconds for the engines to adopt a kept version
_JOIN_TIMEOUT = 10.0


class Feeder:
    """Feeds a server on this machine, in a thread of its own, until it is closed.

    Args:
        address: of the server, ipc://.
        scoreboard: name of the machine's scoreboard of the run.
        folders: by name, the run's folders on this machine.
    """

    def __init__(self, address: str, scoreboard: str, feeds: Feeds, folders: Mapping[str, str]) -> None:
        self._address, self._scoreboard, self._feeds, self._folders = address, scoreboard, feeds, folders
        self._stop = threading.Event()
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="jurybox-feeder", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> str:
        """The error that ended it; "" if none did."""
        return self._failed

    def close(self) -> None:
        """Stop it."""
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT)

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                server = stack.enter_context(connect(self._address))
                shared = stack.enter_context(SharedResources.attach(self._scoreboard))
                channels = [
                    _Channel(shared.reader(channel), _publisher(server, model))
                    for channel, model in self._feeds.channels.items()
                ]
                folders = [
                    _Folder(self._folders[folder], server, model, self._feeds.most)
                    for folder, model in self._feeds.folders.items()
                ]
                sources: list[_Channel | _Folder] = [*folders, *channels]  # the odds of a publication name what stays
                while not self._stop.wait(_POLL_SECONDS):
                    for source in sources:
                        source.feed()
        except (
            Error,
            OSError,
            KeyError,
            StateDamaged,
        ) as error:  # the server is gone, or the machine's host: reported later
            self._failed = f"{type(error).__name__}: {error}"


class _Channel:
    def __init__(self, reader: WeightsReader, publisher: Publisher) -> None:
        self._reader, self._publisher = reader, publisher
        self._seen = publisher.version  # the server may have been fed before, and refuses what it has
        self._buffers: State = reader.buffers()

    def feed(self) -> None:
        if self._reader.newer_than(self._seen):
            state, self._seen, _ = self._reader.read(out=self._buffers, timeout=5.0)
            self._publisher.publish(state, version=self._seen)


class _Folder:
    def __init__(self, folder: str, server: Server, model: str, most: int) -> None:
        self._folder, self._most = Folders({model: folder}), most
        self._taken = 0
        self._publisher = _publisher(server, model)
        engines = server.weights(model)
        assert isinstance(engines, WeightsReader)
        self._engines = engines

    def feed(self) -> None:
        new = self._folder.after(self._taken)
        self._taken += len(new)
        for model, name in new[-self._most :]:
            path = Path(self._folder.paths[model]) / name
            version = int(path.stem)
            if version > self._engines.newest:
                try:
                    state = read_state(path)["state"]
                except StateDamaged:
                    if path.exists():
                        raise
                    continue  # it was removed in the meantime
                self._publisher.publish(state, version=version)
                # Engines adopt the newest version: one that is overtaken before that would be missing.
                self._engines.wait_until_fresh(_ADOPT_TIMEOUT, max_lag=0)


def _publisher(server: Server, model: str) -> Publisher:
    publisher = server.publisher(model)
    if not isinstance(publisher, Publisher):
        raise Refused(f"{model} is served on another machine: a feeder stands beside its server")
    return publisher
