"""Pictures of requests: which are decoded, to which pixels, what they take meanwhile, and why one is not decoded."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.loops import turns

from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol.errors import Code, Refused, SpecMismatch
from jurybox.server.frontend import pictures as module
from jurybox.server.frontend.pictures import NoPicture, Pictures, decoded, encoded_bytes, pixels_of
from jurybox.server.frontend.threads import WORKERS, ThreadPool


class Held:
    """Counts what is taken and given back, up to `most`."""

    def __init__(self, most: int | None = None) -> None:
        self.most, self.now, self.peak = most, 0, 0

    def take(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
        if self.most is not None and self.now > self.most:
            self.now -= size
            raise Refused("no room", Code.BUSY)

    def give(self, size: int) -> None:
        assert size >= 0
        self.now -= size


def encoded(width: int, height: int, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    sink = io.BytesIO()
    Image.new(mode, (width, height), 51 if mode in ("L", "I;16") else None).save(sink, kind, **options)
    return sink.getvalue()


def model(*shapes: tuple[int, ...], capacity: int = 300) -> ModelSpec:
    inputs = {f"x{i}": TensorSpec("uint8", shape, capacity if -1 in shape else 0) for i, shape in enumerate(shapes)}
    return ModelSpec("m", inputs, {"score": TensorSpec("float32", ())})


def of(spec: ModelSpec | None = None, size: tuple[int, int] | None = None, pool: Any = None) -> Pictures:
    return Pictures(pool or ThreadPool(), size, lambda: spec)


def one(given: Any, spec: ModelSpec | None = None, size: tuple[int, int] | None = None, held: Any = None) -> Any:
    """What becomes of a single picture, in this thread."""
    (found,) = of(spec, size).several([given], held or Held())
    return found


@pytest.mark.parametrize(
    ("shapes", "width", "height", "fits"),
    [
        ([(5, 7, 3)], 7, 5, True),
        ([(5, 7, 3)], 5, 7, True),  # EXIF data may turn it
        ([(5, 7, 3)], 5, 5, False),
        ([(9, 9, 3), (5, 7, 3)], 7, 5, True),
        ([(-1, -1, 3)], 10, 10, True),
        ([(-1, -1, 3)], 11, 10, False),
        ([(5, 7, -1)], 9, 9, False),
        ([(5, 7, 4)], 9, 9, True),  # it takes no pictures as they are
        ([(2, 5, 7, 3)], 9, 9, True),  # nor do videos tell their frames' size
        ([(4,)], 9, 9, True),
        ([(4,), (5, 7, 3)], 9, 9, False),
    ],
)
def test_a_picture_of_a_size_that_the_model_never_takes_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch, shapes: Any, width: int, height: int, fits: bool
) -> None:
    made: list[int] = []
    monkeypatch.setattr(module, "_rgb", lambda *_: made.append(1) or np.zeros((height, width, 3), np.uint8))
    found = one(encoded(width, height), model(*shapes))
    assert len(made) == fits
    if not fits:
        takes = " or ".join(str(TensorSpec("uint8", one, 300 if -1 in one else 0)) for one in shapes if len(one) >= 3)
        assert found == f"a picture of {width} x {height} pixels: the model takes {takes}"
        assert isinstance(one(encoded(width, height), model(*shapes), (4, 4)), np.ndarray), "it may be resized"
        assert isinstance(one(encoded(width, height), None), np.ndarray), "or the model is not known yet"


@pytest.mark.parametrize("size", [None, (4, 6)])
def test_a_request_is_refused_from_the_first_byte_that_its_pictures_take_too_much(size: Any) -> None:
    given = [encoded(10, 20), np.zeros((99, 99, 3), np.uint8), [encoded(30, 20), [b"a"]], b"none", NoPicture("why")]
    kept = 3 * (200 + 600) if size is None else 2 * 3 * 24
    if size is not None:
        kept += 2 * 3 * 24  # what turns out to be no picture
    takes = kept + WORKERS * 11 * 600
    of(None, size).check([given[:2], given[2:]], Held(takes))  # type: ignore[arg-type]
    with pytest.raises(Refused, match="0.0 GiB decoded, at most 0 MiB: send fewer") as caught:
        of(None, size).check([given[:2], given[2:]], Held(takes - 1))  # type: ignore[arg-type]
    assert caught.value.code == Code.TOO_LARGE
    of(None, size).check([given], Held(None))  # type: ignore[arg-type]
    if size is None:
        of(model((9, 9, 3))).check([given], Held(0))  # type: ignore[arg-type]  # each is refused without being decoded


def test_a_picture_of_more_pixels_than_any_may_have_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PIXELS", 100)
    for pixels, counts in ((100, True), (101, False)):
        data = encoded(pixels, 1)
        if counts:
            with pytest.raises(Refused):
                of().check([[data]], Held(1))  # type: ignore[arg-type]
            assert decoded(data).shape == (1, 100, 3)
        else:
            of().check([[data]], Held(1))  # type: ignore[arg-type]
            with pytest.raises(SpecMismatch, match="101 x 1 pixels, expected at most 100 in all"):
                decoded(data)


async def test_what_need_not_be_decoded_is_returned_without_a_thread() -> None:
    ready = [np.zeros((4, 6, 3), np.uint8), NoPicture("it is none")]
    made = of(size=(4, 6), pool="no threads")
    assert made.ready(ready) and made.ready([])
    found = await made.decoded(ready, Held())  # type: ignore[arg-type]
    assert found[0] is ready[0] and found[1] is ready[1]
    for other in (np.zeros((6, 4, 3), np.uint8), b"", "text", [np.zeros((4, 6, 3), np.uint8)], None):
        assert not made.ready([*ready, other])
    assert of().ready([np.zeros((9, 9, 3), np.uint8)])


async def test_many_pictures_are_decoded_in_their_order_in_a_few_tasks() -> None:
    runs: list[int] = []

    class Counting(ThreadPool):
        async def run(self, action: Any, *arguments: Any) -> Any:
            runs.append(len(arguments[0]))
            await turns(9 - len(runs))  # the first is the last to be done
            return action(*arguments)

    given = [np.full((1, 1, 3), i, np.uint8) for i in range(4 * WORKERS)] + [b"none"]
    found = await of(pool=Counting()).decoded(given, Held())  # type: ignore[arg-type]
    assert [part.flat[0] for part in found[:-1]] == list(range(4 * WORKERS)) and isinstance(found[-1], NoPicture)
    assert sum(runs) == len(given) and max(runs) == 2


def test_pixels_are_resized_and_their_copies_counted() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (10, 12, 3), np.uint8)
    held = Held()
    assert one(pixels, held=held) is pixels and one(pixels, size=(10, 12), held=held) is pixels and not held.peak
    found = one(pixels, size=(4, 6), held=held)
    expected = np.asarray(Image.fromarray(pixels).resize((6, 4), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(found, expected)
    assert (held.peak, held.now) == (8 * 10 * 12, 3 * 4 * 6)
    larger = Held()
    one(pixels, size=(30, 30), held=larger)
    assert larger.now == 8 * 10 * 12, "never more than was taken is given back"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_what_a_picture_takes_is_counted_while_it_is_decoded_and_its_pixels_afterwards(kind: str) -> None:
    held = Held()
    found = one(encoded(10, 20, kind), held=held)
    assert found.shape == (20, 10, 3) and (held.peak, held.now) == (11 * 200, 3 * 200)
    resized = Held()
    assert one(encoded(10, 20, kind), size=(2, 3), held=resized).shape == (2, 3, 3) and resized.now == 3 * 6


def test_a_picture_that_cannot_be_decoded_takes_nothing_afterwards() -> None:
    held, sink = Held(), io.BytesIO()
    Image.effect_noise((64, 64), 90).save(sink, "JPEG")
    data = sink.getvalue()
    found = one(data[: len(data) // 2], held=held)
    assert isinstance(found, NoPicture) and "expected a complete JPEG, PNG or WebP file" in found
    assert held.peak == 11 * 64 * 64 and held.now == 0
    with pytest.raises(SpecMismatch):
        decoded(data[: len(data) // 2])
    with pytest.raises(Refused, match="no room"):
        one(data, held=Held(100))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (b"GIF89a", "the header is of another format"),
        (encoded(3, 3, "GIF", "L"), "the header is of another format"),
        (b"RIFF" + bytes(40), "the header is truncated or of another format"),
        (encoded(3, 3, "WEBP")[:29], "the header is truncated or of another format"),
        (encoded(3, 3, "PNG", "I;16"), "a picture of mode 'I;16', expected 8 bits a channel"),
        (7, "expected the bytes of a picture or base64 text, came int"),
        ("no base64", "expected a picture in base64"),
        ("data:image/png;base64", "expected a picture in base64"),
    ],
)
def test_what_is_no_picture_says_why(given: Any, why: str) -> None:
    found = one(given)
    assert isinstance(found, NoPicture) and why in found
    if not (isinstance(given, bytes) and b"PNG" in given):
        assert pixels_of(given) in ((0, 0), (3, 3))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "RGB"])
def test_pictures_of_every_mode_are_rgb(mode: str) -> None:
    assert one(encoded(5, 4, "PNG", mode)).shape == (4, 5, 3)


@pytest.mark.parametrize("size", [None, (3, 2)])
def test_a_picture_is_turned_as_it_says(size: Any) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    assert one(encoded(5, 4, "JPEG", exif=turned), size=size).shape == (size or (5, 4)) + (3,)
    assert one(encoded(5, 4, "JPEG", exif=turned), model((5, 4, 3))).shape == (5, 4, 3)


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"exact": True, "save_all": True}])
@pytest.mark.parametrize("sides", [(1, 1), (300, 200), (3000, 2)])
def test_the_size_of_a_picture_is_read_from_its_header(options: Any, sides: tuple[int, int]) -> None:
    data = encoded(*sides, "WEBP", "RGBA" if "exact" in options else "RGB", **options)
    assert data[:4] == b"RIFF" and pixels_of(data) == sides
    assert pixels_of(base64.b64encode(data).decode()) == sides
    assert decoded(data).shape[:2] == sides[::-1]
    assert pixels_of(encoded(*sides)) == sides


def test_a_webp_that_is_too_large_is_refused_before_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "open", None)
    head = b"RIFF" + bytes(4) + b"WEBPVP8X" + bytes(8) + (8191).to_bytes(3, "little") + (8191).to_bytes(3, "little")
    with pytest.raises(SpecMismatch, match="8192 x 8192 pixels"):
        decoded(head)


def test_the_bytes_of_a_picture_may_be_text() -> None:
    text = base64.b64encode(b"abcd").decode()
    assert [encoded_bytes(given) for given in (b"abcd", text, f"data:image/png;base64,{text}")] == [b"abcd"] * 3
    for wrong in ("data:" + "x" * 100 + f",{text}", f"dats:image/png;base64,{text}"):
        with pytest.raises(SpecMismatch, match="base64"):
            encoded_bytes(wrong)


def test_the_frames_of_a_video_are_decoded_together_or_say_which_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = np.full((4, 5, 3), 7, np.uint8)
    found = one([frame, encoded(5, 4)])
    assert found.shape == (2, 4, 5, 3) and (found[0] == 7).all() and (found[1] == 0).all()
    wrong = {
        "a video without frames": [],
        "frame 1: a frame is a list": [frame, [frame]],
        "frame 2: expected a complete": [frame, frame, b"none"],
        "frames of (4, 5, 3) and (5, 4, 3), expected all of one size": [frame, encoded(4, 5)],
    }
    for why, frames in wrong.items():
        none = one(frames)
        assert isinstance(none, NoPicture) and none.startswith(why), none
    monkeypatch.setattr(module, "MOST_PIXELS", 60)
    assert one([frame] * 3).shape[0] == 3
    assert one([frame] * 4) == "a video of more than 60 pixels in its frames"
