"""What is called directly is compared with its forward before it serves, on rows of its own and of every dtype."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from tests.unit.engine.test_exported_operations import CPU, IN, MOST, ONE, Many, Outputs, program, same

from jurybox.protocol import TensorSpec
from jurybox.server.engine.exported import Direct, NotDirect, export, rows_of, tensors_of


class Calls(torch.nn.Module):
    """What a function returns."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


def directly(module: torch.nn.Module, recorded: torch.nn.Module) -> Direct:
    """Call the operations of another module in the place of this one's, after the comparison."""
    return Direct(module, program(recorded, 1, 64), ONE, MOST, tensors_of(recorded)).compare(ONE, MOST, CPU)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x + (len(x) == MOST),
        lambda x: x + (len(x) == 1),
        lambda x: x.double(),
        lambda x: x.view(torch.int32),
        lambda x: x.to(torch.int32).view(torch.float32),
        lambda x: (x, x),
        lambda x: x[:, :2],
        lambda x: x[:, None],
    ],
    ids=[
        "the largest batch",
        "one row",
        "dtype",
        "dtype of the same bytes",
        "bytes",
        "more outputs",
        "fewer columns",
        "shape",
    ],
)
def test_operations_that_differ_from_the_forward_in_anything_are_not_called(
    forward: Callable[[torch.Tensor], object],
) -> None:
    unchanged = Calls(lambda x: x + 0)
    directly(unchanged, unchanged)
    with pytest.raises(NotDirect, match="rows its operations compute something else than its forward"):
        directly(Calls(forward), unchanged)


def test_a_result_that_is_no_number_is_the_same_as_itself() -> None:
    module = Calls(lambda x: x / 0 * 0)
    directly(module, module)


def test_a_module_that_changes_its_rows_is_compared_on_rows_of_its_own() -> None:
    module = Calls(lambda x: x.add_(1) * 2)
    assert directly(module, module)(torch.zeros(1, 4)).tolist() == [[2.0] * 4]


def test_a_forward_that_raises_on_a_batch_is_not_called_directly_and_the_reason_is_what_it_raised() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise ValueError("three are a crowd")
        return x + 0

    with pytest.raises(NotDirect, match="it raised ValueError: three are a crowd"):
        directly(Calls(forward), Calls(lambda x: x + 0))


def test_nothing_of_a_call_is_kept_after_it() -> None:
    direct = export(Calls(lambda x: x + 1), ONE, MOST, CPU)
    x = torch.zeros(2, 4)
    result = direct(x)
    given, found = weakref.ref(x), weakref.ref(result)
    del x, result
    assert given() is None and found() is None


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_module_of_small_batches_is_called_directly_up_to_its_largest(most: int) -> None:
    module = Outputs("tensor").eval()
    direct = export(module, ONE, most, CPU)
    for rows in range(1, most + 1):
        x = torch.randn(rows, 4)
        assert torch.equal(module(x), direct(x))


def test_a_module_of_another_dtype_gets_its_numbers_in_it_and_its_indices_as_they_are() -> None:
    module = Many().eval().to(torch.bfloat16)
    given = rows_of(3, IN, compute=torch.bfloat16)
    assert (given["x"].dtype, given["n"].dtype) == (torch.bfloat16, torch.int64)
    direct = export(module, IN, MOST, CPU, compute=torch.bfloat16)
    same(module(**given), direct(**given))


def test_a_module_that_can_compute_only_its_example_is_compared_on_that() -> None:
    table = torch.eye(3)
    module = Calls(lambda x: table[x[:, 0].long() - 600])
    with pytest.raises(NotDirect, match="it raised IndexError"):
        export(module, ONE, MOST, CPU)
    direct = export(module, ONE, MOST, CPU, lambda rows: {"x": torch.full((rows, 4), 601.0)})
    assert direct(torch.full((2, 4), 602.0)).tolist() == [[0.0, 0.0, 1.0]] * 2


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * 2 + n[:, None]


def exported_pair(*positional: torch.Tensor, **named: torch.Tensor) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = {key: {0: batch} for key in ("x", "n")}
    return torch.export.export(Pair(), positional, named, dynamic_shapes=shapes)


X, N = torch.randn(3, 4), torch.arange(3)


def test_a_program_of_positional_and_named_inputs_gets_each_where_it_belongs() -> None:
    for recorded in (exported_pair(X, N), exported_pair(X, n=N), exported_pair(x=X, n=N)):
        direct = Direct(Pair(), recorded, IN, MOST, {})
        assert torch.equal(direct(x=X, n=N), Pair()(X, N))
        assert torch.equal(direct(X, N), Pair()(X, N))


def test_a_program_whose_weights_the_module_does_not_have_is_not_called_without_its_module() -> None:
    module = Outputs("tensor")
    with pytest.raises(NotDirect, match=r"it needs 'layer\.\w+', which is no parameter, buffer or tensor"):
        Direct(module, program(module, 1, 64), ONE, MOST, {})


class Named(torch.nn.Module):
    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return sum(inputs.values(), torch.zeros(()))


@pytest.mark.parametrize("inputs", [{"x": IN["x"], "m": IN["n"]}, {"x": IN["x"]}], ids=["another name", "one less"])
def test_a_program_of_other_inputs_is_not_called_without_its_checks(inputs: dict[str, TensorSpec]) -> None:
    with pytest.raises(NotDirect, match=f"it takes 2 inputs, expected {', '.join(inputs)}"):
        Direct(Named(), exported_pair(x=X, n=N), inputs, MOST, {})


def test_a_program_with_an_input_without_rows_is_not_called_without_its_checks() -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    given = {"x": X, "n": torch.tensor(2)}

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return x * n

    recorded = torch.export.export(Scaled(), (), given, dynamic_shapes={"x": {0: batch}, "n": {}})
    with pytest.raises(NotDirect, match="input 'n' is no tensor with rows"):
        Direct(Scaled(), recorded, IN, MOST, {})
