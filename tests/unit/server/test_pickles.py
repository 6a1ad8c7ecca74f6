"""Pickles are read without being unpickled: what plain data has comes through, everything else is refused by name."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import io
import math
import os
import pickle
import pickletools
import struct
import sys
import tracemalloc

import numpy as np
import pytest

from jurybox.server.gateway.dialects.pickles import Limits, NotPlain, dumps, loads

JPEG = b"\xff\xd8\xff\xe0" + bytes(range(256)) * 3
META = {
    "tag": "counting",
    "prompt": "drei Kätzchen 🐱",
    "include": [{"class": "cat", "count": 3, "position": ["left of", 0]}],
}
STREAMS = {
    "deqa": {"images": [JPEG, b"", JPEG[:9]]},
    "geneval": {"images": [JPEG] * 3, "meta_datas": [META, dict(META), META], "only_strict": True},
    "scorer": {"images": [JPEG], "prompts": ["a" * 300], "metadata": {}},
    "numbers": [0, 1, 255, 256, 65535, 65536, -1, 2**31, -(2**31), 2**63, -(2**100), 0.5, -math.inf, None, True, False],
    "text": ["", "ä", "half \ud800 a pair", "x" * 70_000],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),)],
    "many": [list(range(3000)), {str(i): i for i in range(3000)}, {1: "one"}],
}  # fmt: skip
# Made by pickle.dumps where NumPy is 1.26.4: {"images": [b"x"], "prompts": np.array(["a cat", "größer"])} ...
NUMPY_1 = {
    2: b"\x80\x02}q\x00(X\x06\x00\x00\x00imagesq\x01]q\x02c_codecs\nencode\nq\x03X\x01\x00\x00\x00xq\x04X\x06\x00\x00\x00latin1q\x05\x86q\x06Rq\x07aX\x07\x00\x00\x00promptsq\x08cnumpy.core.multiarray\n_reconstruct\nq\tcnumpy\nndarray\nq\nK\x00\x85q\x0bh\x03X\x01\x00\x00\x00bq\x0ch\x05\x86q\rRq\x0e\x87q\x0fRq\x10(K\x01K\x02\x85q\x11cnumpy\ndtype\nq\x12X\x02\x00\x00\x00U6q\x13\x89\x88\x87q\x14Rq\x15(K\x03X\x01\x00\x00\x00<q\x16NNNK\x18K\x04K\x08tq\x17b\x89h\x03X2\x00\x00\x00a\x00\x00\x00 \x00\x00\x00c\x00\x00\x00a\x00\x00\x00t\x00\x00\x00\x00\x00\x00\x00g\x00\x00\x00r\x00\x00\x00\xc3\xb6\x00\x00\x00\xc3\x9f\x00\x00\x00e\x00\x00\x00r\x00\x00\x00q\x18h\x05\x86q\x19Rq\x1atq\x1bbu.",  # noqa: E501
    4: b"\x80\x04\x95\xd0\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x06images\x94]\x94C\x01x\x94a\x8c\x07prompts\x94\x8c\x15numpy.core.multiarray\x94\x8c\x0c_reconstruct\x94\x93\x94\x8c\x05numpy\x94\x8c\x07ndarray\x94\x93\x94K\x00\x85\x94C\x01b\x94\x87\x94R\x94(K\x01K\x02\x85\x94h\x08\x8c\x05dtype\x94\x93\x94\x8c\x02U6\x94\x89\x88\x87\x94R\x94(K\x03\x8c\x01<\x94NNNK\x18K\x04K\x08t\x94b\x89C0a\x00\x00\x00 \x00\x00\x00c\x00\x00\x00a\x00\x00\x00t\x00\x00\x00\x00\x00\x00\x00g\x00\x00\x00r\x00\x00\x00\xf6\x00\x00\x00\xdf\x00\x00\x00e\x00\x00\x00r\x00\x00\x00\x94t\x94bu.",  # noqa: E501
    5: b"\x80\x05\x95\xbb\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x06images\x94]\x94C\x01x\x94a\x8c\x07prompts\x94\x8c\x12numpy.core.numeric\x94\x8c\x0b_frombuffer\x94\x93\x94(\x960\x00\x00\x00\x00\x00\x00\x00a\x00\x00\x00 \x00\x00\x00c\x00\x00\x00a\x00\x00\x00t\x00\x00\x00\x00\x00\x00\x00g\x00\x00\x00r\x00\x00\x00\xf6\x00\x00\x00\xdf\x00\x00\x00e\x00\x00\x00r\x00\x00\x00\x94\x8c\x05numpy\x94\x8c\x05dtype\x94\x93\x94\x8c\x02U6\x94\x89\x88\x87\x94R\x94(K\x03\x8c\x01<\x94NNNK\x18K\x04K\x08t\x94bK\x02\x85\x94\x8c\x01C\x94t\x94R\x94u.",  # noqa: E501
}
NUMPY_1_SCALAR = b"\x80\x04\x95\x7f\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x07prompts\x94]\x94\x8c\x15numpy.core.multiarray\x94\x8c\x06scalar\x94\x93\x94\x8c\x05numpy\x94\x8c\x05dtype\x94\x93\x94\x8c\x02U5\x94\x89\x88\x87\x94R\x94(K\x03\x8c\x01<\x94NNNK\x14K\x04K\x08t\x94bC\x14a\x00\x00\x00 \x00\x00\x00c\x00\x00\x00a\x00\x00\x00t\x00\x00\x00\x94\x86\x94R\x94as."  # noqa: E501


def python_pickle(value, protocol):
    sink = io.BytesIO()
    pickle._Pickler(sink, protocol).dump(value)  # writes some values with other opcodes than the C one
    return sink.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("write", [pickle.dumps, python_pickle], ids=["c", "python"])
@pytest.mark.parametrize("name", STREAMS)
def test_plain_data_arrives_unchanged(name, write, protocol):
    assert loads(write(STREAMS[name], protocol)) == STREAMS[name]


def test_nan_and_empty_answers_come_through():
    assert math.isnan(loads(pickle.dumps(math.nan)))
    assert [loads(pickle.dumps(empty)) for empty in ([], {}, "", b"", ())] == [[], {}, "", b"", ()]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_of_text_become_lists_and_of_numbers_arrays(protocol):
    prompts = np.array(["a cat", "größer", "🐱", ""])
    assert loads(pickle.dumps({"prompts": prompts, "again": prompts}, protocol)) == {
        "prompts": prompts.tolist(),
        "again": prompts.tolist(),
    }
    assert loads(pickle.dumps(prompts.astype(">U9").reshape(2, 2).T, protocol)) == prompts.reshape(2, 2).T.tolist()
    for dtype in ("?", "u1", "<i2", ">i8", "<f4", ">f8", "<f2"):
        array = np.arange(6).astype(dtype).reshape(2, 3)
        for given in (array, np.asfortranarray(array), array[:, :0].reshape(0), np.array(array[0, 0])):
            read = loads(pickle.dumps(given, protocol))
            np.testing.assert_array_equal(read, given)
            assert read.dtype == given.dtype and not read.flags.writeable
    for scalar in (np.str_("a cat"), np.float32(0.5), np.int64(-7), np.bool_(True)):
        read = loads(pickle.dumps([scalar], protocol))[0]
        assert read == scalar and type(read) in (str, float, int, bool)


def test_streams_of_numpy_1_are_read_too():
    for stream in NUMPY_1.values():
        assert loads(stream) == {"images": [b"x"], "prompts": ["a cat", "größer"]}
    assert loads(NUMPY_1_SCALAR) == {"prompts": ["a cat"]}


def test_a_bytearray_is_bytes():
    assert loads(pickle.dumps(bytearray(b"abc"), 5)) == b"abc"


class Reduces:
    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        return self.parts


class Plain:
    pass


class Extended:
    pass


def globals_of(*parts):
    return b"".join(b"\x8c" + bytes([len(part)]) + part for part in parts)


ARRAY = (
    b"\x80\x04" + globals_of(b"numpy._core.multiarray", b"_reconstruct") + b"\x93" + globals_of(b"numpy", b"ndarray")
)
DTYPE = globals_of(b"numpy", b"dtype") + b"\x93"


def array_stream(kind, shape, data, state=None):
    """An array's stream with any dtype, shape and bytes."""
    plain = pickle.dumps(shape, 2)[2:-1] if isinstance(shape, tuple) else shape
    made = (
        DTYPE
        + globals_of(kind)
        + b"\x89\x88\x87R"
        + (state or b"(K\x03\x8c\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb")
    )
    body = b"B" + struct.pack("<I", len(data)) + data
    return ARRAY + b"\x93K\x00\x85C\x01b\x87R(K\x01" + plain + made + b"\x89" + body + b"tb."


# Lists of ten, each of ten times the one before.
TENS = b"](" + b"N" * 10 + b"e\x94" + b"".join(b"](" + b"h%c" % n * 10 + b"e\x94" for n in range(9))
PICTURES = b"\x80\x04(B" + struct.pack("<I", 1 << 20) + bytes(1 << 20) + b"\x94" + b"h\x00" * 100 + b"t."
ATTACKS = {
    "os.system": (pickle.dumps(Reduces(os.system, ("true",))), "posix.system"),
    "eval": (pickle.dumps(Reduces(eval, ("1",)), 2), "__builtin__.eval"),
    "a class": (pickle.dumps(Plain()), "Plain"),
    "OrderedDict": (pickle.dumps(collections.OrderedDict()), "collections.OrderedDict"),
    "a set": (pickle.dumps({1}), "EMPTY_SET"),
    "frozen set": (pickle.dumps(frozenset({1}), 4), "FROZENSET"),
    "complex": (pickle.dumps(1j), "builtins.complex"),
    "protocol 0": (pickle.dumps([1, "a"], 0), "LIST"),
    "persistent id": (b"\x80\x04Pabc\n.", "PERSID"),
    "persistent id of the stack": (b"\x80\x04Nq\x00Q.", "BINPERSID"),
    "INST": (b"(ios\nsystem\n.", "INST"),
    "OBJ": (b"\x80\x04(cos\nsystem\no.", "os.system"),
    "NEWOBJ": (b"\x80\x04cnumpy\nndarray\n)\x81.", "NEWOBJ"),
    "extension 1": (b"\x80\x02\x82\x01.", "EXT1"),
    "extension 2": (b"\x80\x02\x83\x01\x01.", "EXT2"),
    "extension 4": (b"\x80\x02\x84\x01\x01\x01\x01.", "EXT4"),
    "LONG4 of 2 GB": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "LONG4"),
    "out-of-band buffer": (b"\x80\x05\x97.", "NEXT_BUFFER"),
    "dtype object": (array_stream(b"O8", (1,), bytes(8)), "'O8'"),
    "dtype void": (array_stream(b"V8", (1,), bytes(8)), "'V8'"),
    "dtype of a huge text": (array_stream(b"U99999999", (1,), bytes(8)), "U99999999"),
    "dtype with fields": (array_stream(b"f4", (1,), bytes(4), b"(K\x03\x8c\x01<NC\x01a}K\x00K\x00K\x00tb"), "fields"),
    "ndarray called": (b"\x80\x04cnumpy\nndarray\nK\x05\x85\x85R.", "ndarray"),
    "a shape of 2^40": (array_stream(b"f8", (1 << 39,), b""), "bytes"),
    "a shape of 2^60": (array_stream(b"f8", (1 << 60,), b""), r"2\^40"),
    "a negative shape": (array_stream(b"f8", (-1,), bytes(8)), r"2\^40"),
    "empty, but endless": (array_stream(b"f8", (1 << 39, 0), b""), "bytes"),
    "zero, but for one": (array_stream(b"f8", (True,), bytes(8)), r"2\^40"),
    "a character that is none": (
        array_stream(b"U1", (1,), b"\xff\xff\xff\x7f", b"(K\x03\x8c\x01<NNNK\x04K\x04K\x08tb"), "character"),
    "an unfinished array": (ARRAY + b"\x93K\x00\x85C\x01b\x87R.", "array as a value"),
    "an unfinished dtype": (b"\x80\x04" + DTYPE + globals_of(b"f8") + b"\x89\x88\x87R.", "dtype as a value"),
    "a global as a value": (b"\x80\x04" + DTYPE + b".", "name as a value"),
    "the state of a dict": (b"\x80\x04}N\x85b.", "dict"),
    "a call of text": (b"\x80\x04\x8c\x01a)R.", "calls a str"),
    "a memo of half a gigabyte": (b"\x80\x02Nr\xff\xff\xff\x01.", None),
    "a memo of 32 GB": (b"\x80\x02Nr\xff\xff\xff\x7f.", None),
    "a value that is not in the memo": (b"\x80\x02j\xff\xff\xff\x7f.", "memo"),
    "bytes of 4 GB": (b"\x80\x04B\xff\xff\xff\xff.", "claims"),
    "bytes of 2^63": (b"\x80\x04\x8e" + b"\xff" * 8 + b".", "claims"),
    "text of 2^63": (b"\x80\x04\x8d" + b"\xff" * 8 + b".", "claims"),
    "bytearray of 2^40": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "claims"),
    "frame of 2^63": (b"\x80\x04\x95" + b"\xff" * 8 + b".", "frame"),
    "lists in lists": (b"\x80\x04" + b"]" * 1000 + b"a" * 999 + b".", "deep"),
    "tuples in tuples": (b"\x80\x04N" + b"\x85" * 20_000 + b".", "deep"),
    "marks": (b"\x80\x04" + b"(" * 100_000 + b".", "marks"),
    "a list in itself": (b"\x80\x04]\x94h\x00a.", "itself"),
    "a dict in itself": (b"\x80\x04}\x94\x8c\x01ah\x00s.", "itself"),
    "10^9 elements out of 200 bytes": (
        b"\x80\x04(" + TENS + b"t.", "values"),
    "the same picture over and over": (PICTURES, "over and over"),
    "keys whose hash never ends": (b"\x80\x04}N" + b"\x85" * 50 + b"Ns.", "key"),
    "an array as a key": (b"\x80\x04}](Ne" + b"Ns.", "key"),
    "a protocol of tomorrow": (b"\x80\x06N.", "protocol 6"),
    "not a pickle": (b"\x89PNG\r\n\x1a\n", "STOP|opcode|takes"),
    "an error page": (b"cannot decode\n...", "global|STOP|names"),
    "empty": (b"", "STOP"),
    "nothing": (b".", "one value"),
    "more after the end": (pickle.dumps(1) + b"x", "left"),
    "two values": (b"\x80\x04NN.", "2 values"),
    "a pop too many": (b"\x80\x04N\x86.", "put none"),
    "a pop beyond the mark": (b"\x80\x04N(\x85t.", "put none"),
    "an append to nothing": (b"\x80\x04Na.", "put none"),
    "an append to text": (b"\x80\x04\x8c\x01aNa.", "str"),
    "a key without a value": (b"\x80\x04}(\x8c\x01au.", "key"),
    "no mark": (b"\x80\x04Nt.", "mark"),
    "no UTF-8": (b"\x80\x04\x8c\x01\xff.", "UTF-8"),
    "an integer of 200 bytes": (b"\x80\x04\x8a\xc8" + bytes(200) + b".", "200"),
    "a name of 100 kB": (b"\x80\x04c" + b"a" * 100_000 + b"\n", "more than 80"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_by_name_and_allocates_nothing(name):
    stream, says = ATTACKS[name]
    tracemalloc.start()
    try:
        if says is None:
            assert loads(stream) is None
        else:
            with pytest.raises(NotPlain, match=says) as refused:
                loads(stream)
            assert len(str(refused.value)) < 400
        assert tracemalloc.get_traced_memory()[1] < 64 * len(stream) + (8 << 20)
    finally:
        tracemalloc.stop()


def test_nothing_is_imported_compiled_opened_or_started():
    """Reading a pickle causes no audit event of CPython."""
    happened, listening = [], True
    sys.addaudithook(lambda event, _: happened.append(event) if listening else None)
    try:
        for stream in (*NUMPY_1.values(), NUMPY_1_SCALAR):
            loads(stream)
        for stream, says in ATTACKS.values():
            if says:
                with contextlib.suppress(NotPlain):
                    loads(stream)
    finally:
        listening = False
    assert set(happened) <= {"object.__getattr__"}


def test_an_extension_that_is_registered_is_refused_all_the_same():
    copyreg.add_extension(Extended.__module__, "Extended", 200)
    try:
        with pytest.raises(NotPlain, match="EXT1"):
            loads(pickle.dumps(Extended, 2))
    finally:
        copyreg.remove_extension(Extended.__module__, "Extended", 200)


READ = (
    "PROTO FRAME MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND "
    "APPENDS EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES "
    "BINBYTES8 BYTEARRAY8 BININT BININT1 BININT2 LONG1 BINFLOAT NONE NEWTRUE NEWFALSE GLOBAL STACK_GLOBAL REDUCE BUILD "
    "STOP"
)


def test_every_opcode_is_either_read_or_refused_by_the_name_that_python_gives_it():
    read = set(READ.split())
    for number in range(256):
        opcode = pickletools.code2op.get(chr(number))
        what = f"opcode {opcode.name} at 2:" if opcode else f"byte {number:#04x}, which is no opcode, at 2:"
        with pytest.raises(NotPlain) as refused:
            loads(b"\x80\x04" + bytes([number]))
        assert (what not in str(refused.value)) == (opcode is not None and opcode.name in read), refused.value


def test_a_pickle_names_nothing_but_arrays_and_bytes_and_calls_them_as_plain_data_does():
    from jurybox.server.gateway.dialects import pickles

    arrays = {("multiarray", "_reconstruct"): 3, ("multiarray", "scalar"): 2, ("numeric", "_frombuffer"): 4}
    assert {named: known.takes for named, known in pickles._GLOBALS.items()} == {
        ("numpy", "ndarray"): -1, ("numpy", "dtype"): 3, ("_codecs", "encode"): 2, ("__builtin__", "bytes"): 0,
        **{(f"numpy.{core}.{module}", name): n for (module, name), n in arrays.items() for core in ("core", "_core")},
    }  # fmt: skip
    with pytest.raises(NotPlain, match="calls ndarray"):
        loads(b"\x80\x04" + globals_of(b"numpy", b"ndarray") + b"\x93)R.")


def test_nested_tuples_in_every_place_of_a_call_end_in_time():
    """Text, hash or comparison of tuples that hold each other twice, 60 deep, would take for ever."""
    bomb = b"N\x94" + b"".join(b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86\x94" for n in range(60))
    top = b"\x80\x04(" + bomb + b"t"  # all of it in one tuple, and then the calls
    deep = b"h" + bytes([60])
    for call in (
        DTYPE + deep + b"\x89\x88\x87R",
        DTYPE + globals_of(b"f8") + b"\x89\x88\x87R" + b"(" + deep * 8 + b"tb",
        globals_of(b"numpy._core.multiarray", b"_reconstruct") + b"\x93" + deep * 3 + b"\x87R",
        globals_of(b"numpy._core.multiarray", b"scalar") + b"\x93" + deep * 2 + b"\x86R",
        globals_of(b"_codecs", b"encode") + b"\x93" + deep * 2 + b"\x86R",
        globals_of(b"numpy._core.numeric", b"_frombuffer") + b"\x93(" + deep * 4 + b"tR",
        array_stream(b"f8", deep, bytes(8))[2:-1],
        deep * 2 + b"\x93",
        deep * 2 + b"R",
        deep * 2 + b"b",
        b"}" + deep * 2 + b"s",
    ):
        with pytest.raises(NotPlain):
            loads(top + call + b".")


def test_limits_are_kept_to_the_opcode():
    stream = pickle.dumps(list(range(100)), 2)
    loads(stream, Limits(opcodes=110, values=101, depth=1))
    for limits in (Limits(opcodes=50), Limits(values=100), Limits(depth=0), Limits(marks=0)):
        with pytest.raises(NotPlain):
            loads(stream, limits)
    with pytest.raises(NotPlain, match="over and over"):
        loads(pickle.dumps(["abc" * 100] * 50), Limits(repeated=1000))


def test_written_pickles_are_readable_and_have_no_global():
    answer = {
        "outputs": [0.5, -1.0, math.inf, 0.0],
        "scores": (1, -1, 0, 255, 256, 2**31, -(2**63), 2**64),
        "error": "kein Bild: größer 🐱 \ud800",
        "nothing": [None, True, False, [], {}, (), ""],
        "group_rewards": {"counting": [-10.0] * 2000},
    }
    stream = dumps(answer)
    assert pickle.loads(stream) == answer == loads(stream)
    names = {opcode.name for opcode, _, _ in pickletools.genops(stream)}
    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ"}
    assert math.isnan(pickle.loads(dumps([math.nan]))[0])


@pytest.mark.parametrize(
    "value", [np.float32(1), np.zeros(2), {1, 2}, b"bytes", object(), 1j, collections.OrderedDict()]
)
def test_only_plain_values_are_written(value):
    with pytest.raises(TypeError, match="no plain value"):
        dumps({"outputs": [value]})
