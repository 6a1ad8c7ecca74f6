"""Common to all dialects: convert the fields of a request to rows of a model, and ask for their scores.

Pictures are decoded in threads (Pillow releases the interpreter's lock). Requests that arrive at the same time are
batched by the engine.

A picture is rotated by its EXIF data and converted to RGB; transparency is dropped. With `resize` it is brought to a
size with Pillow's bicubic filter, which averages over what it shrinks (antialiasing). Encodings and filters change
scores: docs/reward_hygiene.md.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from jurybox import native
from jurybox.client.rewards import Juror, Passing
from jurybox.client.rewards import Scores as Found
from jurybox.protocol.errors import Code, Error, Refused, SpecMismatch, said

VERSION_HEADER = "x-jurybox-weights-version"
_FORMATS = ("JPEG", "PNG", "WEBP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
MOST_PIXELS = 1 << 25  # of one picture, about 100 MB when it is decoded
_MOST_ROWS = 4096  # of one request
_WORKERS = max(2, os.cpu_count() or 1)


class ThreadPool:
    """Threads for the intakes of a gateway: they parse requests and decode pictures.

    As ThreadPoolExecutor and the loop's run_in_executor, without what makes a third of a lone request's way there and
    back: a second future, its lock, and its callbacks.

    Args:
        intakes: how many there are. In each of them one thread at most waits for an engine's answer.
    """

    def __init__(self, intakes: int = 0) -> None:
        self._lock = threading.Lock()
        self._todo: deque[_Task] = deque()
        self._idle: list[SimpleQueue[_Task]] = []
        self._unborn = _WORKERS + intakes

    async def run(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one of the threads; raises what it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        task = (loop, done, action, arguments)
        with self._lock:
            # Who was idle last: its memory is warm, and each thread has memory of its own.
            idle = self._idle.pop() if self._idle else None
            if idle is None:
                self._todo.append(task)
                if self._unborn:
                    self._unborn -= 1
                    threading.Thread(target=self._work, name=f"pictures {self._unborn}", daemon=True).start()
        if idle is not None:
            idle.put(task)
        return await done

    def _work(self) -> None:
        own: SimpleQueue[_Task] = SimpleQueue()
        while True:
            with self._lock:
                task = self._todo.popleft() if self._todo else None
                if task is None:
                    self._idle.append(own)
            _do(*(own.get() if task is None else task))
            del task  # a body, and pictures


_Task = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


def _do(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Any],
    action: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    if done.cancelled():
        return  # nobody waits for it any more
    found, failure = None, None
    try:
        found = action(*arguments)
    except BaseException as error:  # noqa: BLE001  somebody waits for it
        failure = RuntimeError(said(error)) if isinstance(error, StopIteration) else error  # which no future takes
    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(_end, done, found, failure)


def _end(done: asyncio.Future[Any], found: Any, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(found)
    else:
        done.set_exception(failure)


class Scores(NamedTuple):
    """The scores of a request, all finite, and the oldest weights version that computed them.

    Attributes:
        parts: of a panel the scores of its members, by name.
    """

    values: list[float]
    version: int
    parts: Mapping[str, list[float]] = MappingProxyType({})


class Request(NamedTuple):
    """The rows that a request wants scores of.

    Attributes:
        columns: values of each field, n of each.
        pictures: of fields that are pictures ("image", "source", ...) n each: encoded ones, bytes or base64 text, or
            uint8 (height, width, 3); of "video" lists of such, the frames, all of one size.
        told: more of the request, for its answer.
    """

    columns: Mapping[str, Any]
    n: int
    pictures: Mapping[str, Sequence[Any]] = MappingProxyType({})
    told: Any = None


class Reply(NamedTuple):
    """An answer over HTTP; Starlette's Response takes 0.03 ms to be made.

    Attributes:
        media: the body's type.
        version: of the weights; none: it is not told in a header.
        headers: others, names in lower case.
    """

    body: bytes
    media: str
    status: int = 200
    version: int | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def fields(self) -> list[tuple[str, str]]:
        """All headers, the body's among them."""
        told = [("content-length", str(len(self.body))), ("content-type", self.media)]
        if self.version is not None:
            told.append((VERSION_HEADER, str(self.version)))
        return [*told, *self.headers]


Write = Callable[[Request, Scores], Reply]  # an answer, where all rows have scores
WriteRows = Callable[[Request, Found], Reply]  # an answer, whatever is missing


class NoPicture(str):
    """Why a picture cannot be decoded."""

    __slots__ = ()


class Unscored(Error):
    """At least one row has no score; the message says which and why."""

    code = Code.ROW_FAILED


@dataclass(slots=True)
class _Begun:
    """A request whose rows were asked for.

    Attributes:
        found: of each row why it was not asked for, or nothing.
        good: the rows that were.
        scores: theirs, where they are there already.
        waiting: waits for them, where they are not.
    """

    found: Found
    good: list[int]
    scores: Found | None = None
    waiting: Callable[[], Awaitable[Found]] | None = None

    async def end(self) -> Found:
        """The scores of all rows, or why they have none."""
        return self.told(self.scores if self.waiting is None else await self.waiting())

    def told(self, scores: Found | None) -> Found:
        """The same, of the scores of those rows that were asked for."""
        found = self.found
        if scores is None:
            return found
        if len(self.good) == len(found):
            return scores
        found.version = scores.version
        found.parts = {name: list(found) for name in scores.parts}
        for into, part in ((found, scores), *((found.parts[name], part) for name, part in scores.parts.items())):
            for i, score in zip(self.good, part, strict=True):
                into[i] = score
        return found


class Intake:
    """Converts and scores the requests of one dialect.

    Args:
        address: the server's.
        juror: model, inputs, output and timeout, as `jurybox.client.rewards.Juror` takes them.
        size: (height, width) that pictures are resized to; None: they stay as they are.
        reward: the reward's name, where a dialect's requests name one.
        members: names of the panel's members, where the model is one.

    Attributes:
        rewards: the names that a request may ask for: the reward's, and those of a panel's members.
    """

    def __init__(
        self,
        pool: ThreadPool,
        address: str,
        *,
        size: tuple[int, int] | None = None,
        reward: str = "",
        members: Sequence[str] = (),
        **juror: Any,
    ) -> None:
        self.reward = reward
        self.rewards = list(dict.fromkeys((reward, *members)))
        self._pool = pool
        self._juror = Juror(address=address, **juror)
        self._size = size
        self._in_hand = 0  # requests begun and not answered
        self._named = {name for name in (juror.get("inputs") or {}).values() if type(name) is str}

    async def score(self, request: Request) -> Scores:
        """The scores of a request's rows. Raises Unscored if a row has none.

        Raises:
            Unscored: a row failed, its picture is none, or its score is not finite.
            Refused (code NOT_READY): no row got a score in time; a moment later they may.
            What `rows` raises.
        """
        return _all_scored(await self.rows(request))

    async def rows(self, request: Request) -> Found:
        """For each row its score, or why it has none; and the weights version, and a panel's parts.

        Raises:
            SpecMismatch: what came does not fit the model.
            Timeout, Busy, ServerGone, ModelNotFound, Refused.
        """
        _check_rows(request)
        self._in_hand += 1
        try:
            if request.n == 1 and all(self._is_ready(some) for some in request.pictures.values()):
                begun: _Begun = await self.off_loop(
                    partial(self._begin, here=self._in_hand == 1), request, request.pictures
                )
            else:
                decoded = {name: await self._decoded(pictures) for name, pictures in request.pictures.items()}
                begun = self._begin(request, decoded)
            return await begun.end()
        finally:
            self._in_hand -= 1

    async def answered(self, read: Callable[[bytes], Request], write: Write, body: bytes) -> Reply:
        """As `answered_rows`; raises as `score` where a row has no score."""
        return await self.answered_rows(read, lambda request, found: write(request, _all_scored(found)), body)

    async def answered_rows(self, read: Callable[[bytes], Request], write: WriteRows, body: bytes) -> Reply:
        """Read a body in the thread pool, ask for its rows' scores, and write the answer.

        What has at most one picture is decoded and sent by the thread that read it. Where no other request is in hand
        that thread waits for the answer, too, and writes ours: each change of threads costs a lone request 0.1 ms.

        Args:
            read, write: raise what they find wrong.

        Raises:
            What `read`, `write` and `rows` raise.
        """
        self._in_hand += 1
        try:
            reply, request, begun = await self.off_loop(self._begun, read, write, body)
            if reply is None:
                reply = write(request, await (self.rows(request) if begun is None else begun.end()))
            return reply  # type: ignore[no-any-return]
        finally:
            self._in_hand -= 1

    def _begun(
        self, read: Callable[[bytes], Request], write: WriteRows, body: bytes
    ) -> tuple[Reply | None, Request, _Begun | None]:
        request = read(body)
        _check_rows(request)
        if request.n > 1 and request.pictures:
            return None, request, None
        decoded = {name: self._several(some) for name, some in request.pictures.items()}
        begun = self._begin(request, decoded, here=self._in_hand == 1)
        return None if begun.waiting is not None else write(request, begun.told(begun.scores)), request, begun

    def _begin(self, request: Request, decoded: Mapping[str, Sequence[Any]], *, here: bool = False) -> _Begun:
        """Ask for the rows whose pictures could be decoded.

        Args:
            here: in this thread, which then waits for the scores, unless others are being asked.
        """
        found, good, given = Found([""] * request.n), list(range(request.n)), dict(request.columns)
        for images in decoded.values():
            for i, image in enumerate(images):
                if isinstance(image, str):
                    found[i] = image
        given |= decoded
        if any(found):
            good = [i for i, why in enumerate(found) if not why]
            given = {name: [values[i] for i in good] for name, values in given.items()}
        if not good:
            return _Begun(found, good)
        scores = self._juror.scores_here(given, len(good)) if here else None
        return _Begun(found, good, scores, None if scores is not None else self._juror.ask(given, len(good)))

    async def _decoded(self, pictures: Sequence[Any]) -> list[Any]:
        """Arrays, and the reason where one cannot be decoded. Those of a large request share a few tasks."""
        if self._is_ready(pictures):
            return list(pictures)
        step = 1 + len(pictures) // (4 * _WORKERS)
        parts = (pictures[i : i + step] for i in range(0, len(pictures), step))
        images = await asyncio.gather(*(self.off_loop(self._several, part) for part in parts))
        return [image for part in images for image in part]

    def _several(self, pictures: Sequence[Any]) -> list[Any]:
        return [self._picture(one) for one in pictures]

    def _is_ready(self, pictures: Sequence[Any]) -> bool:
        """Whether there is nothing to decode."""
        return all(isinstance(one, np.ndarray) and self._fits(one) for one in pictures)

    def _fits(self, picture: NDArray[np.uint8]) -> bool:
        return self._size is None or picture.shape[:2] == self._size

    async def off_loop(self, action: Any, *arguments: Any) -> Any:
        """Run a function in the thread pool."""
        return await self._pool.run(action, *arguments)

    async def lease(self) -> None:
        """Lease the lane now, before others' lanes grow over its rows; what fails is tried again at a request."""
        with suppress(Error):
            await self._juror.scores_async({}, 0)

    def takes(self, name: str) -> bool:
        """Whether an input of the model is said to be this field: of what is not sent unless it is wanted."""
        return name in self._named

    def close(self) -> None:
        """Release the lane."""
        self._juror.close()

    def _picture(self, given: Any) -> NDArray[np.uint8] | NoPicture:
        """Decode a picture, or the frames of a video; returns the reason where it cannot be decoded."""
        if type(given) is list:
            return self._video(given)
        if isinstance(given, np.ndarray):
            if self._fits(given) or self._size is None:
                return given
            return _pixels(_resized(Image.fromarray(given), self._size))
        try:
            return decoded(encoded_bytes(given), self._size)
        except SpecMismatch as error:
            return NoPicture(error)

    def _video(self, frames: list[Any]) -> NDArray[np.uint8] | NoPicture:
        """(frames, height, width, 3) of encoded frames, bounded as one picture is."""
        pictures: list[NDArray[np.uint8]] = []
        for frame in frames:
            picture = self._picture(frame) if type(frame) is not list else NoPicture("a frame is a list")
            if isinstance(picture, NoPicture):
                return NoPicture(f"frame {len(pictures)}: {picture}")
            if pictures and picture.shape != pictures[0].shape:
                return NoPicture(f"frames of {pictures[0].shape} and {picture.shape}, expected all of one size")
            if (len(pictures) + 1) * picture.size > 3 * MOST_PIXELS:
                return NoPicture(f"a video of more than {MOST_PIXELS} pixels in its frames")
            pictures.append(picture)
        return np.stack(pictures) if pictures else NoPicture("a video without frames")


def _check_rows(request: Request) -> None:
    if request.n > _MOST_ROWS:
        raise Refused(f"{request.n} samples came in one request, expected at most {_MOST_ROWS}", Code.TOO_LARGE)


def _all_scored(found: Found) -> Scores:
    if len(found) == 1 and type(score := found[0]) is float and not found.parts:
        return Scores([score], found.version)
    wrong = {i: why for i, why in enumerate(found) if isinstance(why, str)}
    if wrong:
        first = min(wrong)
        why = f"{len(wrong)} of {len(found)} samples have no score; sample {first}: {wrong[first]}"
        passing = all(isinstance(one, Passing) for one in wrong.values())
        raise Refused(why, Code.NOT_READY) if passing else Unscored(why)
    values = [score for score in found if not isinstance(score, str)]
    # Where the total is there, so is every member's score.
    parts = {name: [score for score in part if not isinstance(score, str)] for name, part in found.parts.items()}
    return Scores(values, found.version, parts)


def encoded_bytes(given: Any) -> bytes:
    """The bytes of a picture that came as such or in base64, with or without ``data:``. Raises SpecMismatch."""
    if type(given) is bytes:
        return given
    if type(given) is not str:
        raise SpecMismatch(f"expected the bytes of a picture or base64 text, came {type(given).__name__}")
    try:
        text = given[given.index(",", 0, 100) + 1 :] if given.startswith("data:") else given
        found = native.base64_decoded(text)
        return base64.b64decode(text, validate=True) if found is None else found  # which says what is wrong
    except (binascii.Error, ValueError) as error:
        raise SpecMismatch(f"expected a picture in base64: {said(error, 100)}") from error


def decoded(data: bytes, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """An RGB picture, (height, width, 3), from a JPEG, PNG or WebP file's bytes; of an animation the first frame.

    Its size is read off the header and checked before anything is decoded.

    Args:
        size: (height, width) to resize to.

    Raises:
        SpecMismatch: it is none of these, cut off, broken or too large.
    """
    try:
        if data[:4] == b"RIFF":  # Pillow makes room for a WebP's pixels as soon as it is opened
            _check_pixels(*_webp_size(data))
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_pixels(*image.size)
            if image.mode not in _MODES:
                raise SpecMismatch(f"a picture of mode {image.mode!r}, expected 8 bits a channel")
            ImageOps.exif_transpose(image, in_place=True)  # otherwise it copies what need not be turned
            rgb = image if image.mode == "RGB" else image.convert("RGB")
            return _pixels(rgb if size is None else _resized(rgb, size))
    except SpecMismatch:
        raise
    except UnidentifiedImageError as error:  # whose text is an address in memory
        raise SpecMismatch("expected a whole JPEG, PNG or WebP file: its beginning is none of theirs") from error
    except Exception as error:
        raise SpecMismatch(f"expected a whole JPEG, PNG or WebP file: {said(error, 150)}") from error


def _pixels(rgb: Image.Image) -> NDArray[np.uint8]:
    """As np.asarray, which copies twice, in half the time where Pillow (11.2 and later) tells where the pixels are."""
    with suppress(AttributeError, ValueError):  # an older one; a picture of many megabytes, which lies in parts
        schema, array = rgb.__arrow_c_array__()
        pixels = np.empty((rgb.height, rgb.width, 3), np.uint8)
        if native.drop_fourth(schema, array, pixels):
            return pixels
    return np.asarray(rgb)


def _resized(rgb: Image.Image, size: tuple[int, int]) -> Image.Image:
    return rgb if rgb.size == size[::-1] else rgb.resize(size[::-1], Image.Resampling.BICUBIC)


def _check_pixels(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise SpecMismatch(f"a picture of {width} x {height} pixels, expected at most {MOST_PIXELS} in all")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height in a WebP file's header (RFC 9649)."""
    kind = data[12:16]
    if len(data) < 30 or data[8:12] != b"WEBP" or kind not in (b"VP8X", b"VP8 ", b"VP8L"):
        raise SpecMismatch("expected a whole JPEG, PNG or WebP file: the header is cut off or none of theirs")
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    bits = int.from_bytes(data[21:25], "little")
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


def listed(body: Mapping[str, Any], name: str, n: int | None = None) -> list[Any]:
    """Get a field that is a list, of n values if n is given. Raises SpecMismatch."""
    values = body.get(name)
    if type(values) is not list:
        raise SpecMismatch(f"expected a list in {name!r}, came {type(values).__name__}")
    if n is not None and len(values) != n:
        raise SpecMismatch(f"expected {n} values in {name!r}, came {len(values)}")
    return values
