"""Batches whose rows are in clients' device memory, and what a model on a device keeps, waits for and reports."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.models import VECTOR
from tests.unit.engine.test_device_served import CPU, ROWS, Arena, Plus, Replayed, served, tickets

from jurybox.protocol import TensorSpec
from jurybox.server.engine import device as device_module
from jurybox.server.engine.device import DeviceServed, Stream, pays
from jurybox.server.engine.device_regions import Binding
from jurybox.server.models import ServedModel


def bound(first, rows, *, event=0):
    """Rows in a client's memory, of which the inputs are 100, 101 and so on."""
    binding = Binding({"first": first, "rows": rows})
    binding.inputs = {"observation": torch.arange(100.0, 100 + rows)[:, None].expand(rows, 4).clone()}
    binding.outputs = {"action": torch.zeros(rows, 4)}
    binding.event = event
    return binding


class Regions:
    """Regions in which each ticket of a batch has these places."""

    def __init__(self, *places):
        self.places, self.waits = list(places), []
        self.driver = SimpleNamespace(wait=lambda event, stream: self.waits.append((event, stream)))

    def of(self, given):
        assert len(given) == len(self.places)
        return self.places


def run(given, *places, finite=False):
    """Compute a batch; return the arena, and the events that its copies waited for."""
    arena, regions = Arena(), Regions(*places)
    arena.outputs["action"][:] = -1
    model = ServedModel(Plus(), VECTOR, {"action": TensorSpec("float32", (4,), finite=finite)})
    one = DeviceServed("m", model, arena.inputs, arena.outputs, arena.memory, ROWS, CPU, regions=regions)
    for buffer in one._buffers:
        buffer.joined_rows = ROWS  # as on a GPU, where graphs would copy small batches from the arena
    with torch.inference_mode():
        assert one.run(given, int(given["rows"].sum())) is None
    return arena, regions.waits


def test_outputs_of_rows_in_device_memory_are_written_there_and_not_to_the_arena():
    first, second = bound(2, 3), bound(8, 2)
    arena, _ = run(tickets((3, 2), (8, 1)), first, second)
    assert first.outputs["action"][:, 0].tolist() == [0, 102, 103]
    assert second.outputs["action"][:, 0].tolist() == [101, 0]
    assert (arena.outputs["action"] == -1).all()


def test_rows_of_the_arena_are_computed_in_a_batch_with_rows_in_device_memory():
    place = bound(2, 3)
    arena, _ = run(tickets((3, 2), (8, 1)), place, None)
    assert place.outputs["action"][:, 0].tolist() == [0, 102, 103]
    np.testing.assert_array_equal(arena.outputs["action"][8], arena.inputs["observation"][8] + 1)
    assert (arena.outputs["action"][9:] == -1).all()


def test_outputs_that_are_promised_to_be_finite_are_copied_to_the_host_too_since_it_checks_them():
    place = bound(3, 2)
    arena, _ = run(tickets((3, 2)), place, finite=True)
    assert place.outputs["action"][:, 0].tolist() == [101, 102]
    assert arena.outputs["action"][3:5, 0].tolist() == [101, 102]


def test_the_copies_of_a_batch_wait_once_for_each_event_of_its_clients():
    both = bound(0, 4, event=7)
    _, waits = run(tickets((0, 1), (2, 2), (5, 1), (6, 1)), both, both, bound(5, 1, event=9), bound(6, 1))
    assert waits == [(7, 0), (9, 0)]


def test_a_results_memory_is_kept_until_it_is_copied_unless_a_graph_has_it():
    class Keeps(Stream):
        def keep(self, tensor):
            kept.append(tensor[:, 0].tolist())

    place = bound(0, 2)
    for graphs, expected in ((None, [[1, 5]]), (SimpleNamespace(run=lambda rows: {"action": torch.ones(rows, 4)}), [])):
        model, kept = served(Arena()), []
        model._buffers[0].copies, model._buffers[0].graphs = Keeps(CPU), graphs
        with torch.inference_mode():
            model.run(tickets((0, 2)), 2)
        assert kept == expected
    model, kept = served(Arena()), []
    model._regions, model._buffers[0].copies = Regions(place), Keeps(CPU)
    with torch.inference_mode():
        model.run(tickets((0, 2)), 2)
    assert kept == [[101, 102]]


@pytest.mark.parametrize("is_cuda", [False, True])
def test_memory_of_the_device_is_kept_for_a_stream_by_torchs_allocator(monkeypatch, is_cuda):
    queue, kept = SimpleNamespace(cuda_stream=77), []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: queue)
    tensor = SimpleNamespace(is_cuda=is_cuda, record_stream=kept.append)
    stream = Stream(torch.device("cuda", 0))
    stream.keep(tensor)
    assert kept == [queue] * is_cuda and stream.pointer == 77
    Stream(CPU).keep(tensor)
    assert kept == [queue] * is_cuda and Stream(CPU).pointer == 0


class Buffer:
    """A staging buffer that notes when its graphs are captured."""

    def __init__(self, *given):
        self.captured = 0

    def capture(self, alone):
        self.captured += 1


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes models on any device, of which one that is no CPU need not be there."""
    monkeypatch.setattr(device_module, "_StagingBuffer", Buffer)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    arena, reports = Arena(), []
    model = ServedModel(torch.nn.Tanh(), VECTOR, {"action": TensorSpec("float32", (4,))})

    def make(device, *, held=True, **more):
        lock = SimpleNamespace(held=held, reason="" if held else "cudaHostRegister returned 2")
        monkeypatch.setattr(device_module, "PageLock", lambda memory, device: lock)
        return DeviceServed(
            "m", model, arena.inputs, arena.outputs, arena.memory, ROWS, device,
            report=lambda event, **fields: reports.append((event, fields)), **more,
        )  # fmt: skip

    return make, reports


@pytest.mark.parametrize(
    ("device", "held", "told"), [("cuda:0", False, True), ("cuda:0", True, False), ("cpu", False, False)]
)
def test_an_arena_that_could_not_be_page_locked_for_a_gpu_is_reported_with_the_reason(elsewhere, device, held, told):
    make, reports = elsewhere
    make(device, held=held)
    assert reports == [("arena not page-locked", {"model": "m", "reason": "cudaHostRegister returned 2"})] * told


@pytest.mark.parametrize(
    ("device", "graphs", "captured"), [("cuda:0", True, 1), ("cuda:0", False, 0), ("cpu", True, 0), ("cpu", False, 0)]
)
def test_graphs_are_captured_on_a_gpu_if_the_settings_say_so(elsewhere, device, graphs, captured):
    make, _ = elsewhere
    one = make(device, graphs=graphs)
    one._capture()
    assert [buffer.captured for buffer in one._buffers] == [captured] * 2


def test_a_batch_of_one_launch_is_computed_with_the_version_that_it_asks_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: None)
    monkeypatch.setattr(device_module, "Graphs", Replayed)
    one, used = served(Arena()), []
    with torch.inference_mode():
        for buffer in one._buffers:
            buffer.capture(None)
        one.weights_updater = SimpleNamespace(use=used.append, version=9)
        for version in (0, 7):
            one.run(tickets((0, 2)), 2, version)
    assert used == [0, 7]


def test_a_batch_that_is_too_large_for_one_launch_is_still_computed_by_a_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: None)
    monkeypatch.setattr(device_module, "Graphs", Replayed)
    monkeypatch.setattr(device_module, "_JOINED_BYTES", 0)
    arena, seen = Arena(), []
    one = served(arena)
    one._buffers[1].capture(None)
    one._buffers[1].graphs.forward = lambda part: (
        seen.append(len(part["observation"])) or {"action": part["observation"] + 5}
    )
    one._buffers.reverse()
    with torch.inference_mode():
        one.run(tickets((2, 3)), 3)
    assert seen == [4]
    np.testing.assert_array_equal(arena.outputs["action"][2:5], arena.inputs["observation"][2:5] + 5)


def test_a_model_of_certain_shapes_is_called_with_the_next_larger_one():
    class Notes(torch.nn.Module):
        def forward(self, observation):
            seen.append(len(observation))
            return observation + 1

    arena, seen = Arena(), []
    one = served(arena, Notes())
    one.shapes = (4, 16)
    with torch.inference_mode():
        for rows in (2, 4, 5):
            one.run(tickets((3, rows)), rows)
            expected = arena.inputs["observation"][3 : 3 + rows] + 1
            np.testing.assert_array_equal(arena.outputs["action"][3 : 3 + rows], expected)
    assert seen == [4, 4, 16]


def test_whole_numbers_stay_as_they_came():
    class Next(torch.nn.Module):
        def forward(self, n):
            return n + 1

    spec = {"n": TensorSpec("int64", ())}
    arrays = {"n": np.full(4, 2**40, np.int64)}, {"y": np.zeros(4, np.int64)}
    model = ServedModel(Next(), spec, {"y": TensorSpec("int64", ())})
    one = DeviceServed("m", model, *arrays, np.zeros(1, np.uint8), 4, CPU)
    with torch.inference_mode():
        one.run(tickets((1, 2)), 2)
    assert arrays[1]["y"].tolist() == [0, 2**40 + 1, 2**40 + 1, 0]


@pytest.mark.parametrize(
    ("columns", "held", "firsts", "gathered"),
    [
        (1 << 14, True, [(1, 2), (5, 1)], 0),  # 64 KiB each
        (1 << 14, False, [(1, 2), (5, 1)], 1),
        (4, True, [(1, 2), (5, 1)], 1),
        (4, True, [(1, 2), (3, 1)], 0),
    ],
    ids=["large and apart", "not locked", "small and apart", "small and together"],
)
def test_rows_are_gathered_first_unless_the_device_can_read_them_where_they_are_and_that_pays(
    monkeypatch, columns, held, firsts, gathered
):
    row, calls = TensorSpec("float32", (columns,)), []
    arrays = {"x": np.arange(8.0, dtype=np.float32)[:, None].repeat(columns, 1)}, {"y": np.zeros((8, columns), "f4")}
    model = ServedModel(torch.nn.Identity(), {"x": row}, {"y": row})
    one = DeviceServed("m", model, *arrays, np.zeros(1, np.uint8), 8, CPU)
    one._lock.held = held
    gather = device_module._StagingBuffer._gather
    monkeypatch.setattr(
        device_module._StagingBuffer, "_gather", lambda self, *given: (calls.append(1), gather(self, *given))
    )
    with torch.inference_mode():
        one.run(tickets(*firsts), 3)
    one._lock.held = False
    asked = [first + at for first, rows in firsts for at in range(rows)]
    assert arrays[1]["y"][:, -1].tolist() == [at if at in asked else 0 for at in range(8)]
    assert len(calls) == gathered


def test_a_copy_for_each_run_pays_from_64_kib_a_run_on():
    assert pays([(0, 1), (5, 1)], 65536) and not pays([(0, 1), (5, 1)], 65535)


def test_a_model_that_sleeps_has_no_memory_for_its_inputs():
    one = served(Arena())
    kept = [weakref.ref(buffer._inputs["observation"]) for buffer in one._buffers]
    one.sleep()
    assert [tensor() for tensor in kept] == [None, None]
