"""Tensors in pickles of robots: read as NumPy arrays with their values, or refused by name; nothing is imported."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from jurybox.server.gateway.dialects import torch_pickles
from jurybox.server.gateway.dialects.pickles import NotPlain, loads
from jurybox.server.gateway.dialects.torch_pickles import TENSORS

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip


def read(value, protocol=4):
    return loads(pickle.dumps(value, protocol), names=TENSORS)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_and_layout_is_read_with_its_values(dtype, protocol):
    whole = (torch.arange(24) % 7).to(dtype).reshape(2, 3, 4)
    for tensor in (
        whole,
        whole[1],
        whole.permute(2, 0, 1),
        whole[:, ::2, 1:],
        whole[0, 0, 0],
        whole[0:1].expand(3, 3, 4)[:1],
    ):
        found = read({"image": tensor, "n": 3}, protocol)
        wanted = tensor.float().numpy() if dtype is torch.bfloat16 else tensor.numpy()
        assert found["n"] == 3 and found["image"].dtype == wanted.dtype and found["image"].shape == wanted.shape
        np.testing.assert_array_equal(found["image"], wanted)


def test_tensors_with_a_gradient_and_empty_ones_are_read():
    assert read(torch.ones(2, requires_grad=True)).tolist() == [1.0, 1.0]
    assert read(torch.empty(0)).shape == (0,)
    both = read([torch.arange(300.0), torch.arange(5)])
    assert (both[0][299], both[1][4]) == (299.0, 4)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.zeros(2, 0), "an empty tensor of several sizes"),
        (torch.zeros(1).expand(1000), "1000 elements in a storage of 1"),
        (torch.zeros(1, 1, 1, 1, 1, 1), "a tensor of 6 sizes: expected at most 5"),
        (torch.zeros(2, dtype=torch.complex64), "torch.ComplexFloatStorage: expected numbers or bool"),
        (torch.nn.Parameter(torch.zeros(2)), "names torch._utils._rebuild_parameter: refused"),
        (torch.float32, "names torch.float32: refused"),
    ],
    ids=["empty", "expanded", "six sizes", "complex", "parameter", "dtype"],
)
def test_what_is_no_plain_tensor_is_refused_by_name(value, why):
    with pytest.raises(NotPlain, match=why.replace("(", r"\(")):
        read(value)


def test_tensors_are_refused_where_they_were_not_asked_for():
    with pytest.raises(NotPlain, match=r"names torch\._utils\._rebuild_tensor_v2: refused"):
        loads(pickle.dumps(torch.zeros(2)))


def test_changed_bytes_give_a_tensor_of_what_is_there_or_a_refusal():
    good, dice = pickle.dumps({"a": torch.arange(12).reshape(3, 4)[:, 1:]}), random.Random(5)
    read_at_all = 0
    for _ in range(5000):
        bad = bytearray(good)
        for _ in range(dice.randint(1, 3)):
            bad[dice.randrange(len(bad))] = dice.randrange(256)
        try:
            found = loads(bytes(bad), names=TENSORS)
        except NotPlain:
            continue
        read_at_all += 1
        if isinstance(found, dict) and isinstance(found.get("a"), np.ndarray):
            assert found["a"].size <= 12 and found["a"].nbytes <= len(good)
    assert read_at_all


def test_no_torch_is_imported():
    code = (
        "import sys; from jurybox.server.gateway.dialects.pickles import loads; "
        "from jurybox.server.gateway.dialects.torch_pickles import TENSORS; "
        "assert loads(sys.stdin.buffer.read(), names=TENSORS).tolist() == [0, 1]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(torch.arange(2)), check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_whose_bytes_are_not_its_elements_is_refused():
    (data,) = torch.arange(3.0).storage().__reduce__()[1]
    assert torch_pickles._storage(data).elements.tolist() == [0, 1, 2]
    at = len(data) - 12 - 8
    for wrong in (
        data[:-1],
        data[:-4],
        data + b"x",
        data[:at],
        data[: at + 7],
        data[:at] + b"\xff" * 8 + data[at + 8 :],
    ):
        with pytest.raises(NotPlain, match="elements in"):
            torch_pickles._storage(wrong)
    for wrong in (b"", b"\x80\x02", bytearray(data)):
        with pytest.raises(NotPlain):
            torch_pickles._storage(wrong)
