"""The Open Inference Protocol over HTTP: its routes, and bodies, which may be compressed."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from jurybox.protocol.errors import Code, Error, Refused, ServerGone, error_for
from jurybox.server.gateway.app import AnyText
from jurybox.server.gateway.inference import models
from jurybox.server.gateway.inference.http_json import LENGTH, body_of, request_of
from jurybox.server.gateway.inference.inference import OpenInference
from jurybox.server.gateway.inference.requests import InferRequest, InferResponse
from jurybox.server.gateway.inference.shared_memory import Region
from jurybox.server.gateway.inference.tensors import malformed, read_json
from jurybox.server.gateway.known_paths import ANSWERED, HttpReply, refused
from jurybox.server.security.doors import Doors
from jurybox.server.security.doors import refusal as closing
from jurybox.server.security.http import CHARGE
from jurybox.server.security.limits import Charge
from jurybox.server.security.pace import Turns, joined

MAX_BODY_BYTES = 64 << 20
_PIECE = 1 << 20  # bytes that are decompressed at a time, and counted before more are
_MODEL = "/v2/models/{name:path}"
_MOST_DIGITS = 6  # of the bytes of JSON that are parsed in the event loop
_WINDOW = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


_Read = Callable[[bytes], tuple[InferRequest, set[str], bool]]  # see `request_of`


class Tensors(NamedTuple):
    """What answered a request whose answer is binary: model and version of its path, and the bytes of its JSON."""

    model: str
    version: str
    json: int


def router(
    oip: OpenInference, *, most: int = MAX_BODY_BYTES, turns: Turns | None = None, doors: Doors | None = None
) -> APIRouter:
    """Return the routes for `create_app`.

    Args:
        most: limits a body in bytes, compressed and decompressed.
        turns, doors: of the process.
    """
    paths = APIRouter(tags=["Open Inference Protocol"])
    _health(paths, oip)
    turns = turns or Turns()
    _repository(paths, oip, most, turns)
    _shared_memory(paths, oip, most, turns)
    # Last: a model's name may contain slashes, so its path would match the other routes.
    _models(paths, oip, most, turns, doors or Doors())
    return paths


def _health(paths: APIRouter, oip: OpenInference) -> None:
    @paths.get("/v2")
    @paths.get("/v2/", include_in_schema=False)
    async def metadata() -> dict[str, Any]:
        """Name, build and extensions."""
        return oip.metadata()

    @paths.get("/v2/health/live")
    async def live() -> Response:
        """200 while the supervisor answers."""
        return AnyText({"live": True}) if await oip.live() else AnyText({"live": False}, 503)

    @paths.get("/v2/health/ready")
    async def ready() -> Response:
        """200 when every model is loaded and answers; 503 with the reasons when not."""
        return _ready(await oip.reasons())


def _models(paths: APIRouter, oip: OpenInference, most: int, turns: Turns, doors: Doors) -> None:
    @paths.get("/v2/models/stats")
    async def every_statistics() -> dict[str, Any]:
        """Counters of every model."""
        return {"model_stats": await oip.statistics("", "")}

    for prefix in (_MODEL + "/versions/{version}", _MODEL):
        _model(paths, prefix, oip, most, turns, doors)


async def _while_connected(request: Request, oip: OpenInference, asked: InferRequest) -> InferResponse:
    """Infer a step of a sequence, which is lost if the client hangs up meanwhile: it may send the step again.

    Raises:
        ServerGone: the client has hung up. Nobody receives this error.
    """
    work = asyncio.ensure_future(oip.infer(asked))
    gone = asyncio.ensure_future(request.receive())  # the body was read, so this returns when the client has hung up
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            return work.result()
    finally:
        gone.cancel()
        work.cancel()  # which loses the sequence
        await asyncio.wait((work, gone))
    if not work.cancelled() and work.exception() is None:  # the step was computed, and its answer will not arrive
        oip.sequences.lose(asked.model, asked.parameters["sequence_id"])
    raise ServerGone("the client has hung up")


async def _json_answer(oip: OpenInference, turns: Turns, doors: Doors, read: _Read, body: bytes) -> HttpReply | None:
    """Answer a body of JSON behind a known head, as `infer` below; None: it is for that, or it has gone wrong."""
    try:
        asked, binary, all_binary = await turns.decoded(read, body)
        if "sequence_id" in asked.parameters:  # which is lost with its connection
            return None
        content, length = body_of(await oip.infer(asked), binary, all_binary=all_binary)
    except Error as error:
        return refused(error)
    except asyncio.CancelledError:
        if not doors.closed:
            raise
        return refused(closing())
    except Exception:  # noqa: BLE001  the application reports it
        return None
    if length is None:
        return HttpReply(content, "application/json")
    return HttpReply(content, "application/octet-stream", headers=((LENGTH.lower(), str(length)),))


def _model(paths: APIRouter, prefix: str, oip: OpenInference, most: int, turns: Turns, doors: Doors) -> None:
    @paths.post(prefix + "/infer")
    async def infer(request: Request, name: str, version: str = "") -> Response:
        """Infer: JSON, or JSON and binary tensors (header Inference-Header-Content-Length)."""
        body = await _body(request, most, turns)
        length_of_json = request.headers.get(LENGTH)
        read = partial(request_of, name, version, json_length=length_of_json)
        small = length_of_json is not None and len(length_of_json) <= _MOST_DIGITS  # tensors are views of the body
        asked, binary, all_binary = read(body) if small else await turns.decoded(read, body)
        if "sequence_id" in asked.parameters:
            answer = await _while_connected(request, oip, asked)
        else:
            answer = await oip.infer(asked)
        content, length = body_of(answer, binary, all_binary=all_binary)
        if (learn := request.scope.get(ANSWERED)) is not None:
            if length_of_json is None:
                learn(partial(_json_answer, oip, turns, doors, read))
            elif length is not None:
                learn(Tensors(name, version, int(length_of_json)))
        if length is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={LENGTH: str(length)}, media_type="application/octet-stream")

    @paths.get(prefix + "/ready")
    async def ready(name: str, version: str = "") -> Response:
        """200 when the model is loaded and answers; 503 with the reason when not."""
        why = await oip.model_reason(name, version)
        return _ready([why] if why else [])

    @paths.get(prefix + "/config")
    async def config(name: str, version: str = "") -> dict[str, Any]:
        """The model's configuration."""
        return models.config(await oip.described(name, version), oip.idle)

    @paths.get(prefix + "/stats")
    async def statistics(name: str, version: str = "") -> dict[str, Any]:
        """The model's counters."""
        return {"model_stats": await oip.statistics(name, version)}

    @paths.get(prefix)
    async def metadata(name: str, version: str = "") -> dict[str, Any]:
        """The inputs and outputs of the model."""
        return models.metadata(await oip.described(name, version))


def _repository(paths: APIRouter, oip: OpenInference, most: int, turns: Turns) -> None:
    @paths.post("/v2/repository/index")
    async def index(request: Request) -> list[dict[str, Any]]:
        """List the models; {"ready": true} for those that are ready."""
        given = await _json(request, most, turns)
        ready = given.pop("ready", False)
        if given or type(ready) is not bool:
            raise malformed('expected no body, or {"ready": true}')
        return await oip.index("", ready=ready)

    @paths.post("/v2/repository/models/{name:path}/load")
    async def load(request: Request, name: str) -> Response:
        """Load a configured model, or load it again."""
        await oip.repository.load("", name, await _repository_parameters(request, most, turns))
        return AnyText({})

    @paths.post("/v2/repository/models/{name:path}/unload")
    async def unload(request: Request, name: str) -> Response:
        """Unload a model."""
        await oip.repository.unload("", name, await _repository_parameters(request, most, turns))
        return AnyText({})

    @paths.post("/v2/repository/models/{name:path}/sleep")
    async def sleep(name: str) -> Response:
        """Move a model's weights to host memory; requests to it get 503 until it is woken."""
        await oip.repository.sleep(name)
        return AnyText({})

    @paths.post("/v2/repository/models/{name:path}/wake")
    async def wake(name: str) -> Response:
        """Move a sleeping model's weights back to the device, in their newest version."""
        await oip.repository.wake(name)
        return AnyText({})


def _shared_memory(paths: APIRouter, oip: OpenInference, most: int, turns: Turns) -> None:
    @paths.get("/v2/systemsharedmemory/status")
    @paths.get("/v2/systemsharedmemory/region/{name}/status")
    async def status(name: str = "") -> list[dict[str, Any]]:
        """The registered regions."""
        return [_region(region) for region in oip.regions.status(name)]

    @paths.post("/v2/systemsharedmemory/region/{name}/register")
    async def register(request: Request, name: str) -> Response:
        """Register shared memory of the client: {"key": "/name", "offset": 0, "byte_size": 1024}."""
        given = await _json(request, most, turns)
        key, offset, size = given.pop("key", None), given.pop("offset", 0), given.pop("byte_size", None)
        if given or type(key) is not str or type(offset) is not int or type(size) is not int:
            raise malformed('expected {"key": "/name", "offset": bytes, "byte_size": bytes}')
        oip.regions.register(name, key, offset, size)
        return AnyText({})

    @paths.post("/v2/systemsharedmemory/unregister")
    @paths.post("/v2/systemsharedmemory/region/{name}/unregister")
    async def unregister(name: str = "") -> Response:
        """Unregister a region, or all."""
        oip.regions.unregister(name)
        return AnyText({})

    @paths.get("/v2/cudasharedmemory/status")
    @paths.get("/v2/cudasharedmemory/region/{name}/status")
    async def cuda_status(name: str = "") -> list[dict[str, Any]]:
        """The registered regions of device memory."""
        found = oip.cuda_regions.status(name)
        return [{"name": region.name, "device_id": region.device, "byte_size": region.size} for region in found]

    @paths.post("/v2/cudasharedmemory/region/{name}/register")
    async def cuda_register(request: Request, name: str) -> Response:
        """Register device memory of the client: {"raw_handle": {"b64": "..."}, "device_id": 0, "byte_size": 1024}."""
        given = await _json(request, most, turns)
        handle, device, size = given.pop("raw_handle", None), given.pop("device_id", 0), given.pop("byte_size", None)
        text = handle.get("b64") if isinstance(handle, dict) else None
        if given or type(text) is not str or type(device) is not int or type(size) is not int:
            raise malformed('expected {"raw_handle": {"b64": "..."}, "device_id": number, "byte_size": bytes}')
        try:
            raw = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise malformed(f"raw_handle is not valid base64: {error}") from error
        oip.cuda_regions.register(name, raw, device, size)
        return AnyText({})

    @paths.post("/v2/cudasharedmemory/unregister")
    @paths.post("/v2/cudasharedmemory/region/{name}/unregister")
    async def cuda_unregister(name: str = "") -> Response:
        """Unregister a region, or all, once no engine has it open."""
        await oip.cuda_regions.unregister(name)
        return AnyText({})

    @paths.api_route("/v2/trace/setting", methods=["GET", "POST"], include_in_schema=False)
    @paths.api_route("/v2/logging", methods=["GET", "POST"], include_in_schema=False)
    async def absent() -> Response:
        raise Refused(
            f"trace and log settings are not served here; there are: {', '.join(models.EXTENSIONS)}", Code.UNSUPPORTED
        )


def _ready(reasons: list[str]) -> Response:
    return AnyText({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


def _region(region: Region) -> dict[str, Any]:
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.size}


async def _repository_parameters(request: Request, most: int, turns: Turns) -> dict[str, Any]:
    given = await _json(request, most, turns)
    parameters = given.pop("parameters", {})
    if given or not isinstance(parameters, dict):
        raise malformed('expected no body, or {"parameters": {...}}')
    return parameters


async def _json(request: Request, most: int, turns: Turns) -> dict[str, Any]:
    body = await _body(request, most, turns)
    return await turns.decoded(read_json, body) if body else {}


async def _body(request: Request, most: int, turns: Turns) -> bytes:
    """Read a body and decompress it if needed; `BodyLimit` (security.http) limits what is received."""
    body = await joined([piece async for piece in request.stream() if piece])
    encoding = request.headers.get("content-encoding", "identity").strip().lower()  # RFC 9110: in any case
    if encoding in ("identity", ""):
        return body
    if encoding not in _WINDOW:
        raise malformed(f"Content-Encoding {encoding[:20]!r}: expected gzip or deflate")
    unpacking = _Unpacking(body, encoding, most, request.scope[CHARGE])
    if not unpacking.step():  # it is large, however small it came
        await turns.alone(unpacking.finish)
    return unpacking.whole()


class _Unpacking:
    """A body that is decompressed in pieces, each of which is counted.

    Args:
        most: bytes of the whole.
        taken: counts them.
    """

    def __init__(self, body: bytes, encoding: str, most: int, taken: Charge) -> None:
        self._decoder = zlib.decompressobj(_WINDOW[encoding])
        self._encoding, self._most, self._taken = encoding, most, taken
        self._left, self._parts, self._size = body, list[bytes](), 0

    def step(self) -> bool:
        """Decompress a piece, and return whether it was the last. Raises Error."""
        decoder = self._decoder
        try:
            part = decoder.decompress(self._left, _PIECE)
        except zlib.error as error:
            raise malformed(f"the body is not valid {self._encoding}: {error}") from error
        self._left = decoder.unconsumed_tail
        if not part and not decoder.eof:
            raise malformed(f"the body is incomplete {self._encoding}: it ends early")
        self._size += len(part)
        if self._size > self._most:
            raise error_for(Code.TOO_LARGE, f"the body has more than {self._most} bytes: send fewer rows in a request")
        self._taken.take(len(part))
        self._parts.append(part)
        return decoder.eof

    def finish(self) -> None:
        """Decompress the rest. Raises Error."""
        while not self.step():
            pass

    def whole(self) -> bytes:
        """Return the decompressed body. Raises Error."""
        if unused := len(self._decoder.unused_data):
            raise malformed(f"{unused} bytes came after the end of the {self._encoding} body: expected none")
        return b"".join(self._parts)
