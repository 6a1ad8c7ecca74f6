"""A server whose supervisor the test runs by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.supervisor.played_children import MODEL, Server


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Makes a server of one model m, or of others."""
    made: list[Server] = []
    monkeypatch.setattr("jurybox.server.supervisor.children._BACK_OFF", (0.0, 60.0))  # however long a test takes
    monkeypatch.setattr("jurybox.server.supervisor.children.spawn", lambda module, *_, **__: made[-1].spawn(module))

    def make(models: dict[str, dict[str, object]] | None = None, **settings: object) -> Server:
        made.append(Server(tmp_path, {"m": MODEL} if models is None else models, **settings))
        poller = made[-1].supervisor._poller
        poller.register(made[-1].supervisor._control_socket.socket, 1)
        poller.register(made[-1]._signals, 1)
        return made[-1]

    yield make
    for each in made:
        if not each.closed_already:
            each.supervisor._close()
        each._signals.close()
        each.kernel.close()
        each.stream.close()
