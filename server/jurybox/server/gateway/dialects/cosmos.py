"""cosmos-rl's reward service: one request sends the pictures, later ones ask for their scores.

    POST enqueue   a line of JSON, then a .npy file: uint8 (n, height, width, 3)
        {"prompts": [str, ...], "reward_fn": {name: weight, ...}, "media_type": "image"} -> {"uuid": str}
    POST pull      a form with uuid and type, the reward's name
        -> {"scores": {name: [float, ...]}, ...} as soon as they are available, else 400 {"message": why}

The client polls sixty times, over 53 minutes, whatever other answer it gets. So a sample without a score is NaN in the
answer, which makes the client drop its prompt, and a request that is invalid or too large is refused before it gets a
uuid. Whether the model takes the pictures is known only later: those that it does not take are NaN.
Answers are kept for ten minutes, because a client that lost one asks again; when there are thousands, the oldest of
those that were read are deleted sooner.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import parse_qs

import numpy as np
from numpy.typing import NDArray

from jurybox.protocol.errors import Busy, Code, Error, ProtocolMismatch, Refused, SpecMismatch, plain, said
from jurybox.server.gateway.dialects import json_dialects
from jurybox.server.gateway.dialects.intake import Intake, Request, check_rows, listed
from jurybox.server.gateway.dialects.json_dialects import MEDIA, read
from jurybox.server.gateway.known_paths import HttpReply
from jurybox.server.gateway.npy import npy_head

_HOLD = 4.0  # seconds that `pull` waits for the scores; the client's own time-out is 5
_KEPT = 600.0  # seconds
_MOST_KEPT = 4096  # answers, and requests that are being scored
_MOST_WAITING = 1 << 30  # bytes of pictures that are being scored
_MOST_LINE = 4 << 20  # bytes of the line of JSON
_SPOKEN = "expected a line of JSON and a .npy file of uint8 (n, height, width, 3)"

refusal = partial(json_dialects.refusal, key="message")


@dataclass(slots=True)
class _CosmosJob:
    """A request that was accepted."""

    scoring: asyncio.Task[dict[str, Any]]
    size: int  # bytes of its pictures
    at: float  # when it was accepted, monotonic seconds
    read: bool = False  # whether a client has got its scores


class Cosmos:
    """The requests of one dialect that are being scored, and the answers that are still kept.

    Args:
        intake: scores the requests.
        log: called with the reason when samples have no score, because the client gets only NaN.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, intake: Intake, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._intake = intake
        self._log = log
        self._clock = clock
        self._jobs: dict[str, _CosmosJob] = {}

    def answers(self) -> Mapping[str, Callable[[bytes], Awaitable[HttpReply]]]:
        """Return the functions that answer a request body, by path."""
        return {"/enqueue": self.enqueue, "/pull": self.pull, "/ping": self.ping}

    async def enqueue(self, body: bytes) -> HttpReply:
        """Accept pictures for scoring. Raises ProtocolMismatch, SpecMismatch, Refused, Busy."""
        given, pictures = await self._intake.read(_split, body)
        prompts = listed(given, "prompts", len(pictures))
        rewards = given.get("reward_fn")
        if type(rewards) is not dict:
            raise SpecMismatch(f"expected a dict of names and weights in 'reward_fn', came {type(rewards).__name__}")
        wanted = [name for name, weight in rewards.items() if not (_is_number(weight) and weight <= 0)]
        if unknown := [name for name in wanted if name not in self._intake.rewards]:
            there = ", ".join(self._intake.rewards)
            raise SpecMismatch(f"unknown reward {plain(unknown[0], 100)!r}, expected one of {there}")
        request = Request({"prompt": prompts, "text": prompts}, len(pictures), {"image": list(pictures)})
        check_rows(request)
        self._forget_old()
        waiting = sum(one.size for one in self._jobs.values() if not one.scoring.done())
        if waiting + pictures.nbytes > max(_MOST_WAITING, pictures.nbytes) or len(self._jobs) >= _MOST_KEPT:
            raise Busy(f"{len(self._jobs)} requests with {waiting} bytes of pictures are held: ask again later")
        key = str(uuid.uuid4())
        scoring = asyncio.create_task(self._scored(request))
        self._jobs[key] = _CosmosJob(scoring, pictures.nbytes, self._clock())
        await asyncio.sleep(0)  # let scoring start now, not after the answer was sent
        return HttpReply(json.dumps({"uuid": key}).encode(), MEDIA)

    async def pull(self, body: bytes) -> HttpReply:
        """Return the scores of a request, or 400 if they are not available yet."""
        form = parse_qs(body[:10_000].decode("latin-1"))
        (key,), (reward,) = (form.get(name, [""])[-1:] for name in ("uuid", "type"))
        sent = self._jobs.get(key)
        if sent is None:
            return _not_yet(f"no request {plain(key, 50)!r} is known here: answers are kept for {_KEPT:g} s")
        if reward and reward not in self._intake.rewards:
            return _not_yet(f"unknown reward {plain(reward, 100)!r}, expected one of {', '.join(self._intake.rewards)}")
        await asyncio.wait((sent.scoring,), timeout=_HOLD)
        if not sent.scoring.done():
            return _not_yet("the scores are not available yet")
        sent.read = True
        answer = {**sent.scoring.result(), "type": reward or self._intake.reward}
        # json.dumps writes a missing score as a bare NaN, which the client can parse.
        return HttpReply(json.dumps(answer).encode(), MEDIA, version=answer["weights_version"])

    async def ping(self, _body: bytes) -> HttpReply:
        """Return that the service is available."""
        return HttpReply(json.dumps({"status": "ok"}).encode(), MEDIA)

    async def _scored(self, request: Request) -> dict[str, Any]:
        """Return the answer. Never raises: the client would poll for an hour."""
        began = self._clock()
        n = request.n
        names = self._intake.rewards
        try:
            found = await self._intake.rows(request)
            version = found.version
            scored: dict[str, list[Any]] = {name: found.parts.get(name, found) for name in names}
            if wrong := [why for why in found if isinstance(why, str)]:
                self._log(f"{len(wrong)} of {n} samples have no score; the first: {wrong[0]}")
        except Error as error:
            self._log(said(error, 300))
            scored, version = {name: [""] * n for name in names}, 0
        except Exception as error:  # noqa: BLE001
            self._log(f"the gateway failed: {said(error, 300)}")
            scored, version = {name: [""] * n for name in names}, 0
        numbers = {
            name: [math.nan if isinstance(score, str) else score for score in scores] for name, scores in scored.items()
        }
        return {
            "scores": numbers,
            "input_info": {"shape": [n]},
            "duration": f"{self._clock() - began:.3f}",
            "decoded_duration": "0.000",
            "weights_version": version,
        }

    def _forget_old(self) -> None:
        since = self._clock() - _KEPT
        for key in [key for key, one in self._jobs.items() if one.at < since and one.scoring.done()]:
            del self._jobs[key]
        if len(self._jobs) >= _MOST_KEPT:  # then delete the oldest answers that were read early
            read = (key for key, one in self._jobs.items() if one.read)
            for key in list(islice(read, _MOST_KEPT // 8)):
                del self._jobs[key]


def _not_yet(why: str) -> HttpReply:
    return HttpReply(*refusal(why), 400)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _split(body: bytes) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Return the JSON, and the pictures as a view of the body. Raises ProtocolMismatch, SpecMismatch, Refused."""
    end = body.find(b"\n", 0, _MOST_LINE)
    if end < 0:
        raise ProtocolMismatch(f"{_SPOKEN}, came no line of less than {_MOST_LINE} bytes", Code.MALFORMED)
    given = read(body[:end])
    if given.get("media_type") != "image":
        came = plain(json.dumps(given.get("media_type")), 50)
        raise Refused(f'expected media_type "image", came {came}: latents and video are not supported')
    pictures = npy_array(body, end + 1, _SPOKEN)
    if pictures.ndim != 4 or pictures.shape[3] != 3:
        raise SpecMismatch(f"{_SPOKEN}, came uint8 {plain(pictures.shape, 100)}")
    return given, pictures


def npy_array(body: bytes | memoryview, start: int, expected: str) -> NDArray[np.uint8]:
    """Return the array in a .npy file of bytes, in C order, that fills a body from `start`, as a view of it.

    Raises:
        ProtocolMismatch, SpecMismatch: the message begins with `expected`.
    """
    file = memoryview(body)[start:]
    try:
        head = npy_head(file)
    except ValueError as error:
        raise ProtocolMismatch(f"{expected}: {said(error, 200)}", Code.MALFORMED) from error
    if head.dtype != "|u1" or head.fortran:
        raise SpecMismatch(f"{expected}, came {plain(head.dtype, 50)} {plain(head.shape, 100)}")
    if len(file) - head.start != math.prod(head.shape):
        raise ProtocolMismatch(f"{len(file) - head.start} bytes follow the header of {head.shape}", Code.MALFORMED)
    return np.frombuffer(file, np.uint8, offset=head.start).reshape(head.shape)
