"""Rows in device memory: what the engines are told of it, and when it is freed."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jurybox.client.device_rows import BoundRows, DeviceRows
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.control_pb2 import BindRequest
from jurybox.protocol.device_memory import FakeDriver
from jurybox.protocol.errors import Busy, Refused, ServerGone

SPEC = ModelSpec(
    "m",
    {"a": TensorSpec("uint8", (100,)), "b": TensorSpec("float32", (64,))},
    {"y": TensorSpec("float64", (3,)), "z": TensorSpec("int16")},
)


class PlayedModel:
    """A model, and the rows of its lane: tells what is done with it."""

    name, leased, first, version = "m", (5, 77), 8, 4

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        self.spec, self.told, self.rows = spec, list[Any](), 0

    def unwritten_rows(self, rows: int) -> PlayedModel:
        self.rows = rows
        return self

    def __len__(self) -> int:
        return self.rows

    def infer(self, rows: int | None, *, timeout: float | None, version: int | None) -> int:
        self.told.append((rows, timeout, version))
        return 6

    def close(self) -> None:
        self.told.append("closed")


class Engines:
    """Carry out what they are asked, or fail as `fails` says, in order."""

    def __init__(self, *fails: BaseException | None) -> None:
        self.fails, self.asked = list(fails), list[tuple[BindRequest, float]]()

    def __call__(self, request: BindRequest, seconds: float) -> None:
        self.asked.append((request, seconds))
        if self.fails and (error := self.fails.pop(0)) is not None:
            raise error


class ToldDriver(FakeDriver):
    """As the fake driver, and tells what is recorded."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder, self.recorded = folder, list[tuple[int, int]]()

    def record(self, event: int, stream: int) -> None:
        self.recorded.append((event, stream))
        super().record(event, stream)

    @property
    def allocated(self) -> int:
        return len(list(self.folder.iterdir()))


@pytest.fixture
def driver(tmp_path: Path) -> ToldDriver:
    return ToldDriver(tmp_path)


def bound(model: Any, bind: Engines, timeout: float = 7.0) -> BoundRows:
    return BoundRows(model, 3, {"a": (b"in", 0), "b": (b"in", 512)}, {"y": (b"out", 256)}, b"event", bind, timeout)


def test_the_engines_are_told_where_each_tensor_of_the_lanes_rows_is() -> None:
    rows = bound(model := PlayedModel(), engines := Engines())
    ((request, seconds),) = engines.asked
    assert (request.lane, request.lease, request.first, request.rows, seconds) == (5, 77, 8, 3, 7.0)
    assert [(one.tensor, one.handle, one.offset) for one in request.inputs] == [("a", b"in", 0), ("b", b"in", 512)]
    assert [(one.tensor, one.handle, one.offset) for one in request.outputs] == [("y", b"out", 256)]
    assert request.event == b"event" and not request.end
    assert len(rows) == 3 and rows.version == 4 and not model.told
    assert rows.infer(2, timeout=1.5, version=9) == 6 and model.told == [(2, 1.5, 9)]


def test_the_engines_release_the_memory_before_the_rows_become_others() -> None:
    rows = bound(model := PlayedModel(), engines := Engines())
    assert rows.end(9.0)
    request, seconds = engines.asked[1]
    assert (request.lane, request.lease, request.first, request.end, seconds) == (5, 77, 8, True, 9.0)
    assert not request.inputs and not request.outputs and not request.event
    assert model.told == ["closed"] * 2, "the rows and the model"


@pytest.mark.parametrize("error", [Busy("later"), KeyboardInterrupt()])
def test_rows_that_are_not_bound_are_released_also_by_engines_that_opened_a_part(error: BaseException) -> None:
    model = PlayedModel()
    with pytest.raises(type(error)):
        bound(model, engines := Engines(error, ServerGone("over")))
    assert [(request.end, seconds) for request, seconds in engines.asked] == [(False, 7.0), (True, 7.0)]
    assert model.told == ["closed"] * 2


def test_rows_end_also_if_the_server_is_gone_or_the_caller_is_interrupted() -> None:
    rows = bound(model := PlayedModel(), Engines(None, ServerGone("over")))
    assert not rows.end(1.0) and model.told == ["closed"] * 2
    rows = bound(model := PlayedModel(), Engines(None, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        rows.end(1.0)
    assert model.told == ["closed"] * 2


def test_tensors_begin_at_multiples_of_the_devices_alignment_and_do_not_overlap(driver: ToldDriver) -> None:
    with DeviceRows(PlayedModel(), 3, driver, engines := Engines(), 7.0) as rows:  # type: ignore[arg-type]
        ((request, seconds),) = engines.asked
        places = {one.tensor: one.offset for one in (*request.inputs, *request.outputs)}
        assert places == {"a": 0, "b": 512, "y": 1280, "z": 1536} and seconds == 7.0
        assert {one.tensor for one in request.inputs} == {"a", "b"}
        pointer = min(driver._own, key=lambda memory: -driver.extent(memory)[1])
        assert driver.extent(pointer) == (pointer, 1792)
        assert {one.handle for one in (*request.inputs, *request.outputs)} == {driver.export(pointer)}
        assert request.event == driver.export_event(next(iter(driver._own - {pointer})))
        for arrays, specs in ((rows.inputs, SPEC.inputs), (rows.outputs, SPEC.outputs)):
            assert list(arrays) == list(specs)
            for name, spec in specs.items():
                array = arrays[name]
                assert (array.shape, array.dtype) == ((3, *spec.shape), spec.numpy_dtype)
                assert array.ctypes.data == pointer + places[name]
        with pytest.raises(Exception, match="'m' is memory that cannot be replaced"):
            rows.inputs["a"] = np.zeros((3, 100), np.uint8)
        del array


def test_a_request_is_computed_after_the_work_that_is_queued_on_the_callers_stream(driver: ToldDriver) -> None:
    with DeviceRows(model := PlayedModel(), 3, driver, Engines(), 7.0) as rows:  # type: ignore[arg-type]
        event = next(memory for memory in driver._own if driver.extent(memory)[1] == 16)
        assert len(rows) == 3 and rows.version == 4
        assert rows.infer(2, stream=1, timeout=1.5, version=9) == 6 and rows.infer() == 6
        assert model.told == [(2, 1.5, 9), (None, None, None)]
        assert driver.recorded == [(event, 1), (event, 0)]


def test_memory_is_freed_once_the_engines_have_released_it_and_stays_if_they_have_not(driver: ToldDriver) -> None:
    rows = DeviceRows(PlayedModel(), 3, driver, engines := Engines(), 7.0)  # type: ignore[arg-type]
    assert driver.allocated == 2
    for _ in range(2):
        rows.close()
    assert driver.allocated == 0 and len(engines.asked) == 2 and not rows.inputs and not rows.outputs
    for use in (rows.infer, lambda: len(rows), lambda: rows.version):
        with pytest.raises(Refused, match="these rows were closed"):
            use()
    assert not driver.recorded
    rows = DeviceRows(model := PlayedModel(), 3, driver, Engines(None, Busy("late")), 7.0)  # type: ignore[arg-type]
    rows.close()
    assert driver.allocated == 2 and model.told == ["closed"] * 2, "an engine may still write to it"


@pytest.mark.parametrize("fails", ["allocate", "event", "export", "export_event", "bind"])
def test_nothing_stays_allocated_if_the_rows_cannot_be_made(
    driver: ToldDriver, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def fail(*_: object) -> None:
        raise Refused("too little memory")

    if fails != "bind":
        monkeypatch.setattr(driver, fails, fail)
    engines = Engines(Refused("too little memory")) if fails == "bind" else Engines()
    with pytest.raises(Refused, match="too little memory"):
        DeviceRows(PlayedModel(), 3, driver, engines, 7.0)  # type: ignore[arg-type]
    assert driver.allocated == 0


@pytest.mark.parametrize("there", ["inputs", "outputs"])
def test_a_dtype_that_arrays_on_devices_cannot_have_is_refused_before_anything_is_allocated(
    driver: ToldDriver, there: str
) -> None:
    specs = {"a": TensorSpec("float32"), "b": TensorSpec("bfloat16")}, {"y": TensorSpec("float32")}
    spec = ModelSpec("m", *(specs if there == "inputs" else specs[::-1]))
    with pytest.raises(Refused, match=r"'b' of 'm' is of a dtype .* use rows\(\), in host memory"):
        DeviceRows(PlayedModel(spec), 3, driver, engines := Engines(), 7.0)  # type: ignore[arg-type]
    assert not driver.allocated and not engines.asked


def test_rows_are_closed_where_their_with_statement_ends_also_by_an_error(driver: ToldDriver) -> None:
    with contextlib.suppress(KeyError), DeviceRows(PlayedModel(), 3, driver, Engines(), 7.0):  # type: ignore[arg-type]
        raise KeyError
    assert driver.allocated == 0
