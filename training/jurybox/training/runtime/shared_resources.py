"""The shared memory of a run: scoreboard, replays and weights channels. Made by its owner, attached by every role."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import TracebackType

from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.replay import Replay
from jurybox.training.runtime.plan import Plan
from jurybox.training.runtime.scoreboard import Scoreboard


class SharedResources:
    """Everything that the processes of a run share. Make it with `create` (its owner) or `attach` (the roles).

    Nothing is left of it when its owner is gone: in order it removes every name; killed, the kernel drops its locks and
    those of its children, who die with it, and the next start of anything of Jurybox sweeps the memory away.

    Attributes:
        scoreboard: counters and orders.
    """

    def __init__(self, scoreboard: Scoreboard, *, owned: bool) -> None:
        self.scoreboard = scoreboard
        self.owned = owned
        self._replays: dict[str, Replay] = {}
        self._channels: dict[str, WeightsChannel] = {}
        self._instead: dict[str, str] = {}

    @classmethod
    def create(cls, plan: Plan, most_rows: int | None = None) -> SharedResources:
        """Make all shared memory of a run.

        Args:
            most_rows: of a replay, where it is only the way to the one that is sampled.

        Raises:
            SharedMemoryError: there is no room; what was made until then is removed.
        """
        run = secrets.token_hex(5)
        replays = {spec.name: f"{run}-{spec.name}" for spec in plan.replays}
        channels = {spec.name: segment_name(run, "weights", number) for number, spec in enumerate(plan.channels)}
        shared = cls(Scoreboard.create(segment_name(run, "run"), plan, replays, channels), owned=True)
        try:
            for replay in plan.replays:
                shared._replays[replay.name] = Replay.create(
                    replays[replay.name],
                    min(replay.capacity, most_rows or replay.capacity),
                    replay.fields,
                    episodes=replay.episodes,
                    prioritized=replay.prioritized,
                    alpha=replay.alpha,
                    seed=plan.seed,
                )
            for channel in plan.channels:
                shared._channels[channel.name] = WeightsChannel.create(
                    channels[channel.name], channel.layout, channel.mode, channel.extra_bytes
                )
        except BaseException:
            shared.close()
            raise
        return shared

    @classmethod
    def attach(cls, scoreboard: str, instead: Mapping[str, str] | None = None) -> SharedResources:
        """Join the run whose scoreboard has this name; replays and channels are attached when they are asked for.

        Args:
            instead: by the plan's name, the names of replays that are taken in the place of those the scoreboard names.
        """
        shared = cls(Scoreboard.attach(scoreboard), owned=False)
        shared._instead = dict(instead or {})
        return shared

    def replay(self, name: str) -> Replay:
        """The replay that the plan calls `name`."""
        if name not in self._replays:
            self._replays[name] = Replay.attach(self._instead.get(name) or dict(self.scoreboard.named.replays)[name])
        return self._replays[name]

    def channel(self, name: str) -> WeightsChannel:
        """The weights channel that the plan calls `name`."""
        if name not in self._channels:
            self._channels[name] = WeightsChannel.attach(dict(self.scoreboard.named.channels)[name], keep_alive=True)
        return self._channels[name]

    def reader(self, name: str) -> WeightsReader:
        """A reader of the channel that the plan calls `name`."""
        return WeightsReader(self.channel(name))

    def publisher(self, name: str) -> Publisher:
        """The place of the publisher on the channel that the plan calls `name`.

        Raises:
            Refused: somebody living has it.
        """
        return Publisher(self.channel(name))

    def close(self) -> None:
        """Let go of everything; the owner also removes the names."""
        for replay in self._replays.values():
            if self.owned:
                replay.unlink()
            replay.close()
        for channel in self._channels.values():
            channel.close()
        self._replays, self._channels = {}, {}
        self.scoreboard.close()

    def __enter__(self) -> SharedResources:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
