"""A real scoreboard and the status document of an imaginary server, so that all values can be set by hand."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from jurybox.protocol.scoreboard import EngineState, Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.server.settings.config import ModelSettings
from jurybox.server.status import status_document
from jurybox.server.supervisor.models import HeldModel
from jurybox.server.watch.sample import ScoreboardReader, Snapshot

SECOND = 10**9


class Scene:
    """A server of two engines and two models, of which only the scoreboard is real."""

    def __init__(self) -> None:
        self.id = f"watch{secrets.token_hex(4)}"
        self.scoreboard = Scoreboard.create(segment_name(self.id, "scoreboard"), 2, started=5000.0)
        settings = ModelSettings(factory="a:b", max_batch=64)
        self.models = [
            HeldModel(index, name, settings, digest="cafe", engines={0: "ready", 1: "ready"})
            for index, name in ((3, "photo"), (7, "policy/agent0"))
        ]
        self.events: list[dict[str, Any]] = []
        self.listening: dict[str, Any] = {}
        for index in (0, 1):
            self.engine(index, state=EngineState.SERVING, pid=100 + index, incarnation=5, heartbeat=1)
        self._reader = ScoreboardReader()

    def engine(self, index: int, **fields: int) -> None:
        for name, value in fields.items():
            self.scoreboard.engines[name][index] = value

    def add(self, engine: int, model: int, **fields: int) -> None:
        for name, value in fields.items():
            self.scoreboard.counters[name][engine, model] += value

    def bucket(self, engine: int, model: int, histogram: str, bucket: int, count: int = 1) -> None:
        self.scoreboard.counters[histogram][engine, model, bucket] += count

    def lease(self, lane: int, model: int, rows: int) -> None:
        record = self.scoreboard.lanes[lane : lane + 1]
        record["lease"], record["model"], record["rows"] = lane + 1, model, rows

    def document(self) -> dict[str, Any]:
        return status_document(
            self.scoreboard, self.models, [], segments={self.scoreboard.segment.name: self.scoreboard.segment.size},
            server_id=self.id, address="ipc:///x/engine", now=5060.0, events=self.events,
            engine_timeout=1e9, **self.listening,
        )  # fmt: skip

    def snapshot(self, **changes: Any) -> Snapshot:
        """The scoreboard now, with some of the snapshot's fields set by hand."""
        taken = self._reader.read(self.document())
        return Snapshot(**{**taken.__dict__, **changes})

    def close(self) -> None:
        self._reader.close()
        self.scoreboard.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()
