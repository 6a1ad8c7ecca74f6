"""The engine's core, turn by turn, without a socket."""

import time

import numpy as np
import pytest
import torch
from tests.models import VECTOR, affine, moody, two

from jurybox.client import ModelFailed, ModelNotFound, Refused, Timeout
from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import Code
from jurybox.protocol.scoreboard import COUNTERS
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.batches import ModelCounters
from jurybox.server.engine.queues import PASSED_OVER
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel
from tests import open_models


class Small(torch.nn.Module):
    """A model with memory for so many rows."""

    def __init__(self, rows):
        super().__init__()
        self.rows, self.batches = rows, []

    def forward(self, observation):
        if len(observation) > self.rows:
            raise torch.OutOfMemoryError("out of memory")
        self.batches.append(len(observation))
        return observation + 1


@pytest.fixture
def x():
    return np.arange(64, dtype=np.float32).reshape(16, 4)


def together(model, x, each=1):
    """Submit x in tickets of `each` rows, so that one turn finds them all, and collect."""
    tickets = [model.submit(x[i : i + each]) for i in range(0, len(x), each)]
    return np.concatenate([ticket.result().outputs for ticket in tickets])


def test_requests_that_wait_together_are_one_batch(x):
    module = Small(64)
    served = ServedModel(module, VECTOR, {"action": TensorSpec("float32", (4,))})
    with InprocServer({"m": served}) as server:
        np.testing.assert_array_equal(together(server.model("m"), x), x + 1)
    assert module.batches == [16]


def test_a_batch_too_large_for_the_memory_is_halved_and_so_are_later_ones(x):
    module = Small(5)
    served = ServedModel(module, VECTOR, {"action": TensorSpec("float32", (4,))})
    with InprocServer({"m": served}) as server:
        model = server.model("m")
        np.testing.assert_array_equal(together(model, x), x + 1)
        np.testing.assert_array_equal(together(model, x), x + 1)
    assert max(module.batches) <= 5
    assert module.batches[4:8] == [4, 4, 4, 4]


def test_a_single_ticket_too_large_for_the_memory_is_an_error(x):
    served = ServedModel(Small(5), VECTOR, {"action": TensorSpec("float32", (4,))})
    with InprocServer({"m": served}) as server, pytest.raises(ModelFailed, match="out of memory"):
        server.model("m").infer(x)


def test_scattered_rows_and_neighbours_give_the_same_answers():
    rng = np.random.default_rng(0)
    with InprocServer({"two": two()}, max_batch=8, rows=40) as server:
        first, second = server.model("two", rows=3), server.model("two", rows=5)
        for size_a, size_b in ((3, 5), (2, 4), (1, 1)):
            images = rng.integers(0, 255, (size_a + size_b, 64, 64, 3), dtype=np.uint8)
            scale = np.arange(size_a + size_b, dtype=np.float32)
            a = first.submit({"image": images[:size_a], "scale": scale[:size_a]})
            b = second.submit({"image": images[size_a:], "scale": scale[size_a:]})
            got = [a.result().outputs, b.result().outputs]
            brightness = np.concatenate([part["brightness"] for part in got])
            np.testing.assert_allclose(brightness, images.mean((1, 2, 3)) * scale, rtol=1e-5)


def test_models_share_an_engine_and_take_turns(x):
    with InprocServer({"a": affine(2.0, 0.0), "b": affine(3.0, 0.0)}) as server:
        a, b = server.model("a"), server.model("b")
        tickets = [(model, k, model.submit(x[i : i + 1]), i) for i in range(8) for model, k in ((a, 2), (b, 3))]
        for model, k, ticket, i in reversed(tickets):
            np.testing.assert_array_equal(ticket.result().outputs[0], k * x[i])


def test_tickets_that_arrive_together_are_queued_and_counted_by_model():
    tickets = np.zeros(4, TICKET)
    tickets["model"], tickets["rows"] = [0, 1, 2, 0], [2, 3, 5, 1]
    with InprocServer({name: affine() for name in "abc"}) as server:
        queues = [slot.queue for slot in server.engine._queues]
        server.engine._sort(tickets, 11, pinned=False, ranked=False)
        assert [(queue.rows, len(queue)) for queue in queues] == [(3, 2), (3, 1), (5, 1)]
        server.engine._sort(tickets[1:2], 3, pinned=False, ranked=False)
        assert [(queue.rows, len(queue)) for queue in queues] == [(3, 2), (6, 2), (5, 1)]
        for queue in queues:
            queue.drop(0)


def test_a_models_requests_of_a_higher_priority_precede_those_of_others_but_not_for_ever(x):
    order = []

    class Named(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, observation):
            order.append(self.name)
            return observation

    models = {name: ServedModel(Named(name), VECTOR, {"action": TensorSpec("float32", (4,))}) for name in "ab"}
    with InprocServer(models, max_batch=1) as server:
        normal, first = server.model("a", rows=16), server.model("b", rows=16, priority=1)
        tickets = [model.submit(x[:1]) for model in (normal, first) for _ in range(16)]
        order.clear()  # without what warmed them up
        for ticket in tickets:
            ticket.result()
    assert order[:9] == ["b"] * PASSED_OVER + ["a"] and order[9:18] == ["b"] * PASSED_OVER + ["a"]


def test_an_expired_ticket_is_not_computed(x):
    with InprocServer({"moody": moody()}) as server:
        model = server.model("moody")
        ticket = model.submit(x[:1], timeout=-1.0)
        with pytest.raises(Timeout, match="deadline passed"):
            ticket.result(timeout=5)


def test_rows_left_for_a_later_batch_are_shown_as_waiting(x):
    seen = []

    class Watching(torch.nn.Module):
        def forward(self, observation):
            seen.append(int(server.engine.scoreboard.counters[0, 0]["waiting"]))
            return observation + 1

    served = ServedModel(Watching(), VECTOR, {"action": TensorSpec("float32", (4,))})
    with InprocServer({"m": served}, max_batch=4) as server:
        together(server.model("m"), x[:10])
    assert seen == [6, 2, 0]


def test_an_engine_that_got_larger_batches_is_not_shown_as_slower():
    """Clients choose an engine by this wait: that of a ticket of few rows, whatever the last batches were."""

    now = time.monotonic_ns()

    class Rowwise(torch.nn.Module):
        def forward(self, observation):
            nonlocal now
            now += 2_000_000 * len(observation)
            return observation + 1

    def wait(*batches):
        served = ServedModel(Rowwise(), VECTOR, {"action": TensorSpec("float32", (4,))})
        with InprocServer({"m": served}, max_batch=16) as server:
            server.engine._clock = server.engine._batches._clock = lambda: now
            model = server.model("m")
            for rows in batches:
                model.infer(np.zeros((rows, 4), np.float32))
            server.engine.turn()
            return int(server.engine.scoreboard.engines["expected_wait"][0]) / 1e9

    one = wait(*[1] * 30)
    assert one == pytest.approx(0.002, rel=0.1)
    assert 0.9 * one < wait(*[2, 12] * 15) < 2 * one
    assert wait(*[8] * 30) < 2 * one, "batches of one size do not show what a row costs: expect the least"


def test_one_of_several_engines_that_was_slow_and_gets_no_tickets_is_asked_again_in_the_end():
    now = 0
    served = ServedModel(torch.nn.Identity(), VECTOR, {"action": TensorSpec("float32", (4,))})
    with InprocServer({"m": served}) as server:
        engine = server.engine
        engine._clock = engine._batches._clock = lambda: now
        engine._one_of_several = True
        shown = engine.scoreboard.engines["expected_wait"]

        def slow():
            nonlocal now
            now += 80_000_000

        module = next(iter(engine.slots.values())).served.module
        module.register_forward_hook(lambda *_: slow())
        model = server.model("m")
        for _ in range(100):
            model.infer(np.zeros((1, 4), np.float32))
        engine.turn()
        assert shown[0] == pytest.approx(80_000_000, rel=0.01)
        for seconds, wait in ((0.9, 80e6), (1, 40e6), (3.5, 10e6), (12, 19.5e3), (1000, 0)):
            now = engine._batches.ended + int(seconds * 1e9)
            for _ in range(3):
                engine.turn()
            assert shown[0] == pytest.approx(wait, rel=0.02, abs=1)
        engine._one_of_several = False
        engine.turn()
        assert shown[0] == pytest.approx(80_000_000, rel=0.01), "alone, nobody asks it less for it"


def test_the_counters_of_a_successor_go_on_but_for_its_sessions_and_the_newest_version_never_falls():
    shown = np.zeros(1, COUNTERS)
    shown["requests"], shown["sessions"] = 7, 3
    counters = ModelCounters(shown)
    counters.show()
    assert (shown["requests"], shown["sessions"]) == (7, 0)
    for version in (5, 4):
        counters.adopted(version, 0.001)
        assert (shown["version"], shown["newest"]) == (version, 5)
    assert shown["updates"] == 2 and shown["adopt_ns"].sum() == 2


@pytest.mark.parametrize(("seconds", "bucket"), [(-1.0, 0), (0.0, 0), (1e-9, 1), (1.0, 30), (540.0, 39), (1e6, 39)])
def test_the_time_of_an_update_is_counted_by_its_size_and_the_longest_together(seconds, bucket):
    shown = np.zeros(1, COUNTERS)
    ModelCounters(shown).adopted(1, seconds)
    assert shown["adopt_ns"][0].nonzero()[0].tolist() == [bucket]
    assert shown["adopt_total_ns"] == max(0, int(seconds * 1e9))


@pytest.mark.parametrize("how", ["expired", "retired", "forgotten"])
def test_rows_that_wait_no_longer_are_not_shown_as_waiting(x, how):
    with InprocServer({"a": affine()}, max_batch=4) as server:
        model = server.model("a")
        record = server.engine.scoreboard.counters[0, 0]
        for i in range(0, 12, 2):
            model.submit(x[i : i + 2])
        server._turn()
        assert record["waiting"] == 8
        lane = server.engine.transports[0].lane
        if how == "expired":
            server.engine.slots[0].queue.waiting["deadline"] = 1
            server._turn()
        elif how == "retired":
            server.engine.retire(lane)
        else:
            server.engine.forget_all()
        assert record["waiting"] == 0 and not server._turn()


def test_a_lanes_rows_may_be_sent_again_after_all_tickets_were_forgotten(x):
    with InprocServer({"a": affine()}) as server:
        model = server.model("a")
        forgotten = model.submit(x)
        server.engine._take_in(server.engine._clock())
        server.engine.forget_all()
        transport = server.engine.transports[0]
        transport.send(forgotten._sent)
        np.testing.assert_array_equal(forgotten.result().outputs, 2 * x + 1)


def test_rows_that_wait_are_shown_again_after_another_process_has_overwritten_the_record(x):
    with InprocServer({"a": affine()}, max_batch=4) as server:
        model = server.model("a")
        tickets = [model.submit(x[i : i + 2]) for i in range(0, 12, 2)]
        server._turn()
        record = server.engine.scoreboard.counters[0, 0]
        shown = record.copy()
        server.engine.scoreboard.counters[0, 0] = 0
        server.engine.show_counters()
        assert record == shown and record["waiting"] == 8
        np.testing.assert_array_equal(tickets[-1].result().outputs, 2 * x[10:12] + 1)


def test_a_model_that_comes_while_another_rests_in_its_place_is_served_and_unloaded_and_the_other_is_gone(x):
    with InprocServer({"a": affine()}) as server:
        model, engine = server.model("a"), server.engine
        closed, old = [], engine.slots[0]
        old.release = lambda: closed.append(1)
        engine.rest(0, "for a while")
        engine.install(0, old.served)
        np.testing.assert_array_equal(model.infer(x), 2 * x + 1)
        assert closed == [1] and engine.resting(0) is None
        engine.resume(0)
        assert engine.slots[0] is not old
        engine.remove(0)
        assert 0 not in engine.slots and engine.resting(0) is None


def test_the_number_of_sessions_with_state_is_shown():
    with InprocServer({"sum": open_models.running_sum()}) as server, server.model("sum", rows=2).sessions(2) as two:
        record = server.engine.scoreboard.counters[0, 0]
        for steps in range(3):
            server.engine.show_counters()
            assert record["sessions"] == (2 if steps else 0)
            two.infer(np.ones((2, 1), np.float32))


def test_a_model_that_was_unloaded_answers_nobody(x):
    with InprocServer({"a": affine(), "b": affine()}, max_batch=4) as server:
        a, b = server.model("a"), server.model("b")
        a.infer(x[:1])
        waiting, other = a.submit(x[:1]), b.submit(x[:1])
        server.engine._take_in(server.engine._clock())
        server.engine.remove(0)
        with pytest.raises(ModelNotFound, match="'a' was unloaded"):
            waiting.result()
        assert (server.engine.scoreboard.counters[0, 0] == np.zeros((), COUNTERS)).all(), (
            "another model gets its number"
        )
        with pytest.raises(ModelNotFound, match="not served by this engine"):
            a.infer(x[:1])
        np.testing.assert_array_equal(other.result().outputs, 2 * x[:1] + 1)
        server.engine.remove(0)


@pytest.mark.parametrize("passed_by", [False, True])
def test_an_engine_that_takes_no_more_answers_what_had_arrived_by_every_transport(x, passed_by):
    """Also by the slow ones, which a busy engine skips every second time."""
    with InprocServer({"a": affine()}) as server:
        quick, slow = server.model("a"), server.model("a")
        tickets = [model.submit(x[:1]) for model in (quick, slow)]
        server.engine.transports[1].slow = True
        server.engine._passed_by = passed_by
        server.engine.refuse_new(Code.DRAINING, "the server is stopping")
        late = quick.submit(x[:1])
        for ticket in tickets:
            np.testing.assert_array_equal(ticket.result().outputs, 2 * x[:1] + 1)
        with pytest.raises(Refused, match="the server is stopping"):
            late.result()


def test_counters_count_events(x):
    with InprocServer({"moody": moody()}) as server:
        model = server.model("moody")
        together(model, x, each=4)
        with pytest.raises(ModelFailed):
            model.infer(np.full((2, 4), 666, np.float32))
        record = server.engine.scoreboard.counters[0, 0]
        assert (record["requests"], record["rows"], record["failed"]) == (4, 16, 1)
        assert record["batch_rows"].sum() == record["batches"]
        assert record["request_ns"].sum() == record["queue_ns"].sum() == 4


def test_the_scoreboard_names_the_model_that_is_computed_and_none_when_there_is_nothing_to_do(x):
    """By this name a model is known that has ended its engine's process."""
    seen = []

    class Watching(torch.nn.Module):
        def forward(self, observation):
            seen.append(int(server.engine.scoreboard.engines["computing"][0]))
            return observation + 1

    models = {name: ServedModel(Watching(), VECTOR, {"action": TensorSpec("float32", (4,))}) for name in "ab"}
    with InprocServer(models) as server:
        assert server.engine.computed == ""
        for name in "bab":
            server.model(name).infer(x[:1])
            assert server.engine.computed == name
        assert seen == [2, 1, 2]
        assert not server._turn() and server.engine.scoreboard.engines["computing"][0] == 0


@pytest.mark.parametrize("waits", [(700, 400, 300), (400, 700, 300)])
def test_batches_that_are_held_back_are_due_when_the_first_of_them_is(x, waits):
    now = 0
    with InprocServer({"a": affine(), "b": affine(), "c": affine()}) as server:
        engine = server.engine
        engine._clock = engine._batches._clock = lambda: now
        for slot, wait in zip(engine.slots.values(), waits, strict=True):
            slot.queue.min_batch, slot.queue.max_wait_ns = 4, wait
        now = time.monotonic_ns()
        assert engine.ready_in() is None
        tickets = [server.model(name).submit(x[:1]) for name in "ab"]
        for slot in engine.slots.values():
            engine._take_in(now)
            slot.queue.waiting["submitted"] = now
        assert engine.ready_in() == 400 and not engine.turn()
        now += 399
        assert engine.ready_in() == 1 and not engine.turn()
        now += 1
        with torch.inference_mode():
            assert engine.ready_in() == 0 and engine.turn()
        assert engine.ready_in() == 300 and not engine.turn()
        now += 300
        for ticket in tickets:
            np.testing.assert_array_equal(ticket.result().outputs, 2 * x[:1] + 1)


def test_a_model_that_rests_answers_that_it_sleeps_until_it_is_resumed(x):
    with InprocServer({"a": affine(), "b": affine()}) as server:
        a, b, engine = server.model("a"), server.model("b"), server.engine
        waiting, other = a.submit(x[:1]), b.submit(x[:1])
        engine._take_in(engine._clock())
        slot = engine.slots[0]
        assert engine.rest(0, "it sleeps") is slot and engine.resting(0) is slot and engine.resting(1) is None
        assert engine.scoreboard.counters[0, 0]["waiting"] == 0
        for ticket in (waiting, a.submit(x[:1])):
            with pytest.raises(Refused, match="it sleeps") as asleep:
                ticket.result()
            assert asleep.value.code == Code.SLEEPING
        assert engine.rest(0, "twice") is None
        np.testing.assert_array_equal(other.result().outputs, 2 * x[:1] + 1)
        engine.resume(0)
        assert engine.resting(0) is None
        np.testing.assert_array_equal(a.infer(x), 2 * x + 1)
        engine.resume(0)


def test_a_resting_model_that_is_unloaded_is_not_resumed_and_frees_its_number(x):
    with InprocServer({"a": affine()}) as server:
        a, engine = server.model("a"), server.engine
        a.infer(x[:1])
        engine.rest(0, "it sleeps")
        engine.remove(0)
        assert (engine.scoreboard.counters[0, 0] == np.zeros((), COUNTERS)).all()
        engine.resume(0)
        with pytest.raises(ModelNotFound, match="not served by this engine"):
            a.infer(x[:1])


def test_tickets_that_wait_for_a_model_follow_it_to_its_successor_in_the_same_arena_only(x):
    with InprocServer({"a": affine()}, max_batch=4) as server:
        model, engine = server.model("a"), server.engine
        followed = model.submit(x[:2])
        engine._take_in(engine._clock())
        successor = engine.slots[0].served
        engine.install(0, successor)
        np.testing.assert_array_equal(followed.result().outputs, 2 * x[:2] + 1)
        left = model.submit(x[:2])
        engine._take_in(engine._clock())
        engine.install(0, successor, arena=1)
        assert engine.arena(0) == 1
        with pytest.raises(Refused, match="not leased to the sender"):
            left.result()
        assert engine.scoreboard.counters[0, 0]["waiting"] == 0


def test_answers_that_one_transport_cannot_send_keep_none_of_another_back(x):
    reported = []
    with InprocServer({"a": affine()}) as server:
        server.engine._report = lambda event, **fields: reported.append((event, fields))
        broken, good = server.model("a"), server.model("a")
        tickets = [model.submit(x[:1]) for model in (broken, broken, good)]

        def fail(*reply):
            raise OSError("no room in the socket")

        server.engine.transports[0].reply = fail
        np.testing.assert_array_equal(tickets[-1].result().outputs, 2 * x[:1] + 1)
    assert [(event, fields["error"]) for event, fields in reported] == [
        ("answers not sent", "OSError: no room in the socket")
    ]


def test_each_transport_has_its_own_number_also_after_another_has_gone():
    with InprocServer({"a": affine()}) as server:
        engine, model = server.engine, server.model("a")
        model.infer(np.zeros((1, 4), np.float32))
        first, second, third = (Source() for _ in range(3))
        engine.add_transport(first)
        engine.add_transport(second)
        engine.remove_transport(first)
        engine.add_transport(third)
        assert len({transport.number for transport in engine.transports}) == len(engine.transports) == 3


class Source:
    """A transport through which nothing comes."""

    number = 0
    slow = False

    def collect(self, out):
        return 0

    def reply(self, *reply):
        raise AssertionError("nobody asked")
