"""The engines of a server: a child process and a segment of rings each."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Any

from jurybox import native
from jurybox.protocol.address import engine_address
from jurybox.protocol.errors import Code, asleep
from jurybox.protocol.scoreboard import EngineState, Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.protocol.shm_rings import ShmRings
from jurybox.protocol.timings import Timings
from jurybox.server.settings.config import ServerSettings
from jurybox.server.settings.model_settings import EngineSettings
from jurybox.server.supervisor.bindings import Bindings
from jurybox.server.supervisor.children import Child, Standby
from jurybox.server.supervisor.interpreters import environment
from jurybox.server.supervisor.models import HeldModel, Models
from jurybox.server.supervisor.segment_server import SegmentServer

_MODULE = "jurybox.server.engine"


class Engines:
    """All engines: `engines[i]` on `devices[i]`, index i of the scoreboard.

    Args:
        places: the device, interpreter and memory of each engine.
        factories: the factories that the configuration names. Of another module, engines call only callables that the
            module defines itself.
        folder: the folder of the configuration, in which engines find factories; empty: there is no file.
    """

    def __init__(
        self,
        settings: ServerSettings,
        places: Sequence[EngineSettings],
        server_id: str,
        scoreboard: Scoreboard,
        models: Models,
        segments: SegmentServer,
        factories: Sequence[str],
        folder: str,
    ) -> None:
        self._places = list(places)
        self.paused = False
        self.bindings = Bindings(lambda index, kind, **fields: self.engines[index].send(kind, **fields))
        self._segments = segments
        self._factories, self._folder = list(factories), folder
        self.devices = [place.device for place in places]
        self.pythons = [place.python for place in places]
        self._settings = settings
        self._server_id = server_id
        self._scoreboard = scoreboard
        self._models = models
        self._rings: dict[int, ShmRings] = {}
        self._rings_made = 0
        self._timings = Timings.create(segment_name(server_id, "timings"), segments.create) if settings.traces else None
        # The math libraries read these when they are loaded, so they must be set in the environment.
        threads = str(settings.engine_threads(len(places)))
        self._environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self._standby = Standby(_MODULE, self._environment) if settings.standby else None
        self.engines = [self._child(index) for index in range(len(self.devices))]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the engines' ZeroMQ transports."""
        return [engine_address(self._settings.address, index) for index in range(len(self.devices))]

    def of(self, held: HeldModel) -> list[int]:
        """Return the engines that compute a model."""
        return list(held.only) or list(range(len(self.engines)))

    def living(self) -> list[int]:
        """Return the engines whose processes are running."""
        return [index for index, child in enumerate(self.engines) if child.alive]

    def order(self, kind: str, **fields: Any) -> None:
        """Send an order to every living engine."""
        for index in self.living():
            self.engines[index].send(kind, **fields)

    def load(self, held: HeldModel, only: Collection[int] | None = None) -> None:
        """Make a model's living engines load it, or only those in `only`."""
        for index in self.living():
            if index not in (self.of(held) if only is None else only):
                continue
            self.engines[index].send("load", **_load_order(held, self._models.begin_load(held, index)))

    def pause(self, pause: bool) -> None:
        """Pause or resume all engines. Engines that start during a pause are paused, too."""
        self.paused = pause
        self.order("pause", pause=pause)

    def died(self, index: int) -> None:
        """Record on the scoreboard that an engine is dead, and release its bindings."""
        record = self._scoreboard.engines[index : index + 1]
        native.show_state(record, int(EngineState.ABSENT))
        record["incarnation"] = record["computing"] = record["paused"] = 0
        self._scoreboard.end_life(index)
        self.bindings.engine_died(index)

    def close(self) -> None:
        """Remove all segments. The children must be stopped before."""
        for rings in self._rings.values():
            rings.close()
        self._rings.clear()
        if self._timings is not None:
            self._timings.close()

    def _child(self, index: int) -> Child:
        settings, threads, place = self._settings, self._settings.engine_threads(len(self._places)), self._places[index]

        def configure() -> dict[str, Any]:
            return {
                "index": index,
                "incarnation": secrets.randbits(62) | 1,
                "scoreboard": self._scoreboard.segment.name,
                "rings": self._new_rings(index),
                "timings": self._timings.segment.name if self._timings else "",
                "spin_us": settings.spin_us,
                "address": engine_address(settings.address, index),
                "device": self.devices[index],
                "threads": threads,
                "device_memory_mib": settings.device_memory_mib,
                "memory": place.memory,
                "paused": self.paused,
                "bindings": self.bindings.of([held.index for held in self._models]),
                "log_level": settings.log_level,
                "log_format": settings.log_format,
                "factories": self._factories,
                "folder": self._folder,
                "models": [
                    _load_order(held, self._models.begin_load(held, index))
                    for held in self._models
                    if not held.quarantined and not held.sleeping and index in self.of(held)
                ],
                "refused": [
                    {
                        "model": held.index,
                        "reason": held.quarantined or str(asleep(held.name)),
                        "code": Code.MODEL_FAILED if held.quarantined else Code.SLEEPING,
                    }
                    for held in self._models
                    if held.quarantined or held.sleeping
                ],
            }

        if place.python:
            variables = {**self._environment, **environment(place.python)}
            return Child(f"engine-{index}", _MODULE, configure, variables, python=place.python)
        return Child(f"engine-{index}", _MODULE, configure, self._environment, self._standby)

    def _new_rings(self, index: int) -> str:
        """Create an engine's segment of rings and return its name. Each incarnation gets a new, empty one."""
        if earlier := self._rings.pop(index, None):
            earlier.close()
        self._rings_made += 1
        name = segment_name(self._server_id, "rings", self._rings_made)
        rings = self._segments.create_rings(name, native.RINGS_BYTES)
        self._rings[index] = rings
        self._scoreboard.begin_life(index, self._rings_made)
        return rings.segment.name


def _load_order(held: HeldModel, load: int) -> dict[str, Any]:
    return {"model": held.index, "load": load, "name": held.name, "settings": held.asked.model_dump(mode="json")}
