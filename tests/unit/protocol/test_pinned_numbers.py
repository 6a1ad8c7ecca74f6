"""Numbers that peers of other versions know: none may change without a new version of the protocol."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import pytest

from jurybox.protocol import arena, errors, wire
from jurybox.protocol.arena import Arena, ArenaLayout, Columns
from jurybox.protocol.errors import Code, ModelNotFound, Refused
from jurybox.protocol.segment import segment_name
from jurybox.protocol.spec import ModelSpec, TensorSpec

# Number, HTTP status, gRPC status (https://grpc.github.io/grpc/core/md_doc_statuscodes.html).
CODES = {
    "OK": (0, None, None),
    "TIMEOUT": (1, 504, 4),
    "BUSY": (2, 429, 8),
    "MODEL_NOT_FOUND": (3, 404, 5),
    "SPEC_MISMATCH": (4, 422, 3),
    "SERVER_GONE": (5, 503, 14),
    "PROTOCOL_MISMATCH": (6, 400, 9),
    "REFUSED": (7, 403, 7),
    "NOT_READY": (8, 503, 14),
    "DRAINING": (9, 503, 14),
    "MODEL_FAILED": (10, 500, 13),
    "MALFORMED": (11, 400, 3),
    "UNAUTHENTICATED": (12, 401, 16),
    "TOO_LARGE": (13, 413, 8),
    "STALE_LEASE": (14, 403, 9),
    "UNSUPPORTED": (15, 501, 12),
    "VERSION_NOT_HELD": (16, 409, 9),
    "ROW_FAILED": (17, 422, 3),
    "SESSION_LOST": (18, 409, 9),
    "SLEEPING": (19, 503, 14),
}


def test_codes_have_their_numbers_and_statuses():
    found = {name: (int(code), errors.TABLE.get(code)) for name, code in Code.__members__.items()}
    assert {name: (number, row and row.http, row and row.grpc) for name, (number, row) in found.items()} == CODES


def test_a_message_begins_with_the_protocols_letter_and_version():
    assert wire.PREFIX == b"J\x02"
    assert "1 bytes came" in wire.prefix_error(b"J")
    assert "protocol version 3 came" in wire.prefix_error(b"J\x03")
    assert wire.build_version() == version("jurybox")


def test_a_control_request_has_at_most_a_mebibyte():
    wire.require_control_size(bytes(1 << 20))
    with pytest.raises(Refused, match="at most 1048576 bytes, 1048577 came") as refused:
        wire.require_control_size(bytes((1 << 20) + 1))
    assert refused.value.code is Code.TOO_LARGE


def test_a_models_name_has_at_most_128_characters_that_utf_8_can_carry():
    wire.require_name("n" * 128)
    for name, why in (("n" * 129, "one of 129 came"), ("half \ud800 a pair", "no text which UTF-8 can carry")):
        with pytest.raises(ModelNotFound, match=why):
            wire.require_name(name)


def test_a_tensors_name_has_at_most_200_characters():
    one = TensorSpec("float32")
    ModelSpec("m", {"n" * 200: one}, {"y": one})
    with pytest.raises(ValueError, match="1 to 200 characters"):
        ModelSpec("m", {"n" * 201: one}, {"y": one})


def test_a_text_from_elsewhere_travels_with_at_most_4000_characters():
    assert errors.plain("x" * 4000) == "x" * 4000
    assert errors.plain("x" * 4001) == "x" * 3996 + " ..."


def test_an_object_whose_text_cannot_be_made_is_named_by_its_type():
    class Shy:
        def __str__(self) -> str:
            raise KeyboardInterrupt

    assert errors.plain(Shy()) == "(a Shy whose text cannot be made)"


def test_rows_of_one_element_at_most_have_zeros_of_one():
    least = TensorSpec("uint8", (-1, -1, 3), capacity=3)
    assert [row.shape for row in least.zeros(2)] == [(1, 1, 3)] * 2


def test_a_sessions_flags_are_bits():
    assert (arena.LOAD, arena.STORE, arena.NO_FORWARD) == (1, 2, 4)
    assert arena.SESSION.itemsize == 16
    assert arena.SESSION.names[:3] == ("slot", "step", "flags")


@pytest.mark.usefixtures("empty_shared_memory")
def test_every_column_begins_on_a_page_and_they_fill_the_segment():
    given = {"x": TensorSpec("uint8", (3,)), "text": TensorSpec("bytes", capacity=5000)}
    layout = ArenaLayout(
        ModelSpec("m", given, {"y": TensorSpec("float32", (2,))}, {"h": TensorSpec("float16", (7,))}), 3
    )
    with_owner = Arena.create(segment_name("t", "arena"), layout)
    try:
        columns = with_owner.columns
        base = np.frombuffer(with_owner.segment.buffer, np.uint8).ctypes.data
        arrays = [
            *columns.inputs.values(), *columns.outputs.values(), *columns.input_extents.values(), columns.reasons,
            columns.sessions, *columns.state_in.values(), *columns.state_out.values(),
        ]  # fmt: skip
        starts = [array.ctypes.data - base for array in arrays]
        assert starts == [0, 4096, 20480, 24576, 28672, 32768, 36864, 40960]
        assert layout.size == 45056 == with_owner.segment.size
        assert [array.shape for array in arrays[:2]] == [(3, 3), (3, 5000)]
    finally:
        del columns, arrays
        with_owner.close()


def test_a_shorter_reason_leaves_nothing_of_the_one_before_it():
    one = TensorSpec("float32")
    columns = Columns.here(ModelSpec("m", {"x": one}, {"y": one}), 4)
    columns.fail(1, "the lens was dirty")
    columns.fail(1, "dark")
    columns.fail(2, "")
    assert columns.failures(0, 4) == {1: "dark", 2: "it failed"}
    columns.refuse(1, 2, {1: "late"})
    assert columns.failures(0, 4) == {2: "late"}
    columns.fail(3, "é" * 100)  # cut at a character
    assert columns.failures(3, 1) == {0: "é" * 64}
