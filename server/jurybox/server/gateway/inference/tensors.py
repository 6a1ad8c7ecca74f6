"""Tensors of the Open Inference Protocol to NumPy's and back: raw bytes, typed contents, JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Code, Error, Refused, SpecMismatch, error_for
from jurybox.protocol.spec import OIP_NAMES, TensorSpec

Parameters = Mapping[str, Any]  # bool, int, float or str

DTYPES: dict[str, np.dtype[Any]] = {oip: np.dtype(name) for name, oip in OIP_NAMES.items()}
MOST_DIMENSIONS = 32
MOST_TENSORS = 1024  # inputs, outputs and parameters that a request may name, of each kind


def malformed(message: str) -> Error:
    """What to raise for a request that cannot be read."""
    return error_for(Code.MALFORMED, message)


def shown(value: object) -> str:
    """A value of a request, as far as it belongs in a message: who sends a list of a million parts is told its kind."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__}"
    return repr(value[:40] if isinstance(value, str) else str(value)[:40])


def datatype_of(spec: TensorSpec) -> str:
    """The protocol's name of a spec's dtype."""
    return OIP_NAMES[spec.dtype]


def checked_shape(name: str, datatype: str, shape: Sequence[Any], spec: TensorSpec) -> tuple[int, ...]:
    """The shape (n, *row shape) of an input as its sender declares it.

    Raises:
        SpecMismatch: datatype or shape are not the model's; says both.
    """
    if datatype != OIP_NAMES[spec.dtype]:
        why = "; models here take numbers, not strings" if datatype == "BYTES" else ""
        raise SpecMismatch(f"input {name!r}: expected datatype {OIP_NAMES[spec.dtype]}, came {datatype!r}{why}")
    given = tuple(shape)
    if given[1:] != spec.shape or not given or type(given[0]) is not int or given[0] < 1:
        expected = ", ".join(map(str, ("n", *spec.shape)))
        hint = ": the rows come first, 1 for a single one" if given == spec.shape else ""
        raise SpecMismatch(f"input {name!r}: expected shape [{expected}], came {list(given)[:MOST_DIMENSIONS]}{hint}")
    return given


def from_raw(name: str, data: Any, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
    """An array over bytes in row-major, little-endian order. Raises SpecMismatch where their number is another."""
    expected = shape[0] * spec.row_bytes
    if len(data) != expected:
        raise SpecMismatch(f"input {name!r}: expected {expected} bytes for shape {list(shape)}, came {len(data)}")
    return np.frombuffer(data, spec.numpy_dtype).reshape(shape)


def from_values(name: str, values: Any, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
    """An array of plain numbers, flat or nested as the shape says.

    Raises:
        SpecMismatch: their number, nesting, kind or range is not what datatype and shape ask for.
    """
    dtype = spec.numpy_dtype
    flat: Any = values
    if isinstance(values, list) and values and isinstance(values[0], list):
        flat = _flattened(name, values, shape)
    if len(flat) != math.prod(shape):
        raise SpecMismatch(
            f"input {name!r}: expected {math.prod(shape)} values for shape {list(shape)}, {len(flat)} came"
        )
    kinds = {bool} if dtype.kind == "b" else {int} if dtype.kind in "iu" else {int, float}
    if not isinstance(flat, list):
        flat = list(flat)  # now that their number is right
    if not set(map(type, flat)) <= kinds:
        odd = next(value for value in flat if type(value) not in kinds)
        raise SpecMismatch(f"input {name!r}: expected values of {OIP_NAMES[spec.dtype]}, came {shown(odd)}")
    try:
        return np.array(flat, dtype).reshape(shape)
    except (OverflowError, ValueError) as error:
        raise SpecMismatch(f"input {name!r}: a value does not fit {OIP_NAMES[spec.dtype]}: {error}") from error


def _flattened(name: str, values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    level: list[Any] = [values]
    for size in shape:
        if not all(isinstance(part, list) and len(part) == size for part in level):
            raise SpecMismatch(f"input {name!r}: data is nested otherwise than shape {list(shape)} says")
        level = [value for part in level for value in part]
    return level


# ----
# What may be said in a request's parameters: each is honoured or refused by name, none is ignored.
#
# After Triton's documentation: protocol extensions "parameters", "sequence", "classification", "binary tensor data".


_MOST_MICROSECONDS = 86_400_000_000  # a day
_NEWEST = 2**63 - 1  # no weights version is larger
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")
_FINAL = "triton_enable_empty_final_response"
_REGION, _SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request's parameters ask for.

    Attributes:
        seconds: until which an answer is of use; None: not said.
        final: whether the answer should say that it is the only one.
    """

    seconds: float | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A stretch of a registered shared-memory region."""

    region: str
    size: int
    offset: int


NOTHING = Asked()


def of_request(parameters: Parameters) -> Asked:
    """Read the parameters of a request. Raises Refused (code UNSUPPORTED) naming what is not done here."""
    seconds, final = None, False
    for name, value in parameters.items():
        if name == "timeout":
            microseconds = _whole(name, value, _MOST_MICROSECONDS)
            seconds = microseconds / 1e6 if microseconds else None  # 0: none, as in Triton
        elif name == "priority":
            if _whole(name, value, 2**64 - 1):
                raise _refused(f"priority={value}: requests are answered in the order they come, expected 0 or none")
        elif name in _SEQUENCE:
            if value:
                raise _refused(
                    f"{name}={shown(value)}: models here keep no state between requests, expected no sequence"
                )
        elif name == _FINAL:
            final = _truth(name, value)
        else:
            raise _refused(f"parameter {name!r} is not known here; there are: timeout, priority")
    return Asked(seconds, final)


def of_tensor(name: str, parameters: Parameters) -> Place | None:
    """Read the parameters of an input or output: a place in shared memory, or None.

    Raises:
        Refused (code UNSUPPORTED): a parameter that is not honoured here. ProtocolMismatch: one that makes no sense.
    """
    if not parameters:
        return None
    for key in parameters:
        if key == "classification":
            raise _refused(f"output {name!r}: classification is not done here: take the scores and sort them")
        if key not in (_REGION, _SIZE, _OFFSET):
            raise _refused(
                f"tensor {name!r}: parameter {key!r} is not known here; there are: {_REGION}, {_SIZE}, {_OFFSET}"
            )
    region = parameters.get(_REGION)
    if not isinstance(region, str) or not region or _SIZE not in parameters:
        raise malformed(f"tensor {name!r}: shared memory needs {_REGION} (a name) and {_SIZE}")
    return Place(region, _whole(_SIZE, parameters[_SIZE], 2**62), _whole(_OFFSET, parameters.get(_OFFSET, 0), 2**62))


def weights_version(text: str) -> int:
    """The weights version that a model version names; 0 is the newest. Raises Refused (code MODEL_NOT_FOUND)."""
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or int(text) > _NEWEST:
        raise Refused(
            f"version {shown(text)}: a model's versions are those of its weights, expected a whole number, or none for "
            "the newest",
            Code.MODEL_NOT_FOUND,
        )
    return int(text)


def _whole(name: str, value: object, most: int) -> int:
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)  # the KServe gRPC protocol of old had no unsigned choice
    if type(value) is not int or not 0 <= value <= most:
        raise malformed(f"parameter {name}={shown(value)}: expected a whole number from 0 to {most}")
    return value


def _truth(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise malformed(f"parameter {name}={shown(value)}: expected true or false")
    return value


def _refused(message: str) -> Refused:
    return Refused(message, Code.UNSUPPORTED)
