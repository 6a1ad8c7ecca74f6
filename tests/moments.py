"""Something that happens within a call: at each place at which the interpreter looks for signals, one after another."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


class Moment:
    """Calls `action` at the n-th such place in the code of some files, as a signal handler would be called.

    The interpreter looks for signals after calls, at the beginning of functions and when it jumps back. `anywhere`: at
    the n-th instruction, because a destructor may run at each.

    Attributes:
        fell: whether there was such a place.
    """

    def __init__(
        self, files: tuple[str, ...], number: int, action: Callable[[], None], *, anywhere: bool = False
    ) -> None:
        self._anywhere = anywhere
        self._files = files
        self._left = number
        self._action = action
        self.fell = False

    def __enter__(self) -> Moment:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 decides by it, when tracing begins, whether to trace them
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        frame.f_trace = self._moved  # Python 3.13 wants to know it first
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._moved

    def _moved(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and (self._anywhere or frame.f_lasti in _places(frame.f_code)):
            self._left -= 1
            if self._left < 0:
                self.fell = True
                sys.settrace(None)
                self._action()
                return None
        return self._moved


def each_moment(files: tuple[str, ...], action: Callable[[], None], stride: int = 1) -> Iterator[Moment]:
    """Yield a `Moment` for each place of the call that is made with it, until the call ends before one."""
    for number in itertools.count(0, stride):
        yield (moment := Moment(files, number, action))
        if not moment.fell:
            return


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Offsets of instructions that follow one after which signals are looked for, in the same ``try``."""
    tries = getattr(dis.Bytecode(code), "exception_entries", ())

    def around(offset: int) -> int | None:
        return next((i for i, entry in enumerate(tries) if entry.start <= offset < entry.end), None)

    pairs = itertools.pairwise(dis.get_instructions(code))
    kinds, others = ("CALL", "RESUME", "JUMP_BACKWARD"), ("CALL_INTRINSIC", "JUMP_BACKWARD_NO_INTERRUPT")
    looked = ((a, b) for a, b in pairs if a.opname.startswith(kinds) and not a.opname.startswith(others))
    return frozenset(b.offset for a, b in looked if around(a.offset) == around(b.offset))
