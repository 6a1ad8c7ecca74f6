"""The lock of what threads share: every wait has a limit, and a nested call works or is refused at once."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.moments import each_moment

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

    def interrupt():
        raise KeyboardInterrupt

    seen = 0
    for moment in each_moment((__file__, locks.__file__), interrupt):
        with contextlib.suppress(KeyboardInterrupt), moment:
            used()
        assert not lock.mine and other(lambda: take(lock))
        seen += moment.fell
    assert seen > 5


@pytest.mark.parametrize(("seconds", "asked"), [(0.0, (False,)), (-1.0, (False,)), (0.5, (True, 0.5))])
def test_a_turn_waits_for_its_seconds_or_not_at_all(seconds, asked):
    acquired, released = [], []

    class Lock:
        def acquire(self, *how):
            acquired.append(how)
            return True

        def __exit__(self, *_):
            released.append(True)

    with locks.LockTurn(Lock(), seconds):
        assert acquired == [asked]
        assert not released
    assert released
