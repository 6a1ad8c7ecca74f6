"""A GPU that fails: captures, memory, whole contexts, memory of another GPU. With fakes of torch's calls."""

import contextlib
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.serving import serving, wait_until
from tests.unit.engine.test_device_served import CPU, Arena, Plus, noted, recovered, served, slot_of, tickets

from jurybox.client import ModelFailed
from jurybox.protocol import TensorSpec
from jurybox.protocol.device_memory import FAKE, driver, page_lock
from jurybox.protocol.errors import Code, Refused
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout, publisher
from jurybox.protocol.weights.publisher import DeviceStage, Publisher
from jurybox.server.engine import batches as batches_module
from jurybox.server.engine import device as device_module
from jurybox.server.engine import graphs as graphs_module
from jurybox.server.engine import model_loader
from jurybox.server.engine.device import DeviceLost, engine_device, use_device
from jurybox.server.engine.device_regions import DeviceRegions, PublishedOnDevice
from jurybox.server.engine.graphs import Graphs, mend_random_numbers
from jurybox.server.engine.model_loader import ModelLoader, held
from jurybox.server.engine.process import CallbackQueue, EngineProcess
from jurybox.server.inproc import InprocServer
from jurybox.server.models import RowErrors, ServedModel
from tests import open_models

GPU = torch.device("cuda", 0)
LAYOUT = WeightsLayout.of(Plus().state_dict())

# ---- captures


class Cuda:
    """torch's streams and graphs, as far as a capture uses them; `events` is what happened, in order."""

    device = GPU

    def __init__(self, patch):
        self.current, self.events, self.fails, self.graphs = "default", [], "", []
        for name in ("stream", "graph", "CUDAGraph", "current_stream", "graph_pool_handle"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(graphs_module, "mend_random_numbers", lambda device: self.note("mended", device))
        patch.setattr(torch._C, "_cuda_endAllocateToPool", partial(self.note, "end"), raising=False)
        patch.setattr(torch._C, "_cuda_releasePool", partial(self.note, "release"), raising=False)

    def note(self, *event):
        self.events.append(event)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        """As torch's: a capture that cannot end leaves the thread on its stream."""
        assert (pool, capture_error_mode) == ((0, 7), "thread_local")
        before, self.current = self.current, "capturing"
        try:
            yield
        finally:
            if self.fails == "end":
                raise RuntimeError("operation failed due to a previous error during capture")
            graph.ended, self.current = True, before

    def CUDAGraph(self):
        class Graph:
            ended = False

            def pool(self):
                if not self.ended:
                    raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
                return 0, 7

        graph = Graph()
        self.graphs.append(weakref.ref(graph))
        return graph

    def current_stream(self, device):
        return self.current

    def graph_pool_handle(self):
        return 0, 7

    def wait_stream(self, other):
        self.note("after", other)

    def synchronize(self):
        self.note("synchronize")

    def captured(self, max_batch=2):
        @contextlib.contextmanager
        def alone():
            self.note("held")
            yield
            self.note("released")

        def forward(part):
            rows, capturing = len(part["x"]), self.current == "capturing"
            self.note("captured" if capturing else "computed", rows)
            if capturing and self.fails == "forward":
                raise ValueError("no")
            return part

        Graphs({"x": torch.zeros(max_batch, 1)}, forward, self, max_batch, alone)


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def test_graphs_are_captured_after_what_was_queued_and_while_no_other_thread_computes(cuda):
    cuda.captured()
    warm = [("computed", 2)] * 3 + [("synchronize",), ("held",), ("captured", 2), ("released",)]
    assert cuda.events == [("after", "default"), *warm, *((kind, *([1] * len(more))) for kind, *more in warm)]
    assert cuda.current == "default"


@pytest.mark.parametrize(("fails", "ended"), [("end", [("end", 0, (0, 7)), ("release", 0, (0, 7))]), ("forward", [])])
def test_a_failed_capture_leaves_nothing_behind(cuda, fails, ended):
    cuda.fails = fails
    with pytest.raises(Exception, match="previous error" if fails == "end" else "no"):
        cuda.captured()
    assert cuda.current == "default"
    after = cuda.events[cuda.events.index(("held",)) + 2 :]
    assert after == [*ended, ("mended", GPU)]  # before other models compute again, which may draw random numbers
    assert [each() is not None for each in cuda.graphs] == [fails == "end"]  # torch may still refer to that one


@pytest.mark.parametrize("lacks", [True, False])
def test_a_failed_capture_whose_memory_cannot_be_released_raises_its_own_error(cuda, monkeypatch, lacks):
    def refuse(*args):
        raise RuntimeError("not currently recording to this pool")

    cuda.fails = "end"
    if lacks:  # as before torch 2.8
        monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")
    else:
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    with pytest.raises(RuntimeError, match="previous error"):
        cuda.captured()
    assert not any(event[0] == "release" for event in cuda.events)


@pytest.fixture
def sound(monkeypatch):
    """A GPU's synchronisation, which succeeds."""
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    return calls


@pytest.mark.parametrize(("error", "tried"), [(RuntimeError("no"), 1), (torch.OutOfMemoryError("full"), 3)])
def test_a_capture_that_failed_is_not_tried_at_every_wake(sound, error, tried):
    model, captures = served(Arena()), []
    model._wants_graphs = True

    def capture(alone):
        captures.append(alone)
        raise error

    for buffer in model._buffers:
        buffer.capture = capture
    model.warm_up()
    for _ in range(2):
        model.sleep()
        model.wake()
    assert len(captures) == tried


def test_after_a_failed_capture_a_model_has_no_graphs(sound):
    reports = []
    model = served(Arena())
    model._report = lambda event, **fields: reports.append((event, fields))
    model._wants_graphs = True
    first, second = model._buffers

    def fail(alone):
        raise ValueError("no")

    def captured(alone):
        first.graphs = first._joined = "captured"
        first.joined_rows = 4

    first.capture, second.capture = captured, fail
    model.warm_up()
    assert [(buffer.graphs, buffer._joined, buffer.joined_rows) for buffer in model._buffers] == [(None, None, 0)] * 2
    assert sound == [CPU]  # the device has done what was queued
    assert reports == [("no CUDA graphs", {"model": "m", "reason": "ValueError: no"})]


def test_rows_that_failed_during_a_capture_are_no_errors_of_the_first_batch():
    class Reports(torch.nn.Module):
        def forward(self, observation):
            assert torch.is_inference_mode_enabled()
            return RowErrors({0: "made-up"}, observation)

    model = served(Arena(), Reports())
    model._wants_graphs = True
    replayed = {"action": torch.zeros(1, 4)}

    def capture(buffer, alone):
        model.forward(buffer._inputs)
        buffer.graphs = SimpleNamespace(run=lambda rows: replayed)

    for buffer in model._buffers:
        buffer.capture = partial(capture, buffer)
    model.warm_up()
    with torch.inference_mode():
        assert model.run(tickets((0, 1)), 1) is None


def test_a_woken_model_is_captured_and_read_by_other_streams_once_its_weights_have_arrived(monkeypatch):
    model, events = served(Arena()), []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: events.append(device))
    )
    model.device, model._wants_graphs = GPU, True
    for buffer in model._buffers:
        buffer.wake, buffer.capture = partial(events.append, "wake"), lambda alone: events.append("capture")
    model.wake()
    assert events == ["wake", "wake", GPU, "capture", "capture"]


def test_random_numbers_that_a_failed_capture_has_blocked_are_unblocked_by_one_that_succeeds(monkeypatch):
    events, stream = [], SimpleNamespace(wait_stream=lambda other: events.append(("after", other)))

    @contextlib.contextmanager
    def capture(graph, *, stream, capture_error_mode):
        events.append((graph, stream, capture_error_mode))
        yield
        events.append("ended")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", capture)
    mend_random_numbers(CPU)
    assert events == [("after", "current"), ("graph", stream, "thread_local"), "ended"]


def test_the_loop_is_held_between_two_turns_with_nothing_in_flight():
    callbacks, turns, stopped = CallbackQueue(), [], threading.Event()
    finished = []

    def loop():
        while not stopped.is_set():
            turns.append(1)
            callbacks.run()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        wait_until(lambda: turns, 10, "the loop")
        with held(callbacks.put, lambda: finished.append(threading.current_thread())):
            assert finished == [thread]
            seen = len(turns)
            assert not stopped.wait(0.05) and len(turns) == seen
        wait_until(lambda: len(turns) > seen, 10, "the loop going on")
    finally:
        stopped.set()
        thread.join(10)
        callbacks.close()


def test_a_loop_that_does_not_come_is_not_held_later(monkeypatch):
    monkeypatch.setattr(model_loader, "_HELD", 0.01)
    later, finished = [], []
    with held(later.append, lambda: finished.append(1)):
        pass
    monkeypatch.setattr(model_loader, "_HELD", 3600.0)
    later[0]()
    assert not finished


# ---- out of memory: what the failed batch held is freed before memory is looked for


class Held:
    """What a failed forward has allocated."""


class Full(torch.nn.Module):
    """Has memory for so many rows."""

    def __init__(self, most):
        super().__init__()
        self.most, self.tried = most, []

    def forward(self, observation):
        held = Held()
        self.tried.append(weakref.ref(held))
        if len(observation) > self.most:
            try:
                raise RuntimeError("no block")
            except RuntimeError as error:
                raise torch.OutOfMemoryError("full") from error
        return observation + 1


def device_slot(arena, module):
    slot = slot_of(arena, module)
    slot.shown = 6
    return slot


def test_a_batch_that_did_not_fit_is_freed_before_its_halves_are_computed():
    module, alive = Full(2), []
    slot = device_slot(Arena(), module)
    slot.served.free_memory = lambda: alive.append([each() for each in module.tried if each() is not None])
    batches, answers = noted()
    with torch.inference_mode():
        batches.run(slot, tickets((0, 1), (1, 1), (2, 1), (3, 1)), 4, 0)
        recovered(batches, slot)
    assert [code for _, code, _ in answers] == [Code.OK, Code.OK]
    assert alive == [[]]


def test_sessions_that_did_not_fit_are_freed_before_their_halves_are_computed():
    class Hungry(open_models.RunningSum):
        """Has memory for one row of 9 or more."""

        tried = ()

        def forward(self, x, total):
            held = Held()
            self.tried = (*self.tried, weakref.ref(held))
            if int((x >= 9).sum()) > 1:
                raise torch.OutOfMemoryError("full")
            total = total + x[:, 0]
            return total, total

    number, module, alive = TensorSpec("float32"), Hungry(), []
    model = ServedModel(module, {"x": TensorSpec("float32", (1,))}, {"y": number}, state={"total": number})
    one = np.ones((1, 1), np.float32)
    with InprocServer({"m": model}, rows=64) as server, server.model("m", rows=32).sessions(8) as sessions:
        server.engine.slots[0].served.free_memory = lambda: alive.append([each() for each in module.tried])
        sessions.infer(np.ones((8, 1), np.float32))
        first = sessions.submit(np.ones((2, 1), np.float32), session=range(2))
        # Of the same sessions, so that they are computed after the first request's step.
        others = [sessions.submit(9 * one, session=[i]) for i in range(2)]
        assert first.result().outputs.tolist() == [2, 2]
        assert [other.result().outputs.item() for other in others] == [11, 11]
    assert len(alive) == 1 and not any(alive[0])


def test_a_failed_batchs_frames_are_freed_at_once():
    class Negative(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tried = []

        def forward(self, observation):
            held = Held()
            self.tried.append(weakref.ref(held))
            raise ValueError("negative")

    module = Negative()
    batches, answers = noted()
    with torch.inference_mode():
        slot = device_slot(Arena(), module)
        batches.run(slot, tickets((0, 1), (1, 1)), 2, 0)
        recovered(batches, slot)
    assert [code for _, code, _ in answers] == [Code.MODEL_FAILED] * 2
    assert len(module.tried) == 3 and all(each() is None for each in module.tried)


# ---- a context that fails every call


@pytest.fixture
def lost(monkeypatch):
    """A GPU that fails every call once a model's forward has raised."""
    state = SimpleNamespace(lost=False)

    def synchronize(device=None):
        assert device == GPU
        if state.lost:
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return state


class Asserts(torch.nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def forward(self, observation):
        self.state.lost = True
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_an_engine_whose_gpu_fails_every_call_ends(lost):
    batches, answers = noted(GPU)
    slot = device_slot(Arena(), Asserts(lost))
    with torch.inference_mode(), pytest.raises(DeviceLost, match="fails every call since model 'm'") as raised:
        batches.run(slot, tickets((0, 1), (1, 1)), 2, 0)
    assert raised.value.shown == 6 and not answers


def test_the_oldest_batch_in_flight_is_named_since_a_later_call_may_be_the_first_that_fails(lost):
    batches, answers = noted(GPU)
    first, second = device_slot(Arena(), Plus()), device_slot(Arena(), Asserts(lost))
    first.shown, second.shown = 3, 4
    with torch.inference_mode():
        batches.run(first, tickets((0, 1)), 1, 0)
        with pytest.raises(DeviceLost) as raised:
            batches.run(second, tickets((1, 1)), 1, 0)
    assert raised.value.shown == 3 and not answers


@pytest.mark.parametrize("how", ["done", "finish"])
def test_a_batch_that_never_ends_since_the_gpu_failed_ends_the_engine(lost, monkeypatch, how):
    def fail(self):
        lost.lost = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    batches, answers = noted(GPU)
    first, second = device_slot(Arena(), Plus()), device_slot(Arena(), Plus())
    first.shown, second.shown = 3, 4
    with torch.inference_mode():
        batches.run(first, tickets((0, 1)), 1, 0)
        monkeypatch.setattr(device_module.DeviceBatch, how, fail)
        with pytest.raises(DeviceLost, match="illegal memory access") as raised:
            if how == "finish":
                batches.run(second, tickets((1, 1)), 1, 0)
            batches.land()
    assert raised.value.shown == 3 and not answers


def test_rows_that_fail_singly_end_the_engine_too(lost):
    model = open_models.running_sum()
    with InprocServer({"m": model}, rows=64) as server:
        server.engine._batches._device = GPU
        server.engine.slots[0].served._whole = False
        model.module.forward = lambda x, total: Asserts(lost)(x)
        with server.model("m", rows=8).sessions(1) as sessions, pytest.raises(DeviceLost):
            sessions.infer(np.ones((1, 1), np.float32))


def test_an_error_of_a_model_on_a_sound_gpu_is_that_models_alone(sound):
    batches, answers = noted(GPU)
    slot, arena = device_slot(Arena(), Plus()), Arena()
    arena.inputs["observation"][0] = -1
    slot = device_slot(arena, Plus(most=4))
    with torch.inference_mode():
        batches.run(slot, tickets((0, 1)), 1, 0)
        assert sound == [GPU]
        batches.run(slot, tickets((4, 4), (8, 4)), 8, 0)  # out of memory: nothing is wrong with the device
        recovered(batches, slot)
    assert [code for _, code, _ in answers] == [Code.MODEL_FAILED, Code.OK, Code.OK] and sound == [GPU]


@pytest.mark.parametrize("where", ["callback", "order"])
def test_a_lost_gpu_ends_the_loop_wherever_it_is_noticed(where):
    """Other errors of callbacks and orders are logged, and the loop goes on."""
    logged = []

    def fail(error):
        raise error

    def obey(error):
        orders = [{"kind": "retire"}] if where == "order" else []
        quiet = SimpleNamespace(flush=lambda: None)
        engine = SimpleNamespace(
            _log=SimpleNamespace(error=lambda event, **fields: logged.append(event)),
            _control_pipe=SimpleNamespace(receive=lambda timeout: orders.pop() if orders else None),
            _carry_out=lambda order: fail(error),
            _refuse=lambda order, error: logged.append("an order failed"),
            _warnings=quiet,
            _errors=quiet,
        )
        engine._callbacks = CallbackQueue(partial(EngineProcess._went_wrong, engine))
        if where == "callback":
            engine._callbacks.put(lambda: fail(error))
        try:
            EngineProcess._obey(engine)
        finally:
            engine._callbacks.close()

    obey(ValueError("no"))
    assert len(logged) == 1
    with pytest.raises(DeviceLost):
        obey(DeviceLost("lost", 1))
    assert len(logged) == 1


def test_a_model_that_breaks_the_gpu_while_it_loads_ends_the_engine_and_is_charged(lost, monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    told, later, threads = [], [], []

    def broken(*args):
        threads.append(threading.current_thread())
        lost.lost = True
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(model_loader, "load_model", broken)
    loader = ModelLoader(GPU, lambda kind, **fields: told.append(kind), later.append, SimpleNamespace())
    monkeypatch.setattr(model_loader.ModelOrder, "of", lambda settings: settings)
    loader.load(4, 1, "m", {})
    wait_until(lambda: later, 10, "the end of the loop")
    with pytest.raises(DeviceLost) as raised:
        later[0]()
    threads[0].join(10)
    assert raised.value.shown == 5 and told == ["begins"]  # neither "ends" nor "failed": it counts as a crash


def affine_until_666() -> ServedModel:
    """In an engine: a model whose error 666 is followed by a device that fails every call."""
    from tests.models import affine

    model = affine()
    forward = model.module.forward

    def failing(observation):
        if bool((observation == 666).any()):
            batches_module.device_error = lambda device: RuntimeError("device-side assert")
            raise RuntimeError("device-side assert")
        return forward(observation)

    model.module.forward = failing
    return model


def test_the_supervisor_starts_another_engine_and_charges_the_model(tmp_path):
    models = {
        "bad": {"factory": "tests.unit.engine.test_device_failures:affine_until_666", "max_batch": 1},
        "good": {"factory": "tests.models:affine"},
    }
    row = np.ones((1, 4), np.float32)
    with serving(tmp_path, models, max_restarts=0) as server, server.connect() as client:
        bad, good = client.model("bad"), client.model("good")
        np.testing.assert_array_equal(good.infer(row), 3 * row)
        before = server.pids()["engine-0"]
        with pytest.raises(ModelFailed, match="quarantine"):
            bad.infer(666 * row, timeout=60)
        np.testing.assert_array_equal(good.infer(row, timeout=60), 3 * row)
        assert server.pids()["engine-0"] != before
        text = server.text()
        assert "device lost" in text and "model 'bad' was computed" in text


# ---- page locks


class Runtime:
    """CUDA's runtime without memory that may be locked."""

    status = 1

    def __init__(self):
        self.calls = []

    def cudaHostRegister(self, address, size, flags):
        self.calls.append("register")
        return self.status

    def cudaHostUnregister(self, address):
        self.calls.append("unregister")


def test_a_refused_page_lock_is_no_error_of_the_next_kernel(monkeypatch):
    kernels = []

    def ones(count, device):
        kernels.append(device)
        raise RuntimeError("CUDA error: operation not supported")

    for clears in (True, False):
        runtime = Runtime()
        if clears:
            runtime.cudaGetLastError = partial(runtime.calls.append, "clear")
        fake = SimpleNamespace(cuda=SimpleNamespace(cudart=lambda runtime=runtime: runtime), ones=ones)
        assert page_lock(fake, 4096, 4096, GPU) == 1
        assert runtime.calls == ["register", "clear"][: 1 + clears]
    assert kernels == [GPU]
    runtime.status = 0
    assert page_lock(fake, 4096, 4096, GPU) == 0 and len(kernels) == 1


def test_slots_and_arenas_are_locked_in_the_same_way(monkeypatch):
    runtime, memory = Runtime(), np.zeros(4096, np.uint8)
    runtime.cudaGetLastError = partial(runtime.calls.append, "clear")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    lock = device_module.PageLock(memory, GPU)
    assert not lock.held and "returned 1" in lock.reason
    assert not DeviceStage._page_lock(SimpleNamespace(device=GPU, _torch=torch), torch.from_numpy(memory))
    assert runtime.calls == ["register", "clear"] * 2


def test_an_arena_is_unlocked_if_its_model_does_not_fit(monkeypatch):
    class Lock:
        held, released = True, False

        def release(self):
            self.released = True

    def full(*args):
        raise torch.OutOfMemoryError("full")

    lock = Lock()
    monkeypatch.setattr(device_module, "PageLock", lambda memory, device: lock)
    monkeypatch.setattr(device_module, "_StagingBuffer", full)
    with pytest.raises(torch.OutOfMemoryError):
        served(Arena())
    assert lock.released


def test_an_arena_is_unlocked_when_its_model_is_closed():
    model = served(Arena())
    model._lock = SimpleNamespace(release=partial(setattr, model, "released", True))
    model.close()
    assert model.released


# ---- memory of another GPU, which torch copies silently


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A driver whose memory is not where the tensors are; and memory of it, as another process exports it."""
    monkeypatch.setenv(FAKE, str(tmp_path))
    memory = driver(0)
    pointer = memory.allocate(4096)
    handle = memory.export(pointer)
    array = type(memory).array
    monkeypatch.setattr(memory, "array", lambda *args: array(memory, *args).copy())
    yield memory, handle[:24] + bytes(4) + handle[28:]
    memory.free(pointer)


def test_publications_on_another_gpu_are_read_from_the_host(elsewhere):
    _, handle = elsewhere
    with (
        WeightsChannel.create(
            segment_name("elsewhere", "weights", 1), WeightsLayout.of(Plus().state_dict())
        ) as channel,
        Publisher(channel) as learner,
    ):
        learner.publish({"bias": torch.ones(1)})
        record, published = channel.device[0], PublishedOnDevice(channel, CPU)
        record["handles"][:] = np.frombuffer(handle, np.uint8)
        record["versions"][:] = record["generation"] = 1
        assert published.tensors(channel.claim()) is None
        assert not published._pointers  # and closed


def test_rows_on_another_gpu_are_refused(elsewhere):
    _, handle = elsewhere
    regions = DeviceRegions(CPU)
    order = {
        "lease": 1, "first": 0, "rows": 2, "event": "", "outputs": [],
        "inputs": [["x", "float32", [4], handle.hex(), 0]],
    }  # fmt: skip
    with pytest.raises(Refused, match="is not on cpu"):
        regions.bind(order)
    regions.close()


def test_a_publisher_refuses_tensors_of_another_gpu_than_its_own(elsewhere, monkeypatch):
    memory, _ = elsewhere
    held_before = len(memory._maps)
    monkeypatch.setattr(publisher, "_on_device", lambda tensor: True)
    with (
        WeightsChannel.create(
            segment_name("elsewhere", "weights", 2), WeightsLayout.of(Plus().state_dict())
        ) as channel,
        Publisher(channel, driver=memory) as learner,
    ):
        with pytest.raises(Refused, match="which holds the published tensors"):
            learner.publish({"bias": torch.ones(1)})
        assert channel.newest == 0 and not int(channel.device[0]["generation"])
        assert len(memory._maps) == held_before


# ---- which GPU


def test_a_gpu_without_a_number_is_the_first():
    assert [str(engine_device(name)) for name in ("cuda", "cuda:1", "cpu")] == ["cuda:0", "cuda:1", "cpu"]


def test_the_loaders_thread_uses_its_own_gpu(monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append((threading.current_thread().name, device)))
    use_device(CPU)
    assert not used
    ModelLoader(torch.device("cuda", 1), lambda kind, **fields: None, lambda action: None, SimpleNamespace())
    wait_until(lambda: used, 10, "the thread")
    assert used == [("model-loader", torch.device("cuda", 1))]
