"""The parameters of a request of the Open Inference Protocol: each is supported or refused by name, none is ignored.

They follow Triton's protocol extensions "parameters", "sequence", "classification" and "binary tensor data".
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from jurybox.protocol.errors import Code, Refused, plain
from jurybox.protocol.parameters import KNOWN
from jurybox.protocol.row_frames import MOST_ROWS
from jurybox.protocol.scoreboard import NORMAL, PRIORITIES
from jurybox.server.frontend.requests import GET, SET, Steps
from jurybox.server.gateway.inference.tensors import Parameters, malformed, shown

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
