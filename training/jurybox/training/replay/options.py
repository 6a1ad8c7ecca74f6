"""Options of a replay (fields, episodes, rate limiter), of its samples (windows), and its errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from jurybox.protocol import forks
from jurybox.protocol.errors import Code, Refused


class ForkGuard:
    """An object that only the parent may use after a fork, since its thread or its rows belong to the parent.

    Attributes:
        refusal: the reason for the refusal, and what to do instead.
    """

    refusal: ClassVar[str]

    def __init__(self) -> None:
        self._forked = False
        forks.register(self)

    def _after_fork_in_child(self) -> None:
        self._forked = True

    def _check_process(self) -> None:
        if self._forked:
            raise Refused(self.refusal)


class NotEnoughRows(Refused):
    """The replay holds too few rows that fit the request."""

    code = Code.NOT_READY


class Damaged(Refused, ValueError):
    """A saved file is cut, changed or of another format; the message names the place."""

    code = Code.MALFORMED


class Codec(IntEnum):
    """The stored form of a field; the numbers are used by the native code and in files."""

    RAW = 0
    BITS = 1
    BITS_OF_BYTES = 2
    BYTES = 3
    HALF = 4
    SPARSE = 5


FINITE_ERRORS = "expected finite numbers; see which loss they come from, no priority was changed"  # of priorities


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a row.

    Args:
        shape: of one row; () for a number.
        dtype: NumPy's name of what is given and handed out.
        stored: None to keep the same bytes; "bits" (float32, uint8 or bool whose elements are 0 or 1: anything but 0
            comes back as 1); "uint8" (float32; element = round(value / scale), clipped to 0..255); "float16"
            (float32, rounded to nearest); "sparse" (float32 with at most `nonzero` elements other than 0).
        scale: what one unit of a stored uint8 stands for; 1 / 255 keeps images from 0 to 1.
        nonzero: bound for "sparse"; a row with more is refused.

    Raises:
        ValueError: for a dtype, shape or stored form that cannot be kept.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    stored: str | None = None
    scale: float = 1.0
    nonzero: int | None = None

    def __post_init__(self) -> None:
        shape = tuple(int(size) for size in self.shape)
        if any(size < 1 for size in shape):
            raise ValueError(f"shape {shape} of one row has a size below 1: rows have a fixed, positive size")
        object.__setattr__(self, "shape", shape)
        kind = np.dtype(self.dtype)
        if kind.kind not in "biuf" or kind.itemsize > 8 or not kind.isnative:
            raise ValueError(
                f"dtype {self.dtype!r} cannot be kept: expected bool, an integer or a float of up to 8 bytes"
            )
        object.__setattr__(self, "dtype", kind.name)
        self._check_stored()

    def _check_stored(self) -> None:
        allowed = {
            None: None,
            "bits": ("float32", "uint8", "bool"),
            "uint8": ("float32", "uint8"),
            "float16": ("float32", "float16"),
            "sparse": ("float32",),
        }
        if self.stored not in allowed and self.stored != self.dtype:
            raise ValueError(
                f"stored={self.stored!r} is unknown: expected None, 'bits', 'uint8', 'float16' or 'sparse'"
            )
        dtypes = allowed.get(self.stored)
        if dtypes is not None and self.dtype not in dtypes:
            raise ValueError(f"{self.dtype} cannot be stored as {self.stored!r}: that is for {' or '.join(dtypes)}")
        if (self.stored == "sparse") != (self.nonzero is not None):
            raise ValueError(
                "nonzero=N (the most non-zero elements a row may have) goes with stored='sparse', and only there"
            )
        if self.nonzero is not None and not 0 < self.nonzero <= self.elements:
            raise ValueError(f"nonzero={self.nonzero} must be between 1 and the row's {self.elements} elements")
        if not self.scale > 0:
            raise ValueError(f"scale={self.scale} must be positive")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of what is handed out."""
        return np.dtype(self.dtype)

    @property
    def elements(self) -> int:
        """Number of elements of one row."""
        return math.prod(self.shape)

    @property
    def codec(self) -> Codec:
        """How the native ring keeps it."""
        if self.stored is None or self.stored == self.dtype:
            return Codec.RAW
        if self.stored == "bits":
            return Codec.BITS if self.dtype == "float32" else Codec.BITS_OF_BYTES
        return {"uint8": Codec.BYTES, "float16": Codec.HALF, "sparse": Codec.SPARSE}[self.stored]

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """dtype of the stored bytes; uint8 where they are packed."""
        return {Codec.RAW: self.numpy_dtype, Codec.HALF: np.dtype("float16")}.get(self.codec, np.dtype("uint8"))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the stored row; packed forms are flat."""
        if self.codec in (Codec.BITS, Codec.BITS_OF_BYTES):
            return ((self.elements + 7) // 8,)
        if self.codec is Codec.SPARSE:
            return (4 + 8 * (self.nonzero or 0),)
        return self.shape

    @property
    def stored_bytes(self) -> int:
        """Bytes of one stored row."""
        return math.prod(self.stored_shape) * self.stored_dtype.itemsize


FullMode = Literal["overwrite", "block", "drop_newest"]
FULL_MODES: tuple[FullMode, ...] = ("overwrite", "block", "drop_newest")


@dataclass(frozen=True, slots=True)
class Episodes:
    """Rows know which row comes before and after them; needed for n-step returns, stacks and sequences.

    Attributes:
        terminated: field that is true in the last row of an episode that is over for good (no bootstrapping).
        truncated: field that is true in the last row of an episode that was cut; None: `end()` says so.
        reward: field that n-step returns sum.
    """

    terminated: str | None = "terminated"
    truncated: str | None = None
    reward: str | None = "reward"

    def of(self, fields: Mapping[str, Field]) -> Episodes:
        """The same, without default names that the row does not have.

        Raises:
            ValueError: a field that was named is missing, or is not one number kept as it is.
        """
        default = Episodes()
        named: dict[str, str | None] = {}
        for side in ("terminated", "truncated", "reward"):
            name = getattr(self, side)
            if name is not None and name not in fields:
                if name != getattr(default, side):
                    raise ValueError(
                        f"episodes: there is no field {name!r} for {side}; expected one of {', '.join(fields)}"
                    )
                name = None
            if name is not None and (fields[name].shape or fields[name].stored is not None):
                raise ValueError(f"episodes: field {name!r} must be one number a row, stored as it is")
            named[side] = name
        return Episodes(**named)


@dataclass(frozen=True, slots=True)
class RateLimiter:
    """Couples writers and samplers: about `samples_per_insert` rows sampled for each row added.

    The rule is Reverb's SampleToInsertRatio (Cassirer et al., 2021, arXiv:2102.04736): with d = added * ratio -
    sampled, adding waits while d would rise above ratio * least_rows + error, sampling while it would fall below
    ratio * least_rows - error. Writers that check at the same moment can pass together: the bound is exact to within
    one call of each writer and sampler.

    Attributes:
        samples_per_insert: the ratio.
        least_rows: no sample before the replay has this many rows.
        error: maximum deviation from the ratio, in samples; at least one sample and one insert must fit.
    """

    samples_per_insert: float
    least_rows: int = 1
    error: float = 1000.0

    def __post_init__(self) -> None:
        if not self.samples_per_insert > 0 or self.least_rows < 1:
            raise ValueError("a rate limiter needs samples_per_insert > 0 and least_rows >= 1")
        if self.error < max(1.0, self.samples_per_insert):
            raise ValueError(
                f"error={self.error} would let neither side move: expected at least {max(1.0, self.samples_per_insert)}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and most of added * ratio - sampled."""
        middle = self.samples_per_insert * self.least_rows
        return middle - self.error, middle + self.error


@dataclass(frozen=True, slots=True)
class Windows:
    """The rows that are returned around each drawn row, within its episode.

    Attributes:
        n_step: 0, or the number of steps of n-step returns (R. Sutton, 1988): the reward field then holds
            r[t] + gamma r[t+1] + ..., and `batch["discount"]` gamma^steps, 0 where the episode terminated. Fewer
            steps than n are made where the episode ends.
        gamma: discount of a step.
        next: fields of which the row after the step (or after the n steps) is handed out as well, as
            "next_<field>"; they are stored once. In an episode that terminated and left no last observation
            (`end(**final)`), it is the last row's own, and its discount is 0; a cut episode without one does not
            hand out its last row. In sequences such a field itself has one row more instead, what followed the last.
        stack: 0, or the number of frames of a stack: `stacked` fields get shape (n, stack, ...), the newest frame last.
        stacked: which fields are stacked ("next_<field>" follows its field). Frames before an episode's first row
            are zeroes, and `batch.valid[field]` (n, stack) says so.
        length: 0, or the rows of a sequence: every field gets shape (n, length, ...) from the drawn row on. Rows
            after the episode's end are zeroes; `batch.valid["sequence"]` (n, length) marks them.
        full_length: draw only sequences that lie within one episode.
        before: rows of a sequence before the drawn one, beside its `length`. Those before an episode's first row are
            zeroes, as those after its end.
    """

    n_step: int = 0
    gamma: float = 0.99
    next: tuple[str, ...] = ()
    stack: int = 0
    stacked: tuple[str, ...] = ()
    length: int = 0
    full_length: bool = False
    before: int = 0

    def __post_init__(self) -> None:
        for side in ("next", "stacked"):
            names: Any = getattr(self, side)
            object.__setattr__(self, side, (names,) if isinstance(names, str) else tuple(names))
        if min(self.n_step, self.stack, self.length, self.before) < 0:
            raise ValueError("n_step, stack, length and before are 0 (off) or positive")
        if (self.stack > 0) != bool(self.stacked):
            raise ValueError("stack=k goes with stacked=(field, ...), the fields to be stacked")
        if self.length and (self.n_step or self.stack):
            raise ValueError("length cannot be combined with n_step or stack: a sequence holds its next rows")
        if self.before and not self.length:
            raise ValueError(f"before={self.before} goes with length=k, the rows of a sequence from the drawn one on")

    @property
    def any(self) -> bool:
        """Whether any window is set; without, draws are single rows."""
        return bool(self.n_step or self.next or self.stack or self.length)

    @property
    def steps(self) -> int:
        """Transitions from the drawn row to its next one; 0 of a sequence, which holds them."""
        return 0 if self.length else self.n_step or (1 if self.next else 0)

    @property
    def back(self) -> int:
        """Rows before the drawn one."""
        return max(self.stack - 1, self.before)

    @property
    def ahead(self) -> int:
        """Rows after the drawn one."""
        return self.length - (not self.next) if self.length else self.steps

    def columns(self, name: str) -> list[WindowColumn]:
        """What is handed out of a field: its own column, and the one of what follows, if that is no part of it."""
        stacked, follows = name in self.stacked, name in self.next
        if self.length:
            rows = self.before + self.length + follows
            return [WindowColumn(name, -self.before, rows, True, follows, "" if follows else "sequence")]
        first, rows = (1 - self.stack, self.stack) if stacked else (0, 1)
        keys = [(name, False), (f"next_{name}", True)][: 1 + follows]
        return [WindowColumn(key, first, rows, stacked, ahead, key if stacked else "") for key, ahead in keys]


class WindowColumn(NamedTuple):
    """A column of a sample with windows.

    Attributes:
        key: its name.
        first, rows: the first row, counted from the drawn one, or from that after the steps (`ahead`), and how many.
        several: whether it has a dimension of them.
        mask: name of its mask, in `batch.valid`; "": it has none.
    """

    key: str
    first: int
    rows: int
    several: bool
    ahead: bool
    mask: str

    def shape(self, row: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one row of the sample, where the field's rows have that one."""
        return (self.rows, *row) if self.several else row
