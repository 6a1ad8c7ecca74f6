"""Arrays of callers: read as they are, or written into rows in place, and never cast silently."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.dtypes import converted, is_floating, largest, tensor_bits
from jurybox.protocol.errors import Refused, SpecMismatch, did_you_mean, plain, said

_write = np.ndarray.__setitem__
# Functions that cast to the array that they write to, within its kind, unless they are told how.
_CASTING = (np.copyto, np.concatenate, np.stack)


class Held:
    """Who holds the memory of some arrays, and for how long: nothing is written once `released` is true."""

    __slots__ = ("released",)

    def __init__(self) -> None:
        self.released = False


_NOBODYS = Held()


class RowArray(np.ndarray[Any, np.dtype[Any]]):
    """A view of rows' memory. NumPy would cast what is written to it; this array refuses another dtype.

    A Python number is written if the dtype holds it. After the rows are released, nothing is written: they may be those
    of another request. Views of it are checked likewise; copies and results are plain arrays. `numpy.asarray` returns
    the same memory as a plain array, which checks nothing.
    """

    _what: str | None  # what it is, for messages; None: its memory is not that of rows
    _held: Held

    @classmethod
    def over(cls, array: NDArray[Any], what: str, held: Held) -> RowArray:
        """Return a view of an array. `what`: what it is, for messages."""
        made = array.view(cls)
        made._what, made._held = what, held
        return made

    def __array_finalize__(self, source: Any) -> None:
        rows = isinstance(source, RowArray) and not self.flags.owndata
        self._what, self._held = (source._what, source._held) if rows else (None, _NOBODYS)

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._held.released:
            raise _released(self._what)
        if type(value) is not np.ndarray or value.dtype is not self.dtype:
            value = self._fitting(value)
        _write(self, key, value)

    def fill(self, value: Any) -> None:
        """Write one value everywhere, as `array[...] = value` does."""
        self[...] = value

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        # In-place operators, too: the result of the operation may be of another dtype.
        out = options.get("out", ())
        if out:
            _require_held(out)
            options["out"] = tuple(map(_plain, out))
            if method == "__call__" and any(map(_guarded, out)):
                options.setdefault("casting", "safe")
        with _Refused(out):
            made = getattr(ufunc, method)(*map(_plain, inputs), **options)
        return made if not out else out[0] if len(out) == 1 else out

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        if function not in _CASTING:
            return super().__array_function__(function, types, given, options)
        out = given[:1] if function is np.copyto else (options.get("out"),)
        _require_held(out)
        if any(map(_guarded, out)):
            options = {"casting": "safe"} | options
        with _Refused(out):
            return super().__array_function__(function, types, given, options)

    def _fitting(self, value: Any) -> Any:
        """Return a value that can be written without a change. Raises SpecMismatch."""
        if (what := self._what) is None:
            return value
        if type(value) in (bool, int, float):
            if _holds(self.dtype, value):
                return value
            raise SpecMismatch(
                f"{what}: expected {self.dtype}, came {plain(value, 40)}, which {self.dtype} does not hold"
            )
        array = array_of(what, self.dtype.name, value)
        if array.dtype != self.dtype:
            raise other_dtype(what, self.dtype.name, array.dtype)
        return array


class RowArrays(Mapping[str, NDArray[Any]]):
    """Arrays of rows by name. ``arrays[name] = values`` writes to the rows' memory, like ``arrays[name][:] = values``.

    Args:
        model: the model's name, for messages.
        writable: whether values can be assigned.
    """

    __slots__ = ("_arrays", "_writable", "model")

    def __init__(self, arrays: dict[str, Any], model: str, *, writable: bool = False) -> None:
        self._arrays = arrays
        self.model = model
        self._writable = writable

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __setitem__(self, name: str, values: Any) -> None:
        if (array := self._arrays.get(name)) is values and array is not None:  # `arrays[name] += ...` did it
            return
        if not self._arrays:
            raise Refused("these rows were released: call rows() again")
        if array is None:
            hint = did_you_mean(plain(name), self._arrays)
            raise SpecMismatch(f"rows of {self.model!r} have {sorted(self._arrays)} here, {name!r} came{hint}")
        if not self._writable:
            raise SpecMismatch(
                f"{name!r} of {self.model!r} is memory that cannot be replaced: write to the array, or to a tensor of "
                "it, in place"
            )
        array[...] = values

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        return repr(self._arrays)


def array_of(what: str, dtype: str, value: Any) -> NDArray[Any]:
    """Return a caller's value as an array of whatever dtype.

    Args:
        what: what the value is for, for the error message.
        dtype: the dtype that is expected, for the error message.

    Raises:
        SpecMismatch: it is a masked array, or NumPy cannot read it, for example a torch tensor that requires grad, or
            is bfloat16 where another dtype is expected.
    """
    if hasattr(value, "mask") and isinstance(value, np.ndarray):
        raise SpecMismatch(
            f"{what}: expected an array of {dtype}, came a masked array, and no mask is sent: say what its masked "
            "elements are: array.filled(value)"
        )
    try:
        of_torch = hasattr(value, "detach") and str(value.dtype) == f"torch.{dtype}"
        if of_torch and (bits := tensor_bits(value)) is not None:
            return bits
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        if not hasattr(value, "detach"):
            raise SpecMismatch(f"{what}: expected an array of {dtype}, came what is none: {said(error)}") from error
        came, convert = f"{value.dtype} tensor", ".detach()"
        if value.requires_grad:
            came += " that requires grad, and answers have none"
        if value.device.type != "cpu":
            came, convert = f"{came}, on {value.device}", f"{convert}.cpu()"
        if str(value.dtype) != f"torch.{dtype}":
            convert += f".to(torch.{dtype})"
        convert += ".resolve_neg()" if value.is_neg() else ""
        convert += ".to_dense()" if str(value.layout) != "torch.strided" else ""
        raise SpecMismatch(
            f"{what}: expected an array of {dtype}, came a {came}: convert it on purpose: tensor{convert}.numpy()"
        ) from error


def other_dtype(what: str, expected: str, came: object) -> SpecMismatch:
    """Return the error for values of another dtype, which nothing casts silently."""
    return SpecMismatch(f"{what}: expected {expected}, came {came}; convert it on purpose: array.astype({expected!r})")


class _Refused:
    """Where NumPy refuses to cast to one of the arrays `out`, in the words of `Model.infer`."""

    def __init__(self, out: tuple[Any, ...]) -> None:
        self._out = out

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        guarded = next(filter(_guarded, self._out), None)
        if guarded is not None and isinstance(error, TypeError) and "Cannot cast" in str(error):
            came = getattr(error, "from_", None)
            raise other_dtype(guarded._what, guarded.dtype.name, came or "values of another dtype") from error


def _released(what: str | None) -> Refused:
    return Refused(
        f"{what}: these rows were released, and may be another request's: take rows again, and write to those"
    )


def _require_held(arrays: Iterable[Any]) -> None:
    for array in arrays:
        if isinstance(array, RowArray) and array._held.released:
            raise _released(array._what)


def _guarded(array: Any) -> bool:
    return isinstance(array, RowArray) and array._what is not None


def _plain(array: Any) -> Any:
    return array.view(np.ndarray) if isinstance(array, RowArray) else array


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    """Whether an array of this dtype can hold a Python number, but for a float's rounding."""
    if is_floating(dtype):
        if value in (np.inf, -np.inf):
            return not converted(np.asarray(value), dtype)[1].any()
        return not abs(value) > largest(dtype)
    if type(value) is float:
        return False
    return value in (0, 1) if dtype.kind == "b" else np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
