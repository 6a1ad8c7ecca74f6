"""The engines of a server: a child process and a bell each."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from jurybox import native
from jurybox.protocol.address import engine_address
from jurybox.protocol.bell import Bell
from jurybox.protocol.board import Board, EngineState
from jurybox.protocol.segment import segment_name
from jurybox.protocol.segment_server import SegmentServer
from jurybox.protocol.timings import Timings
from jurybox.server.settings.config import ServerSettings
from jurybox.server.supervisor.children import Child, Standby
from jurybox.server.supervisor.models import HeldModel, Models

_MODULE = "jurybox.server.engine"


class Fleet:
    """Every engine there should be, `engines[i]` on `devices[i]`, at place i of the board.

    Args:
        factories: those that the configuration names; of other modules only what they define themselves is called.
    """

    def __init__(
        self,
        settings: ServerSettings,
        server_id: str,
        board: Board,
        models: Models,
        segments: SegmentServer,
        factories: Sequence[str],
    ) -> None:
        self._segments = segments
        self._factories = list(factories)
        self.devices = settings.engine_devices()
        self._settings = settings
        self._server_id = server_id
        self._board = board
        self._models = models
        self._bells: dict[int, Bell] = {}
        self._bells_made = 0
        self._timings = Timings.create(segment_name(server_id, "timings"), segments.create) if settings.traces else None
        # Read by the mathematical libraries when they are loaded, so they must stand in the environment.
        threads = str(settings.engine_threads())
        self._environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self._standby = Standby(_MODULE, self._environment) if settings.standby else None
        self.engines = [self._child(index) for index in range(len(self.devices))]

    @property
    def addresses(self) -> list[str]:
        """Of the engines' ZeroMQ doors."""
        return [engine_address(self._settings.address, index) for index in range(len(self.devices))]

    def living(self) -> list[int]:
        """The engines whose processes run."""
        return [index for index, child in enumerate(self.engines) if child.alive]

    def order(self, kind: str, **fields: Any) -> None:
        """Send an order to every living engine."""
        for index in self.living():
            self.engines[index].send(kind, **fields)

    def load(self, held: HeldModel) -> None:
        """Have every living engine load a model as it was asked for."""
        for index in self.living():
            self.engines[index].send("load", **_load_order(held, self._models.begin_load(held, index)))

    def prepare(self, now: float) -> None:
        """Have a process on standby where that is configured; not while an engine starts, which needs the cores more.

        Raises:
            OSError: memory or files are short.
        """
        if self._standby is not None and all(child.serving for child in self.engines):
            self._standby.look(now)

    def died(self, index: int) -> None:
        """Show on the board that an engine is dead."""
        record = self._board.engines[index : index + 1]
        native.show_state(record, int(EngineState.ABSENT))
        record["epoch"] = record["computing"] = 0
        self._board.end_life(index)

    def close(self) -> None:
        """Remove every bell, the timings and who is on standby; the children are stopped before."""
        if self._standby is not None:
            self._standby.close()
        for bell in self._bells.values():
            bell.close()
        self._bells.clear()
        if self._timings is not None:
            self._timings.close()

    def _child(self, index: int) -> Child:
        settings, threads = self._settings, self._settings.engine_threads()

        def configure() -> dict[str, Any]:
            models = [held for held in self._models if not held.quarantined]
            loads = [self._models.begin_load(held, index) for held in models]
            return {
                "index": index,
                "epoch": secrets.randbits(62) | 1,
                "board": self._board.segment.name,
                "bell": self._new_bell(index),
                "timings": self._timings.segment.name if self._timings else "",
                "spin_us": settings.spin_us,
                "address": engine_address(settings.address, index),
                "device": self.devices[index],
                "threads": threads,
                "log_level": settings.log_level,
                "log_format": settings.log_format,
                "factories": self._factories,
                "models": [_load_order(held, load) for held, load in zip(models, loads, strict=True)],
                "refused": [
                    {"model": held.index, "reason": held.quarantined} for held in self._models if held.quarantined
                ],
            }

        return Child(f"engine-{index}", _MODULE, configure, self._environment, self._standby)

    def _new_bell(self, index: int) -> str:
        """A bell for a new life of an engine: nothing its predecessor left can be taken for the new one's."""
        if earlier := self._bells.pop(index, None):
            earlier.close()
        self._bells_made += 1
        name = segment_name(self._server_id, "bell", self._bells_made)
        bell = Bell.create(self._segments, name, native.BELL_BYTES)
        self._bells[index] = bell
        self._board.begin_life(index, self._bells_made)
        return bell.segment.name


def _load_order(held: HeldModel, load: int) -> dict[str, Any]:
    return {"model": held.index, "load": load, "name": held.name, "settings": held.asked.model_dump(mode="json")}
