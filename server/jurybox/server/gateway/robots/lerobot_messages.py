"""The messages of LeRobot's asynchronous inference: protobuf with one or two fields, around pickles of named classes.

Pickles are read without importing or calling anything (dialects/pickles.py); actions are written opcode by opcode.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Code as Codes
from jurybox.protocol.errors import error_for
from jurybox.server.gateway.dialects.pickles import Instance, NotPlain, loads, written
from jurybox.server.gateway.dialects.torch_pickles import TENSORS
from jurybox.server.gateway.robots.msgpack_arrays import Malformed
from jurybox.server.security.limits import Charge

# Where LeRobot's classes are, today and in its first versions.
_MODULES = ("lerobot.async_inference.helpers", "lerobot.scripts.server.helpers")
_SETUP, _OBSERVATION, _ACTION = "RemotePolicyConfig", "TimedObservation", "TimedAction"
_CLASSES = frozenset((module, name) for module in _MODULES for name in (_SETUP, _OBSERVATION))
_BEGIN, _MIDDLE, _END = 1, 2, 3  # transport.TransferState


@dataclass(frozen=True, slots=True)
class Setup:
    """What a robot says of itself.

    Attributes:
        policy: the policy that it asks for; nothing is loaded by it.
        features: LeRobot's features of its observations, by name.
        most: steps of an answer at most.
        renamed: other names of entries of its observations.
    """

    policy: str
    features: Mapping[str, Any]
    most: int
    renamed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Observed:
    """An observation.

    Attributes:
        module: where the robot has LeRobot's classes.
        timestamp: seconds since 1970.
        timestep: its number.
        values: motors, cameras and the task, by name.
        must_go: whether the robot waits for its actions.
    """

    module: str
    timestamp: float
    timestep: int
    values: Mapping[str, Any]
    must_go: bool


def setup_of(message: bytes) -> Setup:
    """Read a PolicySetup. Raises Malformed."""
    _, fields = _unpickled(_fields(message).get(1, b""), _SETUP)
    features, most = fields.get("lerobot_features"), fields.get("actions_per_chunk")
    renamed = fields.get("rename_map", {})
    if type(features) is not dict or type(most) is not int or most < 1 or type(renamed) is not dict:
        raise Malformed(f"{_SETUP}: expected lerobot_features, actions_per_chunk of 1 and more, and rename_map")
    if not all(type(one) is str for one in (*features, *renamed, *renamed.values())):
        raise Malformed(f"{_SETUP}: expected names of features as text")
    policy = f"{fields.get('policy_type')} {fields.get('pretrained_name_or_path')}"
    return Setup(policy[:200], features, most, renamed)


def observed(pickle: bytes) -> Observed:
    """Read a TimedObservation. Raises Malformed."""
    module, fields = _unpickled(pickle, _OBSERVATION)
    timestamp, timestep, values = (fields.get(name) for name in ("timestamp", "timestep", "observation"))
    if not isinstance(timestamp, (int, float)) or type(timestep) is not int or type(values) is not dict:
        raise Malformed(f"{_OBSERVATION}: expected timestamp, timestep and an observation of values by name")
    return Observed(module, float(timestamp), timestep, values, fields.get("must_go") is True)


async def joined(messages: AsyncIterator[bytes], charge: Charge, most: int) -> bytes:
    """Return the body that a stream of Observations transfers.

    Args:
        charge: counts what is kept.
        most: largest body, bytes.

    Raises:
        Malformed, Refused.
    """
    parts: list[bytes] = []
    async for message in messages:
        fields = _fields(message)
        state, data = fields.get(1, 0), fields.get(2, b"")
        if state not in (_BEGIN, _MIDDLE, _END) or not isinstance(data, bytes):
            raise Malformed(f"an Observation of transfer state {state!r}: expected begin, middle or end")
        if state == _BEGIN:
            parts.clear()
            charge.give()
        if charge.size + len(data) > most:
            raise error_for(Codes.TOO_LARGE, f"an observation may have at most {most} bytes")
        charge.take(len(data))
        parts.append(data)
        if state == _END:
            return parts[0] if len(parts) == 1 else b"".join(parts)
    raise Malformed("a stream of Observations ended before its last part")


def actions_message(found: Observed, actions: NDArray[np.float32], fps: float) -> bytes:
    """Return an Actions message: a pickled list of a TimedAction for each step.

    Args:
        actions: (steps, dimension).
        fps: steps in a second.
    """
    pickle = b"".join(_pickled(found, actions, fps))
    return b"\x0a" + _varint(len(pickle)) + pickle


def _pickled(found: Observed, actions: NDArray[np.float32], fps: float) -> Iterator[bytes]:
    made = (
        f"c{found.module}\n{_ACTION}\n".encode() + b")\x81}("
    )  # an object of the class, and a dict for its attributes
    yield b"\x80\x04]("
    for step, action in enumerate(actions.tolist()):
        yield made
        yield written("timestamp") + written(found.timestamp + step / fps)
        yield written("timestep") + written(found.timestep + step)
        yield written("action") + b"ctorch\ntensor\n" + written(action) + b"\x85R"  # torch.tensor(action)
        yield b"ub"
    yield b"e."


def _unpickled(data: Any, name: str) -> tuple[str, dict[str, Any]]:
    """Return the module and the attributes of an object of a class."""
    try:
        found = loads(data, classes=_CLASSES, names=TENSORS) if type(data) is bytes else None
    except NotPlain as error:
        raise Malformed(str(error)) from error
    if type(found) is not Instance or found.name != name:
        raise Malformed(f"expected a pickled {name}, came {type(found).__name__}")
    return found.module, found.fields


def _fields(message: bytes) -> dict[int, int | bytes]:
    """Return the fields of a message by number, numbers and bytes. Raises Malformed."""
    found: dict[int, int | bytes] = {}
    at = 0
    try:
        while at < len(message):
            tag, at = _number(message, at)
            value, at = _number(message, at)
            if tag & 7 == 2:
                if value > len(message) - at:
                    raise IndexError
                found[tag >> 3] = message[at : at + value]
                at += value
            elif tag & 7 == 0:
                found[tag >> 3] = value
            else:
                raise Malformed(f"a message with a field of wire type {tag & 7}: expected numbers and bytes")
    except IndexError:
        raise Malformed("a message is truncated") from None
    return found


def _number(message: bytes, at: int) -> tuple[int, int]:
    """Decode a varint; return it and the next position."""
    value = shift = 0
    while shift < 64:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise Malformed("a message with a number of more than 64 bits")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes((*encoded, value))
