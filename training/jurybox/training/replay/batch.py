"""Batches of sampled rows: reusable named arrays, and prefetching on a thread."""

from __future__ import annotations

import collections
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jurybox import native
from jurybox.protocol.errors import SpecMismatch, Timeout
from jurybox.protocol.forks import Closing
from jurybox.protocol.locks import seconds
from jurybox.training.replay.layout import Layout
from jurybox.training.replay.options import ForkGuard, Windows

if TYPE_CHECKING:
    import torch


class Batch(Mapping[str, npt.NDArray[Any]]):
    """Columns of `n` sampled rows: ``batch["observation"]`` has shape (n, ...).

    Attributes:
        n: rows.
        indices: (n,) int64; which rows these are, for `update_priorities`.
        weights: (n,) float32 importance weights, the largest is 1; None from a replay without priorities.
        valid: masks, uint8, by field (stacks: (n, stack)) or "sequence" ((n, length)).
        windows: the rows that surround each row.
        layout: of the replay that it is for.
    """

    def __init__(
        self, layout: Layout, rings: list[native.ReplayRing], n: int, windows: Windows, *, pinned: bool = False
    ) -> None:
        self.n = n
        self.windows = windows
        self.layout = layout
        self.valid: dict[str, npt.NDArray[np.uint8]] = {}
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._pinned = pinned
        self.indices = np.empty(n, np.int64)
        self.weights = np.empty(n, np.float32) if layout.prioritized else None
        self.columns = [native.ReplayColumns() for _ in rings]
        self._place(layout, rings)
        for columns in self.columns:
            columns.indices(self.indices, self.weights)

    def _array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        if self._pinned:
            import torch

            tensor = torch.from_numpy(np.empty(0, dtype)).new_empty(shape, pin_memory=True)
            self._tensors[name] = tensor
            array: npt.NDArray[Any] = tensor.numpy()
        else:
            array = _new_array(shape, np.dtype(dtype))
        self._arrays[name] = array
        return array

    def _place(self, layout: Layout, rings: list[native.ReplayRing]) -> None:
        w, n = self.windows, self.n
        if not w.any:
            for number, (name, spec) in enumerate(layout.fields.items()):
                out = self._array(name, (n, *spec.shape), spec.dtype)
                for columns, ring in zip(self.columns, rings, strict=True):
                    columns.add(ring, number, out)
            return
        reward = layout.check(w).reward
        for columns, ring in zip(self.columns, rings, strict=True):
            columns.window(ring, w.back, w.steps, w.length, w.full_length, bool(w.next))
        for number, (name, spec) in enumerate(layout.fields.items()):
            if w.n_step and name == reward:
                returns = self._array(name, (n,), np.float32)
                discount = self._array("discount", (n,), np.float32)
                for columns, ring in zip(self.columns, rings, strict=True):
                    columns.returns(ring, number, w.gamma, returns, discount)
                continue
            for each in w.columns(name):
                out = self._array(each.key, (n, *each.shape(spec.shape)), spec.dtype)
                mask = None
                if each.mask and each.mask not in self.valid:  # that of a sequence is filled once
                    mask = self.valid[each.mask] = np.empty((n, each.rows), np.uint8)
                for columns, ring in zip(self.columns, rings, strict=True):
                    columns.add(ring, number, out, each.first, each.rows, each.ahead, mask)

    def check_layout(self, layout: Layout) -> None:
        """Raises SpecMismatch unless rows of this layout fit the columns."""
        own = self.layout
        if list(own.fields.items()) != list(layout.fields.items()):
            why = f"expected a batch for rows of {_text(layout)}, came one for {_text(own)}"
        elif self.windows.any and own.episodes != layout.episodes:
            why = f"expected a batch for {layout.episodes}, came one for {own.episodes}"
        elif len(self.columns) < len(layout.parts):
            why = "expected a batch for a replay with an anchor, came one for a replay without"
        else:
            return
        raise SpecMismatch(f"{why}; make it with batch() of this replay")

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"{name!r}: this batch has {', '.join(self._arrays)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def torch(self) -> dict[str, torch.Tensor]:
        """The columns as tensors over the same memory (page-locked where the batch was made so)."""
        import torch

        return self._tensors or {name: torch.from_numpy(array) for name, array in self._arrays.items()}


def _text(layout: Layout) -> str:
    return ", ".join(f"{name}: {f.dtype}{list(f.shape)} as {f.stored or f.dtype}" for name, f in layout.fields.items())


_LARGE = 128 << 10  # bytes; the kernel clears new memory of that size page by page, which costs more than the copy


def _new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return np.empty(shape, dtype)
    array: npt.NDArray[Any] = native.replay_batch_array(size).view(dtype).reshape(shape)
    return array


_SLICE = 0.1  # seconds between two checks for a stop


class Prefetch(ForkGuard, Closing):
    """An infinite iterator over samples of `n` rows, which a thread draws in advance.

    On the host it gives `Batch` objects, which are reused: a batch is valid until the next one is requested.
    With a device it gives dicts of tensors there (and "indices", "weights"), copied from page-locked memory on a
    stream of their own; they are not reused.

    The iterator raises the Timeout of a sampler that waits for the rate limiter. After `close` it ends in every thread.
    A forked child, which lacks the thread, cannot use it.

    Args:
        make, draw: `Replay.batch` and `Replay.sample`.
        timeout: seconds that a sample may wait for the rate limiter.
    """

    refusal = "these batches are drawn by a thread of the process before its fork: prefetch in this one"

    def __init__(
        self,
        make: Callable[..., Batch],
        draw: Callable[..., Batch],
        n: int,
        *,
        depth: int,
        device: str | None,
        timeout: float,
        options: dict[str, Any],
    ) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}: expected at least one batch ahead")
        self._make, self._draw = make, draw
        self._options = dict(options)
        windows = self._options.pop("windows", None)
        arguments = () if windows is None else (windows,)
        self._n = n
        self._timeout = seconds(timeout)
        self._device = device
        # One more than the depth: the batch that the caller holds. The queues are simple ones, which have no lock in
        # Python code: a signal handler or a destructor within `next` may ask for a batch, too, and close.
        pinned = device is not None and device.startswith("cuda")
        self._free: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        for _ in range(depth + 1):
            self._free.put(make(n, *arguments, pinned=pinned))
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._held: collections.deque[Batch] = collections.deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="replay-prefetch", daemon=True)
        self._thread.start()
        super().__init__()

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        self._check_process()
        with suppress(IndexError):
            while True:
                self._free.put(self._held.popleft())
        item = None
        while item is None:
            if self._stopped:
                raise StopIteration
            with suppress(queue.Empty):
                item = self._ready.get(timeout=_SLICE)
        if isinstance(item, BaseException):
            self.close()
            raise item
        if isinstance(item, Batch):
            self._held.append(item)
            return item
        tensors, copied, batch = item
        self._free.put(batch)
        if copied is not None:
            import torch

            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            for tensor in tensors.values():
                # The memory belongs to the copying stream, which shall not fill it again before this one has read it.
                tensor.record_stream(stream)
        return tensors

    def close(self) -> None:
        """Stop drawing; batches handed out stay valid."""
        if self._forked:
            return
        self._stopped = True
        # An additional batch wakes the thread, so that it stops.
        self._free.put(self._make(0))
        self._thread.join()

    def _run(self) -> None:
        try:
            move = None if self._device is None else _mover(self._device)
            while True:
                batch = self._free.get()
                if self._stopped:
                    return
                if not self._drawn(batch):
                    return
                self._ready.put(batch if move is None else (*move(batch), batch))
        except BaseException as error:  # noqa: BLE001  (raised by the next request for a batch)
            self._ready.put(error)

    def _drawn(self, batch: Batch) -> bool:
        """Draw a batch; return False if `close` came first. The wait for the rate limiter is in parts for its sake."""
        until = time.monotonic() + self._timeout
        while not self._stopped:
            try:
                self._draw(self._n, batch, timeout=min(_SLICE, self._timeout), **self._options)
                return True
            except Timeout:
                if time.monotonic() >= until:
                    raise
        return False


def _mover(device: str) -> Any:
    """Return a function that copies a batch to `device`; afterwards the batch may be reused."""
    import torch

    def columns(batch: Batch) -> dict[str, torch.Tensor]:
        extra = {"indices": torch.from_numpy(batch.indices)}
        if batch.weights is not None:
            extra["weights"] = torch.from_numpy(batch.weights)
        return {
            **batch.torch(),
            **extra,
            **{f"valid_{name}": torch.from_numpy(mask) for name, mask in batch.valid.items()},
        }

    if not device.startswith("cuda"):
        return lambda batch: ({name: tensor.to(device, copy=True) for name, tensor in columns(batch).items()}, None)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def move(batch: Batch) -> tuple[dict[str, torch.Tensor], Any]:
        with torch.cuda.stream(stream):
            tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in columns(batch).items()}
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        copied.synchronize()  # the pinned memory is about to be filled again
        return tensors, copied

    return move
