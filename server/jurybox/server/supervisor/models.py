"""The models of a server: their state in each engine, arenas, weights channels and publication rates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.control_pb2 import ModelMessage
from jurybox.protocol.errors import ModelNotFound, Refused, plain
from jurybox.protocol.scoreboard import MAX_MODELS, Scoreboard
from jurybox.protocol.segment import Maker, segment_name
from jurybox.protocol.spec import ModelSpec, tell_spec
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.server.settings.config import ModelSettings

_WINDOW = 10.0  # seconds over which the rate is measured


class PublicationRate:
    """Publications per second on a channel, over the last ten seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def look(self, publications: int, now: float) -> None:
        """Record the number of publications; `now` in seconds of a monotonic clock."""
        if self._seen and publications < self._seen[-1][1]:
            self._seen.clear()  # the number is that of another channel
        self._seen.append((now, publications))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _WINDOW:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        """The rate; 0.0 before the second call of `look`."""
        if len(self._seen) < 2:
            return 0.0
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (last - first) / (ended - began) if ended > began else 0.0


_FAILED = 32  # models that could not be loaded whose errors are kept


@dataclass(frozen=True, slots=True)
class Placed:
    """A load that has its arena and weights channel, and does not serve yet: the channel, and its digest."""

    channel: WeightsChannel | None
    digest: str


@dataclass(slots=True)
class HeldModel:
    """One model across all engines.

    Attributes:
        settings: the settings in service, or before that the first ones.
        asked: the settings of the last load that was ordered.
        only: the engines that compute it, those of its interpreter; empty if all engines do.
        configured: whether the server's configuration names it; otherwise a client added it.
        served: whether an engine has ever been ready with it.
        arena_number: the number of its arena; engines refuse tickets from lanes of another.
        channel: the weights channel of the load in service. That of a reload replaces it only when the reload serves,
            so after a failed one the earlier load still gets its publications.
        channels: all that are open: this one, those of loads that do not serve yet, and others until they are closed.
        saved: the newest version on disk; 0: none.
        engines: engine -> loading, ready, reloading, sleeping, failed or quarantined.
        sleeping: whether it was put to sleep; an engine that dies meanwhile loads it on wake-up.
        moving: engines that have been ordered to move its weights and have not answered.
        loads: engine -> number of its current load; messages about other loads are outdated.
        orders: engine -> the settings of its current load.
        placed: engine -> its current load, from when it has a weights channel until it serves or has failed.
        arenas: engine -> number of the arena that it computes in.
        sources: engine -> weights channel of the load that it serves; not the model's once a reload serves elsewhere.
        reasons: engine -> why a load, or a move of weights, failed there.
        deaths: engine -> its consecutive deaths that are charged to this model.
        quarantined: why it is in quarantine, until it is loaded again; empty if it is not.
        until: when it is unloaded unless its client asks to keep it, seconds of the monotonic clock; None: never.
        warm_up: of the last engine that became ready with it: seconds, shapes (numbers of rows), graphs compiled.
        remote: whether it was loaded with settings that came from a network.
    """

    index: int
    name: str
    settings: ModelSettings
    asked: ModelSettings = field(init=False)
    only: tuple[int, ...] = ()
    configured: bool = True
    served: bool = False
    spec: ModelSpec | None = None
    arena: Arena | None = None
    arena_number: int = 0
    channel: WeightsChannel | None = None
    channels: list[WeightsChannel] = field(default_factory=list)
    published: PublicationRate = field(default_factory=PublicationRate)
    saved: int = 0
    digest: str = ""
    engines: dict[int, str] = field(default_factory=dict)
    loads: dict[int, int] = field(default_factory=dict)
    orders: dict[int, ModelSettings] = field(default_factory=dict)
    placed: dict[int, Placed] = field(default_factory=dict)
    arenas: dict[int, int] = field(default_factory=dict)
    sources: dict[int, WeightsChannel | None] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)
    quarantined: str = ""
    warm_up: dict[str, Any] = field(default_factory=dict)
    sleeping: bool = False
    moving: set[int] = field(default_factory=set)
    until: float | None = None
    remote: bool = False

    def __post_init__(self) -> None:
        self.asked = self.settings

    @property
    def state(self) -> str:
        """The state: quarantined, sleeping, ready, failed or loading.

        ready: an engine can answer, also while it reloads the model. failed: all engines have failed. sleeping: from
        the order to sleep until the order to wake. loading: otherwise; also from the order to wake until an engine is
        ready, and while an engine still serves a model of another spec under this name.
        """
        if self.quarantined:
            return "quarantined"
        if self.sleeping:
            return "sleeping"
        states = set(self.engines.values())
        stale = any(
            number != self.arena_number and self.engines.get(engine) in ("ready", "reloading", "loading")
            for engine, number in self.arenas.items()
        )
        if states & {"ready", "reloading"} and not stale:
            return "ready"
        return "failed" if states == {"failed"} else "loading"

    @property
    def settled(self) -> bool:
        """Whether no engine is still loading the model or moving its weights to or from host memory."""
        return not self.moving and not set(self.engines.values()) & {"loading", "reloading"}

    def begin_load(self, engine: int, load: int) -> None:
        """Record that an engine begins to load the model. During a reload it keeps serving."""
        self.engines[engine] = "reloading" if self.engines.get(engine) in ("ready", "reloading") else "loading"
        self.loads[engine] = load
        self.orders[engine] = self.asked
        self.placed.pop(engine, None)
        self.reasons.pop(engine, None)

    def ready(self, engine: int, arena: int, warm_up: dict[str, Any] | None = None) -> None:
        """Record that an engine serves the model, in the arena of that number."""
        self.warm_up = warm_up or {}
        self.engines[engine], self.arenas[engine], self.sources[engine] = "ready", arena, self.channel
        self.placed.pop(engine, None)
        # Not `asked`: if the load failed in another engine, that is an earlier one again.
        self.settings = self.asked = self.orders[engine]
        self.served = True

    def failed(self, engine: int, reason: str) -> None:
        """Record that a load failed.

        After a failed reload the earlier load serves, if its arena and its weights channel still are the model's.
        """
        serves = (
            self.engines.get(engine) == "reloading"
            and self.arenas.get(engine) == self.arena_number
            and self.sources.get(engine) is self.channel
        )
        self.engines[engine] = "ready" if serves else "failed"
        self.placed.pop(engine, None)
        self.reasons[engine] = reason
        if self.served:
            self.asked = self.settings  # a restarted engine must load settings that are known to work

    def cut_off(self) -> None:
        """Count the engines as failed whose load has another weights channel than the model, unless they reload it."""
        for engine, source in self.sources.items():
            if source is not self.channel and self.engines.get(engine) == "ready":
                self.engines[engine] = "failed"
                self.reasons.setdefault(engine, "it serves an earlier load, which gets no publications: load it again")

    def outdated(self) -> list[int]:
        """Return the engines that are loading the model with other settings than those in service."""
        return [
            engine
            for engine, settings in self.orders.items()
            if settings is not self.settings and self.engines.get(engine) in ("loading", "reloading")
        ]

    def fall_asleep(self) -> dict[int, int]:
        """Put the model to sleep; return the engines that must get the order, each with the number of its load."""
        orders = {engine: self.loads[engine] for engine, state in self.engines.items() if state == "ready"}
        self.sleeping, self.moving = True, set(orders)
        self.reasons.clear()
        return orders

    def wake_up(self) -> dict[int, int]:
        """Wake the model; return the engines that have it in host memory, each with the number of its load.

        The other engines in `asleep_in` have been restarted meanwhile, and must load it.
        """
        orders = {engine: load for engine, load in self.loads.items() if self.engines.get(engine) == "sleeping"}
        self.sleeping, self.moving = False, set(orders)
        self.reasons.clear()
        return orders

    @property
    def asleep_in(self) -> list[int]:
        """The engines in which the model sleeps."""
        return [engine for engine, state in self.engines.items() if state == "sleeping"]

    def weights_moved(self, engine: int, *, asleep: bool, reason: str) -> dict[int, int]:
        """Record that an engine has moved the weights, or, with a `reason`, that it could not and left them in place.

        A model sleeps in all of its engines or in none: if one of them fails to move the weights, the others move them
        back. Returns the engines that must get that order, each with the number of its load; `sleeping` is the
        direction.
        """
        self.moving.discard(engine)
        self.engines[engine] = "sleeping" if asleep else "ready"
        if reason:
            self.reasons[engine] = reason
        if self.moving or not self.reasons:
            return {}
        # Some engines failed: bring all others to the state of these.
        states = {self.engines.get(failed) for failed in self.reasons}
        if states <= {"sleeping", "ready"} and len(states) == 1:
            self.sleeping = states == {"sleeping"}
            other = "ready" if self.sleeping else "sleeping"
            self.moving = {engine for engine, state in self.engines.items() if state == other}
        return {engine: self.loads[engine] for engine in self.moving if engine in self.loads}

    def leave_quarantine(self) -> None:
        """End the quarantine. Engines that are starting load the model, too, so they count as loading."""
        self.quarantined = ""
        self.deaths.clear()
        for engine, state in self.engines.items():
            if state == "quarantined":
                self.engines[engine] = "loading"

    def engine_died(self, engine: int) -> None:
        """Record that an engine died, and with it its copy of the model."""
        for of_its_process in (self.arenas, self.sources, self.loads, self.orders, self.placed):
            of_its_process.pop(engine, None)
        self.moving.discard(engine)
        if not self.quarantined and engine in self.engines:
            self.engines[engine] = "sleeping" if self.sleeping else "loading"

    @property
    def reason(self) -> str:
        return self.quarantined or "; ".join(dict.fromkeys(self.reasons.values()))

    def lane_rows(self, asked: int) -> int:
        """Return the number of rows of a lane: the requested one, or, for 0, the model's default."""
        assert self.spec is not None
        return asked or self.settings.resolve_lane_rows(self.spec.row_bytes, state=bool(self.spec.state))

    def message(self) -> ModelMessage:
        """Return the model's description for clients."""
        message = ModelMessage(
            name=self.name,
            index=self.index,
            state=self.state,
            reason=plain(self.reason),
            max_batch=self.settings.max_batch,
            digest=self.digest,
            engines=self.only,
            settled=self.settled,
        )
        if self.spec is not None:
            tell_spec(message, self.spec)
        if self.arena is not None:
            message.arena = self.arena.segment.name
            message.arena_rows = self.arena.rows
        if self.channel is not None:
            message.weights = self.channel.name
            message.max_lag = self.settings.max_lag
        return message


class Models:
    """All models of a server, by name and by index on the scoreboard.

    Args:
        make: creates a segment.
        pythons: the interpreter of each engine; empty for the server's own.
    """

    def __init__(self, server_id: str, scoreboard: Scoreboard, make: Maker, pythons: Sequence[str] = ()) -> None:
        self._make = make
        self._pythons = list(pythons)
        self._server_id = server_id
        self._scoreboard = scoreboard
        self._by_name: dict[str, HeldModel] = {}
        self._arenas_made = 0
        self._channels_made = 0
        self._loads = 0
        self._failed: dict[str, HeldModel] = {}  # clients' models that never served, for their errors; by name
        self._replaced: list[tuple[int, Arena]] = []  # (model, arena) to close when no retiring lane uses it

    def __iter__(self) -> Iterator[HeldModel]:
        return iter(self._by_name.values())

    def add(self, name: str, settings: ModelSettings, *, configured: bool = True) -> HeldModel:
        """Add a model, or change the settings of an existing one.

        Raises:
            Refused: the server has no index left for another model.
        """
        self._failed.pop(name, None)
        if held := self._by_name.get(name):
            held.asked = settings
            return held
        used = {held.index for held in self._by_name.values()}
        index = next((n for n in range(MAX_MODELS) if n not in used), None)
        if index is None:
            raise Refused(f"the server has {MAX_MODELS} models, the most it can serve: unload one first")
        self._scoreboard.counters[:, index] = 0  # an unloaded model's counts are not this one's
        only = tuple(n for n, python in enumerate(self._pythons) if python == (settings.python or ""))
        if len(only) == len(self._pythons):
            only = ()
        held = self._by_name[name] = HeldModel(index, name, settings, only=only, configured=configured)
        return held

    def begin_load(self, held: HeldModel, engine: int) -> int:
        """Record that an engine is ordered to load a model; return the number of the load."""
        self._loads += 1
        held.begin_load(engine, self._loads)
        return self._loads

    def remove(self, name: str) -> None:
        """Remove a model; the caller closes its arena."""
        del self._by_name[self.named(name).name]

    def forget_failed(self, name: str) -> bool:
        """Forget the error of a model that could not be loaded; return False if there is none."""
        return self._failed.pop(name, None) is not None

    def remember_failed(self, held: HeldModel) -> None:
        """Keep the error of a model that could not be loaded."""
        while len(self._failed) >= _FAILED:
            del self._failed[next(iter(self._failed))]
        self._failed[held.name] = held

    def described(self, name: str) -> HeldModel:
        """As `named`, but also find a model that could not be loaded."""
        return self._failed.get(name) or self.named(name)

    def get(self, name: str) -> HeldModel | None:
        """Get the model of that name, or None."""
        return self._by_name.get(name)

    def named(self, name: str) -> HeldModel:
        """Get a model by name.

        Raises:
            ModelNotFound: there is none; the message lists all names.
        """
        try:
            return self._by_name[name]
        except KeyError:
            there = ", ".join(sorted(self._by_name)) or "none"
            raise ModelNotFound(f"no model {name[:200]!r} is served here; there are: {there}") from None

    def numbered(self, index: int) -> HeldModel | None:
        """Get a model by its index on the scoreboard, or None."""
        return next((held for held in self._by_name.values() if held.index == index), None)

    def adopt(
        self,
        held: HeldModel,
        engine: int,
        spec: ModelSpec,
        digest: str,
        layout: WeightsLayout | None,
        keep: Callable[[WeightsChannel | None], None] = lambda channel: None,
    ) -> bool:
        """Record what an engine loaded, and create its arena and weights channel.

        An arena of the same spec is kept, and so is a channel of the same layout, with its publication. Another channel
        is the load's alone until `take_over`. After an exception the model is as it was before.

        Args:
            layout: the layout of its weights; None: it takes no publications.
            keep: called with the channel before anything is replaced; it may refuse the channel by raising.

        Returns:
            Whether an arena of another spec was replaced, so that the model's lanes must be revoked.

        Raises:
            SharedMemoryError: there is not enough memory for the new arena or channel.
        """
        settings = held.orders[engine]
        arena = held.arena if held.spec == spec else None
        channel = next((channel for channel in held.channels if channel.layout == layout), None)
        with ExitStack() as undo:
            if arena is None:
                arena = self._new_arena(settings, spec)
                undo.callback(arena.close)
            if layout is not None and channel is None:
                channel = self._new_channel(settings, layout)
                undo.callback(channel.close)
            keep(channel)
            undo.pop_all()
        replaces = held.arena is not None and held.arena is not arena
        if held.arena is not arena:
            self.replaced(held)
            held.arena, held.spec, held.arena_number = arena, spec, self._arenas_made
        if channel is not None and channel not in held.channels:
            held.channels.append(channel)
        held.placed[engine] = Placed(channel, digest)
        return replaces

    def take_over(self, held: HeldModel, engine: int) -> bool:
        """Make the weights channel of an engine's load the model's; return whether it had another one, or none."""
        placed = held.placed[engine]
        held.digest = placed.digest
        if placed.channel is held.channel:
            return False
        held.channel = placed.channel
        held.published.look(0, time.monotonic())  # so that publications before the first tick count
        held.cut_off()
        return True

    def unused(self, held: HeldModel) -> list[WeightsChannel]:
        """Remove the weights channels that neither the model nor a load has any more; the caller closes them."""
        used = [held.channel, *(placed.channel for placed in held.placed.values())]
        unused = [channel for channel in held.channels if channel not in used]
        held.channels = [channel for channel in held.channels if channel in used]
        return unused

    def _new_arena(self, settings: ModelSettings, spec: ModelSpec) -> Arena:
        rows = settings.resolve_rows(spec.row_bytes, state=bool(spec.state))
        self._arenas_made += 1
        name = segment_name(self._server_id, "arena", self._arenas_made)
        return Arena.create(name, ArenaLayout(spec, rows), self._make)

    def _new_channel(self, settings: ModelSettings, layout: WeightsLayout) -> WeightsChannel:
        assert settings.publish is not None
        self._channels_made += 1
        name = segment_name(self._server_id, "weights", self._channels_made)
        return WeightsChannel.create(name, layout, settings.publish, make=self._make)

    def given_up(self, now: float) -> list[HeldModel]:
        """Return the models whose client has stopped asking to keep them; `now` as `HeldModel.until`."""
        return [held for held in self._by_name.values() if held.until is not None and now > held.until]

    def look(self, now: float) -> list[str]:
        """Record publications, and restore channels that another process has overwritten; return these models' names.

        Args:
            now: seconds of a monotonic clock.
        """
        damaged = []
        for held in self._by_name.values():
            if held.channel is not None:
                if held.channel.restore():
                    damaged.append(held.name)
                held.published.look(held.channel.publications, now)
        return damaged

    def replaced(self, held: HeldModel) -> None:
        """Mark the model's arena as replaced, since only retiring lanes still use it."""
        if held.arena is not None:
            self._replaced.append((held.index, held.arena))
            held.arena = None

    def close_replaced(self, retiring: Collection[int]) -> None:
        """Remove the replaced arenas of models without retiring lanes.

        Args:
            retiring: the models that have retiring lanes.
        """
        for index, arena in self._replaced:
            if index not in retiring:
                arena.close()
        self._replaced = [(index, arena) for index, arena in self._replaced if index in retiring]

    def close(self) -> None:
        """Remove all arenas and weights channels."""
        for held in self._by_name.values():
            self.replaced(held)
            for channel in held.channels:
                channel.close()
        self.close_replaced(())
