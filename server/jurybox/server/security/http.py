"""Access control of the HTTP application as ASGI middlewares: headers, Host, Origin, token, size of a body."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from typing import TypeAlias
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jurybox import native
from jurybox.protocol.address import is_loopback
from jurybox.protocol.errors import TABLE, Code, Error, Refused, error_for
from jurybox.server.security.access import CHALLENGES, Access, Token
from jurybox.server.security.doors import RETRY_AFTER, Doors, refusal
from jurybox.server.security.limits import ANSWERS, CALLER, HTTP, OF_REQUEST, Charge
from jurybox.server.security.pace import joined

# Probes of orchestrators and load balancers send no token. Without a token these paths answer yes or no, not why.
OPEN_PATHS = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"),
        *("/healthz", "/livez", "/readyz"),
    }
)
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_SECURITY_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
# The headers for answers that are not pages, to POSTs that pages of other sites cannot send. The other headers are left
# out because a Python client spends time on parsing each.
DATA_HEADERS = [header for header in _SECURITY_HEADERS if header[0] == b"x-content-type-options"]
DATA_ONLY = "jurybox.data"  # in a request's scope: its answer needs only DATA_HEADERS
READING = ("GET", "HEAD", "OPTIONS")


ACCEPTED = "jurybox.accepted"  # in a request's scope, if it was accepted before it came to the application
HEAD = "jurybox.head"  # in a request's scope: only the headers of its answer are sent
CHARGE = "jurybox.charge"  # in a request's scope: its `Charge`
ACCOUNT = "jurybox.account"  # in a request's scope: its connection's account, if that has one
# Returns the status, headers and body of the response that reports an error.
Refusal: TypeAlias = Callable[[Error], tuple[int, list[tuple[str, str]], bytes]]


def guarded(
    app: ASGIApp,
    access: Access,
    *,
    loopback: bool,
    budget: native.Budget | None = None,
    refusals: Mapping[str, Refusal] | None = None,
    doors: Doors | None = None,
) -> ASGIApp:
    """Wrap the application in all middlewares.

    Args:
        loopback: whether it listens on loopback only; then a request that names another host comes from a web page
            whose name was changed to resolve to this host (DNS rebinding), and is refused.
        budget: that of the process; None: a new one is created.
        refusals: write the refusals of bodies in the form that a path's clients expect, by path; default: none.
        doors: what comes after they have closed is refused.
    """
    kept = Doorkeeper(Heads(app), doors or Doors(), refusals or {})
    limited = BodyLimit(kept, access.max_message, budget or access.budget(), refusals or {})
    return SecurityHeaders(Gate(limited, access.token, loopback=loopback))


class SecurityHeaders:
    """Adds security headers, fewer for data than for pages. A page can override them by setting its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                there = {name.lower() for name, _ in headers}
                wanted = DATA_HEADERS if DATA_ONLY in scope else _SECURITY_HEADERS
                headers += [header for header in wanted if header[0] not in there]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_marked)


class Heads:
    """Answers HEAD like GET; the server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", HEAD: True}
        await self._app(scope, receive, send)


class Gate:
    """Admits requests that name this host, come from no page of another site, and have the token.

    A page of another site may only read (cross-site request forgery). Open paths answer without the token, but in less
    detail.

    Starlette's TrustedHostMiddleware is unsuitable: it accepts a list of names, so it would refuse 127.9.9.9 (loopback
    is all of 127.0.0.0/8). It also answers 400 in plain text, but clients of this server expect 421 and JSON with a
    code.

    Args:
        token: the token to require; None: none.
        loopback: whether only loopback names and addresses are this host, against DNS rebinding.
    """

    def __init__(self, app: ASGIApp, token: Token | None, *, loopback: bool) -> None:
        self._app = app
        self._token = token
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        host, reads = _header(scope, b"host"), scope["method"] in READING
        if self._loopback and not _names_loopback(host) and not _is_plain_probe(scope):
            why = f"Host {host!r} is not this server: expected localhost, 127.0.0.1 or [::1]"
            await _refuse(send, 421, Code.REFUSED, why)
        elif not reads and (origin := _header(scope, b"origin")) and _netloc_of(origin) != host.lower():
            await _refuse(send, 403, Code.REFUSED, f"pages of {origin!r} may not send requests to this server")
        elif self._token is None or self._token.is_shown_by(_header(scope, b"authorization")):
            await self._app(scope, receive, send)
        elif reads and scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, _without_reasons(send))
        else:
            why = "expected 'Authorization: Bearer TOKEN' with the server's token (server.token_file)"
            challenges = [("WWW-Authenticate", challenge) for challenge in CHALLENGES]
            await _refuse(send, 401, Code.UNAUTHENTICATED, why, challenges)


class BodyLimit:
    """Limits the actual size of each body, and counts bodies and answers in the budget of the process.

    The scope holds a `Charge` under CHARGE, to which the application adds what it makes of the body.

    Args:
        most: largest body, bytes.
        budget: that of the process.
        refusals: see `guarded`.
    """

    def __init__(self, app: ASGIApp, most: int, budget: native.Budget, refusals: Mapping[str, Refusal]) -> None:
        self._app = app
        self._most = most
        self._budget = budget
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        says = f"a body may have at most {self._most} bytes: send less, or raise server.max_message_mib"
        claimed = _header(scope, b"content-length")
        if claimed.isascii() and claimed.isdigit() and (len(claimed) > 20 or int(claimed) > self._most):
            await self._refuse(scope, send, error_for(Code.TOO_LARGE, says))
            return
        whole = int(claimed) if claimed.isascii() and claimed.isdigit() else 0
        came, started = 0, False
        failure: Error | None = None
        head: Message | None = None  # of the answer, until its first part has room
        account = scope.get(ACCOUNT) or native.Account(self._budget, HTTP)  # the application may be served otherwise
        taken = scope[CHARGE] = Charge(self._budget, account)
        answers = Charge(self._budget, account, ANSWERS)
        OF_REQUEST.set(taken)
        CALLER.set(account)

        async def counted() -> Message:
            nonlocal came, failure
            message = await receive()
            size = len(message.get("body", b""))
            came += size
            try:
                if came <= self._most and failure is None:
                    taken.take(size, whole)
                    return message
                failure = failure or error_for(Code.TOO_LARGE, says)
            except Refused as error:
                failure = error
            return {"type": "http.disconnect"}

        async def noted(message: Message) -> None:
            nonlocal started, failure, head
            if failure is not None and not started:
                return
            if message["type"] == "http.response.start":
                head = message
                return
            try:
                answers.take(len(message.get("body", b"")))
            except Refused as error:
                failure = error
                return
            try:
                if head is not None:
                    started = True
                    await send(head)
                    head = None
                await send(message)
            finally:
                answers.give()  # what the kernel has not taken is counted by the connection

        try:
            await self._app(scope, counted, noted)
        except Exception:
            if failure is None:  # after a refusal the application sees a disconnect, and may raise an error for it
                raise
        finally:
            taken.give()
        if failure is not None and not started:
            await self._refuse(scope, send, failure)

    async def _refuse(self, scope: Scope, send: Send, error: Error) -> None:
        await _refuse_as(self._refusals.get(scope["path"]), send, error)


class Doorkeeper:
    """Refuses requests once the doors have closed. Requests that only read are answered, since probes are among them.

    Args:
        refusals: see `guarded`.
    """

    def __init__(self, app: ASGIApp, doors: Doors, refusals: Mapping[str, Refusal]) -> None:
        self._app = app
        self._doors = doors
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._doors.closed and scope["method"] not in READING and ACCEPTED not in scope:
            await self._refuse(scope, send)
            return
        started = False

        async def marked(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start" and self._doors.closed:
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, marked)
        except asyncio.CancelledError:
            if started or not self._doors.closed:
                raise
            await self._refuse(scope, send)  # the server ends, and this request has no answer yet

    async def _refuse(self, scope: Scope, send: Send) -> None:
        await _refuse_as(self._refusals.get(scope["path"]), send, refusal())


async def _refuse_as(written: Refusal | None, send: Send, error: Error) -> None:
    if written is None:
        again = [("Retry-After", RETRY_AFTER)] if error.code in (Code.BUSY, Code.DRAINING) else []
        await _refuse(send, TABLE[error.code].http, error.code, str(error), again)
    else:
        status, headers, body = written(error)
        await _send(send, status, [*headers, ("Connection", "close")], body)


async def body_of(receive: Receive) -> bytes:
    """Return a request's whole body, without a copy if it arrived in one part. Raises ClientDisconnect."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return await joined(parts)


def _without_reasons(send: Send) -> Send:
    """Wrap `send` to forward a successful response unchanged, and only the status of an error."""
    status = 0

    async def trimmed(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            if status >= 400:
                await _answer(send, status, {"status": "unavailable", "reasons": []}, [])
                return
        if status < 400:
            await send(message)

    return trimmed


async def _refuse(send: Send, status: int, code: Code, why: str, headers: list[tuple[str, str]] | None = None) -> None:
    await _answer(send, status, {"error": why, "code": code.name}, [("Connection", "close"), *(headers or [])])


async def _answer(send: Send, status: int, content: dict[str, object], headers: list[tuple[str, str]]) -> None:
    body = json.dumps(content).encode()
    all_headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), *headers]
    await _send(send, status, all_headers, body)


async def _send(send: Send, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> str:
    """Return the first header of that name; "" if it is missing. Names are in lower case, as in ASGI."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return ""


def _is_plain_probe(scope: Scope) -> bool:
    """Return whether a request is of HTTP/1.0 and names no host, like a load balancer's probe and unlike a page's."""
    return scope["http_version"] == "1.0" and all(name != b"host" for name, _ in scope["headers"])


@functools.lru_cache(maxsize=64)
def _names_loopback(host: str) -> bool:
    """Return whether a Host header names a loopback address. Cached, since a client always sends the same header."""
    return is_loopback(_host_of(host))


def _host_of(given: str) -> str:
    """Return the host in a Host header ("name", "name:port" or "[ipv6]:port"); empty if it is malformed."""
    with contextlib.suppress(ValueError):
        return urlsplit(f"//{given}").hostname or ""
    return ""


def _netloc_of(origin: str) -> str:
    with contextlib.suppress(ValueError):
        return urlsplit(origin).netloc.lower()
    return ""
