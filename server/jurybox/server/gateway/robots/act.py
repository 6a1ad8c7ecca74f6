"""`POST /act` for robots: the HTTP servers of OpenVLA, OpenVLA-OFT and GR00T, in JSON with json_numpy's arrays.

    POST /act     {"image": ARRAY, "instruction": TEXT, ...}   -> the action, an array; of a chunk a list of them
                  {"observation": {"video.CAMERA": ...}}       -> {"action.NAME": nested lists}, as GR00T's
                  {"encoded": JSON as text}                    -> the answer as JSON in a JSON string
    POST /reset   -> {"status": "reset"}
    GET /health   -> {"status": "healthy"}

Every request is an episode of its own, so the model keeps no state. A failed request has an error status and
{"detail": why}, which is no action however a client reads it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
from fastapi import FastAPI
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from jurybox.protocol.errors import TABLE, Code, Error, said
from jurybox.server.gateway.http_server import HttpServer
from jurybox.server.gateway.robots.counters import RobotDelays
from jurybox.server.gateway.robots.door import PATIENCE, RobotDoor
from jurybox.server.gateway.robots.gr00t_observations import Gr00tObservation, gr00t_observation
from jurybox.server.gateway.robots.json_arrays import dumps, dumps_rows, loads
from jurybox.server.gateway.robots.msgpack_arrays import Malformed
from jurybox.server.gateway.robots.policy import ACTIONS
from jurybox.server.security.doors import RETRY_AFTER
from jurybox.server.security.http import DATA_ONLY, body_of
from jurybox.server.security.limits import OF_REQUEST, DecodedCharge, Limited

_MEDIA = (b"content-type", b"application/json")
_PASSING = (Code.BUSY, Code.TIMEOUT, Code.SERVER_GONE, Code.NOT_READY, Code.DRAINING)  # a retry may succeed


class ActDoor(RobotDoor):
    """An HTTP server for one model; see `RobotDoor`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        rest = FastAPI(openapi_url=None)
        about = {"status": "healthy", "model": self.settings["model"]}
        for path in ("/health", "/healthz"):
            rest.add_api_route(path, lambda: about, methods=["GET"])
        rest.add_api_route("/reset", lambda: {"status": "reset"}, methods=["POST"])
        rest.add_api_route("/act", lambda: None, methods=["POST"])  # answered before; for status 405 to other methods
        self._rest = rest
        self._delays = RobotDelays(self.counters)
        self._server = HttpServer(
            self.settings["listen"],
            self._answer,
            self.access,
            self.setting,
            budget=self.budget,
            refusals={"/act": self._refused},
            doors=self.doors,
            turns=self.turns,
        )
        self.bound = self._server.bound
        self._running: asyncio.Task[bool] | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is in progress."""
        return self._server.busy

    def connections(self) -> list[Limited]:
        """See `RobotDoor.connections`."""
        return list(self._server.connections())

    async def start(self) -> None:
        """See `RobotDoor.start`."""
        self._running = asyncio.create_task(self._server.run())
        self._running.add_done_callback(lambda _: self.ended.set())

    async def stop(self) -> None:
        """See `RobotDoor.stop`."""
        self._server.stop()
        if self._running is not None:
            await self._running
        await self.policy.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; see the ASGI specification."""
        if (scope["path"].rstrip("/"), scope["method"]) != ("/act", "POST"):
            await self._rest(scope, receive, send)
            return
        scope[DATA_ONLY] = True
        headers: list[tuple[str, str]] = []
        try:
            status, answer = 200, await self._acted(await body_of(receive))
        except ClientDisconnect:
            return
        except Error as error:
            status, headers, answer = self._refused(error)
        fields = [_MEDIA, *((name.encode(), value.encode()) for name, value in headers)]
        fields.append((b"content-length", str(len(answer)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": answer})

    async def _acted(self, body: bytes) -> bytes:
        """Return the body that answers a request. Raises Error."""
        held = DecodedCharge(OF_REQUEST.get())
        with self.counted(self._delays):
            try:
                held.take(len(body))  # its arrays are smaller
                request, encoded = await self.turns.decoded(_read, body)
                flat = request.get("observation")
                gr00t = gr00t_observation(flat) if len(request) == 1 and isinstance(flat, dict) else None
                async with self.policy.episode(PATIENCE, returns=True) as episode:
                    with self.connected():
                        outputs = await episode.infer(gr00t.values if gr00t else request, needs_actions=False)
                answer = dumps(_nested(gr00t, outputs)) if gr00t else _action(outputs)
                return json.dumps(answer.decode()).encode() if encoded else answer
            finally:
                held.give()

    def _refused(self, error: Error) -> tuple[int, list[tuple[str, str]], bytes]:
        """Return status, headers and body of a refusal."""
        known = TABLE[error.code].http
        status = 503 if error.code in _PASSING else known
        headers = [("retry-after", RETRY_AFTER)] if status == 503 else []
        return status, headers, json.dumps({"detail": said(error, 1000)}).encode()


def _read(body: bytes) -> tuple[dict[str, Any], bool]:
    """Return a request, and whether it was JSON in JSON."""
    request = loads(body)
    if "encoded" not in request:
        return request, False
    if len(request) > 1 or type(request["encoded"]) is not str:
        raise Malformed("'encoded': expected JSON as text, and no other field")
    return loads(request["encoded"].encode("utf-8", "surrogatepass")), True


def _action(outputs: dict[str, Any]) -> bytes:
    """Write a model's answer: the action as an array, a chunk as a list of them; of several outputs each by name."""
    if len(outputs) > 1 and ACTIONS not in outputs:
        return dumps(outputs)
    actions = np.asarray(outputs[ACTIONS] if ACTIONS in outputs else next(iter(outputs.values())))
    return dumps_rows(actions) if actions.ndim == 2 else dumps(actions)


def _nested(observation: Gr00tObservation, outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in observation.answer(outputs).items()}
