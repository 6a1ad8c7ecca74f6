"""What an engine asks of a module: its weights behind wrappers, its forward's arguments, the dtypes of its outputs."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jurybox.protocol.dtypes import BITS, numpy_dtype
from jurybox.protocol.errors import ModelFailed

_PARALLEL = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module behind wrappers that have the same weights: those of torch.compile and of data parallelism."""
    while True:
        if isinstance(module, _PARALLEL):
            module = module.module
        elif isinstance(inner := dict(module.named_children()).get("_orig_mod"), torch.nn.Module):
            module = inner
        else:
            return module


def alone(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module without data parallelism, since an engine has one device."""
    while isinstance(module, _PARALLEL):
        module = module.module
    return module


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's parameters and persistent buffers themselves, by the names that it has without wrappers.

    A state_dict may also have values that are no tensors, of `get_extra_state` and of packed weights.
    """
    state = bare(module).state_dict(keep_vars=True)
    return {bare_name(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}


def bare_name(name: str) -> str:
    """Return a weight's name without what torch.compile adds, also for parts of a module that are compiled."""
    return name.replace("_orig_mod.", "")


def unready(module: object) -> str:
    """Return why a factory's module cannot be served, as the end of a sentence; empty if it can."""
    if not isinstance(module, torch.nn.Module):
        return f"its module is a {type(module).__name__}, expected a torch.nn.Module"
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            return f"its {name!r} has no shape yet: call the module once on an example in the factory"
        if tensor.is_meta:
            return f"its {name!r} is on the meta device and has no values: load them in the factory"
    return ""


def storages(module: torch.nn.Module) -> set[int]:
    """Return the addresses of the memory of a module's parameters and buffers."""
    tensors = (*module.parameters(), *module.buffers())
    return {address for tensor in tensors if (address := _storage(tensor))}


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a tensor without memory of its own, such as a sparse one
        return 0


_LOOKED_AT = 100_000  # objects of a module, at most


def views_of_weights(module: torch.nn.Module) -> list[str]:
    """Return the places of tensors that a module keeps besides its weights, and that share memory with them.

    They stay old when the weights are pointed at other memory: views kept as attributes, in lists, in closures.
    """
    weights = weights_of(module)
    own = {id(tensor) for tensor in weights.values()}
    memory = {address for tensor in weights.values() if (address := _storage(tensor))}
    found: list[str] = []
    seen: dict[int, object] = {}  # with the objects, so that no other gets an address that was seen
    waiting: list[tuple[str, Any]] = [("", bare(module))]
    while waiting and len(seen) < _LOOKED_AT:
        place, value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if id(value) not in own and _storage(value) in memory:
                found.append(place)
            continue
        waiting += [(f"{place}.{name}" if place else name, part) for name, part in _parts(value)]
    return sorted(found)


_LEAVES = (str, bytes, int, float, complex, type, ModuleType, np.ndarray, torch.dtype, torch.device, type(None))


def _parts(value: Any) -> list[tuple[str, Any]]:
    """Return what an object refers to, with names."""
    if isinstance(value, _LEAVES):
        return []
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [(str(at), part) for at, part in enumerate(value)]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return [(value.__name__, part) for part in (*cells, *(value.__defaults__ or ()))]
    if isinstance(value, MethodType):
        return [(value.__name__, value.__self__), (value.__name__, value.__func__)]
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, torch.nn.Module):
        parts = {key: part for key, part in vars(value).items() if key not in ("_parameters", "_buffers", "_modules")}
        return [*parts.items(), *value._parameters.items(), *value._buffers.items(), *value._modules.items()]
    return list(vars(value).items()) if hasattr(value, "__dict__") else []


# ---- arguments


def _parameters(module: torch.nn.Module) -> tuple[list[str], bool, bool] | None:
    """Return forward's parameters in order, and whether it takes more by position and by name; None: unknown."""
    if isinstance(module, torch.jit.ScriptModule):
        arguments = module.forward.schema.arguments  # type: ignore[attr-defined]
        return [argument.name for argument in arguments if argument.name != "self"], False, False
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kinds = {p.kind for p in parameters}
    return named, inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds


def takes_names(module: torch.nn.Module, names: Sequence[str]) -> bool:
    """Return whether a module's forward takes its arguments by these names; otherwise it takes them by position.

    Raises:
        ModelFailed: it has some of the names only, so that a position would be a guess.
    """
    found = _parameters(bare(module))
    if found is None:
        return len(names) > 1
    parameters, more, more_named = found
    matching = [name for name in names if name in parameters]
    if len(matching) == len(names):
        return True
    if more_named:
        # A wrapper that hides the names of several arguments: one that is called otherwise raises at warm-up.
        return not more or len(names) > 1
    # "observation/image" can be no parameter's name: by position, if that passes what matches to its parameter.
    in_place = all(parameters.index(name) == names.index(name) for name in matching)
    if matching and (all(name.isidentifier() for name in names) or not in_place):
        others = ", ".join(repr(name) for name in names if name not in parameters)
        raise ModelFailed(
            f"forward takes {', '.join(map(repr, matching))} by name, but not {others}; its parameters are "
            f"({', '.join(parameters)}): name all of them as in the spec, or none"
        )
    return False


# ---- dtypes


@cache
def keeps(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether every value of one dtype is a value of another, so that a conversion loses nothing."""
    if source == target:
        return True
    if str(source).startswith("torch.q"):  # quantized: its integers are not the values
        return False
    try:
        if target.is_complex or source.is_complex or target == torch.bool:
            return False
        if source == torch.bool:
            return True
        if target.is_floating_point:
            wide = torch.finfo(target)
            if not source.is_floating_point:
                return max(-torch.iinfo(source).min, torch.iinfo(source).max + 1) <= 2 / wide.eps
            narrow = torch.finfo(source)
            return bool(narrow.eps >= wide.eps and narrow.max <= wide.max and narrow.tiny >= wide.tiny)
        if source.is_floating_point:
            return False
        narrow_, wide_ = torch.iinfo(source), torch.iinfo(target)
        return wide_.min <= narrow_.min and narrow_.max <= wide_.max
    except TypeError:  # neither integers nor floating-point numbers, such as quantized ones
        return False


def require_kept(what: str, source: torch.dtype, target: torch.dtype) -> None:
    """Raise ModelFailed if a conversion of an output or a state may lose something."""
    if not keeps(source, target):
        came, wanted = (str(dtype).removeprefix("torch.") for dtype in (source, target))
        if came.startswith("q"):
            raise ModelFailed(f"{what} is quantized ({came}), the spec promises {wanted}: return .dequantize()")
        raise ModelFailed(
            f"{what} is {came}, the spec promises {wanted}, which does not keep every value: return "
            f".to(torch.{wanted}) where that is meant, or promise {came}"
        )


def host_values(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor's values in host memory, contiguous, in a dtype that keeps them, and outside of autograd."""
    if (
        tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_neg())
        and tensor.is_contiguous()
    ):
        return tensor  # as a rule: the calls below take 2 us, also where there is nothing to do
    if tensor.layout is not torch.strided:
        raise ModelFailed(f"a sparse tensor came ({tensor.layout}), expected a dense one: return .to_dense()")
    plain: torch.Tensor = tensor.detach().to("cpu", dtype).resolve_neg().contiguous()
    return plain


# For each dtype that NumPy has from ml_dtypes, of which neither knows the other's: the one of the same size in between.
_SHARED = {
    getattr(torch, name): torch.int16 if bits == "uint16" else torch.uint8
    for name, bits in BITS.items()
    if hasattr(torch, name)
}


def tensor_over(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor on the memory of an array, of any dtype that a spec can have."""
    if array.dtype.name not in BITS:
        return torch.from_numpy(array)
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return torch.from_numpy(array.view(np.int16 if _SHARED[dtype] == torch.int16 else np.uint8)).view(dtype)


def array_over(tensor: torch.Tensor) -> NDArray[Any]:
    """Return an array on the memory of a tensor in host memory, of any dtype that a spec can have."""
    if (shared := _SHARED.get(tensor.dtype)) is None:
        plain: NDArray[Any] = tensor.numpy()
        return plain
    bits: NDArray[Any] = tensor.view(shared).numpy()
    return bits.view(numpy_dtype(str(tensor.dtype).removeprefix("torch.")))


def given_tensor(value: Any) -> torch.Tensor:
    """Return a tensor of what `torch.as_tensor` takes, or of an array of a dtype that torch does not know."""
    return tensor_over(value) if isinstance(value, np.ndarray) else torch.as_tensor(value)


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype that torch compares and checks: float8 as float32, which keeps all of its values."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def as_tensor(what: str, value: Any, rows: int) -> torch.Tensor:
    """Return an output as a tensor: a list of one output, or of one tensor for each row, is taken, too."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, torch.Tensor) for each in value):
        if len(value) == 1 and value[0].dim() and len(value[0]) == rows:
            return value[0]  # type: ignore[no-any-return]
        if len(value) == rows and len({each.shape for each in value}) == 1:
            return torch.stack(list(value))
    came = f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
    raise ModelFailed(f"{what} is a {came}, expected a tensor, or a list of {rows} tensors of one shape, one for a row")
