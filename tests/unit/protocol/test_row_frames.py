"""Plain rows go into frames and out of them as all rows do, and what does not fit is refused with words."""

import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes

from jurybox.protocol import row_frames
from jurybox.protocol.arena import LOAD, STORE, Columns
from jurybox.protocol.errors import Code, Error
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


OPEN = TensorSpec("int16", (-1, 2, -1), capacity=24)
MIXED = ModelSpec("mixed", {"x": OPEN, "t": TensorSpec("bytes", capacity=4)}, {"y": TensorSpec("float32", ())})


def mixed(x=((1, 2), (2, 3), (0, 5)), lengths=(4, 0, 1)):
    """Three rows of different sizes in the middle of five."""
    made = columns(MIXED)
    made.input_extents["x"][1:4] = x
    made.input_extents["t"][1:4] = [[length] for length in lengths]
    return made


def test_rows_of_any_size_go_without_their_unused_capacity_and_come_back():
    source, target = mixed(), columns(MIXED)
    frames = row_frames.packed(source, "inputs", 1, 3)
    assert [memoryview(frame).nbytes for frame in frames[1::2]] == [2 * (4 + 12 + 0), 5]
    assert row_frames.size(source, "inputs", 1, 3) == 32 + 5
    before = {name: array.copy() for name, array in target.inputs.items()}
    row_frames.unpack(target, "inputs", 0, 3, [memoryview(frame).cast("B") for frame in frames])
    for name, counts in (("x", (4, 12, 0)), ("t", (4, 0, 1))):
        np.testing.assert_array_equal(target.input_extents[name][:3], source.input_extents[name][1:4])
        for row, count in enumerate(counts):
            np.testing.assert_array_equal(target.inputs[name][row, :count], source.inputs[name][row + 1, :count])
            np.testing.assert_array_equal(target.inputs[name][row, count:], before[name][row, count:])
        np.testing.assert_array_equal(target.inputs[name][3:], before[name][3:])


def test_rows_of_fixed_shapes_have_the_size_of_their_frames():
    assert row_frames.size(columns(), "inputs", 1, 3) == 3 * 25
    assert row_frames.size(columns(), "outputs", 0, 1) == 16


@pytest.mark.parametrize(
    ("at", "wrong", "why"),
    [
        (0, np.array([[1, 2], [-1, 3], [0, 5]]), r"input 'x', row 1: sizes \[-1, 3\] came"),
        (0, np.array([[1, 2], [2, 3], [0, 13]]), r"input 'x', row 2: sizes \[0, 13\] came"),
        (0, np.array([[1, 2], [2, 7], [0, 5]]), r"input 'x', row 1: sizes \[2, 7\] came"),
        (0, np.array([[1, 2], [2, 4], [0, 5]]), "input 'x': 32 bytes came, its extents say 20 elements"),
        (0, np.array([[1, 2], [2, 3]]), "extents of 'x': .* bytes came, 3 rows"),
        (1, bytes(31), "input 'x': 31 bytes came, its extents say 16 elements"),
        (2, np.array([[5], [0], [1]]), r"input 't', row 0: sizes \[5\] came"),
        (3, bytes(6), "input 't': 6 bytes came, its extents say 5 elements"),
        (4, b"", "5 frames came for inputs, 4 were expected"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_and_nothing_is_written(at, wrong, why):
    frames = [memoryview(frame).cast("B") for frame in row_frames.packed(mixed(), "inputs", 1, 3)]
    if isinstance(wrong, np.ndarray):
        wrong = wrong.astype(mixed().input_extents["x"].dtype).tobytes()
    frames[at : at + 1] = [memoryview(wrong)]
    target = columns(MIXED)
    before = [array.copy() for array in (*target.inputs.values(), *target.input_extents.values())]
    with pytest.raises(Error, match=why) as caught:
        row_frames.unpack(target, "inputs", 0, 3, frames)
    assert caught.value.code == Code.SPEC_MISMATCH
    for was, array in zip(before, (*target.inputs.values(), *target.input_extents.values()), strict=True):
        np.testing.assert_array_equal(array, was)


def test_reasons_of_failed_rows_come_last_or_alone():
    source, target = columns(), columns()
    source.reasons[1:3] = (
        (np.arange(source.reasons[1:3].size) % 251).astype(np.uint8).reshape(source.reasons[1:3].shape)
    )
    (last,) = row_frames.packed(source, "outputs", 1, 2, failed=True)[1:]
    alone = row_frames.reasons(source, 1, 2)
    np.testing.assert_array_equal(last, alone)
    row_frames.unpack_reasons(target, 3, 2, [memoryview(alone).cast("B")])
    frames = [memoryview(frame).cast("B") for frame in row_frames.packed(source, "outputs", 1, 2, failed=True)]
    row_frames.unpack(target, "outputs", 0, 2, frames, failed=True)
    for at in (3, 0):
        np.testing.assert_array_equal(target.reasons[at : at + 2], source.reasons[1:3])
    for frames in ([], [memoryview(alone).cast("B")] * 2, [memoryview(alone).cast("B")[:-1]]):
        with pytest.raises(Error, match="came") as caught:
            row_frames.unpack_reasons(target, 3, 2, frames)
        assert caught.value.code == Code.SPEC_MISMATCH


@pytest.mark.parametrize(("kind", "flag"), [("inputs", LOAD), ("outputs", STORE)])
@pytest.mark.parametrize("wanted", [False, True])
def test_state_goes_with_the_rows_of_which_one_loads_or_returns_it(kind, flag, wanted):
    spec = ModelSpec("m", PLAIN.inputs, PLAIN.outputs, {"h": TensorSpec("float32", (2,))})
    source, target = columns(spec), columns(spec)
    state = [made.state_in if kind == "inputs" else made.state_out for made in (source, target)]
    for made, value in zip(state, (3, 4), strict=True):
        made["h"][...] = value
    source.sessions["flags"][2] = flag if wanted else (LOAD | STORE) & ~flag
    frames = [memoryview(np.frombuffer(frame, np.uint8)) for frame in row_frames.packed(source, kind, 1, 2)]
    assert len(frames) == (2 + 1 + 1 if kind == "inputs" else 1 + 1)
    row_frames.unpack(target, kind, 3, 2, frames)
    assert (state[1]["h"][3:] == (3 if wanted else 4)).all()
    assert (state[1]["h"][:3] == 4).all()
    came = target.sessions["flags"][3:].tolist()
    assert came == (source.sessions["flags"][1:3].tolist() if kind == "inputs" else [0, 0])
    with pytest.raises(Error, match=f"{len(frames) - 1} frames came for {kind}, {len(frames)} were expected"):
        row_frames.unpack(target, kind, 3, 2, frames[:-1])


ROWS = [b"abc", b"", b"\0" * 300]


def test_byte_strings_come_back_from_their_raw_form():
    joined = row_frames.joined_strings(ROWS)
    assert joined[:7] == b"\3\0\0\0abc"
    assert row_frames.split_strings("t", joined, 3, 300) == ROWS
    assert row_frames.split_strings("t", np.frombuffer(joined, np.uint8), 3, 300) == ROWS
    assert row_frames.split_strings("t", b"", 0, 300) == []


@pytest.mark.parametrize(
    ("data", "n", "most", "why"),
    [
        (row_frames.joined_strings(ROWS), 3, 299, "t, row 2: 300 bytes came, expected at most 299"),
        (row_frames.joined_strings(ROWS)[:-1], 3, 300, "t, row 2: its length says 300 bytes, 299 are left"),
        (row_frames.joined_strings(ROWS) + b"x", 3, 300, "t: 1 bytes came after the last of 3 byte strings"),
        (row_frames.joined_strings(ROWS[:2]) + bytes(3), 3, 300, "t: the data ends before the length of byte string 2"),
        (bytes(11), 3, 300, "t: 3 byte strings were expected, 11 bytes came"),
        (b"x", 0, 300, "t: 1 bytes came after the last of 0"),
    ],
)
def test_byte_strings_whose_lengths_do_not_add_up_are_refused(data, n, most, why):
    with pytest.raises(Error, match=why) as caught:
        row_frames.split_strings("t", data, n, most)
    assert caught.value.code == Code.SPEC_MISMATCH


def test_sizes_come_back_from_their_text():
    sizes, counts = row_frames.extents_of_text("t", row_frames.extents_text([(1, 2), (0, 5)]), OPEN)
    assert (sizes, counts) == ([(1, 2), (0, 5)], [4, 0])
    assert row_frames.extents_of_text("t", "0000000001,2", OPEN) == ([(1, 2)], [4])
    assert len(row_frames.extents_of_text("t", "1,1;" * (row_frames.MOST_ROWS - 1) + "1,1", OPEN)[0]) == 65536


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1,2;3", "t, row 1: extents '3' came, expected 2 whole numbers"),
        ("1,2;", "t, row 1: extents '' came"),
        ("1,-2", "extents '1,-2' came"),
        ("1,\u0662", "expected 2 whole numbers"),
        ("1," + "0" * 9 + "12", "expected 2 whole numbers"),
        ("3,5", r"t, row 0: sizes \[3, 5\] came"),
        (";" * row_frames.MOST_ROWS, "more than 65536 rows"),
        ("1" * 2_000_000, "more than 65536 rows"),
    ],
)
def test_text_that_says_no_sizes_is_refused(text, why):
    with pytest.raises(Error, match=why):
        row_frames.extents_of_text("t", text, OPEN)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1 << 31])
def test_the_head_of_a_field_is_protobufs(size):
    head = row_frames.field_head(0x3A, size)
    assert head[0] == 0x3A
    assert _VarintBytes(size) == head[1:]


def test_no_more_rows_than_the_most_have_sizes_in_a_text(monkeypatch):
    monkeypatch.setattr(row_frames, "MOST_ROWS", 3)
    spec = TensorSpec("uint8", (-1,), capacity=1 << 20)
    assert row_frames.extents_of_text("x", "1;2;3", spec) == ([(1,), (2,), (3,)], [1, 2, 3])
    for text in ("1;2;3;4", "0" * 34):
        with pytest.raises(Error, match="extents of more than 3 rows came"):
            row_frames.extents_of_text("x", text, spec)
    with pytest.raises(Error, match="row 0: extents"):
        row_frames.extents_of_text("x", "0" * 33, spec)
