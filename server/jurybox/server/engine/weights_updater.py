"""Updates of a served model's weights: a thread copies publications, and the loop switches between two batches."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from jurybox.protocol.device_memory import FAKE
from jurybox.protocol.errors import Error, Timeout, VersionNotHeld, said
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.server.engine.device import Mark, Stream, current_mark, staging, use_device
from jurybox.server.engine.device_regions import PublishedOnDevice
from jurybox.server.engine.modules import weights_of

_SLICE = 0.25  # seconds between two checks whether to stop
_LOOKS = 3  # attempts to copy from the learner's device before a publication is copied from the host
_PARTING = 30.0  # seconds to wait for the end of a copy in progress
_AGAIN = 10.0  # seconds between two reports of the same error
_UNKNOWN = -1  # no version
_NO_NEWS = 5.0  # seconds to wait for the first publication


def in_loop(later: Callable[[Callable[[], None]], None], action: Callable[[], None], stopped: threading.Event) -> None:
    """Run an action between two batches of the engine's loop, wait for it, and raise what it raises.

    If `stopped` is set, the action is not run, and this does not wait: the loop may have ended.
    """
    done = threading.Event()
    raised: list[BaseException] = []

    def act() -> None:
        try:
            if not stopped.is_set():
                action()
        except BaseException as error:  # noqa: BLE001  raised in the waiting thread
            raised.append(error)
        finally:
            done.set()

    later(act)
    while not done.wait(_SLICE) and not stopped.is_set():
        pass
    if raised:
        raise raised[0]


def seldom(report: Callable[..., None]) -> Callable[..., None]:
    """Return a function that reports events, but a repeated error only once in a while.

    A damaged channel gives the same error at every attempt, several times a second.
    """
    last: dict[tuple[str, object], tuple[object, float]] = {}  # by event and model: the error, and when to repeat it

    def reported(event: str, **fields: object) -> None:
        key, error, now = (event, fields.get("model")), fields.get("error"), time.monotonic()
        before, again = last.get(key, (None, now))
        if error != before or now >= again:
            last[key] = error, now + _AGAIN
            report(event, **fields)

    return reported


class Copy:
    """One version of a model's weights on the device, in the dtypes of the module."""

    def __init__(
        self,
        reader: WeightsReader,
        module: torch.nn.Module,
        stream: Stream,
        device: torch.device,
        on_device: PublishedOnDevice | None = None,
    ) -> None:
        self._on_device = on_device
        self.from_device = 0  # the number of publications copied from the learner's device memory
        self.version = 0
        self.used = Mark(None)  # the last work that reads it
        self._stream = stream
        self._reader = reader
        memory = staging(reader.layout.nbytes, (), np.dtype(np.uint8), device)
        self._flat = memory.numpy()
        self._host: dict[str, torch.Tensor] = reader.layout.tensors(memory)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, target in weights_of(module).items():
            host = self._host[name]
            # Other strides, such as those of channels_last, are kept: compiled code and kernels depend on them.
            same = target.is_cpu and (host.dtype, host.stride()) == (target.dtype, target.stride())
            self.tensors[name] = host if same else torch.empty_like(target.data)

    def fill(self, timeout: float) -> float:
        """Copy the newest publication and return its age in seconds. Raises Timeout."""
        if self._on_device is not None and (age := self._fill_on_device(self._on_device)) is not None:
            return age
        version, _ = self._reader.read_bytes(self._flat, timeout=timeout)
        self._stream.after(self.used)
        with self._stream.running():
            for name, tensor in self.tensors.items():
                if tensor is not self._host[name]:
                    tensor.copy_(self._host[name], non_blocking=True)
        self._stream.mark().wait()
        self.version = version
        return self._reader.age_seconds

    def _fill_on_device(self, published: PublishedOnDevice) -> float | None:
        """Do the same from the learner's memory on this device; return None if it is not there or was overwritten."""
        channel = self._reader.channel
        for _ in range(_LOOKS):
            claim = channel.claim()
            if not claim.version or (source := published.tensors(claim)) is None:
                return None
            self._stream.after(self.used)
            with self._stream.running():
                for name, tensor in self.tensors.items():
                    tensor.copy_(source[name], non_blocking=True)
            self._stream.mark().wait()
            if channel.holds(claim):
                self.version = claim.version
                self.from_device += 1
                return channel.age_seconds(claim)
        return None


class WeightsUpdater:
    """Keeps a module's weights at the newest version of a weights channel.

    It holds the copy in use, one that is being filled, and `keep` earlier ones for tickets that request a version.

    Args:
        module: the served module; its parameters and buffers are pointed at the copies.
        device: the module's device.
        keep: the number of earlier versions that stay usable.
        later: runs an action between two batches of the engine's loop.
        adopted: called with (version, seconds from publication to use) after every switch.
        forwards: the stream on which the module computes. The weights then keep their addresses, as CUDA graphs
            require, and are overwritten between two forwards. None: the module is pointed at another copy.
        report: called with (event, fields) for log events.
        before: called before weights are overwritten on `forwards`. It must make them wait for the copies of earlier
            outputs, since an output may be a view of a weight.
        in_place: overwrite the weights, also without `forwards`: for modules that keep views of them.

    A method `weights_changed` of the module is called after every switch, between two batches.
    """

    def __init__(
        self,
        channel: WeightsChannel,
        module: torch.nn.Module,
        device: torch.device,
        keep: int,
        later: Callable[[Callable[[], None]], None],
        adopted: Callable[[int, float], None],
        forwards: Stream | None = None,
        report: Callable[..., None] = lambda event, **fields: None,
        before: Callable[[], None] | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        self._report = seldom(report)
        self._before = before
        self.channel = channel
        self._reader = WeightsReader(channel)
        self._module = module
        self._device = device
        self._keep = keep
        shares = device.type == "cuda" or FAKE in os.environ
        self._on_device = PublishedOnDevice(channel, device) if shares else None
        self._targets = weights_of(module)
        self._copies: deque[Copy] = deque()  # the oldest first
        self._make_copies()
        self._in_place = in_place or forwards is not None
        # A module that says it copies nothing knows its constants by their addresses: those stay.
        by_address = self._in_place and getattr(module, "copies", None) is False
        self._changed = None if by_address else getattr(module, "weights_changed", None)
        self._forwards = forwards
        self._later = later
        self._adopted = adopted
        self._used = 0
        self._stopped = threading.Event()
        self._thread = self._new_thread()

    @property
    def version(self) -> int:
        """The version in use; 0 while the model computes with the weights it was loaded with."""
        return self._copies[-1].version if self._copies else 0

    def start(self) -> None:
        """Load the newest publication, if there is one, and start the thread; called before the model serves.

        A snapshot whose publisher was killed in the middle cannot be loaded: the model then serves with its own
        weights until the next publication.
        """
        try:
            self._load_newest()
        except Timeout as error:
            self._report("weights not adopted", error=said(error))
        self._thread.start()

    def _load_newest(self) -> None:
        if self._reader.newer_than(0):
            age = self._copies[0].fill(_NO_NEWS)
            self._switch(age)

    def use(self, version: int) -> None:
        """Compute with a version until the next call; 0: the newest.

        Raises:
            VersionNotHeld: it is not held, or not any more.
        """
        wanted = version or self.version
        if wanted == self._used == self.version:
            return
        held = list(self._copies)[1:]  # the oldest may be partly filled with the next version, even if it was used last
        for copy in held:
            if copy.version == wanted:
                if wanted != self._used:
                    self._point(copy)
                return
        there = ", ".join(str(copy.version) for copy in held if copy.version) or "none"
        raise VersionNotHeld(
            f"weights version {version} is not held, {there} are: the model's keep_versions says how many"
        )

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()

    def join(self) -> None:
        """Wait for the end of the thread after `stop`."""
        if self._thread.is_alive():
            self._thread.join(4 * _SLICE)

    def sleep(self) -> None:
        """Stop and free all copies, until `wake`. Raises Timeout if a copy in progress does not end."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_PARTING)
            if self._thread.is_alive():
                raise Timeout(f"a publication has been on its way to the device for {_PARTING:.0f} s")
        self._copies.clear()
        if self._on_device is not None:
            self._on_device.close()

    def wake(self) -> None:
        """Load the newest publication and resume updating. Raises Timeout."""
        self._stopped = threading.Event()
        self._thread = self._new_thread()
        self._make_copies()
        self._used = 0
        self._load_newest()
        self._thread.start()

    def _make_copies(self) -> None:
        stream = Stream(self._device)
        self._copies.extend(
            Copy(self._reader, self._module, stream, self._device, self._on_device) for _ in range(self._keep + 2)
        )

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._follow, args=(self._stopped,), name="weights", daemon=True)

    def _follow(self, stopped: threading.Event) -> None:
        use_device(self._device)
        while not stopped.is_set():
            try:
                if not self._reader.wait_newer_than(self.version, _SLICE):
                    continue
            except Error:  # the channel is closed: its model was unloaded, or the server is gone
                return
            try:
                self._adopt(stopped)
            except Timeout:
                continue  # a snapshot was being published, or several; try again
            except Exception as error:  # noqa: BLE001  the thread continues: the next publication may be valid
                self._report("weights not adopted", error=said(error))
                stopped.wait(_SLICE)

    def _adopt(self, stopped: threading.Event) -> None:
        with torch.inference_mode(False), torch.no_grad():
            age = self._copies[0].fill(_SLICE)
        began = time.monotonic()
        # This waits, because the copy must not be filled again before it is in use.
        in_loop(self._later, lambda: self._switch(age + time.monotonic() - began), stopped)

    def _switch(self, age: float) -> None:
        copy = self._copies.popleft()
        self._copies.append(copy)  # the next batch uses it
        self._adopted(copy.version, age)

    def _point(self, copy: Copy) -> None:
        self._used = _UNKNOWN  # until all is done: if something fails, the weights may be of either version
        if self._before is not None:
            self._before()
        for name, tensor in copy.tensors.items():
            if self._in_place:
                self._targets[name].data.copy_(tensor, non_blocking=True)
            else:
                self._targets[name].data = tensor
        if self._in_place:
            copy.used = self._forwards.mark() if self._forwards is not None else current_mark(self._device)
        if self._changed is not None:
            self._changed()
        self._used = copy.version
