"""Plain rows go into frames and out of them as all rows do, and what does not fit is refused with words."""

import numpy as np
import pytest

from jurybox.protocol import row_frames
from jurybox.protocol.arena import Columns
from jurybox.protocol.errors import Error
from jurybox.protocol.spec import ModelSpec, TensorSpec

PLAIN = ModelSpec(
    "plain",
    {"x": TensorSpec("float32", (3, 2)), "k": TensorSpec("uint8", ())},
    {"y": TensorSpec("float64", (2,))},
)


def columns(spec=PLAIN, rows=5):
    made = Columns.here(spec, rows)
    for number, array in enumerate((*made.inputs.values(), *made.outputs.values())):
        array[...] = (np.arange(array.size) + number).reshape(array.shape)
    return made


def test_plain_rows_have_the_frames_of_all_rows():
    made = columns()
    plain = row_frames.PlainFrames(made, "inputs")
    assert plain
    assert plain.row_bytes == 25
    assert plain.copies(1, 3) == [
        bytes(np.ascontiguousarray(frame)) for frame in row_frames.packed(made, "inputs", 1, 3)
    ]


def test_plain_rows_are_written_only_to_their_places():
    source, target = columns(), columns()
    for array in target.inputs.values():
        array[...] = 0
    row_frames.PlainFrames(target, "inputs").write(2, 2, row_frames.PlainFrames(source, "inputs").copies(0, 2))
    for name, array in target.inputs.items():
        np.testing.assert_array_equal(array[2:4], source.inputs[name][:2])
        assert not array[[0, 1, 4]].any()


@pytest.mark.parametrize("frames", [[bytes(48)], [bytes(48), bytes(3)], [bytes(47), bytes(2)], [bytes(48), b"", b""]])
def test_frames_that_do_not_fit_are_refused_and_nothing_is_written(frames):
    made = columns()
    before = made.inputs["x"].copy()
    with pytest.raises(Error, match="came"):
        row_frames.PlainFrames(made, "inputs").write(0, 2, frames)
    np.testing.assert_array_equal(made.inputs["x"], before)


def test_rows_of_any_size_are_not_plain():
    spec = ModelSpec("open", {"x": TensorSpec("uint8", (-1,), capacity=8)}, {"y": TensorSpec("float32", ())})
    assert not row_frames.PlainFrames(columns(spec), "inputs")
    assert row_frames.PlainFrames(columns(spec), "outputs")
