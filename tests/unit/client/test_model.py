"""A model's requests and tickets: what is sent together, which lane has them, and what each tells of itself."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
from torch import nn

from jurybox.client.in_flight import ModelLock
from jurybox.client.model import Model
from jurybox.client.ticket import Reply, Ticket
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Busy, ModelFailed, Refused, ServerGone, SpecMismatch, StaleLease, Timeout
from jurybox.protocol.locks import LONGEST, mark_serving, seconds
from jurybox.protocol.scoreboard import NORMAL
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel


class Twice(nn.Module):
    def forward(self, x):
        if (x == 13).any():
            raise ValueError("thirteen")
        return 2 * x


@pytest.fixture
def server():
    one = {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32", (2,))}
    with InprocServer({"m": ServedModel(Twice(), *one)}, max_batch=4, rows=64) as made:
        yield made


@pytest.fixture
def model(server):
    return server.model("m", rows=6)


def rows(n, value=1.0):
    return np.full((n, 2), value, np.float32)


# ---- a lane that grows, and one that is lost


@pytest.fixture
def growing(server):
    """A model whose lane begins with two rows, and what was asked of the server; `answers` may raise in its place."""
    asked, answers = [], []

    def lease(n, wait):
        asked.append((n, wait))
        if len(asked) > 1 and answers:
            raise answers.pop()
        return server._lease("m", n or 2, NORMAL)

    return Model("m", lease, 0, 60.0), asked, answers


def test_a_lane_grows_to_a_batch_for_a_large_request_and_to_all_rows_that_are_used_at_once(growing):
    model, asked, _ = growing
    assert model.infer(rows(2)).tolist() == [[2, 2]] * 2 and asked == [(0, True)], "they fit"
    first = model.requests.lane
    assert model.infer(rows(9)).tolist() == [[2, 2]] * 9 and asked[1:] == [(4, False)]
    assert model.requests.lane.rows == 4
    model.infer(rows(9))
    with model.rows(4):
        assert len(asked) == 2
    with model.rows(5) as held:
        assert asked[2:] == [(5, False)] and len(held) == 5
    model.close()
    for lane in (first, model.requests.lane):
        with pytest.raises(Refused, match="was closed"):
            raise lane.lost()


@pytest.mark.parametrize("error", [Busy("no rows"), Refused("not so many"), ServerGone("no answer")])
def test_a_lane_that_cannot_grow_divides_requests_and_asks_again_only_if_nobody_answered(growing, error):
    model, asked, answers = growing
    answers.append(error)
    for _ in range(2):
        assert model.infer(rows(4)).tolist() == [[2, 2]] * 4
    assert asked[1:] == [(4, False)] * (2 if type(error) is ServerGone else 1)
    assert model.requests.lane.rows == (4 if type(error) is ServerGone else 2)


def test_a_lane_whose_size_was_set_is_never_leased_again_for_more(server):
    asked = []
    model = Model("m", lambda n, wait: asked.append(n) or server._lease("m", n, NORMAL), 3, 60.0)
    assert model.infer(rows(9)).tolist() == [[2, 2]] * 9 and asked == [3]
    with pytest.raises(Busy, match="4 neighbouring rows were asked for, 3 of this lane's 3 are free: .*'m', rows="):
        model.submit(rows(4))


def test_a_lost_lane_is_leased_again_and_a_model_that_changed_meanwhile_is_refused_once(growing, monkeypatch):
    model, asked, _ = growing
    held = model.requests.lane.take(1)
    assert model.room() == 1
    model.requests.lane.gone = StaleLease("revoked")
    assert model.room() == 2, "those that the next one will have"
    del held
    assert model(rows(1)[0]).tolist() == [2, 2] and asked == [(0, True)] * 2
    other = ModelSpec("m", {"x": TensorSpec("float32", (3,))}, {"y": TensorSpec("float32", (2,))})
    lease = model.requests._lease
    monkeypatch.setattr(model.requests, "_lease", lambda n, wait: (lease(n, wait)[0], other, 7))
    model.requests.lane.gone = StaleLease("revoked")
    with pytest.raises(SpecMismatch, match=r"'m' has changed: it was x float32\[2\] -> .*, it is x float32\[3\]"):
        model.infer(rows(1))
    assert model.spec is other and model.max_batch == 7


def test_a_closed_model_says_so_and_returns_its_lane_once(server):
    model = server.model("m", rows=64)
    model.close()
    model.close()
    for ask in (lambda: model.infer(rows(1)), lambda: model.submit(rows(1)), lambda: model.rows(1)):
        with pytest.raises(Refused, match="'m' was closed: get it again from the server"):
            ask()
    server.model("m", rows=64).close()


# ---- rows that calls reuse


def test_rows_that_calls_reuse_are_given_up_for_whoever_needs_them(model):
    model(rows(1)[0])
    model.infer(rows(3))
    lane = model.requests.lane
    assert lane.free == 2
    tickets = [model.submit(rows(4)), model.submit(rows(2))]
    assert lane.free == 0
    assert [ticket.result().outputs.tolist() for ticket in tickets] == [[[2, 2]] * 4, [[2, 2]] * 2]
    assert lane.free == 6 and not model.requests.give_up_kept()
    model(rows(1)[0])
    assert model.requests.give_up_kept() and lane.free == 6


@pytest.mark.parametrize("n", [3, 2, 4])
def test_a_request_of_as_many_rows_as_the_one_before_uses_its_rows(model, n):
    model.infer(rows(3))
    (kept,) = model.requests.kept_many
    reply = model.infer_reply(rows(n, 3.0))
    assert reply.array.tolist() == [[6, 6]] * n and reply.version == 0
    assert (model.requests.kept_many == [kept]) == (n == 3) and len(model.requests.kept_many) == 1
    with pytest.raises(SpecMismatch):
        model.infer(rows(n).astype(np.float64))
    assert model.infer(rows(n)).tolist() == [[2, 2]] * n


# ---- tickets


def test_a_ticket_tells_what_has_become_of_it(model):
    ticket = model.submit(rows(2))
    assert repr(ticket) == "<Ticket of 'm', 2 rows, in flight>" and not ticket.cancelled()
    assert ticket.done() and "answered" in repr(ticket)
    assert not ticket.cancel() and ticket.result() is ticket.result() and "answered" in repr(ticket)
    assert not ticket.cancel() and not ticket.cancelled() and ticket.done()

    dropped = model.submit(rows(2))
    assert dropped.cancel() and dropped.cancelled() and dropped.done() and "cancelled" in repr(dropped)
    for ask in (dropped.result, lambda: asyncio.run(dropped.result_async())):
        with pytest.raises(CancelledError, match="was cancelled"):
            ask()

    failed = model.submit(rows(2, 13.0))
    for _ in range(2):
        with pytest.raises(ModelFailed, match="thirteen"):
            failed.result()
    assert "failed" in repr(failed) and failed.done()
    with pytest.raises(ModelFailed, match="thirteen"):
        asyncio.run(failed.result_async())
    assert model.requests.lane.free == 6


def test_a_ticket_is_not_done_while_another_threads_call_may_still_receive_its_answer(model):
    ticket = model.submit(rows(2))
    with ThreadPoolExecutor(1) as other:
        with model.requests.turns.now:
            assert other.submit(ticket.done).result(30) is False
        assert other.submit(ticket.done).result(30) is True


def test_a_ticket_whose_sending_was_interrupted_says_so(model):
    lane = model.requests.lane
    ticket = Ticket(model.requests.turns, lane, lane.take(1))
    with pytest.raises(Refused, match="this ticket was never sent: sending it was interrupted"):
        ticket.result()


def test_tickets_of_a_lane_that_is_closed_are_done_and_have_no_answer(model):
    waiting, answered = model.submit(rows(2)), model.submit(rows(2))
    answered.result()
    model.close()
    assert waiting.done() and answered.done() and answered.result().array.tolist() == [[2, 2]] * 2
    with pytest.raises(Refused, match="was closed"):
        waiting.result()


@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_a_ticket_holds_at_least_a_row_and_at_most_a_batch(model, n):
    if 0 < n <= 4:
        assert model.submit(rows(n)).result().array.shape == (n, 2)
        return
    with pytest.raises(SpecMismatch, match=rf"a ticket holds 1 to 4 rows \(the server's max_batch\), got {n}; infer"):
        model.submit(rows(n))


def test_rows_of_several_callers_go_out_as_one_ticket_if_that_is_possible_now(model):
    parts = [({"x": rows(1, 1.0)}, 1), ({"x": rows(3, 2.0)}, 3)]

    def submit(given=parts, brief=0.0):
        return model.submit_parts(given, model.requests.turns.deadline(30), 0, brief)

    seen, version = submit(brief=20.0)
    assert seen["y"].tolist() == [[2, 2]] + [[4, 4]] * 3 and version == 0
    assert model.requests.lane.free == 6, "they are read before the lane is used"
    ticket = submit()
    assert ticket.result().array.tolist() == [[2, 2]] + [[4, 4]] * 3
    for wrong in ([({"x": rows(3)}, 3), ({"x": rows(2)}, 2)], [({"x": rows(1).astype(np.float64)}, 1)], [
        ({"x": rows(2)}, 1)]):  # fmt: skip
        assert submit(wrong) is None and model.requests.lane.free == 6
    held = model.requests.lane.take(3)
    assert submit() is None, "no four rows are free"
    model.requests.lane.give(held)
    with ThreadPoolExecutor(1) as other, model.requests.turns.now:
        assert other.submit(submit).result(30) is None, "another thread uses the model"
    failing = submit([({"x": rows(2, 13.0)}, 2)], brief=20.0)
    with pytest.raises(ModelFailed, match="thirteen"):
        failing.result()
    model.requests.lane.gone = StaleLease("revoked")
    assert submit() is None


def test_answers_that_have_arrived_are_taken_in_on_request_and_the_room_for_rows_is_told(model):
    async def ask():
        tickets = [model.submit(rows(2)) for _ in range(2)]
        assert model.room() == 2 and len(model.requests.lane.in_flight) == 2
        model.look()
        assert not model.requests.lane.in_flight
        return await asyncio.gather(*(ticket.result_async(30) for ticket in tickets))

    assert [reply.array.tolist() for reply in asyncio.run(ask())] == [[[2, 2]] * 2] * 2
    gc.collect()
    assert model.room() == 6


# ---- what a caller gives, and gets


def test_one_input_is_given_by_its_name_or_as_the_only_row(model):
    x = rows(1)[0]
    for given in (model(x), model(x=x), model({"x": x}), model.call_reply(x).array, model.call_reply(x=x).array):
        assert given.tolist() == [2, 2]
    for wrong in (lambda: model(x, x=x, k=x), lambda: model.call_reply(x, x=x, k=x)):
        with pytest.raises(SpecMismatch, match="a call of 'm' takes one row or inputs by name, came a row and k, x"):
            wrong()
    for wrong in (model, lambda: model(k=x), model.call_reply, lambda: model.call_reply(k=x)):
        with pytest.raises(SpecMismatch, match=r"takes inputs \['x'\]"):
            wrong()


def test_an_output_is_chosen_by_its_name(model):
    assert model.infer(rows(2), output="y").tolist() == [[2, 2]] * 2
    assert asyncio.run(model.infer_async(rows(2), output="y")).tolist() == [[2, 2]] * 2
    for ask in (lambda: model.infer(rows(2), output="z"), lambda: asyncio.run(model.infer_async(rows(2), output="z"))):
        with pytest.raises(SpecMismatch, match="'m' has the outputs y: none is 'z'"):
            ask()


def test_a_reply_of_several_outputs_has_no_single_one():
    several, one = Reply({"y": 1, "z": 2}, 3, "y"), Reply(1, 3, "y")
    assert one.named == {"y": 1} and one.array == 1 and several.named == {"y": 1, "z": 2}
    with pytest.raises(SpecMismatch, match=r"has the outputs y, z: .* reply\.named\['y'\]"):
        several.array  # noqa: B018


def test_a_model_without_state_has_no_sessions(model):
    with pytest.raises(Refused, match="'m' keeps no state: infer\\(\\) needs no session"):
        model.sessions(2)


# ---- time-outs and turns


@pytest.mark.parametrize(
    ("given", "taken"), [(0, 0), (-0.001, 0.0), (-np.inf, 0.0), (2.5, 2.5), (LONGEST, LONGEST), (np.inf, LONGEST)]
)
def test_a_time_out_is_at_least_nothing_and_at_most_three_years(given, taken):
    assert seconds(given) == taken
    assert ModelLock("m", 9.0).seconds(None) == 9.0 and ModelLock("m", 9.0).seconds(given) == taken


def test_a_time_out_that_is_no_number_is_refused(model):
    for ask in (lambda: model(rows(1)[0], timeout=np.nan), lambda: model.infer(rows(2), timeout=np.nan)):
        with pytest.raises(ValueError, match="timeout=nan: expected seconds"):
            ask()


def test_a_thread_that_carries_answers_waits_for_no_other(model):
    """A destructor may run there; the thread that it would wait for waits for what this one carries."""
    turns, told = model.requests.turns, []

    def carry():
        mark_serving()
        with pytest.raises(Refused, match="another thread's call of 'm' is under way, and may need this one"):
            turns.run(list, turns.deadline(1000.0))
        told.append(True)

    with turns.now:
        thread = threading.Thread(target=carry, daemon=True)
        thread.start()
        thread.join(30)
    assert told == [True] and not turns.mine


def test_a_coroutine_that_gets_no_turn_in_time_says_whose_it_is(model):
    turns = model.requests.turns

    async def ask():
        with pytest.raises(Timeout, match="another thread's call of 'm' did not end in time"):
            await turns.alone(list, turns.deadline(0.0))
        free.set()

    free, taken = threading.Event(), threading.Event()

    def hold():
        with turns.now:
            taken.set()
            assert free.wait(30)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert taken.wait(30)
    asyncio.run(ask())
    thread.join(30)
    assert asyncio.run(turns.alone(lambda: 5, turns.deadline(30.0))) == 5
