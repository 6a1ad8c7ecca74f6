"""What all dialects share: converting the fields of a request to rows of a model, and requesting their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from jurybox.client.juror import Passing
from jurybox.client.juror import Scores as Found
from jurybox.client.juror_rows import CallColumns
from jurybox.protocol.errors import Code, Error, Refused, SpecMismatch
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.frontend.pictures import Pictures
from jurybox.server.frontend.scores import RowScorer
from jurybox.server.frontend.threads import ThreadPool
from jurybox.server.gateway.known_paths import HttpReply
from jurybox.server.security.limits import OF_REQUEST, DecodedCharge
from jurybox.server.security.pace import Turns

T = TypeVar("T")

_MOST_ROWS = 4096  # of one request
_FEW = 256  # rows whose answer is written in the event loop
# Bytes of a body that is read in the event loop: a switch of threads takes 0.1 ms. JSON is parsed in C, which keeps the
# event loop waiting in a thread, too.
_MOST_IN_LOOP, _MOST_JSON = 16 << 10, 128 << 10


class AnswerForm(NamedTuple):
    """How a dialect writes its answers, where its client leaves that open.

    Attributes:
        like: the server whose form it is, where two answer the same request differently.
        score_range: [lowest, highest] of a score, where clients change others; empty: what they leave as it is.
        decimals: digits after the point of a number that a judge says.
        weights: those of a panel's members, by name.
    """

    like: str = "vllm"
    score_range: Sequence[float] = ()
    decimals: int = 6
    weights: Mapping[str, float] = MappingProxyType({})

    def require_in_range(self, score: float, most: float) -> None:
        """Raise Unscored for a score outside `score_range`, by default 0 to `most`, which the client would change."""
        lowest, highest = self.score_range or (0.0, most)
        if not lowest <= score <= highest:
            raise Unscored(f"the score is {score:g}, expected {lowest:g} to {highest:g}: see score_range")


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


Write = Callable[[Request, RequestScores], HttpReply]  # writes an answer when all rows have scores
WriteRows = Callable[[Request, Found], HttpReply]  # writes an answer even when scores are missing


class Unscored(Error):
    """At least one row has no score; the message says which and why."""

    code = Code.ROW_FAILED


class Intake:
    """The scorer of one dialect's requests, which converts them to rows of the model.

    Args:
        frontend: computes the rows.
        pool: threads that parse requests and decode pictures.
        turns: of the process's doors, for large bodies.
        size: (height, width) to resize pictures to; None: no resizing.
        reward: name of the reward, for dialects whose requests name one.
        members: names of the members, if the model is a panel.
        form: how answers are written.
        scored: model, inputs, output and timeout; see `RowScorer`.

    Attributes:
        rewards: the names that a request may ask for: the reward's and those of a panel's members.
    """

    def __init__(
        self,
        frontend: Frontend,
        pool: ThreadPool,
        turns: Turns,
        *,
        size: tuple[int, int] | None = None,
        reward: str = "",
        members: Sequence[str] = (),
        form: AnswerForm | None = None,
        **scored: Any,
    ) -> None:
        self.reward = reward
        self.form = form or AnswerForm()
        self.rewards = list(dict.fromkeys((reward, *members)))
        self._pool, self._turns = pool, turns
        self._scorer = scorer = RowScorer(frontend, pool, **scored)
        self._pictures = Pictures(pool, size, lambda: scorer.spec)
        self._named = {name for name in (scored.get("inputs") or {}).values() if type(name) is str}

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
        given: Mapping[str, Any] = request.columns
        found, good = Found([""] * request.n), list(range(request.n))
        if request.pictures:
            decoded = await self._decoded(request, held)
            given = {**given, **decoded}
            for images in decoded.values():
                for i, image in enumerate(images):
                    if isinstance(image, str):
                        found[i] = image
            if any(found):
                good = [i for i, why in enumerate(found) if not why]
                given = {name: [values[i] for i in good] for name, values in given.items()}
        if not good:
            return found
        if request.parameters:
            given = CallColumns(given, request.parameters)
        scores = await self._scorer.scores(given, len(good))
        return scores if len(good) == request.n else _among(found, good, scores)

    async def _decoded(self, request: Request, held: DecodedCharge) -> dict[str, Sequence[Any]]:
        if all(self._pictures.ready(some) for some in request.pictures.values()):
            return dict(request.pictures)
        if request.n == 1:
            return {
                name: await self.off_loop(self._pictures.several, some, held) for name, some in request.pictures.items()
            }
        await self.off_loop(self._pictures.check, request.pictures.values(), held)
        return {name: await self._pictures.decoded(some, held) for name, some in request.pictures.items()}

    async def answered(self, read: Callable[[bytes], Request], write: Write, body: bytes) -> HttpReply:
        """Answer a request like `answered_rows`, but only if every row has a score.

        Raises:
            Unscored: a row failed, its picture cannot be decoded, or its score is not finite.
            Refused (code NOT_READY): rows have no score only for reasons that may pass, so that a retry may succeed.
            Error: whatever `answered_rows` raises.
        """
        return await self.answered_rows(read, lambda request, found: write(request, _all_scored(found)), body)

    async def answered_rows(self, read: Callable[[bytes], Request], write: WriteRows, body: bytes) -> HttpReply:
        """Read a body, request the scores of its rows, and write the answer; what is large in the thread pool.

        Args:
            read: parses the body.
            write: writes the answer.

        Raises:
            Error: whatever `read`, `write` and `rows` raise.
        """
        held = DecodedCharge(OF_REQUEST.get())
        try:
            off_loop = partial(self.off_loop, self._read_and_decode, held)
            request = await self._turns.decoded(read, body, _few(body), off_loop)
            found = await self._rows(request, held)
            return write(request, found) if request.n <= _FEW else await self.off_loop(write, request, found)
        finally:
            held.give()

    async def read(self, read: Callable[[bytes], T], body: bytes) -> T:
        """Read a body that is not answered by scores."""
        return await self._turns.decoded(read, body, _few(body), self.off_loop)

    def _read_and_decode(self, held: DecodedCharge, read: Callable[[bytes], Request], body: bytes) -> Request:
        """Parse a body, and decode the pictures of a single row in the same thread."""
        request = read(body)
        if request.n != 1:
            return request
        decoded = {name: self._pictures.several(some, held) for name, some in request.pictures.items()}
        return request._replace(pictures=decoded)

    async def off_loop(self, action: Any, *arguments: Any) -> Any:
        """Run a function in the thread pool."""
        return await self._pool.run(action, *arguments)

    async def lease(self) -> None:
        """Lease the lane now, before other lanes take up its rows. After an error the next request tries again."""
        await self._scorer.lease()

    def takes(self, name: str) -> bool:
        """Return whether the settings map this field to an input of the model; optional fields need that."""
        return name in self._named


def _few(body: bytes) -> int:
    return _MOST_JSON if body[:1] in (b"{", b"[") else _MOST_IN_LOOP


def _among(found: Found, good: Sequence[int], scores: Found) -> Found:
    """Return the scores of all rows, given those of the rows that were sent; `found` has the reasons of the others."""
    found.version = scores.version
    found.parts = {name: list(found) for name in scores.parts}
    for into, part in ((found, scores), *((found.parts[name], part) for name, part in scores.parts.items())):
        for i, score in zip(good, part, strict=True):
            into[i] = score
    return found


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
