"""Rows in device memory: inputs that a client computes on the server's GPU reach a model without a copy to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jurybox.protocol.control_pb2 import BindRequest, RegionPlace
from jurybox.protocol.device_memory import Driver
from jurybox.protocol.dtypes import BITS
from jurybox.protocol.errors import Error, Refused
from jurybox.protocol.forks import Closing
from jurybox.protocol.row_arrays import RowArrays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jurybox.client.model import Model
    from jurybox.protocol.spec import TensorSpec

_ALIGNED = 256  # bytes; the driver's alignment


class BoundRows:
    """Rows of their own lane, whose tensors are in exported device memory.

    Args:
        model: the model that leases the lane; closed with these rows.
        rows: number of rows.
        inputs, outputs: for every input, and for the requested outputs, the memory handle and the byte offset of the
            first row.
        event: handle of the event that the inputs are ready after; empty: they are ready when a request is sent.
        bind: sends a BindRequest to the engines and returns when they have carried it out; takes (request, seconds).
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
        self._rows = model.unwritten_rows(rows)
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
        """The weights version that computed the outputs."""
        return self._rows.version

    def infer(self, rows: int | None = None, *, timeout: float | None = None, version: int | None = None) -> int:
        """Compute the outputs; see `Rows.infer`."""
        return self._rows.infer(rows, timeout=timeout, version=version)

    def end(self, timeout: float) -> bool:
        """Make the engines release the memory, and release the rows; return whether all engines have released it."""
        try:
            self._bind(self._end, timeout)
        except Error:
            return False  # the server is gone, or busy
        finally:
            self._rows.close()
            self._model.close()
        return True


class DeviceRows(Closing):
    """Like `Rows`, in device memory: write to `inputs`, `infer`, read `outputs`. Use it in a ``with`` statement.

    The memory belongs to this process, and every engine of the model opens it. When `infer` returns, the outputs are
    complete.

    Attributes:
        inputs, outputs: arrays of shape (n, *row shape) by name, with `__cuda_array_interface__`: torch.as_tensor(a,
            device="cuda") returns a tensor of the same memory. Valid in the ``with`` block.
        version: weights version that computed the outputs; 0 before the first `infer`.
    """

    def __init__(
        self, model: Model, rows: int, driver: Driver, bind: Callable[[BindRequest, float], None], timeout: float
    ) -> None:
        self._name, self._driver, self._timeout = model.name, driver, timeout
        self._pointer = self._event = 0
        self._rows: BoundRows | None = None
        spec = model.spec
        if small := [name for name, one in (*spec.inputs.items(), *spec.outputs.items()) if one.dtype in BITS]:
            raise Refused(
                f"{small[0]!r} of {model.name!r} is of a dtype that arrays in device memory cannot have "
                "(__cuda_array_interface__ has none for bfloat16 and float8): use rows(), in host memory"
            )
        inputs, at = _places(spec.inputs, rows, 0)
        outputs, size = _places(spec.outputs, rows, at)
        try:
            self._pointer = driver.allocate(size)
            self._event = driver.event()
            handle, event = driver.export(self._pointer), driver.export_event(self._event)
            given, wanted = ({name: (handle, at) for name, at in offsets.items()} for offsets in (inputs, outputs))
            self._rows = BoundRows(model, rows, given, wanted, event, bind, timeout)
        except BaseException:
            self._free()  # an engine that could not open all of it has released the rest
            raise
        self.inputs = RowArrays(self._arrays(spec.inputs, inputs, rows), model.name)
        self.outputs = RowArrays(self._arrays(spec.outputs, outputs, rows), model.name)

    def __len__(self) -> int:
        return len(self._open())

    @property
    def version(self) -> int:
        """The weights version that computed the outputs."""
        return self._open().version

    def infer(
        self, rows: int | None = None, *, stream: int = 0, timeout: float | None = None, version: int | None = None
    ) -> int:
        """Compute the outputs of the first `rows` rows; of all rows by default. Return the weights version.

        The engine reads the inputs after all work queued on `stream` so far, so no synchronization is needed.

        Args:
            stream: CUDA stream as an integer (`torch.cuda.current_stream().cuda_stream`); 0: the default stream.
            timeout, version: as in `Rows.infer`.

        Raises:
            As in `Rows.infer`.
        """
        bound = self._open()
        self._driver.record(self._event, stream)
        return bound.infer(rows, timeout=timeout, version=version)

    def close(self) -> None:
        """Make the engines release the memory, and free it.

        If they do not confirm this in time, the memory stays allocated until this process ends, because an engine may
        still write to it.
        """
        bound, self._rows = self._rows, None
        self.inputs = self.outputs = RowArrays({}, self._name)
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
    """Return the byte offset of each tensor, the first at `at`, and the end of the last one."""
    offsets = {}
    for name, spec in specs.items():
        offsets[name] = at
        at += -(-rows * spec.row_bytes // _ALIGNED) * _ALIGNED
    return offsets, at
