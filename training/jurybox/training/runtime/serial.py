"""The serial driver: every role in one process, in one fixed order, without a clock.

It depends on the plan and the seed alone, so a run can be debugged step by step. Checkpoints change nothing: a run with
any interval equals the run without. A resumed run equals an uninterrupted one if its actors can save all that they
need, and take the newest weights before each step.
"""

from __future__ import annotations

from collections.abc import Callable

from jurybox.training.checkpoints import Checkpoint, Checkpoints, write_state
from jurybox.training.runtime.plan import End, Kind, Plan
from jurybox.training.runtime.progress import RunMetrics
from jurybox.training.runtime.role_context import Abandoned, Message, RoleContext
from jurybox.training.runtime.scoreboard import ControlWord, Order, State, Subject, Word
from jurybox.training.runtime.shared_resources import SharedResources, progress_of
from jurybox.training.runtime.turns import Rules, Turn, make_turn, no_exit


class Deadlock(RuntimeError):
    """A deadlock: no role can take a turn."""


class Serial:
    """Takes turns: an actor or trainer one, then every learner as many as are due, then evaluators if theirs is due.

    Args:
        shared: of the run.
        metrics: takes the reports.
        notify: accepts lines for watchers.
        checkpoints: where they go.
        resumed: the checkpoint that `shared` was filled from; None: of none.
    """

    def __init__(
        self,
        plan: Plan,
        shared: SharedResources,
        metrics: RunMetrics,
        notify: Callable[[str], None],
        *,
        checkpoints: Checkpoints,
        resumed: Checkpoint | None,
    ) -> None:
        self._plan, self._shared, self._metrics, self._notify = plan, shared, metrics, notify
        self._checkpoints = checkpoints
        self._rules = Rules(plan, shared.scoreboard, serial=True)
        self._saved = progress_of(resumed)  # of the newest checkpoint
        self._tried_at = shared.scoreboard.env_steps  # to make one
        self._turns: list[Turn] = []
        self._ending: Callable[[], End | None] = lambda: None
        self._tick: Callable[[], None] = lambda: None
        if shared.scoreboard.control[:, ControlWord.RESTARTS].any():  # of the processes whose run goes on here
            shared.repair_replays(plan)
        try:
            # Who learns first: it publishes what the others begin with.
            for number in sorted(range(len(plan.roles)), key=lambda n: not plan.roles[n].kind.learns):
                orders = shared.scoreboard.orders[number]
                orders[ControlWord.LIFE] += 1
                kept, life = checkpoints.folder, orders[ControlWord.LIFE]
                context = RoleContext(
                    plan,
                    number,
                    shared,
                    self._handle_message,
                    life=life,
                    evaluated=kept,
                    beat=self._beat,
                    report_every=0.0,  # a clock would decide what the rows of metrics are over
                )
                context.words[Word.LIFE] = context.life
                # Who takes over from processes that died goes on from what is shared, and with its optimiser.
                goes_on = resumed and (context.life == 1 or context.spec.kind.learns)
                state = resumed.state(context.name) if resumed and goes_on else None
                self._turns.append(make_turn(context, self._rules, state))
                context.begin()
        except BaseException:
            self.close()
            raise
        self._collectors = [turn for turn in self._turns if turn.context.spec.kind.collects]
        self._others = sorted(
            (turn for turn in self._turns if turn not in self._collectors), key=lambda turn: turn.context.spec.kind
        )

    def run(self, ending: Callable[[], End | None], tick: Callable[[], None]) -> End:
        """Take turns until the plan's budget is used up, or `ending` gives another reason; `tick` is called in between.

        Raises:
            Deadlock: no role can take a turn.
        """
        self._ending, self._tick = ending, tick
        while True:
            moved = False
            for turn in (self._next_collector(), *self._others):
                # Learners make all the steps that are due, so that the ratio holds after every round.
                while turn.may() and ending() is None:
                    try:
                        with no_exit(turn.context.name):
                            turn.take()
                    except Abandoned:
                        return End.SIGNAL  # the checkpoint before stands: this role cannot be saved in its step
                    turn.context.report()
                    moved = True
                    if turn.context.spec.kind is not Kind.LEARNER:
                        break
            self._metrics.row_if_due()
            tick()
            if (reason := ending()) is not None:
                if reason is End.SECONDS:
                    self._close()
                return self._finish(reason)
            if not moved:
                if not any(turn.may() or turn.waiting[0] not in _DONE for turn in self._turns):
                    return self._finish(End.STEPS)
                waits = ", ".join(f"{turn.context.name} for {turn.waiting[0].name.lower()}" for turn in self._turns)
                raise Deadlock(f"no role can take a turn; they wait: {waits}")
            if self._checkpoint_due():
                self.save()

    def _beat(self) -> None:
        """What happens between two steps, within a long one."""
        self._tick()
        reason = self._ending()
        if reason is End.SIGNAL:
            for orders in self._shared.scoreboard.orders:
                orders[ControlWord.ORDER] = Order.STOP
        elif reason is not None:
            self._rules.close()

    def _next_collector(self) -> Turn:
        """The actor or trainer with the fewest steps."""
        return min(self._collectors, key=lambda turn: turn.context.words[Word.EPOCHS])

    def save(self) -> None:
        """Make a checkpoint now; a full disk costs the checkpoint and not the run."""
        self._tried_at, progress = self._shared.scoreboard.env_steps, self._shared.scoreboard.progress
        savers = [turn for turn in self._turns if turn.context.spec.kind is not Kind.EVALUATOR]
        for turn in self._turns:
            turn.context.report(now=True)
        states = {turn.context.name: turn.role.save() for turn in savers}
        document = {"gathered": self._metrics.state()}
        try:
            with self._checkpoints.writing(self._tried_at, document) as scratch:
                for name, state in states.items():
                    write_state(scratch / f"{name}.state", state)
                document |= self._shared.save(self._plan, scratch)
            self._saved = progress
        except OSError as error:
            self._notify(f"no checkpoint at {self._tried_at} steps: {error}")

    def close(self) -> None:
        """Close all roles."""
        for turn in self._turns:
            turn.close()
            turn.context.enter(State.STOPPED)
        self._turns = []

    def _close(self) -> None:
        """The time is up: learners use the remaining steps, evaluators evaluate once more."""
        self._rules.close()
        for turn in self._others:
            while turn.may():
                with no_exit(turn.context.name):
                    turn.take()

    def _finish(self, reason: End) -> End:
        for turn in self._turns:
            turn.context.report(now=True)
            turn.context.finish_timeline()
        self._metrics.row_if_due(last=True)
        if self._shared.scoreboard.progress != self._saved:
            self.save()
        return reason

    def _checkpoint_due(self) -> bool:
        every = self._plan.save_every
        return every > 0 and self._shared.scoreboard.env_steps - self._tried_at >= every

    def _handle_message(self, message: Message) -> None:
        if message["kind"] == "said":
            self._notify(message["text"])
        else:
            self._metrics.take(message)


_DONE = (Subject.ORDERS, Subject.WORK)
