"""What an engine asks of a module and of what it returns: its arguments, its tensors in host memory, its dtypes."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from jurybox.protocol.dtypes import numpy_dtype
from jurybox.protocol.errors import ModelFailed
from jurybox.server.engine import modules
from jurybox.server.engine.modules import (
    alone,
    array_over,
    as_tensor,
    bare,
    comparable,
    given_tensor,
    host_values,
    keeps,
    require_kept,
    storages,
    takes_names,
    tensor_over,
    unready,
    views_of_weights,
    weights_of,
)


def module_of(forward: Any) -> torch.nn.Module:
    found = torch.nn.Module()
    found.forward = forward  # type: ignore[method-assign]
    return found


# ---- arguments


def takes_more(x: Any, *more: Any) -> None: ...
def takes_named(x: Any, **more: Any) -> None: ...
def takes_all(*more: Any, **named: Any) -> None: ...
def takes_only_named(*, x: Any, y: Any) -> None: ...
def takes_two(x: Any, y: Any) -> None: ...
def takes_positions(x: Any, y: Any, /) -> None: ...


@pytest.mark.parametrize(
    ("forward", "names", "by_name"),
    [
        (takes_two, ["x", "y"], True),
        (takes_two, ["y", "x"], True),
        (takes_two, ["x"], True),
        (takes_two, ["a", "b"], False),
        (takes_two, ["x", "in/y"], False),
        (takes_more, ["x"], True),
        (takes_more, ["a"], False),
        (takes_more, ["a", "b"], False),
        (takes_named, ["x", "a"], True),
        (takes_named, ["a"], True),
        (takes_named, ["a", "b"], True),
        (takes_all, ["a"], False),
        (takes_all, ["a", "b"], True),
        (takes_only_named, ["x", "y"], True),
        (takes_positions, ["x", "y"], False),
    ],
)
def test_inputs_are_passed_by_name_where_forward_has_the_names_or_may_have(
    forward: Any, names: list[str], by_name: bool
) -> None:
    assert takes_names(module_of(forward), names) is by_name


@pytest.mark.parametrize(
    ("names", "others"),
    [(["x", "b"], "'b'"), (["b", "x"], "'b'"), (["y", "in/x"], "'in/x'"), (["x", "b", "c"], "'b', 'c'")],
)
def test_names_of_which_forward_has_some_are_refused_if_a_position_would_be_a_guess(
    names: list[str], others: str
) -> None:
    with pytest.raises(ModelFailed, match=rf"by name, but not {others}; its parameters are \(x, y\): name all of them"):
        takes_names(module_of(takes_two), names)


def test_arguments_of_a_forward_without_a_signature_are_passed_by_name_if_they_are_several() -> None:
    module = module_of(getattr)
    with pytest.raises(ValueError, match=r"no signature|invalid signature"):
        __import__("inspect").signature(getattr)
    assert not takes_names(module, ["a"]) and takes_names(module, ["a", "b"])


class Minus(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_module_takes_its_inputs_by_name() -> None:
    scripted = torch.jit.script(Minus())
    assert takes_names(scripted, ["y", "x"]) and not takes_names(scripted, ["a", "b"])
    with pytest.raises(ModelFailed, match=r"its parameters are \(x, y\)"):
        takes_names(scripted, ["y", "z"])


# ---- parts


def test_a_module_is_found_behind_every_wrapper_that_has_its_weights() -> None:
    inner = torch.nn.Linear(2, 2)
    parallel = torch.nn.DataParallel(torch.nn.DataParallel(inner))
    assert alone(parallel) is inner and bare(parallel) is inner
    compiled = torch.nn.Module()
    compiled._orig_mod = torch.nn.DataParallel(inner)  # as torch.compile wraps it
    assert bare(compiled) is inner and alone(compiled) is compiled
    assert alone(torch.nn.DataParallel(compiled)) is compiled
    assert list(weights_of(torch.nn.DataParallel(compiled))) == ["weight", "bias"]


def test_a_tensor_without_values_is_named_whether_it_is_a_parameter_or_a_buffer() -> None:
    module = torch.nn.Linear(2, 2)
    assert unready(module) == ""
    module.register_buffer("table", torch.empty(2, device="meta"))
    assert unready(module) == "its 'table' is on the meta device and has no values: load them in the factory"
    module.table = torch.nn.parameter.UninitializedBuffer()
    assert "its 'table' has no shape yet" in unready(module)


def test_the_memory_of_parameters_and_buffers_is_that_of_a_module() -> None:
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    module.register_buffer("empty", torch.zeros(0))
    dense = [tensor for name, tensor in module.state_dict().items() if name not in ("sparse", "empty")]
    assert storages(module) == {tensor.untyped_storage().data_ptr() for tensor in dense}


class Keeping:
    """An object with a tensor in it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.tensor


@pytest.mark.parametrize(
    ("keep", "place"),
    [
        (Keeping, "kept.tensor"),
        (lambda view: Keeping(view).scaled, "kept.scaled.tensor"),
        (lambda view: deque([0, view]), "kept.1"),
        (lambda view: {"a": {7: view}}, "kept.a.7"),
        (lambda view: frozenset([view]), "kept.0"),
        (lambda view: lambda x, by=view: x * by, "kept.<lambda>"),
    ],
    ids=["object", "method", "deque", "mapping", "set", "default"],
)
def test_the_place_of_a_view_of_a_weight_is_named(keep: Any, place: str) -> None:
    module = torch.nn.Linear(2, 2)
    module.kept = keep(module.weight.data[1:])
    assert views_of_weights(module) == [place]
    assert views_of_weights(torch.nn.Sequential(torch.nn.Tanh(), module)) == [f"1.{place}"]


def test_all_views_are_named_in_order_and_neither_weights_nor_other_tensors() -> None:
    module = torch.nn.Linear(2, 2)
    module.b, module.a = module.weight.data[:1], module.bias.data
    module.same = [module.weight, module.bias]
    module.others = [torch.ones(2), torch.zeros(0), torch.eye(2).to_sparse()]
    module.itself = [module]
    assert views_of_weights(module) == ["a", "b"]


def test_a_look_for_views_ends_in_a_module_that_keeps_very_many_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_LOOKED_AT", 50)
    looked: list[object] = []
    parts = modules._parts
    monkeypatch.setattr(modules, "_parts", lambda value: (looked.append(value), parts(value))[1])  # type: ignore[func-returns-value]
    module = torch.nn.Linear(2, 2)
    module.many = [[number] for number in range(1000)]
    assert views_of_weights(module) == [] and len(looked) <= 50


# ---- values


@pytest.mark.parametrize(
    ("source", "target", "kept"),
    [
        ("float32", "float32", True),
        ("complex64", "complex64", True),
        ("bool", "bool", True),
        ("bool", "uint8", True),
        ("bool", "float16", True),
        ("uint8", "bool", False),
        ("float32", "bool", False),
        ("bool", "complex64", False),
        ("complex64", "float32", False),
        ("float32", "complex64", False),
        ("uint8", "bfloat16", True),
        ("int8", "bfloat16", True),
        ("int16", "bfloat16", False),
        ("int16", "float16", False),
        ("uint8", "float8_e4m3fn", False),
        ("int16", "float32", True),
        ("int32", "float32", False),
        ("int32", "float64", True),
        ("int64", "float64", False),
        ("bfloat16", "float32", True),
        ("bfloat16", "float16", False),
        ("float16", "bfloat16", False),
        ("float64", "float32", False),
        ("float16", "int64", False),
        ("uint8", "int16", True),
        ("uint8", "int8", False),
        ("int8", "uint8", False),
        ("int8", "int64", True),
        ("int64", "int32", False),
        ("uint8", "uint16", True),
        ("uint16", "int32", True),
        ("quint8", "uint8", False),
        ("bits8", "uint8", False),
        ("quint8", "quint8", True),
        ("float8_e4m3fn", "float16", True),
        ("float8_e5m2", "float16", True),
        ("float8_e5m2", "float8_e4m3fn", False),
    ],
)
def test_a_conversion_keeps_every_value_or_it_does_not(source: str, target: str, kept: bool) -> None:
    assert keeps(getattr(torch, source), getattr(torch, target)) is kept


def test_a_conversion_that_loses_values_is_refused_with_what_to_do() -> None:
    require_kept("output 'y'", torch.float16, torch.float32)
    with pytest.raises(ModelFailed) as refused:
        require_kept("output 'y'", torch.float64, torch.float32)
    assert str(refused.value) == (
        "output 'y' is float64, the spec promises float32, which does not keep every value: return "
        ".to(torch.float32) where that is meant, or promise float64"
    )
    with pytest.raises(ModelFailed, match=r"'y' is quantized \(quint8\), the spec promises uint8: return .dequantize"):
        require_kept("output 'y'", torch.quint8, torch.uint8)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(3, 2).T,
        torch.arange(6.0).reshape(2, 3).requires_grad_(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.arange(6, dtype=torch.int16),
    ],
    ids=["as it is", "transposed", "of autograd", "negated lazily", "of another dtype"],
)
def test_values_in_host_memory_are_plain_ones(tensor: torch.Tensor) -> None:
    found = host_values(tensor, torch.float32)
    assert found.dtype is torch.float32 and found.is_contiguous() and not found.requires_grad and not found.is_neg()
    np.testing.assert_array_equal(found.numpy(), tensor.detach().resolve_neg().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sparse_tensor_is_refused_with_what_to_do(dtype: torch.dtype) -> None:
    with pytest.raises(ModelFailed, match=r"a sparse tensor came \(torch.sparse_coo\), .*: return .to_dense\(\)"):
        host_values(torch.eye(2).to_sparse(), dtype)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "bool", "int64"])
def test_a_tensor_and_an_array_of_every_dtype_share_memory_both_ways(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    array = np.zeros(3, numpy_dtype(name))
    tensor = tensor_over(array)
    assert tensor.dtype is dtype and tensor.tolist() == [0, 0, 0]
    tensor[1] = 1
    assert array[1] == 1
    back = array_over(tensor)
    assert back.dtype == array.dtype
    back[2] = 1
    assert array[2] == 1 and tensor[2] == 1
    assert given_tensor(array).data_ptr() == tensor.data_ptr() and given_tensor([1.5]).tolist() == [1.5]


def test_only_dtypes_that_torch_cannot_compare_are_widened() -> None:
    for name, wide in (("float8_e5m2", "float32"), ("float16", "float16"), ("int8", "int8"), ("float64", "float64")):
        assert comparable(torch.zeros(2, dtype=getattr(torch, name))).dtype is getattr(torch, wide)


@pytest.mark.parametrize(
    ("value", "rows", "shape"),
    [
        (torch.ones(3, 2), 3, (3, 2)),
        ([torch.ones(3, 2)], 3, (3, 2)),
        ((torch.ones(2), torch.ones(2)), 2, (2, 2)),
        ([torch.ones(2)], 1, (1, 2)),
        ([torch.ones(1, 2)], 1, (1, 2)),
        ([torch.tensor(1.0)], 1, (1,)),
        ([torch.tensor(1.0), torch.tensor(2.0)], 2, (2,)),
    ],
)
def test_an_output_may_be_a_list_of_one_tensor_or_of_one_for_each_row(
    value: Any, rows: int, shape: tuple[int, ...]
) -> None:
    assert as_tensor("output 'y'", value, rows).shape == shape


@pytest.mark.parametrize(
    ("value", "came"),
    [
        ([torch.ones(2), torch.ones(3)], "list of 2"),
        ([torch.ones(2)] * 3, "list of 3"),
        ([torch.ones(3)], "list of 1"),
        ((), "tuple of 0"),
        ([1.0, 2.0], "list of 2"),
        ([torch.ones(2), 2.0], "list of 2"),
        (1.0, "float"),
        (None, "NoneType"),
    ],
)
def test_what_is_neither_a_tensor_nor_rows_of_one_shape_is_refused(value: Any, came: str) -> None:
    with pytest.raises(ModelFailed, match=rf"^output 'y' is a {came}, expected a tensor, or a list of 2 tensors"):
        as_tensor("output 'y'", value, 2)
