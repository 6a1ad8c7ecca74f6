"""The orchestrator: a process for every role, watched, restarted, paused for checkpoints, and ended in order.

It is one loop that checks the control pipes (messages, deaths), the scoreboard (hangs, waits) and the budget. It never
waits longer than a twentieth of a second, except for a checkpoint and the end, which have their own time limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from jurybox.training.checkpoints import Checkpoint, Checkpoints
from jurybox.training.runtime.launching import Launcher, RoleChild
from jurybox.training.runtime.plan import End, Kind, Plan
from jurybox.training.runtime.progress import RunMetrics
from jurybox.training.runtime.scoreboard import ControlWord, Order, State, Subject, Word
from jurybox.training.runtime.shared_resources import SharedResources, progress_of
from jurybox.training.runtime.turns import Rules
from jurybox.training.runtime.watchdog import examine

_TICK_SECONDS = 0.05
_WATCH_SECONDS = 0.5
_CATCH_UP_SECONDS = 1.0  # that learners have for what is left, once the time is up
_AWAY_SECONDS = 5.0  # between two looks from which on this process counts as having been stopped


class Orchestrator:
    """Runs a plan in processes.

    Args:
        shared: of the run; stays the caller's to close.
        metrics: takes the reports.
        notify: accepts lines for watchers.
        logs: folder of the processes' logs.
        launcher: starts the processes; `begin` and `end` are called here.
        checkpoints: where they go.
        resumed: the checkpoint that `shared` was filled from; None: of none.

    Attributes:
        text: more about why the run is over.
        latest: the newest checkpoint of this run.
    """

    def __init__(
        self,
        plan: Plan,
        shared: SharedResources,
        metrics: RunMetrics,
        notify: Callable[[str], None],
        logs: Path,
        launcher: Launcher,
        *,
        checkpoints: Checkpoints,
        resumed: Checkpoint | None,
    ) -> None:
        self.text = ""
        self._plan, self._shared, self._metrics, self._notify = plan, shared, metrics, notify
        self._scoreboard = shared.scoreboard
        self._launcher = launcher
        self.latest = resumed
        self._checkpoints = checkpoints
        self._rules = Rules(plan, self._scoreboard)
        self._children = [
            RoleChild(plan, number, self._scoreboard, logs / f"{role.name}.log", launcher, checkpoints.folder)
            for number, role in enumerate(plan.roles)
        ]
        # An evaluation takes long and has no state: evaluators are not waited for.
        self._savers = [child for child in self._children if child.spec.kind is not Kind.EVALUATOR]
        self._saved = progress_of(resumed)  # of the newest checkpoint
        self._tried_at = self._scoreboard.env_steps  # to make one
        self._tried_when = time.monotonic()
        self._saved_files: set[str] = set()
        self._unsaved = ""  # why no checkpoint could be made
        self._errors: dict[int, str] = {}  # by role, the error that its dying process reported
        self._watched = self._closed_at = 0.0
        self._looked = time.monotonic()
        self._since = 0  # when this process last went on after it had been stopped, ns
        self._repaired = 0  # restarts until the replays were last repaired
        self._given_up = False
        self._at_once: Callable[[], bool] = lambda: False
        self._finished_since: float | None = None

    def run(self, ending: Callable[[], End | None], *, at_once: Callable[[], bool], tick: Callable[[], None]) -> End:
        """Start all processes, and return when the run is over and all are gone.

        Args:
            ending: gives a reason to end in order, from outside or by the budget.
            at_once: whether to end without order.
            tick: called some twenty times a second, to show how it goes.
        """
        self._at_once = at_once
        try:
            self._launcher.begin(self._plan, self._shared)
            for child in self._children:
                child.start(time.monotonic(), self._state_of(child))
            self._looked = time.monotonic()
            reason = self._loop(ending, tick)
            if reason is not End.FAILED:
                self._save_last(self._plan.timeouts.stop if reason is End.SIGNAL else self._plan.timeouts.save)
            self._stop(reason)
        finally:
            for child in self._children:
                child.kill()
                child.finish(1.0)
            self._launcher.end()
            self._checkpoints.sweep()  # a role may have written on to one that another's full disk had ended
        self._metrics.row_if_due(last=True)
        return reason

    def _loop(self, ending: Callable[[], End | None], tick: Callable[[], None]) -> End:
        while True:
            self._listen(_TICK_SECONDS)
            self._metrics.row_if_due()
            tick()
            if self._at_once():
                return End.SIGNAL
            if self._given_up:
                return End.FAILED
            reason = ending()
            if reason is End.SECONDS and self._plan.of_kind(Kind.EVALUATOR):
                # The result is evaluated, if that does not take too long.
                if not self._closed_at:
                    self._closed_at = time.monotonic()
                    self._notify(f"{reason.value}: actors and learners end, and the last evaluation follows")
                self._rules.close(learners=time.monotonic() - self._closed_at > _CATCH_UP_SECONDS)
            elif reason is not None:
                if reason is End.SECONDS:
                    self._rules.close(learners=True)  # or a long step would go on
                return reason
            if self._is_finished() or (reason and time.monotonic() - self._closed_at > self._plan.timeouts.save):
                return reason or End.STEPS
            self._restart_due()
            self._watch()
            self._save_if_due()

    def _listen(self, timeout: float) -> None:
        """Handle messages and deaths."""
        living = [child for child in self._children if child.process is not None]
        ready = self._launcher.wait([child.process for child in living if child.process is not None], timeout)
        self._look()
        for child in [child for child in living if child.process in ready]:
            try:
                for message in child.messages():
                    self._handle_message(child, message)
            except EOFError:
                self._handle_death(child)

    def _handle_message(self, child: RoleChild, message: dict[str, object]) -> None:
        match message["kind"]:
            case "said":
                self._notify(f"{child.name}: {message['text']}")
            case "notice":  # of the launcher, about no role
                self._notify(str(message["text"]))
            case "failed":
                self._errors[child.number] = str(message["error"])
                self._notify(f"{child.name} failed: {message['error']} (traceback: {child.log})")
            case "saved":
                self._saved_files.add(str(message["file"]))
            case "unsaved":
                self._unsaved = f"{child.name} could not write its state: {message['error']}"
            case _:
                self._metrics.take(message)

    def _handle_death(self, child: RoleChild) -> None:
        pid, lost = child.pid, child.lost
        if self._scoreboard.orders[child.number][ControlWord.ORDER] == Order.STOP:
            child.finish(1.0)
            return
        how = child.reap(time.monotonic())
        error = self._errors.pop(child.number, "")
        most = self._plan.timeouts.failures
        if not lost and (child.failures >= most or not child.spec.restarts):
            self._given_up = True
            bound = f"{child.failures} times in a row (limit: {most})" if child.spec.restarts else "which ends the run"
            # This may be the only line that a user reads, so it repeats the cause.
            cause = f": {error}" if error else ""
            self.text = f"{child.name} (process {pid}) {how}, {bound}{cause} (log: {child.log})"
            self._notify(self.text)
            return
        delay = max(0.0, child.restart_at - time.monotonic())
        self._notify(
            f"{child.name} (process {pid}) {how}; restarting it in {delay:.1f} s (failures in a row: {child.failures})"
        )

    def _restart_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if not child.alive and now >= child.restart_at:
                child.start(now, self._state_of(child))

    def _look(self) -> None:
        """Notice that this process was stopped: silence of roles, which may have been stopped, too, counts from now."""
        now = time.monotonic()
        if now - self._looked > _AWAY_SECONDS:
            self._since = time.monotonic_ns()
        self._looked = now

    def _watch(self) -> None:
        self._look()
        now = time.monotonic()
        if now - self._watched < _WATCH_SECONDS:
            return
        self._watched = now
        finding = examine(self._plan, self._scoreboard, time.monotonic_ns(), self._since)
        if finding is not None and self._children[finding.role].condemn():
            self._notify(f"watchdog: {finding.text}")

    def _state_of(self, child: RoleChild) -> Path | None:
        # An actor's old random state would make it repeat what was counted; a learner's optimiser is worth keeping.
        if self.latest is None or (
            not child.spec.kind.learns and self._scoreboard.orders[child.number][ControlWord.LIFE] > 0
        ):
            return None
        return self.latest.state_path(child.name)

    def _is_finished(self) -> bool:
        """Whether the budget is used up, and all answers have arrived."""
        evaluated = (
            self._scoreboard.waits_for(number)[0] is Subject.WORK
            and self._scoreboard.words[number][Word.EVALUATED_AT] >= self._scoreboard.env_steps
            for number in self._plan.of_kind(Kind.EVALUATOR)
        )
        return self._finished(self._rules.over() and all(evaluated))

    def _finished(self, now_so: bool) -> bool:
        # A role that has just taken its last turn may be about to take another.
        now = time.monotonic()
        if not now_so:
            self._finished_since = None
        elif self._finished_since is None:
            self._finished_since = now
        return self._finished_since is not None and now - self._finished_since > 2 * _TICK_SECONDS

    def _save_last(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not all(map(self._is_running, self._savers)):
            if self._given_up or self._at_once() or time.monotonic() > until:
                return
            self._listen(_TICK_SECONDS)
            self._restart_due()
        self._save_if_due(last=True)

    def _save_if_due(self, *, last: bool = False) -> None:
        every, steps = self._plan.save_every, self._scoreboard.env_steps
        late = time.monotonic() - self._tried_when >= self._plan.save_seconds
        due = (every > 0 and (late or steps - self._tried_at >= every)) or last
        # The last one is also due where only learners or evaluators went on since the one before, or where that failed.
        # Whether they did is certain only when they are paused: a learner may be about to make a step.
        if not due or not all(map(self._is_running, self._savers)):
            return
        if not last and self._scoreboard.progress == self._saved:
            return
        before, self._tried_at = self.latest, steps
        began = self._tried_when = time.monotonic()
        self._unsaved = ""
        try:
            made = self._save(began + self._plan.timeouts.save, last)
        except OSError as error:  # a full disk; or weights were being written, and could not be read whole in time
            made, self._unsaved = False, f"{type(error).__name__}: {error}"
        if made and self.latest is before:
            return
        if made:
            self._notify(f"checkpoint at {self._scoreboard.env_steps} steps, in {time.monotonic() - began:.1f} s")
        else:
            why = self._unsaved or "a role died or did not answer in time"
            left = "there is none before" if before is None else f"{before.folder.name} stands"
            self._notify(f"no checkpoint at {self._scoreboard.env_steps} steps ({left}): {why}")

    def _save(self, until: float, last: bool) -> bool:
        """Pause all roles, make them save, and continue; after the last one they stay as they were saved.

        Raises:
            OSError: a file could not be written, or weights not be read whole.
        """
        scratch = self._checkpoints.begin()
        try:
            for child in self._savers:
                child.order(Order.PAUSE)
            if not self._wait_all(
                until, lambda child: self._scoreboard.words[child.number][Word.STATE] == State.PAUSED
            ):
                return False
            if self._scoreboard.progress == self._saved:
                return True  # the newest has it all
            files = {child.number: scratch / f"{child.name}.state" for child in self._savers}
            for child in self._savers:
                child.save_to(files[child.number])
            if not self._wait_all(until, lambda child: str(files[child.number]) in self._saved_files):
                return False
            if not self._launcher.settle(max(0.1, until - time.monotonic())):
                return False
            restarts = sum(orders[ControlWord.RESTARTS] for orders in self._scoreboard.orders)
            if restarts > self._repaired:
                self._shared.repair_replays(self._plan)
                self._repaired = restarts
            progress = self._scoreboard.progress
            document = self._shared.save(self._plan, scratch, self._launcher.save_replay)
            document["gathered"] = self._metrics.state()
            made = self._checkpoints.complete(scratch, self._scoreboard.env_steps, document)
            self.latest = made
            self._saved, self._tried_at = progress, made.env_steps
            return True
        finally:
            self._checkpoints.abandon(scratch)
            self._saved_files.clear()
            if not last:
                for child in self._savers:
                    child.order(Order.RUN)
            self._looked = time.monotonic()  # it was writing, and not stopped

    def _wait_all(self, until: float, answered: Callable[[RoleChild], bool]) -> bool:
        """Listen until all have answered; False after a death or a time-out."""
        while not all(answered(child) for child in self._savers):
            over = self._at_once() or time.monotonic() > until or bool(self._unsaved)
            if over or not all(child.alive for child in self._savers):
                return False
            self._listen(0.005)
        return True

    def _is_running(self, child: RoleChild) -> bool:
        return child.alive and self._scoreboard.words[child.number][Word.STATE] == State.RUNNING

    def _stop(self, reason: End) -> None:
        """Stop all roles after their current steps; evaluators are not waited for after a signal."""
        for child in self._children:
            child.order(Order.STOP)
        until = time.monotonic() + self._plan.timeouts.stop
        waited = self._savers if reason is End.SIGNAL else self._children
        while any(child.alive for child in waited) and time.monotonic() < until and not self._at_once():
            self._listen(_TICK_SECONDS)
        for child in waited:
            if child.alive and not self._at_once():
                self._notify(f"{child.name} did not end within {self._plan.timeouts.stop:g} s and is killed")
