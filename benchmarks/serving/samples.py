"""Make the requests and their expected answers: ``python -m benchmarks.serving.samples FOLDER [CASE ...]``.

In a process of its own, so that nobody who measures has to import torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.serving.cases import CASES, Case, case_named, sample_file
from benchmarks.serving.models import build, forward

_RELATIVE = 1e-4  # of an output's largest value; batches of other sizes differ by some 1e-6 of it
_APART = 30  # two answers differ by so many tolerances at least, so that a mixed-up reply cannot pass


def write(folder: Path, case: Case) -> None:
    """Write the samples of a case, after making sure that no two of them have the same answer."""
    random = np.random.default_rng(52)
    inputs = _inputs(case, random)
    module = build(case.model)
    answers: list[list[NDArray[np.float32]]] = [[] for _ in case.outputs]
    for rows in inputs:
        for kept, output in zip(answers, forward(module, torch.from_numpy(rows)), strict=True):
            kept.append(output.numpy().copy())
    stacked = [np.stack(kept) for kept in answers]
    tolerances = [_RELATIVE * float(np.abs(output).max()) for output in stacked]
    for i in range(len(inputs)):
        for k in range(i):
            apart = max(
                float(np.sqrt(np.mean((output[i] - output[k]) ** 2))) / tolerance
                for output, tolerance in zip(stacked, tolerances, strict=True)
            )
            if apart < _APART:
                raise AssertionError(f"samples {k} and {i} of {case.name} have nearly the same answer: choose others")
    named = {name: output for (name, _), output in zip(case.outputs, stacked, strict=True)}
    stored: dict[str, Any] = {"inputs": inputs, "tolerances": np.array(tolerances), **named}
    np.savez(sample_file(folder, case), **stored)


def _inputs(case: Case, random: np.random.Generator) -> NDArray[np.generic]:
    shape = (case.samples, case.rows, *case.shape)
    if case.dtype == "float32":
        return random.standard_normal(shape).astype(np.float32)
    # Noise alone would average out to one score for all: each image gets a tint of its own, with noise on it.
    tints = np.linspace(0, 1, case.samples)[:, None] * np.array([[200.0, 120.0, 40.0]])
    noise = random.integers(0, 40, shape)
    images: NDArray[np.uint8] = (noise + tints[:, None, None, None, :]).astype(np.uint8)
    return images


if __name__ == "__main__":
    for one in sys.argv[2:] or CASES:
        write(Path(sys.argv[1]), case_named(one))
