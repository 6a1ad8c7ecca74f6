"""A replay within its own calls: signal handlers and destructors add, sample, set priorities, save and prefetch."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.collecting import collecting_often
from tests.moments import each_moment

from jurybox.protocol.errors import Busy, Refused, Timeout
from jurybox.training import replay as package
from jurybox.training.replay import Episodes, Field, RateLimiter, Replay

OURS = (str(Path(package.__file__).parent),)
FIELDS = {"a": Field((4,)), "b": Field(), "done": Field((), "bool")}


def row(number):
    """A row whose fields belong together."""
    return {"a": np.full(4, number, np.float32), "b": np.float32(2 * number), "done": False}


def rows(*numbers):
    columns = [row(number) for number in numbers]
    return {name: np.stack([column[name] for column in columns]) for name in FIELDS}


def whole(batch) -> bool:
    return bool((batch["a"] * 2 == batch["b"][:, None]).all())


@pytest.fixture
def create(make):
    return lambda capacity=64, **options: make(capacity, FIELDS, **options)


class Inside:
    """Calls `action` in a signal handler, after `seconds`; `came` has its result or its error."""

    def __init__(self, action, seconds=0.05):
        self._action, self._seconds = action, seconds
        self.came = []

    def __enter__(self):
        self._before = signal.signal(signal.SIGALRM, self._handle)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _handle(self, *_):
        try:
            self.came.append(self._action())
        except Exception as error:  # noqa: BLE001
            self.came.append(error)


@pytest.mark.parametrize("waits", ["block", "limiter"])
def test_a_handler_in_a_call_that_waits_uses_the_replay_and_is_refused_within_an_episode(create, waits, tmp_path):
    options = {"full": "block"} if waits == "block" else {"limiter": RateLimiter(1.0, least_rows=8, error=8.0)}
    replay = create(capacity=16, prioritized=True, episodes=Episodes(terminated="done"), **options)
    stream = replay.stream()
    did = {}

    def handler():
        for what, call in {
            "same": lambda: stream.add(**row(99)),
            "sample": lambda: whole(replay.sample(4)),
            "priorities": lambda: replay.update_priorities(replay.sample(4).indices, np.ones(4)),
            "save": lambda: replay.save(tmp_path / "saved").rows,
            "room": lambda: replay.discard(12) if waits == "block" else whole(replay.sample(8)),
            "other": lambda: replay.stream().add(**row(50)),
        }.items():
            try:
                did[what] = call()
            except Exception as error:  # noqa: BLE001
                did[what] = error

    with Inside(handler) as inside:
        assert stream.extend(**rows(*range(20))) == 20
    assert inside.came == [None]
    assert isinstance(did["same"], Refused) and "rows are being added to this stream" in str(did["same"])
    assert did["sample"] is True and did["priorities"] == 4 and did["save"] >= 8 and did["other"] == 1, did
    assert whole(replay.sample(1))
    assert 2 * 99 not in replay.parts[0].field_rows("b", 0, 16)
    replay.discard(4)
    assert stream.add(**row(20)) == 1  # the stream is free again


def test_rows_of_a_call_that_waits_can_be_drawn_by_their_priorities(create):
    replay = create(capacity=64, prioritized=True, limiter=RateLimiter(1.0, least_rows=8, error=8.0))
    with ThreadPoolExecutor(1) as other:
        adding = other.submit(lambda: replay.extend(**rows(*range(40))))  # waits for samples
        until = time.monotonic() + 20
        while not adding.done() and time.monotonic() < until:
            try:
                assert whole(replay.sample(4, timeout=0.05))
            except (Timeout, package.NotEnoughRows):
                time.sleep(0.001)
        assert adding.result(20) == 40


def test_a_sample_within_a_sample_into_one_batch_is_refused_and_others_are_drawn(create):
    replay = create(limiter=RateLimiter(1.0, least_rows=8, error=8.0))
    replay.extend(**rows(*range(8)))
    batch = replay.batch(8)
    replay.sample(8, batch)
    came = {}

    def handler():
        with pytest.raises(Busy, match="by the call that this one is inside of"):
            replay.sample(8, batch)
        came["added"] = replay.extend(**rows(*range(8, 17)))  # which lets the outer call go on
        came["drawn"] = whole(replay.sample(1))

    with Inside(handler) as inside:
        assert whole(replay.sample(8, batch))
    assert inside.came == [None] and came == {"added": 9, "drawn": True}


@pytest.mark.parametrize("what", ["add", "extend", "sample", "update_priorities", "reserve", "save", "counters"])
def test_a_handler_at_any_place_of_a_call_gets_its_own_rows(create, what, tmp_path):
    replay = create(capacity=256, prioritized=what != "reserve")
    replay.extend(**rows(*range(64)))

    def reserve(number):
        with replay.reserve(2) as place:
            for name, values in rows(number, number).items():
                place[name][:] = values

    def use(number):
        return {
            "add": lambda: replay.add(**row(number)),
            "extend": lambda: replay.extend(**rows(number, number + 1)),
            "sample": lambda: whole(replay.sample(16)),
            "update_priorities": lambda: replay.update_priorities(replay.sample(8).indices, np.ones(8)),
            "reserve": lambda: reserve(number) is None,
            "save": lambda: replay.save(tmp_path / f"{number}", codec="none").rows > 0,
            "counters": lambda: replay.counters.added > 0,
        }[what]()

    seen = []

    def handler():
        try:
            assert use(1000)
            seen.append("made")
        except Refused as error:
            assert "a save is under way in this thread" in str(error)
            seen.append("refused")

    for number, moment in enumerate(each_moment(OURS, handler, 11 if what == "save" else 1)):
        with moment:
            assert use(number)
        assert whole(replay.sample(64))
    assert len(replay) <= 256 and (what != "save" or "refused" in seen)
    if what == "reserve":
        assert replay.counters.retried == 0


def test_a_destructor_may_add_rows_that_no_other_row_is_mixed_with(create):
    replay = create(capacity=4096)
    stream, ended = replay.stream(), []

    class Env:
        def __init__(self, number):
            self.me, self.number = self, number

        def __del__(self):
            ended.append(stream.add(**row(self.number)))

    with collecting_often(10):
        for number in range(300):
            Env(number)
            assert replay.extend(a=[[number] * 4], b=[2 * number], done=[False]) == 1  # converted by Python code
    assert len(replay) == 300 + len(ended) == 600
    assert whole(replay.sample(2000))


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_handler_at_any_place_of_a_prefetched_sample_gets_another_batch(create, device):
    replay = create()
    replay.extend(**rows(*range(64)))
    depth = 3
    with replay.prefetch(16, depth=depth, device=device) as batches:
        nested = []

        def handler():
            batch = next(batches)
            nested.append(batch)
            assert (batch["a"] * 2 == batch["b"][:, None]).all()

        for moment in each_moment(OURS, handler):
            with moment:
                batch = next(batches)
            assert (batch["a"] * 2 == batch["b"][:, None]).all()
            assert not nested or nested[-1] is not batch
        assert len(nested) > 5
        for _ in range(4 * depth):  # no batch was lost to the nested calls
            next(batches)
    closed = threading.Event()
    with replay.prefetch(4) as batches, Inside(lambda: [batches.close(), closed.set()], 0.02):
        assert closed.wait(20) or next(batches)
        with pytest.raises(StopIteration):
            while True:
                next(batches)


def test_incremental_saves_of_two_threads_come_after_each_other(create, tmp_path):
    replay = create(capacity=4096)
    replay.extend(**rows(*range(100)))
    file = tmp_path / "saved"
    replay.save(file)

    def work(start):
        for number in range(start, start + 20):
            replay.add(**row(number))
            replay.save(file, incremental=True)

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work, 1000), threads.submit(work, 2000)]:
            done.result(60)
    loaded = Replay.load(file, f"test-{os.getpid()}-loaded")
    try:
        assert len(loaded) == 140 and whole(loaded.sample(500))
    finally:
        loaded.unlink()
        loaded.close()


def test_a_handler_at_any_place_of_a_copy_on_a_device_is_answered_or_refused(create):
    pytest.importorskip("torch")
    replay = create(capacity=64)
    copy = replay.resident("cpu", capacity=32, seed=1)
    seen = []

    def handler():
        replay.add(**row(1000))
        try:
            copy.refresh()
            seen.append(bool((copy.sample(8)["a"] * 2 == copy.sample(8)["b"][:, None]).numel()))
        except Refused as error:
            assert "a call of this copy of a replay is under way in this thread" in str(error)
            seen.append("refused")

    for number, moment in enumerate(each_moment(OURS, handler, 5)):
        replay.extend(**rows(*range(number, number + 8)))
        with moment:
            copy.refresh()
            drawn = copy.sample(64)
        assert (drawn["a"] * 2 == drawn["b"][:, None]).all()
    copy.refresh()
    assert copy.taken == replay.added and copy.missed == 0
    assert True in seen and "refused" in seen
