"""The shared memory of a run: scoreboard, replays and weights channels. Made by its owner, attached by every role.

`SharedResources.save` and `restore` handle the part of a checkpoint that no role has: counters, replays, weights.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jurybox.protocol.forks import Closing
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.checkpoints import Checkpoint, CheckpointError, read_state, write_state
from jurybox.training.replay import Replay
from jurybox.training.runtime.plan import POLICY_FILE, Kind, Plan, ReplaySpec
from jurybox.training.runtime.scoreboard import PROGRESS, ControlWord, RunScoreboard, Word

# What a checkpoint keeps of every role's counters.
_COUNTS = (
    Word.ENV_STEPS,
    Word.LEARNER_STEPS,
    Word.EPOCHS,
    Word.EPISODES,
    Word.EVALUATED_AT,
    Word.FORCED,
    Word.ROWS_DROPPED,  # last, since a checkpoint of before it has none
)


def counted(checkpoint: Checkpoint | None, word: Word) -> int:
    """The sum of a counter over all roles of a checkpoint; 0 without one."""
    roles = {} if checkpoint is None else checkpoint.document.get("roles", {})  # a training without roles has none
    return sum(int(counts[_COUNTS.index(word)]) for _, counts in roles.values())


def progress_of(checkpoint: Checkpoint | None) -> tuple[int, ...]:
    """`RunScoreboard.progress` when a checkpoint was made; zeros without one."""
    return tuple(counted(checkpoint, word) for word in PROGRESS)


def repairable(plan: Plan) -> list[str]:
    """The replays with priorities that nobody uses while actors and learners are paused: not those of evaluators."""
    evaluators = [plan.roles[number] for number in plan.of_kind(Kind.EVALUATOR)]
    in_use = {name for role in evaluators for name in (*role.samples, *role.writes)}
    return [replay.name for replay in plan.replays if replay.prioritized and replay.name not in in_use]


def create_replay(spec: ReplaySpec, name: str, seed: int) -> Replay:
    """Make the replay that a plan describes, under a name of shared memory."""
    return Replay.create(
        name,
        spec.capacity,
        spec.fields,
        episodes=spec.episodes,
        prioritized=spec.prioritized,
        alpha=spec.alpha,
        anchor=spec.anchor,
        seed=seed,
    )


class SharedResources(Closing):
    """The shared memory of a run. The owner calls `create`, the roles `attach`.

    Nothing is left of it when its owner is gone: in order it removes every name; killed, the kernel drops its locks and
    those of its children, who die with it, and the next start of anything of Jurybox sweeps the memory away.

    Attributes:
        scoreboard: counters and orders.
    """

    def __init__(self, scoreboard: RunScoreboard, *, owned: bool) -> None:
        self.scoreboard = scoreboard
        self.owned = owned
        self._replays: dict[str, Replay] = {}
        self._channels: dict[str, WeightsChannel] = {}
        self._overrides: dict[str, str] = {}

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
        shared = cls(RunScoreboard.create(segment_name(run, "run"), plan, replays, channels), owned=True)
        try:
            for replay in plan.replays:
                # What is on its way goes through the ring: rows of an anchor would stay behind.
                way = replace(replay, capacity=min(replay.capacity, most_rows), anchor=0) if most_rows else replay
                shared._replays[replay.name] = create_replay(way, replays[replay.name], plan.seed)
            for channel in plan.channels:
                shared._channels[channel.name] = WeightsChannel.create(
                    channels[channel.name], channel.layout, channel.mode, channel.extra_bytes
                )
        except BaseException:
            shared.close()
            raise
        return shared

    @classmethod
    def attach(cls, scoreboard: str, overrides: Mapping[str, str] | None = None) -> SharedResources:
        """Attach to the run whose scoreboard has this name; replays and channels are attached on demand.

        Args:
            overrides: by the plan's name, the names of replays that are taken instead of those the scoreboard names.
        """
        shared = cls(RunScoreboard.attach(scoreboard), owned=False)
        shared._overrides = dict(overrides or {})
        return shared

    def replay(self, name: str) -> Replay:
        """The replay that the plan calls `name`."""
        if name not in self._replays:
            self._replays[name] = Replay.attach(self._overrides.get(name) or dict(self.scoreboard.named.replays)[name])
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
        """The publisher of the channel that the plan calls `name`.

        Raises:
            Refused: a living process has it.
        """
        return Publisher(self.channel(name))

    def repair_replays(self, plan: Plan) -> None:
        """Correct the priorities' sums that a killed role was changing. Actors and learners must be paused, or gone."""
        for name in repairable(plan):
            self.replay(name).repair()

    def save(self, plan: Plan, folder: Path, save_replay: Callable[[str, Path], None] | None = None) -> dict[str, Any]:
        """Write replays and published weights to the folder of a checkpoint, while the roles are paused.

        Args:
            save_replay: writes the replay of that name to a file, where the one in this object is not the one that is
                sampled.

        Returns:
            The entries of the checkpoint's run.json that `restore` needs.
        """
        for replay in plan.replays:
            path = folder / f"replay-{replay.name}.jbr"
            if save_replay is None:
                self.replay(replay.name).save(path)
            else:
                save_replay(replay.name, path)
        extras = []
        for channel in plan.channels:
            reader = self.reader(channel.name)
            if reader.newest:
                state, version, extra = reader.read(timeout=5.0)
                extras.append(extra)
                whole = {"state": state, "version": version, "extra": extra}
                write_state(folder / f"weights-{channel.name}.state", whole)
        plan.write_policy(folder, extras)
        return {
            "replays": [each.name for each in plan.replays],
            "channels": [each.name for each in plan.channels],
            "roles": {
                role.name: [int(role.kind), [self.scoreboard.words[number][word] for word in _COUNTS]]
                for number, role in enumerate(plan.roles)
            },
        }

    def restore(self, plan: Plan, checkpoint: Checkpoint) -> None:
        """Fill a new run's shared memory from a checkpoint: counters, replays, published weights with their versions.

        If the plan has other actors, all share the counts of those that were, and new ones begin as successors do, with
        random numbers of their own. Counts of other roles that it no longer has go to the first role of their kind.

        Raises:
            CheckpointError: it is of a run with other replays or channels, or of a build with another format.
        """
        path = checkpoint.folder / POLICY_FILE
        if plan.policy is not None and path.is_file():
            written = json.loads(path.read_text(encoding="utf-8")).get("format")
            if written != plan.policy.get("format"):
                raise CheckpointError(
                    f"{checkpoint.folder} has policies of the format {written!r}, this build's are of the format "
                    f"{plan.policy.get('format')!r}: resume the run with the build that began it, or begin another one"
                )
        expected = {"replays": [each.name for each in plan.replays], "channels": [each.name for each in plan.channels]}
        for what, names in expected.items():
            if (found := checkpoint.document.get(what)) != names:
                raise CheckpointError(f"{checkpoint.folder} has the {what} {found}, this plan has {names}")
        numbers = {role.name: [number] for number, role in enumerate(plan.roles)}
        roles, actors = checkpoint.document["roles"], plan.of_kind(Kind.ACTOR)
        named = {name for name, (kind, _) in roles.items() if kind == Kind.ACTOR}
        if named != {plan.roles[number].name for number in actors}:
            numbers |= {name: list(actors) for name in named}
        for name, (kind, counts) in roles.items():
            among = numbers.get(name, list(plan.of_kind(Kind(kind))[:1]))
            for place, number in enumerate(among):
                for word, count in zip(_COUNTS, counts, strict=False):
                    self.scoreboard.words[number][word] += count // len(among) + (place < count % len(among))
        for number in actors:
            if plan.roles[number].name not in roles:
                self.scoreboard.orders[number][ControlWord.LIFE] = 1
        for replay in plan.replays:
            self.replay(replay.name).restore(checkpoint.folder / f"replay-{replay.name}.jbr")
        for channel in plan.channels:
            path = checkpoint.folder / f"weights-{channel.name}.state"
            if path.exists():
                published = read_state(path)
                with self.publisher(channel.name) as publisher:
                    publisher.publish(published["state"], published["extra"], version=published["version"])

    def close(self) -> None:
        """Close everything; the owner also removes the names."""
        for replay in self._replays.values():
            if self.owned:
                replay.unlink()
            replay.close()
        for channel in self._channels.values():
            channel.close()
        self._replays, self._channels = {}, {}
        self.scoreboard.close()
