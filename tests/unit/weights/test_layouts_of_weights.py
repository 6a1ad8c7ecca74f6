"""Layouts of weights: what they may contain, how two differ, and which one is meant by a part or by a transfer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jurybox.protocol.errors import Code, Error, ProtocolMismatch, SpecMismatch
from jurybox.protocol.weights.layout import ALIGNMENT, DTYPES, WeightsLayout, dtype_name, widen
from jurybox.protocol.weights.transfer import Assembly, chunks, narrow, transfer_layout


def layout(*tensors: tuple[str, str, tuple[int, ...]]) -> WeightsLayout:
    return WeightsLayout(tensors)


def test_a_tensor_has_up_to_64_dimensions_and_sizes_that_an_address_can_reach() -> None:
    assert layout(("a", "uint8", (1,) * 64)).nbytes == ALIGNMENT
    with pytest.raises(SpecMismatch, match="'a' has 65 dimensions, of sizes up to 1: expected 64 at most"):
        layout(("a", "uint8", (1,) * 65))
    assert layout(("a", "uint8", (1 << 62,))).nbytes == 1 << 62
    for shape in ((1 << 62, 2), ((1 << 62) + 1,), (0, 1 << 31, 1 << 32)):
        with pytest.raises(SpecMismatch, match="sizes that an address can reach"):
            layout(("a", "uint8", shape))


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ([], "needs at least one tensor"),
        ([("a", "uint8", (1,)), ("a", "uint8", (2,))], "'a' of shape .2,.: expected every name once"),
        ([("a", "uint8", (2, -1))], r"'a' of shape \(2, -1\): expected every name once and no negative size"),
        ([("a", "float128", ())], "'a' is float128, which a weights channel cannot carry: expected one of bool, uint8"),
    ],
)
def test_a_layout_that_no_channel_can_have_is_refused(
    tensors: list[tuple[str, str, tuple[int, ...]]], told: str
) -> None:
    with pytest.raises(SpecMismatch, match=told):
        layout(*tensors)
    with pytest.raises(ProtocolMismatch, match="expected a weights layout as JSON"):
        WeightsLayout.from_json(json.dumps(tensors).encode())


def test_tensors_follow_one_another_on_cache_lines_also_empty_ones() -> None:
    of = layout(("a", "uint8", (64,)), ("b", "float32", ()), ("c", "uint8", (0,)), ("d", "int64", (9,)))
    assert [place.offset for place in of.places.values()] == [0, 64, 128, 128] and of.nbytes == 256
    assert [place.nbytes for place in of.places.values()] == [64, 4, 0, 72]
    assert str(of.places["d"]) == "int64[9]" and repr(of) == f"WeightsLayout(4 tensors, 256 bytes, {of.hash[:12]})"
    flat = np.zeros(256, np.uint8)
    views = of.views(flat)
    views["d"][:] = -1
    assert (flat[128:200] == 255).all() and not flat[:128].any() and not flat[200:].any()
    assert views["b"].shape == () and views["c"].shape == (0,)


def test_the_first_eight_differences_are_named_and_the_others_counted() -> None:
    names = [f"t{number}" for number in range(9)]
    of, other = layout(*((name, "uint8", ()) for name in names)), layout(("x", "uint8", ()))
    told = of.difference(other)
    assert told.count("is missing (expected uint8[])") == 8 and told.endswith("; and 2 more") and "'t8'" not in told
    told = layout(*((name, "uint8", ()) for name in names[:7])).difference(other)
    assert told.endswith("'x' came and is not in the layout (uint8[])") and told.count("; ") == 7
    assert of.difference(layout(*((name, "uint8", ()) for name in names[::-1]))) == ""
    assert layout(("a", "uint8", (2,))).difference(layout(("a", "int8", (2,)))) == "'a': expected uint8[2], got int8[2]"


def test_layouts_are_equal_if_their_tensors_are_in_one_order() -> None:
    one, same = (layout(("a", "uint8", (2,)), ("b", "int8", ())) for _ in range(2))
    assert one == same and hash(one) == hash(same) and one == WeightsLayout.from_json(one.to_json())
    assert one != layout(("b", "int8", ()), ("a", "uint8", (2,))) and one != one.hash
    assert one.only(["b", "other"]) == layout(("b", "int8", ())) and list(one.only(["b", "a"]).places) == ["a", "b"]
    with pytest.raises(SpecMismatch, match="at least one tensor"):
        one.only(["other"])


def test_only_float32_travels_as_bfloat16_and_only_if_that_is_asked_for() -> None:
    of = layout(("a", "float32", (2,)), ("b", "float64", (2,)), ("c", "uint8", ()))
    assert transfer_layout(of, bfloat16=False) is of
    assert [place.dtype for place in transfer_layout(of, bfloat16=True).places.values()] == [
        "bfloat16",
        "float64",
        "uint8",
    ]
    assert widen(np.array([0x3F80, 0xC000], np.uint16)).tolist() == [1.0, -2.0]


def test_bfloat16_is_the_nearest_of_two_neighbours_the_even_one_between_them_and_one_nan() -> None:
    bits = np.array([0x3F80_7FFF, 0x3F80_8000, 0x3F80_8001, 0x3F81_8000, 0x7FFF_FFFF, 0xFF80_0001], np.uint32)
    assert narrow(bits.view(np.float32)).tolist() == [0x3F80, 0x3F80, 0x3F81, 0x3F82, 0x7FC0, 0x7FC0]
    assert narrow(np.float32(1)).shape == () and narrow(np.ones((2, 3), np.float32).T).shape == (3, 2)


def test_words_that_are_not_finite_are_found_by_the_bits_of_their_exponents() -> None:
    for name in ("float16", "float32", "float64"):
        kind = DTYPES[name]
        wrong = np.array([np.nan, np.inf, -np.inf], name).view(f"u{kind.width}")
        fine = np.array([0, 1, -1, np.finfo(name).max, np.finfo(name).tiny], name).view(f"u{kind.width}")
        assert ((wrong & kind.mask) == kind.mask).all() and not ((fine & kind.mask) == kind.mask).any()
    for name in ("complex64", "complex128"):
        half = DTYPES[dtype_name(np.zeros(1, name).real)]
        assert (DTYPES[name].width, DTYPES[name].mask) == (half.width, half.mask)
    rows = layout(("a", "float32", (3,)), ("b", "int32", (2,)), ("c", "bfloat16", ())).parts()
    assert rows.dtype == np.uint64
    assert rows.tolist() == [[0, 0, 12, 4, 0x7F800000], [0, 64, 8, 0, 0], [0, 128, 2, 2, 0x7F80]]


# ---- in chunks


def test_a_chunk_may_end_with_the_weights_and_no_later() -> None:
    flat = np.arange(100, dtype=np.uint8)
    last = list(chunks(flat, size=64))[-1]
    assert (last.offset, len(last.data)) == (64, 36)
    Assembly(np.zeros(100, np.uint8), gaps=True).put(last)
    with pytest.raises(Error, match="a chunk ends at byte 100, the layout has 99: these are other weights") as large:
        Assembly(np.zeros(99, np.uint8), gaps=True).put(last)
    assert large.value.code == Code.TOO_LARGE


def test_chunks_with_gaps_come_in_order_each_once_and_what_they_leave_out_stays() -> None:
    flat, given = np.zeros(100, np.uint8), np.arange(1, 101, dtype=np.uint8)
    first, second, third, _ = chunks(given, size=30)
    assembly = Assembly(flat, gaps=True)
    assembly.put(first)
    assembly.put(third)
    for again in (first, second, third):
        with pytest.raises(Error, match=f"begins at byte {again.offset}, expected it at 90") as wrong:
            assembly.put(again)
        assert wrong.value.code == Code.MALFORMED
    assert flat.tolist() == [*range(1, 31), *[0] * 30, *range(61, 91), *[0] * 10] and assembly.received == 60
    assembly.finish(60)
    with pytest.raises(Error, match="60 of 61 bytes came, of 100 in all: send the weights again"):
        assembly.finish(61)
