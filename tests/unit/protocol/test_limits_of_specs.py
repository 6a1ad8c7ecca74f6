"""The smallest and the largest rows of a spec, and what a model's message tells of it."""

from __future__ import annotations

from typing import Any

import pytest

from jurybox.client.link import spec_of
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.control_pb2 import ModelMessage
from jurybox.protocol.spec import tell_spec

NUMBER = TensorSpec("float32")


def test_a_row_may_have_one_element_and_as_many_as_two_to_the_31() -> None:
    assert TensorSpec("bytes", capacity=1).elements == TensorSpec("uint8", (-1,), capacity=1).elements == 1
    assert TensorSpec("uint8", (2**31,)).elements == TensorSpec("uint8", (-1,), capacity=2**31).elements == 2**31
    for wrong in ({"shape": (2**31 + 1,)}, {"shape": (-1,), "capacity": 2**31 + 1}, {"shape": (-1,), "capacity": 0}):
        with pytest.raises(ValueError, match="elements"):
            TensorSpec("uint8", **wrong)  # type: ignore[arg-type]


def test_a_byte_string_may_be_empty_and_no_longer_than_its_capacity() -> None:
    text = TensorSpec("bytes", capacity=3)
    assert [text.extents_of(shape) for shape in ((0,), (3,), (4,), (), (1, 1))] == [(0,), (3,), None, None, None]


@pytest.mark.parametrize("name", [5, None, b"x", ""])
@pytest.mark.parametrize("place", ["inputs", "outputs", "state"])
def test_a_tensors_name_is_text(name: Any, place: str) -> None:
    given: dict[str, Any] = {"inputs": {"x": NUMBER}, "outputs": {"y": NUMBER}}
    with pytest.raises(ValueError, match="model 'm' names a tensor .*: expected text of 1 to"):
        ModelSpec("m", **{**given, place: {name: NUMBER}})


def test_a_message_tells_all_of_a_spec_also_that_numbers_are_to_be_finite() -> None:
    finite = TensorSpec("float32", (2,), finite=True)
    spec = ModelSpec("m", {"x": finite, "t": TensorSpec("bytes", capacity=3)}, {"y": finite}, {"h": finite})
    message = ModelMessage(name="m")
    tell_spec(message, spec)
    assert spec_of(message) == spec
    assert all(one.finite for one in (*message.outputs, *message.session_state))
