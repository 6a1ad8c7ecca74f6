"""The WebSocket server for robots: openpi's protocol, and vllm-omni's variant of it at a separate path.

A connection is an episode. The server sends the metadata first; then every binary frame is an observation (msgpack with
arrays) and gets one answer, in order. An observation that fails is answered with an error, and the connection stays
open.
"""

from __future__ import annotations

import asyncio
import http
import logging
import ssl
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from jurybox import native
from jurybox.client import SessionLost, SpecMismatch
from jurybox.client.chunks import ANSWER_WITHIN, REPORT
from jurybox.protocol.errors import Busy, Error, plain, said
from jurybox.server.gateway.http_connection import TURN
from jurybox.server.gateway.http_server import GRACE
from jurybox.server.gateway.robots.connection import TRY_AGAIN_LATER, RobotConnection
from jurybox.server.gateway.robots.counters import ChunkReport, RobotDelays
from jurybox.server.gateway.robots.door import PATIENCE, RobotDoor
from jurybox.server.gateway.robots.msgpack_arrays import Malformed, packb, unpackb
from jurybox.server.gateway.robots.policy import ACTIONS, RobotEpisode
from jurybox.server.security.doors import RETRY_AFTER, refusal
from jurybox.server.security.limits import ANSWERS, Charge, Limited
from jurybox.server.settings.endpoints import bound_name, listen

VLLM_OMNI = "/v1/realtime/robot/openpi"  # the path of vllm-omni's variant
_MOST_WITHIN = 86_400.0  # seconds, largest `answer_within` of a request
# Of a close (rfc-editor.org/rfc/rfc6455, section 7.4.1; IANA's registry).
_INTERNAL_ERROR, _SERVICE_RESTART = 1011, 1012
_log = logging.getLogger("jurybox.gateway.robots")
_silent = logging.getLogger("jurybox.gateway.robots.websockets")  # would log every port scan with a traceback
_silent.disabled = True


class RobotServer(RobotDoor):
    """A WebSocket server for one model; see `RobotDoor`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[RobotConnection] = set()
        self._ping = float(self.settings["ping"])
        self._metadata = packb(self.settings["metadata"])
        self._socket = listen(self.settings["listen"], self.setting)
        self.bound = bound_name(*self._socket.getsockname()[:2])
        self._server: Server | None = None

    async def start(self) -> None:
        """Start serving. Raises OSError or ValueError if the TLS files cannot be used."""
        tls = None
        if self.access.tls_cert is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(self.access.tls_cert, self.access.tls_key)
        self._server = await serve(
            self._serve,
            sock=self._socket,
            ssl=tls,
            process_request=self._admit,
            origins=[None],  # a web page must not control a robot: browsers send an Origin header, robots do not
            compression=None,  # it gains nothing on images, and a small message could expand to a large one
            max_size=self.access.max_message,
            max_queue=1,  # frames read ahead of the one being answered
            open_timeout=10,
            ping_interval=self._ping,
            ping_timeout=self._ping,
            close_timeout=GRACE,
            server_header=None,
            logger=_silent,
            create_connection=type(
                "PortConnection",
                (RobotConnection,),
                {"budget": self.budget, "turns": self.turns, "open": self._open, "clients": self.settings["clients"]},
            ),
        )

    def connections(self) -> list[Limited]:
        """Return the connections, for `limits.Watch`."""
        return list(self._open)

    @property
    def busy(self) -> bool:
        """Whether a robot is connected."""
        return self.counters.connected > 0

    async def stop(self) -> None:
        """Close all connections and release the lane."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._open):
                if connection.silent:  # it would be waited for, as somebody who is about to say hello
                    connection.abort()
            try:
                async with asyncio.timeout(GRACE + 1):
                    await self._server.wait_closed()
            except TimeoutError:
                _log.warning("robots.%s: connections did not end in time", self.name)
        else:
            self._socket.close()
        await self.policy.close()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer plain HTTP, and refuse connections without the token."""
        if request.path.partition("?")[0] in ("/healthz", "/healthz/"):
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if self.access.token is not None:
            shown = request.headers.get_all("Authorization")
            if len(shown) != 1 or not self.access.token.is_shown_by(_as_bearer(shown[0])):
                self.counters.refused["token"] += 1
                return connection.respond(
                    http.HTTPStatus.UNAUTHORIZED,
                    "expected 'Authorization: Api-Key TOKEN' with the server's token (server.token_file)\n",
                )
        if self.doors.closed:
            refused = connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, f"{refusal()}\n")
            refused.headers["Retry-After"] = RETRY_AFTER
            return refused
        return None

    async def _serve(self, connection: Any) -> None:
        path = connection.request.path.partition("?")[0] if connection.request is not None else "/"
        dialect = VllmOmni() if path.rstrip("/") == VLLM_OMNI else Openpi()
        delays = RobotDelays(self.counters)
        try:
            async with self.policy.episode(PATIENCE) as episode:
                with self.connected():
                    connection.placed = True
                    await connection.send(self._metadata)
                    while True:
                        began = time.monotonic() if connection.is_ahead else None
                        try:
                            frame = await self.doors.message(connection.recv())
                        except TimeoutError:
                            await connection.close(_SERVICE_RESTART, plain(refusal(), 100))
                            return
                        began = began or time.monotonic()
                        if not await self._answer(connection, connection.account, dialect, episode, delays, frame):
                            await connection.close(_INTERNAL_ERROR, "the session is lost: connect again")
                            return
                        if connection.is_ahead:  # robots wait for their answers
                            await self.turns.wait(connection, min(time.monotonic() - began, TURN))
        except Busy as error:
            await connection.close(TRY_AGAIN_LATER, plain(error, 100))
        except ConnectionClosed:
            pass  # the robot disconnected
        except Exception as error:  # noqa: BLE001  a bug must not end the other connections
            _log.error("robots.%s: a connection failed: %s", self.name, said(error), exc_info=error)
            await connection.close(_INTERNAL_ERROR, "the gateway failed; its log says more")

    async def _answer(
        self,
        connection: ServerConnection,
        account: native.Account,
        dialect: Openpi,
        episode: RobotEpisode,
        delays: RobotDelays,
        frame: str | bytes,
    ) -> bool:
        """Answer one frame, and return whether the connection stays open."""
        began = time.monotonic()
        if isinstance(frame, str) and dialect.ignores_text:
            return True
        received, answers = Charge(self.budget, account), Charge(self.budget, account, ANSWERS)
        try:
            received.take(2 * len(frame))  # and its arrays
            request = await self._read(frame)
            report = ChunkReport(request.pop(REPORT)) if REPORT in request else None
            within = _seconds(request.pop(ANSWER_WITHIN)) if ANSWER_WITHIN in request else None
            reply, observed = await dialect.answered(episode, request, within)
            answers.take(len(reply))
            await connection.send(reply)  # returns when the robot has read most of it
        except Error as error:
            self.counters.failed(error)
            await connection.send(dialect.error(said(error)))
            return not (isinstance(error, SessionLost) and dialect.ends_with_session)
        finally:
            received.give()
            answers.give()
        seconds = time.monotonic() - began
        dialect.total_ms = 1e3 * seconds
        if observed:
            delays.answered(seconds, report)
        return True

    async def _read(self, frame: str | bytes) -> dict[str, Any]:
        if isinstance(frame, str):
            raise Malformed("expected a binary frame with a msgpack map (an observation), came a text frame")
        found = await self.turns.decoded(unpackb, frame)
        if not isinstance(found, dict):
            raise Malformed(f"expected a map (an observation), came {type(found).__name__}")
        return found


def _seconds(within: Any) -> float:
    if type(within) not in (int, float) or not 0 < within <= _MOST_WITHIN:
        raise Malformed(
            f"{ANSWER_WITHIN} is {plain(within, 80)}: expected seconds, above 0 and at most {_MOST_WITHIN:.0f}"
        )
    return float(within)


def _as_bearer(authorization: str) -> str:
    scheme, _, given = authorization.partition(" ")
    return f"Bearer {given}" if scheme.lower() == "api-key" else authorization


class Openpi:
    """The protocol of openpi's clients; one object per connection.

    Besides the observation a request may have the fields that vllm-omni's client sends, `endpoint` ("infer" or "reset")
    and `session_id`; and `reset`, which is true if the observation begins an episode.
    """

    ignores_text = False
    needs_actions = True  # the answer has the actions by this name
    ends_with_session = True  # close after a lost session: the clients have no other way to begin a new one

    def __init__(self) -> None:
        self.total_ms: float | None = None  # duration of the previous answer

    async def answered(
        self, episode: RobotEpisode, request: dict[str, Any], within: float | None
    ) -> tuple[bytes, bool]:
        """Return the frame that answers a request, and whether the request is an observation. Raises Error."""
        endpoint, session, reset = request.pop("endpoint", "infer"), request.pop("session_id", ""), request.get("reset")
        if endpoint not in ("infer", "reset"):
            raise SpecMismatch(f"endpoint {plain(endpoint, 80)!r}: expected 'infer' or 'reset'")
        if not isinstance(session, str) or len(session) > 500:
            raise SpecMismatch("session_id: expected text of at most 500 characters")
        if session:
            episode.name(session)
        if isinstance(reset, np.bool_) or (isinstance(reset, np.ndarray) and reset.shape == () and reset.dtype == bool):
            reset = bool(reset)
        if reset is not None and not isinstance(reset, bool) and not episode.takes("reset"):
            raise SpecMismatch(f"reset: expected true or false, came {plain(repr(reset), 80)}")
        if endpoint == "reset" or reset is True:
            episode.reset()
        if endpoint == "reset":
            return packb({"status": "reset successful"}), False
        asked = time.monotonic()
        outputs = await episode.infer(request, within, needs_actions=self.needs_actions)
        return self.reply(outputs, 1e3 * (time.monotonic() - asked)), True

    def reply(self, outputs: Mapping[str, Any], infer_ms: float) -> bytes:
        """Return the answer to an observation."""
        timing = {"infer_ms": infer_ms} | ({} if self.total_ms is None else {"prev_total_ms": self.total_ms})
        named = outputs if ACTIONS in outputs else {ACTIONS: next(iter(outputs.values()))}
        return packb({**named, "server_timing": timing, "policy_timing": {"infer_ms": infer_ms}})

    def error(self, why: str) -> str | bytes:
        """Return the answer to an observation that failed."""
        return why


class VllmOmni(Openpi):
    """The protocol of clients of vllm-omni's robot endpoint."""

    ignores_text = True
    needs_actions = False
    ends_with_session = False

    def reply(self, outputs: Mapping[str, Any], infer_ms: float) -> bytes:
        """Return only the actions, as float32; for a model with several outputs a map."""
        if len(outputs) > 1:
            return packb(outputs)
        (actions,) = outputs.values()
        return packb(np.asarray(actions, np.float32))

    def error(self, why: str) -> str | bytes:
        return packb({"type": "error", "message": why})
