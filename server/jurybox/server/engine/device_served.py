"""A model on a device of its own: two batches on their way, one computing while the next is copied in.

Each batch goes through one of two *berths*: static inputs on the device, staging memory on the host, and a stream for
its copies. Forwards share one stream, so that they run in order and weights change between two of them.

    berth 0   copy in | forward | copy out          copy in | ...
    berth 1             copy in | forward | copy out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.errors import ModelFailed
from jurybox.server.engine.graphs import Graphs
from jurybox.server.engine.page_lock import PageLock, staging
from jurybox.server.engine.served import Served, dtype_of
from jurybox.server.engine.streams import Mark, Stream
from jurybox.server.models import ServedModel

# A copy of its own costs the CPU about what it takes to gather this much.
_DIRECT_BYTES = 64 * 1024
_BERTHS = 2


class DeviceServed(Served):
    """As `Served`, with batches that are begun first and finished later.

    Args:
        memory: the whole arena, to be page-locked.
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
        report: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        super().__init__(name, model, inputs, outputs, max_batch, device, compute)
        self._report = report
        self._wants_graphs = graphs and self.device.type == "cuda"
        self.arena_inputs, self.arena_outputs = dict(inputs), dict(outputs)
        self.arena_tensors = {key: torch.from_numpy(array) for key, array in inputs.items()}
        self._lock = PageLock(memory, self.device)
        if not self._lock.held and self.device.type == "cuda":
            report("arena not page-locked", model=name, reason=self._lock.reason)
        self.forwards = Stream(self.device)
        self._berths = [_Berth(self, max_batch) for _ in range(_BERTHS)]

    def begin(self, tickets: NDArray[Any], rows: int, version: int = 0) -> Batch:
        """Queue a batch's copies and forward; as `run`, of a batch to be finished later.

        Raises:
            Refused, and whatever the model raises; torch.OutOfMemoryError where the device has no room.
        """
        self._berths.append(berth := self._berths.pop(0))
        with berth.copies.running():
            berth.copy_in(tickets, rows, direct=self._lock.held)
        self.forwards.after(berth.copies.mark())
        with self.forwards.running():
            self._use(version)
            results = berth.forward(rows)
        berth.copies.after(self.forwards.mark())
        with berth.copies.running():
            berth.copy_out(results, rows)
        return Batch(self, berth, tickets, rows, berth.copies.mark())

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> None:
        """As `Served.run`: begin and finish."""
        self.begin(tickets, rows, version).finish()

    def warm_up(self, example: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        """As `Served.warm_up`; then captures graphs."""
        super().warm_up(example)
        if not self._wants_graphs:
            return
        try:
            with torch.inference_mode():
                for berth in self._berths:
                    berth.capture()
        except Exception as error:  # noqa: BLE001  what cannot be captured runs all the same
            for berth in self._berths:
                berth.graphs = None
            torch.cuda.synchronize(self.device)
            self._report("no CUDA graphs", model=self.spec.name, reason=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """As `Served.close`; every batch has been finished."""
        super().close()
        self._lock.release()


class Batch:
    """A batch on its way."""

    def __init__(self, served: DeviceServed, berth: _Berth, tickets: NDArray[Any], rows: int, end: Mark) -> None:
        self._served = served
        self._berth = berth
        self._tickets = tickets
        self._rows = rows
        self._end = end

    def done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._end.done()

    def finish(self) -> None:
        """Wait for the outputs and write them to the tickets' rows."""
        self._end.wait()
        for name, array in self._served.arena_outputs.items():
            native.scatter(array, self._tickets, self._berth.results[name][: self._rows].numpy())


class _Berth:
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
        self._inputs = {
            key: torch.zeros((max_batch, *item.shape), dtype=dtype_of(item), device=device)
            for key, item in spec.inputs.items()
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

    def forward(self, rows: int) -> Mapping[str, torch.Tensor]:
        """Queue the forward of the rows copied in."""
        if self.graphs is not None:
            return self.graphs.run(rows)
        return self._served.forward({key: tensor[:rows] for key, tensor in self._inputs.items()})

    def copy_out(self, results: Mapping[str, torch.Tensor], rows: int) -> None:
        """Queue the copies of the outputs to the host. Raises ModelFailed where they are not what the spec promises."""
        for key, item in self._served.spec.outputs.items():
            if key not in results:
                raise ModelFailed(f"the model gave no output {key!r}; it gave {', '.join(results)}")
            if results[key].shape != (rows, *item.shape):
                raise ModelFailed(
                    f"output {key!r} has shape {list(results[key].shape)}, the spec promises {[rows, *item.shape]}"
                )
            self.results[key][:rows].copy_(results[key], non_blocking=True)
            if results[key].is_cuda and self.graphs is None:
                # Its memory belongs to the forwards' stream, which must not reuse it before this copy.
                results[key].record_stream(torch.cuda.current_stream(results[key].device))

    def capture(self) -> None:
        """Capture graphs over this berth's inputs."""
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
