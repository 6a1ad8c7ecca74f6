"""The threads that decode for the dialects, and what they make of pictures in text and in memory."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import re
import threading

import numpy as np
import pytest
from PIL import Image
from tests.loops import turns

from jurybox import native
from jurybox.protocol.errors import SpecMismatch
from jurybox.server.gateway.dialects import intake
from jurybox.server.gateway.dialects.intake import ThreadPool, decoded, encoded_bytes
from jurybox.server.gateway.dialects.json_dialects import parsed


def test_a_thread_returns_or_raises_what_its_function_does():
    async def go() -> None:
        pool = ThreadPool()
        assert await pool.run(divmod, 7, 2) == (3, 1)
        assert await pool.run(threading.current_thread) is not threading.current_thread()
        for raised, told in ((KeyError, KeyError), (StopIteration, RuntimeError)):

            def fail(raised: type[Exception] = raised) -> None:
                raise raised("why")

            with pytest.raises(told, match="why"):
                await asyncio.wait_for(pool.run(fail), 20)

    asyncio.run(go())


def test_requests_that_wait_for_engines_leave_as_many_threads_as_there_were():
    """A lone request of each dialect may wait for an engine that hangs; pictures are decoded all the same."""
    over = threading.Event()

    async def go() -> None:
        pool = ThreadPool(5)
        waiting = [asyncio.create_task(pool.run(over.wait, 60)) for _ in range(5)]
        await asyncio.sleep(0)
        meet = threading.Barrier(intake._WORKERS)
        await asyncio.wait_for(asyncio.gather(*(pool.run(meet.wait, 30) for _ in range(intake._WORKERS))), 40)
        over.set()
        assert all(await asyncio.gather(*waiting))

    asyncio.run(go())


def test_abandoned_work_is_not_begun():
    over, begun = threading.Event(), []

    async def go() -> None:
        pool = ThreadPool()
        busy = [asyncio.create_task(pool.run(over.wait, 60)) for _ in range(intake._WORKERS)]
        late = asyncio.create_task(pool.run(begun.append, 1))
        await turns()
        late.cancel()
        await asyncio.sleep(0)
        over.set()
        await asyncio.gather(*busy)
        await pool.run(int)

    asyncio.run(go())
    assert not begun


def test_base64_is_decoded_as_the_standard_library_does_or_not_at_all():
    dice = random.Random(0)
    taken = 0
    for _ in range(20_000):
        text = list(base64.b64encode(dice.randbytes(dice.randrange(12))).decode())
        for _ in range(dice.randrange(3) if text else 0):
            text[dice.randrange(len(text))] = dice.choice("A=/+-_ \n=é\ud800z")
        given = "".join(text[: len(text) - (dice.random() < 0.2)])
        if (found := native.base64_decoded(given)) is not None:
            assert found == base64.b64decode(given, validate=True), given
            taken += 1
    assert taken > 5000
    whole = dice.randbytes(100_000)
    assert native.base64_decoded(base64.b64encode(whole).decode()) == whole
    assert encoded_bytes("data:image/png;base64," + base64.b64encode(b"abcd").decode()) == b"abcd"
    for wrong in ("abc", "ab=c", "a\x00bc", "é===", "\ud800bcd"):
        with pytest.raises(SpecMismatch, match="base64"):
            encoded_bytes(wrong)


def test_json_with_long_strings_is_parsed_like_the_standard_library():
    dice = random.Random(0)
    long = "x" * 5000
    pieces = [
        f'"{long}"', f'"{long}y"', f'"{long}\\\\"', f'"{long}\\""', f'"{long}ö"', f'"{long}\n"',
        '"short"', '"NaN"', '"\\""', "NaN", "-Infinity", "1", "-", "null", "tru",
        "[", "]", "{", "}", ",", ":", " ", "", "\ufeff", "\x00", "\ud800",
    ]  # fmt: skip
    whole = [
        lambda: f"[{', '.join(dice.choices(pieces[:9], k=4))}]",
        lambda: f'{{"a": {dice.choice(pieces)}, "b": {{{dice.choice(pieces)}: {pieces[0]}, "c": {pieces[1]}}}}}',
        lambda: "[" + "".join(dice.choices(pieces, k=5)) + pieces[0] + "]",
    ]
    read, refused = 0, 0
    for _ in range(3000):
        body = dice.choice(whole)().encode(dice.choice(["utf-8"] * 20 + ["utf-16", "utf-8-sig"]), "surrogatepass")
        try:
            expected = json.loads(body)
        except ValueError as error:
            refused += 1
            with pytest.raises(type(error), match=re.escape(str(error))):
                parsed(body)
        else:
            read += 1
            assert repr(parsed(body)) == repr(expected)  # NaN is not itself
    assert read > 500 and refused > 500
    nested = b"[" * 100_000 + b'"' + b"x" * 9000 + b'"' + b"]" * 100_000
    with pytest.raises(RecursionError):
        parsed(nested)


@pytest.mark.parametrize("side", [(1, 1), (1, 2), (3, 1), (7, 5), (64, 65), (1500, 1500)])
def test_pixels_equal_those_of_pillow(side):
    pixels = np.random.default_rng(0).integers(0, 256, (*side, 3), np.uint8)
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    np.testing.assert_array_equal(decoded(sink.getvalue()), pixels)


def test_a_picture_of_many_megabytes_lies_in_parts_and_is_decoded_all_the_same():
    sink = io.BytesIO()
    Image.new("RGB", (4000, 3000), (1, 2, 3)).save(sink, "PNG")
    assert (decoded(sink.getvalue()) == np.array([1, 2, 3], np.uint8)).all()


@pytest.mark.skipif(not hasattr(Image.Image, "__arrow_c_array__"), reason="this Pillow does not tell where pixels are")
def test_memory_that_is_no_picture_of_that_size_is_not_read():
    schema, array = Image.new("RGB", (5, 4)).__arrow_c_array__()
    assert native.drop_fourth(schema, array, np.empty((4, 5, 3), np.uint8))
    for shape in ((4, 6, 3), (4, 4, 3), (0, 0, 3)):
        assert not native.drop_fourth(schema, array, np.empty(shape, np.uint8))
    for mode in ("L", "F", "I"):
        other = Image.new(mode, (5, 4)).__arrow_c_array__()
        assert not native.drop_fourth(*other, np.empty((4, 5, 3), np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        native.drop_fourth(schema, array, np.empty((4, 5), np.uint8))
    with pytest.raises(ValueError, match="uint8"):
        native.drop_fourth(schema, array, np.empty((4, 5, 3), np.float32))
    frozen = np.empty((4, 5, 3), np.uint8)
    frozen.flags.writeable = False
    for wrong in ((array, schema, np.empty((4, 5, 3), np.uint8)), (schema, array, frozen), (None, None, frozen)):
        with pytest.raises((ValueError, TypeError, BufferError)):
            native.drop_fourth(*wrong)
