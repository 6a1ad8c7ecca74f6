"""Conversion between tensors of the Open Inference Protocol (raw bytes, typed contents, JSON) and NumPy arrays."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.client.row_codec import utf8
from jurybox.protocol.dtypes import is_floating
from jurybox.protocol.errors import Code, Error, Refused, SpecMismatch, error_for, plain
from jurybox.protocol.parameters import KNOWN
from jurybox.protocol.row_frames import MOST_ROWS, extents_of_text, split_strings
from jurybox.protocol.scoreboard import NORMAL, PRIORITIES
from jurybox.protocol.spec import BYTES, OIP_NAMES, TensorSpec
from jurybox.server.frontend.requests import GET, SET, Rows, Steps

Parameters = Mapping[str, Any]  # bool, int, float or str

MOST_DIMENSIONS = 32
MOST_TENSORS = 1024  # the maximum number of inputs, of outputs and of parameters in a request
# Parsed JSON takes more memory than its text: numbers eight times as much, lists and objects thirty times.
_MOST_PARTS = {b"{": 8 * MOST_TENSORS, b"[": 1 << 20, b'"': 64 * MOST_TENSORS}


def malformed(message: str) -> Error:
    """Return the error for a malformed request."""
    return error_for(Code.MALFORMED, message)


# What Python's JSON calls so. A number that is too large for a float becomes another object, which is refused.
_NAMED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ProtocolMismatch if it is none, or has more parts than a request can have."""
    for mark, most in _MOST_PARTS.items():
        if (there := body.count(mark)) > most:
            raise malformed(
                f"the JSON has {there} {mark.decode()}, expected at most {most}: send tensors as binary data"
            )
    try:
        given = json.loads(body, parse_constant=_NAMED.__getitem__)
    except (ValueError, RecursionError) as error:
        raise malformed(f"the body is no JSON: {plain(error, 200)}") from error
    if not isinstance(given, dict):
        raise malformed(f"the body is a JSON {type(given).__name__}: expected an object")
    return given


def shown(value: object) -> str:
    """Format a value of a request for an error message; for a list or dict, only the type."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__}"
    return repr(value[:40] if isinstance(value, str) else str(value)[:40])


def datatype_of(spec: TensorSpec) -> str:
    """Return the protocol's name of a spec's dtype."""
    return OIP_NAMES[spec.dtype]


def checked_shape(name: str, datatype: str, shape: Sequence[Any], spec: TensorSpec) -> tuple[int, ...]:
    """Check the declared shape (n, *row shape) of an input.

    Raises:
        SpecMismatch: datatype or shape do not match the model's; the message names both.
    """
    _check_datatype(name, datatype, spec)
    given = tuple(shape)
    if spec.variable:
        if not given or any(type(size) is not int or size < 0 for size in given):
            fits = False
        else:
            fits = given[0] > 0 and (len(given) == 1 if spec.dtype == BYTES else spec.extents_of(given[1:]) is not None)
        if fits and given[0] > MOST_ROWS:
            raise SpecMismatch(f"input {name!r}: {given[0]} rows came, expected at most {MOST_ROWS} in a request")
    else:
        # JSON may hold 2.0 or true, which Python compares as equal to sizes.
        fits = given[1:] == spec.shape and all(type(size) is int for size in given) and bool(given) and given[0] > 0
    if not fits:
        expected = f"[{', '.join(map(str, ('n', *spec.shape)))}]"
        if spec.variable and spec.dtype != BYTES:
            expected += f" with at most {spec.capacity} elements in a row"
        hint = ": the rows come first, 1 for a single one" if given == spec.shape else ""
        raise SpecMismatch(f"input {name!r}: expected shape {expected}, came {_sizes(given)}{hint}")
    return given


def _sizes(shape: tuple[Any, ...]) -> list[Any]:
    return list(shape)[:MOST_DIMENSIONS]


def _check_datatype(name: str, datatype: str, spec: TensorSpec) -> None:
    if datatype != OIP_NAMES[spec.dtype]:
        why = "; this input takes numbers, not strings" if datatype == "BYTES" else ""
        raise SpecMismatch(
            f"input {name!r}: expected datatype {OIP_NAMES[spec.dtype]}, came {plain(datatype, 40)!r}{why}"
        )


def rows_of(
    name: str, datatype: str, shape: Sequence[Any], spec: TensorSpec, extents: str | None, source: InputData
) -> Rows:
    """Return the rows of an input, fully checked, so that they cannot fail other requests of the same ticket.

    Args:
        extents: the sizes of the rows as text if they differ; the payload is then flat, and `shape` its length.
        source: the elements.

    Raises:
        SpecMismatch, Error (SPEC_MISMATCH): the input does not match the spec; the message names both.
    """
    if extents is not None:
        if not spec.extents or spec.dtype == BYTES:
            raise SpecMismatch(f"input {name!r}: extents are for rows that differ in size, and not for byte strings")
        _check_datatype(name, datatype, spec)
        sizes, counts = extents_of_text(f"input {name!r}", extents, spec)
        total = sum(counts)
        if tuple(shape) != (total,):
            raise SpecMismatch(f"input {name!r}: its extents say {total} elements, shape {_sizes(tuple(shape))} came")
        flat, at, rows = source.elements((total,), spec), 0, []
        for count, size in zip(counts, sizes, strict=True):
            rows.append(flat[at : at + count].reshape(spec.measured(size)))
            at += count
        return rows
    checked = checked_shape(name, datatype, shape, spec)
    if spec.dtype == BYTES:
        return source.strings(checked[0], spec)
    array = source.elements(checked, spec)
    return list(array) if spec.variable else array


class InputData:
    """The elements of an input; the base of `RawData` and `TypedData`. It has none and raises ProtocolMismatch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def elements(self, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
        """Return the elements as an array of shape `shape`."""
        raise malformed(f"input {self._name!r} came without data")

    def strings(self, n: int, spec: TensorSpec) -> list[bytes]:
        """Return the elements as n byte strings."""
        raise malformed(f"input {self._name!r} came without data")


class RawData(InputData):
    """Bytes in row-major, little-endian order; each byte string is preceded by its length."""

    def __init__(self, name: str, data: Any) -> None:
        self._name, self._data = name, data

    def elements(self, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
        """Return the elements as an array. Raises SpecMismatch if their number is wrong."""
        expected = math.prod(shape) * spec.numpy_dtype.itemsize
        if len(self._data) != expected:
            raise SpecMismatch(
                f"input {self._name!r}: expected {expected} bytes for shape {list(shape)}, came {len(self._data)}"
            )
        return np.frombuffer(self._data, spec.numpy_dtype).reshape(shape)

    def strings(self, n: int, spec: TensorSpec) -> list[bytes]:
        """Return the elements as n byte strings. Raises Error (SPEC_MISMATCH) if a length prefix is wrong."""
        return split_strings(f"input {self._name!r}", self._data, n, spec.capacity)


class TypedData(InputData):
    """Plain values, flat or nested."""

    def __init__(self, name: str, values: Any) -> None:
        self._name, self._values = name, values

    def elements(self, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
        """Return the elements as an array.

        Raises:
            SpecMismatch: their number, nesting, type or range does not match datatype and shape.
        """
        dtype, datatype = spec.numpy_dtype, OIP_NAMES[spec.dtype]
        flat = self._flat(shape)
        kinds: set[type] = {bool} if dtype.kind == "b" else {int} if dtype.kind in "iu" else {int, float}
        self._check_kinds(flat, kinds, datatype)
        in_int64 = dtype.kind in "iu" and dtype != np.uint64
        try:
            with np.errstate(over="ignore"):
                array = np.array(flat, np.int64 if in_int64 else dtype)
        except (OverflowError, ValueError) as error:
            raise SpecMismatch(f"input {self._name!r}: a value does not fit {datatype}: {error}") from error
        wrong: Any = False
        if is_floating(dtype):
            if (infinite := ~np.isfinite(array)).any():
                given = np.array(flat, np.float64)
                wrong = infinite & (np.isnan(array) != np.isnan(given)) | np.isinf(array) & np.isfinite(given)
                infinite &= np.isinf(given)
                if isinstance(self._values, list):  # JSON
                    named = tuple(map(id, _NAMED.values()))
                    wrong |= infinite & [id(value) not in named for value in flat]
        elif in_int64:  # NumPy 1 would reduce them to the dtype's bits
            wrong = (array < np.iinfo(dtype).min) | (array > np.iinfo(dtype).max)
        elif dtype.kind == "u":
            wrong = [value < 0 for value in flat]
        if np.any(wrong):
            value = flat[int(np.flatnonzero(wrong)[0])]
            what = f"the value {value}" if abs(value) != math.inf else "a number that is too large for a float"
            raise SpecMismatch(f"input {self._name!r}: {what} does not fit {datatype}")
        return array.astype(dtype, copy=False).reshape(shape)

    def strings(self, n: int, spec: TensorSpec) -> list[bytes]:
        """Return the elements, which are text (encoded as UTF-8) or bytes, as n byte strings. Raises SpecMismatch."""
        flat = self._flat((n,))
        self._check_kinds(flat, {str, bytes}, "BYTES")
        rows: list[bytes] = []
        for i, value in enumerate(flat):
            row = value if type(value) is bytes else utf8(f"input {self._name!r}, row {i}", value)
            if len(row) > spec.capacity:
                raise SpecMismatch(
                    f"input {self._name!r}, row {i}: {len(row)} bytes came, expected at most {spec.capacity}"
                )
            rows.append(row)
        return rows

    def _flat(self, shape: tuple[int, ...]) -> list[Any]:
        values = self._values
        if isinstance(values, list) and values and isinstance(values[0], list):
            values = self._flattened(values, shape)
        if len(values) != math.prod(shape):
            raise SpecMismatch(
                f"input {self._name!r}: expected {math.prod(shape)} values for shape {list(shape)}, {len(values)} came"
            )
        return values if isinstance(values, list) else list(values)  # only after their number was checked

    def _check_kinds(self, flat: list[Any], kinds: set[type], datatype: str) -> None:
        if not set(map(type, flat)) <= kinds:
            odd = next(value for value in flat if type(value) not in kinds)
            raise SpecMismatch(f"input {self._name!r}: expected values of {datatype}, came {shown(odd)}")

    def _flattened(self, values: list[Any], shape: tuple[int, ...]) -> list[Any]:
        level: list[Any] = [values]
        for size in shape:
            if not all(isinstance(part, list) and len(part) == size for part in level):
                raise SpecMismatch(f"input {self._name!r}: the nesting of data does not match shape {list(shape)}")
            level = [value for part in level for value in part]
        return level


# The parameters of a request: each is supported or refused by name, none is ignored.
#
# They follow Triton's protocol extensions "parameters", "sequence", "classification" and "binary tensor data".


_MOST_MICROSECONDS = 86_400_000_000  # a day
_NEWEST = 2**63 - 1  # the largest weights version
_MOST_NAMED = 128  # characters of a sequence's name, as in Triton
_FINAL = "triton_enable_empty_final_response"
REGION, _SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
_EXTENTS = "extents"
ROW_ERRORS = "row_errors"
_CLIENT = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """The parameters of a request.

    Attributes:
        seconds: the time-out; None: not given.
        final: whether the answer should contain a parameter which marks it as the only one.
        row_errors: whether failed rows are reported in a parameter of the answer; otherwise they fail the request.
        extents: whether outputs whose rows differ in size may be flat, with the sizes of the rows in a parameter.
        steps: the steps of its sequences; None: it belongs to none.
        over: the id of one of our own clients, whose sessions end; empty: none.
        state: GET to return the sequences' state, SET to replace it by the inputs; then nothing is computed.
        priority: one of scoreboard.PRIORITIES.
        free: the parameters that are none of the protocol's, by name: the model's, or unknown.
    """

    seconds: float | None = None
    final: bool = False
    row_errors: bool = False
    extents: bool = False
    steps: Steps | None = None
    over: str = ""
    state: str = ""
    priority: int = NORMAL
    free: Parameters = field(default_factory=dict)

    def require_known(self, names: Collection[str] = ()) -> None:
        """Refuse a parameter that is neither the protocol's nor one of `names`. Raises Refused (code UNSUPPORTED)."""
        for name in self.free:
            if name not in names:
                there = ", ".join((*KNOWN, *names))
                raise _refused(f"parameter {plain(name, 60)!r} is not known here; there are: {there}")


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a registered shared-memory region."""

    region: str
    size: int
    offset: int

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of a tensor at this place."""
        where = {REGION: self.region, _SIZE: self.size}
        return where | {_OFFSET: self.offset} if self.offset else where


NO_PARAMETERS = RequestParameters()


def request_parameters(parameters: Parameters) -> RequestParameters:
    """Parse the parameters of a request; see `RequestParameters.require_known` for those that are not the protocol's.

    Raises:
        Refused (code UNSUPPORTED): a priority that there is not. ProtocolMismatch: a value is invalid.
    """
    seconds, client, state, priority = None, "", "", NORMAL
    flags = dict.fromkeys((_FINAL, ROW_ERRORS, _EXTENTS, "sequence_start", "sequence_end"), False)
    sequence: int | str = 0
    sessions: str | None = None
    free: dict[str, Any] = {}
    for name, value in parameters.items():
        if name == "timeout":
            microseconds = _whole(name, value, _MOST_MICROSECONDS)
            seconds = microseconds / 1e6 if microseconds else None  # 0: none, as in Triton
        elif name == "priority":
            if (priority := _whole(name, value, 2**64 - 1) or NORMAL) not in PRIORITIES:
                raise _refused(f"priority={value}: expected 1 (first), 2 (normal) or 3 (last); 0 or none is normal")
        elif name == "sequence_id":
            sequence = _sequence_id(value)
        elif name in flags:
            flags[name] = truth(name, value)
        elif name == "session_client":
            if not isinstance(value, str) or not _CLIENT.fullmatch(value):
                raise malformed(f"parameter {name}={shown(value)}: expected 32 hexadecimal digits")
            client = value
        elif name == "session_state":
            if value not in (GET, SET):
                raise malformed(f"parameter {name}={shown(value)}: expected {GET!r} or {SET!r}")
            state = str(value)
        elif name == "sessions":
            if not isinstance(value, str):
                raise malformed(f"parameter {name}={shown(value)}: expected text")
            sessions = value
        else:
            free[name] = value
    steps, over = None, ""
    if sequence:
        step = 0 if flags["sequence_start"] else None
        steps = Steps(((sequence,),), (step,), flags["sequence_end"])
    elif flags["sequence_start"] or flags["sequence_end"]:
        raise malformed("sequence_start and sequence_end came without a sequence_id")
    if (sessions is None) != (not client) or (client and sequence):
        raise malformed("expected session_client and sessions together, and no sequence_id with them")
    if sessions:
        steps = _steps_of(client, sessions)
    elif client:
        over = client
    if state and steps is None:
        raise malformed("session_state came without a sequence: expected a sequence_id")
    return RequestParameters(
        seconds, flags[_FINAL], flags[ROW_ERRORS], flags[_EXTENTS], steps, over, state, priority, free
    )


def _sequence_id(value: object) -> int | str:
    if type(value) is int and 0 <= value < 2**64:
        return value
    if type(value) is str and len(value) <= _MOST_NAMED:
        return value
    raise malformed(
        f"parameter sequence_id={shown(value)}: expected a whole number from 0 to 2^64 - 1, or text of at most "
        f"{_MOST_NAMED} characters"
    )


def _steps_of(client: str, text: str) -> Steps:
    """Parse our own client's steps: "slot:step" for each row, separated by semicolons. Raises ProtocolMismatch."""
    if text.count(";") >= MOST_ROWS or len(text) > 22 * MOST_ROWS:
        raise malformed(f"sessions of more than {MOST_ROWS} rows came: send fewer rows in a request")
    names: list[tuple[Any, ...]] = []
    steps: list[int | None] = []
    for part in text.split(";"):
        slot, _, step = part.partition(":")
        if not all(number.isascii() and number.isdigit() and len(number) <= 10 for number in (slot, step)):
            raise malformed(f"sessions: {plain(part, 40)!r} came, expected slot:step, and semicolons between rows")
        names.append((client, int(slot)))
        steps.append(int(step))
    if len(set(names)) != len(names):
        raise malformed("sessions: a session occurs twice in one request")
    return Steps(tuple(names), tuple(steps), False, True)


def of_tensor(name: str, parameters: Parameters) -> tuple[Place | None, str | None]:
    """Parse the parameters of an input or output; return its place in shared memory and its extents, or None.

    Raises:
        Refused (code UNSUPPORTED): a parameter is not supported. ProtocolMismatch: a parameter is invalid.
    """
    for key in parameters:
        if key == "classification":
            raise _refused(f"output {name!r}: classification is not done here: request the scores and sort them")
        if key not in (REGION, _SIZE, _OFFSET, _EXTENTS):
            raise _refused(
                f"tensor {name!r}: parameter {plain(key, 60)!r} is not known here; there are: {REGION}, {_SIZE}, "
                f"{_OFFSET}, {_EXTENTS}"
            )
    extents = parameters.get(_EXTENTS)
    if extents is not None and not isinstance(extents, str):
        raise malformed(f"tensor {name!r}: {_EXTENTS}={shown(extents)}: expected text")
    if not parameters.keys() - {_EXTENTS}:
        return None, extents
    region = parameters.get(REGION)
    if not isinstance(region, str) or not region or _SIZE not in parameters:
        raise malformed(f"tensor {name!r}: shared memory needs {REGION} (a name) and {_SIZE}")
    place = Place(region, _whole(_SIZE, parameters[_SIZE], 2**62), _whole(_OFFSET, parameters.get(_OFFSET, 0), 2**62))
    return place, extents


def weights_version(text: str) -> int:
    """Return the weights version that a model version names; 0: the newest. Raises Refused (code MODEL_NOT_FOUND)."""
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
        value = int(value)  # older versions of the KServe gRPC protocol have no unsigned parameters
    if type(value) is not int or not 0 <= value <= most:
        raise malformed(f"parameter {name}={shown(value)}: expected a whole number from 0 to {most}")
    return value


def truth(name: str, value: object) -> bool:
    """Return the value of a Boolean parameter. Raises ProtocolMismatch."""
    if type(value) is not bool:
        raise malformed(f"parameter {name}={shown(value)}: expected true or false")
    return value


def _refused(message: str) -> Refused:
    return Refused(message, Code.UNSUPPORTED)
