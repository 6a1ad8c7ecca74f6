"""The threads that decode for the dialects, and what they make of pictures in text and in memory."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import re
import threading
import zlib

import numpy as np
import pytest
from PIL import Image
from tests.loops import turns

from jurybox import native
from jurybox.client.juror import Scores as Found
from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Busy, Code, Refused, SpecMismatch
from jurybox.server.frontend import pictures
from jurybox.server.frontend.pictures import decoded, encoded_bytes
from jurybox.server.frontend.threads import WORKERS, ThreadPool
from jurybox.server.gateway.dialects import intake
from jurybox.server.gateway.dialects.json_dialects import parsed
from jurybox.server.security.limits import HTTP, OF_REQUEST, RECEIVED, Charge, budget_of
from jurybox.server.security.pace import Turns


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


def test_work_for_which_no_thread_can_start_is_refused_or_left_to_those_that_there_are(monkeypatch):
    """As where the process has all threads that it may have: nothing waits for one that never comes."""
    over, done, start = threading.Event(), [], threading.Thread.start

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def go() -> None:
        pool = ThreadPool()
        monkeypatch.setattr(threading.Thread, "start", full)
        for _ in range(WORKERS + 1):
            with pytest.raises(Busy, match="no thread for this request .can't start new thread.: ask again"):
                await pool.run(done.append, 0)
        monkeypatch.setattr(threading.Thread, "start", start)
        busy = asyncio.create_task(pool.run(over.wait, 60))
        await turns()
        monkeypatch.setattr(threading.Thread, "start", full)
        late = asyncio.create_task(pool.run(done.append, 1))
        await turns()
        assert not late.done()
        over.set()
        await asyncio.gather(busy, late)
        monkeypatch.setattr(threading.Thread, "start", start)
        both = threading.Barrier(2)
        await asyncio.gather(*(asyncio.wait_for(pool.run(both.wait, 60), 60) for _ in range(2)))

    asyncio.run(go())
    assert done == [1]


def test_abandoned_work_is_not_begun():
    over, begun = threading.Event(), []

    async def go() -> None:
        pool = ThreadPool()
        busy = [asyncio.create_task(pool.run(over.wait, 60)) for _ in range(WORKERS)]
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


class _RowScorer:
    """A scorer that knows its model, with one picture."""

    def __init__(self, shape=(8, 8, 3)):
        self.spec = ModelSpec(
            "m",
            {"image": TensorSpec("uint8", shape, 1 << 26 if shape[0] < 0 else 0)},
            {"score": TensorSpec("float32", ())},
        )

    async def scores(self, columns, n):
        return Found([1.0] * n, [7])


def _intake(monkeypatch, shape, size=None):
    monkeypatch.setattr(intake, "RowScorer", lambda *_, **__: _RowScorer(shape))
    return intake.Intake(None, ThreadPool(), Turns(), size=size, model="m")


def _png(width, height):
    """Return a PNG of so many pixels in a few bytes, of which only the header is right."""
    with io.BytesIO() as sink:
        Image.new("1", (width, 1)).save(sink, "PNG")
        data = bytearray(sink.getvalue())
    data[20:24] = height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


@pytest.mark.parametrize("shape", [(8, 8, 3), (-1, -1, 3)], ids=["fixed", "variable"])
@pytest.mark.parametrize("size", [None, (8, 8)], ids=["", "resized"])
def test_pictures_that_are_larger_than_a_request_may_be_are_not_decoded(monkeypatch, shape, size):
    def decode(*_):
        raise AssertionError("a picture was decoded")

    monkeypatch.setattr(pictures, "_rgb", decode)
    budget = budget_of(8 << 20)  # 32 MiB for one connection
    account = native.Account(budget, HTTP)

    async def go(given):
        OF_REQUEST.set(Charge(budget, account))
        return await _intake(monkeypatch, shape, size).rows(intake.Request({}, len(given), {"image": given}))

    bombs = [_png(4096, 4096)] * 40
    if shape[0] == 8 and size is None:
        found, why = (
            asyncio.run(go(bombs)),
            f"a picture of 4096 x 4096 pixels: the model takes {TensorSpec('uint8', shape)}",
        )
        assert list(found) == [why] * 40
    else:
        with pytest.raises(Refused, match="these pictures take .* GiB decoded, at most 32 MiB: send fewer") as caught:
            asyncio.run(go(bombs))
        assert caught.value.code == Code.TOO_LARGE
    assert budget.held(RECEIVED) == 0


def test_decoded_pictures_are_counted_until_the_answer(monkeypatch):
    budget = budget_of(8 << 20)
    account, held = native.Account(budget, HTTP), []
    with io.BytesIO() as sink:
        Image.new("RGB", (1000, 500)).save(sink, "PNG")
        picture = sink.getvalue()

    async def go(n):
        OF_REQUEST.set(Charge(budget, account))
        taken = _intake(monkeypatch, (-1, -1, 3))
        ask = taken._scorer.scores

        def asked(columns, rows):
            held.append(account.held(RECEIVED))
            return ask(columns, rows)

        taken._scorer.scores = asked
        return await taken.rows(intake.Request({}, n, {"image": [picture] * n}))

    assert list(asyncio.run(go(5))) == [1.0] * 5
    assert held == [5 * 1_500_000] and budget.held(RECEIVED) == 0
    others = [native.Account(budget, HTTP) for _ in range(2)]
    assert [one.take(RECEIVED, 28 << 20) for one in others] == [0, 0]
    with pytest.raises(Refused, match="ask again later") as caught:  # it fits, but not now
        asyncio.run(go(5))
    assert caught.value.code == Code.BUSY and budget.held(RECEIVED) == 56 << 20
