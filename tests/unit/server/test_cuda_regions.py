"""Requests whose tensors lie in registered device memory: bindings, their order, their ends, and the time they have.

No device is needed: the gateway never touches one. The rows that engines bind are played.
"""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from jurybox.protocol.device_memory import HANDLE
from jurybox.protocol.errors import Code, Error, ProtocolMismatch, Refused, Timeout
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.gateway.inference import cuda_memory
from jurybox.server.gateway.inference.cuda_memory import CudaRegions
from jurybox.server.gateway.inference.parameters import Place

SPEC = ModelSpec(
    "mean",
    {"x": TensorSpec("float32", (4,)), "y": TensorSpec("float32", ())},
    {"score": TensorSpec("float32", ()), "other": TensorSpec("float32", (2,))},
)
SHARED = (b"a" * HANDLE, b"b" * HANDLE)
SOON = 20.0


class Bound:
    """Rows that were bound: what a gateway did with them."""

    def __init__(self, *given) -> None:
        self.given = given
        self.version = 0
        self.calls, self.ends = [], []
        self.fails: Error | None = None
        self.goes, self.asked = threading.Event(), threading.Event()
        self.goes.set()

    def infer(self, rows, timeout, version):
        self.calls.append((rows, timeout, version))
        self.asked.set()
        if not self.goes.wait(min(timeout, SOON)):
            raise Timeout("no answer")
        if self.fails is not None:
            raise self.fails
        self.version = version or 7
        return self.version

    def end(self, timeout):
        self.ends.append(timeout)
        return True


class Connection:
    """The gateway's connection, and its server."""

    def __init__(self) -> None:
        self.bound: list[Bound] = []
        self.takes = 0.0

    async def call(self, work):
        await asyncio.sleep(self.takes)
        return work(self)

    def bound_rows(self, model, rows, inputs, outputs, timeout):
        self.bound.append(Bound(model, rows, inputs, outputs, timeout))
        return self.bound[-1]


@pytest.fixture
def connection():
    return Connection()


@pytest.fixture
def regions(connection):
    regions = CudaRegions(allowed=True, frontend=connection)
    for name, handle in zip("ab", SHARED, strict=True):
        regions.register(name, handle, 0, 256)
    return regions


def inputs(rows=2, at=0, region="a"):
    return {
        "x": ("FP32", [rows, 4], Place(region, 16 * rows, at)),
        "y": ("FP32", [rows], Place(region, 4 * rows, at + 128)),
    }


def outputs(rows=2, at=0, region="b"):
    return {"score": Place(region, 4 * rows, at)}


def until(seconds=SOON):
    return time.monotonic() + seconds


async def under_way(regions, bound, version=0):
    """A request that engines compute until `bound.goes` is set."""
    bound.goes.clear()
    bound.asked.clear()
    asked = asyncio.create_task(regions.infer(SPEC, inputs(), outputs(), until(), version))
    await asyncio.to_thread(bound.asked.wait, SOON)
    return asked


async def test_rows_are_bound_where_the_tensors_lie_once_for_a_layout(regions, connection):
    assert await regions.infer(SPEC, inputs(), outputs(), until(), 0) == (2, 7)
    assert await regions.infer(SPEC, dict(reversed(inputs().items())), outputs(), until(), 3) == (2, 3)
    (bound,) = connection.bound
    model, rows, given, wanted, timeout = bound.given
    assert (model, rows) == ("mean", 2) and 0 < timeout <= SOON
    assert given == {"x": (SHARED[0], 0), "y": (SHARED[0], 128)} and wanted == {"score": (SHARED[1], 0)}
    assert [(rows, version) for rows, _, version in bound.calls] == [(2, 0), (2, 3)]


@pytest.mark.parametrize(
    "other",
    [
        {"rows": 1, "inputs": inputs(1), "outputs": outputs(1)},
        {"rows": 2, "inputs": inputs(2, 16), "outputs": outputs(2)},
        {"rows": 2, "inputs": inputs(2, region="b"), "outputs": outputs(2)},
        {"rows": 2, "inputs": inputs(2), "outputs": outputs(2, 64)},
        {"rows": 2, "inputs": inputs(2), "outputs": {**outputs(2), "other": Place("b", 16, 32)}},
        {"rows": 2, "inputs": inputs(2), "outputs": {"other": Place("b", 16, 32)}},
    ],
)
async def test_another_layout_has_rows_of_its_own(regions, connection, other):
    await regions.infer(SPEC, inputs(), outputs(), until(), 0)
    assert await regions.infer(SPEC, other["inputs"], other["outputs"], until(), 0) == (other["rows"], 7)
    assert len(connection.bound) == 2 and not connection.bound[0].ends


async def test_a_request_has_the_time_that_is_left_not_all_of_it_again(regions, connection):
    connection.takes = 0.2
    end = until()
    await regions.infer(SPEC, inputs(), outputs(), end, 0)
    (bound,) = connection.bound
    assert bound.given[-1] <= SOON - 0.2 and bound.calls[0][1] <= bound.given[-1]
    connection.takes = SOON
    with pytest.raises(Timeout, match="'mean' did not answer within 0 s .* send a longer timeout, or fewer rows"):
        await regions.infer(SPEC, inputs(1), outputs(1), until(-1), 0)
    assert len(connection.bound) == 1


async def test_requests_of_one_layout_take_turns(regions, connection):
    await regions.infer(SPEC, inputs(), outputs(), until(), 0)
    (bound,) = connection.bound
    first = await under_way(regions, bound, 5)
    second = asyncio.create_task(regions.infer(SPEC, inputs(), outputs(), until(), 6))
    await asyncio.sleep(0.05)
    assert len(bound.calls) == 2
    bound.goes.set()
    assert await first == (2, 5) and await second == (2, 6)


@pytest.mark.parametrize("code", [Code.STALE_LEASE, Code.SERVER_GONE, Code.BUSY])
async def test_rows_whose_engines_are_gone_are_bound_again_for_the_next_request(regions, connection, code):
    await regions.infer(SPEC, inputs(), outputs(), until(), 0)
    connection.bound[0].fails = Refused("no", code)
    with pytest.raises(Refused):
        await regions.infer(SPEC, inputs(), outputs(), until(), 0)
    connection.bound[0].fails = None
    await regions.infer(SPEC, inputs(), outputs(), until(), 0)
    assert len(connection.bound) == (1 if code == Code.BUSY else 2)


async def test_the_least_recently_used_layout_ends_when_there_are_too_many(regions, connection, monkeypatch):
    monkeypatch.setattr(cuda_memory, "_MOST_BINDINGS", 2)
    for at in (0, 16, 0, 32, 0):
        await regions.infer(SPEC, inputs(1, at), outputs(1), until(), 0)
    assert [len(bound.ends) for bound in connection.bound] == [0, 1, 0]
    assert connection.bound[1].ends == [cuda_memory._UNBIND]


@pytest.mark.parametrize("name", ["a", "b", ""])
async def test_a_region_is_gone_once_no_engine_has_it_open(regions, connection, name):
    await regions.infer(SPEC, inputs(), outputs(), until(), 0)
    (bound,) = connection.bound
    asked = await under_way(regions, bound)
    late = asyncio.create_task(regions.infer(SPEC, inputs(), outputs(), until(), 0))
    await asyncio.sleep(0)
    ended = asyncio.create_task(regions.unregister(name))
    await asyncio.sleep(0.05)
    assert not ended.done() and not bound.ends and (name or "a") in regions
    bound.goes.set()
    await asked
    await ended
    assert bound.ends == [cuda_memory._UNBIND] and len(bound.calls) in (2, 3)
    assert [one.name for one in regions.status()] == [one for one in "ab" if name and one != name]
    await asyncio.gather(late, return_exceptions=True)
    with pytest.raises(Refused, match="no CUDA region"):
        await regions.infer(SPEC, inputs(), outputs(), until(), 0)
    await regions.unregister("unknown")


async def test_a_request_whose_rows_ended_while_it_waited_is_told_so(regions, connection):
    await regions.infer(SPEC, inputs(), outputs(), until(), 0)
    (bound,) = connection.bound
    (binding,) = regions._bindings.values()
    async with binding.turn:
        waiting = asyncio.create_task(regions.infer(SPEC, inputs(), outputs(), until(), 0))
        await asyncio.sleep(0.05)
        regions._bindings.clear()
    with pytest.raises(Refused, match="was unregistered meanwhile") as refused:
        await waiting
    assert refused.value.code == Code.BUSY and len(bound.calls) == 1


async def test_a_region_that_no_request_uses_takes_no_rows_with_it(regions, connection):
    await regions.infer(SPEC, inputs(region="a"), outputs(region="a"), until(), 0)
    await regions.unregister("b")
    assert not connection.bound[0].ends and "a" in regions and "b" not in regions


@pytest.mark.parametrize(
    ("given", "wanted", "said"),
    [
        ({"x": inputs()["x"]}, outputs(), "inputs x came, expected x, y"),
        ({}, outputs(), "inputs none came, expected x, y"),
        ({**inputs(), "y": inputs(1)["y"]}, outputs(), r"inputs have \[1, 2\] rows"),
        ({**inputs(), "x": ("FP32", [2, 4], Place("a", 31, 0))}, outputs(), "'x' has 32 bytes, 31 of region 'a'"),
        ({**inputs(), "x": ("FP32", [2, 4], Place("a", 32, 225))}, outputs(), "bytes 225 to 257 of region 'a'"),
        (inputs(), {"score": Place("b", 7, 0)}, "'score' has 8 bytes, 7 of region 'b'"),
        (inputs(), {"score": Place("b", 8, 249)}, "bytes 249 to 257 of region 'b'"),
    ],
)
async def test_tensors_that_do_not_fit_are_refused_before_rows_are_bound(regions, connection, given, wanted, said):
    with pytest.raises(ProtocolMismatch, match=said):
        await regions.infer(SPEC, given, wanted, until(), 0)
    assert not connection.bound


@pytest.mark.parametrize(
    ("name", "handle", "device", "size", "said"),
    [
        ("a", bytes(HANDLE), 0, 1, "registered already"),
        ("c", bytes(HANDLE - 1), 0, 1, f"expected a handle of {HANDLE} bytes"),
        ("c", bytes(HANDLE), -1, 1, "expected a handle"),
        ("c", bytes(HANDLE), 0, 0, "expected a handle"),
    ],
)
def test_what_is_no_region_is_refused(regions, name, handle, device, size, said):
    with pytest.raises(Refused, match=said) as refused:
        regions.register(name, handle, device, size)
    assert refused.value.code == Code.MALFORMED and len(regions.status()) == 2
    with pytest.raises(Refused, match=r"server.cuda_shared_memory = true"):
        CudaRegions(allowed=False, frontend=None).register("c", bytes(HANDLE), 0, 1)


def test_a_region_says_what_it_is(regions):
    regions.register("c", bytes(HANDLE), 3, 1)
    (region,) = regions.status("c")
    assert (region.name, region.device, region.size, region.handle) == ("c", 3, 1, bytes(HANDLE))
    assert np.all([name in regions for name in "abc"]) and "d" not in regions
