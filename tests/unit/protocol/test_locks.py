"""The lock of what threads share: every wait has a limit, and a nested call works or is refused at once."""

from __future__ import annotations

import dis
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jurybox.protocol import locks
from jurybox.protocol.errors import Refused, Timeout
from jurybox.protocol.locks import TimedLock


@pytest.fixture
def other():
    with ThreadPoolExecutor(1) as pool:
        yield lambda action: pool.submit(action).result(30)


def take(lock, seconds=0.05):
    with lock.within(seconds):
        return True


def test_a_thread_waits_for_another_no_longer_than_it_says_and_is_told_for_what(other):
    lock = TimedLock("a publication to 'policy'", ": publish again")
    with lock.within(30.0):
        for way in (lock.within, lock.once):
            for seconds in (0.05, 0.0, -1.0):
                with pytest.raises(
                    Timeout, match=r"a publication to 'policy' in another thread did not end within 0\.. s: p"
                ):
                    other(lambda way=way, seconds=seconds: way(seconds).__enter__())
    assert other(lambda: take(lock))


def test_a_nested_call_comes_in_again_or_is_refused_at_once_where_there_is_only_one(other):
    lock = TimedLock("a step of these sessions")
    with lock.once(30.0):
        assert lock.mine and not other(lambda: lock.mine)
        with lock.within(30.0):
            pass
        assert lock.mine  # the nested call gave back its own turn only
        with pytest.raises(
            Refused, match=r"a step of these sessions is under way in this thread: this is a signal handler"
        ):
            lock.once(30.0)
    assert not lock.mine and other(lambda: take(lock))


def test_a_destructor_in_a_thread_that_carries_answers_never_waits_for_a_lock(other):
    lock = TimedLock("a call of 'policy'")

    def collected():
        locks.mark_serving()
        return take(lock, 30.0)

    with lock.within(30.0), pytest.raises(Refused, match="which may wait for this one: a destructor"):
        other(collected)
    assert other(collected)  # nobody has it
    with ThreadPoolExecutor(1) as third, lock.within(30.0), pytest.raises(Timeout):
        third.submit(take, lock).result(30)  # only that thread is marked


@pytest.mark.parametrize("way", ["within", "once"])
def test_ctrl_c_at_any_place_leaves_the_lock_free(way, other):
    lock = TimedLock("a lease")

    def used():
        with getattr(lock, way)(1.0):
            len("work")
        len("after")

    for moment in itertools.count():
        if not interrupted(used, moment):
            break
        assert not lock.mine
        assert other(lambda: take(lock))
    assert moment > 5


def interrupted(action, moment) -> bool:
    """Call `action`; raise KeyboardInterrupt at its n-th place at which the interpreter looks for signals."""
    left = moment

    def moved(frame, event, _):
        nonlocal left
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return moved

    def called(frame, event, _):
        if frame.f_code.co_filename in (__file__, locks.__file__):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return moved
        return None

    sys.settrace(called)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def _places(code):
    tries = getattr(dis.Bytecode(code), "exception_entries", ())

    def around(offset):
        return next((i for i, entry in enumerate(tries) if entry.start <= offset < entry.end), None)

    pairs = itertools.pairwise(dis.get_instructions(code))
    kinds = ("CALL", "RESUME", "JUMP_BACKWARD")
    return {b.offset for a, b in pairs if a.opname.startswith(kinds) and around(a.offset) == around(b.offset)}
