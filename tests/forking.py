"""Running a function in a forked child, as vectorised environments and data loaders do; its answer comes back."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

DEADLINE = 60.0  # seconds: a child that hangs is killed then


class EndedEarly(AssertionError):
    """The child ended before its work did; the text says how."""


class Child:
    """A forked child that runs `work` and ends; `result` waits for what it returned, or raises what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._read)
                try:
                    answer = (True, work())
                except BaseException as error:  # noqa: BLE001  (the parent raises it)
                    answer = (False, _portable(error))
                with os.fdopen(write, "wb") as pipe:
                    pickle.dump(answer, pipe)
                status = 0
            finally:
                os._exit(status)
        os.close(write)

    def result(self) -> Any:
        until, content = time.monotonic() + DEADLINE, b""
        try:
            while True:
                ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
                if not ready:
                    os.kill(self.pid, signal.SIGKILL)
                    raise AssertionError(f"the forked child hung for {DEADLINE:.0f} s")
                if not (part := os.read(self._read, 1 << 16)):
                    break
                content += part
        finally:
            os.close(self._read)
            status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if not content:
            raise EndedEarly(f"the forked child ended with {status} before its work did")
        well, answer = pickle.loads(content)
        if not well:
            raise answer
        return answer


def in_a_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child; raises what it raises there."""
    return Child(work).result()


def _portable(error: BaseException) -> BaseException:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (whatever it is, its text can travel)
        return AssertionError(text)
    error.add_note(text)
    return error
