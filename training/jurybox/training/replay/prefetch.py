"""The next batches, ready before they are asked for."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jurybox.protocol import forks
from jurybox.protocol.errors import Refused
from jurybox.training.replay.batch import Batch

if TYPE_CHECKING:
    import torch

    from jurybox.training.replay.replay import Replay

_SLICE = 0.1  # seconds between two looks whether to stop


class Prefetch:
    """An endless iterator over samples of `n` rows that a thread draws ahead.

    On the host it gives `Batch` objects, which are filled again: a batch is the caller's until the next is asked for.
    With a device it gives dicts of tensors there (and "indices", "weights"), copied from page-locked memory on a
    stream of their own; they are the caller's for good.

    A sampler that waits for the rate limiter raises its Timeout here; a closed one ends, in whatever thread it is
    asked. In a forked child, which has no such thread, it is refused.
    """

    def __init__(self, replay: Replay, n: int, *, depth: int, device: str | None, options: dict[str, Any]) -> None:
        if depth < 1:
            raise ValueError(f"depth={depth}: expected at least one batch ahead")
        self._replay = replay
        self._options = dict(options)
        windows = self._options.pop("windows", None)
        arguments = () if windows is None else (windows,)
        self._n = n
        self._device = device
        # One more than are ready: the one that the caller holds.
        pinned = device is not None and device.startswith("cuda")
        self._free: queue.Queue[Batch] = queue.Queue()
        for _ in range(depth + 1):
            self._free.put(replay.batch(n, *arguments, pinned=pinned))
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=depth)
        self._held: Batch | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay-prefetch", daemon=True)
        self._thread.start()
        self._forked = False
        forks.register(self)

    def _after_fork_in_child(self) -> None:
        self._forked = True

    def __iter__(self) -> Prefetch:
        return self

    def __next__(self) -> Any:
        if self._forked:
            raise Refused("these batches are drawn by a thread of the process before its fork: prefetch in this one")
        if self._held is not None:
            self._free.put(self._held)
            self._held = None
        item = None
        while item is None:
            if self._stop.is_set():
                raise StopIteration
            with suppress(queue.Empty):
                item = self._ready.get(timeout=_SLICE)
        if isinstance(item, BaseException):
            self.close()
            raise item
        if isinstance(item, Batch):
            self._held = item
            return item
        tensors, copied = item
        if copied is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_event(copied)
        return tensors

    def close(self) -> None:
        """Stop drawing; batches handed out stay valid."""
        if self._forked:
            return
        self._stop.set()
        # A batch more than it has lets the thread see that it is to stop.
        self._free.put(self._replay.batch(0))
        self._thread.join()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            move = None if self._device is None else _mover(self._device)
            while True:
                batch = self._free.get()
                if self._stop.is_set():
                    return
                self._replay.sample(self._n, batch, **self._options)
                if move is None:
                    self._offer(batch)
                else:
                    tensors = move(batch)
                    self._free.put(batch)
                    self._offer(tensors)
        except BaseException as error:  # noqa: BLE001  (handed to whoever asks for the next batch)
            self._offer(error)

    def _offer(self, item: Any) -> None:
        while not self._stop.is_set():
            with suppress(queue.Full):
                self._ready.put(item, timeout=_SLICE)
                return


def _mover(device: str) -> Any:
    """A function that copies a batch to `device`; the batch may be filled again when it returns."""
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
        for tensor in tensors.values():
            tensor.record_stream(torch.cuda.current_stream(device))
        return tensors, copied

    return move
