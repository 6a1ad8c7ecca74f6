"""What robots send is read strictly: arrays whole and exact, anything else refused in bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from jurybox.protocol.errors import Code
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
