"""A batch that fails is computed again in parts, one a turn, and whatever else there is to do goes on between them."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
import torch
from tests.models import VECTOR, affine

from jurybox.client import Error, ModelFailed, Timeout
from jurybox.protocol import TensorSpec
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.recovery import Recovery
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel
from tests import open_models

VALUES = [1, 2, -1.0, 3, 4, 5, 6, 7]
BAD, NUMBER = -1.0, TensorSpec("float32")
ACTION = {"action": TensorSpec("float32", (4,))}


class Picky(torch.nn.Module):
    """x + 1, and an error for a batch with a negative number; notes the rows of each forward."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, observation):
        self.seen.append(len(observation))
        if bool((observation < 0).any()):
            raise ValueError("negative")
        return observation + 1


class Ragged(Picky):
    def forward(self, x):
        self.seen.append(len(x))
        if any(bool((row < 0).any()) for row in x):
            raise ValueError("negative")
        return torch.stack([row.sum() for row in x])


class Summing(Picky):
    """A sum for each session."""

    def forward(self, x, total):
        self.seen.append(len(x))
        if bool((x < 0).any()):
            raise ValueError("negative")
        total = total + x[:, 0]
        return total, total


def fixed(module):
    return ServedModel(module, VECTOR, ACTION)


def ragged(module):
    return ServedModel(module, {"x": TensorSpec("float32", (-1,), capacity=4)}, {"y": NUMBER})


def summing(module):
    return ServedModel(module, {"x": TensorSpec("float32", (1,))}, {"y": NUMBER}, state={"total": NUMBER})


@pytest.fixture
def world():
    servers = []

    def serve(model, **more):
        servers.append(InprocServer({"m": model, "other": affine()}, **more))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def rows(value, kind):
    return [np.full(3, value, np.float32)] if kind is ragged else np.full((1, 4), value, np.float32)


@pytest.mark.parametrize(("kind", "module"), [(fixed, Picky), (ragged, Ragged)])
def test_a_turn_computes_one_part_of_a_failed_batch(world, kind, module):
    module = module()
    server = world(kind(module))
    clients = [server.model("m", rows=1) for _ in range(8)]
    tickets = [client.submit(rows(value, kind)) for client, value in zip(clients, VALUES, strict=True)]
    turns = []
    while server._turn():
        turns.append(len(module.seen))
    assert turns == list(range(1, len(turns) + 1)), "each turn has one forward"
    assert module.seen == [8, 4, 2, 2, 1, 1, 4]
    for ticket, value in zip(tickets, VALUES, strict=True):
        if value == BAD:
            with pytest.raises(ModelFailed, match="negative"):
                ticket.result()
        else:
            assert ticket.result().outputs.reshape(-1)[0] == (3 * value if kind is ragged else value + 1)


@pytest.mark.parametrize(("kind", "module"), [(fixed, Picky), (ragged, Ragged)])
def test_another_model_waits_for_one_part_of_a_recovery_at_most(world, kind, module):
    module = module()
    server = world(kind(module))
    clients = [server.model("m", rows=1) for _ in range(8)]
    asked = [client.submit(rows(BAD, kind)) for client in clients]
    server._turn()
    others = [server.model("other", rows=1) for _ in range(4)]
    answered, tickets = server.engine.counters(1)._own["requests"], []
    for number, other in enumerate(others):
        ticket, forwards = other.submit(np.ones((1, 4), np.float32)), len(module.seen)
        while answered[0] == number:
            server._turn()
        assert len(module.seen) - forwards <= 1
        server._turn()
        assert len(module.seen) > forwards, "the recovery goes on"
        tickets.append(ticket)
    for ticket in tickets:
        np.testing.assert_array_equal(ticket.result().outputs, np.full((1, 4), 3))
    for ticket in asked:
        with pytest.raises(ModelFailed):
            ticket.result()


def test_a_deadline_that_passes_during_a_recovery_is_answered_and_not_computed(world):
    module = Picky()
    server = world(fixed(module))
    clients = [server.model("m", rows=1) for _ in range(5)]
    bad = [client.submit(rows(BAD, fixed), timeout=100) for client in clients[:2]]
    late = [client.submit(rows(1, fixed), timeout=50) for client in clients[2:4]]
    server._turn()
    behind = clients[4].submit(rows(1, fixed), timeout=50)  # in the queue, behind the recovery
    server.engine._clock = server.engine._batches._clock = lambda: time.monotonic_ns() + 75 * 10**9
    while server._turn():
        pass
    for ticket in (*late, behind):
        with pytest.raises(Timeout, match="deadline passed"):
            ticket.result(5)
    for ticket in bad:
        with pytest.raises(ModelFailed):
            ticket.result(5)
    assert module.seen == [4, 2, 1, 1]
    assert server.engine.scoreboard.counters[0, 0]["expired"] == 3


@pytest.mark.parametrize("how", ["retired", "removed", "forgotten", "loaded anew"])
def test_tickets_in_a_recovery_are_treated_as_those_that_wait(world, how):
    module = Picky()
    server = world(fixed(module))
    clients = [server.model("m", rows=1) for _ in range(4)]
    tickets = [client.submit(rows(value, fixed)) for client, value in zip(clients, [BAD, 1, 2, 3], strict=True)]
    server._turn()
    engine = server.engine
    if how == "retired":
        engine.retire(engine.transports[1].lane)
    elif how == "removed":
        engine.remove(0)
    elif how == "forgotten":
        engine.forget_all()
    else:
        engine.install(0, engine.slots[1].served)  # other weights: 2 x + 1
    while server._turn():
        pass
    if how == "retired":
        with pytest.raises(Error):
            tickets[1].result(0)
        assert [tickets[i].result().outputs[0, 0] for i in (2, 3)] == [3, 4] and 1 + 1 not in module.seen[1:2]
    elif how == "removed":
        for ticket in tickets:
            with pytest.raises(Error, match="unloaded"):
                ticket.result(0)
    elif how == "forgotten":
        assert module.seen == [4] and not engine.ready_in()
    assert engine._admission.leave(np.zeros(0, engine._arrivals.dtype)) == -1 and not engine._batches.recovery.parts


def test_sessions_keep_the_order_of_their_steps_through_a_recovery(world):
    """A step that fails fails alone; the later steps of other sessions are computed on the right state."""
    module = Summing()
    server = world(summing(module))
    with server.model("m", rows=16).sessions(8) as sessions:
        sessions.infer(np.ones((8, 1), np.float32))
        module.seen.clear()
        first = [
            sessions.submit(np.full((1, 1), value, np.float32), session=[i]) for i, value in enumerate((2, BAD, 3))
        ]
        second = [sessions.submit(np.full((1, 1), value, np.float32), session=[i]) for i, value in ((0, 10), (2, 20))]
        while server._turn():
            pass
        assert [first[0].result().outputs.item(), first[2].result().outputs.item()] == [3, 4]
        assert [ticket.result().outputs.item() for ticket in second] == [13, 24]
        with pytest.raises(ModelFailed, match="negative"):
            first[1].result()
    assert len(module.seen) > 3


def test_recovering_rows_count_in_the_wait_that_clients_are_shown(world):
    module = Picky()
    server = world(fixed(module))
    clients = [server.model("m", rows=1) for _ in range(8)]
    asked = [client.submit(rows(BAD, fixed)) for client in clients]
    server.engine._batches.mean_ns = 1e6
    server._turn()
    server._turn()
    assert server.engine.scoreboard.engines["expected_wait"][0] >= 2e6
    assert server.engine.ready_in() == 0, "the loop does not sleep"
    for ticket in asked:
        with pytest.raises(ModelFailed):
            ticket.result()


def waiting(*sequences, submitted=0, deadline=0):
    records = np.zeros(len(sequences), TICKET)
    records["sequence"], records["submitted"], records["deadline"] = sequences, submitted, deadline
    return records


def test_the_parts_of_a_batch_come_in_the_order_of_their_tickets_before_those_of_later_batches():
    recovery, slot = Recovery(), object()
    recovery.add(slot, [waiting(5), waiting(6)], 7)
    recovery.add(slot, [waiting(1, 2), waiting(3, 4)], 0)
    assert len(recovery) == 4
    parts = []
    while slot in recovery.parts:
        part, late = recovery.next(slot, 0)
        parts.append((part.tickets["sequence"].tolist(), part.version))
        assert not len(late)
    assert parts == [([1, 2], 0), ([3, 4], 0), ([5], 7), ([6], 7)]


def test_a_recovery_waits_for_its_turn_since_its_last_part_and_a_later_one_since_its_own_tickets():
    recovery, slot = Recovery(), object()
    recovery.add(slot, [waiting(1, submitted=100), waiting(2, submitted=100)], 0)
    assert recovery.since(slot) == 100
    recovery.next(slot, 500)
    assert recovery.since(slot) == 500
    recovery.next(slot, 600)
    recovery.add(slot, [waiting(3, submitted=550)], 0)
    assert recovery.since(slot) == 550


def test_tickets_of_a_recovery_that_have_no_deadline_wait_as_long_as_they_must():
    recovery, slot = Recovery(), object()
    parts = [waiting(1, deadline=50), waiting(2, 3), waiting(4)]
    parts[1]["deadline"] = (50, 0)
    recovery.add(slot, parts, 0)
    part, late = recovery.next(slot, 60)
    assert (part.tickets["sequence"].tolist(), late["sequence"].tolist()) == ([3], [1, 2])
    part, late = recovery.next(slot, 60)
    assert (part.tickets["sequence"].tolist(), len(late)) == ([4], 0)


class Stuck(torch.nn.Module):
    """Never ends for a negative number, and catches whatever it can."""

    def __init__(self, how):
        super().__init__()
        self.how, self.stuck = how, 0

    def forward(self, observation):
        self.stuck += bool((observation < 0).any())
        while bool((observation < 0).any()):
            try:
                time.sleep(0.01)
            except Exception:  # noqa: BLE001
                pass
            except BaseException:
                if self.how == "stubborn" and (tries := getattr(self, "tries", 0)) < 3:
                    self.tries = tries + 1
                    continue
                raise
        return observation + 1


@pytest.mark.parametrize("how", ["plain", "stubborn"])
def test_a_forward_that_does_not_end_fails_its_batch_after_forward_timeout(world, how):
    stuck = Stuck(how)
    server = world(fixed(stuck))
    server.engine.slots[0].served.forward_timeout = 0.1
    clients = [server.model("m", rows=1) for _ in range(2)]
    tickets = [client.submit(rows(value, fixed)) for client, value in zip(clients, (BAD, 1), strict=True)]
    for ticket in tickets:  # both: halves would take the time again and again
        with pytest.raises(ModelFailed, match="'m' failed on 2 rows: .* within forward_timeout = 0.1 s; raise"):
            ticket.result(60)
    assert stuck.stuck == 1
    server.engine.slots[0].served.forward_timeout = 60.0  # a loaded machine may run nobody for a tenth of a second
    np.testing.assert_array_equal(clients[0].infer(rows(1, fixed)), rows(2, fixed))
    np.testing.assert_array_equal(server.model("other").infer(rows(1, fixed)), rows(3, fixed))


def test_a_time_limit_is_over_with_its_forward(world):
    """The timer of a quick forward raises nothing later, in code of the engine or of another model."""
    server = world(open_models.picky())
    model = server.model("m")
    for limit in (0.05, 0.2, 0.8, 3.2):  # until the forward is quick in this sense on a loaded machine, too
        server.engine.slots[0].served.forward_timeout = limit
        with contextlib.suppress(ModelFailed):
            np.testing.assert_array_equal(model.infer(np.ones((1, 1), np.float32)), [2])
            break
    else:
        pytest.fail("no forward was quick")
    until = time.monotonic() + 4 * limit
    while time.monotonic() < until:
        server._turn()
