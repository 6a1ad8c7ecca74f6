"""bfloat16 and float8 in an engine: every way of computing a batch keeps them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.small_floats import DTYPES, echo, ragged
from tests.unit.engine.test_device_served import CPU, ROWS, tickets

from jurybox.client import RowFailed
from jurybox.protocol import TensorSpec
from jurybox.protocol.dtypes import BITS
from jurybox.server.engine.device import DeviceServed
from jurybox.server.engine.modules import array_over, tensor_over
from jurybox.server.engine.served import Served
from jurybox.server.inproc import InprocServer
from jurybox.server.models import ServedModel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Served, DeviceServed])
def test_a_batch_is_computed_in_the_dtype_of_its_rows(kind, dtype):
    of = np.dtype(getattr(ml_dtypes, dtype))
    inputs = {"x": np.arange(ROWS * 3).reshape(ROWS, 3).astype(of)}
    outputs = {"y": np.zeros((ROWS, 3), of), "bits": np.zeros((ROWS, 3), np.int32)}
    memory = () if kind is Served else (np.zeros(64, np.uint8),)
    served = kind("m", echo(dtype), inputs, outputs, *memory, ROWS, CPU)
    served.warm_up()
    with torch.inference_mode():
        served.run(tickets((0, 2), (5, 3)), 5)
    done = [0, 1, 5, 6, 7]
    np.testing.assert_array_equal(outputs["bits"][done], inputs["x"][done].view(f"i{of.itemsize}"))
    doubled = (inputs["x"].astype(np.float32) * 2).astype(of)
    np.testing.assert_array_equal(outputs["y"][done].view(BITS[dtype]), doubled[done].view(BITS[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_and_tensors_share_memory(dtype):
    array = np.array([[1.5, -2.0]]).astype(getattr(ml_dtypes, dtype))
    tensor = tensor_over(array)
    assert tensor.dtype == getattr(torch, dtype) and tensor.float().tolist() == [[1.5, -2.0]]
    again = array_over(tensor)
    again[0, 0] = 3
    assert array.astype(np.float32).tolist() == [[3.0, -2.0]] and again.dtype == array.dtype


class Inverse(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() / x.float() / x.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_fail_alone(dtype):
    spec, of = TensorSpec(dtype), getattr(ml_dtypes, dtype)
    model = ServedModel(Inverse(), {"x": spec}, {"y": TensorSpec(dtype, finite=True)}, lambda n: {"x": np.ones(n, of)})
    with InprocServer({"inverse": model, "ragged": ragged(dtype)}) as server:
        inverse = server.model("inverse")
        assert inverse.infer(np.array([2.0, 4.0]).astype(of)).astype(np.float32).tolist() == [0.5, 0.25]
        with pytest.raises(RowFailed, match="not finite"):
            inverse.infer(np.array([0.0, 4.0]).astype(of))
        rows = [np.array(row).astype(of) for row in ([1.5], [2.0, 4.0])]
        assert [row.tolist() for row in server.model("ragged").infer(rows)] == [[3.0], [4.0, 8.0]]
