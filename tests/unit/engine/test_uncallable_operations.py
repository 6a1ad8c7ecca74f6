"""Operations that are no operations of torch, and what a module is that calls its operations directly."""

from __future__ import annotations

import pytest
import torch
from tests.unit.engine.test_compared_operations import Calls
from tests.unit.engine.test_exported_operations import CPU, MOST, ONE

from jurybox.server.engine.exported import NotDirect, export


@pytest.mark.parametrize("function", [torch.sym_float, lambda rows: rows**0.5], ids=["as a float", "root"])
def test_a_module_that_computes_with_the_number_of_rows_by_other_functions_is_not_called_directly(function):
    with pytest.raises(NotDirect, match=r"it calls <.*>, expected operations of torch"):
        export(Calls(lambda x: x * function(x.shape[0])), ONE, MOST, CPU)


def test_a_module_that_is_called_directly_is_itself_in_evaluation_mode():
    direct = export(Calls(lambda x: x + 1), ONE, MOST, CPU)
    assert direct.eval() is direct
