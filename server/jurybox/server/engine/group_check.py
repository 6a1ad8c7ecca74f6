"""Whether a module can be one of a group, found out when it is loaded rather than when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jurybox.protocol.errors import Error
from jurybox.protocol.spec import TensorSpec
from jurybox.server.engine.stack import Stack, StackedForward

_ROWS = 3
# Sums in another order differ by rounding; what depends on the other rows differs by far more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1


class CannotGroup(Error):
    """The module cannot be computed together with others; the message says why."""


def check_groupable(
    name: str,
    group: str,
    module: torch.nn.Module,
    inputs: Mapping[str, TensorSpec],
    compute: torch.dtype | None = None,
    example: Callable[[int], Mapping[str, Any]] | None = None,
) -> None:
    """Compute two copies of a module as one and compare with the module itself.

    Args:
        module: on the device where it will be served.
        compute: the dtype that floating-point inputs are cast to; None leaves them.
        example: as in ServedModel.

    Raises:
        CannotGroup: that is not possible, or gives something else.
    """
    where = f"model {name!r} cannot be in group {group!r}"
    for path, part in module.named_modules():
        if part.training and isinstance(part, torch.nn.modules.batchnorm._NormBase):
            raise CannotGroup(
                f"{where}: {path or 'it'} is a {type(part).__name__} in training mode, whose answers depend on the "
                "other rows of a batch; let it follow .eval()"
            )
    stack = Stack(module, 2)
    state = module.state_dict(keep_vars=True)
    for member in (0, 1):
        stack.fill(member, state, 0)
    before = {key: tensor.clone() for key, tensor in stack.tensors.items()}
    kept = _attributes(module)
    asked = {key: _questions(spec, 2, (example or _nothing)(2 * _ROWS).get(key)) for key, spec in inputs.items()}
    device = next((tensor.device for tensor in state.values()), torch.device("cpu"))
    asked = {key: value.to(device, compute if value.is_floating_point() else None) for key, value in asked.items()}
    try:
        together = _listed(StackedForward(module)(stack.tensors, asked))
    except Exception as error:
        raise CannotGroup(
            f"{where}: it cannot be computed for several sets of weights at once: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'no message'}; expected tensor operations alone, without "
            ".item(), branches on values, or random numbers; leave 'group' away to serve it by itself"
        ) from error
    if changed := [key for key, tensor in stack.tensors.items() if not _same(tensor, before[key])]:
        raise CannotGroup(f"{where}: its forward writes into {changed[0]!r}; weights of a group must stay as published")
    if attributes := sorted(key for key, tensor in _attributes(module).items() if kept.get(key) != tensor):
        raise CannotGroup(
            f"{where}: its forward keeps a tensor in the attribute {attributes[0]!r}; it must keep nothing"
        )
    for member in (0, 1):
        alone = _listed(module(**{key: value[member, :1] for key, value in asked.items()}))
        for one, several in zip(alone, together, strict=True):
            limit = _TOLERANCE.get(several.dtype, _HALF_TOLERANCE)
            if several.is_floating_point() and not torch.allclose(
                one, several[member, :1], rtol=limit, atol=limit, equal_nan=True
            ):
                raise CannotGroup(
                    f"{where}: among others a row is answered otherwise than by itself (by up to "
                    f"{(one - several[member, :1]).abs().max().item():.3g}); rows of a group must not depend on others"
                )


def require_alike(name: str, group: str, first: torch.nn.Module, module: torch.nn.Module) -> None:
    """Refuse a module of another architecture than the group's first.

    Raises:
        CannotGroup: names the first difference.
    """
    where = f"model {name!r} cannot be in group {group!r}"
    ours, theirs = dict(module.named_modules()), dict(first.named_modules())
    if str(module) != str(first) or [*map(type, ours.values())] != [*map(type, theirs.values())]:
        raise CannotGroup(f"{where}: it is built otherwise than the group's first model:\n{module}\nand not\n{first}")
    tensors, expected = module.state_dict(), first.state_dict()
    for key in {**expected, **tensors}:
        had, came = (f"{at[key].dtype}{list(at[key].shape)}" if key in at else "nothing" for at in (expected, tensors))
        if had != came:
            raise CannotGroup(f"{where}: its {key!r} is {came}, the group's first model has {had}")
    for path, part in ours.items():
        for key, value in vars(part).items():
            other = vars(theirs[path]).get(key)
            if isinstance(value, (bool, int, float, str, tuple)) and value != other:
                raise CannotGroup(
                    f"{where}: its {'.'.join(filter(None, (path, key)))} is {value!r}, the group's first model has "
                    f"{other!r}: only weights may differ"
                )


def _questions(spec: TensorSpec, members: int, example: Any) -> torch.Tensor:
    """(members, _ROWS, *shape) of values that differ: an example's, noise, or zeros where numbers mean something."""
    shape = (members, _ROWS, *spec.shape)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if example is not None:
        return torch.as_tensor(example).reshape(shape)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(shape, dtype=dtype)


def _nothing(rows: int) -> Mapping[str, Any]:
    return {}


def _listed(results: Any) -> Sequence[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return (results,)
    return list(results.values()) if isinstance(results, Mapping) else list(results)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | one.isnan()).all())


def _attributes(module: torch.nn.Module) -> dict[str, int]:
    """Tensors that are kept as plain attributes, by identity."""
    return {
        ".".join(filter(None, (path, key))): id(value)
        for path, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }
