"""The plan of a run as plain data: roles, replays, weights channels, pace, budget and timeouts; errors and outcome.

The same plan can be run by `serial` and by `orchestrator`.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Literal

from jurybox.protocol.errors import missing_name
from jurybox.protocol.weights import Mode, WeightsLayout
from jurybox.training.checkpoints import write_atomically
from jurybox.training.errors import UsageError
from jurybox.training.replay import Episodes, Field

POLICY_FILE = "policy.json"  # in a checkpoint: how its weights act


class Kind(IntEnum):
    """The kind of a role."""

    ACTOR = 1
    LEARNER = 2
    EVALUATOR = 3
    TRAINER = 4  # collects and learns by itself: another library's loop

    @property
    def collects(self) -> bool:
        """Whether it makes environment steps."""
        return self in (Kind.ACTOR, Kind.TRAINER)

    @property
    def learns(self) -> bool:
        """Whether it makes learner steps, and so has an optimiser that is worth keeping."""
        return self in (Kind.LEARNER, Kind.TRAINER)


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One role: an object in a process of its own, or in the serial driver.

    Attributes:
        name: unique in the plan ("actor-0"); of its log file and in every message.
        kind: which of the four it is.
        make: "package.module:callable"; called with a `RoleContext` and `settings`, it gives the role (see
            `role_context`).
        settings: keyword arguments for `make`, as JSON holds them.
        writes: replays that it adds to.
        reads: weights channels that it follows.
        samples: replays that it samples from.
        publishes: the weights channel that it publishes on.
        publish_every: learner steps (of a trainer: its own steps) between two publications; 0 publishes once, at the
            start.
        pace: of a learner; None: the plan's.
        evaluate_every: environment steps (of all actors together) between two evaluations.
        threads: that numerical libraries may use in its process.
        restarts: whether it is started again when it dies; if not, the run ends with its death.
        nice: by how much its process gives way to others (nice(2)); 0 to 19.
        environment: further variables of its process (CUDA_VISIBLE_DEVICES, say).
        cpus, gpus: that a launcher which places roles on many machines sets aside for it; locally they mean nothing.
        resources: likewise, of other kinds, by name.
    """

    name: str
    kind: Kind
    make: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    samples: tuple[str, ...] = ()
    publishes: str | None = None
    publish_every: int = 1
    pace: Pace | None = None
    evaluate_every: int = 0
    threads: int = 1
    restarts: bool = True
    nice: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplaySpec:
    """A replay to be made; the names are those of `jurybox.training.replay.Replay.create`.

    The anchor takes what roles on the sampling role's own machine write to it: rows from other machines go to the ring.
    """

    name: str
    capacity: int
    fields: Mapping[str, Field]
    episodes: Episodes | None = None
    prioritized: bool = False
    alpha: float = 0.6
    anchor: int = 0


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """A weights channel to be made; `jurybox.protocol.weights.WeightsChannel.create` explains the names."""

    name: str
    layout: WeightsLayout
    mode: Mode = "double_buffer"
    extra_bytes: int = 65536


@dataclass(frozen=True, slots=True)
class PolicyServer:
    """A server that has the run's policies, and is given what is published to them.

    Attributes:
        address: of the server.
        models: by weights channel, the model that has its publications, under the same versions.
        timeout: seconds for which roles wait for a server that went away before that is an error.
    """

    address: str
    models: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0


@dataclass(frozen=True, slots=True)
class Pace:
    """The ratio of learner steps to environment steps over the whole run.

    A learner makes `gradient_steps` steps for every `train_freq` steps of all actors together, counted from the first
    step on as in Stable-Baselines3; rounds that end within the first `learning_starts` environment steps have none.
    Serially this is the schedule. In parallel a learner waits for steps that are not there yet, and actors wait if they
    are `max_ahead` steps further than a learner has used up: than any, or, with `patience`, than most.

    The rule is that of a samples-per-insert limiter (Reverb, arXiv:2102.04736), kept by the run's shared counters
    instead of inside the replay: a wait is between two steps and never within one, all roles see which one waits for
    which, and it survives a restart, a resumed run and the change to serial.

    Attributes:
        train_freq, gradient_steps: the ratio.
        learning_starts: environment steps before the first learner step.
        max_ahead: None: actors never wait for learners.
        patience: None: actors wait for this learner, whatever the others do. Else they wait only while more than half
            of the run's learners are behind (so for no single one of several), and one of those that makes no step in
            so many seconds is left out until it makes one.
        free: with max_ahead None, learners do not wait for actors either: after `learning_starts` they make steps as
            fast as they can, until the last environment step is made. Serially the ratio is kept.
    """

    train_freq: int = 1
    gradient_steps: int = 1
    learning_starts: int = 0
    max_ahead: int | None = 1000
    patience: float | None = None
    free: bool = False

    def __post_init__(self) -> None:
        if (
            self.train_freq < 1
            or self.gradient_steps < 1
            or self.learning_starts < 0
            or (self.max_ahead is not None and self.max_ahead < 0)
        ):
            raise PlanError(
                f"expected train_freq and gradient_steps >= 1, learning_starts and max_ahead >= 0, got {self}"
            )
        if self.patience is not None and (self.max_ahead is None or self.patience <= 0):
            raise PlanError(f"expected a patience above 0, and max_ahead, for which actors wait, got {self}")
        if self.free and self.max_ahead is not None:
            raise PlanError(f"expected max_ahead=None in a free pace, where actors do not wait, got {self.max_ahead}")

    def learner_steps(self, env_steps: int) -> int:
        """The number of learner steps due after so many environment steps."""
        return max(0, env_steps // self.train_freq - self.learning_starts // self.train_freq) * self.gradient_steps

    def env_steps(self, learner_steps: int, ahead: int) -> int:
        """The number of environment steps at which actors wait for a learner with so many steps, `ahead` of it."""
        return (
            self.learning_starts // self.train_freq + learner_steps // self.gradient_steps + 1
        ) * self.train_freq + ahead


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a run; the first one ends it.

    Attributes:
        steps: total environment steps, over all actors.
        seconds: wall time, without earlier parts of a resumed run.
        target: (number, value): stop as soon as an evaluation reports `number` >= value.
    """

    steps: int
    seconds: float | None = None
    target: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time-outs in seconds, and limits of failures.

    Attributes:
        start: of a process, until its role is made (imports included).
        reset: of one reset of an environment; time in it counts as nothing else.
        actor, learner, evaluator, trainer: time without a heartbeat after which a running role counts as hung and is
            restarted.
        stall: time that one role may wait for another before the watchdog looks for the cause.
        save: for a checkpoint, for which roles end the steps that they are in. stop: for an orderly end of the roles.
        settled: time from a role's start to its last step after which its count of failures is reset.
        failures: of one role in a row, after which the run ends (or goes on serially).
        back_off: waits before the first, second, ... restart in a row; the last one repeats.
    """

    start: float = 120.0
    actor: float = 30.0
    learner: float = 60.0
    evaluator: float = 600.0
    trainer: float = 600.0
    reset: float = 600.0
    stall: float = 60.0
    save: float = 60.0
    stop: float = 10.0
    settled: float = 30.0
    failures: int = 5
    back_off: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)

    def with_resets(self, seconds: float) -> Timeouts:
        """Return these for environments of which a reset may take so many seconds, and being built no less.

        Example:
            Timeouts().with_resets(900.0).start == 900.0
        """
        return replace(self, reset=seconds, start=max(self.start, seconds), save=max(self.save, seconds))

    def of(self, kind: Kind) -> float:
        """The time-out for signs of life of a role of this kind."""
        seconds: float = getattr(self, kind.name.lower())
        return seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run.

    Attributes:
        pace: of learners that have none of their own.
        seed: base seed; each role derives its own from it.
        sync_every: actor steps between two checks for newer weights.
        max_lag: publications that an actor may be behind; one that is further looks at once, and it is counted. None:
            as far as it happens to be.
        save_every: environment steps between two checkpoints; 0: only one at the end.
        save_seconds: in processes there is one after so many seconds, too, if that comes before (not with 0). Serially
            the clock decides nothing.
        log_every: environment steps between two rows of metrics.
        on_failure: what to do when a role has failed too often.
        best: the number of evaluations whose highest value marks the best checkpoint; None: none is marked.
        folders: by name, folders on the orchestrator's machine. A file in one is written once, whole (under a hidden
            name first), and is soon in that folder on every machine that has roles.
        server: what is published goes there, too; None: to the roles alone.
        policy: what ``policy.json`` in checkpoints says (`jurybox.training.policies.Description`), so that what was
            learned can be played, exported and served; None: it cannot. ``environment_arguments`` in the extra of a
            publication replaces some of its environment's arguments next to those weights.
        columns: of metrics.csv, beyond those of every run: names that roles report.
    """

    roles: tuple[RoleSpec, ...]
    replays: tuple[ReplaySpec, ...] = ()
    channels: tuple[ChannelSpec, ...] = ()
    pace: Pace = field(default_factory=Pace)
    budget: Budget = field(default_factory=lambda: Budget(steps=1000))
    timeouts: Timeouts = field(default_factory=Timeouts)
    seed: int = 0
    sync_every: int = 1
    max_lag: int | None = None
    save_every: int = 0
    save_seconds: float = 600.0
    log_every: int = 1000
    on_failure: Literal["end", "serial"] = "end"
    best: str | None = None
    folders: Mapping[str, str] = field(default_factory=dict)
    server: PolicyServer | None = None
    policy: Mapping[str, Any] | None = None
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise PlanError if the plan is inconsistent."""
        for what, names in (
            ("role", [role.name for role in self.roles]),
            ("replay", [replay.name for replay in self.replays]),
            ("weights channel", [channel.name for channel in self.channels]),
        ):
            if duplicates := {name for name in names if names.count(name) > 1}:
                raise PlanError(f"two have the {what} name {duplicates.pop()!r}: every {what} needs its own")
        replays, channels = {each.name for each in self.replays}, {each.name for each in self.channels}
        published: dict[str, str] = {}
        for role in self.roles:
            unknown = ({*role.writes, *role.samples} - replays) | (
                {*role.reads, *filter(None, [role.publishes])} - channels
            )
            if unknown:
                raise PlanError(f"{role.name} names {unknown.pop()!r}, which the plan has no replay or channel for")
            if role.publishes is not None and published.setdefault(role.publishes, role.name) != role.name:
                raise PlanError(f"{published[role.publishes]} and {role.name} publish on {role.publishes!r}: one may")
            try:
                json.dumps(dict(role.settings))
            except TypeError as error:
                raise PlanError(
                    f"{role.name}: settings travel to a fresh process as JSON, and these don't: {error}"
                ) from error
        if self.server is not None and (unmatched := self.server.models.keys() - channels):
            raise PlanError(f"the server is to have {unmatched.pop()!r}, which the plan has no channel for")
        if not self.of_kind(Kind.ACTOR, Kind.TRAINER):
            raise PlanError("a run needs an actor or a trainer: nothing would ever happen")

    def write_policy(self, folder: Path, extras: Iterable[Mapping[str, Any]]) -> None:
        """Write policy.json, if there is one, next to the weights that were published with these extras."""
        if self.policy is not None:
            changed = {
                name: value for extra in extras for name, value in extra.get("environment_arguments", {}).items()
            }
            arguments = {"environment_arguments": {**self.policy.get("environment_arguments", {}), **changed}}
            document = {**self.policy, **(arguments if changed else {})}
            write_atomically(folder / POLICY_FILE, json.dumps(document, indent=1))

    def check_learns(self) -> None:
        """Raise ConfigError if a learner would make no step in the whole run."""
        for number in self.of_kind(Kind.LEARNER):
            pace = self.pace_of(number)
            waits = {"learning_starts": pace.learning_starts, "train_freq": pace.train_freq}
            check_learns(self.budget.steps, pace.env_steps(0, 0), waits, f"{self.roles[number].name}'s pace")

    def of_kind(self, *kinds: Kind) -> list[int]:
        """The numbers of the roles of these kinds."""
        return [number for number, role in enumerate(self.roles) if role.kind in kinds]

    def pace_of(self, number: int) -> Pace:
        """The pace of a role."""
        return self.roles[number].pace or self.pace

    def pace_of_policy(self, channel: str) -> Pace:
        """The pace of the learner that publishes on a channel."""
        return next((each.pace for each in self.roles if each.publishes == channel and each.pace), self.pace)


def load(make: str) -> Callable[..., Any]:
    """Import the callable "package.module:name".

    Raises:
        PlanError: there is no such module or name in it.
    """
    module, _, name = make.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"{make!r} cannot be had: {error}; expected 'package.module:callable'") from error
    imported = found
    for part in name.split("."):
        if (found := getattr(found, part, None)) is None:
            raise PlanError(f"{make!r} cannot be had: {missing_name(imported, name)}")
    if not callable(found):
        raise PlanError(f"{make!r} is a {type(found).__name__}, expected something to call")
    made: Callable[..., Any] = found
    return made


class RunError(UsageError, ValueError):
    """The run cannot be carried out as requested."""


class PlanError(RunError):
    """The plan is inconsistent, or names something that does not exist."""


class NotRunning(RunError):
    """There is no run in that folder now."""


class ConfigError(RunError):
    """Inconsistent settings, or an unreadable file; the message says which."""


def refuse_unused(given: Collection[str], unused: Mapping[str, str]) -> None:
    """Refuse settings that have no effect, as the result would be attributed to them.

    Args:
        given: names of the settings that were set; those left at their defaults are no matter.
        unused: by name, why a setting has no effect beside the others.

    Raises:
        ConfigError: something is in both.
    """
    if idle := sorted(set(given) & unused.keys()):
        reasons = "; ".join(f"{name} is set and would have no effect: {unused[name]}" for name in idle)
        raise ConfigError(f"{reasons}. Leave it out, or change what it goes with")


def check_learns(steps: int, due: int, waits: Mapping[str, object], whose: str = "") -> None:
    """Refuse a run that ends before anything is learned, as it would look like one that has learned.

    Args:
        steps: environment steps of the whole run.
        due: environment steps after which the first learner step is due.
        waits: the settings that make it so, by name. whose: names them, if they are no settings of the training.

    Raises:
        ConfigError: `due` is more than `steps`.
    """
    if due > steps:
        given = ", ".join(f"{name}={value}" for name, value in waits.items())
        raise ConfigError(
            f"steps={steps} with {given}{f' of {whose}' if whose else ''}: nothing would be learned, since the first "
            f"update is due after {due} env steps; raise steps to {due} or more, or lower {' or '.join(waits)}"
        )


class End(Enum):
    """The reason for the end of a run."""

    STEPS = "all steps of the budget are made"
    SECONDS = "the time is up"
    TARGET = "the target is reached"
    SIGNAL = "a stop was requested"
    FAILED = "a role failed too often"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        end: why it is over; `text` says more where there is more to say.
        env_steps, learner_steps, epochs, episodes: of all roles together, earlier parts of a resumed run counted in.
        seconds: of wall time, likewise.
        return_mean, return_std: over the last 100 episodes; None when none has ended.
        restarts: of all roles together.
        forced_syncs: looks for newer weights that max_lag brought about.
        busy: by role, the part of its running time in which it did not wait, 0 to 1.
        evaluation: the newest one's numbers, as eval_<name>.
        serial: whether it ended, or was run from the start, in one process.
        rows_dropped: by learner, the rows that it came too late for; those that dropped none are left out.
        learned: False if none of its learners and trainers has made a step; `text` says so, too.
    """

    end: End
    text: str
    env_steps: int
    learner_steps: int
    epochs: int
    episodes: int
    seconds: float
    return_mean: float | None
    return_std: float | None
    restarts: int
    forced_syncs: int
    busy: dict[str, float]
    evaluation: dict[str, float]
    serial: bool
    rows_dropped: dict[str, int] = field(default_factory=dict)
    learned: bool = True
