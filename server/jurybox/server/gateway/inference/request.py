"""An inference request and its answer, as every transport gives and takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Parameters = Mapping[str, Any]  # bool, int, float or str


@dataclass(slots=True)
class Input:
    """One input: what its sender declares, and where its elements are.

    Attributes:
        data: bytes (raw), or a sequence of plain values, or None where a parameter names shared memory.
        raw: whether `data` is bytes.
    """

    name: str
    datatype: str
    shape: tuple[Any, ...]
    data: Any = None
    raw: bool = False
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class Wanted:
    """One output that is asked for."""

    name: str
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class Request:
    """What a client asks: rows for a model. Without `outputs` it gets all of them.

    Attributes:
        version: of the weights, in digits; empty: the newest.
        seconds: until the transport's own deadline; None: it has none.
    """

    model: str
    version: str
    id: str
    inputs: list[Input]
    outputs: list[Wanted] = field(default_factory=list)
    parameters: Parameters = field(default_factory=dict)
    seconds: float | None = None


@dataclass(slots=True)
class Output:
    """One output: `array` of shape (n, *row shape), None where it was written to shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: NDArray[Any] | None
    parameters: Parameters = field(default_factory=dict)


@dataclass(slots=True)
class Response:
    """The answer; `version` is that of the weights that computed it."""

    model: str
    version: str
    id: str
    outputs: list[Output]
    parameters: Parameters = field(default_factory=dict)
