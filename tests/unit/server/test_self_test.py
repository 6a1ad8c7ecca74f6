"""Health is false exactly when a request would fail: it sends a request in the same way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests.loops import turns

from jurybox.protocol.errors import Busy, Code, Refused, StaleLease, Timeout
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.frontend.readiness import SelfTest, not_ready

SPEC = ModelSpec("affine", {"x": TensorSpec("float32", (4,))}, {"y": TensorSpec("float32", (4,))})


class Engines:
    """Lanes of a server whose engines answer from the time `back` on; earlier requests wait until then."""

    def __init__(self) -> None:
        self.back = asyncio.Event()
        self.asked = 0
        self.leased = True
        self.full = 0  # for so many requests for rows
        self.refused = 0  # while it was full
        self.held = 0
        self.unknown = False  # an engine answers that it has no such model
        self.late: asyncio.Event | None = None  # ends the wait of the first probe, instead of its time-out

    async def hold(self, name, *, trying):
        self.held += 1
        if self.refused < self.full:
            self.refused += 1
            raise Busy("no 1 neighbouring rows are free")
        if not self.leased and not self.back.is_set():
            raise Refused(f"model {name!r} is loading: ask again when it is ready", Code.NOT_READY)
        return SimpleNamespace(spec=SPEC)

    async def probe(self, held, seconds, version):
        self.asked += 1
        if self.unknown:
            raise Refused("this engine serves no model of that number", Code.MODEL_NOT_FOUND)
        try:
            if self.late is not None and self.asked == 1:
                await self.late.wait()
                raise TimeoutError
            await asyncio.wait_for(self.back.wait(), seconds)
        except TimeoutError:
            raise Timeout(f"model 'affine' did not answer within {seconds:.3f} s") from None


class Source:
    """The status document of a server with one model and one engine."""

    def __init__(self, engine: str, model: str) -> None:
        self.engine, self.model, self.draining = engine, model, False

    async def status(self, *, fresh=False):
        state = "draining" if self.draining else "serving" if self.engine == "serving" else "down"
        return {
            "server": {"state": state},
            "engines": [{"index": 0, "state": self.engine, "hung": False, "restarts": 1}],
            "models": [{"name": "affine", "state": self.model, "reason": "it broke", "configured": True}]
            if self.model
            else [],
        }


@pytest.fixture
def engines():
    return Engines()


async def test_an_engine_that_is_back_in_time_for_a_request_is_back_in_time_for_health(engines):
    test = SelfTest(Source("absent", "loading"), engines)
    asking = asyncio.create_task(test.reasons())
    await asyncio.sleep(0.1)
    engines.back.set()
    assert await asking == []


async def test_health_names_an_engine_that_is_not_back_with_the_error_of_requests(engines):
    reasons = await SelfTest(Source("absent", "loading"), engines).reasons()
    assert reasons[:2] == [
        "engine 0 is absent, restarted 1 times",
        "model 'affine' is loading: it broke",
    ]
    assert "did not answer within" in reasons[-1]


async def test_a_time_out_of_an_earlier_request_says_nothing_about_now(engines):
    now, engines.late = [100.0], asyncio.Event()
    test = SelfTest(Source("serving", "ready"), engines, clock=lambda: now[0])
    early = asyncio.create_task(test.reasons())
    await turns()
    now[0] += 1.8
    late = asyncio.create_task(test.reasons())
    await turns()
    assert engines.asked == 2, "an older probe is not shared"
    engines.late.set()
    await asyncio.wait([early])
    engines.back.set()
    assert (bool(early.result()), await late) == (True, [])


async def test_simultaneous_health_checks_share_a_row(engines):
    engines.back.set()
    test = SelfTest(Source("serving", "ready"), engines, clock=lambda: 100.0)
    assert await asyncio.gather(*(test.reasons() for _ in range(50))) == [[]] * 50
    assert engines.asked == 1


async def test_a_model_that_cannot_be_leased_yet_is_an_error_at_once(engines):
    engines.leased = False
    reasons = await SelfTest(Source("starting", "loading"), engines).reasons()
    assert (engines.held, engines.asked) == (1, 0), "it is not asked for again"
    assert any("ask again when it is ready" in reason for reason in reasons)


@pytest.mark.parametrize("state", ["failed", "quarantined"])
async def test_an_unloaded_model_gets_no_requests(engines, state):
    reasons = await SelfTest(Source("serving", state), engines).reasons()
    assert (reasons, engines.asked) == ([f"model 'affine' is {state}: it broke"], 0)


async def test_a_draining_engine_gets_no_requests(engines):
    engines.back.set()
    source = Source("serving", "ready")
    source.draining = True
    assert (await SelfTest(source, engines).reasons(), engines.asked) == (["the server is draining"], 0)


async def test_health_waits_for_the_rows_of_a_gateway_that_died_as_requests_do(engines):
    """Its successor requests rows before its lane is revoked."""
    engines.back.set()
    engines.full = 3
    assert await SelfTest(Source("serving", "ready"), engines, clock=lambda: 100.0).reasons() == []
    engines.full, engines.refused = 10**6, 0
    passing = SelfTest(Source("serving", "ready"), engines, clock=lambda: engines.refused / 10)
    (reason,) = await passing.reasons()
    assert "no 1 neighbouring rows are free" in reason
    assert engines.refused == 15  # asked again, but only for the second and a half that requests wait


async def test_a_model_that_an_engine_does_not_know_is_ill_if_the_server_should_serve_it(engines):
    """Another engine has it, so it counts as ready; requests that go to this one fail."""
    engines.unknown = True
    for state in ("ready", "loading"):
        reasons = await SelfTest(Source("serving", state), engines).reasons()
        assert "serves no model of that number" in reasons[-1]


@pytest.mark.parametrize("state", ["sleeping", "failed", None])
async def test_a_model_that_was_unloaded_during_the_check_is_not_ill(engines, state):
    engines.unknown = True
    source = Source("serving", "ready")
    probe = engines.probe

    async def unload(held, seconds, version):
        source.model = state
        await probe(held, seconds, version)

    engines.probe = unload
    test = SelfTest(source, engines)
    assert await test.reasons() == []
    assert engines.asked == 1


async def test_a_model_that_no_engine_knows_is_ill_while_the_supervisor_cannot_say_why(engines):
    engines.unknown = True
    source = Source("serving", "ready")
    test = SelfTest(source, engines)
    status = source.status

    async def silent(*, fresh=False):
        if fresh:
            raise Timeout("the server did not answer")
        return await status()

    source.status = silent
    assert "serves no model of that number" in (await test.reasons())[-1]


async def test_a_busy_supervisor_is_no_reason_for_half_a_minute_while_engines_answer(engines):
    engines.back.set()
    now, source = [100.0], Source("serving", "ready")
    test = SelfTest(source, engines, clock=lambda: now[0])
    status = source.status

    async def silent(*, fresh=False):
        raise Timeout("the supervisor is busy")

    source.status = silent
    assert await test.reasons() == ["the supervisor is busy"]  # it has never said what is served
    source.status = status
    assert await test.reasons() == []
    source.status = silent
    now[0] += 29.9
    assert await test.reasons() == []
    assert engines.asked == 2, "the model is asked all the same"
    now[0] += 0.1
    assert await test.reasons() == ["the supervisor is busy"]
    source.status = status
    assert await test.reasons() == []
    source.status = silent
    now[0] += 29.9
    assert await test.reasons() == []


async def test_an_error_of_the_supervisor_is_a_reason_at_once(engines):
    engines.back.set()
    source = Source("serving", "ready")
    test = SelfTest(source, engines)
    assert await test.reasons() == []

    async def refuses(*, fresh=False):
        raise Refused("another version")

    source.status = refuses
    assert await test.reasons() == ["another version"]


async def test_a_model_that_has_just_answered_a_request_is_not_asked(engines):
    engines.back.set()
    now = [100.0]
    test = SelfTest(Source("serving", "ready"), engines, clock=lambda: now[0])
    test.record("affine", answered=True)
    now[0] += 0.04
    assert await test.reasons() == [] and engines.asked == 0
    now[0] += 0.02
    assert await test.reasons() == [] and engines.asked == 1  # an answer to a probe counts as well
    assert await test.reasons() == [] and engines.asked == 1
    test.record("affine", answered=False)
    now[0] += 0.06  # later than the probe, which would be shared
    assert await test.reasons() == [] and engines.asked == 2
    test.record("affine", answered=True)
    test.record("affine", answered=False)
    now[0] += 0.06
    assert await test.reasons() == [] and engines.asked == 3


@pytest.mark.parametrize(("stale", "asked"), [(2, 3), (3, 3)])
async def test_a_model_that_is_reloaded_meanwhile_is_asked_three_times(engines, stale, asked):
    engines.back.set()
    probe = engines.probe

    async def reloaded(held, seconds, version):
        await probe(held, seconds, version)
        if engines.asked <= stale:
            raise StaleLease("the model was reloaded")

    engines.probe = reloaded
    reasons = await SelfTest(Source("serving", "ready"), engines).reasons()
    assert reasons == ([] if stale < asked else ["model 'affine' does not answer: the model was reloaded"])
    assert engines.asked == asked


async def test_a_version_that_no_engine_has_is_ill_though_the_model_was_unloaded(engines):
    engines.unknown = True
    source = Source("serving", "ready")
    test = SelfTest(source, engines)
    source.model = None
    assert await test.ask("affine") == ""
    assert "serves no model of that number" in await test.ask("affine", version=3)


async def test_a_fault_of_the_gateway_is_a_reason(engines):
    async def broken(held, seconds, version):
        raise KeyError("y")

    engines.probe = broken
    (reason,) = await SelfTest(Source("serving", "ready"), engines).reasons()
    assert reason.startswith("model 'affine' does not answer: ") and "KeyError" in reason


def document(state="serving", engines=(), **models):
    return {
        "server": {"state": state},
        "engines": list(engines),
        "models": [{"reason": "", **m} for m in models.values()],
    }


@pytest.mark.parametrize(
    ("given", "reasons"),
    [
        (document(), []),
        (document("draining", a={"name": "a", "state": "failed"}), ["the server is draining", "model 'a' is failed"]),
        (document("down"), ["there is no engine"]),
        (
            document("down", [{"index": 1, "hung": True, "heartbeat_age": 12.34}]),
            ["engine 1 hangs: its last heartbeat is 12.3 s old"],
        ),
        (
            document("down", [{"index": 0, "hung": False, "state": "starting", "restarts": 2}]),
            ["engine 0 is starting, restarted 2 times"],
        ),
        (document(a={"name": "a", "state": "sleeping"}), []),
        (document(a={"name": "a", "state": "loading", "configured": False}), []),
        (document(a={"name": "a", "state": "loading"}), ["model 'a' is loading"]),
        (document(a={"name": "a", "state": "failed", "configured": False}), ["model 'a' is failed"]),
        (
            document(a={"name": "a", "state": "quarantined", "reason": "it kills"}),
            ["model 'a' is quarantined: it kills"],
        ),
    ],
)
def test_what_the_status_says_is_told_in_words(given, reasons):
    assert not_ready(given) == reasons
