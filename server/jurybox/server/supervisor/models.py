"""The models a server holds: what was asked for, what the engines made of it, and the arenas."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.board import MAX_MODELS, Board
from jurybox.protocol.control_pb2 import ModelMessage, TensorSpecMessage
from jurybox.protocol.errors import ModelNotFound, Refused
from jurybox.protocol.segment import segment_name
from jurybox.protocol.spec import ModelSpec
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.channel import mode_named
from jurybox.server.config import ModelSettings
from jurybox.server.supervisor.publications import PublicationRate


@dataclass(slots=True)
class HeldModel:
    """One model across all engines.

    Attributes:
        saved: the newest version that is on disk; 0: none.
    """

    index: int
    name: str
    settings: ModelSettings
    spec: ModelSpec | None = None
    arena: Arena | None = None
    channel: WeightsChannel | None = None
    published: PublicationRate = field(default_factory=PublicationRate)
    saved: int = 0
    digest: str = ""
    engines: dict[int, str] = field(default_factory=dict)  # engine -> loading, ready, reloading, failed
    reasons: dict[int, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """ready when an engine can answer (also while it loads the model again), failed when all have, else loading."""
        states = set(self.engines.values())
        if states & {"ready", "reloading"}:
            return "ready"
        return "failed" if states == {"failed"} else "loading"

    @property
    def settled(self) -> bool:
        """Whether every engine has finished loading, well or not."""
        return not set(self.engines.values()) & {"loading", "reloading"}

    def begin_load(self, engine: int) -> None:
        """An engine begins to load it; one that serves it goes on serving meanwhile."""
        self.engines[engine] = "reloading" if self.engines.get(engine) in ("ready", "reloading") else "loading"
        self.reasons.pop(engine, None)

    def failed(self, engine: int, reason: str) -> None:
        """A load failed; after a failed reload the earlier one goes on serving."""
        self.engines[engine] = "ready" if self.engines.get(engine) == "reloading" else "failed"
        self.reasons[engine] = reason

    @property
    def reason(self) -> str:
        return "; ".join(dict.fromkeys(self.reasons.values()))

    def lane_rows(self, asked: int) -> int:
        """Rows of a lane: as asked, or the model's default."""
        assert self.spec is not None
        return asked or self.settings.resolve_lane_rows(self.spec.row_bytes)

    def message(self) -> ModelMessage:
        """As clients are told."""
        message = ModelMessage(
            name=self.name,
            index=self.index,
            state=self.state,
            reason=self.reason,
            max_batch=self.settings.max_batch,
            digest=self.digest,
            settled=self.settled,
        )
        if self.spec is not None:
            for target, specs in ((message.inputs, self.spec.inputs), (message.outputs, self.spec.outputs)):
                target.extend(
                    TensorSpecMessage(name=name, dtype=spec.dtype, shape=spec.shape) for name, spec in specs.items()
                )
        if self.arena is not None:
            message.arena = self.arena.segment.name
            message.arena_rows = self.arena.rows
        if self.channel is not None:
            message.weights = self.channel.name
            message.max_lag = self.settings.max_lag
        return message


class Models:
    """All models of a server, by name and by their place on the board."""

    def __init__(self, server_id: str, board: Board) -> None:
        self._server_id = server_id
        self._board = board
        self._by_name: dict[str, HeldModel] = {}
        self._arenas_made = 0
        self._channels_made = 0
        self._replaced: list[tuple[int, Arena]] = []  # (model, arena) to close when no lane looks at it any more

    def __iter__(self) -> Iterator[HeldModel]:
        return iter(self._by_name.values())

    def add(self, name: str, settings: ModelSettings) -> HeldModel:
        """Hold a model, or give one already held new settings."""
        if held := self._by_name.get(name):
            held.settings = settings
            return held
        used = {held.index for held in self._by_name.values()}
        index = next((n for n in range(MAX_MODELS) if n not in used), None)
        if index is None:
            raise Refused(f"{MAX_MODELS} models are held, which is all a server can: unload one first")
        self._board.counters[:, index] = 0  # an unloaded model's counts are not this one's
        held = self._by_name[name] = HeldModel(index, name, settings)
        return held

    def remove(self, name: str) -> HeldModel:
        """Forget a model; its arena is the caller's to close."""
        held = self.named(name)
        del self._by_name[name]
        return held

    def named(self, name: str) -> HeldModel:
        """Raises ModelNotFound, naming those there are."""
        try:
            return self._by_name[name]
        except KeyError:
            there = ", ".join(sorted(self._by_name)) or "none"
            raise ModelNotFound(f"no model {name!r} is served here; there are: {there}") from None

    def numbered(self, index: int) -> HeldModel | None:
        """The model at a place of the board, if there is one."""
        return next((held for held in self._by_name.values() if held.index == index), None)

    def adopt_spec(self, held: HeldModel, spec: ModelSpec, digest: str) -> bool:
        """Take note of what an engine loaded and make the arena for it.

        Returns whether it replaces an arena of another spec, so that its lanes must be revoked. Raises
        SharedMemoryError when there is no room for the new one; the old one stays then.
        """
        replaces = held.arena is not None and held.spec != spec
        if held.arena is None or replaces:
            rows = held.settings.resolve_rows(spec.row_bytes)
            self._arenas_made += 1
            name = segment_name(self._server_id, "arena", self._arenas_made)
            arena = Arena.create(name, ArenaLayout(spec, rows))
            self.replaced(held)
            held.arena, held.spec = arena, spec
        held.digest = digest
        return replaces

    def adopt_layout(self, held: HeldModel, layout: WeightsLayout | None) -> None:
        """Make the weights channel for a model; one of the same layout stays, with what was published on it.

        Raises SharedMemoryError when there is no room.
        """
        if held.channel is not None and (layout is None or held.channel.layout != layout):
            held.channel.close()
            held.channel = None
        if layout is not None and held.channel is None:
            self._channels_made += 1
            name = segment_name(self._server_id, "weights", self._channels_made)
            held.channel = WeightsChannel.create(name, layout, mode_named(str(held.settings.publish)))
            held.published.look(0, time.monotonic())  # what is published before the first tick counts too

    def look(self, now: float) -> None:
        """Notice what has been published; `now` in seconds of a steady clock."""
        for held in self._by_name.values():
            if held.channel is not None:
                held.published.look(held.channel.newest, now)

    def replaced(self, held: HeldModel) -> None:
        """The model's arena is in use no longer, but for lanes that are being taken back."""
        if held.arena is not None:
            self._replaced.append((held.index, held.arena))
            held.arena = None

    def close_replaced(self, retiring: Collection[int]) -> None:
        """Remove the arenas that were replaced, but those of models with lanes still retiring."""
        for index, arena in self._replaced:
            if index not in retiring:
                arena.close()
        self._replaced = [(index, arena) for index, arena in self._replaced if index in retiring]

    def close(self) -> None:
        """Remove every arena."""
        for held in self._by_name.values():
            self.replaced(held)
            self.adopt_layout(held, None)
        self.close_replaced(())
