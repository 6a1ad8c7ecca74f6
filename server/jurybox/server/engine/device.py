"""Models on a GPU: page-locked memory, streams and batches in flight."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.arena import Columns
from jurybox.protocol.device_memory import Driver, page_lock
from jurybox.protocol.spec import ModelSpec
from jurybox.server.engine.batch_shapes import dtype_of
from jurybox.server.engine.device_regions import Binding, DeviceRegions
from jurybox.server.engine.graphs import Graphs, ladder
from jurybox.server.engine.modules import array_over
from jurybox.server.engine.served import OUT_OF_MEMORY, BatchOutcome, InputRows, OutputRows, Served
from jurybox.server.models import ServedModel

_ALREADY = 712  # cudaErrorHostMemoryAlreadyRegistered


class PageLock:
    """A page lock on existing memory, such as an arena, so that the device can access it by DMA (cudaHostRegister).

    Attributes:
        held: whether the memory is locked. If not, copies go through staging memory.
        reason: why it is not locked; a common reason is the limit on locked memory.
    """

    def __init__(self, memory: NDArray[Any], device: torch.device) -> None:
        self.held = False
        self.reason = "" if device.type == "cuda" else f"{device.type} has no memory of its own"
        self._address = memory.ctypes.data
        if device.type != "cuda":
            return
        status = page_lock(torch, self._address, memory.nbytes, device)
        self.held = status == 0
        if status:
            self.reason = f"cudaHostRegister returned {status}" + (", already registered" if status == _ALREADY else "")

    def release(self) -> None:
        """Unlock the memory. No queued work may still use it."""
        if self.held:
            self.held = False
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]


def staging(rows: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: torch.device) -> torch.Tensor:
    """Allocate rows of host memory for copies to and from the device, page-locked for a GPU."""
    return torch.zeros((rows, *shape), dtype=getattr(torch, dtype.name), pin_memory=device.type == "cuda")


# ----
# Streams of a device: work on one stream runs in order, work on two streams concurrently.
#
# The CPU has no streams: each operation has completed when its call returns. The same code runs there, so that tests
# without a GPU cover it.


class Mark:
    """A point in a stream's work, recorded as an event."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self.event = event

    def done(self) -> bool:
        """Return whether the work up to this point is done."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the work up to this point is done."""
        if self.event is not None:
            self.event.synchronize()


class _Current:
    """Makes a stream torch's current one, as torch.cuda.stream does in a third of its 13 us."""

    __slots__ = ("_before", "_here", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._here = torch.cuda.current_device()
        self._before = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)  # and its device

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._here != self._stream.device_index:
            torch.cuda.set_device(self._here)


class Stream:
    """A queue of work on a device; `running` makes it torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def pointer(self) -> int:
        """The driver's handle of the stream; 0 on the CPU."""
        return int(self._cuda.cuda_stream) if self._cuda is not None else 0

    def running(self) -> AbstractContextManager[object]:
        """Return a context manager that queues torch's work on this stream."""
        return _Current(self._cuda) if self._cuda is not None else contextlib.nullcontext()

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory from being used again before the work queued on this stream is done."""
        if self._cuda is not None and tensor.is_cuda:
            tensor.record_stream(self._cuda)

    def after(self, mark: Mark) -> None:
        """Make work queued from now on run after a point of another stream."""
        if self._cuda is not None and mark.event is not None:
            self._cuda.wait_event(mark.event)

    def mark(self) -> Mark:
        """Return the end of the work queued so far."""
        if self._cuda is None:
            return Mark(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._cuda)
        return Mark(event)


def current_mark(device: torch.device) -> Mark:
    """Return the end of the work queued so far on this thread's current stream."""
    if device.type != "cuda":
        return Mark(None)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return Mark(event)


# ----
# The engine's device, and its memory: the limit, and the use on the scoreboard.


_EVERY = 1.0  # seconds between two queries: each takes torch's allocator tens of microseconds, outside the loop


def engine_device(name: str) -> torch.device:
    """Return the device of this name, with an index: "cuda" is the first GPU. A limit of its memory needs the index."""
    device = torch.device(name)
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device


def use_device(device: torch.device) -> None:
    """Make a GPU the current one of this thread. Otherwise some calls would occupy memory of the first GPU, too."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class DeviceLost(Exception):
    """A GPU fails every call of this process, as after a failed assertion in a kernel: another process must go on.

    Attributes:
        shown: the model to which this is charged, as the scoreboard's `computing` shows it.
    """

    def __init__(self, message: str, shown: int) -> None:
        super().__init__(message)
        self.shown = shown


def device_error(device: torch.device) -> Exception | None:
    """Return the error with which a GPU fails every call of this process; None if it works, and for a CPU."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as error:  # noqa: BLE001  returned
            return error
    return None


def forget_frames(error: BaseException) -> None:
    """Drop the frames of an error after which memory is to be freed: they hold the tensors that did not fit."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def bound_device_memory(device: torch.device, mib: int, fraction: float = 1.0) -> None:
    """Limit how much of a GPU's memory this process may allocate. Do nothing for a CPU.

    An allocation beyond the limit raises torch.OutOfMemoryError, as on a device of that size, and batches are halved.
    Weights, activations and graphs count; the few hundred MiB that the driver takes per process do not.

    Args:
        mib: the limit in MiB; 0: no limit.
        fraction: the limit as a fraction of the device's memory; the smaller of the two limits applies.
    """
    if device.type != "cuda" or (not mib and fraction >= 1.0):
        return
    if mib:
        fraction = min(fraction, mib * 2**20 / torch.cuda.get_device_properties(device).total_memory)
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def show_device_memory(device: torch.device, record: NDArray[Any]) -> None:
    """Start a thread that keeps `device_bytes` of an engine's record, shape (1,), at the memory torch has reserved.

    Do nothing for a CPU. The thread ends with the process.
    """

    def show() -> None:
        while True:
            record["device_bytes"] = torch.cuda.memory_reserved(device)
            time.sleep(_EVERY)

    if device.type == "cuda":
        threading.Thread(target=show, name="memory", daemon=True).start()


# ----
# A model on a device, with two batches in flight: one computes while the next is copied in.
#
# Each batch uses one of two staging buffers: static inputs on the device, host memory, and a stream for its copies.
# All forwards share one stream, so that they run in order and weights change only between two of them.
#
#     buffer 0   copy in | forward | copy out          copy in | ...
#     buffer 1             copy in | forward | copy out
#
# Small rows are on the bus for less time than it takes to queue their copies. Where there are graphs, theirs hold the
# copies as well as the forward: a batch is then one launch.


# The most bytes of inputs and outputs of a graph with copies.
_JOINED_BYTES = 64 * 1024
# Issuing one copy costs the CPU about as much as gathering this many bytes.
_DIRECT_BYTES = 64 * 1024
_BUFFERS = 2


class DeviceServed(Served):
    """As `Served`, with batches that are begun first and finished later.

    Args:
        memory: the whole arena, to be page-locked.
        regions: the rows that clients have bound to device memory.
        graphs: capture CUDA graphs during warm-up; a model that cannot be captured runs without them.
        report: logs an event, called with (event, fields).
        alone: returns a context manager in which no other thread computes.
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
        alone: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        super().__init__(name, model, inputs, outputs, max_batch, device, compute, columns)
        self._report = report
        self._alone = alone
        self._regions = regions
        self._wants_graphs = graphs and self.device.type == "cuda"
        self._lock = PageLock(memory, self.device)
        if not self._lock.held and self.device.type == "cuda":
            report("arena not page-locked", model=name, reason=self._lock.reason)
        try:
            self.forwards = Stream(self.device)
            self._buffers = [_StagingBuffer(self, self._inputs, self._outputs, max_batch) for _ in range(_BUFFERS)]
        except BaseException:
            self._lock.release()
            raise

    def begin(self, tickets: NDArray[Any], rows: int, version: int = 0) -> DeviceBatch:
        """Queue a batch's copies and its forward; return the batch, to be finished later.

        Arguments as `run`.

        Raises:
            RowsNotBound: rows that should be in device memory are not bound, or cannot be used.
            torch.OutOfMemoryError: the device is out of memory.
            Exception: whatever the model raises.
        """
        places = self._regions.of(tickets) if self._regions else None
        self._buffers.append(buffer := self._buffers.pop(0))
        if places is None and rows <= buffer.joined_rows:
            buffer.gather(tickets)
            with self.forwards.running():
                self._use(version)
                buffer.run_joined(rows)
            return DeviceBatch(self, buffer, tickets, rows, self.forwards.mark(), {}, on_device=False)
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
        return DeviceBatch(self, buffer, tickets, rows, buffer.copies.mark(), self._take_row_errors(), on_device)

    def after_outputs(self) -> None:
        """Make what is queued on `forwards` from now on run after the copies of all outputs so far."""
        for buffer in self._buffers:
            self.forwards.after(buffer.copies.mark())

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> BatchOutcome | None:
        """As `Served.run`: begin a batch and finish it."""
        return self.begin(tickets, rows, version).finish()

    def warm_up(self, example: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        """As `Served.warm_up`; then capture the graphs."""
        super().warm_up(example)
        self._capture()

    def sleep(self) -> int:
        """As `Served.sleep`; also release the static inputs and the graphs."""
        for buffer in self._buffers:
            buffer.sleep()
        return super().sleep()

    def _prepare(self) -> None:
        for buffer in self._buffers:
            buffer.wake()
        if self.device.type == "cuda":  # the loop reads weights and inputs on other streams than this thread wrote them
            torch.cuda.current_stream(self.device).synchronize()
        self._capture()

    def _capture(self) -> None:
        if not self._wants_graphs:
            return
        try:
            with torch.inference_mode():
                for buffer in self._buffers:
                    buffer.capture(self._alone)
        except Exception as error:  # noqa: BLE001  a model that cannot be captured runs without graphs
            for buffer in self._buffers:
                buffer.forget_graphs()
            # It would fail again whenever the model wakes, unless memory has been freed.
            self._wants_graphs = isinstance(error, OUT_OF_MEMORY)
            torch.cuda.synchronize(self.device)
            self._report("no CUDA graphs", model=self.spec.name, reason=f"{type(error).__name__}: {error}")
        finally:
            self._take_row_errors()  # discard them: replaying a graph does not call the forward that reports them

    def close(self) -> None:
        """As `Served.close`. Every batch must have been finished."""
        super().close()
        self._lock.release()


@dataclass(slots=True, eq=False)
class DeviceBatch:
    """A batch in flight.

    Attributes:
        end: the point at which its copies to the outputs are done.
        row_errors: the messages of rows that failed, by row.
        on_device: whether all outputs are written to the clients' device memory, and none to the arena.
    """

    served: DeviceServed
    buffer: _StagingBuffer
    tickets: NDArray[Any]
    rows: int
    end: Mark
    row_errors: Mapping[int, str]
    on_device: bool

    def done(self) -> bool:
        """Return whether `finish` would return without waiting."""
        return self.end.done()

    def finish(self) -> BatchOutcome | None:
        """Wait for the outputs and write them to the tickets' rows; return which of the tickets failed."""
        self.end.wait()
        if not self.on_device:
            for item in self.buffer.outputs:
                native.scatter(item.array, self.tickets, array_over(self.buffer.results[item.name][: self.rows]))
        return self.served.refused(self.tickets, self.buffer.results, self.rows, self.row_errors)


class _StagingBuffer:
    """The buffers and the copy stream of one batch in flight."""

    def __init__(
        self, served: DeviceServed, inputs: Sequence[InputRows], outputs: Sequence[OutputRows], max_batch: int
    ) -> None:
        self._served = served
        self._arena_inputs, self.outputs = inputs, outputs
        self._max_batch = max_batch
        device, spec = served.device, served.spec
        self.copies = Stream(device)
        self.graphs: Graphs | None = None
        self._joined: Graphs | None = None
        self.joined_rows = 0  # the rows of the largest batch that is computed by a graph with copies; 0: none is
        self._staged = {
            key: staging(max_batch, item.shape, item.numpy_dtype, device) for key, item in spec.inputs.items()
        }
        self.results = {
            key: staging(max_batch, item.shape, item.numpy_dtype, device) for key, item in spec.outputs.items()
        }
        self._inputs: dict[str, torch.Tensor] = {}
        self.wake()

    def sleep(self) -> None:
        """Release the device memory."""
        self.forget_graphs()
        self._inputs = {}

    def forget_graphs(self) -> None:
        """Release the graphs."""
        self.graphs = self._joined = None
        self.joined_rows = 0

    def wake(self) -> None:
        """Allocate the static inputs."""
        self._inputs = {
            key: torch.zeros((self._max_batch, *item.shape), dtype=dtype_of(item), device=self._served.device)
            for key, item in self._served.spec.inputs.items()
        }

    def gather(self, tickets: NDArray[Any]) -> None:
        """Copy the tickets' rows of all inputs to the staging memory."""
        for item in self._arena_inputs:
            self._gather(item, tickets)

    def _gather(self, item: InputRows, tickets: NDArray[Any]) -> None:
        native.gather(item.array, tickets, array_over(self._staged[item.name]))

    def copy_in(self, tickets: NDArray[Any], rows: int, *, direct: bool) -> None:
        """Queue the copies of the tickets' rows to the device, directly from the arena where that is cheaper."""
        runs = neighbours(tickets)
        for item in self._arena_inputs:
            target = self._inputs[item.name]
            if direct and pays(runs, self._served.spec.inputs[item.name].row_bytes):
                at = 0
                for first, n in runs:
                    target[at : at + n].copy_(item.rows(first, n), non_blocking=True)
                    at += n
            else:
                self._gather(item, tickets)
                target[:rows].copy_(self._staged[item.name][:rows], non_blocking=True)

    def copy_in_bound(self, tickets: NDArray[Any], places: Sequence[Binding | None], driver: Driver) -> None:
        """As `copy_in`, for batches with rows in clients' device memory."""
        waited: set[int] = set()
        at = 0
        for place, first, n in zip(places, tickets["first"].tolist(), tickets["rows"].tolist(), strict=True):
            if place is not None and place.event and place.event not in waited:
                waited.add(place.event)
                driver.wait(place.event, self.copies.pointer)
            for item in self._arena_inputs:
                source = item.rows(first, n) if place is None else place.part(place.inputs, item.name, first, n)
                self._inputs[item.name][at : at + n].copy_(source, non_blocking=True)
            at += n

    def copy_out_bound(
        self,
        results: Mapping[str, torch.Tensor],
        tickets: NDArray[Any],
        places: Sequence[Binding | None],
        *,
        host: bool,
    ) -> bool:
        """Queue copies of outputs to clients' device memory.

        Args:
            host: whether the host needs all outputs as well.

        Returns:
            False if outputs must be copied to the host, too: some rows are not bound, or `host` is set.
        """
        rows = int(tickets["rows"].sum())
        results = {item.name: item.of(results, rows) for item in self.outputs}
        at = 0
        for place, first, n in zip(places, tickets["first"].tolist(), tickets["rows"].tolist(), strict=True):
            if place is not None:
                for key in place.outputs:
                    place.part(place.outputs, key, first, n).copy_(results[key][at : at + n], non_blocking=True)
                    self._keep(results[key])
            at += n
        return not host and None not in places

    def forward(self, rows: int) -> Mapping[str, torch.Tensor]:
        """Queue the forward of the rows that were copied in."""
        if self.graphs is not None:
            return self.graphs.run(rows)
        shape = self._served.shaped(rows)  # rows beyond the batch hold stale values
        results = self._served.forward({key: tensor[:shape] for key, tensor in self._inputs.items()})
        return results if shape == rows else {key: value[:rows] for key, value in results.items()}

    def copy_out(self, results: Mapping[str, torch.Tensor], rows: int) -> None:
        """Queue the copies of the outputs to the host.

        Raises:
            ModelFailed: the outputs do not match the spec.
        """
        for item in self.outputs:
            result = item.of(results, rows)
            self.results[item.name][:rows].copy_(result, non_blocking=True)
            self._keep(result)

    def _keep(self, result: torch.Tensor) -> None:
        """Keep a result's memory from being reused on the forwards' stream before it is copied; a graph's is never."""
        if self.graphs is None:
            self.copies.keep(result)

    def run_joined(self, rows: int) -> None:
        """Queue the copies of the gathered rows and of their outputs, and the forward between them."""
        assert self._joined is not None
        self._joined.run(rows)

    def _forward_with_copies(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        for key, tensor in inputs.items():
            tensor.copy_(self._staged[key][: len(tensor)], non_blocking=True)
        results = self._served.forward(inputs)
        rows = len(next(iter(inputs.values())))
        for item in self.outputs:
            self.results[item.name][:rows].copy_(item.of(results, rows), non_blocking=True)
        return results

    def capture(self, alone: Callable[[], AbstractContextManager[object]]) -> None:
        """Capture the graphs over this buffer's inputs."""
        # torch gives out 32 streams of each priority again and again. One of another priority is never that of a thread
        # that copies weights meanwhile, whose work would become a part of the graph.
        stream = torch.cuda.Stream(self._served.device, priority=-1)  # type: ignore[no-untyped-call]
        self.graphs = Graphs(self._inputs, self._served.forward, stream, self._max_batch, alone)
        if most := joined_rows(self._served.spec, self._max_batch):
            self._joined = Graphs(self._inputs, self._forward_with_copies, stream, most, alone, self.graphs)
            self.joined_rows = most


def joined_rows(spec: ModelSpec, max_batch: int) -> int:
    """Return the rows of the largest graph that is to hold the copies, too; 0: none is."""
    row = sum(each.row_bytes for part in (spec.inputs, spec.outputs) for each in part.values())
    return max((rows for rows in ladder(max_batch) if rows * row <= _JOINED_BYTES), default=0)


def neighbours(tickets: NDArray[Any]) -> list[tuple[int, int]]:
    """Return the tickets' rows in order, as (first, rows) of contiguous runs."""
    runs: list[tuple[int, int]] = []
    for first, rows in zip(tickets["first"].tolist(), tickets["rows"].tolist(), strict=True):
        if runs and first == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + rows)
        else:
            runs.append((first, rows))
    return runs


def pays(runs: Sequence[tuple[int, int]], row_bytes: int) -> bool:
    """Return whether one copy per run is cheaper than gathering all rows first and copying them once."""
    return len(runs) == 1 or sum(n for _, n in runs) * row_bytes >= len(runs) * _DIRECT_BYTES
