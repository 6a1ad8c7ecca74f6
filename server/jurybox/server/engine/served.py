"""A model in its engine: stage the rows, run forward, scatter the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox import native
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import Code, ModelFailed, VersionNotHeld, plain
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.engine.batch_shapes import agreeing, dtype_of
from jurybox.server.engine.loads import LOADS
from jurybox.server.engine.modules import (
    array_over,
    as_tensor,
    bare,
    comparable,
    given_tensor,
    host_values,
    keeps,
    require_kept,
    takes_names,
    tensor_over,
    unready,
)
from jurybox.server.models import RowErrors, ServedModel

# Above this many bytes per row, checking whether a batch is one contiguous run is cheaper than copying it.
LARGE_ROW = 4096
_LARGE_TICKET = 32_768  # bytes: below, copying a ticket's rows takes less time than creating a tensor on them
_default_dtype, _grad_enabled = torch.get_default_dtype, torch.is_grad_enabled  # asked twice for every forward
OUT_OF_MEMORY: type[BaseException] = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)  # before torch 2.5


class WeightsSource(Protocol):
    """The source of a served model's weights."""

    @property
    def version(self) -> int:
        """The version in use; 0 while the model computes with the weights it was loaded with."""

    def use(self, version: int) -> None:
        """Compute with a version until the next call; 0: the newest. Raises VersionNotHeld."""

    def stop(self) -> None:
        """Stop updating. This and the methods below do nothing if another object updates the weights."""
        return

    def join(self) -> None:
        """Wait until the stopped thread has ended."""
        return

    def sleep(self) -> None:
        """Stop updating and free the copies on the device, until `wake` is called."""
        return

    def wake(self) -> None:
        """Load the newest version and resume updating."""
        return


class Caches(Protocol):
    """A cache of a model's answers; see response_cache.py."""

    hits: int
    misses: int

    def answer(self, tickets: NDArray[Any]) -> NDArray[np.bool_] | None: ...

    def run(self, tickets: NDArray[Any], rows: int, version: int) -> BatchOutcome | None: ...


@dataclass(slots=True)
class BatchOutcome:
    """The result of a batch of which some tickets failed.

    Attributes:
        refused: tickets by their number in the batch, each with a code and a message; the others were answered.
        errors: tickets that failed with an exception of the model, together.
        again: tickets whose rows failed together with those of others, and are to be computed again in other turns.
    """

    refused: dict[int, tuple[Code, str]] = field(default_factory=dict)
    errors: list[tuple[list[int], BaseException]] = field(default_factory=list)
    again: set[int] = field(default_factory=set)


class Served:
    """One model and its arrays in the arena, computing one batch at a time; device.py has a variant that overlaps them.

    Args:
        name: the served name.
        model: the factory's result.
        inputs, outputs: the arena's arrays, (rows, *row shape) by name.
        max_batch: rows of the largest batch.
        compute: the dtype that floating-point inputs are cast to before forward; None leaves them.
        columns: the arena's columns, which take the reasons of failed rows.
        shapes: the numbers of rows with which forward is called; each batch is padded to the next one. Empty: any.

    Attributes:
        agreeing: whether warm-up keeps only the shapes that compute the same bytes for a row.
        published: whether weights will be published. Warm-up then compares the shapes with random weights, too.
        cache: answers rows that it knows; None: every row is computed.
        changed: called with the names of what a forward has left changed for the process, and was set back.
        forward_timeout: seconds after which a batch fails, as far as its forward runs Python; 0: never.
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
        columns: Columns | None = None,
        shapes: Sequence[int] = (),
    ) -> None:
        self.spec: ModelSpec = model.spec(name)
        self.max_batch = max_batch
        self.device = torch.device(device)
        if reason := unready(model.module):
            raise ModelFailed(f"model {name!r} cannot be served: {reason}")
        self.module = model.module.to(self.device).eval()
        self.weights_updater: WeightsSource | None = None
        self.columns = columns
        self.shapes = tuple(shapes)
        self.agreeing = True
        self.published = False
        self.cache: Caches | None = None
        self.changed: Callable[[list[str]], object] = lambda names: None
        self.forward_timeout = 0.0
        self._compute = compute
        arguments = self._arguments(model)
        self._by_name = arguments is None or takes_names(self.module, arguments)
        self._names = (*self.spec.outputs, *self.spec.state)
        self._row_errors: Mapping[int, str] = {}
        self._finite = [key for key, tensor in self.spec.outputs.items() if tensor.finite]
        fixed = {key: tensor for key, tensor in self.spec.inputs.items() if not tensor.variable}
        self._inputs = [InputRows(key, inputs[key], max_batch) for key in fixed]
        self._outputs = [
            OutputRows(key, tensor, outputs[key]) for key, tensor in self.spec.outputs.items() if not tensor.variable
        ]
        self._plain_inputs = native.PlainInputs([(item.array, item.staging_rows) for item in self._inputs])
        self._gathered: dict[int, dict[str, torch.Tensor]] = {}  # the inputs' staging rows by name, by their number
        self._plain_outputs = native.PlainOutputs([(item.name, item.array, item.like) for item in self._outputs])
        self._away = self.device.type != "cpu"  # whether the weights are on a device
        self._writes = False  # whether forward writes to its inputs, which must then be copies of the clients' rows
        self._large = any(tensor.row_bytes >= LARGE_ROW for tensor in self.spec.inputs.values())
        self._row_bytes = sum(tensor.row_bytes for tensor in self.spec.inputs.values())

    def _arguments(self, model: ServedModel) -> list[str] | None:
        """Return the names of forward's arguments in their order; None if they are passed by name in any case."""
        return list(self.spec.inputs)

    @property
    def max_cost(self) -> int:
        """The maximum sum of `costs` in a batch; 0: no limit."""
        return 0

    def costs(self, tickets: NDArray[Any]) -> NDArray[np.int64]:
        """Return the cost of each ticket. By default it is its number of rows."""
        counts: NDArray[np.int64] = tickets["rows"].astype(np.int64)
        return counts

    @property
    def sessions(self) -> int:
        """The number of sessions with state; 0 for a model without state."""
        return 0

    def forget(self, lease: int) -> None:
        """Drop the sessions of a lease that has ended."""

    @property
    def version(self) -> int:
        """The version of the weights in use; 0: those it was loaded with."""
        return self.weights_updater.version if self.weights_updater is not None else 0

    def run(self, tickets: NDArray[Any], rows: int, version: int = 0) -> BatchOutcome | None:
        """Answer a batch: read the tickets' rows from the arena, and write their outputs to it.

        The caller is in torch's inference mode: entering it for every batch would cost more than some models.

        Args:
            tickets: records of wire.TICKET, checked against their lanes, of `rows` rows in total.
            version: the version of the weights to compute with; 0: the newest.

        Returns:
            None if every row was computed.

        Raises:
            ModelFailed: the outputs do not match the spec.
            VersionNotHeld: that version is not held.
            Exception: any error of the model.
        """
        if version or self.weights_updater is not None:
            self._use(version)
        # Of all small batches this is known without a call.
        if rows * self._row_bytes >= LARGE_ROW and not self.shapes and self._in_place(tickets, rows):
            first = tickets["first"].item(0)
            staged = {item.name: item.rows(first, rows) for item in self._inputs}
        else:
            staged = self._gather(tickets, rows, self.shaped(rows) if self.shapes else rows)
        if self._away:
            staged = {key: value.to(self.device, non_blocking=True) for key, value in staged.items()}
        results = self._returned(staged)
        if self.shapes:
            results = {key: value[:rows] for key, value in self._named(results).items()}
        # The usual outputs, without their names and with one call. All others are converted or refused one by one.
        if not self._plain_outputs.scatter(tickets, results, rows):
            results = self._named(results)
            for output in self._outputs:
                native.scatter(output.array, tickets, output.checked(results, rows))
        if self._row_errors or self._finite:
            return self.refused(tickets, self._named(results), rows, self._take_row_errors())
        return None

    def _gather(self, tickets: NDArray[Any], rows: int, shape: int) -> dict[str, torch.Tensor]:
        """Return the tickets' rows of all inputs of fixed shape, padded to `shape` rows with copies of the last one."""
        self._plain_inputs.gather(tickets)
        staged = self._gathered.get(shape)
        if staged is None:
            staged = self._gathered[shape] = {item.name: item.staging[:shape] for item in self._inputs}
        if shape > rows:
            for item in self._inputs:  # not earlier contents: the model might fail on them
                item.staging_rows[rows:shape] = item.staging_rows[rows - 1]
        return staged

    def _in_place(self, tickets: NDArray[Any], rows: int) -> bool:
        """Return whether forward reads the tickets' rows where they are, without a copy."""
        if self._writes:
            return False
        if len(tickets) == 1:
            return rows * self._row_bytes >= _LARGE_TICKET
        return self._large and _is_one_run(tickets)

    def shaped(self, rows: int) -> int:
        """Return the number of rows with which forward is called for a batch of `rows` rows."""
        return next((shape for shape in self.shapes if shape >= rows), rows)

    def close(self) -> None:
        """Release resources; the model is no longer served."""
        if self.weights_updater is not None:
            self.weights_updater.stop()

    def sleep(self) -> int:
        """Move the weights to host memory until `wake`, and free device memory. Return the number of bytes moved.

        Nothing may be computed in between. A module with methods `sleep` and `wake` moves its memory by itself.
        """
        if self.weights_updater is not None:
            self.weights_updater.sleep()
        moved = self._move(torch.device("cpu"), "sleep")
        self.free_memory()
        return moved

    def wake(self) -> int:
        """Move the newest weights back to the device. Return the number of bytes moved.

        Raises:
            torch.OutOfMemoryError: they do not fit on the device.
            Timeout: a snapshot was being published all the time.
        """
        moved = self._move(self.device, "wake")
        self._prepare()
        if self.weights_updater is not None:
            self.weights_updater.wake()
        return moved

    def _move(self, device: torch.device, how: str) -> int:
        module = bare(self.module)
        if callable(own := getattr(type(module), how, None)):  # of the class, since a layer may have that name
            return int(own(module) or 0)
        return move(self.module, device) if self._away else 0

    def _prepare(self) -> None:
        """Prepare what forward needs besides the module; called once the weights are in place."""

    def free_memory(self) -> None:
        """Release cached device memory, so that a smaller batch may fit."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self, example: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        """Run the smallest and the largest batch once, on made-up rows, and check the outputs.

        Args:
            example: returns n rows of every input by name; None: zeros are used.

        Raises:
            ModelFailed: the outputs do not match the spec.
            Exception: any error of the model.
        """
        for rows in self.shapes or sorted({1, self.max_batch}):
            given = example(rows) if example else {}
            with torch.inference_mode():
                self._try(rows, {key: given.get(key, spec.zeros(rows)) for key, spec in self.spec.inputs.items()})
        if self.shapes and self.agreeing:
            self.shapes = self._agreeing(example)

    def _try(self, rows: int, given: Mapping[str, Any]) -> None:
        """Run a batch and check its outputs."""
        with torch.inference_mode(False):  # inference tensors do not count writes
            staged = {key: given_tensor(value).to(self.device) for key, value in given.items()}
        results = self._watched(self.forward, staged, staged)
        for item in self._outputs:
            item.checked(results, rows)

    def _watched(
        self, call: Callable[..., Mapping[str, Any]], staged: dict[str, Any], inputs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Call with `staged`, and notice whether `inputs` are written to: tensors, or lists of rows."""
        values = [each for value in inputs.values() for each in (value if isinstance(value, list) else [value])]
        tensors = [value for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]
        before = [tensor._version for tensor in tensors]
        results = call(staged)
        self._writes |= before != [tensor._version for tensor in tensors]
        return results

    def _agreeing(self, example: Callable[[int], Mapping[str, Any]] | None) -> tuple[int, ...]:
        """Return those of the shapes that compute the same bytes for a row."""
        return agreeing(self, example)

    def _use(self, version: int) -> None:
        if self.weights_updater is not None:
            self.weights_updater.use(version)
        elif version:
            raise VersionNotHeld(
                f"model {self.spec.name!r} takes no publications (models.{self.spec.name}.publish), so no version"
            )

    def forward(self, staged: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
        """Compute the outputs by name from inputs on the device, each of shape (n, *row shape)."""
        return self._named(self._returned(staged))

    def _returned(self, staged: Mapping[str, Any]) -> Any:
        """Return what the module returns."""
        if self._row_errors:  # left by an earlier batch, which failed
            self._row_errors = {}
        if self._compute is not None:
            staged = {key: self._cast(value) for key, value in staged.items()}
        changes = LOADS.changes  # first: a change after this line is noticed
        dtype = _default_dtype()
        try:
            return self.module(**staged) if self._by_name else self.module(*staged.values())
        finally:
            if _default_dtype() is not dtype or _grad_enabled() or LOADS.changes != changes or LOADS.running:
                self._settle(dtype, changes)

    def _settle(self, dtype: torch.dtype, changes: int) -> None:
        """Set back what a forward has left changed for those of other models. Raises Disturbed if a load changed it."""
        left = ["torch's default dtype"] if LOADS.restore(changes, dtype) else []
        if torch.is_grad_enabled() and torch.is_inference_mode_enabled():  # the caller's inference mode has it off
            left.append("torch's grad mode")
            torch.set_grad_enabled(False)
        if left:
            self.changed(left)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self._compute) if value.is_floating_point() else value
        return [self._cast(each) for each in value] if isinstance(value, list) else value

    def _named(self, results: Any) -> Mapping[str, Any]:
        names = self._names
        if type(results) is tuple and len(results) == len(names):
            return dict(zip(names, results, strict=True))  # as most modules return them
        if isinstance(results, torch.Tensor):
            results = (results,)
        if isinstance(results, RowErrors):
            self._row_errors = results.errors
            return self._named(results.outputs)
        if isinstance(results, Mapping):
            return results
        if len(names) == 1 and isinstance(results, list):
            return {names[0]: results}  # rows that differ in size
        if not isinstance(results, Sequence) or len(results) != len(names):
            count = len(results) if isinstance(results, Sequence) else type(results).__name__
            raise ModelFailed(
                f"model {self.spec.name!r} gave {count} outputs, its spec promises {len(names)}: {', '.join(names)}"
            )
        return dict(zip(names, results, strict=True))

    def failures(self, results: Mapping[str, Any], rows: int, row_errors: Mapping[int, str]) -> dict[int, str]:
        """Return the reasons of failed rows: those the model reported, and outputs that are not finite."""
        failed = {int(row): plain(reason) for row, reason in row_errors.items() if 0 <= int(row) < rows}
        for name in self._finite:
            values, dtype = results[name][:rows], dtype_of(self.spec.outputs[name])  # a narrower one may overflow
            if isinstance(values, list):  # rows that differ in size
                wrong = [not torch.isfinite(comparable(given_tensor(value).to(dtype))).all() for value in values]
            else:
                wrong = (~torch.isfinite(comparable(values.to(dtype)).reshape(rows, -1)).all(dim=1)).tolist()
            for row in np.flatnonzero(wrong).tolist():
                failed.setdefault(row, f"output {name!r} is not finite")
        return failed

    def refused(
        self, tickets: NDArray[Any], results: Mapping[str, Any], rows: int, row_errors: Mapping[int, str]
    ) -> BatchOutcome | None:
        """Return the tickets with failed rows; None if there are none."""
        if not row_errors and not self._finite:
            return None
        failed = self.failures(results, rows, row_errors)
        return refuse_rows(self.columns, tickets, failed) if failed else None

    def _take_row_errors(self) -> Mapping[int, str]:
        row_errors, self._row_errors = self._row_errors, {}
        return row_errors


def move(module: torch.nn.Module, device: torch.device) -> int:
    """Move a module's parameters and buffers to a device, and return the number of bytes.

    The Parameter objects stay the same, and tensors that shared memory share it afterwards. Nothing may compute with
    the module meanwhile.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
    moved: dict[int, torch.Tensor] = {}  # by its earlier address
    total = 0
    for tensor in tensors:
        source = tensor.data.untyped_storage()
        if not source.nbytes():
            tensor.data = tensor.data.to(device)
            continue
        if (there := moved.get(source.data_ptr())) is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(source)
            there = moved[source.data_ptr()] = flat.to(device, copy=True)
            total += source.nbytes()
        fresh = torch.empty(0, dtype=tensor.dtype, device=device)
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = fresh.set_(there.untyped_storage(), *place)
    return total


def refuse_rows(columns: Columns | None, tickets: NDArray[Any], failed: Mapping[int, str]) -> BatchOutcome:
    """Write the reasons of failed rows to the tickets' rows in the arena; return the tickets concerned."""
    outcome = BatchOutcome()
    ends = np.cumsum(tickets["rows"].astype(np.int64))
    for number in sorted({int(np.searchsorted(ends, row, side="right")) for row in failed}):
        count, first = tickets["rows"].item(number), tickets["first"].item(number)
        start = int(ends[number]) - count
        mine = {row - start: failed[row] for row in range(start, start + count) if row in failed}
        if columns is not None:
            columns.refuse(first, count, mine)
        index, reason = next(iter(mine.items()))
        outcome.refused[number] = Code.ROW_FAILED, f"{len(mine)} of {count} rows failed; row {index}: {reason}"
    return outcome


class InputRows:
    """One input's rows in the arena, and the buffer in which a scattered batch is gathered."""

    def __init__(self, name: str, array: NDArray[Any], max_batch: int) -> None:
        self.name = name
        self._arena = tensor_over(array)
        self.array = array
        # Reused, because a new buffer costs a page fault every 4 KiB. Allocated by torch for its alignment: kernels
        # are chosen by alignment, so it must be that of the rows with which the shapes were compared.
        self.staging = torch.empty((max_batch, *array.shape[1:]), dtype=getattr(torch, array.dtype.name))
        self.staging_rows = array_over(self.staging)

    def rows(self, first: int, rows: int) -> torch.Tensor:
        return self._arena[first : first + rows]


class OutputRows:
    """One output's rows in the arena, and the check against the spec."""

    def __init__(self, name: str, spec: TensorSpec, array: NDArray[Any]) -> None:
        self.name = name
        self.array = array
        self._shape = spec.shape
        self._shapes: dict[int, tuple[int, ...]] = {}  # of the outputs of a batch, by its rows
        self._dtype = dtype_of(spec)
        self.like = torch.empty((0, *spec.shape), dtype=self._dtype)

    def of(self, results: Mapping[str, Any], rows: int) -> torch.Tensor:
        """Return this output of a batch.

        Raises:
            ModelFailed: it is missing, has another shape, or a dtype whose values the spec's does not keep.
        """
        try:
            tensor = results[self.name]
        except KeyError:
            raise ModelFailed(f"the model gave no output {self.name!r}; it gave {', '.join(results)}") from None
        shape = self._shapes.get(rows) or self._shapes.setdefault(rows, (rows, *self._shape))
        if not isinstance(tensor, torch.Tensor):
            tensor = as_tensor(f"output {self.name!r}", tensor, rows)
        if tensor.shape != shape:
            raise ModelFailed(
                f"output {self.name!r} has shape {list(tensor.shape)}, the spec promises {list(shape)} for {rows} rows"
            )
        if tensor.dtype is not self._dtype and not keeps(tensor.dtype, self._dtype):
            require_kept(f"output {self.name!r}", tensor.dtype, self._dtype)
        return tensor

    def checked(self, results: Mapping[str, torch.Tensor], rows: int) -> NDArray[Any]:
        """Return this output of a batch in host memory, in the dtype of the spec. Raises ModelFailed as `of` does."""
        # Contiguous, since rows are scattered as bytes.
        return array_over(host_values(self.of(results, rows), self._dtype))


def _is_one_run(tickets: NDArray[Any]) -> bool:
    firsts, rows = tickets["first"], tickets["rows"]
    return bool((firsts[1:] == firsts[:-1] + rows[:-1]).all())
