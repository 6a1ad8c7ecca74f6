"""A million broken pickles: each is read or refused quickly, without side effects."""

from __future__ import annotations

import pickle
import random
import time

import numpy as np
import pytest

from jurybox.server.gateway.dialects.pickles import NotPlain, loads

_META = {"tag": "color_attr", "prompt": "a red cat", "include": [{"class": "cat", "count": 1, "color": "red"}]}
_PROMPTS = np.array(["a cat", "größer", "🐱"])
_VALUES = [
    {"images": [b"\xff\xd8\xff" * 5, b"x"]},
    {"images": [b"\xff\xd8\xff"], "prompts": _PROMPTS},
    {"images": [b"\xff"], "meta_datas": [_META, _META], "only_strict": True},
    {"images": [b"\xff"], "prompts": [np.str_("a cat")], "metadata": {"x": np.arange(4, dtype="f4")}},
]
SEEDS = [pickle.dumps(value, protocol) for value in _VALUES for protocol in (2, 4, 5)]
# Opcodes and parts of streams that change what a stream does more often than single bits.
PIECES = [
    bytes([code]) for code in b"()]}NRbcst.0aeuqhrjX\x8c\x93\x94\x85\x86\x87\x81\x82\x8a\x8b\x95\x96\x97\x80KJMGB\x8e"
]
PIECES += [
    b"cos\nsystem\n",
    b"\xff\xff\xff\xff",
    b"\x00\x00\x00\x80",
    b"\x8c\x02O8",
    b"\x8c\x02V8",
    b"r\xff\xff\xff\x7f",
]
_PLAIN = (dict, list, tuple, str, bytes, int, float, bool, type(None), np.ndarray)


def mutated(rng: random.Random) -> bytes:
    stream = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(stream) + 1)
        match rng.randrange(6):
            case 0 if at < len(stream):
                stream[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(stream):
                stream[at] = rng.randrange(256)
            case 2:
                stream[at:at] = rng.choice(PIECES)
            case 3:
                del stream[at : at + rng.randrange(1, 9)]
            case 4:
                other = rng.choice(SEEDS)
                cut = rng.randrange(len(other))
                stream[at : at + rng.randrange(20)] = other[cut : cut + rng.randrange(40)]
            case _:
                end = at + rng.randrange(30)
                stream[at:at] = stream[at:end]
    return bytes(stream)


def is_plain(value) -> bool:
    if type(value) is np.ndarray:
        return value.dtype.kind in "biuf"
    if type(value) is dict:
        return all(type(key) in (str, int) and is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return type(value) in _PLAIN


def broken_streams(count: int, seed: int) -> tuple[int, float]:
    rng = random.Random(seed)
    read, slowest = 0, 0.0
    for _ in range(count):
        stream = mutated(rng)
        began = time.thread_time()
        try:
            value = loads(stream)
        except NotPlain as error:
            assert len(str(error)) < 400
        except Exception as error:
            raise AssertionError(f"{stream!r} raised {error!r}") from error
        else:
            read += 1
            assert is_plain(value), stream
        slowest = max(slowest, time.thread_time() - began)
    return read, slowest


def test_broken_pickles_are_read_or_refused():
    read, slowest = broken_streams(20_000, 1)
    assert read > 1000 and slowest < 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_million_broken_pickles_are_read_or_refused():
    read, slowest = broken_streams(1_000_000, 2)
    assert read > 50_000 and slowest < 1
