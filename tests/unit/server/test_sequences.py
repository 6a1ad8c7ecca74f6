"""Sequences at the gateway: a step is computed from the state that its sender expects, or not at all."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from tests.loops import turns

from jurybox.client import Busy, ModelFailed, Refused, RowFailed, SessionLost, SpecMismatch, Timeout
from jurybox.protocol.errors import Code
from jurybox.server.frontend.requests import GET, SET, Steps
from jurybox.server.frontend.sequences import Sequences, SequenceTurn
from jurybox.server.security.limits import CALLER


class Lanes:
    """A lane with some sessions: states are lists of inputs, so that a wrong one is detected."""

    def __init__(self):
        self.states = {}
        self.fail = {}  # what to raise at a value
        self.gate = None  # an event that is waited for before anything is computed
        self.busy = set()

    async def ask_sessions(self, held, values, slots, begin, seconds, version):
        assert not self.busy & set(slots), "two steps of a session at once"
        self.busy |= set(slots)
        try:
            if self.gate is not None:
                await asyncio.wait_for(self.gate.wait(), seconds)
        finally:
            self.busy -= set(slots)
        for value in values:
            if value in self.fail:
                raise self.fail[value]
        for slot, first, value in zip(slots, begin, values, strict=True):
            self.states[slot] = [*([] if first else self.states[slot]), value]
        return {"y": [list(self.states[slot]) for slot in slots]}, 7


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lanes():
    return Lanes()


def held(rows=4):
    free = list(range(rows - 1, -1, -1))
    return SimpleNamespace(free=free, rows=rows, callers=Counter(), model=SimpleNamespace(max_batch=8))


class Gateway:
    def __init__(self, lanes, clock, rows=4):
        self.lanes, self.held = lanes, held(rows)
        self.sequences = Sequences(60.0, clock)

    async def step(self, name, value, *, start=False, end=False, seconds=5.0):
        with SequenceTurn(self.sequences, "m", Steps(((name,),), (0 if start else None,), end)) as turn:
            return (await turn.infer(self.lanes, self.held, [value], 1, time.monotonic() + seconds, 0))[0]["y"][0]

    async def ours(self, steps, values, client="c", seconds=5.0):
        names, numbers = tuple((client, slot) for slot in steps), tuple(steps.values())
        with SequenceTurn(self.sequences, "m", Steps(names, numbers, False, True)) as turn:
            until = time.monotonic() + seconds
            return (await turn.infer(self.lanes, self.held, values, len(values), until, 0))[0]["y"]


@pytest.fixture
def gateway(lanes, clock):
    return Gateway(lanes, clock)


async def test_a_sequence_is_over_when_it_was_idle_and_its_row_is_anothers(gateway, clock):
    for name in range(1, 5):
        await gateway.step(name, name, start=True)
    with pytest.raises(Busy, match="4 sequences of model 'm' are open"):
        await gateway.step("more", 0, start=True)
    clock.now += 50
    assert await gateway.step(1, 10) == [1, 10]
    clock.now += 20
    assert await gateway.step("more", 0, start=True) == [0]
    assert len(gateway.sequences) == 2  # the other three were idle for a minute
    with pytest.raises(SessionLost, match="was idle for 60 s"):
        await gateway.step(2, 2)
    assert await gateway.step(1, 11) == [1, 10, 11]


async def test_an_end_frees_the_row_and_nothing_is_kept_of_names_that_never_began(gateway):
    for n in range(20):
        assert await gateway.step(n + 1, n, start=True, end=True) == [n]
        with pytest.raises(SessionLost):
            await gateway.step(f"never {n}", 0)
    assert len(gateway.sequences) == 0 and sorted(gateway.held.free) == [0, 1, 2, 3]


@pytest.mark.parametrize("end", [False, True])
async def test_a_sequence_that_lost_its_state_keeps_no_row_from_others(gateway, lanes, end):
    """After engines died, sequences of which a request got no answer would take all rows for a minute."""
    lanes.gate = asyncio.Event()
    for n in range(12):
        with pytest.raises(TimeoutError):
            await gateway.step(n, n, start=True, end=end, seconds=0.01)
    assert sorted(gateway.held.free) == [0, 1, 2, 3]
    lanes.gate = None
    with pytest.raises(SessionLost):
        await gateway.step(3, 0)
    assert await gateway.step(3, 4, start=True) == [4]
    assert await gateway.step(3, 5) == [4, 5]


async def test_a_step_that_timed_out_does_not_take_the_row_of_the_one_before(gateway, lanes):
    assert await gateway.step("a", 1, start=True) == [1]
    lanes.gate = asyncio.Event()
    second = asyncio.create_task(gateway.step("a", 2))
    await asyncio.sleep(0)
    with pytest.raises(Timeout, match="an earlier request"):
        await gateway.step("a", 3, seconds=0.02)
    assert len(gateway.held.free) == 3
    lanes.gate.set()
    assert await second == [1, 2]


async def test_no_client_gets_the_state_of_the_rows_earlier_session(gateway, lanes):
    await gateway.step("a", 1, start=True, end=True)
    lanes.fail[666] = ModelFailed("broken")
    with pytest.raises(ModelFailed):
        await gateway.step("b", 666, start=True)  # it has the row, and the row has a's state
    with pytest.raises(SessionLost):
        await gateway.step("b", 2)
    with pytest.raises(SessionLost):
        await gateway.ours({0: 1}, [2])


async def test_requests_of_a_sequence_wait_for_each_other(gateway, lanes):
    lanes.gate = asyncio.Event()
    asked = [asyncio.create_task(gateway.step("a", n, start=n == 0)) for n in range(5)]
    await turns()
    lanes.gate.set()
    assert await asyncio.gather(*asked) == [list(range(n + 1)) for n in range(5)]


@pytest.mark.parametrize("gave_up", [False, True])
async def test_a_sequence_with_a_step_of_unknown_outcome_is_lost(gateway, lanes, gave_up):
    await gateway.step("a", 1, start=True)
    lanes.gate = asyncio.Event()
    slow = asyncio.create_task(gateway.step("a", 2, seconds=0.05 if not gave_up else 5))
    behind = asyncio.create_task(gateway.step("a", 3))
    await turns()
    if gave_up:
        slow.cancel()
    with pytest.raises((asyncio.CancelledError, TimeoutError)):
        await slow
    lanes.gate.set()
    for lost in (behind, gateway.step("a", 4)):
        with pytest.raises(SessionLost):
            await lost
    assert await gateway.step("a", 5, start=True) == [5]


async def test_a_step_given_up_while_it_waited_is_not_left_out_in_silence(gateway, lanes):
    await gateway.step("a", 1, start=True)
    lanes.gate = asyncio.Event()
    first, second = (asyncio.create_task(gateway.step("a", n)) for n in (2, 3))
    await turns()
    second.cancel()
    third = asyncio.create_task(gateway.step("a", 4))
    await turns()
    lanes.gate.set()
    assert await first == [1, 2]
    with pytest.raises(SessionLost):
        await third
    with pytest.raises(SessionLost):
        await gateway.step("a", 5)


async def test_a_sequence_begins_anew_when_all_earlier_steps_have_ended(gateway, lanes):
    await gateway.step("a", 1, start=True)
    lanes.gate = asyncio.Event()
    first, second = (asyncio.create_task(gateway.step("a", n)) for n in (2, 3))
    await turns()
    second.cancel()
    anew = asyncio.create_task(gateway.step("a", 4, start=True))
    await turns()
    lanes.gate.set()
    assert (await first, await anew, await gateway.step("a", 5)) == ([1, 2], [4], [4, 5])


async def test_a_step_that_was_late_while_it_waited_is_not_left_out_in_silence(gateway, lanes):
    await gateway.step("a", 1, start=True)
    lanes.gate = asyncio.Event()
    first = asyncio.create_task(gateway.step("a", 2))
    await turns()
    with pytest.raises(Timeout):
        await gateway.step("a", 3, seconds=0.02)
    lanes.gate.set()
    assert await first == [1, 2]
    with pytest.raises(SessionLost):
        await gateway.step("a", 4)


async def test_a_step_that_was_not_computed_may_be_repeated(gateway, lanes):
    lanes.fail[666] = ModelFailed("broken")
    await gateway.step("a", 1, start=True)
    for _ in range(2):
        with pytest.raises(ModelFailed):
            await gateway.step("a", 666)
        with pytest.raises(ModelFailed):
            await gateway.step("a", 666, start=True)
    assert await gateway.step("a", 2) == [1, 2]


async def test_steps_after_a_failed_step_are_refused(gateway, lanes):
    lanes.fail[666] = ModelFailed("broken")
    await gateway.step("a", 1, start=True)
    lanes.gate = asyncio.Event()
    failing, behind = (asyncio.create_task(gateway.step("a", n)) for n in (666, 2))
    await turns()
    lanes.gate.set()
    with pytest.raises(ModelFailed):
        await failing
    with pytest.raises(SessionLost):
        await behind
    with pytest.raises(SessionLost):
        await gateway.step("a", 3)


async def test_a_request_that_is_refused_before_its_turn_has_not_come(gateway):
    await gateway.step("a", 1, start=True)
    with pytest.raises(SpecMismatch), SequenceTurn(gateway.sequences, "m", Steps((("a",),), (None,))) as turn:
        await turn.infer(gateway.lanes, gateway.held, [1, 2], 2, time.monotonic() + 5, 0)
    assert await gateway.step("a", 2) == [1, 2]


async def test_the_sequences_of_a_lost_lane_are_lost(gateway, lanes):
    await gateway.step("a", 1, start=True)
    gateway.held = held()
    with pytest.raises(SessionLost):
        await gateway.step("a", 2)
    assert await gateway.step("a", 3, start=True) == [3]


async def test_steps_that_overtook_each_other_are_computed_in_order(gateway):
    late = asyncio.create_task(gateway.ours({0: 1, 1: 1}, ["b", "B"]))
    await turns()
    assert await gateway.ours({0: 0, 1: 0}, ["a", "A"]) == [["a"], ["A"]]
    assert await late == [["a", "b"], ["A", "B"]]


@pytest.mark.parametrize("step", [0, 2, 3, 7])
async def test_a_step_comes_once(gateway, step):
    await gateway.ours({0: 0}, ["a"])
    await gateway.ours({0: 1}, ["b"])
    await gateway.ours({0: 2}, ["c"])
    if step == 0:
        assert await gateway.ours({0: 0}, ["x"]) == [["x"]]
    elif step == 3:
        assert await gateway.ours({0: 3}, ["x"]) == [["a", "b", "c", "x"]]
    else:
        with pytest.raises(SessionLost) as lost:
            await gateway.ours({0: step}, ["x"])
        assert lost.value.sessions == [0]


async def test_a_step_with_an_unknown_outcome_is_not_repeated(gateway, lanes):
    await gateway.ours({0: 0}, ["a"])
    lanes.gate = asyncio.Event()
    with pytest.raises(TimeoutError):
        await gateway.ours({0: 1}, ["b"], seconds=0.02)
    lanes.gate.set()
    with pytest.raises(SessionLost):
        await gateway.ours({0: 1}, ["b"])


async def test_of_several_sessions_the_lost_ones_are_named_and_nothing_is_computed(gateway):
    await gateway.ours({0: 0, 1: 0, 2: 0}, ["a", "b", "c"])
    with pytest.raises(SessionLost) as lost:
        await gateway.ours({0: 1, 1: 5, 2: 0}, ["x", "x", "x"])
    assert lost.value.sessions == [1]
    assert await gateway.ours({0: 1, 1: 0, 2: 1}, ["d", "e", "f"]) == [["a", "d"], ["e"], ["c", "f"]]


async def test_rows_that_failed_keep_their_step(gateway, lanes):
    await gateway.ours({0: 0, 1: 0}, ["a", "b"])
    lanes.fail["no"] = RowFailed("1 of 2 rows failed", None, {1: "no"}, None, 7)
    with pytest.raises(RowFailed):
        await gateway.ours({0: 1, 1: 1}, ["c", "no"])
    lanes.states[0], lanes.states[1] = ["a", "c"], ["b"]
    assert await gateway.ours({0: 2, 1: 1}, ["d", "e"]) == [["a", "c", "d"], ["b", "e"]]


async def test_clients_have_their_own_sessions_and_return_them(gateway):
    assert await gateway.ours({0: 0, 1: 0}, ["a", "b"], client="one") == [["a"], ["b"]]
    assert await gateway.ours({0: 0, 1: 0}, ["A", "B"], client="two") == [["A"], ["B"]]
    with pytest.raises(Busy):
        await gateway.ours({0: 0}, ["x"], client="three")
    gateway.sequences.over("m", "one")
    assert await gateway.ours({0: 0}, ["x"], client="three") == [["x"]]
    assert await gateway.ours({0: 1, 1: 1}, ["C", "D"], client="two") == [["A", "C"], ["B", "D"]]
    with pytest.raises(SessionLost):
        await gateway.ours({0: 1}, ["y"], client="one")


async def test_requests_that_share_sessions_in_any_order_do_not_wait_for_each_other_for_ever(gateway):
    await gateway.ours({0: 0, 1: 0, 2: 0}, ["", "", ""])
    orders = [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)]
    steps, asked = {0: 1, 1: 1, 2: 1}, []
    for order in orders:
        asked.append(asyncio.create_task(gateway.ours({slot: steps[slot] for slot in order}, ["x", "y"])))
        for slot in order:
            steps[slot] += 1
    answers = await asyncio.wait_for(asyncio.gather(*asked), 5)
    assert [len(state) for answer in answers for state in answer] == [2, 2, 3, 2, 3, 3, 4, 4, 4, 5, 5, 5]


async def test_a_lane_lost_in_flight_is_the_right_error(gateway, lanes):
    await gateway.step("a", 1, start=True)
    lanes.fail[2] = Refused("taken back", Code.STALE_LEASE)
    with pytest.raises(Refused):
        await gateway.step("a", 2)
    with pytest.raises(SessionLost):
        await gateway.step("a", 3)


async def test_of_sessions_that_the_engine_has_lost_the_others_may_repeat_the_step(gateway, lanes):
    await gateway.ours({0: 0, 1: 0, 2: 0}, ["a", "b", "c"])
    slot = next(slot for slot, state in lanes.states.items() if state == ["b"])
    lanes.fail["x"] = SessionLost("its engine ended", sessions=[slot])
    with pytest.raises(SessionLost) as lost:
        await gateway.ours({0: 1, 1: 1, 2: 1}, ["x", "x", "x"])
    assert lost.value.sessions == [1]
    with pytest.raises(SessionLost):
        await gateway.ours({1: 1}, ["y"])
    assert await gateway.ours({0: 1, 2: 1}, ["d", "f"]) == [["a", "d"], ["c", "f"]]


async def test_a_request_has_a_row_for_each_sequence_and_no_more_than_a_batch(lanes, clock):
    gateway = Gateway(lanes, clock, rows=16)
    assert len(await gateway.ours(dict.fromkeys(range(8), 0), "abcdefgh")) == 8
    with pytest.raises(SpecMismatch, match="9 rows came for 9 sequences: expected 1 row each, at most 8 in all"):
        await gateway.ours(dict.fromkeys(range(9), 0), "abcdefghi")
    with pytest.raises(SpecMismatch, match="1 rows came for 2 sequences"):
        await gateway.ours({0: 0, 1: 0}, "a")
    with SequenceTurn(gateway.sequences, "m", Steps((("s",),), (0,), False)) as turn:
        with pytest.raises(SpecMismatch, match="2 rows came for a sequence, which takes one row per request"):
            await turn.infer(lanes, gateway.held, "ab", 2, time.monotonic() + 5, 0)


@pytest.mark.parametrize(("state", "given"), [(GET, None), (SET, ["new"])])
async def test_a_state_is_read_or_replaced_in_the_order_of_the_steps(gateway, lanes, state, given):
    came = []

    async def exchange_state(held, slots, begin, inputs, seconds):
        came.append((slots, begin, inputs))
        return {"h": "its state"}

    lanes.exchange_state = exchange_state
    await gateway.step("a", 1, start=True)
    (slot,) = lanes.states
    with SequenceTurn(gateway.sequences, "m", Steps((("a",),), (None,), False)) as turn:
        answer = await turn.infer(lanes, gateway.held, ["new"], 1, time.monotonic() + 5, 0, state)
    assert (answer, came) == (({"h": "its state"}, 0), [([slot], [False], given)])
    assert await gateway.step("a", 2) == [1, 2]


async def test_a_connection_holds_no_more_sequences_than_its_share_and_others_have_theirs(lanes, clock):
    gateway = Gateway(lanes, clock, rows=7)
    gateway.sequences = Sequences(60.0, clock, 0.5)
    gateway.held.free.remove(6)  # the lane's own

    async def step(caller, name, **options):
        CALLER.set(caller)
        return await gateway.step(name, 0, **options)

    for name in (1, 2, 3):
        await asyncio.create_task(step("one", name, start=True))
    with pytest.raises(Busy, match="holds 3 sequences of model 'm', and asks for 1 more, expected at most 3 at once"):
        await asyncio.create_task(step("one", 4, start=True))
    await asyncio.create_task(step("two", 5, start=True))
    assert dict(gateway.held.callers) == {"one": 3, "two": 1}
    await asyncio.create_task(step("one", 1, end=True))
    await asyncio.create_task(step("one", 4, start=True))
    clock.now += 60  # of those that were idle none is held any more
    await asyncio.create_task(step("one", 6, start=True))
    assert dict(gateway.held.callers) == {"one": 1}


async def test_a_sequence_whose_answer_was_lost_goes_on_only_when_it_is_started_again(gateway):
    await gateway.step("a", 1, start=True)
    gateway.sequences.lose("m", "a")
    gateway.sequences.lose("m", "never began")
    for _ in range(2):
        with pytest.raises(SessionLost):
            await gateway.step("a", 2)
    assert await gateway.step("a", 3, start=True) == [3]


async def test_the_end_of_a_client_waits_for_its_steps_in_flight(gateway, lanes):
    lanes.gate = asyncio.Event()
    asked = asyncio.create_task(gateway.ours({0: 0}, ["a"], client="one"))
    await turns()
    gateway.sequences.over("m", "one")
    assert len(gateway.held.free) == 3, "nobody else gets the row that is written to"
    lanes.gate.set()
    assert await asked == [["a"]]
