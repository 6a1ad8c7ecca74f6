"""One role's process: ``python -m jurybox.training.runtime.process FD``, with a control pipe on that descriptor."""

from __future__ import annotations

import base64
import contextlib
import gc
import logging
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from jurybox.processes import ControlPipe, attach
from jurybox.training.checkpoints import read_state, write_state
from jurybox.training.runtime.plan import Plan
from jurybox.training.runtime.role_context import Message, RoleContext
from jurybox.training.runtime.scoreboard import Order, State, Subject, Word
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.runtime.turns import Rules, Turn, make_turn, no_exit

_CONFIGURE_TIMEOUT = 30.0
_SLICE_SECONDS = 0.2

_log = logging.getLogger("jurybox.role")


class ReportHandler(logging.Handler):
    """A log handler that sends warnings and errors to the orchestrator."""

    def __init__(self, reports: Reports) -> None:
        super().__init__(logging.WARNING)
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        self._reports({"kind": "said", "text": f"{record.levelname.lower()}: {record.getMessage()}"})


class Reports:
    """Sends messages to the orchestrator; if it does not read them, they are dropped and counted."""

    def __init__(self, control_pipe: ControlPipe) -> None:
        self._control_pipe = control_pipe
        self.words: memoryview | None = None

    def __call__(self, message: Message) -> None:
        if not self._control_pipe.writable():
            if self.words is not None:
                self.words[Word.DROPPED] += 1
            return
        self.send_reliably(message)

    def send_reliably(self, message: Message) -> None:
        """Send a message that must not be dropped."""
        self._control_pipe.send(**message)


def main() -> None:
    control_pipe = attach(int(sys.argv[1]))
    gc.disable()  # until the role stands: what a plan imports stays, as what was imported before
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    message = control_pipe.receive(_CONFIGURE_TIMEOUT)
    if message is None:
        sys.exit("no configuration came; this module is started by an orchestrator")
    sys.path[:] = message["path"]
    reports = Reports(control_pipe)
    logging.getLogger().addHandler(ReportHandler(reports))
    try:
        _serve(control_pipe, reports, message)
    except BaseException as error:  # noqa: BLE001 (reported to the orchestrator, and this process ends)
        _log.info("ended by\n%s", traceback.format_exc())
        with contextlib.suppress(OSError):  # the orchestrator may be what is gone
            reports.send_reliably({"kind": "failed", "error": f"{type(error).__name__}: {error}"})
        logging.shutdown()
        os._exit(1)
    # Everything is closed; taking the interpreter and its libraries apart would only take time from the others.
    logging.shutdown()
    os._exit(0)


def _serve(control_pipe: ControlPipe, reports: Reports, message: dict[str, Any]) -> None:
    # From the process that started this one.
    plan: Plan = pickle.loads(base64.b64decode(message["plan"]))
    with SharedResources.attach(message["scoreboard"], message["replays"]) as shared:
        context = RoleContext(
            plan,
            message["number"],
            shared,
            reports,
            life=message["life"],
            folders=message["folders"],
            evaluated=Path(message["evaluated"]),
            certainly=reports.send_reliably,
        )
        reports.words = context.words
        context.words[Word.PID] = os.getpid()
        context.words[Word.LIFE] = context.life
        context.words[Word.WAITS_FOR] = Subject.NOTHING
        _log.info("%s begins its life %d with %d steps behind it", context.name, context.life, context.own_steps)
        state = read_state(Path(message["state"])) if message["state"] else None
        turn = make_turn(context, Rules(plan, shared.scoreboard), state)
        try:
            os.nice(context.spec.nice)  # not before: all other roles wait for the start
            context.begin()
            gc.freeze()
            gc.enable()
            _take_turns(turn, context, control_pipe, reports)
            context.report(now=True)
            context.finish_timeline()
        finally:
            turn.close()
        context.enter(State.STOPPED)
        _log.info("%s stops on request after %d steps", context.name, context.own_steps)


def _take_turns(turn: Turn, context: RoleContext, control_pipe: ControlPipe, reports: Reports) -> None:
    while True:
        order = context.order
        if order is Order.STOP:
            return
        if order is Order.PAUSE:
            _pause(turn, context, control_pipe, reports)
        elif turn.may():
            with no_exit(context.name):
                turn.take()
            context.alive()
            context.report()
        else:
            subject, which = turn.waiting
            context.wait_until(turn.may, subject, which, _SLICE_SECONDS)


def _pause(turn: Turn, context: RoleContext, control_pipe: ControlPipe, reports: Reports) -> None:
    """Pause between two steps, and save on request."""
    context.report(now=True)
    context.enter(State.PAUSED)

    def saved() -> bool:
        message = control_pipe.receive(0)
        if message is not None and message["kind"] == "save":
            state = turn.role.save()
            try:
                write_state(Path(message["file"]), state)
            except OSError as error:  # a full disk is no reason to die: the checkpoint before stands
                reports.send_reliably({"kind": "unsaved", "file": message["file"], "error": str(error)})
                return False
            reports.send_reliably({"kind": "saved", "file": message["file"]})
        return False

    while context.order is Order.PAUSE:
        context.wait_until(saved, Subject.ORDERS, timeout=_SLICE_SECONDS)
    context.enter(State.RUNNING)


if __name__ == "__main__":
    main()
