"""Batches on a device of its own: begun, overlapped, finished. On the CPU, where every stream is done at once."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.models import VECTOR
from tests.records import records
from tests.serving import wait_until

from jurybox import native
from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import Code, ModelFailed
from jurybox.protocol.scoreboard import COUNTERS
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.server.engine import weights_updater
from jurybox.server.engine.batches import Batches, ModelCounters, Slot
from jurybox.server.engine.device import (
    DeviceServed,
    Mark,
    Stream,
    bound_device_memory,
    joined_rows,
    neighbours,
    pays,
)
from jurybox.server.engine.graphs import ladder, rung
from jurybox.server.engine.queues import Queue
from jurybox.server.engine.weights_updater import WeightsUpdater
from jurybox.server.models import RowErrors, ServedModel

ROWS = 16
CPU = torch.device("cpu")


class Plus(torch.nn.Module):
    def __init__(self, most=ROWS):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(1))
        self.most = most

    def forward(self, observation):
        if len(observation) > self.most:
            raise torch.OutOfMemoryError("too much")
        if bool((observation < 0).any()):
            raise ValueError("negative")
        return observation + self.bias


class Arena:
    def __init__(self):
        self.memory = np.zeros(ROWS * 32, np.uint8)
        self.inputs = {"observation": self.memory[: ROWS * 16].view(np.float32).reshape(ROWS, 4)}
        self.outputs = {"action": self.memory[ROWS * 16 :].view(np.float32).reshape(ROWS, 4)}
        self.inputs["observation"][:] = np.arange(ROWS * 4).reshape(ROWS, 4)


def recovered(batches, slot):
    """Compute the parts of a slot's failed batches, as the engine's next turns do."""
    while slot in batches.recovery.parts:
        batches.recover(slot)


tickets = partial(records, ("first", "rows"))


@pytest.fixture
def arena():
    return Arena()


def served(arena, module=None):
    model = ServedModel(module or Plus(), VECTOR, {"action": TensorSpec("float32", (4,))})
    return DeviceServed("m", model, arena.inputs, arena.outputs, arena.memory, ROWS, CPU)


def slot_of(arena, module=None):
    return Slot(served(arena, module), Queue(ROWS), ModelCounters(np.zeros(1, COUNTERS)))


def noted(device=CPU):
    """Batches, and what they answered."""
    answers = []
    batches = Batches(
        lambda records, code, version, message: answers.append((records["sequence"].tolist(), code, message)),
        native.ArrivalTracker(8),
        lambda: 0,
        lambda event, **fields: None,
        device=device,
    )
    return batches, answers


def test_a_batch_that_waited_for_the_device_is_counted_from_when_it_was_free(arena):
    now, ends = [0], [100, 150, 1070]

    def ended(*answer):
        now[0] = ends.pop(0)

    batches = Batches(ended, native.ArrivalTracker(8), lambda: now[0], print)
    slot = slot_of(arena)
    with torch.inference_mode():
        batches.run(slot, tickets((0, 1)), 1, 0)
        now[0] = 10
        batches.run(slot, tickets((1, 2)), 2, 0)  # the first one ends meanwhile
        batches.land_all()
        now[0] = 1000
        batches.run(slot, tickets((0, 4)), 4, 0)
        batches.land_all()
    slot.counters.show()
    record = slot.counters._shown[0]
    assert (record["batches"], record["forward_total_ns"]) == (3, 100 + 50 + 70)


@pytest.fixture
def running(arena):
    """Batches, a function that makes a slot, and what they answered."""
    batches, answers = noted()
    return batches, partial(slot_of, arena), answers


def test_two_batches_are_under_way_and_answered_in_order(arena, running):
    batches, slot, answers = running
    slot = slot()
    with torch.inference_mode():
        batches.run(slot, tickets((0, 2), (5, 1)), 3, 0)
        assert batches.under_way == 1 and answers == []
        batches.run(slot, tickets((8, 4)), 4, 0)
    assert batches.under_way == 1  # the oldest was answered, the other may still compute
    assert answers == [([1, 2], Code.OK, "")]
    np.testing.assert_array_equal(arena.outputs["action"][[0, 1, 5]], arena.inputs["observation"][[0, 1, 5]] + 1)
    assert batches.land() and not batches.land()
    np.testing.assert_array_equal(arena.outputs["action"][8:12], arena.inputs["observation"][8:12] + 1)
    assert not arena.outputs["action"][[2, 3, 4, 6, 7, 12]].any()


def test_a_batch_under_way_is_waited_for_only_on_demand(arena, running, monkeypatch):
    batches, slot, answers = running
    busy = type("Busy", (), {"query": lambda self: False, "synchronize": lambda self: None})()
    monkeypatch.setattr(Stream, "mark", lambda self: Mark(busy))
    with torch.inference_mode():
        batches.run(slot(), tickets((0, 2)), 2, 0)
    assert batches.land() and batches.under_way == 1 and not answers  # not done: come again
    batches.land_all()
    assert batches.under_way == 0 and answers


def test_a_forward_waits_for_its_rows_and_the_copies_of_its_outputs_wait_for_it(arena):
    class Noted(Stream):
        def __init__(self, name):
            super().__init__(CPU)
            self.name = name

        def running(self):
            events.append(self.name)
            return super().running()

        def after(self, mark):
            events.append(f"{self.name} after {mark.event}")

        def mark(self):
            return Mark(self.name)

    model, events = served(arena), []
    model.forwards, model._buffers[0].copies = Noted("forwards"), Noted("copies")
    with torch.inference_mode():
        model.begin(tickets((0, 2)), 2)
    assert events == ["copies", "forwards after copies", "forwards", "copies after forwards", "copies"]


def test_a_batch_too_large_for_the_device_is_halved_after_the_others_are_answered(arena, running):
    batches, slot, answers = running
    slot = slot(Plus(most=4))
    with torch.inference_mode():
        batches.run(slot, tickets((12, 1)), 1, 0)
        batches.run(slot, tickets((0, 2), (2, 2), (4, 2), (6, 2)), 8, 0)
        recovered(batches, slot)
    assert [numbers for numbers, code, _ in answers if code == Code.OK] == [[1], [1, 2], [3, 4]]
    assert slot.queue.max_batch == 4
    np.testing.assert_array_equal(arena.outputs["action"][:8], arena.inputs["observation"][:8] + 1)


def test_a_batch_that_fails_fails_alone(arena, running):
    batches, slot, answers = running
    slot = slot()
    arena.inputs["observation"][3] = -1
    with torch.inference_mode():
        batches.run(slot, tickets((0, 2)), 2, 0)
        batches.run(slot, tickets((3, 1)), 1, 0)
        batches.run(slot, tickets((6, 1)), 1, 0)
    batches.land_all()
    assert [code for _, code, _ in answers] == [Code.OK, Code.MODEL_FAILED, Code.OK]
    assert "negative" in answers[1][2]


def test_a_batch_that_fails_at_its_end_leaves_the_next_one_its_answers(arena, running):
    class Reports(torch.nn.Module):
        """Reports the errors of rows in a form that is refused when the batch is finished."""

        def forward(self, observation):
            return RowErrors(["x"], observation) if bool((observation < 0).any()) else observation + 1

    batches, slot, answers = running
    slot = slot(Reports())
    arena.inputs["observation"][:2] = -1
    with torch.inference_mode():
        batches.run(slot, tickets((0, 1), (1, 1)), 2, 0)
        batches.run(slot, tickets((8, 2)), 2, 0)
        batches.land_all()
        recovered(batches, slot)
    assert sorted((numbers, code) for numbers, code, _ in answers) == [
        ([1], Code.OK),
        ([1], Code.MODEL_FAILED),
        ([2], Code.MODEL_FAILED),
    ]
    np.testing.assert_array_equal(arena.outputs["action"][8:10], arena.inputs["observation"][8:10] + 1)


def test_a_broken_promise_is_named(arena):
    class Wrong(torch.nn.Module):
        def forward(self, observation):
            return observation[:, :2]

    with torch.inference_mode(), pytest.raises(ModelFailed, match=r"shape \[2, 2\], the spec promises \[2, 4\]"):
        served(arena, Wrong()).run(tickets((0, 2)), 2)


def test_rows_beside_each_other_are_one_run():
    assert neighbours(tickets((4, 2), (6, 1), (9, 3), (12, 1), (0, 1))) == [(4, 3), (9, 4), (0, 1)]


@pytest.mark.parametrize(
    ("runs", "row_bytes", "direct"),
    [([(0, 1)], 208, True), ([(0, 1), (5, 1)], 208, False), ([(0, 1), (5, 1)], 442_368, True)],
)
def test_large_rows_are_copied_by_the_device_itself(runs, row_bytes, direct):
    assert pays(runs, row_bytes) is direct


def test_copying_straight_from_the_arena_gives_the_same(arena):
    model = served(arena)
    model._lock.held = True
    with torch.inference_mode():
        model.run(tickets((3, 4)), 4)
    np.testing.assert_array_equal(arena.outputs["action"][3:7], arena.inputs["observation"][3:7] + 1)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 64, 100])
def test_the_ladder_holds_every_batch_in_its_smallest_rung(max_batch):
    rungs = ladder(max_batch)
    assert rungs == sorted(set(rungs)) and rungs[-1] == max_batch
    for rows in range(1, max_batch + 1):
        chosen = rung(rungs, rows)
        assert chosen >= rows and not any(rows <= other < chosen for other in rungs)


def test_weights_are_adopted_on_the_modules_device(arena):
    module = Plus()
    layout = WeightsLayout.of(module.state_dict())
    owner = WeightsChannel.create(segment_name("adopttest", "weights"), layout)
    model, adopted = served(arena, module), []
    updater = WeightsUpdater(
        owner, module, CPU, 1, lambda action: action(), lambda version, _: adopted.append(version), model.forwards
    )
    model.weights_updater = updater
    address = module.bias.data_ptr()
    publisher = Publisher(owner)
    try:
        updater.start()
        for version in (1, 2, 3):
            publisher.publish({"bias": np.full(1, 100 * version, np.float32)})
            wait_until(lambda version=version: adopted[-1:] == [version], 10, "adoption")
            with torch.inference_mode():
                model.run(tickets((0, 1)), 1)
            np.testing.assert_array_equal(arena.outputs["action"][0], arena.inputs["observation"][0] + 100 * version)
        with torch.inference_mode():
            model.run(tickets((0, 1)), 1, 2)  # an earlier one that is still held
        np.testing.assert_array_equal(arena.outputs["action"][0], arena.inputs["observation"][0] + 200)
        assert module.bias.data_ptr() == address  # where a captured graph looks for it
    finally:
        model.close()
        updater.join()
        publisher.close()
        owner.close()


def test_a_publication_waits_for_the_copies_of_outputs_that_are_views_of_weights(arena):
    class Deferred(torch.overrides.TorchFunctionMode):
        """A stream's copies, which are done when somebody waits for them, as late as on a busy device."""

        def __init__(self):
            super().__init__()
            self.copies = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            call = partial(function, *args, **(kwargs or {}))
            return self.copies.append(call) if function is torch.Tensor.copy_ else call()

        def query(self):
            return not self.copies

        def synchronize(self):
            while self.copies:
                self.copies.pop(0)()

    class Late(Stream):
        def __init__(self, device):
            super().__init__(device)
            self.deferred = Deferred()

        def running(self):
            return self.deferred

        def mark(self):
            return Mark(self.deferred)

    class Head(torch.nn.Module):
        """Answers with its weights."""

        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.ones(1))

        def forward(self, observation):
            return self.bias.expand_as(observation)

    module = Head()
    model = served(arena, module)
    model.forwards.after = lambda mark: mark.wait()
    for buffer in model._buffers:
        buffer.copies = Late(CPU)
    with (
        WeightsChannel.create(segment_name("viewtest", "weights"), WeightsLayout.of(module.state_dict())) as channel,
        Publisher(channel) as publisher,
    ):
        updater = model.weights_updater = WeightsUpdater(
            channel,
            module,
            CPU,
            0,
            lambda action: action(),
            lambda version, _: None,
            model.forwards,
            before=model.after_outputs,
        )
        try:
            updater.start()
            with torch.inference_mode():
                first = model.begin(tickets((0, 2)), 2)
                publisher.publish({"bias": np.full(1, 100, np.float32)})
                wait_until(lambda: updater.version == 1, 10, "adoption")
                second = model.begin(tickets((2, 2)), 2)
                first.finish()
                second.finish()
        finally:
            model.close()
            updater.join()
    assert arena.outputs["action"][:4, 0].tolist() == [1, 1, 100, 100]


def test_an_error_that_stays_is_reported_again_after_a_while_and_another_one_at_once(monkeypatch):
    now, reports = 100.0, []
    monkeypatch.setattr(weights_updater, "time", SimpleNamespace(monotonic=lambda: now))
    report = weights_updater.seldom(lambda event, **fields: reports.append((event, fields)))
    for error, model in (("x", "a"), ("x", "b"), ("x", "a"), ("y", "a"), ("y", "a")):
        report("weights not adopted", error=error, model=model)
    assert [(fields["error"], fields["model"]) for _, fields in reports] == [("x", "a"), ("x", "b"), ("y", "a")]
    report("another event", error="y", model="a")
    assert len(reports) == 4
    now = 100.0 + weights_updater._AGAIN - 0.1
    report("weights not adopted", error="y", model="a")
    assert len(reports) == 4
    now = 100.0 + weights_updater._AGAIN
    report("weights not adopted", error="y", model="a")
    assert reports[4:] == [("weights not adopted", {"error": "y", "model": "a"})]
    report("weights not adopted", error="y", model="a")
    assert len(reports) == 5


def test_what_an_action_in_the_loop_raises_is_raised_where_it_was_asked_for_and_none_is_run_after_the_stop():
    stopped, done = threading.Event(), []

    def broken():
        raise ValueError("broken")

    weights_updater.in_loop(lambda act: act(), lambda: done.append(1), stopped)
    assert done == [1]
    with pytest.raises(ValueError, match="broken"):
        weights_updater.in_loop(lambda act: act(), broken, stopped)
    kept = []

    def later(act):
        kept.append(act)
        stopped.set()  # the loop has ended, and runs nothing more

    weights_updater.in_loop(later, lambda: done.append(2), stopped)
    kept[0]()
    assert done == [1]


def test_a_damaged_channel_is_reported_once_and_not_at_every_attempt(monkeypatch):
    monkeypatch.setattr(weights_updater, "_SLICE", 0.01)
    monkeypatch.setattr(weights_updater, "_AGAIN", 3600.0)
    module, reports, attempts = Plus(), [], []
    fill = weights_updater.Copy.fill

    def noted(self, timeout):
        attempts.append(timeout)
        return fill(self, timeout)

    with WeightsChannel.create(segment_name("damagetest", "weights"), WeightsLayout.of(module.state_dict())) as channel:
        updater = WeightsUpdater(
            channel,
            module,
            CPU,
            0,
            lambda action: action(),
            lambda version, age: None,
            report=lambda event, **_: reports.append(event),
        )
        updater.start()
        try:
            monkeypatch.setattr(weights_updater.Copy, "fill", noted)
            words = channel._words
            words[9], words[11], words[0] = 1, 1 << 40, 2  # a version 1 whose extra is larger than its slot
            wait_until(lambda: len(attempts) > 5, 10, "attempts")
        finally:
            updater.stop()
            updater.join()
    assert reports == ["weights not adopted"]


def test_an_engine_keeps_to_its_share_of_a_device(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Of", (), {"total_memory": 8 << 30}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: set_to.append(share))
    bound_device_memory(torch.device("cpu"), 1024)
    bound_device_memory(torch.device("cuda:0"), 0)
    assert not set_to
    bound_device_memory(torch.device("cuda:0"), 2048)
    bound_device_memory(torch.device("cuda:0"), 1 << 20)  # more than there is
    assert set_to == [0.25, 1.0]


class Replayed:
    """A graph that computes its forward again at every replay."""

    def __init__(self, inputs, forward, stream, max_batch, alone, beside=None):
        self.inputs, self.forward, self.rungs = inputs, forward, ladder(max_batch)
        for rows in self.rungs:
            self.run(rows)

    def run(self, rows):
        shape = rung(self.rungs, rows)
        results = self.forward({key: tensor[:shape] for key, tensor in self.inputs.items()})
        return {key: tensor[:rows] for key, tensor in results.items()}


def test_a_small_batch_is_one_launch_on_the_forwards_stream_and_a_large_one_is_copied_beside_others(arena, monkeypatch):
    class Noted(Stream):
        def __init__(self, name):
            super().__init__(CPU)
            self.name = name

        def running(self):
            events.append(self.name)
            return super().running()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: None)
    monkeypatch.setattr("jurybox.server.engine.device.Graphs", Replayed)
    monkeypatch.setattr("jurybox.server.engine.device._JOINED_BYTES", 4 * 32)  # four rows of the arena
    model, events = served(arena), []
    model.forwards = Noted("forwards")
    for buffer in model._buffers:
        buffer.copies = Noted("copies")
    with torch.inference_mode():
        for buffer in model._buffers:
            buffer.capture(None)
        for given, expected in (
            (tickets((0, 1)), ["forwards"]),
            (tickets((5, 1), (9, 2)), ["forwards"]),
            (tickets((11, 4)), ["forwards"]),
            (tickets((2, 5)), ["copies", "forwards", "copies"]),
        ):
            events.clear()
            arena.outputs["action"][:] = -1
            batches = model.begin(given, int(given["rows"].sum()))
            assert events == expected
            assert (arena.outputs["action"] == -1).all()  # nobody's rows are written before it is finished
            batches.finish()
            rows = np.concatenate([np.arange(first, first + n) for first, n in given[["first", "rows"]].tolist()])
            np.testing.assert_array_equal(arena.outputs["action"][rows], arena.inputs["observation"][rows] + 1)
            assert (np.delete(arena.outputs["action"], rows, 0) == -1).all()
        model.sleep()
        assert [buffer.joined_rows for buffer in model._buffers] == [0, 0]


def test_graphs_hold_the_copies_of_small_rows_only():
    def most(shape, max_batch):
        spec = ServedModel(Plus(), {"x": TensorSpec("uint8", shape)}, {"y": TensorSpec("float32")}).spec("m")
        return joined_rows(spec, max_batch)

    assert most((208,), 64) == 64
    assert most((208,), 1000) == 256
    assert most((4096,), 64) == 8
    assert most((384, 384, 3), 64) == 0


@pytest.mark.parametrize("here", [0, 1])
def test_a_stream_is_current_in_its_block_only_whatever_was_current_before(monkeypatch, here):
    """A program that serves in its own process has streams, and perhaps a device, of its own."""
    now = {"device": here, 0: "its stream on 0", 1: "its stream on 1"}

    class Cuda:
        device_index = 1

    def use(stream):
        now["device"] = 1
        now[1] = stream

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Cuda())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now["device"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[device])
    monkeypatch.setattr(torch.cuda, "set_stream", use)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: now.update(device=device))
    before = dict(now)
    stream = Stream(torch.device("cuda", 1))
    with pytest.raises(ValueError, match="no"), stream.running():
        assert (now["device"], type(now[1])) == (1, Cuda)
        raise ValueError("no")
    assert now == before


def test_a_graph_is_captured_on_a_stream_that_no_other_thread_can_be_given(arena, monkeypatch):
    """torch gives out the same 32 streams of one priority again and again, to models and to the threads of weights."""
    asked = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: asked.append(priority))
    monkeypatch.setattr("jurybox.server.engine.device.Graphs", Replayed)
    model = served(arena)
    model._buffers[0].capture(None)
    Stream(torch.device("cuda", 0))
    captured, other = asked
    assert captured != other
