"""The gateway's coalescer over a lane that does what it should not: every caller gets an answer in time."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.clocks import Clock, given
from tests.loops import turns

from jurybox.client import Busy, Error, ModelFailed, RowFailed, ServerGone, SessionLost, SpecMismatch, Timeout
from jurybox.client.ticket import Reply
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, Refused
from jurybox.server.frontend import coalescer as coalescer_module
from jurybox.server.frontend.coalescer import RequestCoalescer
from jurybox.server.frontend.lanes import SharedLane
from jurybox.server.frontend.returns import Returns
from jurybox.server.gateway.inference.forms import Form
from jurybox.server.gateway.inference.requests import InferRequest, Input
from jurybox.server.security.access import ClientConnection
from jurybox.server.security.pace import Breaks, WorkPace

SPEC = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))})
ROW = {"x": np.ones((1, 2), np.float32)}


class Lane:
    """A model with a scripted lane: each item is raised, never answered (None) or answered (True)."""

    name, spec, max_batch = "m", SPEC, 8
    free = 8
    requests = SimpleNamespace(lane=SimpleNamespace(engines=1))

    def __init__(self, *behaviour: Any, look: Exception | None = None) -> None:
        self.behaviour = list(behaviour)
        self.looks = look
        self.tickets = 0
        self.closed = False

    async def infer_async(self, inputs, *, timeout, version):
        self.tickets += 1
        does = self.behaviour.pop(0) if self.behaviour else True
        if isinstance(does, BaseException):
            raise does
        if does is None:
            await asyncio.Event().wait()
        return Reply(inputs["x"] * 2, 7)

    async def infer_reply_async(self, inputs, *, timeout, version):
        return await self.infer_async(inputs, timeout=timeout, version=version)

    def room(self):
        return self.free

    def look(self):
        if self.looks is not None:
            raise self.looks

    def close(self):
        self.closed = True


def coalescer(lane):
    events = []
    return RequestCoalescer(lane, 8, lambda: events.append("broken"), lambda: events.append("idle")), events


UNREADABLE = UnicodeDecodeError("utf-8", b"\xc3", 0, 1, "unexpected end of data")


@pytest.mark.parametrize("wrong", [UNREADABLE, KeyError("x"), MemoryError(), RecursionError(), ValueError("\ud800")])
async def test_every_exception_of_a_lane_is_raised_to_its_callers_at_once(wrong):
    together, events = coalescer(Lane(wrong))
    with pytest.raises(ModelFailed, match="could not be read") as caught:
        await together.ask(ROW, 1, 60.0, 0)  # not Timeout: the caller is told at once
    str(caught.value).encode()
    await turns()
    assert events == ["broken", "idle"]
    assert (await together.ask(ROW, 1, 60.0, 0))[1] == 7  # and later requests are answered


async def test_each_engine_gets_a_ticket_before_others_wait():
    lane = Lane(None, None)
    together = RequestCoalescer(lane, 8, engines=2)
    asking = []
    for _ in range(4):
        asking.append(asyncio.create_task(together.ask(ROW, 1, 60.0, 0)))
        await turns()
    assert lane.tickets == 2, "requests that arrive while both engines compute wait for them"
    for one in asking:
        one.cancel()


class Scattered(Lane):
    """Few rows are free; larger requests are sent in pieces, with growing versions. One output is the version."""

    free = 2

    async def infer_reply_async(self, inputs, *, timeout, version):
        await asyncio.sleep(0.01)
        rows = inputs["x"]
        versions = [self.tickets + 1 + at // self.free for at in range(len(rows))]
        self.tickets = versions[-1]
        return Reply(rows * np.array(versions, np.float32)[:, None], versions[0])


async def test_no_request_gets_the_version_of_another_ones_rows():
    together, _ = coalescer(Scattered())
    answers = await asyncio.gather(*(together.ask(ROW, 1, 20.0, 0) for _ in range(7)))
    for outputs, version in answers:
        np.testing.assert_array_equal(outputs["y"], version * ROW["x"])


async def test_of_coalesced_requests_only_the_failing_one_gets_an_error():
    together, _ = coalescer(Lane(UNREADABLE, True, UNREADABLE, True))
    answers = await asyncio.gather(*(together.ask(ROW, 1, 60.0, 0) for _ in range(3)), return_exceptions=True)
    assert [isinstance(answer, ModelFailed) for answer in answers] == [False, True, False]


async def test_of_coalesced_requests_only_the_one_that_does_not_fit_gets_an_error():
    """As where the model was loaded anew, with another spec, while they waited."""
    together, events = coalescer(Lane(SpecMismatch("has changed"), True, SpecMismatch("has changed"), True))
    answers = await asyncio.gather(*(together.ask(ROW, 1, 60.0, 0) for _ in range(3)), return_exceptions=True)
    assert [isinstance(answer, SpecMismatch) for answer in answers] == [False, True, False]
    assert "broken" not in events


async def test_of_coalesced_requests_only_those_with_failed_rows_get_errors():
    failed = RowFailed(
        "2 rows failed", None, {1: "no", 4: "nor this"}, np.arange(10, dtype=np.float32).reshape(5, 2), 9
    )
    together, _ = coalescer(Lane(failed))
    two = {"x": np.ones((2, 2), np.float32)}
    requests = [together.ask(rows, n, 60.0, 0) for rows, n in ((two, 2), (two, 2), (ROW, 1))]
    first, second, third = await asyncio.gather(*requests, return_exceptions=True)
    assert (first.errors, first.outputs.tolist(), first.version) == ({1: "no"}, [[0, 1], [2, 3]], 9)
    np.testing.assert_array_equal(second[0]["y"], [[4, 5], [6, 7]])
    assert third.errors == {0: "nor this"} and "row 0: nor this" in str(third)


async def test_rows_that_differ_in_size_go_together():
    """Which they could not as one array."""
    came = []

    class Ragged(Lane):
        spec = ModelSpec("m", {"x": TensorSpec("uint8", (-1,), capacity=9)}, {"y": TensorSpec("bytes", capacity=9)})

        async def infer_reply_async(self, inputs, *, timeout, version):
            came.append([len(row) for row in inputs["x"]])
            return Reply([bytes(row) for row in inputs["x"]], 7)

    together, _ = coalescer(Ragged())
    rows = [[np.full(n, n, np.uint8)] for n in (3, 1, 2)]
    answers = await asyncio.gather(*(together.ask({"x": row}, 1, 60.0, 0) for row in rows))
    assert [answer[0]["y"] for answer in answers] == [[b"\3\3\3"], [b"\1"], [b"\2\2"]]
    assert came == [[3, 1, 2]]


async def test_anothers_unreadable_answer_does_not_affect_the_present_request():
    lane = Lane(None, look=UNREADABLE)
    together, events = coalescer(lane)
    first = asyncio.create_task(together.ask(ROW, 1, 60.0, 0))
    await turns()
    second = asyncio.create_task(together.ask(ROW, 1, 60.0, 0))
    for one in (first, second):  # both are repeated on another lane, as the code requires
        with pytest.raises(Refused) as caught:
            await asyncio.wait_for(one, 30)
        assert caught.value.code == Code.STALE_LEASE
    assert events[0] == "broken"


async def test_a_time_out_names_its_seconds_whoever_notices_it_first():
    class Overslept(Lane):
        async def infer_async(self, inputs, *, timeout, version):
            time.sleep(timeout + 0.01)  # noqa: ASYNC251  the loop cannot run the request's timer meanwhile
            raise Timeout("the ticket is at engine 0")

    together, _ = coalescer(Overslept())
    with pytest.raises(Timeout, match=r"within 0\.050 s: the ticket is at engine 0"):
        await together.ask(ROW, 1, 0.05, 0)


async def test_a_ticket_that_never_ends_is_cancelled_and_blocks_no_other(monkeypatch):
    monkeypatch.setattr("jurybox.server.frontend.coalescer.OVERDUE", 0.05)
    monkeypatch.setattr("jurybox.server.frontend.waiting_rows.OVERDUE", 0.05)
    together, events = coalescer(Lane(None))
    with pytest.raises(Timeout):
        await together.ask(ROW, 1, 0.05, 0)
    with pytest.raises(Refused) as caught:  # requests that wait behind it are repeated on another lane
        await asyncio.wait_for(together.ask(ROW, 1, 60.0, 0), 30)
    assert (caught.value.code, events[0]) == (Code.STALE_LEASE, "broken")
    assert (await asyncio.wait_for(together.ask(ROW, 1, 60.0, 0), 30))[1] == 7


async def test_a_lost_answer_is_requested_again(monkeypatch):
    """What the event loop's exception handler does: the request of the answer is unknown."""
    monkeypatch.setattr("jurybox.server.frontend.coalescer._DOUBT", 0.05)
    together, events = coalescer(Lane(None))
    asking = asyncio.create_task(together.ask(ROW, 1, 60.0, 0))
    await turns()
    together.doubt()
    with pytest.raises(Refused) as caught:
        await asyncio.wait_for(asking, 30)
    await turns()
    assert (caught.value.code, events) == (Code.STALE_LEASE, ["broken", "idle"])


OVER = [Busy("no rows"), ServerGone("gone"), Refused("taken back", Code.STALE_LEASE)]


@pytest.mark.parametrize("error", OVER, ids=["busy", "gone", "stale"])
async def test_a_revoked_lane_is_given_up_and_its_error_raised(error):
    together, events = coalescer(Lane(error))
    with pytest.raises(type(error), match=str(error)):
        await together.ask(ROW, 1, 60.0, 0)
    assert "broken" in events


async def test_an_error_of_one_request_does_not_give_up_the_lane():
    together, events = coalescer(Lane(Timeout("late"), ModelFailed("no")))
    for expected in (Timeout, ModelFailed):
        with pytest.raises(expected):
            await together.ask(ROW, 1, 60.0, 0)
        await turns()
    assert events == ["idle", "idle"]


async def test_a_cancelled_caller_leaves_the_others_theirs():
    together, _ = coalescer(Lane())
    tasks = [asyncio.create_task(together.ask(ROW, 1, 60.0, 0)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[1], asyncio.CancelledError)
    np.testing.assert_array_equal(answers[0][0]["y"], 2 * ROW["x"])
    np.testing.assert_array_equal(answers[2][0]["y"], 2 * ROW["x"])


async def test_a_lane_given_up_is_closed_when_its_last_ticket_has_ended():
    gate = asyncio.Event()

    class Slow(Lane):
        async def infer_async(self, inputs, *, timeout, version):
            await gate.wait()
            return Reply(inputs["x"], 1)

    let_go = []
    lanes = SimpleNamespace(retire=lambda held: None, let_go=let_go.append, pace=WorkPace())
    held = SharedLane(Slow(), 8, makeshift=False, lanes=lanes, key=("slow", 2))
    asking = asyncio.create_task(held.coalescer.ask(ROW, 1, 60.0, 0))
    await turns()
    held.coalescer.give_up(Refused("over", Code.STALE_LEASE))
    with pytest.raises(Error):
        await asking
    assert held.coalescer.busy
    assert not let_go
    gate.set()
    await turns()
    assert not held.coalescer.busy
    assert let_go == [held]


@pytest.mark.parametrize(("values", "others"), [(1 << 18, True), (1 << 18, False), (1, True)])
async def test_a_ticket_with_large_answers_leaves_time_to_other_lanes(monkeypatch, values, others):
    class Wide(Lane):
        async def infer_reply_async(self, inputs, *, timeout, version):
            return Reply(np.zeros((len(inputs["x"]), values), np.float32), 1)

    rests, other = [], Wide(None, None)

    class Noted(WorkPace):
        def rest(self, who, owed, since=None):
            if others and since is None:
                self.heard(other)  # however long this test is kept from the core
            seconds = super().rest(who, owed, since)
            if since is None:
                rests.append(seconds)
            return 10 * seconds

    pace = Noted()
    lane = Wide(None, None)
    together = RequestCoalescer(lane, 8, pace=pace)
    await together.ask(ROW, 1, 60.0, 0)
    await together.ask(ROW, 1, 60.0, 0)  # which comes after the rest, and is answered
    await turns()
    assert len(rests) == (2 if values > 1 else 0)
    assert all((rest > 0) == others for rest in rests)


async def test_the_engines_time_and_the_loops_are_told_apart(monkeypatch):
    computed, began = [], []

    class Wide(Lane):
        async def infer_reply_async(self, inputs, *, timeout, version):
            await asyncio.sleep(0.01)
            computed.append(time.monotonic())
            return Reply(np.zeros((len(inputs["x"]), 1 << 18), np.float32), 1)

    monkeypatch.setattr(Breaks, "after", lambda self, sent, came: began.append((sent, came)))
    await RequestCoalescer(Wide(None, None), 8).ask(ROW, 1, 60.0, 0)
    ((sent, came),) = began
    assert came >= computed[0] > sent


class Summing:
    """Sessions of a model that adds up its inputs; a negative number fails, sessions in `lost` are lost."""

    version = 7

    def __init__(self) -> None:
        self.totals: dict[int, Any] = {}
        self.lost: set[int] = set()
        self.tickets: list[list[int]] = []

    async def infer_async(self, inputs: Any, session: Any, reset: Any, *, timeout: float, version: Any) -> Any:
        assert len(set(session)) == len(session)
        self.tickets.append(list(session))
        await asyncio.sleep(0.001)
        if gone := [number for number in session if number in self.lost]:
            raise SessionLost("lost", sessions=gone)
        if (inputs["x"] < 0).any():
            raise ModelFailed("negative")
        for number, begins, row in zip(session, reset, inputs["x"], strict=True):
            self.totals[number] = row + (0 if begins else self.totals[number])
        return np.stack([self.totals[number] for number in session])


async def test_rows_of_many_sessions_share_tickets_and_each_gets_its_own_answer():
    sessions = Summing()
    together = RequestCoalescer(Lane(), 8, sessions=sessions)

    def ask(value, *numbers, begins=False):
        rows = {"x": np.full((len(numbers), 2), value, np.float32)}
        return together.ask(rows, len(numbers), 20.0, 0, dict.fromkeys(numbers, begins))

    await asyncio.gather(*(ask(n, n, begins=True) for n in range(8)))
    assert sessions.tickets == [list(range(8))]
    sessions.lost = {1, 6}
    requests = [ask(10, 0), ask(10, 1), ask(-1, 2), ask(10, 3), ask(10, 5, 6), ask(10, 7)]
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert [float(answers[i][0]["y"][0, 0]) for i in (0, 3, 5)] == [10, 13, 17]
    assert (answers[1].sessions, answers[4].sessions) == ([1], [6])
    assert isinstance(answers[2], ModelFailed) and sessions.totals[5][0] == 5
    sessions.lost.clear()
    again = await asyncio.gather(*(ask(100, 3) for _ in range(3)))  # the second needs the first one's answer
    assert [float(outputs["y"][0, 0]) for outputs, _ in again] == [113, 213, 313]


class Line:
    """A connection that sends one request after another, as with HTTP."""

    connection = None

    def __init__(self):
        self.sent = []

    def done(self):
        return False

    def reply(self, pieces):
        self.sent.append(b"".join(pieces))

    def fail(self, error):
        self.sent.append(error.code)


class SlowOnce(Lane):
    """The first answer comes when it may."""

    def __init__(self):
        super().__init__()
        self.may = asyncio.Event()

    async def infer_reply_async(self, inputs, *, timeout, version):
        self.tickets += 1
        if self.tickets == 1:
            await self.may.wait()
        return Reply(inputs["x"] * 2, 7)


async def arrived(line, n):
    for _ in range(6000):
        if len(line.sent) >= n:
            break
        await asyncio.sleep(0.005)
    await turns()


async def test_a_late_answer_is_no_answer_to_the_connections_next_request():
    lane = SlowOnce()
    together, _ = coalescer(lane)
    oip = SimpleNamespace(frontend=SimpleNamespace(record_outcome=lambda *_: None))
    held = SimpleNamespace(spec=SPEC, coalescer=together)
    request = InferRequest("m", "", "", [Input("x", "FP32", (1, 2), None, True, {})], [], {}, None)
    form = Form(oip, held, request, 1, ["y"], lambda *_: [b""])
    line = Line()
    form.ask(ROW, 0.05, line)
    await arrived(line, 1)
    assert line.sent == [Code.TIMEOUT]
    form.ask({"x": ROW["x"] * 3}, 60.0, line)
    lane.may.set()
    await arrived(line, 2)
    assert line.sent == [Code.TIMEOUT, np.full(2, 6, np.float32).tobytes()]


class Brief(Lane):
    """A lane that answers within the time that the loop may block for it, unless scripted otherwise (None)."""

    def __init__(self, *behaviour):
        super().__init__(*behaviour)
        self.blocked = []

    def submit_parts(self, parts, deadline, version, brief):
        self.tickets += 1
        self.blocked.append(brief > 0)
        outputs = {"y": np.concatenate([arrays["x"] for arrays, _ in parts]) * 2}
        late = brief > 0 and self.behaviour and self.behaviour.pop(0) is None
        return (outputs, 7) if brief and not late else Later(outputs)


class Later:
    """A ticket that is answered when the loop turns."""

    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs

    def watched(self, loop, waiter, *, again):
        loop.call_soon(waiter.set_result, None)
        return False

    def seen(self) -> Any:
        return self.outputs, 7

    def give_up(self):
        pass


async def answered_in_place(together, client):
    """Ask for one row; return whether it was answered before the loop turned."""
    answer = asyncio.get_running_loop().create_future()
    put = together.put(ROW, 1, 60.0, 0, answer, None, client)
    at_once = answer.done()
    outputs, version = await answer
    put.over()
    assert (outputs["y"] == 2).all() and version == 7
    return at_once


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets: what a ticket takes decides whether the loop blocks, and a loaded machine is slow."""
    return given(Clock(0.0), monkeypatch, coalescer_module)


async def test_the_loop_blocks_for_the_answers_of_a_lone_client(clock):
    lane = Brief()
    together, events = coalescer(lane)
    client = ClientConnection(("192.0.2.7", 4000))
    assert [await answered_in_place(together, client) for _ in range(10)] == [False] * 5 + [True] * 5
    assert lane.blocked == [False] * 5 + [True] * 5
    assert not await answered_in_place(together, ClientConnection(("192.0.2.7", 4001)))
    assert not together.busy and events == ["idle"] * 11


async def test_a_loop_that_blocked_in_vain_does_not_block_for_some_time(clock):
    lane = Brief(None, True)
    together, _ = coalescer(lane)
    client = ClientConnection(("192.0.2.7", 4000))
    for _ in range(5 + 1 + 16 + 2):
        await answered_in_place(together, client)
    assert lane.blocked == [False] * 5 + [True] + [False] * 16 + [True] * 2


async def test_the_loop_does_not_block_for_a_slow_model(clock):
    lane = Brief()
    together, _ = coalescer(lane)
    client = ClientConnection(("192.0.2.7", 4000))
    for _ in range(20):
        answer = asyncio.get_running_loop().create_future()
        put = together.put(ROW, 1, 60.0, 0, answer, None, client)
        await asyncio.sleep(0)
        clock.now += 0.001
        await answer
        put.over()
    assert not any(lane.blocked)


async def test_a_request_whose_caller_is_gone_keeps_neither_rows_nor_a_timer():
    together, _ = coalescer(Lane(None))
    running = asyncio.create_task(together.ask(ROW, 1, 60.0, 0))  # never answered: all others wait for it
    await asyncio.sleep(0.01)
    asked, rows = [], []
    for _ in range(400):
        inputs = {"x": np.ones((1, 2), np.float32)}
        rows.append(weakref.ref(inputs["x"]))
        asked.append(asyncio.create_task(together.ask(inputs, 1, 60.0, 0)))
        del inputs
    await asyncio.sleep(0.01)
    assert len(together._waiting) == 400 and all(one() is not None for one in rows)
    for one in asked[:399]:
        one.cancel()
    del one
    await asyncio.wait(asked[:399])
    del asked[:399]  # their exceptions know the arguments
    gc.collect()
    assert [one() is not None for one in rows] == [False] * 399 + [True]
    assert len(together._waiting) <= 65
    running.cancel()
    asked[0].cancel()


async def test_a_ticket_that_was_cancelled_fails_its_callers_and_no_later_request():
    together, events = coalescer(Lane(asyncio.CancelledError()))
    with pytest.raises(Refused, match="the ticket of model 'm' was given up") as caught:
        await together.ask(ROW, 1, 60.0, 0)
    assert caught.value.code == Code.STALE_LEASE
    await turns()
    assert not together.busy and events == ["idle"]
    assert (await together.ask(ROW, 1, 60.0, 0))[1] == 7


async def test_a_receiver_that_fails_costs_the_others_of_its_ticket_nothing():
    class Failing:
        """A receiver that cannot take its answer."""

        def done(self):
            return False

        def set_result(self, answer):
            raise ValueError("no room")

        def set_exception(self, error):
            self.error = error

    together, events = coalescer(Brief())
    failing, answer = Failing(), asyncio.get_running_loop().create_future()
    puts = [together.put(ROW, 1, 60.0, 0, one) for one in (failing, answer)]
    np.testing.assert_array_equal((await answer)[0]["y"], 2 * ROW["x"])
    for put in puts:
        put.over()
    assert isinstance(failing.error, ModelFailed) and "no room" in str(failing.error)
    assert events == ["idle"]


async def test_a_ticket_that_waits_for_a_client_is_sent_when_that_client_leaves():
    class Waiting(Returns):
        def wait(self, waiting, computing=0):
            return 60.0 if self.awaited else 0.0

        def left(self, client):
            self.awaited.remove(client)

    returns = Waiting()
    returns.awaited = ["gone"]
    lane = Lane()
    together = RequestCoalescer(lane, 8, lambda: None, lambda: None, returns=returns)
    asking = asyncio.create_task(together.ask(ROW, 1, 60.0, 0, None, "here"))
    await turns()
    assert lane.tickets == 0
    together.left("gone")
    assert (await asking)[1] == 7


async def test_rows_for_another_weights_version_or_beyond_the_free_rows_go_in_the_next_ticket():
    went = []

    class Noting(Lane):
        free = 3

        async def infer_reply_async(self, inputs, *, timeout, version):
            went.append((len(inputs["x"]), version))
            return await super().infer_reply_async(inputs, timeout=timeout, version=version)

    lane = Noting()
    together, _ = coalescer(lane)
    two = {"x": np.ones((2, 2), np.float32)}
    await asyncio.gather(
        *(together.ask(two if n == 2 else ROW, n, 60.0, v) for n, v in ((1, 0), (2, 0), (1, 0), (1, 4)))
    )
    assert went == [(3, None), (1, None), (1, 4)]
