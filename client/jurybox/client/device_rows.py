"""Rows in device memory: what a client on the server's GPU computes there goes to a model without touching the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jurybox.protocol.control_pb2 import BindRequest, RegionPlace
from jurybox.protocol.device_memory import Driver
from jurybox.protocol.errors import Error, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jurybox.client.model import Model
    from jurybox.protocol.spec import TensorSpec

_ALIGNED = 256  # bytes; what the driver aligns to


class DeviceRows:
    """As `Rows`, on the device: write to `inputs`, `infer`, read `outputs`. Use it in a ``with``.

    The memory is this process's; every engine of the model has opened it. An answer means that the outputs are there.

    Attributes:
        inputs, outputs: arrays of shape (n, *row shape) by name, with `__cuda_array_interface__`: torch.as_tensor(a,
            device="cuda") makes a tensor of the same memory. Valid inside the ``with``.
        version: of the weights that computed the outputs; 0 before the first `infer`.
    """

    def __init__(self, model: Model, rows: int, driver: Driver, bind: Callable[[BindRequest], None]) -> None:
        self._model, self._driver, self._bind = model, driver, bind
        self._rows = model.rows(rows)
        self._pointer = self._event = 0
        self._bound = False
        self._closed = False
        spec = model.spec
        try:
            inputs, at = _places(spec.inputs, rows, 0)
            outputs, size = _places(spec.outputs, rows, at)
            self._pointer = driver.allocate(size)
            self._event = driver.event()
            handle = driver.export(self._pointer)
            lane, lease = self._rows.leased
            self._request = BindRequest(
                lane=lane,
                lease=lease,
                first=self._rows.first,
                rows=rows,
                inputs=[RegionPlace(tensor=name, handle=handle, offset=offset) for name, offset in inputs.items()],
                outputs=[RegionPlace(tensor=name, handle=handle, offset=offset) for name, offset in outputs.items()],
                event=driver.export_event(self._event),
            )
            self._bound = True
            bind(self._request)
            self.inputs = self._arrays(spec.inputs, inputs, rows)
            self.outputs = self._arrays(spec.outputs, outputs, rows)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def version(self) -> int:
        """Of the weights that computed the outputs."""
        return self._rows.version

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
        if self._closed:
            raise Refused("these rows were closed")
        self._driver.record(self._event, stream)
        self._rows.infer(rows, timeout=timeout, version=version)

    def close(self) -> None:
        """Have the engines let go of the memory, and free it.

        Where they do not say in time that they have, it stays allocated until this process ends: an engine may still
        write to it.
        """
        if self._closed:
            return
        self._closed = True
        self.inputs, self.outputs = {}, {}
        free = not self._bound
        if self._bound:
            try:
                self._bind(
                    BindRequest(lane=self._request.lane, lease=self._request.lease, first=self._request.first, end=True)
                )
                free = True
            except Error:
                pass  # the server is gone, or busy
        self._rows.close()
        self._model.close()
        if free:
            if self._event:
                self._driver.destroy_event(self._event)
            if self._pointer:
                self._driver.free(self._pointer)

    def __enter__(self) -> DeviceRows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
