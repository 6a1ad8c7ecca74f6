"""Sessions whose step was broken off, was late or met a replaced lane: which are lost, and what is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.open_models import NUMBER
from tests.unit.client.test_sessions import Both, N, Updater, sessions, versioned  # noqa: F401  fixtures

from jurybox.client import Refused, SessionLost, SpecMismatch
from jurybox.client.in_flight import Answer
from jurybox.client.session_book import SessionBook
from jurybox.protocol.errors import Code, Error, StaleLease, Timeout
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel

ONES = np.ones((N, 1), np.float32)


def lost_of(book: SessionBook) -> list[int]:
    with pytest.raises(SessionLost) as lost:
        book.require(book.all)
    return lost.value.sessions


def unsupported() -> Refused:
    return Refused("no sessions over this transport", Code.UNSUPPORTED)


# ---- the book


@pytest.mark.parametrize(("error", "lost"), [(unsupported(), []), (Refused("the server ends"), [1, 2])])
def test_a_refused_request_loses_its_sessions_unless_the_transport_could_not_carry_it(
    error: Error, lost: list[int]
) -> None:
    book = SessionBook("m", 4)
    with pytest.raises(Refused), book.stepping(np.array([1, 2]), np.zeros(2, np.uint32)):
        raise error
    if not lost:
        book.require(book.all)
    else:
        assert lost_of(book) == lost


def test_a_request_of_all_sessions_that_never_ended_loses_them_until_they_begin_again() -> None:
    book = SessionBook("m", 3)
    book.begin_all(None)
    with pytest.raises(SessionLost) as lost:
        book.begin_all(None)
    assert lost.value.sessions == [0, 1, 2]
    book.stepped(np.array([0, 2]), np.zeros(2, np.uint32))
    book.settle_broken_off()
    assert lost_of(book) == [1], "those that have begun again are not lost once more"
    book.begin_all([False, True, False])
    book.end_all()
    book.settle_broken_off()
    book.require(book.all)
    assert book.next.tolist() == [2, 1, 2]


def test_a_session_that_has_made_one_step_is_lost_with_its_relay_and_one_that_begins_is_not() -> None:
    book = SessionBook("m", 3)
    with pytest.raises(SessionLost) as lost, book.stepping(book.all, np.array([1, 0, 2], np.uint32)):
        raise StaleLease("the relay ended")
    assert lost.value.sessions == [0, 2] == lost_of(book)
    with pytest.raises(StaleLease), book.stepping(np.array([1]), np.zeros(1, np.uint32)):
        raise StaleLease("the relay ended")
    assert lost_of(book) == [0, 2]


# ---- broken off


BROKEN_OFF: list[Callable[[Any], object]] = [
    lambda opened: opened.infer(ONES),
    lambda opened: opened.infer(ONES[:1], [2]),
    lambda opened: opened.submit(ONES),
    lambda opened: opened.get_state(),
    lambda opened: asyncio.run(opened.infer_async(ONES[:1], [2])),
    lambda opened: asyncio.run(opened.exchange_state_async(range(N), [False] * N, None, 30.0)),
]


@pytest.mark.parametrize("ask", BROKEN_OFF)
def test_whoever_asks_first_after_a_step_that_never_ended_learns_that_the_sessions_are_lost(
    sessions: Any,  # noqa: F811
    ask: Callable[[Any], object],
) -> None:
    sessions.infer(ONES)
    sessions._book.begin_all(None)  # an interrupt has left the request at once
    with pytest.raises(SessionLost, match="reset them"):
        ask(sessions)
    assert sessions.infer(ONES, reset=[True] * N).tolist() == [1] * N


def test_a_state_that_is_set_after_a_step_that_never_ended_is_the_sessions_state(sessions: Any) -> None:  # noqa: F811
    sessions.infer(ONES)
    state = sessions.get_state()
    sessions._book.begin_all(None)
    sessions.set_state(state)
    assert sessions.infer(ONES).tolist() == [2] * N
    sessions._book.begin_all(None)
    asyncio.run(sessions.exchange_state_async(range(N), [False] * N, state, 30.0))
    assert sessions.infer(ONES).tolist() == [2] * N


@pytest.mark.parametrize("ask", ["infer", "infer_reply", "submit"])
@pytest.mark.parametrize("advanced", [True, False])
def test_ctrl_c_in_a_call_that_advanced_its_sessions_loses_those_that_it_named(
    sessions: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    ask: str,
    advanced: bool,
) -> None:
    def interrupted(*_: Any) -> None:
        if advanced:
            sessions._book.stepped(np.array([1]), np.zeros(1, np.uint32))
        raise KeyboardInterrupt

    monkeypatch.setattr(sessions, "_submitted" if ask == "submit" else "_answered", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(sessions, ask)(ONES[:2], [1, 3])
    if advanced:
        assert lost_of(sessions._book) == [1, 3]
    else:
        sessions._book.require(sessions._book.all)


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_lost_session_that_a_request_by_number_does_not_reset_is_named_before_anything_is_sent(
    sessions: Any,  # noqa: F811
    as_coroutine: bool,
) -> None:
    sessions.infer(ONES)
    sessions._book.lose(np.array([0, 2]))
    given = ONES[:3], [3, 2, 0], [True, False, True]
    with pytest.raises(SessionLost) as lost:
        asyncio.run(sessions.infer_async(*given)) if as_coroutine else sessions.infer(*given)
    assert lost.value.sessions == [2]
    assert sessions.infer(ONES, reset=[True, False, True, False]).tolist() == [1, 2, 1, 2]


# ---- late


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_state_that_does_not_come_in_time_is_a_time_out_and_loses_no_more_than_its_sessions(
    sessions: Any,  # noqa: F811
    as_coroutine: bool,
) -> None:
    sessions.infer(ONES)
    sessions._requests.lane._transport._turn = lambda: False  # the engine does nothing
    with pytest.raises(Timeout):
        if as_coroutine:
            asyncio.run(sessions.exchange_state_async([1], [False], None, 0.02))
        else:
            sessions.get_state([1], timeout=0.02)
    assert lost_of(sessions._book) == [1]


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_request_whose_last_batch_is_late_times_out_and_the_sessions_of_the_others_are_lost(
    versioned: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    as_coroutine: bool,
) -> None:
    model, updater = versioned
    with model.sessions(3, pin_version=True) as opened:
        opened.infer(np.ones(2, np.float32), [0, 2])
        updater.publish(2, keep=[1])
        requests, parts = opened._requests, []
        name = "answered_async" if as_coroutine else "answered"
        answered = getattr(requests, name)

        def late(*given: Any) -> Any:
            parts.append(given)
            if len(parts) == 2:
                raise Timeout("late")
            return answered(*given)

        three = np.ones(3, np.float32)
        with monkeypatch.context() as patched, pytest.raises(Timeout, match="late"):
            patched.setattr(requests, name, late)
            asyncio.run(opened.infer_async(three)) if as_coroutine else opened.infer(three)
        assert lost_of(opened._book) == [0, 1, 2]
        assert opened.infer(three, reset=[True] * 3).tolist() == [2] * 3


# ---- replaced lanes


def replace(lane: Any) -> None:
    """Let the next requests on a lane be answered as those on one that the server has replaced."""

    def stale(ticket: Any) -> Answer:
        return Answer(ticket.sequence, Code.STALE_LEASE, "replaced", 0, ticket.incarnation)

    lane._transport.exchange = lambda ticket, _: stale(ticket)
    lane._transport.receive = lambda _: [stale(ticket) for ticket in lane.in_flight.values()]


FRESH: list[Callable[[Any], Any]] = [
    lambda opened: opened.infer(ONES),
    lambda opened: opened.infer(ONES, [3, 1, 0, 2]),
    lambda opened: opened.infer_reply(ONES).outputs,
    lambda opened: asyncio.run(opened.infer_async(ONES)),
    lambda opened: asyncio.run(opened.infer_reply_async(ONES, list(range(N)))).outputs,
    lambda opened: opened.get_state()["total"] + 1,
    lambda opened: opened.set_state({"total": np.zeros(N, np.float32)}) or opened.infer(ONES),
]


@pytest.mark.parametrize("ask", FRESH)
def test_sessions_that_begin_on_a_lane_that_was_replaced_begin_on_the_next(
    sessions: Any,  # noqa: F811
    ask: Callable[[Any], Any],
) -> None:
    replaced = sessions._requests.lane
    replace(replaced)
    assert ask(sessions).tolist() == [1] * N
    assert sessions._requests.lane is not replaced
    assert sessions.infer(ONES, reset=[True] * N).tolist() == [1] * N


@pytest.mark.parametrize("ask", [*FRESH[:5], FRESH[5]])
def test_sessions_with_a_step_on_a_lane_that_was_replaced_are_lost(
    sessions: Any,  # noqa: F811
    ask: Callable[[Any], Any],
) -> None:
    sessions.infer(ONES[:2], [1, 3])
    replace(sessions._requests.lane)
    with pytest.raises(SessionLost, match="lost with a relay or a server") as lost:
        ask(sessions)
    assert lost.value.sessions in ([1, 3], [3, 1])
    assert lost_of(sessions._book) == [1, 3]
    assert sessions.infer(ONES, reset=[False, True, False, True]).tolist() == [1] * N


# ---- several inputs and outputs


def test_an_array_given_to_sessions_of_a_model_with_two_inputs_is_refused_and_loses_nothing() -> None:
    from torch import nn

    class Sum(nn.Module):
        def forward(self, a: Any, b: Any, n: Any) -> Any:
            return a + b, n + 1

    model = ServedModel(Sum(), {"a": NUMBER, "b": NUMBER}, {"y": NUMBER}, state={"n": NUMBER})
    two = np.array([1, 2], np.float32)
    with InprocServer({"m": model}, rows=8) as server, server.model("m", rows=1).sessions(2) as opened:
        for _ in range(2):
            assert opened.infer({"a": two, "b": 10 * two}).tolist() == [11, 22]
            with pytest.raises(SpecMismatch):
                opened.infer(two)
        assert opened.get_state()["n"].tolist() == [2, 2]


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_all_outputs_of_sessions_in_several_batches_are_joined_by_name(as_coroutine: bool) -> None:
    model = ServedModel(module := Both(), {"x": NUMBER}, {"same": NUMBER, "less": NUMBER}, state={"n": NUMBER})
    module.version = 1  # type: ignore[assignment]
    six = np.arange(6, dtype=np.float32)
    with InprocServer({"m": model}, max_batch=4, rows=32) as server:
        server.engine.slots[0].served.weights_updater = Updater(module)
        with server.model("m", rows=1).sessions(6, pin_version=True) as opened:
            came = asyncio.run(opened.infer_async(six)) if as_coroutine else opened.infer(six)
            assert {name: rows.tolist() for name, rows in came.items()} == {
                "same": six.tolist(),
                "less": (-six).tolist(),
            }
