"""What may be said in a request's parameters: each is honoured or refused by name, none is ignored.

After Triton's documentation: protocol extensions "parameters", "sequence", "classification", "binary tensor data".
"""

from __future__ import annotations

from dataclasses import dataclass

from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway.inference.request import Parameters
from jurybox.server.gateway.inference.tensors import malformed, shown

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
