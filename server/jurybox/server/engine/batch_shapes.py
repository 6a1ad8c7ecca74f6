"""Which numbers of rows compute the same bytes for a row, measured with random rows and weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch

from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.engine.modules import bare, comparable, given_tensor, weights_of

Example = Callable[[int], Mapping[str, Any]]  # returns that many rows of every input, by name
_TRIALS = 2  # batches in which shapes are compared


class Computing(Protocol):
    """The part of a served model that is measured; see `Served`."""

    spec: ModelSpec
    module: torch.nn.Module
    device: torch.device
    shapes: tuple[int, ...]
    published: bool

    def forward(self, staged: Mapping[str, Any]) -> Mapping[str, torch.Tensor]: ...


def agreeing(served: Computing, example: Example | None) -> tuple[int, ...]:
    """Return those of the shapes (numbers of rows) that compute the same bytes for a row as the largest one.

    Libraries choose their kernels by shape, so the last bits of a row's results depend on the number of rows in its
    batch. Within one shape they depend neither on the row's position nor on the other rows
    (tests/integration/test_deterministic.py). Which shapes agree depends on the machine and the model, so it is
    measured here. Only the largest remains if there are no rows to measure with, or the model fails on them.
    """
    largest = served.shapes[-1]
    agree = set(served.shapes)
    generator = torch.Generator().manual_seed(0)
    # Initial weights of zeros, as many heads have, would hide the difference.
    for other in (False, True) if served.published else (False,):
        with _random_weights(served.module, generator) if other else contextlib.nullcontext():
            for _ in range(_TRIALS):
                rows = _rows(served, largest, example, generator)
                if rows is None:
                    return (largest,)
                try:
                    agree -= _differing(served, rows, agree - {largest}, largest)
                except Exception:  # noqa: BLE001  the model does not accept random rows
                    return (largest,)
    return tuple(sorted(agree))


def _differing(served: Computing, rows: Mapping[str, torch.Tensor], shapes: set[int], largest: int) -> set[int]:
    """Return those of the shapes that compute other bytes for one of the rows than the largest."""
    whole, differing = _probed(served, rows, largest), set()
    for shape in sorted(shapes):
        for first in range(0, largest - shape + 1, shape):
            part = _probed(served, {key: value[first : first + shape] for key, value in rows.items()}, shape)
            if any(not torch.equal(part[key], whole[key][first : first + shape]) for key in whole):
                differing.add(shape)
                break
    return differing


def _rows(
    served: Computing, rows: int, example: Example | None, generator: torch.Generator
) -> dict[str, torch.Tensor] | None:
    """Return rows on which shapes may differ: the example's, or random ones; None if valid rows are unknown."""
    given = example(rows) if example else {}
    found = {}
    for key, spec in (dict(served.spec.inputs) | dict(served.spec.state)).items():
        value = given_tensor(given[key]) if key in given else None
        # Sums of equal numbers, such as zeros, are the same in any order.
        if value is None or bool((comparable(value) == comparable(value).reshape(-1)[0]).all()):
            value = drawn(spec, rows, generator)
        if value is None:
            return None
        found[key] = value.to(served.device)
    return found


def _probed(served: Computing, staged: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        # A copy with the alignment of a gathered batch, since kernels are chosen by alignment, too.
        results = served.forward({key: value.clone() for key, value in staged.items()})
    names = [key for key, tensor in served.spec.outputs.items() if not tensor.variable] + list(served.spec.state)
    return {key: results[key][:rows].cpu().reshape(rows, -1).contiguous().view(torch.uint8) for key in names}


def drawn(spec: TensorSpec, rows: int, generator: torch.Generator) -> torch.Tensor | None:
    """Return random rows; None if they cannot be drawn: integers may be indices into a table of unknown length."""
    shape = (rows, *spec.shape)
    if spec.floating:
        return torch.randn(shape, generator=generator).to(dtype_of(spec))
    if spec.dtype in ("bool", "uint8"):
        return torch.randint(2 if spec.dtype == "bool" else 256, shape, generator=generator).to(dtype_of(spec))
    return None


@contextlib.contextmanager
def _random_weights(module: torch.nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Point a module's weights and buffers of floating-point numbers at random values, until the end of the block."""
    module = bare(module)
    tensors = [value for value in weights_of(module).values() if value.is_floating_point()]
    before = [tensor.data for tensor in tensors]
    changed = getattr(module, "weights_changed", lambda: None)
    try:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                noise = torch.rand(value.shape, generator=generator)
                if value.dim() > 1:  # as layers are initialised, so that no activation saturates
                    noise = (2 * noise - 1) * (3 * value.shape[0] / max(1, value.numel())) ** 0.5
                else:  # only a little more, since it may be a variance
                    noise = value.to("cpu", torch.float32) + 0.1 * noise
                tensor.data = torch.empty_like(value).copy_(noise)
        changed()
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data = value
        changed()


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the torch dtype of a spec; bytes are uint8."""
    dtype: torch.dtype = getattr(torch, spec.numpy_dtype.name)
    return dtype
