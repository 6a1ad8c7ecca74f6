"""Rows in device memory: what a client on the server's GPU computes there goes to a model without touching the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jurybox.protocol.control_pb2 import BindRequest, RegionPlace
from jurybox.protocol.device_memory import Driver
from jurybox.protocol.errors import Error, Refused
from jurybox.protocol.forks import Closing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jurybox.client.model import Model
    from jurybox.protocol.spec import TensorSpec

_ALIGNED = 256  # bytes; what the driver aligns to


class BoundRows:
    """Rows of a lane of their own, each tensor of which lies in memory that somebody exported.

    Args:
        model: whose lane this is; closed with these rows.
        rows: how many.
        inputs, outputs: of every input, and of the outputs that are wanted, the handle and the first row's byte.
        event: handle of an event after which the inputs are there; empty: they are when a request is sent.
        bind: tells the engines, and returns when they have done it; (request, seconds).
    """

    def __init__(
        self,
        model: Model,
        rows: int,
        inputs: Mapping[str, tuple[bytes, int]],
        outputs: Mapping[str, tuple[bytes, int]],
        event: bytes,
        bind: Callable[[BindRequest, float], None],
        timeout: float,
    ) -> None:
        self._model, self._bind = model, bind
        self._rows = model.rows(rows)
        lane, lease = self._rows.leased
        self._end = BindRequest(lane=lane, lease=lease, first=self._rows.first, end=True)
        request = BindRequest(
            lane=lane,
            lease=lease,
            first=self._rows.first,
            rows=rows,
            inputs=[RegionPlace(tensor=name, handle=at[0], offset=at[1]) for name, at in inputs.items()],
            outputs=[RegionPlace(tensor=name, handle=at[0], offset=at[1]) for name, at in outputs.items()],
            event=event,
        )
        try:
            bind(request, timeout)
        except BaseException:
            self.end(timeout)
            raise

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def version(self) -> int:
        """Of the weights that computed the outputs."""
        return self._rows.version

    def infer(self, rows: int | None = None, *, timeout: float | None = None, version: int = 0) -> None:
        """As `Rows.infer`."""
        self._rows.infer(rows, timeout=timeout, version=version)

    def end(self, timeout: float) -> bool:
        """Have the engines let go of the memory, and give the rows back; returns whether all of them have."""
        try:
            self._bind(self._end, timeout)
        except Error:
            return False  # the server is gone, or busy
        finally:
            self._rows.close()
            self._model.close()
        return True


class DeviceRows(Closing):
    """As `Rows`, on the device: write to `inputs`, `infer`, read `outputs`. Use it in a ``with``.

    The memory is this process's; every engine of the model has opened it. An answer means that the outputs are there.

    Attributes:
        inputs, outputs: arrays of shape (n, *row shape) by name, with `__cuda_array_interface__`: torch.as_tensor(a,
            device="cuda") makes a tensor of the same memory. Valid inside the ``with``.
        version: of the weights that computed the outputs; 0 before the first `infer`.
    """

    def __init__(
        self, model: Model, rows: int, driver: Driver, bind: Callable[[BindRequest, float], None], timeout: float
    ) -> None:
        self._driver, self._timeout = driver, timeout
        self._pointer = self._event = 0
        self._rows: BoundRows | None = None
        spec = model.spec
        inputs, at = _places(spec.inputs, rows, 0)
        outputs, size = _places(spec.outputs, rows, at)
        try:
            self._pointer, self._event = driver.allocate(size), driver.event()
            handle, event = driver.export(self._pointer), driver.export_event(self._event)
            given, wanted = ({name: (handle, at) for name, at in offsets.items()} for offsets in (inputs, outputs))
            self._rows = BoundRows(model, rows, given, wanted, event, bind, timeout)
        except BaseException:
            self._free()  # an engine that could not open all of it has let go of the rest
            raise
        self.inputs = self._arrays(spec.inputs, inputs, rows)
        self.outputs = self._arrays(spec.outputs, outputs, rows)

    def __len__(self) -> int:
        return len(self._open())

    @property
    def version(self) -> int:
        """Of the weights that computed the outputs."""
        return self._open().version

    def infer(
        self, rows: int | None = None, *, stream: int = 0, timeout: float | None = None, version: int = 0
    ) -> None:
        """Compute the outputs of the first `rows` rows (all without it).

        The engine reads the inputs after all work that `stream` has been given so far: nothing need be synchronised.

        Args:
            stream: of CUDA, as an integer (`torch.cuda.current_stream().cuda_stream`); 0: the default one.
            timeout, version: as `Rows.infer`.

        Raises:
            As `Rows.infer`.
        """
        bound = self._open()
        self._driver.record(self._event, stream)
        bound.infer(rows, timeout=timeout, version=version)

    def close(self) -> None:
        """Have the engines let go of the memory, and free it.

        Where they do not say in time that they have, it stays allocated until this process ends: an engine may still
        write to it.
        """
        bound, self._rows = self._rows, None
        self.inputs, self.outputs = {}, {}
        if bound is not None and bound.end(self._timeout):
            self._free()

    def _open(self) -> BoundRows:
        if self._rows is None:
            raise Refused("these rows were closed")
        return self._rows

    def _free(self) -> None:
        event, self._event = self._event, 0
        pointer, self._pointer = self._pointer, 0
        if event:
            self._driver.destroy_event(event)
        if pointer:
            self._driver.free(pointer)

    def _arrays(self, specs: Mapping[str, TensorSpec], offsets: dict[str, int], rows: int) -> dict[str, Any]:
        return {
            name: self._driver.array(self._pointer + offsets[name], (rows, *spec.shape), spec.numpy_dtype)
            for name, spec in specs.items()
        }


def _places(specs: Mapping[str, TensorSpec], rows: int, at: int) -> tuple[dict[str, int], int]:
    """Where each tensor begins, from byte `at` on, and where they end."""
    offsets = {}
    for name, spec in specs.items():
        offsets[name] = at
        at += -(-rows * spec.row_bytes // _ALIGNED) * _ALIGNED
    return offsets, at
