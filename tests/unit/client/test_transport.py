"""What all transports share: replies as bytes, rows that calls reuse, and loops that are told of answers."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from jurybox.client.in_flight import Answer
from jurybox.client.transports.transport import RowPlace, Watching, number_in, read_reply
from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import Code, ProtocolMismatch
from jurybox.protocol.wire import PACK_REPLY, PREFIX

LARGEST = (1 << 64) - 1
FIXED, TEXT, RAGGED = TensorSpec("float32", (2, 3)), TensorSpec("bytes", capacity=8), TensorSpec(
    "float32", (-1, 2), capacity=8
)  # fmt: skip


def place_of(spec, outputs=None):
    rows = np.zeros(spec.capacity if spec.variable else spec.shape, spec.numpy_dtype)
    extents = np.full(len(spec.extents_of((0,) if spec is TEXT else (0, 2))), -1) if spec.variable else None
    return RowPlace(0, 1, spec, rows, extents, outputs)


def test_a_reply_is_read_whole_and_its_text_only_if_it_failed():
    head = PREFIX + PACK_REPLY.pack(LARGEST, 6, 7, Code.MODEL_FAILED)
    assert read_reply(head + "größe\udcff".encode(errors="surrogatepass"), "it")[:2] == (LARGEST, Code.MODEL_FAILED)
    assert read_reply(head + "größe".encode(), "it") == Answer(LARGEST, Code.MODEL_FAILED, "größe", 6, 7)
    assert read_reply(PREFIX + PACK_REPLY.pack(5, 6, 7, 0) + b"ignored", "it") == Answer(5, 0, "", 6, 7)
    for wrong in (b"", head[:-1], b"X" + head[1:]):
        with pytest.raises(ProtocolMismatch, match="^the engine answered what is no reply"):
            read_reply(wrong, "the engine")


@pytest.mark.parametrize("length", [8, 7, 0])
def test_the_number_in_a_broken_reply_is_known_if_all_its_bytes_came(length):
    assert number_in(PREFIX + LARGEST.to_bytes(8, "little")[:length]) == (LARGEST if length == 8 else 0)
    assert number_in(b"") == 0


@pytest.mark.parametrize(
    ("spec", "row", "extents"),
    [
        (FIXED, np.arange(6, dtype=np.float32).reshape(2, 3), None),
        (FIXED, np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)), None),
        (TEXT, b"abc", [3]),
        (TEXT, b"", [0]),
        (TEXT, b"12345678", [8]),
        (RAGGED, np.arange(6, dtype=np.float32).reshape(3, 2), [3]),
        (RAGGED, np.zeros((4, 2), np.float32), [4]),
    ],
)
def test_a_row_as_the_spec_has_it_is_written_with_its_size(spec, row, extents):
    place = place_of(spec)
    assert place.write(row)
    flat = np.frombuffer(row, np.uint8) if type(row) is bytes else row.reshape(-1)
    assert place.input.reshape(-1)[: flat.size].tolist() == flat.tolist()
    assert extents is None or place.extents.tolist()[: len(extents)] == extents


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        (FIXED, np.zeros((2, 3), np.float64)),
        (FIXED, np.zeros((3, 2), np.float32)),
        (FIXED, [[0.0] * 3] * 2),
        (FIXED, b"abc"),
        (TEXT, "text"),
        (TEXT, b"123456789"),
        (TEXT, np.zeros(3, np.uint8)),
        (RAGGED, np.zeros((3, 3), np.float32)),
        (RAGGED, np.zeros((5, 2), np.float32)),
        (RAGGED, np.zeros((3, 2), np.int32)),
        (RAGGED, b"abc"),
    ],
)
def test_any_other_row_is_left_to_the_codec_and_nothing_is_written(spec, row):
    place = place_of(spec)
    assert not place.write(row) and not place.input.any()
    assert place.extents is None or (place.extents == -1).all()
    assert not RowPlace(0, 1, None, None, None, None).write(row)


def test_a_row_whose_bytes_can_be_sent_lies_in_one_piece_and_has_the_dtype_and_the_shape():
    place = place_of(FIXED)
    row = np.zeros((2, 3), np.float32)
    assert place.takes(row)
    for wrong in (np.asfortranarray(row), row.astype(np.float64), row[0], row.tolist(), np.zeros((2, 6), "f4")[:, ::2]):
        assert not place.takes(wrong)
    assert not RowPlace(0, 1, None, None, None, None).takes(row)


def test_outputs_are_copied_in_the_form_that_the_caller_gets_them():
    y = np.ones(2)
    alone, several = place_of(FIXED, y).copied(), place_of(FIXED, {"y": y, "z": 2 * y}).copied()
    y[:] = 5
    assert alone.tolist() == [1, 1]
    assert {name: value.tolist() for name, value in several.items()} == {"y": [1, 1], "z": [2, 2]}
    assert place_of(FIXED).copied() is None


def test_a_native_caller_is_told_what_form_of_a_row_it_may_take():
    assert place_of(FIXED).form() == ((2, 3), np.float32)
    assert place_of(TEXT).form() == ((-1,), bytes)
    assert place_of(RAGGED).form() == ((-1, 2), np.float32)
    assert RowPlace(0, 1, None, None, None, None).form() == ((), None)


@pytest.mark.parametrize("of_loop", [True, False])
def test_a_loop_is_told_of_answers_from_its_own_thread_and_from_others_but_not_after_its_end(of_loop):
    loop, told = asyncio.new_event_loop(), []

    def arrived():
        told.append(threading.get_ident())
        loop.stop()

    watching = Watching(loop, arrived)

    def tell():
        watching.tell()

    if of_loop:
        tell()
    else:
        thread = threading.Thread(target=tell)
        thread.start()
        thread.join(30)
    loop.call_later(30, loop.stop)
    loop.run_forever()
    assert told == [threading.get_ident()] and watching.on
    loop.close()
    assert not watching.on
    if not of_loop:
        thread = threading.Thread(target=tell)
        thread.start()
        thread.join(30)
    watching.read(0)
    watching.unread(0)
    assert len(told) == 1
