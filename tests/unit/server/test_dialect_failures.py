"""Requests of dialects that fail: the status by which each trainer retries or stops, and what is logged and counted."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from jurybox.protocol.errors import Busy, Code, ModelFailed, ModelNotFound, Refused, SpecMismatch, Timeout
from jurybox.server.gateway.dialects import router
from jurybox.server.gateway.dialects.intake import AnswerForm
from jurybox.server.security.doors import Doors
from jurybox.server.security.http import DATA_ONLY
from jurybox.server.security.pace import Turns

SETTINGS = {
    "model": "m", "reward": "", "like": "vllm", "score_range": [], "decimals": 6, "resize": None, "inputs": {},
    "output": None, "timeout": 1.0, "priority": 2, "speaks": "", "port": None,
}  # fmt: skip


class Dialects:
    """The dialects of a server, whose requests fail as a test says."""

    def __init__(self, monkeypatch, *names, **settings):
        self.error, self.late, self.doors = None, Counter(), Doors()
        self.warned, self.failed = [], []
        log = SimpleNamespace(
            warning=lambda event, **fields: self.warned.append(fields),
            error=lambda event, **fields: self.failed.append(fields),
        )
        frontend = SimpleNamespace(lanes=SimpleNamespace(timeouts=self.late))
        monkeypatch.setattr(router.Intake, "answered", self._fails)
        of = dict.fromkeys(names, SETTINGS | settings)
        self.routes = router.applications(of, frontend, log, self.doors)

    async def _fails(self, *_):
        raise self.error

    async def answer(self, path):
        return await self.routes.endpoints[path](b"{}")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Busy("full"), 503),
        (Timeout("late"), 503),
        (Refused("soon", Code.NOT_READY), 503),
        (Refused("ends", Code.DRAINING), 503),
        (SpecMismatch("wrong"), 422),
        (ModelNotFound("none"), 404),
        (ModelFailed("broken"), 422),
        (Refused("large", Code.TOO_LARGE), 413),
    ],
)
async def test_only_what_a_retry_may_help_has_the_status_of_a_retry(monkeypatch, error, status):
    made = Dialects(monkeypatch, "slime")
    made.error = error
    reply = await made.answer("/dialects/slime")
    assert reply.status == status and ("retry-after" in dict(reply.headers)) == (status == 503)
    assert json.loads(reply.body) == {"error": str(error)} and reply.media == "application/json"
    assert made.late == Counter({"m": 1} if type(error) is Timeout else {})
    assert made.warned == [{"dialect": "slime", "reason": str(error)}] and not made.failed


async def test_a_trainer_that_reads_errors_only_with_status_200_gets_them_so(monkeypatch):
    made = Dialects(monkeypatch, "flow_factory")
    made.error = SpecMismatch("wrong")
    reply = await made.answer("/dialects/flow_factory/compute")
    assert (reply.status, json.loads(reply.body)) == (200, {"error": "wrong"})
    made.error = Busy("full")
    assert (await made.answer("/dialects/flow_factory/compute/")).status == 503


async def test_a_fault_of_the_gateway_is_told_and_logged_and_not_retried_for_days(monkeypatch):
    made = Dialects(monkeypatch, "slime")
    made.error = ZeroDivisionError("by zero")
    reply = await made.answer("/dialects/slime/")
    assert reply.status == 422
    told = json.loads(reply.body)["error"]
    assert told.startswith("the gateway failed at this request (ZeroDivisionError: by zero") and "log" in told
    (line,) = made.failed
    assert line["dialect"] == "slime" and line["exc_info"] is made.error and "by zero" in line["error"]


async def test_a_request_that_is_cancelled_is_answered_if_the_server_ends(monkeypatch):
    made = Dialects(monkeypatch, "slime")
    made.error = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await made.answer("/dialects/slime")
    assert not made.warned
    made.doors.close()
    reply = await made.answer("/dialects/slime")
    assert reply.status == 503 and "the server is stopping" in json.loads(reply.body)["error"]


@pytest.mark.parametrize(
    ("error", "status"), [(Busy("full"), 503), (Refused("large", Code.TOO_LARGE), 413), (SpecMismatch("wrong"), 422)]
)
async def test_a_body_that_is_refused_before_it_is_read_has_the_dialects_form(monkeypatch, error, status):
    made = Dialects(monkeypatch, "slime", "cosmos")
    for path, key in (("/dialects/slime", "error"), ("/dialects/cosmos/enqueue", "message")):
        found, fields, body = made.routes.refusals[path](error)
        assert found == status and json.loads(body) == {key: str(error)}
        assert dict(fields)["content-length"] == str(len(body))
        assert ("retry-after" in dict(fields)) == (status == 503)


async def test_a_dialect_of_its_own_name_may_speak_another_and_have_a_port_with_its_paths_at_the_root(monkeypatch):
    made = Dialects(monkeypatch, "mine", speaks="slime", port=0)
    made.error = Busy("full")
    app, refusals = made.routes.ports["mine"]
    assert refusals.keys() == {"/"} and made.routes.endpoints.keys() == {"/dialects/mine", "/dialects/mine/"}
    assert len(made.routes.intakes) == 1
    learned = []
    (status, fields), body, scope = await requested(app, "POST", "/", learned.append)
    assert (status, json.loads(body)) == (503, {"error": "full"}) and len(learned) == 1 and scope[DATA_ONLY]
    assert fields["retry-after"] and fields["content-length"] == str(len(body))
    assert (await learned[0](b"{}")).body == body, "what is learned answers the next ones"
    for path, method, status in (
        ("/none", "POST", 404), ("/", "GET", 405), ("/health", "GET", 200), ("/health", "POST", 405),
        ("/docs", "GET", 404), ("/redoc", "GET", 404), ("/openapi.json", "GET", 404),
    ):  # fmt: skip
        (found, fields), body, scope = await requested(app, method, path, learned.append)
        assert found == status, path
        assert fields["cache-control"] == "no-store" and DATA_ONLY not in scope
    assert len(learned) == 1


async def requested(app, method, path, learn=None, *, kind="http", body=b"{}"):
    """Status and fields, the body of an answer, and the scope of its request; a body of None: the client hangs up."""
    sent, coming = [], [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        return coming.pop() if coming else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": kind, "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "http_version": "1.1", "headers": [], "root_path": "", "scheme": "http", "client": None, "server": None,
    } | ({router.ANSWERED: learn} if learn else {})  # fmt: skip
    await app(scope, receive, send)
    if not sent:
        return None, b"", scope
    fields = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return (sent[0]["status"], fields), b"".join(one.get("body", b"") for one in sent[1:]), scope


async def test_a_trainer_that_hangs_up_is_answered_by_nothing(monkeypatch):
    made = Dialects(monkeypatch, "slime")
    app = router.DialectPaths(None, made.routes.endpoints)
    made.error = Busy("full")
    assert (await requested(app, "POST", "/dialects/slime"))[0][0] == 503
    assert (await requested(app, "POST", "/dialects/slime", body=None))[0] is None and len(made.warned) == 1


async def test_what_is_no_post_to_a_dialect_is_left_to_the_application(monkeypatch):
    made, left = Dialects(monkeypatch, "slime"), []

    async def others(scope, receive, send):
        left.append((scope["type"], scope.get("method"), scope["path"]))

    app = router.DialectPaths(others, made.routes.endpoints)
    here = "/dialects/slime"
    asked = [("http", "GET", here), ("http", "POST", "/dialects/slim"), ("websocket", "POST", here)]
    for kind, method, path in asked:
        await requested(app, method, path, kind=kind)
    await app({"type": "lifespan", "path": ""}, None, None)
    assert left == [*asked, ("lifespan", None, "")]


async def test_the_servers_description_has_each_dialect_once_and_other_methods_are_told_apart(monkeypatch):
    made, app = Dialects(monkeypatch, "slime", "unirl"), FastAPI()
    app.include_router(made.routes.paths)
    described = app.openapi()["paths"]
    assert {path: list(ways) for path, ways in described.items()} == {
        "/dialects/slime/health": ["get"],
        "/dialects/slime": ["post"],
        "/dialects/unirl/health": ["get"],
        "/dialects/unirl/rewards": ["get"],
        "/dialects/unirl/score": ["post"],
    }
    assert described["/dialects/slime"]["post"]["tags"] == ["dialects"]
    for path in ("/dialects/slime", "/dialects/slime/", "/dialects/unirl/score", "/dialects/unirl/score/"):
        assert (await requested(app, "GET", path))[0][0] == 405
        assert (await requested(app, "POST", path))[0][0] == 404, "it is answered before"
    (_, body, _) = await requested(app, "GET", "/dialects/unirl/health")
    assert json.loads(body) == {"status": "ok", "rewards": {"m": ["score"]}}
    (_, body, _) = await requested(app, "GET", "/dialects/unirl/rewards")
    assert json.loads(body) == {"rewards": ["m"]}


FULL = {
    "reward": "r", "like": "sglang", "score_range": [0, 1], "decimals": 3, "resize": [4, 6], "inputs": {"x": "text"},
    "output": "score", "timeout": 9.0, "priority": 3, "members": {"short": 1.0, "kind": 2.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "reward", "members", "form", "size"),
    [
        ({}, "m", (), AnswerForm("vllm", [], 6, {}), None),
        (FULL, "r", ("short", "kind"), AnswerForm("sglang", [0, 1], 3, FULL["members"]), (4, 6)),
    ],
    ids=["defaults", "all"],
)
def test_a_dialect_scores_as_its_settings_say(monkeypatch, changed, reward, members, form, size):
    seen, settings = [], SETTINGS | changed
    monkeypatch.setattr(router, "Intake", lambda *given, **named: seen.append((given, named)))
    frontend, turns = SimpleNamespace(lanes=SimpleNamespace(timeouts=Counter())), Turns()
    router.applications({"slime": settings}, frontend, SimpleNamespace(warning=None, error=None), Doors(), turns)
    ((given, named),) = seen
    assert given[0] is frontend and given[2] is turns
    made = {"reward": reward, "members": members, "form": form, "size": size}
    assert named == made | {name: settings[name] for name in ("model", "inputs", "output", "timeout", "priority")}


async def test_a_form_that_names_the_status_has_that_of_its_answer(monkeypatch):
    made = Dialects(monkeypatch, "reward_model")
    for error, status in ((Busy("full"), 503), (SpecMismatch("wrong"), 422)):
        found, _, body = made.routes.refusals["/dialects/reward_model/pooling"](error)
        assert found == json.loads(body)["error"]["code"] == status
