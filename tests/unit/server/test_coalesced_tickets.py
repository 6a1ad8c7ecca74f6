"""Which requests share a ticket of the gateway, when it is sent, and what the rules of waiting are told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tests.loops import turns
from tests.unit.server.test_coalescer import ROW, Lane, Later, Summing

from jurybox.client import Busy, ModelFailed, RowFailed, SessionLost, SpecMismatch, Timeout
from jurybox.client.ticket import Reply
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, Refused
from jurybox.server.frontend.coalescer import RequestCoalescer, _size
from jurybox.server.frontend.returns import Returns
from jurybox.server.security.pace import HEAVY, Breaks, WorkPace


class Gated(Lane):
    """A lane that answers, or raises, when it may; it notes the rows, the seconds and the version of each ticket."""

    def __init__(self, *errors: Exception | None) -> None:
        super().__init__()
        self.may = asyncio.Event()
        self.may.set()
        self.errors = list(errors)
        self.asked: list[tuple[int, float, int | None]] = []
        self.looked = 0

    async def infer_reply_async(self, inputs: Any, *, timeout: float, version: int | None) -> Reply:
        self.asked.append((len(inputs["x"]), timeout, version))
        await self.may.wait()
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        return Reply(inputs["x"] * 2, 7)

    @property
    def rows(self) -> list[int]:
        return [rows for rows, _, _ in self.asked]

    def look(self) -> None:
        self.looked += 1


class Direct(Gated):
    """A lane whose tickets need no task; they are answered at once, or when the loop turns."""

    def __init__(self, *, at_once: bool = False, error: Exception | None = None) -> None:
        super().__init__()
        self.at_once, self.error = at_once, error
        self.submitted: list[tuple[int, int, int]] = []
        self.given_up = 0

    def submit_parts(self, parts: Sequence[Any], deadline: int, version: int, brief: float) -> Any:
        self.submitted.append((sum(n for _, n in parts), deadline, version))
        outputs = {"y": np.concatenate([arrays["x"] for arrays, _ in parts]) * 2}
        return (outputs, 7) if self.at_once else Noted(self, outputs)


class Noted(Later):
    """A ticket that notes that its rows are free again."""

    def __init__(self, lane: Direct, outputs: Any) -> None:
        super().__init__(outputs)
        self.lane = lane

    def seen(self) -> Any:
        if self.lane.error is not None:
            raise self.lane.error
        return super().seen()

    def give_up(self) -> None:
        self.lane.given_up += 1

    async def result_async(self, timeout: float) -> Reply:
        if isinstance(self.lane.error, ModelFailed):
            raise self.lane.error
        return Reply(self.outputs["y"], 7)


class Told(Returns):
    """A rule that a test sets, and that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.keep = self.alone = self.sends_ahead = False
        self.pause = 0.0
        self.tickets: list[tuple[int, float]] = []
        self.waits: list[int] = []
        self.asked: list[tuple[int, int]] = []
        self.ended: list[Any] = []

    def arrived(self, client: Any, seconds: float, waiting: int) -> bool:
        return self.keep

    def answered(self, client: Any) -> None:
        self.ended.append(client)

    def went(self, waits: Callable[[], Sequence[float]]) -> None:
        assert all(seconds >= 0 for seconds in waits())
        self.waits.append(len(waits()))

    def took(self, rows: int, seconds: float) -> None:
        self.tickets.append((rows, seconds))

    def wait(self, waiting: int, computing: int = 0) -> float:
        self.asked.append((waiting, computing))
        return self.pause


def together(lane: Any, returns: Returns | None = None, most: int = 8, **options: Any) -> RequestCoalescer:
    return RequestCoalescer(lane, most, returns=returns or Told(), **options)


def rows_of(n: int, value: float = 1) -> Any:
    return {"x": np.full((n, 2), value, np.float32)}


def asking(one: RequestCoalescer, n: int = 1, seconds: float = 60.0, version: int = 0, **more: Any) -> Any:
    return asyncio.ensure_future(one.ask(rows_of(n), n, seconds, version, **more))


async def answered(*requests: Any) -> None:
    for outputs, version in await asyncio.wait_for(asyncio.gather(*requests), 30):
        assert (outputs["y"] == 2).all() and version == 7


async def test_sessions_and_rows_that_differ_in_size_go_with_a_task() -> None:
    sessions, direct = Summing(), Direct()
    one = together(direct, sessions=sessions)
    assert (await one.ask(ROW, 1, 60.0, 0, {3: True}))[1] == 7
    assert not direct.submitted and sessions.tickets == [[3]]

    class Ragged(Direct):
        spec = ModelSpec("m", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("bytes", capacity=9)})

    ragged = Ragged()
    assert (await together(ragged).ask(ROW, 1, 60.0, 0))[1] == 7
    assert not ragged.submitted and ragged.rows == [1]


async def test_a_coalescer_is_busy_while_a_request_waits_or_is_in_flight() -> None:
    lane, returns = Gated(), Told()
    one = together(lane, returns)
    lane.may.clear()
    assert [one.busy] == [False]
    first = asking(one)
    await turns()
    assert [one.busy, len(one._waiting)] == [True, 0]
    lane.may.set()
    await answered(first)
    await turns()
    assert [one.busy] == [False]
    returns.pause = 60.0
    second = asking(one)
    await turns()
    assert [one.busy, len(one._in_flight)] == [True, 0]
    second.cancel()


async def test_every_request_is_heard_by_the_pace_of_the_lanes() -> None:
    heard: list[Any] = []

    class Hearing(WorkPace):
        def heard(self, who: Any) -> None:
            heard.append(who)

    one = together(Gated(), pace=Hearing())
    await answered(asking(one), asking(one))
    assert heard == [one._breaks] * 2


async def test_a_request_that_need_not_keep_waiting_is_sent_although_the_rule_waits() -> None:
    returns = Told()
    returns.keep = True
    lane = Gated()
    await answered(asking(together(lane, returns)))
    assert lane.rows == [1]


async def test_answers_are_looked_for_at_a_request_while_others_are_in_flight() -> None:
    lane = Gated()
    one = together(lane)
    lane.may.clear()
    first = asking(one)
    await turns()
    assert lane.looked == 0
    second = asking(one)
    await turns()
    assert lane.looked == 1
    lane.may.set()
    await answered(first, second)


async def test_a_ticket_goes_on_for_those_whose_time_is_not_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jurybox.server.frontend.coalescer.OVERDUE", 0.001)
    lane = Gated()
    expired: list[int] = []
    one = together(lane, expired=lambda: expired.append(1))
    lane.may.clear()
    late, patient = asking(one, seconds=0.01), asking(one)
    with pytest.raises(Timeout, match=r"within 0\.010 s"):
        await asyncio.wait_for(late, 30)
    await asyncio.sleep(0.02)
    lane.may.set()
    await answered(patient)
    assert expired == [1] and lane.rows == [2]
    assert 30 < lane.asked[0][1] <= 60, "a ticket has the time of its most patient request"


async def test_a_ticket_of_a_request_that_was_answered_meanwhile_is_not_refused_again() -> None:
    lane = Gated(ModelFailed("no"))
    one = together(lane)
    lane.may.clear()
    late = asking(one, seconds=0.01)
    with pytest.raises(Timeout):
        await asyncio.wait_for(late, 30)
    lane.may.set()
    await turns()
    assert not one.busy


async def test_a_request_that_was_answered_just_before_its_deadline_is_not_counted_as_late() -> None:
    expired: list[int] = []
    one = together(Gated(), expired=lambda: expired.append(1))
    answer = asyncio.get_running_loop().create_future()
    put = one.put(ROW, 1, 60.0, 0, answer)
    assert (await asyncio.wait_for(answer, 30))[1] == 7
    one._expire(put._request)
    put.over()
    assert not expired


@pytest.mark.parametrize(("ahead", "waiting", "sent"), [(True, 2, [1, 2]), (True, 1, [1]), (False, 2, [1])])
async def test_one_full_ticket_is_sent_ahead_if_the_rule_says_so(ahead: bool, waiting: int, sent: list[int]) -> None:
    lane, returns = Gated(), Told()
    returns.sends_ahead = ahead
    one = together(lane, returns, most=2)
    lane.may.clear()
    requests = [asking(one)]
    await turns()
    requests += [asking(one) for _ in range(waiting)]
    await turns()
    assert lane.rows == sent
    requests += [asking(one) for _ in range(2)]
    await turns()
    assert len(lane.rows) == 1 + ahead, "no more than one"
    lane.may.set()
    await answered(*requests)


async def test_nothing_is_sent_during_a_rest_and_all_that_came_goes_after_it() -> None:
    lane = Gated()
    one = together(lane)
    one._breaks.resting = True
    requests = [asking(one), asking(one)]
    await turns()
    assert not lane.rows
    one._breaks._over()
    await answered(*requests)
    assert lane.rows == [2]


async def test_a_rest_that_ends_before_the_loop_has_turned_divides_no_ticket() -> None:
    lane = Gated()
    one = together(lane)
    requests = [asking(one), asking(one)]
    await asyncio.sleep(0)
    requests.append(asking(one))
    one._breaks._over()
    await answered(*requests)
    assert sum(lane.rows) == 3 and lane.rows[0] >= 2


async def test_a_full_ticket_does_not_wait_and_the_rule_is_told_how_many_wait_and_are_computed() -> None:
    lane, returns = Gated(), Told()
    one = together(lane, returns, most=3, engines=2)
    lane.may.clear()
    first = [asking(one), asking(one)]
    await turns()
    assert returns.asked == [(2, 0)] and returns.waits == [2]
    returns.pause = 60.0
    second = [asking(one)]
    await turns()
    assert returns.asked[1:] == [(1, 2)] and lane.rows == [2]
    second += [asking(one), asking(one)]
    await turns()
    assert lane.rows == [2, 3] and returns.waits == [2, 3] and one._gathered is None
    lane.may.set()
    await answered(*first, *second)
    assert [rows for rows, _ in returns.tickets] == [2, 3] and returns.ended == [None] * 5


async def test_a_lane_is_idle_when_all_that_waited_have_given_up() -> None:
    lane, idle = Gated(), list[int]()
    one = together(lane, idle=lambda: idle.append(1))
    request = asking(one)
    await asyncio.sleep(0)
    request.cancel()
    await turns()
    assert idle == [1] and not lane.rows and not one.busy


async def test_a_request_whose_caller_gave_up_is_not_computed() -> None:
    lane = Gated()
    one = together(lane)
    lane.may.clear()
    first = asking(one)
    await turns()
    late, kept = asking(one, n=2, seconds=0.001), asking(one)
    with pytest.raises(Timeout):
        await asyncio.wait_for(late, 30)
    lane.may.set()
    await answered(first, kept)
    assert lane.rows == [1, 1]


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_ticket_without_a_task_has_the_version_and_the_time_of_its_requests(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, returns = Direct(at_once=at_once), Told()
    monkeypatch.setattr(Told, "may_block", lambda *_: at_once)
    one = together(lane, returns)
    if at_once:
        returns.alone = True
        await answered(asking(one, version=7, client="a"))
        assert [(rows, version) for rows, _, version in lane.submitted] == [(1, 7)] and not lane.given_up
    else:
        await answered(asking(one, version=7, seconds=1000.0, client="a"), asking(one, version=7, client="b"))
        assert [(rows, version) for rows, _, version in lane.submitted] == [(2, 7)] and lane.given_up == 1
        loop_now = asyncio.get_running_loop().time()
        assert lane.submitted[0][1] > (loop_now + 500) * 1e9
    assert [rows for rows, _ in returns.tickets] == [sum(rows for rows, _, _ in lane.submitted)]
    assert all(0 <= seconds < 1000 for _, seconds in returns.tickets)
    assert returns.ended == ["a", "b"][: lane.submitted[0][0]]


async def test_a_ticket_that_cannot_be_sent_in_place_goes_with_a_task() -> None:
    class Unable(Direct):
        def submit_parts(self, parts: Sequence[Any], deadline: int, version: int, brief: float) -> Any:
            self.submitted.append((len(parts), deadline, version))

    lane, returns = Unable(), Told()
    await answered(asking(together(lane, returns), n=2))
    assert len(lane.submitted) == 1 and lane.rows == [2] and [rows for rows, _ in returns.tickets] == [2]


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_caller_keeps_its_outputs_when_later_tickets_overwrite_the_rows(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.zeros((3, 2), np.float32)

    class Reused(Direct):
        def submit_parts(self, parts: Sequence[Any], deadline: int, version: int, brief: float) -> Any:
            rows[:] = [[10 * arrays["x"][0, 0] + row] * 2 for arrays, n in parts for row in range(n)]
            return ({"y": rows}, 7) if self.at_once else Noted(self, {"y": rows})

    one = together(Reused(at_once=at_once))
    (first, _), (second, _) = await asyncio.gather(
        one.ask(rows_of(1, 1), 1, 60.0, 0), one.ask(rows_of(2, 2), 2, 60.0, 0)
    )
    rows[:] = -1
    assert (first["y"][:, 0].tolist(), second["y"][:, 0].tolist()) == ([10], [20, 21])


async def test_requests_that_wait_for_a_ticket_without_a_task_go_when_it_is_answered() -> None:
    lane = Direct()
    one = together(lane)
    first = asking(one)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asking(one)
    await answered(first, second)
    assert [rows for rows, _, _ in lane.submitted] == [1, 1] and lane.given_up == 2


async def test_the_error_of_a_ticket_without_a_task_is_raised_and_recorded_once() -> None:
    lane, returns = Direct(error=ModelFailed("no")), Told()
    with pytest.raises(ModelFailed, match="no"):
        await asyncio.wait_for(asking(together(lane, returns), client="a"), 30)
    assert [rows for rows, _ in returns.tickets] == [1] and returns.ended == ["a"]


async def test_a_ticket_that_cannot_be_read_in_place_is_read_otherwise_and_recorded_once() -> None:
    lane, returns = Direct(error=ValueError("not here")), Told()
    await answered(asking(together(lane, returns)))
    assert [rows for rows, _ in returns.tickets] == [1]


async def test_a_ticket_holds_up_to_its_most_rows_and_no_more() -> None:
    lane = Gated()
    one = together(lane, most=4)
    lane.may.clear()
    requests = [asking(one)]
    await turns()
    requests += [asking(one, n) for n in (2, 2, 1)]
    lane.may.set()
    await answered(*requests)
    assert lane.rows == [1, 4, 1]


@pytest.mark.parametrize("version", [0, 5])
async def test_sessions_are_computed_by_the_version_that_was_asked_for(version: int) -> None:
    asked: list[Any] = []

    class Noting(Summing):
        async def infer_async(self, inputs: Any, session: Any, reset: Any, *, timeout: float, version: Any) -> Any:
            asked.append(version)
            return await super().infer_async(inputs, session, reset, timeout=timeout, version=version)

    lane = Gated()
    await together(lane, sessions=Noting()).ask(ROW, 1, 60.0, version, {0: True})
    await answered(asking(together(lane), version=version))
    assert asked == [version or None] and lane.asked[0][2] == (version or None)


async def test_lost_sessions_that_nobody_named_fail_every_request_of_the_ticket() -> None:
    class Losing(Summing):
        named: list[int]

        async def infer_async(self, *_: Any, **__: Any) -> Any:
            raise SessionLost("lost", sessions=self.named)

    for named in ([], [99]):
        sessions = Losing()
        sessions.named = named
        one = together(Gated(), sessions=sessions)
        requests = [one.ask(ROW, 1, 60.0, 0, {n: True}) for n in range(2)]
        came = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 30)
        assert [str(error) for error in came] == ["lost"] * 2


async def test_a_single_request_that_lost_its_sessions_is_told_which() -> None:
    sessions = Summing()
    sessions.lost = {4}
    with pytest.raises(SessionLost) as lost:
        await together(Gated(), sessions=sessions).ask(rows_of(2), 2, 60.0, 0, {3: True, 4: True})
    assert lost.value.sessions == [4]


async def test_a_failure_that_names_no_row_fails_every_request_of_the_ticket() -> None:
    lane = Gated(RowFailed("failed", None, {}, np.zeros((2, 2), np.float32), 7))
    one = together(lane)
    came = await asyncio.gather(asking(one), asking(one), return_exceptions=True)
    assert all(isinstance(error, RowFailed) for error in came)


@pytest.mark.parametrize("error", [Busy("full"), ModelFailed("no"), SpecMismatch("other")])
async def test_an_error_of_a_ticket_is_told_to_the_rule_once_for_each_request(error: Exception) -> None:
    returns, lane = Told(), Gated(error, *[error] * 2)
    one = together(lane, returns)
    came = await asyncio.gather(asking(one, client="a"), asking(one, client="b"), return_exceptions=True)
    assert [str(one) for one in came] == [str(error)] * 2 and returns.ended == ["a", "b"]


async def test_an_error_of_the_lane_after_the_deadline_of_a_request_is_no_time_out() -> None:
    lane = Gated(Refused("not now", Code.NOT_READY))

    class Overslept(Gated):
        async def infer_reply_async(self, inputs: Any, *, timeout: float, version: int | None) -> Reply:
            clock.append(1e9)
            raise lane.errors[0]  # type: ignore[misc]

    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jurybox.server.frontend.coalescer.time.monotonic", lambda: clock[-1])
        with pytest.raises(Refused, match="^not now$"):
            await together(Overslept()).ask(ROW, 1, 60.0, 0)


async def test_joined_rows_have_the_shape_and_the_type_of_each_ticket() -> None:
    seen: list[Any] = []

    class Seeing(Gated):
        async def infer_reply_async(self, inputs: Any, *, timeout: float, version: int | None) -> Reply:
            seen.append((inputs["x"].shape, inputs["x"].dtype.name, inputs["x"].copy()))
            return Reply(inputs["x"], 7)

    one = together(Seeing(), most=2)
    for shape, kind, n in (((2,), "float32", 1), ((3,), "float32", 1), ((3,), "float64", 1), ((3,), "float64", 3)):
        rows = [{"x": np.full((n, *shape), k, kind)} for k in range(2)]
        one._most = 2 * n
        await asyncio.gather(*(one.ask(row, n, 60.0, 0) for row in rows))
    assert [(shape, kind) for shape, kind, _ in seen] == [
        ((2, 2), "float32"), ((2, 3), "float32"), ((2, 3), "float64"), ((6, 3), "float64"),
    ]  # fmt: skip
    assert all((rows[: len(rows) // 2] == 0).all() and (rows[len(rows) // 2 :] == 1).all() for _, _, rows in seen)


async def test_the_buffer_of_joined_rows_is_used_again_after_an_answer_and_not_after_an_error() -> None:
    lane = Gated(None, ModelFailed("no"))
    one = together(lane)
    await answered(asking(one), asking(one))
    assert len(one._rooms) == 1
    await asyncio.gather(asking(one), asking(one), return_exceptions=True)
    assert not one._rooms


def test_the_size_of_rows_counts_arrays_and_texts() -> None:
    assert _size({"a": np.zeros((2, 3), np.float32), "b": [np.zeros(5, np.uint8), b"four"]}) == 24 + 5 + 4


@pytest.mark.parametrize(("values", "rests"), [(HEAVY // 4, 1), (HEAVY // 4 - 1, 0)])
@pytest.mark.parametrize("kind", ["at once", "later", "task"])
async def test_an_answer_from_a_mebibyte_on_leaves_time(
    monkeypatch: pytest.MonkeyPatch, kind: str, values: int, rests: int
) -> None:
    rested: list[float] = []
    monkeypatch.setattr(Breaks, "after", lambda _, sent, came: rested.append(came - sent))
    monkeypatch.setattr(Told, "may_block", lambda *_: kind == "at once")
    lane: Any = Gated() if kind == "task" else Direct(at_once=kind == "at once")
    await together(lane).ask({"x": np.ones((1, values), np.float32)}, 1, 60.0, 0)
    await turns()
    assert len(rested) == rests and all(seconds >= 0 for seconds in rested)
