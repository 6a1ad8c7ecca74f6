"""Runs a plan: creates and removes the shared memory, and uses processes or the serial driver."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from jurybox.protocol.segment import sweep
from jurybox.training.checkpoints import Checkpoints, write_atomically
from jurybox.training.interrupts import Signals, handle_signals
from jurybox.training.runtime.launching import Launcher, Local
from jurybox.training.runtime.orchestrator import Orchestrator
from jurybox.training.runtime.plan import End, Kind, Outcome, Plan
from jurybox.training.runtime.progress import RunMetrics, Sink, Timeline, View, busy
from jurybox.training.runtime.role_context import Message
from jurybox.training.runtime.scoreboard import RUNNING, ControlWord, Word
from jurybox.training.runtime.serial import Serial
from jurybox.training.runtime.shared_resources import SharedResources


def run(
    plan: Plan,
    folder: Path,
    sink: Sink,
    *,
    serial: bool = False,
    resume: bool = False,
    console: Console | None = None,
    signals: Signals | None = None,
    watch: Callable[[SharedResources], None] | None = None,
    launcher: Launcher | None = None,
) -> Outcome:
    """Run a plan to its end.

    Args:
        folder: gets ``logs/`` (one file a process, and run.log with everything said), ``checkpoints/`` and
            timeline.json.
        sink: takes the rows of metrics.
        serial: run everything in this process.
        resume: continue from the newest checkpoint in `folder`.
        console: shows the progress; None: no output.
        signals: stop requests: SIGINT, SIGTERM, and `ask` from a program.
        watch: called periodically with the run's shared memory.
        launcher: where the roles' processes run; None: on this machine.

    Returns:
        The outcome. After a signal, the caller decides whether the process exits.

    Raises:
        CheckpointError: there is no checkpoint, or it is of another run.
        SharedMemoryError: the replays or channels don't fit.
        Exception: serial runs raise what a role raises.
    """
    folder = folder.absolute()  # a role may change the current folder
    signals = signals or Signals()
    sweep()
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.sweep()
    resumed = checkpoints.existing() if resume else None
    with handle_signals(signals), SharedResources.create(plan) as shared:
        folder.mkdir(parents=True, exist_ok=True)
        metrics = RunMetrics(plan, shared.scoreboard, sink)
        if resumed is not None:
            shared.restore(plan, resumed)
            metrics.restore(resumed.document["gathered"])
            _restore_best(plan, shared, checkpoints)
        began = metrics.seconds

        def ending() -> End | None:
            if signals.count:
                return End.SIGNAL
            if metrics.target_reached:
                return End.TARGET
            if plan.budget.seconds is not None and metrics.seconds - began >= plan.budget.seconds:
                return End.SECONDS
            return None

        mark = folder / RUNNING
        write_atomically(mark, json.dumps({"scoreboard": shared.scoreboard.segment.name, "pid": os.getpid()}))
        try:
            with View(plan, shared.scoreboard, metrics, console, folder / "logs" / "run.log") as view:
                metrics.keep = partial(_keep_best, checkpoints, view.log)
                run_of = plan, shared, metrics, view.log

                def tick() -> None:
                    view.tick()
                    if watch is not None:
                        watch(shared)

                text = ""
                if not serial:
                    processes = Orchestrator(
                        *run_of, folder / "logs", launcher or Local(), checkpoints=checkpoints, resumed=resumed
                    )
                    end = processes.run(ending, at_once=lambda: signals.count > 1, tick=tick)
                    text, resumed = processes.text, processes.latest
                    if end is End.FAILED and plan.on_failure == "serial":
                        view.log("the run goes on in one process")
                        serial, text = True, ""
                if serial:
                    with closing(Serial(*run_of, checkpoints=checkpoints, resumed=resumed)) as driver:
                        end = driver.run(ending, tick)
                text = text or end.value
                learned = bool(shared.scoreboard.learner_steps) or not plan.of_kind(Kind.LEARNER, Kind.TRAINER)
                if not learned and end is not End.FAILED:
                    text += f", and nothing was learned: {_unlearned(plan, shared.scoreboard.env_steps)}"
                view.log(f"the run is over: {text}")
            Timeline.of(shared.scoreboard).save(folder / "timeline.json")
        finally:
            mark.unlink(missing_ok=True)
        return _outcome(end, text, plan, shared, metrics, serial, learned)


def _keep_best(checkpoints: Checkpoints, notify: Callable[[str], None], message: Message, better: bool) -> bool:
    """Keep the weights of an evaluation, or drop them; see `RunMetrics.keep`."""
    kept = message.get("kept")
    if kept is None:
        if better:
            notify(
                f"checkpoints/best is not of the best evaluation: {message.get('unkept', 'no weights came with it')}"
            )
        return False
    if better:
        try:
            checkpoints.keep_best(Path(kept))
            return True
        except OSError as error:
            notify(f"checkpoints/best is not of the best evaluation: it could not be put there: {error}")
    checkpoints.abandon(Path(kept))
    return False


def _restore_best(plan: Plan, shared: SharedResources, checkpoints: Checkpoints) -> None:
    """Restore the best value of a killed run, which may be of an evaluation after its last checkpoint."""
    evaluation = checkpoints.best()
    value = evaluation["numbers"].get(plan.best) if evaluation is not None else None
    if value is not None and value > shared.scoreboard.best:
        shared.scoreboard.set_best(value)


def _unlearned(plan: Plan, env_steps: int) -> str:
    """Why no learner has made a step, as far as the plan tells, and what to do."""
    due = min((plan.pace_of(number).env_steps(0, 0) for number in plan.of_kind(Kind.LEARNER)), default=None)
    waited = "" if due is None else f" (the first is due after {due:,} env steps, and {env_steps:,} were made)"
    return (
        f"no update was made{waited}, so the policy is as it began; let it run for longer, or lower what its first "
        "update waits for (learning_starts, n_steps)"
    )


def _outcome(
    end: End, text: str, plan: Plan, shared: SharedResources, metrics: RunMetrics, serial: bool, learned: bool
) -> Outcome:
    scoreboard = shared.scoreboard
    returns = list(metrics.returns)
    return Outcome(
        end=end,
        text=text,
        env_steps=scoreboard.env_steps,
        learner_steps=scoreboard.learner_steps,
        epochs=scoreboard.epochs,
        episodes=scoreboard.episodes,
        seconds=metrics.seconds,
        return_mean=float(np.mean(returns)) if returns else None,
        return_std=float(np.std(returns)) if returns else None,
        restarts=int(scoreboard.control[:, ControlWord.RESTARTS].sum()),
        forced_syncs=int(scoreboard.records[:, Word.FORCED].sum()),
        busy={role.name: busy(scoreboard, number) for number, role in enumerate(plan.roles)},
        evaluation=metrics.evaluation,
        serial=serial,
        rows_dropped=scoreboard.rows_dropped,
        learned=learned,
    )
