"""How published weights reach a model that is being served: a thread copies, the loop switches between two batches."""

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
from jurybox.server.engine.device import Mark, Stream, staging
from jurybox.server.engine.device_regions import PublishedOnDevice

_SLICE = 0.25  # seconds between two looks whether to stop
_LOOKS = 3  # at publications that a learner overtakes, before one is taken from the host
_PARTING = 30.0  # seconds that a copy under way may take to end
_NO_NEWS = 5.0  # seconds a switch may take: the loop may be in a long forward


class Copy:
    """One version of a model's weights, where and as the module computes with them."""

    def __init__(
        self,
        reader: WeightsReader,
        module: torch.nn.Module,
        stream: Stream,
        device: torch.device,
        on_device: PublishedOnDevice | None = None,
    ) -> None:
        self._on_device = on_device
        self.from_device = 0  # publications that were taken from the learner's device memory
        self.version = 0
        self.used = Mark(None)  # the last work that reads it
        self._stream = stream
        self._reader = reader
        memory = staging(reader.layout.nbytes, (), np.dtype(np.uint8), device)
        self._flat = memory.numpy()
        self._host: dict[str, torch.Tensor] = reader.layout.tensors(memory)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, target in module.state_dict(keep_vars=True).items():
            host = self._host[name]
            same = host.dtype == target.dtype and target.is_cpu
            self.tensors[name] = host if same else torch.empty_like(target.data)

    def fill(self, timeout: float) -> float:
        """Take the newest publication; gives its age in seconds. Raises Timeout."""
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
        """As `fill`, from the learner's memory on the same device; None where it is not there, or was overtaken."""
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
    """Keeps a module at the newest version of a weights channel.

    Besides the copy in use there is one being filled, and `keep` earlier ones for tickets that ask for a version.

    Args:
        module: as it is served; its parameters and buffers are pointed at the copies.
        device: where the module is.
        keep: how many earlier versions stay usable.
        later: runs an action between two batches of the engine's loop.
        adopted: told (version, seconds from publication to use) after every switch.
        forwards: the stream that the module computes on. Its weights are then copied over between two forwards and stay
            where they are, which CUDA graphs need; without it the module is pointed at another copy.
        report: called with (event, fields) for what should be logged.
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
    ) -> None:
        self._report = report
        self.channel = channel
        self._reader = WeightsReader(channel)
        self._module = module
        self._device = device
        self._keep = keep
        shares = device.type == "cuda" or FAKE in os.environ
        self._on_device = PublishedOnDevice(channel, device) if shares else None
        self._targets = dict(module.state_dict(keep_vars=True).items())
        self._copies: deque[Copy] = deque()  # the oldest first
        self._make_copies()
        # A module whose constants are elsewhere is told that they have changed, where they are pointed to anew.
        self._changed = getattr(module, "weights_changed", None) if forwards is None else None
        self._forwards = forwards
        self._later = later
        self._adopted = adopted
        self._used = 0
        self._stopped = threading.Event()
        self._thread = self._new_thread()

    @property
    def version(self) -> int:
        """In use; 0 while the model computes with what it was loaded with."""
        return self._copies[-1].version if self._copies else 0

    def start(self) -> None:
        """Load what has been published already, then start the thread; before the model is in service."""
        if self._reader.newer_than(0):
            age = self._copies[0].fill(_NO_NEWS)
            self._switch(age)
        self._thread.start()

    def use(self, version: int) -> None:
        """Compute with a version until told otherwise; 0 or the newest: with the newest.

        Raises:
            VersionNotHeld: it is not held (any more).
        """
        wanted = version or self.version
        if wanted == self._used == self.version:
            return
        held = list(self._copies)[1:]  # the oldest may be half filled with the next version, and be the one last used
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
        """Wait for the end of the thread that was told to stop."""
        if self._thread.is_alive():
            self._thread.join(4 * _SLICE)

    def sleep(self) -> None:
        """Stop, and hold no copies, until `wake`. Raises Timeout if a copy in progress does not end."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join(_PARTING)
            if self._thread.is_alive():
                raise Timeout(f"a publication has been on its way to the device for {_PARTING:.0f} s")
        self._copies.clear()
        if self._on_device is not None:
            self._on_device.close()

    def wake(self) -> None:
        """Load the newest publication, and go on updating. Raises Timeout."""
        self._stopped = threading.Event()
        self._thread = self._new_thread()
        self._make_copies()
        self._used = 0
        self.start()

    def _make_copies(self) -> None:
        stream = Stream(self._device)
        self._copies.extend(
            Copy(self._reader, self._module, stream, self._device, self._on_device) for _ in range(self._keep + 2)
        )

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._follow, args=(self._stopped,), name="weights", daemon=True)

    def _follow(self, stopped: threading.Event) -> None:
        while not stopped.is_set():
            try:
                if not self._reader.wait_newer_than(self.version, _SLICE):
                    continue
            except Error:  # the channel is closed: its model was unloaded, or the server is gone
                return
            try:
                with torch.inference_mode(False), torch.no_grad():
                    age = self._copies[0].fill(_SLICE)
            except Timeout:
                continue  # a publisher in the middle of a snapshot, or far ahead: the next look finds a whole one
            except Exception as error:  # noqa: BLE001  the thread goes on: the next publication may be a better one
                self._report("weights not adopted", error=said(error))
                stopped.wait(_SLICE)
                continue
            done = threading.Event()
            began = time.monotonic()
            self._later(lambda age=age, done=done, began=began: self._between(age, done, began, stopped))  # type: ignore[misc]
            # The copy must not be filled again before it is in use; without a loop there is nothing left to follow.
            while not done.wait(_SLICE) and not stopped.is_set():
                pass

    def _between(self, age: float, done: threading.Event, began: float, stopped: threading.Event) -> None:
        try:
            if not stopped.is_set():
                self._switch(age + time.monotonic() - began)
        finally:
            done.set()

    def _switch(self, age: float) -> None:
        copy = self._copies.popleft()
        self._copies.append(copy)  # the next batch uses it
        self._adopted(copy.version, age)

    def _point(self, copy: Copy) -> None:
        for name, tensor in copy.tensors.items():
            if self._forwards is not None:
                self._targets[name].data.copy_(tensor, non_blocking=True)
            else:
                self._targets[name].data = tensor
        if self._forwards is not None:
            copy.used = self._forwards.mark()
        elif self._changed is not None:
            self._changed()
        self._used = copy.version
