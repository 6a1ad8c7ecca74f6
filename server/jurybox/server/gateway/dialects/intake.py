"""What all dialects share: converting the fields of a request to rows of a model, and requesting their scores.

Pictures are decoded in threads (Pillow releases the global interpreter lock). The engine batches requests that arrive
at the same time.

A picture is rotated according to its EXIF data and converted to RGB; transparency is dropped. With `resize` it is
resized with Pillow's bicubic filter, which is antialiased when it shrinks. Encodings and filters change scores: see
docs/reward_hygiene.md.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
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
from jurybox.client.juror import Juror, Passing
from jurybox.client.juror import Scores as Found
from jurybox.client.juror_rows import PICTURE_MODES, CallColumns
from jurybox.protocol.errors import Code, Error, Refused, SpecMismatch, said
from jurybox.protocol.spec import VARIABLE, TensorSpec
from jurybox.server.security.limits import OF_REQUEST, DecodedCharge

VERSION_HEADER = "x-jurybox-weights-version"
_FORMATS = ("JPEG", "PNG", "WEBP")
MOST_PIXELS = 1 << 25  # of one picture, about 100 MB decoded
_PER_PIXEL = 11  # bytes while it is decoded: Pillow's own of two modes, four each, and the array's
_MOST_ROWS = 4096  # of one request
_WORKERS = max(2, os.cpu_count() or 1)


class ThreadPool:
    """The threads of a gateway's intakes, which parse requests and decode pictures.

    Like ThreadPoolExecutor with the loop's run_in_executor, but without the second future, its lock and its callbacks,
    which take a third of the round trip of a single request.

    Args:
        intakes: number of intakes. Each adds a thread, because in each at most one waits for an engine's answer.
    """

    def __init__(self, intakes: int = 0) -> None:
        self._lock = threading.Lock()
        self._todo: deque[_Task] = deque()
        self._idle: list[SimpleQueue[_Task]] = []
        self._not_started = _WORKERS + intakes

    async def run(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one of the threads, and return what it returns or raise what it raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        task = (loop, done, action, arguments)
        with self._lock:
            # The thread that became idle last: each has its own memory, and that of this one is still warm.
            idle = self._idle.pop() if self._idle else None
            if idle is None:
                self._todo.append(task)
                if self._not_started:
                    self._not_started -= 1
                    threading.Thread(target=self._work, name=f"pictures {self._not_started}", daemon=True).start()
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
            del task  # release the body and the pictures


_Task = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


def _do(
    loop: asyncio.AbstractEventLoop,
    done: asyncio.Future[Any],
    action: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    if done.cancelled():
        return
    found, failure = None, None
    try:
        found = action(*arguments)
    except BaseException as error:  # noqa: BLE001  the waiting caller must get every error
        failure = RuntimeError(said(error)) if isinstance(error, StopIteration) else error  # futures reject it
    with suppress(RuntimeError):  # the loop was closed
        loop.call_soon_threadsafe(_end, done, found, failure)


def _end(done: asyncio.Future[Any], found: Any, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(found)
    else:
        done.set_exception(failure)


class AnswerForm(NamedTuple):
    """How a dialect writes its answers, where its client leaves that open.

    Attributes:
        like: the server whose form it is, where two answer the same request differently.
        score_range: [lowest, highest] that a judge may say; empty: 0 and more.
        decimals: digits after the point of a number that a judge says.
        weights: those of a panel's members, by name.
    """

    like: str = "vllm"
    score_range: Sequence[float] = ()
    decimals: int = 6
    weights: Mapping[str, float] = MappingProxyType({})


class RequestScores(NamedTuple):
    """The scores of a request.

    Attributes:
        values: one finite score per row.
        version: the oldest weights version that computed them.
        parts: the scores of a panel's members, by name.
    """

    values: list[float]
    version: int
    parts: Mapping[str, list[float]] = MappingProxyType({})


class Request(NamedTuple):
    """The rows that a request asks to score.

    Attributes:
        columns: n values of each field.
        n: number of rows.
        pictures: n pictures of each field of pictures ("image", "source", ...), encoded (bytes or base64 text) or as
            uint8 (height, width, 3); of "video" n lists of frames, each of such pictures of one size.
        context: further data of the request that its answer needs.
        parameters: values of the request that are parameters of the model, if it has such; others are ignored.
    """

    columns: Mapping[str, Any]
    n: int
    pictures: Mapping[str, Sequence[Any]] = MappingProxyType({})
    context: Any = None
    parameters: Mapping[str, Any] = MappingProxyType({})


class HttpReply(NamedTuple):
    """An HTTP response. Starlette's Response would take 0.03 ms to create.

    Attributes:
        media: media type of the body.
        version: weights version, sent in a header; None: no such header.
        headers: further headers, with names in lower case.
    """

    body: bytes
    media: str
    status: int = 200
    version: int | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def fields(self) -> list[tuple[str, str]]:
        """Return all headers, including those of the body."""
        headers = [("content-length", str(len(self.body))), ("content-type", self.media)]
        if self.version is not None:
            headers.append((VERSION_HEADER, str(self.version)))
        return [*headers, *self.headers]


Write = Callable[[Request, RequestScores], HttpReply]  # writes an answer when all rows have scores
WriteRows = Callable[[Request, Found], HttpReply]  # writes an answer even when scores are missing


class NoPicture(str):
    """The reason why a picture cannot be decoded."""

    __slots__ = ()


class Unscored(Error):
    """At least one row has no score; the message says which and why."""

    code = Code.ROW_FAILED


@dataclass(slots=True)
class _Begun:
    """A request whose rows were sent to the model.

    Attributes:
        found: for each row the reason why it was not sent, or "".
        good: indices of the rows that were sent.
        scores: their scores, if they are available already.
        waiting: waits for the scores, if they are not.
    """

    found: Found
    good: list[int]
    scores: Found | None = None
    waiting: Callable[[], Awaitable[Found]] | None = None

    async def end(self) -> Found:
        """Wait for the scores; return for each row its score, or the reason why it has none."""
        return self.combined(self.scores if self.waiting is None else await self.waiting())

    def combined(self, scores: Found | None) -> Found:
        """Return for each row its score or the reason for none, given the scores of the rows that were sent."""
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
    """The scorer of one dialect's requests, which converts them to rows of the model.

    Args:
        pool: threads that parse requests and decode pictures.
        address: address of the server.
        juror: model, inputs, output and timeout; see `jurybox.client.juror.Juror`.
        size: (height, width) to resize pictures to; None: no resizing.
        reward: name of the reward, for dialects whose requests name one.
        members: names of the members, if the model is a panel.
        form: how answers are written.

    Attributes:
        rewards: the names that a request may ask for: the reward's and those of a panel's members.
    """

    def __init__(
        self,
        pool: ThreadPool,
        address: str,
        *,
        size: tuple[int, int] | None = None,
        reward: str = "",
        members: Sequence[str] = (),
        form: AnswerForm | None = None,
        **juror: Any,
    ) -> None:
        self.reward = reward
        self.form = form or AnswerForm()
        self.rewards = list(dict.fromkeys((reward, *members)))
        self._pool = pool
        self._juror = Juror(address=address, **juror)
        self._size = size
        self._in_hand = 0  # requests in progress
        self._named = {name for name in (juror.get("inputs") or {}).values() if type(name) is str}

    async def rows(self, request: Request) -> Found:
        """Return for each row its score or the reason for none, with the weights version and a panel's parts.

        Raises:
            SpecMismatch: the rows do not fit the model's inputs.
            Timeout, Busy, ServerGone, ModelNotFound, Refused.
        """
        held = DecodedCharge(OF_REQUEST.get())
        try:
            return await self._rows(request, held)
        finally:
            held.give()

    async def _rows(self, request: Request, held: DecodedCharge) -> Found:
        check_rows(request)
        self._in_hand += 1
        try:
            if request.n == 1 and all(self._is_ready(some) for some in request.pictures.values()):
                begun: _Begun = await self.off_loop(
                    partial(self._begin, here=self._in_hand == 1), request, request.pictures
                )
            else:
                await self.off_loop(self._check_decoded, request, held)
                decoded = {name: await self._decoded(pictures, held) for name, pictures in request.pictures.items()}
                begun = self._begin(request, decoded)
            return await begun.end()
        finally:
            self._in_hand -= 1

    async def answered(self, read: Callable[[bytes], Request], write: Write, body: bytes) -> HttpReply:
        """Answer a request like `answered_rows`, but only if every row has a score.

        Raises:
            Unscored: a row failed, its picture cannot be decoded, or its score is not finite.
            Refused (code NOT_READY): rows have no score only for reasons that may pass, so that a retry may succeed.
            Error: whatever `answered_rows` raises.
        """
        return await self.answered_rows(read, lambda request, found: write(request, _all_scored(found)), body)

    async def answered_rows(self, read: Callable[[bytes], Request], write: WriteRows, body: bytes) -> HttpReply:
        """Read a body in the thread pool, request the scores of its rows, and write the answer.

        The thread that reads a request also sends it to the model, unless it has several rows with pictures. If no
        other request is in progress, this thread also waits for the scores and writes the answer: each switch of
        threads costs a single request 0.1 ms.

        Args:
            read: parses the body.
            write: writes the answer.

        Raises:
            Error: whatever `read`, `write` and `rows` raise.
        """
        held = DecodedCharge(OF_REQUEST.get())
        self._in_hand += 1
        try:
            reply, request, begun = await self.off_loop(self._begun, read, write, body, held)
            if reply is None:
                reply = write(request, await (self._rows(request, held) if begun is None else begun.end()))
            return reply  # type: ignore[no-any-return]
        finally:
            self._in_hand -= 1
            held.give()

    def _begun(
        self, read: Callable[[bytes], Request], write: WriteRows, body: bytes, held: DecodedCharge
    ) -> tuple[HttpReply | None, Request, _Begun | None]:
        request = read(body)
        check_rows(request)
        if request.n > 1 and request.pictures:
            return None, request, None
        decoded = {name: self._several(some, held) for name, some in request.pictures.items()}
        begun = self._begin(request, decoded, here=self._in_hand == 1)
        return None if begun.waiting is not None else write(request, begun.combined(begun.scores)), request, begun

    def _begin(self, request: Request, decoded: Mapping[str, Sequence[Any]], *, here: bool = False) -> _Begun:
        """Request the scores of the rows whose pictures could be decoded.

        Args:
            here: wait for the scores in this thread, unless other requests are in progress.
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
        if request.parameters:
            given = CallColumns(given, request.parameters)
        scores = self._juror.scores_here(given, len(good)) if here else None
        return _Begun(found, good, scores, None if scores is not None else self._juror.ask(given, len(good)))

    def _check_decoded(self, request: Request, held: DecodedCharge) -> None:
        """Refuse a request whose pictures would take more memory than it may have, by their headers.

        Raises:
            Refused (code TOO_LARGE).
        """
        if (most := held.most) is None:
            return
        kept = largest = 0
        for pictures in request.pictures.values():
            for one in _each(pictures):
                width, height = pixels_of(one)
                if width * height > MOST_PIXELS or self._unfit(width, height):
                    continue  # it is refused without being decoded
                largest = max(largest, width * height)
                kept += 3 * (width * height if self._size is None else self._size[0] * self._size[1])
        whole = kept + _WORKERS * _PER_PIXEL * largest
        if whole > most:
            why = f"these pictures take {whole / (1 << 30):.1f} GiB decoded, at most {most >> 20} MiB: send fewer"
            raise Refused(why, Code.TOO_LARGE)

    def _unfit(self, width: int, height: int) -> str:
        """Return why the model takes no picture of this size; "" if it may, or is not known yet."""
        spec = self._juror.spec
        if spec is None or self._size is not None:
            return ""
        pictures = [item for item in spec.inputs.values() if len(item.shape) >= 3]
        if not pictures or any(_may_take(item, width, height) for item in pictures):
            return ""
        return f"a picture of {width} x {height} pixels: the model takes {' or '.join(map(str, pictures))}"

    async def _decoded(self, pictures: Sequence[Any], held: DecodedCharge) -> list[Any]:
        """Return decoded pictures, or the reason for each that cannot be decoded. A large request uses a few tasks."""
        if self._is_ready(pictures):
            return list(pictures)
        step = 1 + len(pictures) // (4 * _WORKERS)
        parts = (pictures[i : i + step] for i in range(0, len(pictures), step))
        images = await asyncio.gather(*(self.off_loop(self._several, part, held) for part in parts))
        return [image for part in images for image in part]

    def _several(self, pictures: Sequence[Any], held: DecodedCharge) -> list[Any]:
        return [self._picture(one, held) for one in pictures]

    def _is_ready(self, pictures: Sequence[Any]) -> bool:
        """Return whether all pictures are arrays of the right size, so that none needs to be decoded."""
        return all(isinstance(one, np.ndarray) and self._fits(one) for one in pictures)

    def _fits(self, picture: NDArray[np.uint8]) -> bool:
        return self._size is None or picture.shape[:2] == self._size

    async def off_loop(self, action: Any, *arguments: Any) -> Any:
        """Run a function in the thread pool."""
        return await self._pool.run(action, *arguments)

    async def lease(self) -> None:
        """Lease the lane now, before other lanes take up its rows. After an error the next request tries again."""
        with suppress(Error):
            await self._juror.scores_async({}, 0)

    def takes(self, name: str) -> bool:
        """Return whether the settings map this field to an input of the model; optional fields need that."""
        return name in self._named

    def _picture(self, given: Any, held: DecodedCharge) -> NDArray[np.uint8] | NoPicture:
        """Decode a picture or the frames of a video; return the reason if it cannot be decoded."""
        if type(given) is list:
            return self._video(given, held)
        if isinstance(given, np.ndarray):
            if self._fits(given) or self._size is None:
                return given
            copied = 8 * given.size // 3  # Pillow's pixels and the array's
            held.take(copied)
            pixels = _pixels(_resized(Image.fromarray(given), self._size))
            held.give(max(0, copied - pixels.nbytes))
            return pixels
        try:
            data = encoded_bytes(given)
            return decoded(data, self._size, held, self._unfit)
        except SpecMismatch as error:
            return NoPicture(error)

    def _video(self, frames: list[Any], held: DecodedCharge) -> NDArray[np.uint8] | NoPicture:
        """Decode frames to (frames, height, width, 3); together they have the size limit of one picture."""
        pictures: list[NDArray[np.uint8]] = []
        for frame in frames:
            picture = self._picture(frame, held) if type(frame) is not list else NoPicture("a frame is a list")
            if isinstance(picture, NoPicture):
                return NoPicture(f"frame {len(pictures)}: {picture}")
            if pictures and picture.shape != pictures[0].shape:
                return NoPicture(f"frames of {pictures[0].shape} and {picture.shape}, expected all of one size")
            if (len(pictures) + 1) * picture.size > 3 * MOST_PIXELS:
                return NoPicture(f"a video of more than {MOST_PIXELS} pixels in its frames")
            pictures.append(picture)
        return np.stack(pictures) if pictures else NoPicture("a video without frames")


def check_rows(request: Request) -> None:
    """Raise Refused (code TOO_LARGE) if a request has too many rows."""
    if request.n > _MOST_ROWS:
        raise Refused(f"a request of {request.n} samples, expected at most {_MOST_ROWS}", Code.TOO_LARGE)


def _all_scored(found: Found) -> RequestScores:
    if len(found) == 1 and type(score := found[0]) is float and not found.parts:
        return RequestScores([score], found.version)
    wrong = {i: why for i, why in enumerate(found) if isinstance(why, str)}
    if wrong:
        first = min(wrong)
        why = f"{len(wrong)} of {len(found)} samples have no score; sample {first}: {wrong[first]}"
        passing = all(isinstance(one, Passing) for one in wrong.values())
        raise Refused(why, Code.NOT_READY) if passing else Unscored(why)
    values = [score for score in found if not isinstance(score, str)]
    # A row with a total has the score of every member.
    parts = {name: [score for score in part if not isinstance(score, str)] for name, part in found.parts.items()}
    return RequestScores(values, found.version, parts)


def encoded_bytes(given: Any) -> bytes:
    """Return the bytes of a picture given as bytes, base64 text or a ``data:`` URL. Raises SpecMismatch."""
    if type(given) is bytes:
        return given
    if type(given) is not str:
        raise SpecMismatch(f"expected the bytes of a picture or base64 text, came {type(given).__name__}")
    try:
        text = given[given.index(",", 0, 100) + 1 :] if given.startswith("data:") else given
        found = native.base64_decoded(text)
        return base64.b64decode(text, validate=True) if found is None else found  # b64decode has the error message
    except (binascii.Error, ValueError) as error:
        raise SpecMismatch(f"expected a picture in base64: {said(error, 100)}") from error


def _may_take(item: TensorSpec, width: int, height: int) -> bool:
    """Return whether an input may take a picture of this size, or does not take pictures as they are."""
    sizes = (height, width, 3), (width, height, 3)  # EXIF data may swap them
    return (
        len(item.shape) != 3
        or item.shape[2] not in (3, VARIABLE)
        or any(item.extents_of(size) is not None for size in sizes)
    )


def _each(pictures: Sequence[Any]) -> Iterator[Any]:
    """Return the pictures that must be decoded; those of videos, too."""
    for one in pictures:
        for part in one if type(one) is list else (one,):
            if not isinstance(part, (np.ndarray, list)):
                yield part


def pixels_of(given: Any) -> tuple[int, int]:
    """Return width and height from the header of a picture, without decoding it; (0, 0) if it is no picture."""
    try:
        data = encoded_bytes(given)
        if data[:4] == b"RIFF":
            return _webp_size(data)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            return image.size
    except Exception:  # noqa: BLE001  whatever is wrong is reported when it is decoded
        return 0, 0


def decoded(
    data: bytes,
    size: tuple[int, int] | None = None,
    held: DecodedCharge | None = None,
    unfit: Callable[[int, int], str] = lambda *_: "",
) -> NDArray[np.uint8]:
    """Decode the bytes of a JPEG, PNG or WebP file; of an animation only the first frame.

    The size is read from the header and checked before the pixels are decoded.

    Args:
        data: contents of the file.
        size: (height, width) to resize to.
        held: counts the pixels.
        unfit: called with width and height before the pixels are decoded; returns why they are of no use.

    Returns:
        RGB pixels, uint8 (height, width, 3).

    Raises:
        SpecMismatch: the file has another format, or is truncated, damaged or too large.
    """
    try:
        if data[:4] == b"RIFF":  # Pillow allocates a WebP's pixels when it opens the file
            _check_pixels(*_webp_size(data))
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check_pixels(*image.size)
            if why := unfit(*image.size):
                raise SpecMismatch(why)
            if image.mode not in PICTURE_MODES:
                raise SpecMismatch(f"a picture of mode {image.mode!r}, expected 8 bits a channel")
            peak = _PER_PIXEL * image.width * image.height
            if held is not None:
                held.take(peak)
            try:
                pixels = _rgb(image, size)
            except BaseException:
                if held is not None:
                    held.give(peak)
                raise
            if held is not None:
                held.give(max(0, peak - pixels.nbytes))
            return pixels
    except (SpecMismatch, Refused):
        raise
    except UnidentifiedImageError as error:  # its message is only a memory address
        raise SpecMismatch("expected a complete JPEG, PNG or WebP file: the header is of another format") from error
    except Exception as error:
        raise SpecMismatch(f"expected a complete JPEG, PNG or WebP file: {said(error, 150)}") from error


def _rgb(image: Image.Image, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    ImageOps.exif_transpose(image, in_place=True)  # otherwise it copies pictures that need no rotation
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return _pixels(rgb if size is None else _resized(rgb, size))


def _pixels(rgb: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels like np.asarray, which copies them twice, in half the time with Pillow 11.2 or later."""
    with suppress(AttributeError, ValueError):  # an older Pillow; a large picture, which Pillow stores in blocks
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
    """Return width and height from a WebP file's header (RFC 9649)."""
    kind = data[12:16]
    if len(data) < 30 or data[8:12] != b"WEBP" or kind not in (b"VP8X", b"VP8 ", b"VP8L"):
        raise SpecMismatch("expected a complete JPEG, PNG or WebP file: the header is truncated or of another format")
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    bits = int.from_bytes(data[21:25], "little")
    return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)


def scalars(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the single values of a body, of which some may be parameters of the model."""
    return {name: value for name, value in body.items() if type(value) in (bool, int, float, str)}


def listed(body: Mapping[str, Any], name: str, n: int | None = None) -> list[Any]:
    """Return a field that must be a list, of n values if n is given. Raises SpecMismatch."""
    values = body.get(name)
    if type(values) is not list:
        raise SpecMismatch(f"expected a list in {name!r}, came {type(values).__name__}")
    if n is not None and len(values) != n:
        raise SpecMismatch(f"expected {n} values in {name!r}, came {len(values)}")
    return values
