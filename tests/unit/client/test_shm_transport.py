"""A lane's side of the engines' rings, in memory of this process: the engines are played by the test."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from tests.serving import wait_until

from jurybox import native
from jurybox.client.in_flight import Answer, InFlight
from jurybox.client.transports import shm
from jurybox.client.transports.shm import ShmTransport, Words
from jurybox.client.transports.transport import NOT_ANSWERED, NOT_FIT, NOT_SENT, NotSent, RowPlace
from jurybox.protocol.errors import Busy, Code, SharedMemoryError
from jurybox.protocol.scoreboard import ENGINE, EngineState
from jurybox.protocol.segment import segment_name, sibling
from jurybox.protocol.spec import TensorSpec
from jurybox.protocol.wire import TICKET

LANE, LEASE = 3, 70
BOARD = segment_name("abc", "scoreboard")


class Rings:
    """The rings of an engine, and the engine's side of them."""

    def __init__(self, name, incarnation):
        self.segment = SimpleNamespace(name=name, array=lambda *_: self.memory)
        self.memory = np.frombuffer(mmap.mmap(-1, native.RINGS_BYTES), np.uint8)
        self.pipe = os.eventfd(0, os.EFD_NONBLOCK)
        self.engine = native.ShmRingsEngine(self.memory, [self.pipe], incarnation, 0)
        self.attached, self.waiting = 0, np.zeros(0, TICKET)

    def close(self):
        self.attached -= 1

    def collect(self):
        """Take what was posted; return the numbers."""
        room = np.zeros(40, TICKET)
        self.waiting = room[: self.engine.collect(room)]
        return self.waiting["sequence"].tolist()

    def answer(self, code=Code.OK, version=6, message=""):
        self.engine.reply(self.waiting, code, version, message)


@pytest.fixture
def world(monkeypatch):
    """A scoreboard of two engines, whose rings are attached by their names."""
    made = SimpleNamespace(segment=SimpleNamespace(name=BOARD), engines=np.zeros(2, ENGINE), rings={}, opened=[])
    made.engines["state"] = EngineState.SERVING

    def begin(engine, incarnation):
        """Begin an incarnation of an engine with its own rings."""
        number = made.engines["rings"].max() + 1
        made.engines[engine]["rings"], made.engines[engine]["incarnation"] = number, incarnation
        name = sibling(BOARD, "rings", int(number))
        made.rings[name] = Rings(name, incarnation)
        return made.rings[name]

    def attach(name):
        made.opened.append(name)
        if name not in made.rings:
            raise SharedMemoryError("it is not there any more")
        made.rings[name].attached += 1
        return made.rings[name]

    made.begin = begin
    monkeypatch.setattr(shm.ShmRings, "attach", staticmethod(attach))
    yield made
    for rings in made.rings.values():
        os.close(rings.pipe)


@pytest.fixture
def transport(world):
    made = ShmTransport(world, LANE, LEASE, 0)
    yield made
    made.close()


def ticket(sequence=1, engine=0, incarnation=10, first=4, rows=2):
    made = InFlight(sequence, first, rows, time.monotonic_ns() + 10**11, 5)
    made.submitted, made.engine, made.incarnation = 9, engine, incarnation
    return made


def answered(rings, **more):
    """Answer the next ticket in a thread, as another process would."""

    def answer():
        wait_until(rings.collect, 30, "a ticket")
        rings.answer(**more)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


def test_a_ticket_goes_to_its_engine_as_it_is_and_its_answer_stays_until_it_is_settled(world, transport):
    rings = world.begin(0, 10)
    sent = ticket()
    assert not transport.holds(sent) and not transport.receive(0)
    transport.send(sent)
    assert rings.collect() == [1] and transport.holds(sent) and not transport.receive(0)
    one = rings.waiting[0]
    assert [int(one[name]) for name in ("lease", "lane", "first", "rows", "version", "submitted", "deadline")] == [
        LEASE, LANE, 4, 2, 5, 9, sent.deadline
    ]  # fmt: skip
    rings.answer(Code.MODEL_FAILED, 6, "no")
    for _ in range(2):
        assert list(transport.receive(0)) == [Answer(1, Code.MODEL_FAILED, "no", 6, 10)]
    transport.settled(Answer(1, Code.OK, "", 0, 11))
    assert transport.holds(sent), "another incarnation's has the same number"
    transport.settled(transport.receive(0)[0])
    assert not transport.holds(sent) and not transport.receive(0) and world.opened == [rings.segment.name]


@pytest.mark.parametrize("way", ["send", "exchange", "caller", "attach"])
def test_nothing_is_sent_to_an_engine_that_is_being_replaced(world, transport, way):
    world.engines["rings"] = 9
    sent = ticket()
    ask = {
        "send": lambda: transport.send(sent),
        "exchange": lambda: transport.exchange(sent, 0.0),
        "caller": lambda: transport.caller(RowPlace(0, 1, None, None, None, None, world.engines[:1], 10, 0)),
        "attach": lambda: transport.attach(0, 10),
    }[way]
    assert ask() is None and not transport.holds(sent) and not transport.receive(0)
    world.engines["rings"] = 0
    rings = world.begin(0, 10)
    ask()
    assert rings.attached == 1 and len(rings.collect()) == (way in ("send", "exchange"))


def test_a_full_ring_takes_no_ticket_until_answers_have_come(world, transport):
    rings = world.begin(0, 10)
    for sequence in range(1, 33):
        transport.send(ticket(sequence))
    with pytest.raises(NotSent, match="the lane's ring is full"):
        transport.send(ticket(33))
    assert not transport.holds(ticket(33)) and len(rings.collect()) == 32
    rings.answer()
    assert len(transport.receive(0)) == 32
    transport.send(ticket(33))
    assert rings.collect() == [33]


def test_an_exchange_settles_its_answer_and_leaves_the_others(world, transport):
    rings = world.begin(0, 10)
    transport.send(ticket(1))
    rings.collect()
    rings.answer()
    thread = answered(rings, code=Code.ROW_FAILED, message="odd")
    assert transport.exchange(ticket(2), 30.0) == Answer(2, Code.ROW_FAILED, "odd", 6, 10)
    thread.join(30)
    assert not transport.holds(ticket(2)) and [one.sequence for one in transport.receive(0)] == [1]
    assert transport.exchange(ticket(3), 0.001) is None and transport.holds(ticket(3))


def test_a_caller_copies_its_row_in_and_returns_the_outputs(world, transport):
    rings = world.begin(0, 10)
    row, out = np.zeros(2, np.float32), np.array([7, 8], np.float32)
    spec = TensorSpec("float32", (2,))
    place = RowPlace(4, 1, spec, row, None, out, world.engines[:1], 10, 0)
    call, given = transport.caller(place), np.array([1, 2], np.float32)
    thread = answered(rings)
    assert call(given, 1, 30.0).tolist() == [7, 8] and call.version == 6
    thread.join(30)
    assert row.tolist() == [1, 2] and (rings.waiting["first"][0], rings.waiting["rows"][0]) == (4, 1)
    assert call(given.astype(np.float64), 2, 30.0) == NOT_FIT and call(np.zeros(3, np.float32), 2, 30.0) == NOT_FIT
    thread = answered(rings, code=Code.MODEL_FAILED, message="no")
    assert call(given, 2, 30.0) == Code.MODEL_FAILED and call.message() == "no"
    thread.join(30)
    world.engines["state"] = EngineState.ABSENT
    assert call(given, 3, 30.0) == NOT_SENT
    world.engines["state"] = EngineState.SERVING
    assert call(given, 3, 0.001) == NOT_ANSWERED and transport.holds(ticket(3))


def test_a_callers_row_of_any_size_is_written_with_its_size(world, transport):
    rings = world.begin(0, 10)
    room, extents = np.zeros(8, np.float32), np.zeros(1, np.int64)
    spec = TensorSpec("float32", (-1, 2), capacity=8)
    place = RowPlace(4, 1, spec, room, extents, np.zeros(1, np.float32), world.engines[:1], 10, 0)
    call = transport.caller(place)
    thread = answered(rings)
    assert call(np.arange(6, dtype=np.float32).reshape(3, 2), 1, 30.0).tolist() == [0]
    thread.join(30)
    assert extents.tolist() == [3] and room.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert call(np.zeros((5, 2), np.float32), 2, 30.0) == NOT_FIT
    written = transport.caller(place._replace(spec=None, input=None, extents=None, outputs=None))
    thread = answered(rings, code=Code.ROW_FAILED)
    assert written(None, 2, 30.0) == Code.ROW_FAILED
    thread.join(30)


def test_answers_of_all_engines_are_received_whether_or_not_some_have_nothing_to_answer(world, transport):
    first, second = world.begin(0, 10), world.begin(1, 20)
    transport.send(ticket(1))
    transport.send(ticket(2, 1, 20))
    for rings in (second, first):
        rings.collect()
    assert not transport.receive(0) and not transport.receive(0.001)
    second.answer(version=2)
    assert [one.sequence for one in transport.receive(0)] == [2], "though another engine is awaited as well"
    first.answer(version=1)
    assert sorted((one.sequence, one.version, one.incarnation) for one in transport.receive(30.0)) == [
        (1, 1, 10), (2, 2, 20)
    ]  # fmt: skip
    for one in transport.receive(0):
        transport.settled(one)
    assert not transport.receive(30.0), "nothing is in flight: nobody is waited for"
    transport.send(ticket(3, 1, 20))
    thread = answered(second)
    assert [one.sequence for one in transport.receive(30.0)] == [3]
    thread.join(30)


def test_rings_of_an_engine_that_was_replaced_are_left_when_those_of_the_next_are_attached(world, transport):
    earlier = world.begin(0, 10)
    other = world.begin(1, 20)
    transport.send(ticket(1))
    transport.send(ticket(2, 1, 20))
    following = world.begin(0, 11)
    assert transport.holds(ticket(1)) and earlier.attached == 1
    transport.send(ticket(1, 0, 11))
    assert following.collect() == [1] and (earlier.attached, other.attached, following.attached) == (0, 1, 1)
    assert not transport.holds(ticket(1)) and transport.holds(ticket(1, 0, 11)) and transport.holds(ticket(2, 1, 20))
    transport.close()
    assert (earlier.attached, other.attached, following.attached) == (0, 0, 0)
    assert not transport.holds(ticket(2, 1, 20))


def test_the_rings_of_the_serving_engine_stay_when_a_late_call_attaches_those_of_an_earlier_one(world, transport):
    world.begin(0, 10)
    following = world.begin(0, 11)
    transport.send(ticket(1, 0, 11))
    transport.attach(0, 10)
    assert following.attached == 2 and transport.holds(ticket(1, 0, 11))


def test_rings_that_a_nested_call_has_attached_meanwhile_are_used_by_both(world, transport, monkeypatch):
    rings = world.begin(0, 10)
    attach, nested = shm.ShmRings.attach, []

    def within(name):
        if not nested:
            nested.append(None)
            nested.append(transport.attach(0, 10))
        return attach(name)

    monkeypatch.setattr(shm.ShmRings, "attach", staticmethod(within))
    assert transport.attach(0, 10) is nested[1] and rings.attached == 1
    assert transport.attach(0, 10) is nested[1] and len(world.opened) == 2


def test_a_forked_childs_transport_leaves_the_rings(world, transport):
    rings = world.begin(0, 10)
    transport.send(ticket())
    transport.forked()
    assert rings.attached == 0 and not transport.holds(ticket())


# ---- event loops and threads that sleep on the rings


async def come(told):
    await asyncio.wait_for(told.wait(), 30)
    told.clear()


@pytest.mark.parametrize("attached", ["before", "after"])
async def test_a_loop_is_notified_of_answers_on_rings_attached_before_it_watches_and_after(world, transport, attached):
    rings, told = world.begin(0, 10), asyncio.Event()
    if attached == "before":
        transport.send(ticket(1))
    transport.watch(asyncio.get_running_loop(), told.set)
    if attached == "after":
        transport.send(ticket(1))
    for sequence in (1, 2):
        assert rings.collect() == [sequence]
        rings.answer()
        await come(told)
        while not (answers := transport.receive(0)):
            await come(told)
        transport.settled(answers[0])
        transport.send(ticket(sequence + 1))


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "jurybox-answers"]


@pytest.mark.parametrize("end", ["another loop", "close", "replaced"])
def test_the_threads_of_a_loop_end_with_what_they_watch(world, transport, monkeypatch, end):
    monkeypatch.setattr(shm, "_WATCH", 0.01)
    wait_until(lambda: not watchers(), 30, "the end of those of earlier tests")
    world.begin(0, 10)
    loops = [asyncio.new_event_loop() for _ in range(2)]
    transport.watch(loops[0], lambda: None)
    assert not watchers()
    transport.send(ticket())
    (thread,) = watchers()
    assert thread.daemon, "this process ends without it"
    if end == "another loop":
        transport.watch(loops[1], lambda: None)
    elif end == "replaced":
        world.begin(0, 11)
        transport.send(ticket(1, 0, 11))
    else:
        transport.close()
    thread.join(30)
    assert not thread.is_alive() and len(watchers()) == (end != "close")
    for loop in loops:
        loop.close()
    wait_until(lambda: not watchers(), 30, "the end of all: a closed loop is notified of nothing")
    transport.close()


def told_by(words):
    """Whether the descriptor of these words is readable, once."""
    try:
        return os.eventfd_read(words.descriptor) > 0
    except BlockingIOError:
        return False


@pytest.fixture
def words(monkeypatch):
    monkeypatch.setattr(shm, "_WATCH", 0.01)
    made = Words()
    yield made
    made.close()
    wait_until(lambda: not watchers(), 30, "the end of the threads")


@pytest.mark.parametrize("attached", ["before", "after"])
def test_the_owner_of_many_lanes_is_told_of_answers_on_armed_lanes(world, transport, words, attached):
    rings = world.begin(0, 10)
    if attached == "before":
        transport.send(ticket(1))
    transport.tell(words)
    if attached == "after":
        transport.send(ticket(1))
    assert not transport.arm() and rings.collect() == [1]
    rings.answer()
    wait_until(lambda: told_by(words), 30, "a word")
    assert transport.arm() and transport.spin(), "it is here"
    transport.settled(transport.receive(0)[0])
    assert not transport.arm() and not transport.spin()


@pytest.mark.parametrize("way", ["send", "exchange", "caller", "attach"])
@pytest.mark.parametrize(("waits", "error"), [("words", RuntimeError), ("words", MemoryError), ("loop", RuntimeError)])
def test_where_no_thread_can_wait_for_answers_nothing_is_sent_until_one_can(
    world, transport, words, monkeypatch, waits, error, way
):
    """Otherwise nobody would ever be told of the answer; memory or processes are short for a moment."""
    rings, told = world.begin(0, 10), []
    loop = asyncio.new_event_loop()
    transport.tell(words) if waits == "words" else transport.watch(loop, lambda: told.append(1))
    ways = {
        "send": lambda: transport.send(ticket(1)), "exchange": lambda: transport.exchange(ticket(1), 0.0),
        "attach": lambda: transport.attach(0, 10),
        "caller": lambda: transport.caller(RowPlace(0, 1, None, None, None, None, world.engines[:1], 10, 0)),
    }  # fmt: skip

    def fail(self):
        raise error("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(2):
            with pytest.raises(NotSent, match="no thread that waits for its answer could be started .* new thread"):
                ways[way]()
            assert not transport.holds(ticket(1)) and not rings.collect() and rings.attached == 0
    transport.send(ticket(1))
    assert rings.collect() == [1] and len(watchers()) == 1 and not transport.arm()
    rings.answer()
    if waits == "words":
        wait_until(lambda: told_by(words), 30, "a word")
    else:
        loop.run_until_complete(asyncio.wait_for(asyncio.to_thread(wait_until, lambda: told, 30), 60))
    transport.close()
    loop.close()


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
async def test_a_loop_for_which_no_thread_can_wait_is_told_so_and_watches_again_later(
    world, transport, monkeypatch, error
):
    rings, told, loop = world.begin(0, 10), asyncio.Event(), asyncio.get_running_loop()
    transport.send(ticket(1))

    def fail(self):
        raise error("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(
            Busy, match="no thread that waits for its answer could be started .can't start new thread.: ask again"
        ):
            transport.watch(loop, told.set)
    assert transport.holds(ticket(1)) and rings.collect() == [1]
    rings.answer()
    (answer,) = transport.receive(30.0)
    assert answer.sequence == 1, "who looks finds it"
    transport.settled(answer)
    transport.watch(loop, told.set)
    transport.send(ticket(2))
    assert rings.collect() == [2]
    rings.answer()
    await come(told)
    transport.close()


def test_an_owner_that_waits_itself_is_told_of_nothing_until_it_arms_again(world, transport, words, monkeypatch):
    noted = []
    for name in ("add", "pause", "remove"):
        monkeypatch.setattr(words, name, lambda rings, lane, name=name: noted.append((name, rings, lane)))
    rings = world.begin(0, 10)
    transport.quiet()
    transport.arm()
    assert not noted
    transport.send(ticket(1))
    transport.tell(words)
    transport.quiet()
    transport.quiet()
    transport.arm()
    transport.arm()
    transport.close()
    assert noted == [(what, rings, LANE) for what in ("add", "pause", "add", "remove")]


def test_thirty_two_lanes_share_a_thread_that_ends_with_the_last_of_them(world, words):
    rings = world.begin(0, 10)
    wait_until(lambda: not watchers(), 30, "the end of those of earlier tests")
    for lane in (0, native.RINGS_SLEEPERS - 1):
        words.add(rings, lane)
    assert [thread.daemon for thread in watchers()] == [True]
    words.add(rings, native.RINGS_SLEEPERS)
    assert len(watchers()) == 2
    words.remove(rings, 0)
    words.remove(rings, native.RINGS_SLEEPERS)
    wait_until(lambda: len(watchers()) == 1, 30, "the end of one")
    words.add(rings, 1)
    words.remove(rings, native.RINGS_SLEEPERS - 1)
    assert len(watchers()) == 1
    words.remove(rings, 1)
    wait_until(lambda: not watchers(), 30, "the end of the other")
    words.remove(rings, 1)
    words.pause(rings, 1)


def test_a_lane_that_pauses_is_paused_on_its_own_word(world, monkeypatch):
    told = []

    class Word:
        def __init__(self, _, lane):
            self.first = lane // native.RINGS_SLEEPERS * native.RINGS_SLEEPERS
            self.add = lambda lane: told.append(("add", self.first, lane))
            self.pause = lambda lane: told.append(("pause", self.first, lane))
            self.watch = lambda *_: None

    monkeypatch.setattr(native, "ShmRingsWord", Word)
    rings, words = world.begin(0, 10), Words()
    for lane in (3, 40):
        words.add(rings, lane)
        words.pause(rings, lane)
    words.close()
    assert told == [("add", 0, 3), ("pause", 0, 3), ("add", 32, 40), ("pause", 32, 40)]


def test_the_descriptor_of_words_is_closed_with_them(world):
    words = Words()
    descriptor = words.descriptor
    os.fstat(descriptor)
    del words
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
