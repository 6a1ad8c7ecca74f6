"""A model in its engine: stage the rows, run forward, scatter the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.errors import ModelFailed, VersionNotHeld
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.models import ServedModel

# Above this many bytes a row, looking whether a batch is one contiguous run is cheaper than copying it.
_LARGE_ROW = 4096


class WeightsSource(Protocol):
    """Where a served model has its weights from."""

    @property
    def version(self) -> int:
        """In use; 0 while the model computes with what it was loaded with."""

    def use(self, version: int) -> None:
        """Compute with a version until told otherwise; 0: the newest. Raises VersionNotHeld."""

    def stop(self) -> None:
        """Follow no longer."""

    def join(self) -> None:
        """Wait for the end of the thread that was told to stop."""


class Served:
    """One model with its arena's arrays, computing batch by batch; device_served.py has the one that overlaps them.

    Args:
        name: the served name.
        model: what the factory gave.
        inputs, outputs: the arena's arrays, (rows, *row shape) by name.
        max_batch: rows of the largest batch.
        compute: the dtype that floating-point inputs are cast to before forward; None leaves them.
    """

    def __init__(
        self,
        name: str,
        model: ServedModel,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Mapping[str, NDArray[Any]],
        max_batch: int,
        device: torch.device | str = "cpu",
        compute: torch.dtype | None = None,
    ) -> None:
        self.spec = ModelSpec(name, dict(model.inputs), dict(model.outputs))
        self.max_batch = max_batch
        self.device = torch.device(device)
        self.module = model.module.to(self.device).eval()
        self.weights_updater: WeightsSource | None = None
        self._compute = compute
        self._inputs = [_Input(key, inputs[key], max_batch) for key in self.spec.inputs]
        self._outputs = [_Output(key, tensor, outputs[key]) for key, tensor in self.spec.outputs.items()]
        self._large = any(tensor.row_bytes >= _LARGE_ROW for tensor in self.spec.inputs.values())

    @property
    def version(self) -> int:
        """Of the weights it computes with; 0 for those it was loaded with."""
        return self.weights_updater.version if self.weights_updater is not None else 0

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> None:
        """Answer a batch: read the tickets' rows from the arena, write their outputs to it.

        Args:
            tickets: records of wire.TICKET, checked against their lanes, `rows` rows together.
            version: of the weights to compute with; 0: the newest.

        The caller is in torch's inference mode: entering it anew for every batch would cost more than some models.

        Raises:
            ModelFailed: the model gave something other than its spec promises.
            VersionNotHeld: the version asked for.
            Exception: whatever the model raises.
        """
        self._use(version)
        contiguous = len(tickets) == 1 or (self._large and _is_one_run(tickets))
        if contiguous:
            first = tickets["first"].item(0)
            staged = {item.name: item.rows(first, rows) for item in self._inputs}
        else:
            staged = {item.name: item.gather(tickets, rows) for item in self._inputs}
        if self.device.type != "cpu":
            staged = {key: value.to(self.device, non_blocking=True) for key, value in staged.items()}
        results = self.forward(staged)
        for item in self._outputs:
            values = item.checked(results, rows)
            if contiguous:
                item.array[first : first + rows] = values
            else:
                native.scatter(item.array, tickets, values)

    def close(self) -> None:
        """It is served no longer."""
        if self.weights_updater is not None:
            self.weights_updater.stop()

    def free_memory(self) -> None:
        """Hand cached device memory back, so that a smaller batch may find room."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self, example: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        """Run the smallest and the largest batch once, on rows of its own, and check what comes out.

        Args:
            example: gives n rows of every input by name; zeros are used without it.

        Raises:
            ModelFailed: outputs that differ from the spec.
            Exception: whatever the model raises.
        """
        for rows in sorted({1, self.max_batch}):
            given = example(rows) if example else {}
            staged = {
                key: torch.as_tensor(given[key])
                if key in given
                else torch.zeros((rows, *spec.shape), dtype=dtype_of(spec))
                for key, spec in self.spec.inputs.items()
            }
            with torch.inference_mode():
                results = self.forward({key: value.to(self.device) for key, value in staged.items()})
                for item in self._outputs:
                    item.checked(results, rows)

    def _use(self, version: int) -> None:
        if self.weights_updater is not None:
            self.weights_updater.use(version)
        elif version:
            raise VersionNotHeld(
                f"model {self.spec.name!r} takes no publications (models.{self.spec.name}.publish), so no version"
            )

    def forward(self, staged: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The outputs by name of inputs on the device, (n, *row shape) each."""
        if self._compute is not None:
            staged = {
                key: value.to(self._compute) if value.is_floating_point() else value for key, value in staged.items()
            }
        return self._named(self.module(**staged))

    def _named(self, results: Any) -> Mapping[str, torch.Tensor]:
        if isinstance(results, torch.Tensor):
            results = (results,)
        if isinstance(results, Mapping):
            return results
        if len(results) != len(self._outputs):
            raise ModelFailed(
                f"model {self.spec.name!r} gave {len(results)} outputs, its spec promises {len(self._outputs)}: "
                f"{', '.join(self.spec.outputs)}"
            )
        return dict(zip(self.spec.outputs, results, strict=True))


class _Input:
    """One input's rows: where they lie in the arena, and where a scattered batch is gathered."""

    def __init__(self, name: str, array: NDArray[Any], max_batch: int) -> None:
        self.name = name
        self._arena = torch.from_numpy(array)
        self._rows = array
        # Kept and reused: fresh buffers of a megabyte cost a page fault every 4 KiB.
        staging = np.zeros((max_batch, *array.shape[1:]), array.dtype)
        self._staging = torch.from_numpy(staging)
        self._staging_rows = staging
        self._views: dict[int, torch.Tensor] = {}  # of the staging rows, by length

    def rows(self, first: int, rows: int) -> torch.Tensor:
        return self._arena[first : first + rows]

    def gather(self, tickets: NDArray[Any], rows: int) -> torch.Tensor:
        native.gather(self._rows, tickets, self._staging_rows)
        view = self._views.get(rows)
        if view is None:
            view = self._views[rows] = self._staging[:rows]
        return view


class _Output:
    """One output's rows in the arena, and the check that a model keeps its promise."""

    def __init__(self, name: str, spec: TensorSpec, array: NDArray[Any]) -> None:
        self.name = name
        self.array = array
        self._shape = spec.shape
        self._dtype = dtype_of(spec)

    def checked(self, results: Mapping[str, torch.Tensor], rows: int) -> NDArray[Any]:
        try:
            tensor = results[self.name]
        except KeyError:
            raise ModelFailed(f"the model gave no output {self.name!r}; it gave {', '.join(results)}") from None
        if tensor.shape != (rows, *self._shape):
            raise ModelFailed(
                f"output {self.name!r} has shape {list(tensor.shape)}, the spec promises {[rows, *self._shape]} "
                f"for {rows} rows"
            )
        if tensor.dtype != self._dtype or not tensor.is_cpu or not tensor.is_contiguous():
            tensor = tensor.to("cpu", self._dtype).contiguous()  # contiguous, since rows are scattered as bytes
        values: NDArray[Any] = tensor.numpy()
        return values


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Torch's dtype of a spec."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _is_one_run(tickets: NDArray[Any]) -> bool:
    firsts, rows = tickets["first"], tickets["rows"]
    return bool((firsts[1:] == firsts[:-1] + rows[:-1]).all())
