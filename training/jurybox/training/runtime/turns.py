"""One turn of each kind of role: its conditions, its work, its counters. Both drivers use them.

A turn never waits. It tells whether it may be taken, and if not, what for; the driver waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from jurybox.protocol.errors import Refused, Timeout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.training.runtime.plan import Kind, Plan, load
from jurybox.training.runtime.role_context import Actor, Evaluator, Learner, Publishes, Role, RoleContext, Trainer
from jurybox.training.runtime.scoreboard import ControlWord, RunScoreboard, Subject, Word
from jurybox.training.runtime.serving import ServedChannel

_READ_SECONDS = 1.0


class Rules:
    """The conditions of turns, from the shared counters alone.

    Args:
        serial: whether the run is serial: then actors are never ahead of a learner.
    """

    def __init__(self, plan: Plan, scoreboard: RunScoreboard, *, serial: bool = False) -> None:
        self._budget, self._scoreboard = plan.budget, scoreboard
        self._paces = {number: plan.pace_of(number) for number in plan.of_kind(Kind.LEARNER)}
        self._free = {number for number, pace in self._paces.items() if pace.free and not serial}
        slacks = {number: 0 if serial else pace.max_ahead for number, pace in self._paces.items()}
        self._awaited = {number: slack for number, slack in slacks.items() if slack is not None}
        self._patience = {number: pace.patience for number, pace in self._paces.items() if pace.patience and not serial}
        self._waited: dict[int, tuple[int, float]] = {}  # by learner: its steps when a wait began, and the time
        self._orders = scoreboard.orders[0]

    def collected(self) -> bool:
        """Whether all environment steps of the budget have been made, or the time is up."""
        return self._scoreboard.env_steps >= self._budget.steps or bool(self._orders[ControlWord.CLOSING])

    def close(self, *, learners: bool = False) -> None:
        """Stop actors after the steps that they are in, since the time is up; learners, too, or they may catch up."""
        for orders in self._scoreboard.orders:
            orders[ControlWord.CLOSING] = 2 if learners else 1

    def over(self) -> bool:
        """Whether all steps have been collected, and the learners that actors wait for have used them (or ended)."""
        if not self.collected():
            return False
        steps = self._scoreboard.env_steps  # of which one that was under way may just now be the last
        return all(self._scoreboard.words[number][Word.DONE] > steps for number in self._awaited)

    def may_collect(self) -> bool:
        """Whether another environment step is allowed by the learners' progress."""
        env_steps, behind, moving = self._scoreboard.env_steps, 0, len(self._paces)
        for number, slack in self._awaited.items():
            words = self._scoreboard.words[number]
            steps = int(words[Word.LEARNER_STEPS])
            # Actors do not wait for a learner that waits for their rows.
            if words[Word.UNREADY] or env_steps < self._paces[number].env_steps(steps, slack):
                continue
            if number not in self._patience:
                return False
            if self._stands_still(number, steps):
                moving -= 1
            else:
                behind += 1
        return 2 * behind <= moving

    def _stands_still(self, number: int, steps: int) -> bool:
        """Whether a learner that is behind has made no step for longer than its pace has patience."""
        now = time.monotonic()
        if number not in self._waited or self._waited[number][0] != steps:
            self._waited[number] = steps, now
        return now - self._waited[number][1] >= self._patience[number]

    def may_learn(self, number: int) -> bool:
        """Whether there are unused environment steps for learner `number`, and time to use them."""
        if self._orders[ControlWord.CLOSING] > 1:
            return False
        pace = self._paces[number]
        if number in self._free:
            return pace.learning_starts <= self._scoreboard.env_steps < self._budget.steps
        env_steps = min(self._scoreboard.env_steps, self._budget.steps)
        return self._scoreboard.words[number][Word.LEARNER_STEPS] < pace.learner_steps(env_steps)


class WeightsSync:
    """Keeps a role's weights at the newest version, as often as the plan says."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._every, self._max_lag = context.plan.sync_every, context.plan.max_lag
        self._since = self._every
        channels = [channel.name for channel in context.plan.channels]
        self._numbers = [channels.index(name) for name, _, _ in context.followed]

    def missing(self) -> int | None:
        """The number of a channel without a publication."""
        for number, (_, reader, weights) in zip(self._numbers, self._context.followed, strict=True):
            if not weights.version and not reader.newest:
                return number
        return None

    def at_once(self) -> None:
        """Check for newer weights before the next step."""
        self._since = self._every

    def sync(self) -> None:
        """Check for newer weights if due, or if the role is too far behind."""
        if not self._context.followed:
            return
        lag = max(reader.newest - weights.version for _, reader, weights in self._context.followed)
        forced = self._max_lag is not None and lag > self._max_lag
        if self._since < self._every and not forced:
            self._since += 1
            return
        words = self._context.words
        words[Word.LAG] = lag
        if forced and self._since < self._every:
            words[Word.FORCED] += 1
        self._since = 1
        for _, _, weights in self._context.followed:
            try:
                weights.refresh(_READ_SECONDS)
            except Timeout:
                if not weights.version:
                    raise
                self._since = (
                    self._every
                )  # a publisher is in the midst of it, or died there: again before the next step
        words[Word.VERSION] = min(weights.version for _, _, weights in self._context.followed)


@contextmanager
def no_exit(name: str) -> Iterator[None]:
    """Make a failure of a role's sys.exit(): what a role's process or a serial run ends with is not the role's to say.

    Raises:
        RoleExited: it was called.
    """
    try:
        yield
    except SystemExit as error:
        raise RoleExited(
            f"{name} called sys.exit({error.code!r}): expected an exception, or the end of an episode, of the code "
            "that it runs"
        ) from error


class RoleExited(RuntimeError):
    """A role called sys.exit()."""


class Turn:
    """A role and its turns.

    Attributes:
        role, context: whose they are.
        waiting: what for, when `may` last said no.
    """

    def __init__(self, role: Role, context: RoleContext, rules: Rules) -> None:
        self.role, self.context, self.rules = role, context, rules
        self.waiting: tuple[Subject, int] = (Subject.NOTHING, 0)

    def may(self) -> bool:
        """Whether the turn may be taken now."""
        raise NotImplementedError

    def take(self) -> None:
        """Take the turn, and count it."""
        raise NotImplementedError

    def close(self) -> None:
        self.role.close()

    def _set_waiting(self, subject: Subject, which: int = 0) -> bool:
        self.waiting = (subject, which)
        return False


class ActorTurn(Turn):
    """Newer weights if due, then a step."""

    def __init__(self, role: Actor, context: RoleContext, rules: Rules) -> None:
        super().__init__(role, context, rules)
        self._step = role.step
        self._sync = WeightsSync(context)

    def may(self) -> bool:
        if self.rules.collected():
            return self._set_waiting(Subject.ORDERS)
        if not self.rules.may_collect():
            return self._set_waiting(Subject.LEARNERS)
        if (missing := self._sync.missing()) is not None:
            return self._set_waiting(Subject.WEIGHTS, missing)
        return True

    def take(self) -> None:
        self._sync.sync()
        made = self._step()
        words = self.context.words
        words[Word.EPOCHS] += 1
        if made:
            words[Word.ENV_STEPS] += made
            words[Word.MOVED_AT] = time.monotonic_ns()


class PublishingTurn(Turn):
    """A turn of a role that publishes.

    Args:
        publish: whether the role has something to begin with; else it goes on with what is published.
    """

    def __init__(self, role: Publishes, context: RoleContext, rules: Rules, *, publish: bool) -> None:
        super().__init__(role, context, rules)
        self._publishes = role
        self._every = context.spec.publish_every
        self._publisher: Publisher | None = None
        self._served: ServedChannel | None = None
        if (channel := context.spec.publishes) is not None:
            self._publisher, self._published = context.publisher(), context.shared.reader(channel)
            server = context.plan.server
            if server is not None and channel in server.models:
                self._served = ServedChannel(server, channel, context.alive)
            if publish:
                self._publish()
            elif self._served is not None:  # a server that has not what was published before this process
                state, version, _ = self._published.read(timeout=_READ_SECONDS)
                self._served.publish(state, version)

    def close(self) -> None:
        if self._served is not None:
            self._served.close()
        if self._publisher is not None:
            self._publisher.close()
        super().close()

    def _publish(self) -> None:
        if self._publisher is not None:
            weights, extra = self._publishes.publication()
            # What is not finite reaches no actor, no evaluation and no file.
            try:
                version = self._publisher.publish(weights, extra, check_finite=True)
            except Refused as error:
                raise Refused(
                    f"{self.context.name} published nothing on {self.context.spec.publishes!r}: {error}"
                ) from error
            self.context.words[Word.VERSION] = version
            if self._served is not None:
                self._served.publish(weights, version)

    def _restore_served(self) -> None:
        """Give a server that lost them the weights again: there may be nothing new to publish, and others wait."""
        if self._served is not None:
            self._served.restore(self._published)


class LearnerTurn(PublishingTurn):
    """A step, then a publication if due."""

    def __init__(self, role: Learner, context: RoleContext, rules: Rules, *, publish: bool) -> None:
        super().__init__(role, context, rules, publish=publish)
        self._learner = role

    def may(self) -> bool:
        # First, since actors go on meanwhile: what they add after this look is for the next one.
        over = self.rules.collected()
        steps = self.context.env_steps if over else -1
        due = self.rules.may_learn(self.context.number)
        ready = due and self._learner.ready()
        self.context.words[Word.UNREADY] = due and not ready
        if ready:
            return True
        self._restore_served()
        # If no rows will be added any more, a learner without enough of them is done.
        self.context.words[Word.DONE] = steps + 1
        return self._set_waiting(Subject.ORDERS if over else Subject.READY if due else Subject.STEPS)

    def take(self) -> None:
        self._learner.step()
        words = self.context.words
        # Before the step is counted, so that actors that wait for it go on with the weights that it made.
        if self._every and (words[Word.LEARNER_STEPS] + 1) % self._every == 0:
            self.context.uncounted = 1
            self._publish()
            self.context.uncounted = 0
        words[Word.LEARNER_STEPS] += 1
        words[Word.MOVED_AT] = time.monotonic_ns()


class TrainerTurn(PublishingTurn):
    """A step, which collects and learns, then a publication if due."""

    def __init__(self, role: Trainer, context: RoleContext, rules: Rules, *, publish: bool) -> None:
        super().__init__(role, context, rules, publish=publish)
        self._trainer = role

    def may(self) -> bool:
        if not self.rules.collected():
            return True
        self._restore_served()
        return self._set_waiting(Subject.ORDERS)

    def take(self) -> None:
        words = self.context.words
        try:
            made = self._trainer.step()
        finally:
            words[Word.UNDER_WAY] = 0
        if self._every and (words[Word.EPOCHS] + 1) % self._every == 0:
            self._publish()
        self.context.report(now=True)  # before they count, so that the row of these steps has their numbers
        words[Word.EPOCHS] += 1
        words[Word.LEARNER_STEPS] += made.gradient_steps
        words[Word.ENV_STEPS] += made.env_steps
        words[Word.MOVED_AT] = time.monotonic_ns()


class EvaluatorTurn(Turn):
    """The newest weights, then an evaluation: at intervals of environment steps, and once at the end."""

    def __init__(self, role: Evaluator, context: RoleContext, rules: Rules) -> None:
        super().__init__(role, context, rules)
        self._evaluator = role
        self._sync = WeightsSync(context)
        self._due_at = 0

    def may(self) -> bool:
        steps, at, every = (
            self.context.env_steps,
            self.context.words[Word.EVALUATED_AT],
            self.context.spec.evaluate_every,
        )
        # The last one waits for the learners, so that it sees the result of the run.
        due = self.rules.over() and at < steps if self.rules.collected() else every and steps // every > at // every
        if not due:
            return self._set_waiting(Subject.WORK)
        # Not what they are when it begins: it would count as the last one if the run's last step came in between.
        self._due_at = steps
        if (missing := self._sync.missing()) is not None:
            return self._set_waiting(Subject.WEIGHTS, missing)
        return True

    def take(self) -> None:
        self._sync.at_once()
        self._sync.sync()
        steps = self._due_at
        numbers = {name: float(value) for name, value in self._evaluator.evaluate().items()}
        # Reported first: once the scoreboard shows the last one, the run may end.
        self.context.evaluated(steps, numbers)
        self.context.words[Word.EVALUATED_AT] = steps
        self.context.words[Word.MOVED_AT] = time.monotonic_ns()


def make_turn(context: RoleContext, rules: Rules, state: dict[str, Any] | None) -> Turn:
    """Create the role of this context, restore its state, and return its turn.

    Args:
        state: what the role saved, or None.

    Raises:
        PlanError: the spec names no such callable.
        TypeError: it made something of another kind than the plan says.
    """
    with no_exit(context.name):
        role = load(context.spec.make)(context, **context.spec.settings)
    expected = {Kind.ACTOR: Actor, Kind.LEARNER: Learner, Kind.EVALUATOR: Evaluator, Kind.TRAINER: Trainer}[
        context.spec.kind
    ]
    if not isinstance(role, expected):
        raise TypeError(
            f"{context.spec.make} made a {type(role).__name__} for {context.name}, expected the "
            f"{expected.__name__} that the plan says"
        )
    if state is not None:
        role.restore(state)
    if isinstance(role, Learner):
        return LearnerTurn(role, context, rules, publish=not _adopt_published(role, context))
    if isinstance(role, Trainer):
        return TrainerTurn(role, context, rules, publish=not _adopt_published(role, context))
    if isinstance(role, Actor):
        return ActorTurn(role, context, rules)
    return EvaluatorTurn(cast(Evaluator, role), context, rules)


def _adopt_published(role: Publishes, context: RoleContext) -> bool:
    """Whether there are published weights, which the successor of a killed role adopts."""
    if context.spec.publishes is None:
        return False
    reader = context.shared.reader(context.spec.publishes)
    if not reader.newest:
        return False
    if context.life > 1:
        try:
            role.adopt(reader)
        except Timeout as error:  # a single slot, and its publisher was killed in the midst of writing it
            context.say(f"{context.name} begins from its last checkpoint: {error}")
            return False
    return True
