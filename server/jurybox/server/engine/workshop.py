"""Where models are made ready: a thread that loads, warms up, and hands over to the loop.

The supervisor makes the arena, and for that must know the model's spec, so a load has two halves: load and tell
the spec; then, with the arena's name, attach, warm up, install.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.errors import Error
from jurybox.protocol.spec import ModelSpec, plain_specs
from jurybox.protocol.weights import WeightsChannel
from jurybox.server.config import ModelSettings
from jurybox.server.engine.core import Engine
from jurybox.server.engine.device_served import DeviceServed
from jurybox.server.engine.follower import Follower
from jurybox.server.engine.group import Member
from jurybox.server.engine.groups import Groups
from jurybox.server.engine.loader import load
from jurybox.server.engine.served import Served
from jurybox.server.models import ServedModel


@dataclass(slots=True)
class _Half:
    """A model that is loaded and waits for its arena."""

    name: str
    settings: ModelSettings
    model: ServedModel


class Workshop:
    """Loads models beside the engine's loop.

    Args:
        device: where modules go.
        tell: sends a message to the supervisor; thread-safe.
        later: runs an action in the loop's thread between two turns.
        engine: the core into which finished models are installed.
        report: called with (event, fields) for what should be logged.
    """

    def __init__(
        self,
        device: torch.device,
        tell: Callable[..., None],
        later: Callable[[Callable[[], None]], None],
        engine: Engine,
        report: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        self._report = report
        self._device = device
        self._tell = tell
        self._later = later
        self._engine = engine
        self._groups = Groups(engine, device, later)
        self._halves: dict[int, _Half] = {}
        self._arenas: dict[int, Arena] = {}  # of the models in service; the loop's thread alone touches it
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="workshop", daemon=True).start()

    def load(self, model: int, name: str, settings: dict[str, Any]) -> None:
        """Begin to load; ends in a message "loaded" or "failed"."""
        self._jobs.put(lambda: self._load(model, name, ModelSettings.model_validate(settings)))

    def arena(self, model: int, segment: str, rows: int, weights: str) -> None:
        """Go on with a loaded model: its arena, and its weights channel where it takes publications.

        Ends in a message "ready" or "failed".
        """
        self._jobs.put(lambda: self._finish(model, segment, rows, weights))

    def abandon(self, model: int, reason: str) -> None:
        """Let go of a loaded model that the supervisor has no arena or weights channel for; ends in "failed"."""
        self._jobs.put(lambda: self._abandon(model, reason))

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def _load(self, model: int, name: str, settings: ModelSettings) -> None:
        try:
            loaded = load(name, settings, self._device)
            spec = ModelSpec(name, dict(loaded.model.inputs), dict(loaded.model.outputs))
        except Exception as error:  # noqa: BLE001  whatever it was, this model failed and the others go on
            self._failed(model, error)
            return
        self._halves[model] = _Half(name, settings, loaded.model)
        self._tell(
            "loaded",
            model=model,
            inputs=plain_specs(spec.inputs),
            outputs=plain_specs(spec.outputs),
            digest=loaded.digest,
            weights=json.loads(loaded.layout.to_json()) if loaded.layout else [],
        )

    def _finish(self, model: int, segment: str, rows: int, weights: str) -> None:
        half = self._halves.pop(model)
        settings = half.settings
        try:
            spec = ModelSpec(half.name, dict(half.model.inputs), dict(half.model.outputs))
            arena = Arena.attach(segment, ArenaLayout(spec, rows))
            compute = getattr(torch, settings.dtype) if settings.dtype else None
            served = self._served(half, arena, compute)
            served.warm_up(half.model.example)
            channel = WeightsChannel.attach(weights) if weights else None
            meters = self._engine.meters(model)
            if settings.group:
                member = Member(model, served, arena.inputs, arena.outputs, channel, meters)
                self._groups.join(
                    settings.group, member, compute, lambda: self._ready(model, arena), half.model.example
                )
                return
            if channel is not None:
                served.follower = Follower(
                    channel,
                    getattr(half.model.module, "_orig_mod", half.model.module),  # behind torch.compile's wrapper
                    self._device,
                    settings.keep_versions,
                    self._later,
                    meters.adopted,
                    served.forwards if isinstance(served, DeviceServed) else None,
                )
                served.follower.start()
        except Exception as error:  # noqa: BLE001
            self._failed(model, error)
            return

        def install() -> None:
            self._engine.install(model, served, settings.min_batch, settings.max_wait_us * 1000)
            self._ready(model, arena)
            self.left(model)

        self._later(install)

    def _served(self, half: _Half, arena: Arena, compute: torch.dtype | None) -> Served:
        name, model, settings = half.name, half.model, half.settings
        # A group stacks its members' batches itself.
        if self._device.type == "cpu" or settings.group:
            return Served(name, model, arena.inputs, arena.outputs, settings.max_batch, self._device, compute)
        return DeviceServed(
            name,
            model,
            arena.inputs,
            arena.outputs,
            arena.segment.array(np.uint8, (arena.segment.size,)),
            settings.max_batch,
            self._device,
            compute,
            graphs=settings.cuda_graphs,
            report=self._report,
        )

    def left(self, model: int) -> None:
        """A model was unloaded, or is served by itself: the group it may have been in goes on without it."""
        self._jobs.put(lambda: self._groups.leave(model))

    def _ready(self, model: int, arena: Arena) -> None:
        """In the loop's thread: a model is in service."""
        if earlier := self._arenas.pop(model, None):
            earlier.close()
        self._arenas[model] = arena
        self._tell("ready", model=model)

    def _abandon(self, model: int, reason: str) -> None:
        self._halves.pop(model, None)
        self._tell("failed", model=model, reason=reason)

    def _failed(self, model: int, error: Exception) -> None:
        reason = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        self._tell("failed", model=model, reason=reason)
