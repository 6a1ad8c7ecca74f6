"""What a turn of the engine takes in, computes, answers, shows and leaves: several transports, models, or parts."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.models import VECTOR, affine
from tests.unit.engine.worlds import BATCH, DeviceWorld, World

from jurybox.client import ModelFailed, ModelNotFound, Timeout
from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import Code, plain
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import segment_name
from jurybox.protocol.wire import TICKET
from jurybox.server.engine import core
from jurybox.server.engine.core import Engine
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel

ACTION = {"action": TensorSpec("float32", (4,))}


class Noted(torch.nn.Module):
    """x + 1, and an error for a batch with a negative number; notes what `look` returns in each forward."""

    def __init__(self, look=lambda: None):
        super().__init__()
        self.look, self.batches, self.seen = look, [], []

    def forward(self, observation):
        self.batches.append(len(observation))
        self.seen.append(self.look())
        if bool((observation < 0).any()):
            raise ValueError("negative")
        return observation + 1


def noted(look=lambda: None):
    module = Noted(look)
    return module, ServedModel(module, VECTOR, ACTION)


class Source:
    """A transport with these tickets of a lane, which notes its answers."""

    number = 0
    slow = False

    def __init__(self, grant):
        self.grant, self.waiting, self.answers = grant, [], []

    def sends(self, *rows, **more):
        records = np.zeros(len(rows), TICKET)
        given = {"lane": self.grant.lane, "lease": self.grant.lease, "first": self.grant.first, "rows": rows, **more}
        for name, value in given.items():
            records[name] = value
        self.waiting.append(records)

    def collect(self, out):
        if not self.waiting:
            return 0
        records = self.waiting.pop(0)
        out[: len(records)] = records
        return len(records)

    def reply(self, tickets, code, version, message):
        self.answers.append((len(tickets), code, version, message))


def source(server, model=0, rows=8, priority=2):
    """A transport that holds a lane of a model's."""
    each = Source(server._leases.grant(model, rows, 256, priority=priority))
    server.engine.add_transport(each)
    return each


@pytest.fixture
def x():
    return np.arange(64, dtype=np.float32).reshape(16, 4)


def test_a_slow_transport_is_passed_by_only_for_tickets_of_others_and_only_once():
    with InprocServer({"a": affine()}) as server:
        quick, slow, engine = source(server), source(server), server.engine
        slow.slow = True
        slow.sends(1)
        assert engine._take_in(0) == 1, "nothing else came"
        quick.sends(1)
        slow.sends(1)
        assert engine._take_in(0) == 1
        quick.sends(1)
        assert engine._take_in(0) == 2
        third = source(server)
        for each in (quick, slow, third):
            each.sends(1)
        assert engine._take_in(0) == 2, "also the one behind it"


def test_refused_tickets_are_counted_for_the_model_that_they_asked():
    with InprocServer({"a": affine(), "b": affine()}) as server:
        a, b = source(server), source(server, 1)
        a.sends(0, 0, 1)
        b.sends(0)
        server._turn()
        assert server.engine.scoreboard.counters["refused"][0, :3].tolist() == [2, 1, 0]


def test_a_turn_that_finds_only_late_tickets_computes_nothing_but_had_something_to_do(x):
    module, model = noted()
    with InprocServer({"m": model}) as server:
        client = server.model("m")
        late = client.submit(x[:1], timeout=-1.0)
        assert server._turn() is True
        assert module.batches == []
        with pytest.raises(Timeout):
            late.result(5)
        assert server._turn() is False


def test_a_turn_that_finds_late_tickets_computes_the_others(x):
    module, model = noted()
    with InprocServer({"m": model}) as server:
        client = server.model("m")
        late, other = client.submit(x[:1], timeout=-1.0), client.submit(x[1:3])
        assert server._turn() is True
        assert module.batches == [2]
        np.testing.assert_array_equal(other.result().outputs, x[1:3] + 1)
        with pytest.raises(Timeout):
            late.result(5)


def test_the_wait_that_clients_are_shown_is_for_the_batch_under_way_the_full_ones_behind_it_and_their_own(x):
    module, model = noted(lambda: engine.scoreboard.engines["expected_wait"][0])
    with InprocServer({"m": model}, max_batch=2) as server:
        engine, client = server.engine, server.model("m")

        def shown(batches, rows):
            """In each forward of so many turns; a batch takes 1000 ns, and one of a single row 10 ns."""
            module.seen.clear()
            tickets = [client.submit(row) for row in rows]
            for _ in range(batches):
                engine._batches.mean_ns, engine._batches.one_ns = 1000.0, 10.0
                server._turn()
            for ticket in tickets:
                with contextlib.suppress(ModelFailed):
                    ticket.result(5)
            return module.seen

        assert shown(4, np.split(x[:7], 7)) == [3010, 2010, 1010, 1010]
        bad = -np.ones((1, 4), np.float32)
        assert shown(3, [bad, bad]) == [1010, 3010, 2010], "two parts are left, then one: each is a batch"


@pytest.mark.parametrize(("engines", "wait"), [(1, 8), (2, 4), (3, 4)])
def test_only_one_of_several_engines_shows_a_shorter_wait_when_nobody_asks_it(engines, wait):
    scoreboard = Scoreboard.create(segment_name("turnstest", "scoreboard"), engines, 0.0)
    try:
        engine = Engine(scoreboard, engines - 1, [], clock=lambda: 1_000_000_000)
        engine._batches.one_ns = 8.0
        assert not engine.turn()
        assert scoreboard.engines["expected_wait"].tolist() == [0] * (engines - 1) + [wait]
    finally:
        scoreboard.close()


class Coded(DeviceWorld):
    """Notes the codes of its answers."""

    def reply(self, tickets, code, version, message):
        self.codes = [*getattr(self, "codes", []), *[code] * len(tickets)]
        super().reply(tickets, code, version, message)


@pytest.mark.parametrize("call", ["finish", "forget_all", "retire", "rest", "remove", "refuse", "install"])
def test_a_batch_under_way_on_a_device_is_answered_before_anything_else_happens_to_its_rows(world, call):
    crowd = world([BATCH] * 3, Coded)
    engine = crowd.engine
    assert engine.turn() and engine._batches.under_way == 1 and crowd.asks == {}
    given = {
        "retire": (0,),
        "rest": (0, "it sleeps"),
        "remove": (0,),
        "refuse": (0, Code.MODEL_FAILED, "it failed"),
        "install": (0, engine.slots[0].served),
    }
    getattr(engine, call)(*given.get(call, ()))
    assert engine._batches.under_way == 0
    assert crowd.codes == [Code.OK] * 3


class Failing(World):
    """Its model fails on the row of the first client, once it is told to."""

    fails = False

    def __init__(self, think):
        super().__init__(think)
        served = self.engine.slots[0].served

        def run(tickets, rows, version):
            self.forward(rows)
            if self.fails and 0 in tickets["lane"]:
                raise ValueError("no")

        served.run = run


def test_no_part_of_a_failed_batch_waits_for_clients(world):
    crowd = world([2 * BATCH + 50_000] * 8, Failing)
    crowd.run(20)
    assert crowd.sizes[-1] == 8
    crowd.fails = True
    while not crowd.engine._recovery.parts:
        crowd.run(1)
    before, parts = list(crowd.pauses), 0
    while crowd.engine._recovery.parts:
        assert crowd.engine.turn()
        parts += 1
    assert parts > 3 and crowd.pauses == before


def test_no_wait_for_clients_is_longer_than_a_batch_and_its_fixed_cost(world):
    crowd = world([20_000 + 7_000 * i for i in range(16)])
    crowd.run(60)
    assert crowd.pauses and max(crowd.pauses) < 2 * BATCH / 1e9


def expecting(crowd, *batches):
    """A crowd of which the clients 6 and 7 have sent; these quick ones were answered, in batches, and are away."""
    tracker, queue, pauses = crowd.engine._tracker, crowd.engine.slots[0].queue, []
    for batch in batches:
        answered = np.zeros(len(batch), TICKET)
        answered["lane"] = batch
        tracker.came(answered, crowd.now, crowd.now)
        crowd.asks = {lane: at for lane, at in crowd.asks.items() if lane not in batch}
    for batch in batches:
        answered = np.zeros(len(batch), TICKET)
        answered["lane"] = batch
        tracker.answered(answered, crowd.now)
    for rows in (1, 2, 3, 4) * 100:
        crowd.engine.slots[0].cost.observe(rows, BATCH + 10 * rows)

    def pause(seconds, more):
        pauses.append((len(queue), seconds, more))
        if len(pauses) == 1:
            crowd.now += 5_000
            crowd.asks[0] = crowd.now  # one of them returns
        assert len(pauses) < 9

    crowd.engine._pause = pause
    return pauses


def test_clients_that_are_overdue_are_waited_for_while_one_more_ticket_pays_and_comes(world):
    crowd = world([BATCH] * 8)
    pauses = expecting(crowd, range(5), [5])
    fixed = crowd.engine.slots[0].cost.fixed
    assert crowd.engine.turn()
    # Half of those that are away, without those that have come; of the common cost, the share of a ticket.
    assert pauses == [(2, fixed / 2 / 1e9, 2), (3, (fixed + 5_000) / 3 / 1e9, 1)]
    assert crowd.sizes == [3]
    assert crowd.engine._tracker.away == 1, "only the one that had no time yet is expected again"


def test_no_more_clients_are_waited_for_than_have_had_the_time_to_return(world):
    crowd = world([BATCH] * 8)
    pauses = expecting(crowd, [0], range(1, 6))
    assert crowd.engine.turn()
    assert [more for *_, more in pauses] == [1] and crowd.sizes == [3]


def test_no_client_is_waited_for_where_as_many_tickets_wait_as_clients_are_away(world):
    crowd = world([BATCH] * 8)
    crowd.asks = {6: crowd.now, 7: crowd.now}
    pauses = expecting(crowd, [1], [2])
    assert (crowd.engine._tracker.away, crowd.engine._tracker.overdue) == (2, 1)
    assert crowd.engine.turn()
    assert pauses == [] and crowd.sizes == [2]


def test_an_engine_that_cannot_pause_computes_what_has_come(world):
    crowd = world([BATCH] * 8)
    pauses = expecting(crowd, range(5), [5])
    crowd.engine._pause = None
    assert crowd.engine.turn()
    assert pauses == [] and crowd.sizes == [2]


def test_clients_are_not_waited_for_while_a_device_computes(world):
    crowd = world([BATCH] * 8, DeviceWorld)
    crowd.asks = {6: crowd.now}
    assert crowd.engine.turn() and crowd.engine._batches.under_way == 1
    crowd.asks = {7: crowd.now}
    pauses = expecting(crowd, range(5), [5])
    assert crowd.engine._tracker.overdue and crowd.engine.turn()
    assert pauses == [] and crowd.sizes == [1, 1]


def test_answers_that_a_transport_cannot_send_are_reported_with_their_number(x):
    reported = []
    with InprocServer({"a": affine()}) as server:
        server.engine._report = lambda event, **fields: reported.append((event, fields))
        broken = source(server)

        def fail(*reply):
            raise OSError("no room")

        broken.reply = fail
        broken.sends(1, 1, 1)
        server._turn()
    assert reported == [("answers not sent", {"error": "OSError: no room", "tickets": 3})]


def test_tickets_that_follow_a_model_to_its_successor_keep_their_priority(x):
    module, model = noted()
    with InprocServer({"m": model}, max_batch=1) as server:
        normal, first = source(server), source(server, priority=1)
        normal.sends(1, 1, submitted=1)
        first.sends(1, 1, submitted=2)
        engine = server.engine
        engine._take_in(0)
        engine.install(0, engine.slots[0].served)
        for _ in range(2):
            server._turn()
        assert (len(first.answers), normal.answers) == (2, [])


@pytest.mark.parametrize("how", ["in the queue", "in a recovery"])
def test_tickets_that_follow_a_model_to_its_successor_keep_the_weights_version_that_they_ask_for(how):
    with InprocServer({"m": affine()}) as server:
        asks, plain, engine = source(server), source(server), server.engine
        asks.sends(1, version=7)
        engine._take_in(0)
        slot = engine.slots[0]
        if how == "in a recovery":
            engine._recovery.add(slot, [slot.queue.withdraw(0)], 7)
            slot.queue.pinned = False
        engine.install(0, slot.served)
        plain.sends(1)
        while server._turn():
            pass
        assert [code for _, code, *_ in asks.answers] == [Code.VERSION_NOT_HELD]
        assert [code for _, code, *_ in plain.answers] == [Code.OK]


def test_a_model_that_comes_after_tickets_of_other_versions_is_not_asked_for_versions():
    """Nobody waits who asks for one: its batches are not divided by versions."""
    with InprocServer({"m": affine()}) as server:
        engine, plain = server.engine, source(server)
        plain.sends(1)
        engine._take_in(0)
        engine.install(0, engine.slots[0].served)
        queue = engine.slots[0].queue
        assert (len(queue), queue.pinned, queue.ranked) == (1, False, False)


STALE = "the lane is not leased to the sender (any more): lease one again"


@pytest.mark.parametrize(
    ("call", "more", "code", "message"),
    [
        ("retire", (), Code.STALE_LEASE, STALE),
        ("remove", (), Code.MODEL_NOT_FOUND, "model 'm' was unloaded"),
        ("refuse", (Code.MODEL_FAILED, "it crashed"), Code.MODEL_FAILED, "it crashed"),
        ("rest", ("it sleeps",), Code.SLEEPING, "it sleeps"),
        ("install", (), Code.STALE_LEASE, STALE),
    ],
)
def test_what_waits_is_answered_once_with_the_reason_and_no_version_of_weights(call, more, code, message):
    with InprocServer({"m": affine(), "other": affine()}) as server:
        mine, engine = source(server), server.engine
        mine.sends(1, 2)
        engine._take_in(0)
        if call == "install":
            engine.install(0, engine.slots[0].served, arena=1)
        else:
            getattr(engine, call)(mine.grant.lane if call == "retire" else 0, *more)
        assert mine.answers == [(2, code, 0, message)]
        assert not server._turn()


def test_a_call_that_finds_nothing_waiting_answers_nobody():
    with InprocServer({"m": affine(), "other": affine()}) as server:
        mine, engine = source(server), server.engine
        engine.retire(mine.grant.lane)
        engine.install(0, engine.slots[0].served, arena=1)
        engine.rest(0, "it sleeps")
        engine.resume(0)
        engine.remove(0)
        assert mine.answers == []


@pytest.mark.parametrize("when", ["it was refused", "it sleeps"])
def test_a_model_that_is_unloaded_is_not_found_whatever_it_answered_before(x, when):
    with InprocServer({"m": affine()}) as server:
        client, engine = server.model("m"), server.engine
        if when == "it sleeps":
            engine.rest(0, when)
        else:
            engine.refuse(0, Code.MODEL_FAILED, when)
        engine.remove(0)
        with pytest.raises(ModelNotFound, match="not served by this engine"):
            client.infer(x[:1])


@pytest.mark.parametrize("how", ["replaced", "unloaded", "refused", "unloaded while it sleeps"])
def test_a_model_that_is_served_no_longer_is_closed_once(how):
    with InprocServer({"m": affine(), "other": affine()}) as server:
        engine, closed = server.engine, []
        served = engine.slots[0].served
        served.close = lambda: closed.append(how)
        if "sleeps" in how:
            engine.rest(0, "it sleeps")
            assert closed == []
        if how == "replaced":
            engine.install(0, engine.slots[1].served)
        elif how == "refused":
            engine.refuse(0, Code.MODEL_FAILED, "it crashed")
        else:
            engine.remove(0)
        engine.remove(0)
        assert closed == [how]


def test_a_slot_that_a_model_has_already_stays_open_and_keeps_what_waits(x):
    with InprocServer({"m": affine()}) as server:
        mine, engine = source(server), server.engine
        slot, closed = engine.slots[0], []
        slot.served.close = lambda: closed.append(slot)
        mine.sends(2)
        engine._take_in(0)
        engine.put(0, slot, 2)
        mine.sends(3)
        while server._turn():
            pass
        assert closed == [] and [code for _, code, *_ in mine.answers] == [Code.REFUSED, Code.OK]


def test_an_engine_that_takes_no_more_refuses_the_tickets_of_all_transports_in_one_turn():
    with InprocServer({"m": affine()}) as server:
        first, second = source(server), source(server)
        server.engine.refuse_new(Code.DRAINING, "the server is stopping")
        first.sends(1)
        second.sends(1, 1)
        assert not server._turn()
        assert first.answers == [(1, Code.DRAINING, 0, "the server is stopping")]
        assert second.answers == [(2, Code.DRAINING, 0, "the server is stopping")]


def test_a_reason_is_sent_as_plain_text_whatever_is_in_it():
    with InprocServer({"m": affine()}) as server:
        mine, reason = source(server), "half \ud800 a pair\0 and \x1b[31m"
        server.engine.refuse(0, Code.MODEL_FAILED, reason)
        mine.sends(1)
        server._turn()
        assert mine.answers == [(1, Code.MODEL_FAILED, 0, plain(reason))] and plain(reason) != reason


def test_a_lease_that_ends_takes_its_sessions_and_its_memory_along_also_from_models_that_sleep():
    with InprocServer({name: affine() for name in "abc"}) as server:
        engine, forgotten = server.engine, []
        engine.regions = SimpleNamespace(forget=lambda lease: forgotten.append(("regions", lease)))
        for number, slot in engine.slots.items():
            slot.served.forget = lambda lease, number=number: forgotten.append((number, lease))
        engine.rest(1, "it sleeps")
        engine.retire(3, 17)
        assert set(forgotten) == {("regions", 17), (0, 17), (1, 17), (2, 17)} and len(forgotten) == 4


def test_every_updater_of_weights_is_told_to_stop_before_any_is_waited_for():
    with InprocServer({name: affine() for name in "abc"}) as server:
        engine, events = server.engine, []
        for number in (0, 2):
            engine.slots[number].served.weights_updater = SimpleNamespace(
                stop=lambda number=number: events.append(("stop", number)),
                join=lambda number=number: events.append(("join", number)),
            )
        engine.stop_updaters()
        assert events == [("stop", 0), ("stop", 2), ("join", 0), ("join", 2)]


@pytest.mark.parametrize("how", ["resumed", "loaded anew"])
def test_a_model_that_is_served_again_gives_no_reason_of_the_time_before(how):
    with InprocServer({"m": affine()}) as server:
        other, engine = source(server), server.engine
        served = engine.slots[0].served
        if how == "resumed":
            engine.rest(0, "it sleeps")
            engine.resume(0)
        else:
            engine.refuse(0, Code.MODEL_FAILED, "it crashed")
            engine.install(0, served)
        engine.scoreboard.lanes["arena"][other.grant.lane] = 1
        other.sends(1)
        server._turn()
        reason = "the lane's model is not served by this engine (any more)"
        assert other.answers == [(1, Code.MODEL_NOT_FOUND, 0, reason)]


def test_each_ticket_is_refused_for_its_own_reason():
    with InprocServer({name: affine() for name in "abc"}) as server:
        a, b, c = (source(server, number) for number in range(3))
        server.engine.refuse(0, Code.MODEL_FAILED, "it crashed")
        server.engine.remove(1)
        a.sends(1, 1)
        b.sends(1)
        c.sends(0)
        c.sends(1)
        c.sends(8)
        for _ in range(3):
            server.engine._take_in(0)
        assert a.answers == [(2, Code.MODEL_FAILED, 0, "it crashed")]
        assert b.answers == [(1, Code.MODEL_NOT_FOUND, 0, "the lane's model is not served by this engine (any more)")]
        assert [(n, code, version) for n, code, version, _ in c.answers] == [
            (1, Code.REFUSED, 0),
            (1, Code.BUSY, 0),
        ]
        assert "no rows" in c.answers[0][3] and "more rows than the lane has" in c.answers[1][3]


def test_no_batch_begins_while_a_load_holds_the_engine(x, monkeypatch):
    held = [True]
    monkeypatch.setattr(core, "LOADS", SimpleNamespace(running=True, hold=lambda: held[0]))
    with InprocServer({"m": affine()}) as server:
        mine = source(server)
        mine.sends(1)
        assert server._turn() is True and mine.answers == [], "the loop does not sleep meanwhile"
        held[0] = False
        assert server._turn() is True and len(mine.answers) == 1


def test_a_client_that_chooses_an_engine_at_its_answer_is_shown_the_wait_without_the_answered_batch(x):
    with InprocServer({"m": affine()}, max_batch=2) as server:
        mine, engine, shown = source(server), server.engine, []
        engine._one_of_several = True
        answer = mine.reply

        def reply(*given):
            shown.append(int(engine.scoreboard.engines["expected_wait"][0]))
            answer(*given)

        mine.reply = reply
        mine.sends(1, 1, 1, 1, 1)
        for _ in range(3):
            engine._batches.mean_ns, engine._batches.one_ns = 1000.0, 10.0
            server._turn()
        assert shown == [1010, 10, 10], "full batches that wait"


def test_a_batch_under_way_on_a_device_counts_in_the_wait_that_clients_are_shown(world):
    crowd = world([BATCH] * 2, DeviceWorld)
    engine, shown = crowd.engine, []
    served = engine.slots[0].served
    begin = served.begin

    def noted(*given):
        shown.append(int(crowd.scoreboard.engines["expected_wait"][0]))
        return begin(*given)

    served.begin = noted
    engine._batches.mean_ns, engine._batches.one_ns = 1000.0, 10.0
    crowd.asks[1] = crowd.now + 1
    assert engine.turn()
    crowd.now += 1
    assert engine.turn()
    assert shown == [1010, 2010]
    failed = np.zeros(1, TICKET)
    failed["lane"] = failed["rows"] = 1
    engine._batches.mean_ns, engine._batches.one_ns = 1000.0, 10.0
    engine._recovery.add(engine.slots[0], [failed], 0)
    assert engine._batches.under_way == 1 and engine.turn()
    assert shown[2:] == [3010], "it waits for the one under way, and for itself"
