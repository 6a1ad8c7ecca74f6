"""What robots send is read strictly: arrays whole and exact, anything else refused in bounded memory."""

from __future__ import annotations

import io
import random
import re
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from jurybox.protocol.errors import Code
from jurybox.server.gateway.npy import npy_file
from jurybox.server.gateway.robots.msgpack_arrays import MOST_DEPTH, MOST_ITEMS, Malformed, packb, unpackb

# packb({"observation/state": float64[3], "prompt": "lift", "images": {"top": uint8[2, 2, 3]}, "gain": np.float32(0.5)})
# of openpi-client 0.1.2 with NumPy 1.26.
OPENPI = bytes.fromhex(
    "84b16f62736572766174696f6e2f737461746584c40b5f5f6e6461727261795f5fc3c40464617461c418000000000000f03f000000000000"
    "0040000000000000f8bfc4056474797065a33c6638c40573686170659103a670726f6d7074a46c696674a6696d6167657381a3746f7084c4"
    "0b5f5f6e6461727261795f5fc3c40464617461c40c000102030405060708090a0bc4056474797065a37c7531c405736861706593020203a4"
    "6761696e83c40d5f5f6e7067656e657269635f5fc3c40464617461cb3fe0000000000000c4056474797065a33c6634"
)
NUMBERS = ["|b1", "|u1", "|i1", "<u2", ">i2", "<i4", ">u4", "<i8", "<u8", "<f2", "<f4", ">f4", "<f8", ">f8"]


def array_map(data=b"\0" * 8, dtype="<f8", shape=(1,), **more):
    return raw_map({b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": list(shape)} | more)


def raw_map(value):
    return packb(value)


def test_messages_of_openpis_client_are_read():
    observation = unpackb(OPENPI)
    np.testing.assert_array_equal(observation["observation/state"], [1, 2, -1.5])
    assert observation["observation/state"].dtype == np.float64 and not observation["observation/state"].flags.writeable
    assert observation["prompt"] == "lift" and observation["gain"] == 0.5
    np.testing.assert_array_equal(observation["images"]["top"], np.arange(12, dtype=np.uint8).reshape(2, 2, 3))


@settings(deadline=None, max_examples=40)
@given(npst.arrays(st.sampled_from(NUMBERS), npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
def test_arrays_of_every_dtype_come_back_as_they_were(array):
    back = unpackb(packb({"a": array}))["a"]
    assert back.shape == array.shape and back.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(back, array)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text("abc", max_size=5), inner, max_size=20),
    max_leaves=40,
)


@settings(deadline=None, max_examples=40)
@given(PLAIN)
def test_reader_and_writer_agree_with_the_library(value):
    msgpack = pytest.importorskip("msgpack")
    assert unpackb(packb(value)) == value
    assert unpackb(msgpack.packb(value)) == value
    assert msgpack.unpackb(packb(value)) == value


def test_text_of_numpy_and_single_numbers_are_read():
    sent = {
        "a": np.array("größer"),
        "b": np.array(["x", "yz"]),
        "c": np.float32(0.25),
        "d": np.int64(-3),
        "e": np.bool_(True),
    }
    sent |= {"f": np.str_("lift"), "g": np.str_("")}
    back = unpackb(packb(sent))
    assert back["a"].item() == "größer" and back["b"].tolist() == ["x", "yz"]
    assert (back["c"], back["d"], back["e"], back["f"], back["g"]) == (0.25, -3, True, "lift", "")


@pytest.mark.parametrize("keys", [str, str.encode])
def test_the_markers_of_msgpack_numpy_are_read(keys):
    image = np.arange(6, dtype=np.uint8).reshape(2, 3)
    sent = {"nd": True, "type": "|u1", "kind": b"", "shape": [2, 3], "data": image.tobytes()}
    np.testing.assert_array_equal(unpackb(packb({keys(key): value for key, value in sent.items()})), image)
    number = {"nd": False, "type": "<f4", "data": struct.pack("<f", 0.5)}
    assert unpackb(packb({keys(key): value for key, value in number.items()})) == 0.5
    for kind in (b"V", b"O"):
        with pytest.raises(Malformed):
            unpackb(packb({keys(key): value for key, value in (sent | {"kind": kind}).items()}))


@pytest.mark.parametrize(
    "message",
    [
        array_map(dtype="|O"),
        array_map(dtype="O"),
        array_map(dtype="|V8"),
        array_map(dtype="|S8"),
        array_map(dtype="<M8[s]"),
        array_map(dtype="<c8"),
        array_map(dtype="<c16"),
        array_map(dtype="float64"),
        array_map(dtype="f8"),
        array_map(dtype={"formats": ["O"]}),
        array_map(dtype=["<f8"]),
        array_map(dtype="<f8\n"),
        array_map(dtype="<U0", data=b"", shape=[1 << 40]),
        array_map(dtype="|S0", data=b"", shape=[1 << 40]),
        array_map(shape=[2]),
        array_map(shape=[-1]),
        array_map(shape=[-1, -1]),
        array_map(shape=[True]),
        array_map(shape=[1.0]),
        array_map(shape=[1] * 40),
        array_map(shape=[0, 1 << 30, 1 << 30, 1 << 30], data=b""),
        array_map(shape=[0, 1 << 62], data=b""),
        array_map(data=b"\0" * 9),
        array_map(data="x" * 8),
        array_map(dtype="<U2", data=b"\xff" * 8),
        array_map(dtype="<U2", data=b"\x00\xd8\x00\x00" * 2),
        array_map(dtype="|b1", data=b"\x02"),
        raw_map({b"__ndarray__": 1, b"data": b"\0" * 8, b"dtype": "<f8", b"shape": [1]}),
        raw_map({b"__ndarray__": True, b"data": b"\0" * 8}),
        raw_map({b"__npgeneric__": True, b"data": 1 << 28, b"dtype": "|V8"}),
        raw_map({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}),
        raw_map({b"__npgeneric__": True, b"data": "1", b"dtype": "<f4"}),
        raw_map({b"__npgeneric__": True, b"data": 1.5, b"dtype": "<i4"}),
        raw_map({b"data": 1}),
        raw_map({1: 2}),
        raw_map({None: 2}),
        b"\x82\xa1a\x01\xa1a\x02",  # a key twice
        b"",
        b"\xc1",
        b"\xd4\x01\x00",  # an extension
        b"\xc7\x00\x01",
        b"\x01\x01",  # something follows
        b"\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * (MOST_DEPTH + 1) + b"\xc0",
        b"\x91" * 1_000_000 + b"\xc0",
        b"\xdd" + (MOST_ITEMS + 1).to_bytes(4, "big") + b"\xc0" * (MOST_ITEMS + 1),
    ],
)
def test_all_other_input_is_refused(message):
    with pytest.raises(Malformed) as refused:
        unpackb(message)
    assert refused.value.code == Code.MALFORMED and len(str(refused.value)) < 500


def test_a_small_message_never_becomes_a_large_one():
    many = b"\xdc\x03\xe8" * 9 + b"\x90" * 10_000
    tracemalloc.start()
    try:
        for message in (many, b"\xdd\x00\x00\x27\x0f" * 8 + b"\xc0" * 40_000, b"\xdc\xff\xff" + b"\x90" * 65535):
            with pytest.raises(Malformed):
                unpackb(message)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_mutated_and_random_bytes_are_read_or_refused_and_nothing_else():
    dice = random.Random(0)
    whole = bytearray(OPENPI)
    read = 0
    for _ in range(3_000):
        bytes_ = bytearray(whole)
        for _ in range(dice.randrange(1, 5)):
            bytes_[dice.randrange(len(bytes_))] = dice.randrange(256)
        message = bytes(bytes_[: dice.randrange(1, len(bytes_) + 1)] if dice.random() < 0.3 else bytes_)
        if dice.random() < 0.1:
            message = dice.randbytes(dice.randrange(1, 60))
        try:
            unpackb(message)
            read += 1
        except Malformed:
            pass
    assert 0 < read < 3_000


@pytest.mark.parametrize(
    "value", [np.array([None]), np.array([1j]), np.zeros(2, "V4"), np.array(["x"], "S1"), object(), {1, 2}]
)
def test_values_that_cannot_be_read_are_not_written(value):
    with pytest.raises(TypeError):
        packb(value)


def test_a_message_may_have_as_many_values_as_the_limit_and_no_more():
    """Also where no list alone has too many."""
    for more in (0, 1):
        message = packb([[0] * (MOST_ITEMS // 2 - 2), [0] * (MOST_ITEMS // 2 - 1 + more)])
        if not more:
            assert sum(map(len, unpackb(message))) == MOST_ITEMS - 3
            continue
        with pytest.raises(Malformed, match=f"a message has more than {MOST_ITEMS} values: send numbers in arrays"):
            unpackb(message)
    with pytest.raises(Malformed, match=f"a list or map of {MOST_ITEMS + 2} values at byte 3: the message has no room"):
        unpackb(b"\xde" + (MOST_ITEMS // 2 + 1).to_bytes(2, "big") + b"\xa1a\xc0" * MOST_ITEMS)


@pytest.mark.parametrize(
    ("level", "end"),
    [(b"\x91", b"\xc0"), (b"\xdc\0\1", b"\xc0"), (b"\x81\xa1a", b"\xc0"), (b"\xde\0\1\xa1a", b"\xc0")],
    ids=["list", "long list", "map", "long map"],
)
def test_maps_and_lists_may_be_as_deep_as_the_limit_and_no_deeper(level, end):
    unpackb(level * MOST_DEPTH + end)
    with pytest.raises(Malformed, match=f"maps and lists are nested deeper than {MOST_DEPTH}"):
        unpackb(level * (MOST_DEPTH + 1) + end)


@pytest.mark.parametrize("size", [0, 15, 16, 31, 32, 255, 256, 65535, 65536])
@pytest.mark.parametrize("make", [str.encode, str, list, lambda text: {str(i): None for i in range(len(text))}])
def test_heads_are_written_in_the_shortest_form(size, make):
    msgpack = pytest.importorskip("msgpack")
    value = make("x" * size)
    assert packb(value) == msgpack.packb(value)


@pytest.mark.parametrize("number", [-(1 << 63), -33, -32, -1, 0, 127, 128, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_numbers_of_up_to_64_bits_are_written_and_read(number):
    assert unpackb(packb(number)) == number
    assert (len(packb(number)) == 1) is (-32 <= number < 128)


@pytest.mark.parametrize("number", [-(1 << 63) - 1, 1 << 64])
def test_numbers_of_more_bits_are_not_written(number):
    with pytest.raises(OverflowError, match=f"{number} has more than 64 bits"):
        packb(number)


@pytest.mark.parametrize(
    ("shape", "data", "fits"),
    [
        ([1] * 16, b"\0", True),
        ([1] * 17, b"\0", False),
        ([0, (1 << 31) - 1], b"", True),
        ([0, 1 << 31], b"", False),
        ([], b"\0", True),
        ("1", b"\0", False),
    ],
)
def test_an_array_has_up_to_16_axes_of_up_to_31_bits(shape, data, fits):
    message = raw_map({b"__ndarray__": True, b"data": data, b"dtype": "|u1", b"shape": shape})
    if fits:
        assert list(unpackb(message).shape) == shape
    else:
        with pytest.raises(Malformed, match="expected a list of at most 16 sizes of 0 and more"):
            unpackb(message)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize(
    ("character", "valid"),
    [(0, True), (0xD7FF, True), (0xD800, False), (0xDFFF, False), (0xE000, True), (0x10FFFF, True), (0x110000, False)],
)
def test_arrays_of_text_have_only_characters_of_unicode(order, character, valid):
    data = struct.pack(f"{order}2I", 0x61, character)
    message = array_map(data=data, dtype=f"{order}U1", shape=[2])
    if valid:
        assert unpackb(message).tolist() == ["a", chr(character) if character else ""]
    else:
        with pytest.raises(Malformed, match="an array of text has an invalid Unicode character"):
            unpackb(message)


@pytest.mark.parametrize(
    ("dtype", "value", "fits"),
    [
        ("|b1", True, True), ("|b1", 1, False),
        ("<U4", "lift", True), ("<U4", 1, False),
        ("<f4", 1, True), ("<f4", 0.5, True), ("<f4", True, False), ("<f4", "1", False),
        ("|i1", 127, True), ("|i1", 128, False), ("|i1", -128, True), ("|i1", -129, False),
        ("|u1", 0, True), ("|u1", -1, False), ("|u1", True, False), ("|u1", 1.0, False),
    ],
)  # fmt: skip
def test_a_single_number_fits_its_dtype(dtype, value, fits):
    message = raw_map({b"__npgeneric__": True, b"data": value, b"dtype": dtype})
    if fits:
        assert unpackb(message) == value
    else:
        with pytest.raises(Malformed, match=re.escape(f"of dtype {dtype}: the value {value!r} does not fit")):
            unpackb(message)


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros(0), np.zeros(3, ">f4"), np.asfortranarray(np.ones((2, 3)))])
@pytest.mark.parametrize("npy", [False, True])
def test_arrays_cannot_be_changed_unless_they_were_copied(array, npy):
    """The bytes of a message, which others may hold, are those of its arrays."""
    sent = {"__ndarray_class__": True, "as_npy": npy_file(array)} if npy else array
    found = unpackb(bytearray(packb({"x": sent})))["x"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype.isnative and found.flags.writeable is not array.dtype.isnative


def npy_saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_a_file_in_fortrans_order_cannot_be_changed_either():
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    found = unpackb(bytearray(packb({"x": {"__ndarray_class__": True, "as_npy": npy_saved(array)}})))["x"]
    np.testing.assert_array_equal(found, array)
    assert not found.flags.writeable


@pytest.mark.parametrize("kind", [None, "", b""])
def test_an_array_of_msgpack_numpy_may_name_an_empty_kind(kind):
    sent = {"nd": True, "type": "|u1", "kind": kind, "shape": [2], "data": b"\1\2"}
    assert unpackb(packb(sent)).tolist() == [1, 2]


WHOLE = {"__ndarray__": True, "data": b"\0" * 8, "dtype": "<f8", "shape": [1]}
NPY = {"__ndarray_class__": True, "as_npy": npy_file(np.zeros(2))}


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (WHOLE | {"shape": "x" * 99}, "shape 'x+ ... of an array: expected"),
        (WHOLE | {"shape": {"a": 1}}, "shape dict of an array: expected"),
        (WHOLE | {"shape": 7}, "shape 7 of an array: expected"),
        (WHOLE | {"shape": None}, "shape None of an array: expected"),
        (WHOLE | {"dtype": b"|O"}, r"dtype '\|O': expected numbers, bool or text"),
        (WHOLE | {"dtype": ["<f8"]}, "dtype list: expected numbers, bool or text"),
        (WHOLE | {"data": b"\0" * 9}, r"<f8 of shape \[1\] needs 8 bytes: came 9 bytes"),
        (WHOLE | {"data": "x" * 8}, r"<f8 of shape \[1\] needs 8 bytes: came str"),
        (
            {"__ndarray__": True, "data": b""},
            "an array with the keys __ndarray__, data: expected data, dtype and shape",
        ),
        (WHOLE | {"__ndarray__": 1}, "an array with the keys __ndarray__, data, dtype, shape: expected"),
        ({"__npgeneric__": True, "data": 1}, "a NumPy number with the keys __npgeneric__, data: expected"),
        ({"__npgeneric__": 1, "data": 1, "dtype": "<i4"}, "a NumPy number with the keys __npgeneric__, data, dtype"),
        ({"nd": True, "type": "|u1"}, "an array with the keys nd, type: expected data, type and shape"),
        ({"nd": False, "type": "|u1"}, "an array with the keys nd, type: expected nd, type and data"),
        ({"nd": 1, "type": "|u1", "data": b"\0", "shape": []}, "an array with the keys .*: expected nd, type and data"),
        ({"nd": True, "type": "|u1", "kind": "V", "data": b"", "shape": [0]}, "structured or an object dtype"),
        ({"nd": True, "type": "|u1", "kind": 0, "data": b"", "shape": [0]}, "structured or an object dtype"),
        (NPY | {"__ndarray_class__": False}, "an array with the keys __ndarray_class__, as_npy: expected as_npy"),
        (NPY | {"as_npy": "text"}, "an array with the keys __ndarray_class__, as_npy: expected as_npy, a .npy file"),
        ({"__ndarray_class__": True}, "an array with the keys __ndarray_class__: expected as_npy"),
        (NPY | {"as_npy": b"no file"}, "npy"),
        ({b"a": 1}, r"keys of bytes in a map that is not an array \(a\): expected text"),
        ({7: 1}, "a key of int before byte 2: expected text"),
    ],
)
def test_what_is_wrong_with_an_array_or_map_is_said(sent, why):
    with pytest.raises(Malformed, match=f"(?i){why}"):
        unpackb(packb(sent))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"\xc0\xc0\xc0", "2 bytes follow the message: expected none"),
        (b"\xcd\0", "the message ends at 2 bytes, inside a value: expected 3"),
        (b"\xc1", "byte 0xc1 at 0: expected a number"),
        (b"\x92\xc0", "a list or map of 2 values at byte 1: the message has no room"),
        (b"\x81\xc0", "a list or map of 2 values at byte 1: the message has no room"),
        (b"\xa2\xff\xff", "text before byte 3 is not UTF-8: invalid start byte"),
    ],
)
def test_what_is_wrong_with_a_message_is_said_with_the_place(message, why):
    with pytest.raises(Malformed, match=why):
        unpackb(message)


def test_bytes_that_are_no_array_are_copied_out_of_the_message():
    message = bytearray(packb([b"ab", {"x": b"cd"}]))
    found = unpackb(message)
    message[:] = bytes(len(message))
    assert found == [b"ab", {"x": b"cd"}]
    assert unpackb(packb(b"ef")) == b"ef" and type(unpackb(packb(b"ef"))) is bytes


@pytest.mark.parametrize("value", [bytearray(b"ab"), memoryview(b"ab"), memoryview(np.frombuffer(b"ab", np.uint16))])
def test_bytes_are_written_whatever_holds_them(value):
    assert packb(value) == packb(b"ab")
