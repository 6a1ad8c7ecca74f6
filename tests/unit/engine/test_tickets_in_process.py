"""The transport of a client in its engine's process: tickets in their order, answers once, and no wait without end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.models import affine

from jurybox.client import ModelNotFound
from jurybox.protocol.wire import TICKET
from jurybox.server import inproc
from jurybox.server.inproc import InprocServer, InprocTransport


def ticket(sequence: int, **more: int) -> Any:
    given = {"sequence": sequence, "deadline": 0, "submitted": 5, "first": 3, "rows": 2, "version": 0}
    return SimpleNamespace(**given | more)


class Turns:
    """Turns of an engine, as many as have something to do; `last` is called in the last of them."""

    def __init__(self, busy: int, last: Any = lambda: None) -> None:
        self.busy, self.last, self.taken = busy, last, 0

    def __call__(self) -> bool:
        self.taken += 1
        if self.taken == self.busy:
            self.last()
        return self.taken <= self.busy


def answered(*sequences: int) -> Any:
    tickets = np.zeros(len(sequences), TICKET)
    tickets["sequence"] = sequences
    return tickets


def test_tickets_are_collected_in_their_order_with_all_that_they_say_and_no_more_than_there_is_room_for() -> None:
    transport = InprocTransport(7, 9, Turns(0))
    transport.send(ticket(1, deadline=11, version=4))
    for sequence in (2, 3):
        transport.send(ticket(sequence))
    out = np.zeros(2, TICKET)
    assert transport.collect(out) == 2 and out["sequence"].tolist() == [1, 2]
    first = {name: int(out[name][0]) for name in ("lease", "deadline", "submitted", "lane", "first", "rows", "version")}
    assert first == {"lease": 9, "deadline": 11, "submitted": 5, "lane": 7, "first": 3, "rows": 2, "version": 4}
    assert transport.collect(out) == 1 and out["sequence"][0] == 3
    assert transport.collect(out) == 0


def test_an_engine_runs_until_there_is_an_answer_or_it_has_nothing_to_do_and_the_time_is_over() -> None:
    turns = Turns(5, lambda: transport.reply(answered(1), 0, 3, "hm"))
    transport = InprocTransport(7, 9, turns)
    transport.send(ticket(1))
    (answer,) = transport.receive(0.0)
    assert turns.taken == 5 and (answer.sequence, answer.code, answer.version, answer.message) == (1, 0, 3, "hm")
    transport.receive(60.0)
    assert turns.taken == 5, "it has not been settled"
    transport.settled(answer)
    assert transport.receive(0.0) == [] and turns.taken == 6


def test_an_engine_that_waits_for_its_tickets_runs_on_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, turns = [100.0], Turns(0)
    transport = InprocTransport(7, 9, turns)

    def later() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(inproc, "time", SimpleNamespace(monotonic=later))
    assert transport.receive(5.0) == [] and turns.taken == 5


def test_a_ticket_is_held_until_its_answer_is_settled_which_may_be_done_twice() -> None:
    transport = InprocTransport(7, 9, Turns(1))
    one, other = ticket(1), ticket(2)
    transport.send(one)
    transport.send(other)
    transport.reply(answered(1, 2), 0, 0, "")
    first, second = transport.receive(0.0)
    assert transport.holds(one) and transport.holds(other)
    for _ in range(2):
        transport.settled(first)
    assert not transport.holds(one) and transport.holds(other) and transport.receive(0.0) == [second]


def test_a_call_takes_its_own_answer_and_leaves_those_of_others() -> None:
    transport = InprocTransport(7, 9, Turns(1, lambda: transport.reply(answered(1, 2), 0, 0, "")))
    transport.send(ticket(1))
    mine = transport.exchange(ticket(2), 0.0)
    assert mine is not None and mine.sequence == 2 and not transport.holds(ticket(2))
    assert transport.holds(ticket(1)) and [answer.sequence for answer in transport.receive(0.0)] == [1]
    assert transport.exchange(ticket(3), 0.0) is None and transport.holds(ticket(3))


def test_a_model_that_is_not_there_is_named_with_those_that_are() -> None:
    with InprocServer({"a": affine(), "b": affine()}) as server:
        with pytest.raises(ModelNotFound, match="no model 'c' here; there are: a, b"):
            server.model("c")


def test_a_model_that_is_closed_gives_its_rows_and_its_transport_back() -> None:
    x = np.ones((4, 4), np.float32)
    with InprocServer({"a": affine()}, rows=8) as server:
        for _ in range(5):
            with server.model("a", rows=8) as model:
                np.testing.assert_array_equal(model.infer(x), 3 * np.ones_like(x))
                assert len(server.engine.transports) == 1
            assert server.engine.transports == []


def test_models_of_an_engine_in_this_process_have_their_own_rows_and_batches_of_the_given_size() -> None:
    x = np.ones((2, 4), np.float32)
    with InprocServer({"a": affine(), "b": affine()}, max_batch=2, rows=8) as server:
        models = [server.model(name, rows=8) for name in ("a", "b")]
        tickets = [model.submit(x) for model in models for _ in range(2)]
        turns = 0
        while server._turn():
            turns += 1
        assert turns == 4, "two batches of each"
        assert all(np.all(each.result().outputs == 3) for each in tickets)
