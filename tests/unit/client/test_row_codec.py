"""Inputs are checked before anything is sent: errors name the row and the input, and say what to do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from jurybox.client import SpecMismatch
from jurybox.client.juror_rows import fitted
from jurybox.client.row_codec import codec_of
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.server.gateway.inference.tensors import TypedData
from jurybox.server.gateway.robots.observations import _texts
from jurybox.server.inproc import InprocServer
from tests import open_models

HALF = "half \ud800 a pair"
TEXT = TensorSpec("bytes", capacity=40)
WHAT_TO_DO = r"'text'.*'\\ud800' at character 5, half a surrogate pair.*errors='replace'.*bytes"


def test_half_a_surrogate_pair_is_refused_by_row_and_input_whichever_way_it_comes():
    spec = ModelSpec("shout", {"text": TEXT}, {"text": TEXT})
    with pytest.raises(SpecMismatch, match="'text' of 'shout', row 1: .*character 5"):
        codec_of(spec).checked(["fine", HALF])
    with InprocServer({"shout": open_models.shout()}) as server:
        model = server.model("shout")
        for ask in (model, lambda text: model.infer([text]), lambda text: model({"text": text})):
            with pytest.raises(SpecMismatch, match=WHAT_TO_DO):
                ask(HALF)
        assert model("größer") == "GRÖSSER".encode()


def test_half_a_surrogate_pair_is_no_observation_no_reward_and_no_request_either():
    """If a text were changed before it is sent, the answer would be that of another text."""
    with pytest.raises(SpecMismatch, match=WHAT_TO_DO):
        fitted("text", TEXT, HALF)
    with pytest.raises(SpecMismatch, match=WHAT_TO_DO):
        _texts("text", TEXT, np.array(HALF), 1)
    with pytest.raises(SpecMismatch, match=WHAT_TO_DO):
        TypedData("text", [HALF]).strings(1, TEXT)


def test_a_row_of_another_dtype_or_shape_is_refused_with_what_would_fit():
    spec = ModelSpec("pair", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32")})
    codec = codec_of(spec)
    with pytest.raises(SpecMismatch, match=r"convert it on purpose: array.astype\('float32'\)"):
        codec.one(np.zeros(2))
    with pytest.raises(SpecMismatch, match=r"for several rows call infer\(\): here 3") as several:
        codec.one(np.zeros((3, 2), np.float32))
    assert "astype" not in str(several.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (np.zeros(2, np.float32), "for a single row call the model itself, or add an axis: array[None]"),
        (np.zeros((3, 2)), "convert it on purpose: array.astype('float32')"),
        (np.zeros((3, 4), np.float32), ""),
        (np.zeros((3, 4)), ""),
    ],
)
def test_rows_of_another_dtype_or_shape_are_refused_with_what_may_have_been_meant(given, meant):
    spec = ModelSpec("pair", {"x": TensorSpec("float32", (2,))}, {"y": TensorSpec("float32")})
    with pytest.raises(SpecMismatch) as refused:
        codec_of(spec).checked(given)
    assert str(refused.value).partition("; ")[2] == meant


def test_inputs_that_have_no_names_are_refused_with_what_the_model_takes():
    one, two = TensorSpec("float32", (2,)), TensorSpec("uint8")
    spec = ModelSpec("pair", {"x": one, "k": two}, {"y": one})
    with pytest.raises(SpecMismatch) as refused:
        codec_of(spec).checked(np.zeros((1, 2), np.float32))
    said = str(refused.value)
    assert f"'pair' takes x {one}, k {two} -> y {one}: give a dict with an array for each" in said


def test_a_reward_takes_tensors_in_bfloat16_which_numpy_does_not_have():
    given = torch.tensor([[0.5, 1.0], [1.5, 2.0]], dtype=torch.bfloat16, requires_grad=True)
    np.testing.assert_array_equal(fitted("latent", TensorSpec("float32", (2, 2)), given), [[0.5, 1.0], [1.5, 2.0]])


@pytest.mark.parametrize(
    ("dtype", "given", "value"),
    [
        ("uint8", np.full((64, 64, 3), 300, np.uint16), "300"),
        ("int32", np.array([1, 2**40]), "1099511627776"),
        ("int64", np.uint64(2**63), "9223372036854775808"),
        ("int8", np.array([-3, 200], np.int16), "200"),
        ("float32", np.array([np.nan, 1e300]), "1e\\+300"),
        ("float16", 70_000, "70000"),
    ],
)
def test_a_reward_is_not_of_a_number_that_the_models_dtype_cannot_hold(dtype, given, value):
    spec = TensorSpec(dtype, np.shape(given))
    with pytest.raises(SpecMismatch, match=rf"^image is .* has the value {value}, .*{dtype} cannot hold"):
        fitted("image", spec, given)


@pytest.mark.parametrize(
    ("dtype", "value", "reason"),
    [
        ("uint8", 300, "the value 300 does not fit UINT8"),
        ("uint8", -1, "the value -1 does not fit UINT8"),
        ("int8", -129, "the value -129 does not fit INT8"),
        ("int32", 2**31, "the value 2147483648 does not fit INT32"),
        ("uint64", -1, "value .*does not fit UINT64"),
        ("float32", 1e39, r"the value 1e\+39 does not fit FP32"),
    ],
)
def test_a_typed_value_that_the_models_dtype_cannot_hold_is_refused_with_every_numpy(dtype, value, reason):
    with pytest.raises(SpecMismatch, match=f"input 'x': .*{reason}"):
        TypedData("x", [0, value]).elements((2,), TensorSpec(dtype))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32", "int64", "uint64"])
def test_a_typed_value_may_be_every_number_that_the_models_dtype_holds(dtype):
    ends = [int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)]
    array = TypedData("x", [ends]).elements((1, 2), TensorSpec(dtype, (2,)))
    assert array.dtype == dtype and array.tolist() == [ends]


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_a_reward_is_not_of_a_picture_that_would_be_clipped_to_bytes(mode):
    picture = Image.new(mode, (4, 3))
    with pytest.raises(SpecMismatch, match=f"image is a picture of mode '{mode}', expected 8 bits a channel"):
        fitted("image", TensorSpec("uint8", (3, 4, 3)), picture)
    assert fitted("image", TensorSpec("uint8", (3, 4, 3)), Image.new("L", (4, 3), 7)).tolist() == [[[7] * 3] * 4] * 3


def test_a_reward_is_of_every_number_that_the_models_dtype_holds():
    for dtype, given in (
        ("uint8", np.array([0, 255], np.uint16)),
        ("int32", np.array([-(2**31), 2**31 - 1])),
        ("int8", np.uint8(127)),
        ("float32", np.array([np.nan, np.inf, -np.inf, 0.1])),
        ("float32", np.array([True, False])),
    ):
        row = fitted("image", TensorSpec(dtype, np.shape(given)), given)
        assert row.dtype == dtype
        np.testing.assert_array_equal(row, np.asarray(given).astype(dtype))
