"""Layout, extra and channel: what they accept, keep, and refuse."""

from __future__ import annotations

import contextlib
import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurybox.protocol.dtypes import numpy_dtype
from jurybox.protocol.errors import ProtocolMismatch, SharedMemoryError, SpecMismatch
from jurybox.protocol.weights import WeightsChannel, WeightsLayout, widen
from jurybox.protocol.weights.channel import decode_extra, encode_extra
from jurybox.protocol.weights.layout import DTYPES
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader


def test_a_layout_survives_json_and_different_layouts_have_different_hashes(arrays):
    layout = WeightsLayout.of(arrays)
    again = WeightsLayout.from_json(layout.to_json())
    assert again == layout and again.places == layout.places
    for other in (
        WeightsLayout.of({**arrays, "steps": np.array(7, np.int32)}),
        WeightsLayout.of({**arrays, "mask": np.zeros(4, bool)}),
        WeightsLayout.of({("renamed" if name == "mask" else name): value for name, value in arrays.items()}),
    ):
        assert other.hash != layout.hash


def test_tensors_lie_on_cache_lines_and_don_t_overlap(arrays):
    end = 0
    for place in WeightsLayout.of(arrays).places.values():
        assert place.offset % 64 == 0 and place.offset >= end
        end = place.offset + place.nbytes
    assert end <= WeightsLayout.of(arrays).nbytes


def test_a_difference_names_what_is_missing_what_came_and_what_changed(arrays):
    layout = WeightsLayout.of(arrays)
    other = dict(arrays, mask=np.zeros(9, bool), new=np.zeros(2, np.uint8))
    del other["steps"]
    said = layout.difference(WeightsLayout.of(other))
    assert "'steps' is missing" in said and "'new' came" in said
    assert "'mask': expected bool[3], got bool[9]" in said
    assert layout.difference(WeightsLayout.of(dict(reversed(arrays.items())))) == ""


def test_dtypes_that_cannot_be_carried_and_empty_layouts_are_refused():
    with pytest.raises(SpecMismatch, match="expected one of bool"):
        WeightsLayout.of({"names": np.array(["a"])})
    with pytest.raises(SpecMismatch, match="at least one tensor"):
        WeightsLayout([])
    with pytest.raises(ProtocolMismatch, match="expected a weights layout"):
        WeightsLayout.from_json(b"[[1,2]]")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text().filter(lambda key: key != "__array__"), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text().filter(lambda key: key != "__array__"), json_values))
def test_any_json_comes_back_from_the_extra(extra):
    assert decode_extra(encode_extra(extra)) == extra


def test_arrays_come_back_from_the_extra_wherever_they_are():
    extra = {"a": np.arange(3, dtype=np.int8), "deep": [{"b": np.eye(2)}, (1, np.float32(0.5))], "n": np.int64(4)}
    got = decode_extra(encode_extra(extra))
    np.testing.assert_array_equal(got["a"], extra["a"])
    assert got["a"].dtype == np.int8 and got["a"].flags.writeable
    np.testing.assert_array_equal(got["deep"][0]["b"], np.eye(2))
    assert got["deep"][1] == [1, 0.5] and got["n"] == 4


@pytest.mark.parametrize("bad", [{"x": {1: 2}}, {"x": {"__array__": 1}}, {"x": object()}, {"x": np.array([object()])}])
def test_values_outside_json_are_refused_with_their_place(bad):
    with pytest.raises(SpecMismatch, match=r"extra\['x'\]"):
        encode_extra(bad)


@given(st.binary(min_size=1, max_size=64))
def test_bytes_that_are_no_extra_give_an_error_and_no_crash(data):
    with contextlib.suppress(ProtocolMismatch):
        decode_extra(data)


def raw_extra(text: str, tail: bytes = b"") -> bytes:
    return struct.pack("<I", len(text)) + text.encode() + tail


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def in_itself() -> dict:
    value: dict = {}
    value["again"] = {"x": [value]}
    return value


@pytest.mark.parametrize(
    "bad", [deep(100), deep(100_000), in_itself(), 10**5000], ids=["deep", "abyss", "ring", "long"]
)
def test_an_extra_that_no_reader_could_unpack_is_refused_to_its_publisher(bad):
    with pytest.raises(SpecMismatch, match=r"extra"):
        encode_extra({"x": bad})


@pytest.mark.parametrize(
    "data",
    [
        raw_extra('{"x": ' + "[" * 100 + "]" * 100 + "}"),
        raw_extra('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        raw_extra('{"x": ' * 100_000 + "1" + "}" * 100_000),
        raw_extra('{"x": ' + "9" * 5000 + "}"),
        raw_extra("[]"),
        raw_extra("7"),
        *(
            raw_extra('{"x": {"__array__": ' + array + "}}", bytes(64))
            for array in (
                '["(((", [1], 0]',
                '["O", [1], 0]',
                '["<f4,<f4", [1], 0]',
                '["(9999999,9999999)f8", [1], 0]',
                '["<f4", [-1], 0]',
                '["<f4", [-2, -2], 0]',
                '["<f4", [1.5], 0]',
                '["<f4", [true], 0]',
                '["<f4", [4611686018427387904, 4611686018427387904], 0]',
                '["<f4", [1], -8]',
                '["<f4", [1], 1e400]',
                '["<f4", [17], 0]',
                '["<f4", ' + "[" * 70 + "]" * 70 + ", 0]",
                '["<f4", [1]]',
                "null",
                "{}",
            )
        ),
        raw_extra('{"x": {"__array__": ["|u1", [64], 0]}, "y": {"__array__": ["|u1", [64], 0]}}', bytes(64)),
    ],
)
def test_hostile_bytes_raise_the_documented_error(data):
    with pytest.raises(ProtocolMismatch, match="expected an extra"):
        decode_extra(data)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'[["w", "float32", [1e400]]]',
        b'[["w", "float32", [NaN]]]',
        b'[["w", "float32", ' + b"[" + b"1," * 65 + b"1]]]",
        b'[["w", "float32", [9223372036854775807, 9]]]',
        b'[["w", "float32", [' + b"9" * 5000 + b"]]]",
        b'{"w": 1}',
        b"null",
        b"\xff",
    ],
)
def test_a_hostile_layout_raises_the_documented_error(text):
    with pytest.raises(ProtocolMismatch, match="expected a weights layout"):
        WeightsLayout.from_json(text)


@pytest.mark.parametrize("mode", ["double_buffer", "snapshot"])
def test_an_attached_channel_has_the_creator_s_layout_mode_and_room(make, mode):
    channel = make(mode=mode, extra_bytes=1000)
    with WeightsChannel.attach(channel.name) as attached:
        assert attached.layout == channel.layout and attached.mode == mode
        assert attached.extra_bytes == channel.extra_bytes >= 1000 and attached.newest == 0


def test_snapshot_needs_half_the_memory(make):
    arrays = {"w": np.zeros(2**20, np.uint8)}
    double, single = make(arrays), make(arrays, mode="snapshot")
    assert double.segment.size - single.segment.size == pytest.approx(2**20, rel=0.1)


def test_a_channel_that_does_not_fit_shared_memory_is_refused_with_the_remedy(name):
    stat = os.statvfs("/dev/shm")
    huge = WeightsLayout([("w", "uint8", (stat.f_blocks * stat.f_frsize,))])
    with pytest.raises(SharedMemoryError, match=r"\(2 x .* is full.*enlarge it .*snapshot"):
        WeightsChannel.create(name, huge)


def test_an_invalid_channel_is_not_attached(make):
    channel = make()
    with pytest.raises(SharedMemoryError, match="cannot be opened"):
        WeightsChannel.attach(channel.name + "-missing")
    head = bytes(channel.segment.buffer[:80])
    for offset, value, complaint in [(0, b"xxxxxxxx", "no weights channel"), (8, struct.pack("<I", 9), "version 9")]:
        channel.segment.buffer[offset : offset + len(value)] = value
        with pytest.raises(ProtocolMismatch, match=complaint):
            WeightsChannel.attach(channel.name)
        channel.segment.buffer[:80] = head
    for offset in (12, 16, 24, 32, 40, 48, 60):  # each of the other words of the head, and the hash
        channel.segment.buffer[offset] ^= 0x5A
        with pytest.raises(ProtocolMismatch, match=r"damaged|layout"):
            WeightsChannel.attach(channel.name)
        channel.segment.buffer[:80] = head


def test_every_dtype_comes_through_and_bfloat16_is_read_as_such(make):
    arrays = {name: np.array([0, 1, 1]).astype(numpy_dtype(name)) for name in DTYPES}
    layout = WeightsLayout([(name, name, (3,)) for name in DTYPES])
    bits = (np.array([1.5, -2.0, 3.25], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    channel = make({"placeholder": np.zeros(1)})
    with WeightsChannel.create(channel.name + "-dtypes", layout) as every, Publisher(every) as publisher:
        publisher.publish({**arrays, "bfloat16": bits})
        state, _, _ = WeightsReader(every).read()
        for name in set(DTYPES) - {"bfloat16"}:
            assert state[name].dtype == arrays[name].dtype
            np.testing.assert_array_equal(state[name], arrays[name])
        assert state["bfloat16"].dtype.name == "bfloat16"
        np.testing.assert_array_equal(state["bfloat16"].astype(np.float32), np.array([1.5, -2.0, 3.25], np.float32))
        out = {name: array if name != "bfloat16" else np.zeros(3, np.uint16) for name, array in state.items()}
        np.testing.assert_array_equal(widen(WeightsReader(every).read(out=out).state["bfloat16"]), widen(bits))
        with pytest.raises(SpecMismatch, match=r"out\['bfloat16'\]: expected bfloat16\[3\], got float16\[3\]"):
            WeightsReader(every).read(out={**out, "bfloat16": np.zeros(3, np.float16)})


def spoil(channel, at, size=8):
    channel.segment.array(np.uint8, (channel.segment.size,))[at : at + size] = 0xA5


def test_an_overwritten_head_and_layout_are_written_anew(make):
    channel = make()
    before = bytes(channel.segment.buffer[:8192])
    spoil(channel, 0, 64)
    spoil(channel, 4100, 32)
    with pytest.raises(ProtocolMismatch):
        WeightsChannel.attach(channel.name)
    assert channel.restore()
    assert not channel.restore()
    assert bytes(channel.segment.buffer[:8192]) == before


@pytest.mark.parametrize("at", [256, 320, 328, 384, 392])  # the newest version; the sequence and version of each slot
def test_overwritten_words_are_readable_again_after_the_next_publication(make, arrays, at):
    channel = make()
    with Publisher(channel) as publisher:
        for _ in range(4):
            publisher.publish(arrays)
    assert not any(channel.restore() for _ in range(10))
    slot = 320 + 64 * channel.claim().slot
    spoil(channel, at)
    repaired = [channel.restore() for _ in range(10)]
    assert repaired.count(True) == (at in (256, slot, slot + 8)), "the words of the older slot are not read any more"
    if any(repaired):
        assert repaired[3] and not channel.claim().version, "it is no publication in progress"
    else:
        assert channel.claim().version == 4
    with Publisher(channel) as publisher:
        version = publisher.publish(arrays)
    assert WeightsReader(channel).read().version == version > 4
    assert not any(channel.restore() for _ in range(10))


def test_a_version_that_goes_back_is_noticed_at_once(make, arrays):
    channel = make()
    with Publisher(channel) as publisher:
        publisher.publish(arrays)
        before = int(channel._words[0])
        for _ in range(3):
            publisher.publish(arrays)
    assert not channel.restore()
    channel._words[0] = before
    assert channel.restore() and not channel.claim().version
    with Publisher(channel) as publisher:
        assert publisher.publish(arrays) > 4, "those that read version 4 get this one"
    assert not channel.restore()


def test_a_channel_of_a_killed_publisher_is_intact(make, arrays):
    channel = make()
    with Publisher(channel) as publisher:
        publisher.publish(arrays)
    channel.slots.begin()  # and no more
    assert not any(channel.restore() for _ in range(10))
    with Publisher(channel) as publisher:
        assert publisher.publish(arrays) == 2
