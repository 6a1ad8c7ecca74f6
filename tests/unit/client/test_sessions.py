"""The client's book of sessions: what it expects of each state, whatever becomes of a request."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jurybox.client import Busy, ModelFailed, Refused, RowFailed, ServerGone, SessionLost, SpecMismatch
from jurybox.client.session_book import SessionBook
from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import Error, StaleLease, Timeout, VersionNotHeld
from jurybox.server.inproc import InprocServer
from jurybox.server.models import RowErrors, ServedModel
from tests import open_models

N = 4


@pytest.fixture
def sessions():
    with InprocServer({"sum": open_models.running_sum()}, rows=16) as server:
        with server.model("sum", rows=1).sessions(N) as opened:
            yield opened


def broken_off(sessions, monkeypatch, ask):
    """Ask, and press Ctrl-C when the request has been sent."""

    def interrupt(*_):
        raise KeyboardInterrupt

    transport = sessions._requests.lane._transport
    with monkeypatch.context() as patched:
        patched.setattr(transport, "exchange", lambda ticket, _: (transport.send(ticket), interrupt()))
        patched.setattr(transport, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask()


def test_sessions_of_a_request_with_an_unknown_outcome_are_lost(sessions, monkeypatch):
    ones = np.ones((N, 1), np.float32)
    sessions.infer(ones)
    broken_off(sessions, monkeypatch, lambda: sessions.infer(ones))
    for ask in (
        lambda: sessions.infer(ones),
        lambda: sessions.infer(ones[:1], [2]),
        lambda: sessions.submit(ones),
        sessions.get_state,
        lambda: sessions.infer(ones, reset=[True, False, True, True]),
    ):
        with pytest.raises(SessionLost, match="reset"):
            ask()
    np.testing.assert_array_equal(sessions.infer(ones[:2], [0, 3], reset=[True, True]), [1, 1])
    with pytest.raises(SessionLost) as lost:
        sessions.infer(ones)
    assert lost.value.sessions == [1, 2]
    np.testing.assert_array_equal(sessions.infer(ones, reset=[False, True, True, False]), [2, 1, 1, 2])
    np.testing.assert_array_equal(sessions.infer(ones), [3, 2, 2, 3])


def test_a_gateway_reads_no_state_of_a_lost_session_and_one_that_it_sets_is_lost_no_more(sessions, monkeypatch):
    def exchange(state):
        return asyncio.run(sessions.exchange_state_async(range(N), [False] * N, state, 30.0))

    ones = np.ones((N, 1), np.float32)
    sessions.infer(ones)
    state = exchange(None)
    broken_off(sessions, monkeypatch, lambda: sessions.infer(ones))
    with pytest.raises(SessionLost, match="reset"):
        exchange(None)
    exchange(state)
    np.testing.assert_array_equal(sessions.infer(ones), [2] * N)


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_no_state_of_a_lost_session_is_read_also_if_its_step_was_never_sent(sessions, monkeypatch, as_coroutine):
    """The engine has the state that the book expects, but the caller does not know that."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def read(reset=(False,) * N):
        if as_coroutine:
            return asyncio.run(sessions.exchange_state_async(range(N), list(reset), None, 30.0))
        return sessions.get_state()

    ones = np.ones((N, 1), np.float32)
    sessions.infer(ones)
    with monkeypatch.context() as patched:
        patched.setattr(sessions._requests.lane._transport, "exchange", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sessions.infer(ones)
    for _ in range(2):
        with pytest.raises(SessionLost) as lost:
            read()
        assert lost.value.sessions == [0, 1, 2, 3]
    if as_coroutine:
        np.testing.assert_array_equal(read([True] * N)["total"], [0] * N)


def test_no_request_of_sessions_is_made_within_a_call_of_theirs(sessions):
    ones = np.ones((N, 1), np.float32)
    sessions.infer(ones)
    state = sessions.get_state()
    with sessions._requests.turns.now:  # as in a signal handler within a call
        for ask in (
            lambda: sessions.infer(ones),
            lambda: sessions.submit(ones),
            sessions.get_state,
            lambda: sessions.set_state(state),
        ):
            with pytest.raises(Refused, match="under way in this thread"):
                ask()
    np.testing.assert_array_equal(sessions.infer(ones), [2] * N)


def test_a_request_that_was_not_computed_leaves_every_state_as_it_was(sessions):
    ones = np.ones((N, 1), np.float32)
    sessions.infer(ones)
    for wrong in (ones[:2], ones.astype(np.float64), [[1.0]] * N):
        with pytest.raises(SpecMismatch):
            sessions.infer(wrong)
    # Of sessions, perhaps: no mask.
    for numbers in ([0, 1, 2, 3], [0, 1, 0, 1], np.array([1, 0, 0, 0]), [0.5, 1, 0, 0], [np.nan, 0, 0, 0]):
        with pytest.raises(SpecMismatch, match="expected one bool for each row"):
            sessions.infer(np.ones((N, 1), np.float32), reset=numbers)
    with pytest.raises(SpecMismatch, match="reset has shape"):
        sessions.infer(ones, reset=[True])
    np.testing.assert_array_equal(sessions.infer(ones, reset=np.array([0, 1, 0, 0], np.uint8)), [2, 1, 2, 2])
    sessions.infer(ones, reset=np.array([0, 1, 1, 1], np.float32))
    sessions.infer(ones, reset=[True] * 4)
    with pytest.raises(ModelFailed):
        sessions.infer(-ones, reset=[True, False, False, False])
    np.testing.assert_array_equal(sessions.infer(np.asfortranarray(ones)), [2] * N)


def test_requests_in_order_and_by_number_with_and_without_resets_see_one_book(sessions):
    """At random, beside sums that are kept here; two of a row's three ways are broken off or fail at times."""
    rng, kept = random.Random(3), np.zeros(N, np.float32)
    for _ in range(300):
        ids = list(range(N)) if rng.random() < 0.5 else rng.sample(range(N), rng.randint(1, N))
        given = np.array([[rng.randint(1, 9)] for _ in ids], np.float32)
        reset = [rng.random() < 0.3 for _ in ids] if rng.random() < 0.5 else None
        session = None if ids == list(range(N)) and rng.random() < 0.7 else ids
        expected = np.where(reset or [False] * len(ids), 0, kept[ids]) + given[:, 0]
        if rng.random() < 0.1:
            with pytest.raises(ModelFailed):
                sessions.infer(-given, session, reset)
            continue
        if rng.random() < 0.3:
            came = sessions.submit(given, session, reset).result().outputs
        else:
            came = sessions.infer(given, session, reset)
        np.testing.assert_array_equal(came, expected)
        kept[ids] = expected
        if rng.random() < 0.1:
            np.testing.assert_array_equal(sessions.get_state()["total"], kept)


class Versioned(nn.Module):
    """The weights version that computes each row; the state counts the steps. Negative numbers fail, alone or all."""

    def __init__(self):
        super().__init__()
        self.version = 1

    def forward(self, x, n):
        if (x == -2).any():
            raise ValueError("minus two")
        outputs = torch.full_like(x, self.version), n + 1
        wrong = {row: "negative" for row, value in enumerate(x.tolist()) if value < 0}
        return RowErrors(wrong, outputs) if wrong else outputs


class Updater:
    """Stands in for the engine's weights updater."""

    def __init__(self, module):
        self.module, self.version, self.held = module, 1, {1}

    def publish(self, version, *, keep=()):
        self.version, self.held = version, {version, *keep}

    def use(self, version):
        if (version or self.version) not in self.held:
            raise VersionNotHeld(f"version {version} is not held")
        self.module.version = version or self.version

    def stop(self):
        pass

    join = stop


@pytest.fixture
def versioned():
    module = Versioned()
    number = TensorSpec("float32")
    model = ServedModel(module, {"x": number}, {"version": number}, state={"n": number})
    with InprocServer({"m": model}, max_batch=4, rows=32) as server:
        updater = server.engine.slots[0].served.weights_updater = Updater(module)
        yield server.model("m", rows=1), updater


def asked(sessions, given, *args):
    """As `infer` and as `infer_async`."""
    return sessions.infer(given, *args), asyncio.run(sessions.infer_async(given, *args))


def test_a_submitted_step_is_computed_by_the_pinned_version_or_refused(versioned):
    model, updater = versioned
    one = np.ones(1, np.float32)
    with model.sessions(1, pin_version=True) as sessions:
        with pytest.raises(Refused, match="give submit\\(\\) a version"):
            sessions.submit(one)
        assert sessions.submit(one, version=1).result().version == 1
        updater.publish(2, keep=[1])
        assert asked(sessions, one) == (1, 1)
        assert sessions.infer(one, reset=[True]) == 2


def test_a_pinned_version_that_is_no_longer_held_is_refused_before_any_session_advances(versioned):
    model, updater = versioned
    two = np.ones(2, np.float32)
    with model.sessions(2, pin_version=True) as sessions:
        sessions.infer(two[:1], [1])
        updater.publish(2)
        for ask in (sessions.infer, lambda given: asyncio.run(sessions.infer_async(given))):
            with pytest.raises(VersionNotHeld):
                ask(two)
            np.testing.assert_array_equal(sessions.get_state()["n"], [0, 1])
        np.testing.assert_array_equal(sessions.infer(two, reset=[False, True]), [2, 2])


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_sessions_that_advanced_before_a_later_version_failed_are_lost(versioned, as_coroutine):
    model, updater = versioned
    three = np.ones(3, np.float32)
    with model.sessions(3, pin_version=True) as sessions:
        sessions.infer(three[:2], [0, 2])
        updater.publish(2, keep=[1])
        given = np.array([1, -2, 1], np.float32)
        with pytest.raises(SessionLost, match="minus two") as lost:
            asyncio.run(sessions.infer_async(given)) if as_coroutine else sessions.infer(given)
        assert lost.value.sessions == [0, 2]
        with pytest.raises(SessionLost):
            sessions.infer(three)
        np.testing.assert_array_equal(sessions.infer(three, reset=[True, False, True]), [2, 2, 2])
        np.testing.assert_array_equal(sessions.get_state()["n"], [1, 1, 1])


def test_failed_rows_are_named_by_their_place_in_the_request_and_the_others_are_pinned(versioned):
    model, updater = versioned
    with model.sessions(3, pin_version=True) as sessions:
        with pytest.raises(RowFailed):
            sessions.infer(np.array([1, -1], np.float32), [0, 1])
        updater.publish(2, keep=[1])
        with pytest.raises(RowFailed) as failed:
            sessions.infer(np.array([1, 1, -1], np.float32))
        assert failed.value.errors == {2: "negative"}
        np.testing.assert_array_equal(failed.value.outputs[:2], [1, 2])
        np.testing.assert_array_equal(sessions.get_state()["n"], [2, 1, 0])


def in_two_pieces(sessions: Any, ahead: Any) -> list[Any]:
    """Leave free rows for three sessions that do not adjoin, and fill the next batch but for two rows."""
    one = np.ones(1, np.float32)
    sessions.infer(np.ones(6, np.float32))
    tickets = [sessions.submit(one, [5]) for _ in range(6)]  # row i belongs to ticket i until it is collected
    for ticket in tickets[:2] + tickets[4:5]:
        ticket.result()
    return [*tickets[2:4], tickets[5], ahead.submit(np.ones(2, np.float32))]


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_request_in_pieces_makes_one_step_also_if_the_weights_change_between_them(versioned, as_coroutine):
    model, updater = versioned
    with model.sessions(6) as sessions, model.sessions(2) as ahead:
        uncollected = in_two_pieces(sessions, ahead)
        versions = iter(range(2, 20))
        use = updater.use
        updater.use = lambda version: (updater.publish(next(versions)), use(version))
        three = np.ones(3, np.float32)
        given = three, [0, 1, 2]
        came = asyncio.run(sessions.infer_async(*given)) if as_coroutine else sessions.infer(*given)
        assert len(set(came.tolist())) == 2
        del uncollected
        np.testing.assert_array_equal(sessions.get_state([0, 1, 2])["n"], [2, 2, 2])


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_sessions_of_the_pieces_that_advanced_before_one_failed_are_lost(versioned, as_coroutine):
    model, _ = versioned
    with model.sessions(6) as sessions, model.sessions(2) as ahead:
        uncollected = in_two_pieces(sessions, ahead)
        given = np.array([1, 1, -2], np.float32), [0, 1, 2]
        with pytest.raises(SessionLost, match="minus two") as lost:
            asyncio.run(sessions.infer_async(*given)) if as_coroutine else sessions.infer(*given)
        assert lost.value.sessions == [0, 1]
        del uncollected
        np.testing.assert_array_equal(sessions.get_state([2, 3])["n"], [1, 1])
        sessions.infer(np.ones(3, np.float32), [0, 1, 2], reset=[True, True, False])
        np.testing.assert_array_equal(sessions.get_state([0, 1, 2])["n"], [1, 1, 2])


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_request_in_pieces_whose_time_is_up_ends_and_its_sessions_are_lost(versioned, as_coroutine):
    model, _ = versioned
    with model.sessions(6) as sessions, model.sessions(2) as ahead:
        uncollected = in_two_pieces(sessions, ahead)
        given = np.ones(3, np.float32), [0, 1, 2]
        with pytest.raises(Timeout):
            if as_coroutine:
                asyncio.run(sessions.infer_async(*given, timeout=0))
            else:
                sessions.infer(*given, timeout=0)
        with pytest.raises(SessionLost):
            sessions.infer(*given)
        del uncollected


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_sessions_that_begin_in_several_batches_are_pinned_to_the_version_of_their_own(versioned, as_coroutine):
    model, updater = versioned
    six = np.ones(6, np.float32)

    def ask():
        return (asyncio.run(sessions.infer_async(six)) if as_coroutine else sessions.infer(six)).tolist()

    with model.sessions(6, pin_version=True) as sessions:
        use = updater.use

        def publish_and_use(version):
            updater.publish(updater.version + 1, keep=updater.held)
            use(version)

        updater.use = publish_and_use
        began = ask()
        assert began == [2, 2, 2, 2, 3, 3]
        assert ask() == began


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_a_request_of_several_batches_that_is_refused_leaves_every_state_as_it_was(versioned, as_coroutine):
    model, updater = versioned
    six = np.ones(6, np.float32)

    def ask(given, **more):
        return asyncio.run(sessions.infer_async(given, **more)) if as_coroutine else sessions.infer(given, **more)

    with model.sessions(6) as sessions:
        ask(six)
        updater.publish(2)
        with pytest.raises(VersionNotHeld):
            ask(six, version=1)
        with pytest.raises(ModelFailed):
            ask(-2 * six)
        np.testing.assert_array_equal(sessions.get_state()["n"], [1] * 6)
        with pytest.raises(SessionLost, match="minus two") as lost:  # the second batch is computed
            ask(np.array([-2, 1, 1, 1, 1, 1], np.float32))
        assert lost.value.sessions == [4, 5]
        np.testing.assert_array_equal(ask(six, reset=[False] * 4 + [True] * 2), [2] * 6)
        np.testing.assert_array_equal(sessions.get_state()["n"], [2] * 4 + [1] * 2)


def test_requests_beyond_the_sessions_rows_are_refused_with_the_remedy(versioned):
    model, _ = versioned
    with model.sessions(2) as sessions:
        ticket = sessions.submit(np.ones(2, np.float32))
        with pytest.raises(Busy, match="collect results first; n sessions have n rows"):
            sessions.submit(np.ones(2, np.float32))
        ticket.result()
        halves = [sessions.submit(np.ones(1, np.float32), [half]) for half in (0, 1)]
        assert [half.result().version for half in halves] == [1, 1]
        np.testing.assert_array_equal(sessions.get_state()["n"], [2, 2])


@pytest.mark.parametrize("n", [3, 4, 5])
def test_the_rows_of_all_sessions_are_kept_from_step_to_step_if_they_are_one_batch(versioned, n):
    model, _ = versioned
    with model.sessions(n) as sessions:
        for _ in range(2):
            assert sessions.infer(np.ones(n, np.float32)).tolist() == [1] * n
        assert len(sessions._requests.kept) == (n <= 4) and len(sessions) == n
        np.testing.assert_array_equal(sessions.get_state()["n"], [2] * n)


def test_numbers_of_sessions_are_whole_each_once_and_of_these_sessions(sessions):
    ones = np.ones((1, 1), np.float32)
    sessions.infer(np.ones((N, 1), np.float32))
    for numbers, told in (
        ([-1], r"session -1\.\.-1: these are sessions 0\.\.3"),
        ([4], r"session 4\.\.4: these are sessions 0\.\.3"),
        ([0.0], "session is float64 of shape"),
        ([[0]], r"session is int64 of shape \(1, 1\): expected whole numbers"),
        ([], "session is .* of shape \\(0,\\)"),
    ):
        with pytest.raises(SpecMismatch, match=told):
            sessions.infer(ones, numbers)
        with pytest.raises(SpecMismatch, match=told):
            sessions.get_state(numbers)
    with pytest.raises(SpecMismatch, match="a session occurs twice in one request"):
        sessions.infer(np.ones((2, 1), np.float32), [1, 1])
    with pytest.raises(SpecMismatch, match="1 rows came for 2 sessions: expected one row for each"):
        sessions.infer(ones, [0, 3])
    assert sessions.infer(ones, [0]).tolist() == [2] and sessions.infer(ones, np.array([3], np.uint8)).tolist() == [2]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, r"state of 'sum' is \['total'\], \[\] came"),
        ({"total": np.zeros(N, np.float32), "other": np.zeros(N)}, r"\['other', 'total'\] came"),
        ({"total": np.zeros(N + 1, np.float32)}, r"state 'total': expected float32 of shape \(4,\), came float32 of"),
        ({"total": np.zeros(N, np.float64)}, r"state 'total': expected float32 of shape \(4,\), came float64 of"),
    ],
)
def test_a_state_that_is_not_the_models_is_refused_and_sets_nothing(sessions, state, told):
    sessions.infer(np.ones((N, 1), np.float32))
    with pytest.raises(SpecMismatch, match=told):
        sessions.set_state(state)
    np.testing.assert_array_equal(sessions.infer(np.ones((N, 1), np.float32)), [2] * N)


def test_an_answer_of_sessions_tells_its_version_however_it_was_asked_for(versioned):
    model, updater = versioned
    three = np.ones(3, np.float32)
    with model.sessions(3) as sessions:
        assert sessions.version == 0 and repr(sessions) == "<Sessions of 'm', 3 sessions>"
        for version, ask in enumerate(
            (
                lambda: sessions.infer_reply(three),
                lambda: sessions.infer_reply(three[:2], [0, 2]),
                lambda: sessions.submit(three).result(),
                lambda: asyncio.run(sessions.infer_reply_async(three)),
            ),
            2,
        ):
            updater.publish(version)
            reply = ask()
            assert reply.version == sessions.version == version and set(reply.array.tolist()) == {version}
        with pytest.raises(SpecMismatch, match="a ticket holds 1 to 2 rows, got 3"):
            sessions._requests.max_batch = 2
            sessions.submit(three)


def test_a_session_that_is_lost_and_not_reset_is_named_before_anything_is_sent():
    book = SessionBook("m", 4)
    book.lose(np.array([0, 1]))
    with pytest.raises(SessionLost) as lost:
        book.begin_all([True, False, False, False])
    assert lost.value.sessions == [1]
    assert book.begin_all([True, True, False, False]).tolist() == [0, 0, 0, 0]


def test_a_lost_session_that_was_to_begin_again_when_its_relay_ended_is_still_lost():
    book = SessionBook("m", 3)
    book.lose(np.array([0]))
    with pytest.raises(SessionLost) as lost, book.stepping(book.all, np.array([0, 4, 0], np.uint32)):
        raise StaleLease("the relay ended")
    assert lost.value.sessions == [1]
    book.require(np.array([2]))
    with pytest.raises(SessionLost) as lost:
        book.require(book.all)
    assert lost.value.sessions == [0, 1]


def test_sessions_that_an_engine_has_lost_are_named_by_their_own_numbers_and_the_others_are_as_before() -> None:
    book = SessionBook("m", 6)
    book.lose(np.array([0, 5]))
    ids = np.array([5, 2, 4])
    error, steps = SessionLost("an engine ended", sessions=[1, 2]), np.array([0, 3, 7], np.uint32)  # by rows
    with pytest.raises(SessionLost, match="an engine ended") as lost, book.stepping(ids, steps):
        raise error
    assert lost.value.sessions == [2, 4] and book.advances == 1 and book.next.tolist() == [0] * 6
    with pytest.raises(SessionLost) as lost:
        book.require(book.all)
    assert lost.value.sessions == [0, 2, 4, 5]


def test_a_request_of_which_no_row_was_computed_leaves_sessions_as_they_were_and_any_other_loses_them() -> None:
    for error, left in ((Busy("full"), [0]), (ServerGone("gone"), [0, 1, 2]), (KeyboardInterrupt(), [0, 1, 2])):
        book = SessionBook("m", 4)
        book.lose(np.array([0]))
        with pytest.raises(type(error)), book.stepping(np.array([1, 2]), np.array([4, 0], np.uint32)):
            raise error
        with pytest.raises(SessionLost) as lost:
            book.require(book.all)
        assert lost.value.sessions == left and book.next.tolist() == [0] * 4


def failing_as(monkeypatch: pytest.MonkeyPatch, sessions: Any, *errors: Error | None) -> None:
    """Let the failures of tickets be these, in order; None: what it is."""
    lane, left = sessions._requests.lane, list(errors)
    failure = lane.failure
    monkeypatch.setattr(lane, "failure", lambda *arguments: left.pop(0) or failure(*arguments))


@pytest.mark.parametrize("as_coroutine", [False, True])
@pytest.mark.parametrize(
    ("given", "errors", "lost", "says"),
    [
        ([1, 1, -2], [SessionLost("gone", sessions=[0])], [0, 1, 2], "gone"),
        ([1, -1, -2], [None, None], [0], "minus two"),
        ([-2, 1, -2], [SessionLost("gone", sessions=[0]), SessionLost("over", sessions=[0])], [0, 2], "^gone$"),
        ([-2, 1, -2], [None, SessionLost("gone", sessions=[0])], [2], "^gone$"),
    ],
)
def test_a_request_in_pieces_names_the_sessions_that_are_lost_in_any_of_them(
    versioned: Any, monkeypatch: pytest.MonkeyPatch, as_coroutine: bool, given: list[int],
    errors: list[Error | None], lost: list[int], says: str,
) -> None:  # fmt: skip
    model, _ = versioned
    with model.sessions(6) as sessions, model.sessions(2) as ahead:
        uncollected = in_two_pieces(sessions, ahead)
        failing_as(monkeypatch, sessions, *errors)
        rows = np.array(given, np.float32), [0, 1, 2]
        with pytest.raises(SessionLost, match=says) as caught:
            asyncio.run(sessions.infer_async(*rows)) if as_coroutine else sessions.infer(*rows)
        assert caught.value.sessions == lost
        del uncollected


@pytest.mark.parametrize("as_coroutine", [False, True])
def test_what_is_left_of_a_request_is_not_sent_after_a_piece_of_it_has_failed(
    versioned: Any, as_coroutine: bool
) -> None:
    model, _ = versioned
    with model.sessions(6) as sessions, model.sessions(2) as ahead:
        uncollected = in_two_pieces(sessions, ahead)
        given = np.array([-2, 1, 1, 1], np.float32), [0, 1, 2, 3]
        with pytest.raises(SessionLost) as lost:
            asyncio.run(sessions.infer_async(*given)) if as_coroutine else sessions.infer(*given)
        assert lost.value.sessions == [2]
        del uncollected
        assert sessions.get_state([0, 1, 3])["n"].tolist() == [1, 1, 1]


def test_an_error_that_is_not_a_pieces_ends_the_request_of_sessions(
    versioned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = versioned
    with model.sessions(6) as sessions, model.sessions(2) as ahead:
        uncollected = in_two_pieces(sessions, ahead)
        lane = sessions._requests.lane
        wait = lane.wait
        raised: list[Busy] = []

        def busy_once(*arguments: Any) -> Any:
            if not raised:
                raised.append(Busy("a call is reading the answer"))
                raise raised[0]
            return wait(*arguments)

        monkeypatch.setattr(lane, "wait", busy_once)
        with pytest.raises(Busy) as caught:
            sessions.infer(np.ones(3, np.float32), [0, 1, 2])
        assert caught.value is raised[0]
        assert len(lane.in_flight) == 2, "nobody waited for the pieces"
        del uncollected


class Both(nn.Module):
    """Two outputs, and a state that counts the steps."""

    def forward(self, x, n):
        return x, -x, n + 1


def test_one_output_of_several_is_returned_alone_if_it_is_named() -> None:
    number = TensorSpec("float32")
    model = ServedModel(Both(), {"x": number}, {"same": number, "less": number}, state={"n": number})
    with InprocServer({"m": model}, max_batch=4, rows=32) as server, server.model("m", rows=1).sessions(2) as sessions:
        two = np.array([1, 2], np.float32)
        assert {name: rows.tolist() for name, rows in sessions.infer(two).items()} == {"same": [1, 2], "less": [-1, -2]}
        for came in (
            sessions.infer(two, output="less"),
            sessions.infer(two[::-1].copy(), [1, 0], output="less")[::-1],
            asyncio.run(sessions.infer_async(two, output="less")),
        ):
            assert came.tolist() == [-1, -2]
        for ask in (sessions.infer, lambda x, **more: asyncio.run(sessions.infer_async(x, **more))):
            with pytest.raises(SpecMismatch, match="has the outputs same, less: none is 'more'"):
                ask(two, output="more")
        assert sessions.get_state()["n"].tolist() == [4, 4], "a wrong name makes no step"


@pytest.mark.parametrize("session", [[1], None, [9]])
def test_sessions_of_a_caller_that_was_interrupted_are_lost_only_if_they_may_have_advanced(session: Any) -> None:
    book = SessionBook("m", 3)
    before = book.advances
    book.interrupted(session, before)
    book.require(book.all)
    book.stepped(np.array([1]), np.zeros(1, np.uint32))
    book.interrupted(session, before)
    if session == [9]:  # they were refused
        book.require(book.all)
        return
    with pytest.raises(SessionLost) as lost:
        book.require(book.all)
    assert lost.value.sessions == (session or [0, 1, 2])


@pytest.mark.parametrize("ask", ["infer_async", "infer_reply_async"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_ctrl_c_in_a_coroutine_that_advanced_its_sessions_loses_them(
    sessions: Any, monkeypatch: pytest.MonkeyPatch, ask: str, error: type[BaseException]
) -> None:
    """A cancellation comes only where the step waits, and is settled there."""

    async def answered(*_: Any) -> None:
        sessions._book.stepped(np.array([1]), np.zeros(1, np.uint32))
        raise error

    monkeypatch.setattr(sessions, "_answered_async", answered)
    with pytest.raises(error):
        getattr(sessions, ask)(np.ones(N, np.float32)).send(None)
    if error is asyncio.CancelledError:
        sessions._book.require(sessions._book.all)
        return
    with pytest.raises(SessionLost) as lost:
        sessions._book.require(sessions._book.all)
    assert lost.value.sessions == list(range(N))
