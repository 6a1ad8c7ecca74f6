"""Health is false exactly when a request would fail: it sends a request in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.loops import turns

from jurybox.protocol.errors import Busy, Code, Error, Refused, ServerGone, StaleLease, Timeout
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.frontend.readiness import FRESH, SelfTest, not_ready, reasons

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


def document(
    state: str = "serving", engines: Sequence[dict[str, Any]] = (), **models: dict[str, Any]
) -> dict[str, Any]:
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


class Told:
    """A source of one document, or of an error."""

    def __init__(self, told: dict[str, Any] | Error) -> None:
        self.told = told

    async def status(self, *, fresh: bool = False) -> dict[str, Any]:
        if isinstance(self.told, Error):
            raise self.told
        return self.told


DOWN = {"index": 0, "hung": False, "state": "absent", "restarts": 1}


async def test_the_reasons_without_a_probe_are_those_of_the_status_or_its_error() -> None:
    assert await reasons(Told(document("down"))) == ["there is no engine"]
    assert await reasons(Told(document())) == []
    assert await reasons(Told(Timeout("the supervisor is busy"))) == ["the supervisor is busy"]


def test_a_sleeping_model_hides_no_later_one() -> None:
    models: Any = {"a": {"name": "a", "state": "sleeping"}, "b": {"name": "b", "state": "failed"}}
    assert not_ready(document(**models)) == ["model 'b' is failed"]


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"a": "ready", "b": "sleeping"}, []),
        ({"a": "ready"}, []),
        ({"a": "ready", "b": "failed"}, ["engine 0 is absent, restarted 1 times", "model 'b' is failed"]),
        ({"b": "sleeping"}, ["engine 0 is absent, restarted 1 times"]),
        ({}, ["engine 0 is absent, restarted 1 times"]),
    ],
)
async def test_an_engine_that_is_absent_is_no_reason_while_every_model_answers(
    engines: Engines, models: dict[str, str], said: list[str]
) -> None:
    engines.back.set()
    named: dict[str, Any] = {name: {"name": name, "state": state} for name, state in models.items()}
    told = document("down", [DOWN], **named)
    assert await SelfTest(Told(told), cast("Any", engines)).reasons() == said


async def test_a_request_that_failed_is_followed_by_a_probe_at_once(engines: Engines) -> None:
    engines.back.set()
    test = SelfTest(Source("serving", "ready"), cast("Any", engines), clock=lambda: 100.0)
    test.record("affine", answered=True)
    test.record("affine", answered=False)
    assert await test.reasons() == [] and engines.asked == 1


@pytest.mark.parametrize("error", [ServerGone("the server is gone"), Timeout("the server is busy")])
async def test_a_supervisor_that_never_answered_is_a_reason_and_one_that_did_is_not(
    engines: Engines, error: Error
) -> None:
    engines.back.set()
    source = Told(error)
    test = SelfTest(source, cast("Any", engines), clock=lambda: 10.0)
    assert await test.reasons() == [str(error)]
    source.told = document(a={"name": "a", "state": "ready"})
    assert await test.reasons() == []
    source.told = error
    assert await test.reasons() == []


async def test_a_check_that_is_cancelled_leaves_the_probe_to_the_others(engines: Engines) -> None:
    test = SelfTest(Source("serving", "ready"), cast("Any", engines), clock=lambda: 100.0)
    first, second = (asyncio.create_task(test.reasons()) for _ in range(2))
    await turns()
    first.cancel()
    await turns()
    engines.back.set()
    assert await asyncio.wait_for(second, 30) == [] and engines.asked == 1


async def test_a_probe_that_began_a_twentieth_of_a_second_ago_is_not_shared(engines: Engines) -> None:
    now = [0.0]
    test = SelfTest(Source("serving", "ready"), cast("Any", engines), clock=lambda: now[0])
    first = asyncio.create_task(test.reasons())
    await turns()
    now[0] = FRESH
    second = asyncio.create_task(test.reasons())
    await turns()
    engines.back.set()
    assert [*await asyncio.gather(first, second)] == [[], []] and engines.asked == 2


async def test_a_probe_needs_one_row_and_asks_for_the_version_for_two_seconds() -> None:
    asked: list[object] = []

    class Noting:
        async def hold(self, name: str, *, trying: bool) -> str:
            asked.append((name, trying))
            return "the lane"

        async def probe(self, held: str, seconds: float, version: int) -> None:
            asked.append((held, seconds, version))

    test = SelfTest(Told(document()), cast("Any", Noting()), clock=lambda: 100.0)
    assert await test.ask("affine", version=3) == ""
    assert asked == [("affine", True), ("the lane", 2.0, 3)]


async def test_a_lane_without_free_rows_is_asked_once(engines: Engines) -> None:
    """Only whoever leases rows waits for those of a gateway that died."""

    async def full(held: object, seconds: float, version: int) -> None:
        engines.asked += 1
        raise Busy("no rows of this lane are free")

    engines.probe = full  # type: ignore[method-assign]
    test = SelfTest(Source("serving", "ready"), cast("Any", engines), clock=lambda: engines.asked / 2)
    assert await test.reasons() == ["model 'affine' does not answer: no rows of this lane are free"]
    assert engines.asked == 1


async def test_the_answer_to_a_slow_probe_counts_from_when_it_came(engines: Engines) -> None:
    now = [100.0]
    test = SelfTest(Source("serving", "ready"), cast("Any", engines), clock=lambda: now[0])
    asking = asyncio.create_task(test.reasons())
    await turns()
    now[0] += 1.0
    engines.back.set()
    assert await asking == []
    now[0] += 0.02
    assert await test.reasons() == [] and engines.asked == 1


async def test_whether_a_model_was_unloaded_is_asked_of_the_supervisor_and_not_of_what_it_said_before(
    engines: Engines,
) -> None:
    engines.unknown = True

    class Kept(Told):
        async def status(self, *, fresh: bool = False) -> dict[str, Any]:
            return document(b={"name": "b", "state": "ready"}) if fresh else await super().status()

    kept = Kept(document(affine={"name": "affine", "state": "ready"}))
    assert await SelfTest(kept, cast("Any", engines)).reasons() == []


@pytest.mark.parametrize(("configured", "asked"), [({}, 1), ({"configured": True}, 1), ({"configured": False}, 0)])
async def test_a_model_that_a_client_has_loaded_is_asked_once_it_is_ready(
    engines: Engines, configured: dict[str, bool], asked: int
) -> None:
    engines.back.set()
    told = Told(document(a={"name": "a", "state": "loading", **configured}))
    assert await SelfTest(told, cast("Any", engines)).reasons() == []
    assert engines.asked == asked
