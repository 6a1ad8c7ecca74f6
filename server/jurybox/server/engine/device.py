"""Memory that a GPU reads and writes by itself, without the CPU copying it first."""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.arena import Columns
from jurybox.protocol.device_memory import Driver
from jurybox.protocol.errors import ModelFailed
from jurybox.server.engine.device_regions import Binding, DeviceRegions
from jurybox.server.engine.served import Outcome, Served, dtype_of
from jurybox.server.models import ServedModel

_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class PageLock:
    """Keeps memory that exists already, such as an arena's, in place for the device's DMA (cudaHostRegister).

    Attributes:
        held: whether it worked. Without it copies go through staging memory.
        reason: why not; a limit on locked memory is a usual one.
    """

    def __init__(self, memory: NDArray[Any], device: torch.device) -> None:
        self.held = False
        self.reason = "" if device.type == "cuda" else f"{device.type} has no memory of its own"
        self._address = memory.ctypes.data
        if device.type != "cuda":
            return
        status = int(torch.cuda.cudart().cudaHostRegister(self._address, memory.nbytes, 0))  # type: ignore[no-untyped-call]
        self.held = status == 0
        if status:
            self.reason = f"cudaHostRegister gave {status}" + (", locked by another" if status == _ALREADY else "")

    def release(self) -> None:
        """Let the memory go. Nothing that was queued may still use it."""
        if self.held:
            self.held = False
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]


def staging(rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: torch.device) -> torch.Tensor:
    """Rows of host memory that copies to and from the device go through, page-locked for a GPU."""
    return torch.zeros((rows, *shape), dtype=getattr(torch, dtype.name), pin_memory=device.type == "cuda")


# ----
# Streams of a device: work queued on one runs in order, work on two at the same time.
#
# The CPU has none. There everything is done when it has been said, and the same code runs, which is how tests without
# a GPU reach it.


class Mark:
    """A point in a stream's work."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def done(self) -> bool:
        """Whether the work up to here is done."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until it is."""
        if self.event is not None:
            self.event.synchronize()


class Stream:
    """A queue of work on a device; in a ``with``, what torch is asked to do goes there."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def pointer(self) -> int:
        """As the driver knows it."""
        return int(self._cuda.cuda_stream) if self._cuda is not None else 0

    def running(self) -> AbstractContextManager[object]:
        """Queue what is done inside."""
        return torch.cuda.stream(self._cuda) if self._cuda is not None else contextlib.nullcontext()

    def after(self, mark: Mark) -> None:
        """What is queued from now on runs after that point of another stream."""
        if self._cuda is not None and mark.event is not None:
            self._cuda.wait_event(mark.event)

    def mark(self) -> Mark:
        """The end of what is queued now."""
        if self._cuda is None:
            return Mark(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._cuda)
        return Mark(event)


# ----
# CUDA graphs for a ladder of batch sizes: a forward of many small kernels is launched as one.
#
# A graph has fixed shapes and addresses, so a batch is computed by the graph of the next larger rung, on static
# inputs whose rows beyond the batch hold whatever was there. Models answer row by row, so those rows change nothing.


Tensors = Mapping[str, torch.Tensor]
_WARM_UPS = 3  # forwards before a capture: libraries choose their kernels and allocate in the first ones


def ladder(max_batch: int) -> list[int]:
    """Numbers of rows that get a graph, or that forward of a deterministic model is called with."""
    rungs = [1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch]
    return [*rungs, max_batch]


def rung(rungs: list[int], rows: int) -> int:
    """The smallest rung that holds so many rows."""
    return rungs[bisect_left(rungs, rows)]


class Graphs:
    """The captured forwards of one set of static inputs.

    Args:
        inputs: static inputs of max_batch rows by name; they stay where they are.
        forward: computes the outputs by name of some rows of them.
        stream: where they will run, which is where they are captured.
    """

    def __init__(
        self, inputs: Tensors, forward: Callable[[Tensors], Tensors], stream: torch.cuda.Stream, max_batch: int
    ) -> None:
        self._rungs = ladder(max_batch)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensors]] = {}
        pool = None
        for rows in reversed(self._rungs):  # the largest first: the others find room in its memory
            part = {name: tensor[:rows] for name, tensor in inputs.items()}
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    forward(part)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = forward(part)
            pool = pool or graph.pool()
            self._graphs[rows] = (graph, outputs)

    def run(self, rows: int) -> Tensors:
        """Compute the static inputs' first rows; gives the outputs, of which the first rows are meant."""
        graph, outputs = self._graphs[rung(self._rungs, rows)]
        graph.replay()
        return {name: tensor[:rows] for name, tensor in outputs.items()}


# ----
# What an engine holds of its device's memory, shown on the scoreboard.


_EVERY = 1.0  # seconds: asking takes torch's allocator some tens of microseconds, beside the loop


def bound_device_memory(device: torch.device, mib: int, fraction: float = 1.0) -> None:
    """Let this process take so much of a GPU at most, whoever shares it: `mib` (0: any), and a part of all there is.

    Nothing for a CPU.

    What does not fit is torch.OutOfMemoryError, as on a device of that size: batches are halved. Weights, activations
    and graphs count; the driver's own few hundred MiB a process do not.
    """
    if device.type != "cuda" or (not mib and fraction >= 1.0):
        return
    if mib:
        fraction = min(fraction, mib * 2**20 / torch.cuda.get_device_properties(device).total_memory)
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def show_device_memory(device: torch.device, record: NDArray[Any]) -> None:
    """Keep `device_bytes` of a scoreboard's engine record, shape (1,), at what torch's allocator has reserved.

    Nothing is done for a CPU. The thread ends with the process.
    """

    def show() -> None:
        while True:
            record["device_bytes"] = torch.cuda.memory_reserved(device)
            time.sleep(_EVERY)

    if device.type == "cuda":
        threading.Thread(target=show, name="memory", daemon=True).start()


# ----
# A model on a device of its own: two batches on their way, one computing while the next is copied in.
#
# Each batch goes through one of two staging buffers: static inputs on the device, memory on the host, and a stream for
# its copies. Forwards share one stream, so that they run in order and weights change between two of them.
#
#     buffer 0   copy in | forward | copy out          copy in | ...
#     buffer 1             copy in | forward | copy out


# A copy of its own costs the CPU about what it takes to gather this much.
_DIRECT_BYTES = 64 * 1024
_BUFFERS = 2


class DeviceServed(Served):
    """As `Served`, with batches that are begun first and finished later.

    Args:
        memory: the whole arena, to be page-locked.
        regions: what clients have bound to device memory.
        graphs: capture CUDA graphs when warming up; a model that cannot be captured is run as it is.
        report: called with (event, fields) for what should be logged.
    """

    def __init__(
        self,
        name: str,
        model: ServedModel,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        memory: NDArray[np.uint8],
        max_batch: int,
        device: torch.device | str,
        compute: torch.dtype | None = None,
        *,
        graphs: bool = True,
        columns: Columns | None = None,
        report: Callable[..., None] = lambda event, **fields: None,
        regions: DeviceRegions | None = None,
    ) -> None:
        super().__init__(name, model, inputs, outputs, max_batch, device, compute, columns)
        self._report = report
        self._regions = regions
        self._wants_graphs = graphs and self.device.type == "cuda"
        self.arena_inputs, self.arena_outputs = dict(inputs), dict(outputs)
        self.arena_tensors = {key: torch.from_numpy(array) for key, array in inputs.items()}
        self._lock = PageLock(memory, self.device)
        if not self._lock.held and self.device.type == "cuda":
            report("arena not page-locked", model=name, reason=self._lock.reason)
        self.forwards = Stream(self.device)
        self._buffers = [_StagingBuffer(self, max_batch) for _ in range(_BUFFERS)]

    def begin(self, tickets: NDArray[Any], rows: int, version: int = 0) -> Batch:
        """Queue a batch's copies and forward; as `run`, of a batch to be finished later.

        Raises:
            Refused, and whatever the model raises; torch.OutOfMemoryError where the device has no room.
        """
        places = self._regions.of(tickets) if self._regions else None
        self._buffers.append(buffer := self._buffers.pop(0))
        with buffer.copies.running():
            if places is None:
                buffer.copy_in(tickets, rows, direct=self._lock.held)
            else:
                assert self._regions is not None
                buffer.copy_in_bound(tickets, places, self._regions.driver)
        self.forwards.after(buffer.copies.mark())
        with self.forwards.running():
            self._use(version)
            results = buffer.forward(rows)
        buffer.copies.after(self.forwards.mark())
        with buffer.copies.running():
            on_device = places is not None and buffer.copy_out_bound(results, tickets, places, host=bool(self._finite))
            if not on_device:
                buffer.copy_out(results, rows)
        return Batch(self, buffer, tickets, rows, buffer.copies.mark(), self._take_row_errors(), on_device)

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> Outcome | None:
        """As `Served.run`: begin and finish."""
        return self.begin(tickets, rows, version).finish()

    def warm_up(self, example: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        """As `Served.warm_up`; then captures graphs."""
        super().warm_up(example)
        self._capture()

    def sleep(self) -> int:
        """As `Served.sleep`, of inputs and graphs, too."""
        for buffer in self._buffers:
            buffer.sleep()
        return super().sleep()

    def _prepare(self) -> None:
        for buffer in self._buffers:
            buffer.wake()
        self._capture()

    def _capture(self) -> None:
        if not self._wants_graphs:
            return
        try:
            with torch.inference_mode():
                for buffer in self._buffers:
                    buffer.capture()
        except Exception as error:  # noqa: BLE001  what cannot be captured runs all the same
            for buffer in self._buffers:
                buffer.graphs = None
            torch.cuda.synchronize(self.device)
            self._report("no CUDA graphs", model=self.spec.name, reason=f"{type(error).__name__}: {error}")
        finally:
            self._take_row_errors()  # a replayed graph calls no forward that would

    def close(self) -> None:
        """As `Served.close`; every batch has been finished."""
        super().close()
        self._lock.release()


@dataclass(slots=True, eq=False)
class Batch:
    """A batch on its way; `on_device`: all its outputs go where clients want them there."""

    served: DeviceServed
    buffer: _StagingBuffer
    tickets: NDArray[Any]
    rows: int
    end: Mark
    row_errors: Mapping[int, str]
    on_device: bool

    def done(self) -> bool:
        """Whether `finish` would not wait."""
        return self.end.done()

    def finish(self) -> Outcome | None:
        """Wait for the outputs and write them to the tickets' rows; gives what of them failed."""
        self.end.wait()
        if self.on_device:  # all outputs are where the clients want them
            return self.served.refused(self.tickets, {}, self.rows, self.row_errors)
        for name, array in self.served.arena_outputs.items():
            native.scatter(array, self.tickets, self.buffer.results[name][: self.rows].numpy())
        return self.served.refused(self.tickets, self.buffer.results, self.rows, self.row_errors)


class _StagingBuffer:
    """What one batch on its way occupies."""

    def __init__(self, served: DeviceServed, max_batch: int) -> None:
        self._served = served
        self._max_batch = max_batch
        device, spec = served.device, served.spec
        self.copies = Stream(device)
        self.graphs: Graphs | None = None
        self._staged = {
            key: staging(max_batch, item.shape, item.numpy_dtype, device) for key, item in spec.inputs.items()
        }
        self.results = {
            key: staging(max_batch, item.shape, item.numpy_dtype, device) for key, item in spec.outputs.items()
        }
        self._inputs: dict[str, torch.Tensor] = {}
        self.wake()

    def sleep(self) -> None:
        """Hold nothing on the device."""
        self.graphs = None
        self._inputs = {}

    def wake(self) -> None:
        """Make the static inputs."""
        self._inputs = {
            key: torch.zeros((self._max_batch, *item.shape), dtype=dtype_of(item), device=self._served.device)
            for key, item in self._served.spec.inputs.items()
        }

    def copy_in(self, tickets: NDArray[Any], rows: int, *, direct: bool) -> None:
        """Queue the copies of the tickets' rows to the device, straight from the arena where it pays."""
        runs = neighbours(tickets)
        for key, arena in self._served.arena_inputs.items():
            target = self._inputs[key]
            if direct and pays(runs, self._served.spec.inputs[key].row_bytes):
                at = 0
                for first, n in runs:
                    target[at : at + n].copy_(self._served.arena_tensors[key][first : first + n], non_blocking=True)
                    at += n
            else:
                native.gather(arena, tickets, self._staged[key].numpy())
                target[:rows].copy_(self._staged[key][:rows], non_blocking=True)

    def copy_in_bound(self, tickets: NDArray[Any], places: Sequence[Binding | None], driver: Driver) -> None:
        """As `copy_in`, of rows of which some lie in clients' device memory."""
        waited: set[int] = set()
        at = 0
        for place, first, n in zip(places, tickets["first"].tolist(), tickets["rows"].tolist(), strict=True):
            if place is not None and place.event and place.event not in waited:
                waited.add(place.event)
                driver.wait(place.event, self.copies.pointer)
            for key, arena in self._served.arena_tensors.items():
                source = arena[first : first + n] if place is None else place.part(place.inputs, key, first, n)
                self._inputs[key][at : at + n].copy_(source, non_blocking=True)
            at += n

    def copy_out_bound(
        self,
        results: Mapping[str, torch.Tensor],
        tickets: NDArray[Any],
        places: Sequence[Binding | None],
        *,
        host: bool,
    ) -> bool:
        """Queue copies of outputs to clients' device memory; False where some, or all (`host`), go to the host, too."""
        rows = int(tickets["rows"].sum())
        self._check(results, rows)
        at = 0
        for place, first, n in zip(places, tickets["first"].tolist(), tickets["rows"].tolist(), strict=True):
            if place is not None:
                for key in place.outputs:
                    place.part(place.outputs, key, first, n).copy_(results[key][at : at + n], non_blocking=True)
                    self._keep(results[key])
            at += n
        return not host and None not in places

    def forward(self, rows: int) -> Mapping[str, torch.Tensor]:
        """Queue the forward of the rows copied in."""
        if self.graphs is not None:
            return self.graphs.run(rows)
        shape = self._served.shaped(rows)  # rows beyond the batch hold whatever was there
        results = self._served.forward({key: tensor[:shape] for key, tensor in self._inputs.items()})
        return results if shape == rows else {key: value[:rows] for key, value in results.items()}

    def copy_out(self, results: Mapping[str, torch.Tensor], rows: int) -> None:
        """Queue the copies of the outputs to the host. Raises ModelFailed where they are not what the spec promises."""
        self._check(results, rows)
        for key in self._served.spec.outputs:
            self.results[key][:rows].copy_(results[key], non_blocking=True)
            self._keep(results[key])

    def _check(self, results: Mapping[str, torch.Tensor], rows: int) -> None:
        for key, item in self._served.spec.outputs.items():
            if key not in results:
                raise ModelFailed(f"the model gave no output {key!r}; it gave {', '.join(results)}")
            if results[key].shape != (rows, *item.shape):
                raise ModelFailed(
                    f"output {key!r} has shape {list(results[key].shape)}, the spec promises {[rows, *item.shape]}"
                )

    def _keep(self, result: torch.Tensor) -> None:
        """Its memory belongs to the forwards' stream, which must not reuse it before the copy on this one."""
        if result.is_cuda and self.graphs is None:
            result.record_stream(torch.cuda.current_stream(result.device))

    def capture(self) -> None:
        """Capture graphs over this buffer's inputs."""
        stream = torch.cuda.Stream(self._served.device)  # type: ignore[no-untyped-call]
        self.graphs = Graphs(self._inputs, self._served.forward, stream, self._max_batch)


def neighbours(tickets: NDArray[Any]) -> list[tuple[int, int]]:
    """The tickets' rows in order, as (first, rows) of runs that lie next to each other."""
    firsts, rows = tickets["first"].astype(np.int64), tickets["rows"].astype(np.int64)
    begins = np.flatnonzero(np.r_[True, firsts[1:] != firsts[:-1] + rows[:-1]])
    lengths = np.add.reduceat(rows, begins)
    return list(zip(firsts[begins].tolist(), lengths.tolist(), strict=True))


def pays(runs: Sequence[tuple[int, int]], row_bytes: int) -> bool:
    """Whether one copy a run is cheaper than gathering all rows first and copying once."""
    return len(runs) == 1 or sum(n for _, n in runs) * row_bytes >= len(runs) * _DIRECT_BYTES
