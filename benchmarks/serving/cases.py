"""The cases of every contender: the model, the rows per request, and the numbers of clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Case:
    """One kind of request.

    Attributes:
        model: key of models.MODELS.
        shape, dtype: of one input row.
        outputs: name and row shape of every output, all float32.
        rows: in a request.
        clients: how many ask at once, one measurement each.
        max_batch: rows of the largest batch, the same for every contender that lets one set it.
        samples: different requests, with their expected answers.
    """

    name: str
    title: str
    model: str
    shape: tuple[int, ...]
    dtype: str
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    rows: int
    clients: tuple[int, ...]
    max_batch: int
    samples: int

    @property
    def input_bytes(self) -> int:
        """Of one request."""
        return self.rows * int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize

    @property
    def output_width(self) -> int:
        """Floats that answer one row."""
        return sum(int(np.prod(shape)) for _, shape in self.outputs)

    @property
    def single(self) -> bool:
        """Whether a request is one row, given without a leading axis."""
        return self.rows == 1

    def split(self, floats: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Cut (n, output_width) packed floats into the outputs."""
        parts, at = [], 0
        for _, shape in self.outputs:
            width = int(np.prod(shape))
            parts.append(floats[:, at : at + width])
            at += width
        return parts


_VECTOR = (("logits", (145,)), ("value", ()))

CASES = {
    case.name: case
    for case in (
        Case("vector", "float32[52] to logits[145] and value, one row a request", "vector", (52,), "float32",
             _VECTOR, 1, (1, 4, 16, 64, 256), 256, 64),
        Case("vector64", "the same, 64 rows a request", "vector", (52,), "float32",
             _VECTOR, 64, (1, 4, 16), 256, 8),
        Case("image", "uint8[384,384,3] to score, one row a request", "image", (384, 384, 3), "uint8",
             (("score", ()),), 1, (1, 4, 16), 16, 8),
    )
}  # fmt: skip

# One policy in sizes, for crossover.py: two hidden layers of so many units each.
WIDTHS = (64, 256, 512, 1024, 2048, 4096)
CROSSOVER = {
    f"hidden{width}": Case(
        f"hidden{width}", f"float32[52] to logits[145] and value, hidden {width}", f"hidden{width}", (52,), "float32",
        _VECTOR, 1, (1, 4, 16, 64), 256, 64,
    )
    for width in WIDTHS
}  # fmt: skip


def case_named(name: str) -> Case:
    """A case of either kind."""
    return CASES[name] if name in CASES else CROSSOVER[name]


@dataclass(frozen=True)
class Sample:
    """A request and its expected answer.

    Attributes:
        inputs: (*shape) for a request of one row, else (rows, *shape).
        expected: every output flattened.
        limits: the largest sum of squared differences that still counts as right, of every output. Batches of
            different sizes round differently, so no answer is compared bit by bit.
    """

    inputs: NDArray[np.generic]
    expected: tuple[NDArray[np.float32], ...]
    limits: tuple[float, ...]


def sample_file(folder: Path, case: Case) -> Path:
    return folder / f"{case.name}.npz"


def load_samples(folder: Path, case: Case) -> list[Sample]:
    """Read the file of samples.py."""
    with np.load(sample_file(folder, case)) as stored:
        inputs = stored["inputs"]
        outputs = [stored[name] for name, _ in case.outputs]
        tolerances = stored["tolerances"]
    found = []
    for i in range(len(inputs)):
        expected = tuple(np.ascontiguousarray(output[i].reshape(-1)) for output in outputs)
        limits = tuple(
            float(values.size * tolerance**2) for values, tolerance in zip(expected, tolerances, strict=True)
        )
        found.append(Sample(inputs[i, 0] if case.single else inputs[i], expected, limits))
    return found
