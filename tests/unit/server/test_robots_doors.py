"""The doors for robots of GR00T and LeRobot, with a model that needs no engine, and what all doors do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
import zmq.asyncio
from tests.lerobot_classes import NEW, lerobot_classes

from jurybox.protocol.errors import Busy, Code, Refused, RowFailed, SpecMismatch
from jurybox.protocol.parameters import Parameter
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.npy import npy_file
from jurybox.server.gateway.robots import lerobot, lerobot_robots
from jurybox.server.gateway.robots.counters import RobotDelays
from jurybox.server.gateway.robots.door import RobotDoor, door
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb
from jurybox.server.gateway.robots.policy import RobotEpisode
from jurybox.server.security.access import Access
from jurybox.server.security.limits import RECEIVED

SECRET = "0123456789abcdef0123"
NUMBERS = TensorSpec("float32", (2,))
SETTINGS = {"model": "m", "clients": 2, "timeout": 1.0, "listen": "127.0.0.1:0", "metadata": {}, "like": "n1.6"}
SETTINGS |= {"fps": 10.0, "grpc_http2": "auto"}


class Policy:
    """Answers with what it is given next, raises it if it is an error, and keeps what it was asked."""

    shape = (1, 2, 2)

    def __init__(self, spec):
        self.given, self.next, self.asked, self.closed, self.places = spec, [], [], False, 2

    @contextlib.asynccontextmanager
    async def episode(self, timeout):
        if not self.places:
            raise Busy("2 robots are connected")
        self.places -= 1
        try:
            yield RobotEpisode(self, self.places)
        finally:
            self.places += 1

    async def spec(self):
        return self.given

    async def ask(self, observation, place, *, begins, within, needs_actions):
        self.asked.append((dict(observation), begins, needs_actions))
        answer = self.next.pop(0) if self.next else {"arm": np.ones(self.shape)}
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self):
        self.closed = True

    @property
    def begun(self):
        return [begins for _, begins, _ in self.asked]


@contextlib.asynccontextmanager
async def opened(speaks, spec, access=None, **more):
    """A door that serves."""
    settings = SETTINGS | {"speaks": speaks} | more
    made = door("arm", settings, Frontend("ipc:///nowhere", None), access or Access())
    made.policy = Policy(spec)
    async with asyncio.timeout(60):
        await made.start()
        yield made
        await made.stop()
    assert made.policy.closed and made.policy.places == 2 and made.counters.connected == 0


GR00T = ModelSpec(
    "m",
    {"state/arm": TensorSpec("float32", (1, 2)), "speed": TensorSpec("float32", ())},
    {"arm": TensorSpec("float32", (2, 2))},
    parameters={"speed": Parameter("speed", 1.0)},
)
OBSERVATION = {"state": {"arm": {"__ndarray_class__": True, "as_npy": npy_file(np.zeros((1, 1, 2)))}}}
WHOLE = {"endpoint": "get_action", "data": {"observation": OBSERVATION, "options": None}}


@contextlib.asynccontextmanager
async def gr00t(access=None, **more):
    """A door of GR00T, and a function that asks it over one connection."""
    async with opened("gr00t", GR00T, access, **more) as made:
        with zmq.asyncio.Context() as context, context.socket(zmq.REQ) as connection:
            connection.linger = 0
            connection.connect(f"tcp://{made.bound}")

            async def ask(request):
                await connection.send_multipart(request if isinstance(request, list) else [packb(request)])
                return unpackb(await connection.recv())

            yield made, ask


async def test_gr00ts_robots_get_the_form_that_they_asked_in():
    async with gr00t() as (made, ask):
        actions, more = await ask(WHOLE)
        assert more == {} and actions["arm"].tolist() == [[[1, 1], [1, 1]]]
        assert set(await ask({"data": OBSERVATION})) == {"arm"}
        assert set(await ask({"data": {"observation": OBSERVATION["state"]["arm"], "task": ["x"]}})) == {"arm"}
        flat = {"state.arm": OBSERVATION["state"]["arm"]}
        assert set(await ask({"endpoint": "get_action", "data": flat})) == {"action.arm"}
        assert made.counters.requests == 4 and made.counters.connected == 1
        assert [needs for *_, needs in made.policy.asked] == [False] * 4


async def test_a_connection_of_gr00t_is_an_episode_until_its_reset():
    async with gr00t() as (made, ask):
        assert await ask({"endpoint": "reset"}) == {}
        for request in (WHOLE, WHOLE, {"endpoint": "reset"}, WHOLE):
            await ask(request)
        assert made.policy.begun == [True, False, True] and made.policy.places == 1
        assert not made.busy and len(made.connections()) == 1


async def test_options_of_gr00t_are_parameters_of_the_model():
    async with gr00t() as (made, ask):
        for options in (None, {}, {"speed": 0.5}):
            await ask({"endpoint": "get_action", "data": {"observation": OBSERVATION, "options": options}})
        assert [given.get("speed") for given, *_ in made.policy.asked] == [None, None, 0.5]
        for options, why in (
            ({"other": 1}, "option 'other' is no parameter of model 'm'; there are: speed"),
            ([1], "'options': expected a map, came list"),
        ):
            told = await ask({"endpoint": "get_action", "data": {"observation": OBSERVATION, "options": options}})
            assert why in told["error"]
        made.policy.given = ModelSpec("m", {"state/arm": NUMBERS}, {"arm": NUMBERS})
        told = await ask({"endpoint": "get_action", "data": {"observation": OBSERVATION, "options": {"a": 1}}})
        assert "option 'a' is no parameter of model 'm'; there are: none" in told["error"]


@pytest.mark.parametrize(
    ("request_", "why", "counted"),
    [
        ([b"a", b"b"], "expected one frame from a REQ socket, came another number", {"malformed": 1}),
        ([packb([1])], "expected a map with an endpoint, came list", {"malformed": 1}),
        ({"endpoint": "get_action"}, "expected a map (an observation), came NoneType", {"malformed": 1}),
        ({"endpoint": "get_action", "data": {"observation": 1}}, "", {}),
        ({"endpoint": "kill"}, "this server is not the robot's own: whoever runs it stops it", {}),
        ({"endpoint": "train"}, "endpoint 'train': expected ping, get_modality_config, get_action or reset", {}),
    ],
)
async def test_whatever_a_robot_of_gr00t_sends_is_answered(request_, why, counted):
    async with gr00t() as (made, ask):
        found = await ask(request_)
        assert why in found.get("error", "")
        assert made.counters.failures == counted
        assert await ask({"endpoint": "ping"}) == {"status": "ok", "message": "Server is running"}


async def test_an_observation_of_gr00t_that_fails_is_counted_by_its_reason():
    async with gr00t() as (made, ask):
        made.policy.next = [RowFailed("broken"), SpecMismatch("x is missing"), RuntimeError("a fault")]
        for why in ("broken", "x is missing", "a fault"):
            assert why in (await ask(WHOLE))["error"]
        assert made.counters.failures == {"row": 1, "observation": 1, "model": 1} and made.counters.requests == 0


async def test_the_modalities_are_told_as_either_version_reads_them():
    async with gr00t(metadata={"state": {"delta_indices": [-4]}}) as (_, ask):
        found = await ask({"endpoint": "get_modality_config"})
        assert set(found) == {"state", "action"}
        assert found["action"]["as_json"]["delta_indices"] == [0, 1]
        assert found["state"]["as_json"]["delta_indices"] == [-4]
        assert len(found["state"]["as_json"]) == 5
        assert found["state"]["__ModalityConfig_class__"] is True
    async with gr00t(like="n1.5") as (_, ask):
        found = await ask({"endpoint": "get_modality_config"})
        assert json.loads(found["state"]["as_json"]) == {"delta_indices": [0], "modality_keys": ["arm"]}


async def test_the_token_of_gr00t_is_in_its_requests():
    async with gr00t(Access(SECRET)) as (made, ask):
        for request in ({"endpoint": "ping"}, {"endpoint": "ping", "api_token": "wrong"}):
            assert await ask(request) == {"error": "Unauthorized: Invalid API token"}
        assert made.counters.refused == {"token": 2}
        assert (await ask({"endpoint": "ping", "api_token": SECRET}))["status"] == "ok"
    async with gr00t(Access(SECRET), unprotected=True) as (_, ask):
        assert (await ask({"endpoint": "ping"}))["status"] == "ok"


MOTORS = ["hip", "knee"]
LEROBOT = ModelSpec("m", {"observation.state": NUMBERS}, {"actions": TensorSpec("float32", (5, 2))})


class Call:
    """The context of a call over one connection."""

    def __init__(self, peer="ipv4:1.2.3.4:5"):
        self.farewells, self._peer = {}, peer

    def peer(self):
        return self._peer


@contextlib.asynccontextmanager
async def lerobots(monkeypatch):
    """A door of LeRobot whose errors come at once, and a robot that is ready."""
    monkeypatch.setattr(lerobot, "_PAUSE", 0.0)
    monkeypatch.setattr(lerobot, "_WAIT", 0.0)
    async with opened("lerobot", LEROBOT) as made:
        made.policy.shape = (2, 2)
        call = Call()
        assert await made.ready(b"", call) == b""
        assert await made.instruct(setup(), call) == b""
        yield made, call


def field(number, data):
    return bytes((number << 3 | 2, len(data) & 127 | 128, len(data) >> 7)) + data


def setup(most=3, names=MOTORS):
    with lerobot_classes(NEW) as classes:
        given = {"observation.state": {"names": names}}
        return field(1, pickle.dumps(classes.RemotePolicyConfig("act", "x", given, most)))


async def parts(data):
    yield b"\x08\x01" + field(2, data[:10])
    yield b"\x08\x03" + field(2, data[10:])


def seen(step, *motors, must_go=False):
    with lerobot_classes(NEW) as classes:
        values = dict(zip(MOTORS, map(float, motors), strict=False))
        return parts(pickle.dumps(classes.TimedObservation(100.0, step, values, must_go)))


def actions(message):
    """Step, time and motors of each action."""
    if not message:
        return []
    with lerobot_classes(NEW):
        start = 3 if message[2] < 128 else 4
        return [(one.timestep, one.timestamp, one.action.tolist()) for one in pickle.loads(message[start:])]


async def test_a_robot_of_lerobot_gets_as_many_steps_as_it_wants_at_the_doors_rate(monkeypatch):
    async with lerobots(monkeypatch) as (made, call):
        made.policy.next = [{"value": np.zeros(1), "actions": np.arange(10.0).reshape(5, 2)}, {"arm": np.array([7, 8])}]
        await made.observe(seen(4, 1, 2), call)
        assert actions(await made.act(b"", call)) == [(4, 100.0, [0, 1]), (5, 100.1, [2, 3]), (6, 100.2, [4, 5])]
        await made.observe(seen(5, 10, 2), call)
        (found,) = [one async for one in made.stream(b"", call)]
        assert actions(found) == [(5, 100.0, [7, 8])]
        ((first, *_), _) = made.policy.asked
        assert first["observation.state"].tolist() == [1, 2] and all(needs for *_, needs in made.policy.asked)
        assert made.counters.requests == 2 and made.counters.connected == made.counters.opened == 1


async def test_without_an_observation_there_are_no_actions_and_nothing_is_held(monkeypatch):
    async with lerobots(monkeypatch) as (made, call):
        assert await made.act(b"", call) == b""
        await made.observe(seen(0, 1, 2), call)
        size = sum([len(part) async for part in seen(0, 1, 2)]) - 10  # without the heads of its parts
        assert made.budget.held(RECEIVED) == 2 * size, "for its bytes and for its arrays"
        held = made.budget.held(RECEIVED)
        await made.observe(seen(1, 5, 2), call)
        assert made.budget.held(RECEIVED) == held, "a newer observation takes the place of one that waits"
        assert [step for step, *_ in actions(await made.act(b"", call))] == [1, 2]
        assert await made.act(b"", call) == b"" and made.budget.held(RECEIVED) == 0
        await made.observe(seen(1, 50, 2), call)  # answered already
        await made.observe(seen(2, 5.5, 2), call)  # it has hardly moved
        assert await made.act(b"", call) == b"" and made.budget.held(RECEIVED) == 0
        await made.observe(seen(2, 5.5, 2, must_go=True), call)
        assert [step for step, *_ in actions(await made.act(b"", call))] == [2, 3]


async def test_ready_begins_an_episode_and_forgets_what_was_observed(monkeypatch):
    async with lerobots(monkeypatch) as (made, call):
        for _ in range(2):
            await made.observe(seen(0, 1, 2, must_go=True), call)
            await made.act(b"", call)
        await made.observe(seen(0, 1, 2, must_go=True), call)
        await made.ready(b"", call)
        assert await made.act(b"", call) == b"" and made.budget.held(RECEIVED) == 0
        await made.observe(seen(0, 1, 2), call)
        await made.act(b"", call)
        assert made.policy.begun == [True, False, True]
        assert (made.policy.places, made.counters.opened) == (1, 1), "it has kept its place"


async def test_after_a_failure_the_same_observation_is_answered(monkeypatch):
    async with lerobots(monkeypatch) as (made, call):
        made.policy.next = [RowFailed("broken")]
        await made.observe(seen(0, 1, 2), call)
        with pytest.raises(RowFailed):
            await made.act(b"", call)
        assert made.counters.failures == {"row": 1} and made.budget.held(RECEIVED) == 0
        await made.observe(seen(0, 1, 2), call)
        assert [step for step, *_ in actions(await made.act(b"", call))] == [0, 1]


async def test_calls_of_lerobot_out_of_order_are_refused(monkeypatch):
    async with lerobots(monkeypatch) as (made, _):
        call = Call("ipv4:1.2.3.4:6")
        for coming in (made.act(b"", call), made.instruct(setup(), call), made.observe(seen(0, 1, 2), call)):
            with pytest.raises(Refused, match="expected Ready before any other call of a connection"):
                await coming
        await made.ready(b"", call)
        with pytest.raises(Refused, match="expected SendPolicyInstructions before observations"):
            await made.observe(seen(0, 1, 2), call)
        assert made.budget.held(RECEIVED) == 0 and made.counters.failures == {"server": 1}


async def test_a_robot_whose_features_do_not_fit_is_told_and_logged(monkeypatch, caplog):
    async with lerobots(monkeypatch) as (made, call):
        with pytest.raises(SpecMismatch, match=r"has 1 motors: the model expects float32\[2\]"):
            await made.instruct(setup(names=["hip"]), call)
        assert "robots.arm: a robot is refused: " in caplog.text and "has 1 motors" in caplog.text
        with pytest.raises(SpecMismatch, match="motor 'knee' of the observation"):
            await made.observe(seen(0, 1), call)
        assert made.counters.failures == {"observation": 1} and made.budget.held(RECEIVED) == 0


async def test_actions_are_asked_for_once_at_a_time(monkeypatch):
    async with lerobots(monkeypatch) as (made, call):
        monkeypatch.setattr(lerobot, "_WAIT", 60.0)
        asking = asyncio.create_task(made.act(b"", call))
        await asyncio.sleep(0)
        for other in (made.act(b"", call), made.ready(b"", call)):
            with pytest.raises(Refused, match="a connection is one robot"):
                await other
        await made.observe(seen(0, 1, 2), call)
        assert [step for step, *_ in actions(await asking)] == [0, 1]
        await made.ready(b"", call)


async def test_a_robot_whose_connection_has_ended_frees_its_place_and_what_it_held(monkeypatch):
    async with lerobots(monkeypatch) as (made, call):
        await made.observe(seen(0, 1, 2), call)
        await made.ready(b"", other := Call("ipv4:1.2.3.4:6"))
        assert (made.policy.places, made.counters.connected) == (0, 2)
        with pytest.raises(Busy):
            await made.ready(b"", Call("ipv4:1.2.3.4:7"))
        (gone,) = call.farewells.values()
        gone()
        assert made.budget.held(RECEIVED) == 0
        while made.counters.connected > 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert made.policy.places == 1
        with pytest.raises(Refused, match="expected Ready"):
            await made.observe(seen(0, 1, 2), call)
        await made.instruct(setup(), other)


@pytest.mark.parametrize(("told", "later", "kept"), [(True, 61, True), (False, 61, False), (False, 59, True)])
async def test_a_robot_that_is_silent_is_gone_if_nobody_tells_its_end(monkeypatch, told, later, kept):
    """That is so over grpcio."""
    now = [1000.0]
    async with lerobots(monkeypatch) as (made, _):
        monkeypatch.setattr(lerobot_robots, "time", SimpleNamespace(monotonic=lambda: now[0]))
        call = Call("ipv4:1.2.3.4:6")
        if not told:
            del call.farewells
        await made.ready(b"", call)
        now[0] += later / 2
        await made.instruct(setup(), call)  # it is heard
        now[0] += later
        made.policy.places += 1
        await made.ready(b"", Call("ipv4:1.2.3.4:7"))
        made.policy.places -= 1
        if kept:
            await made.observe(seen(0, 1, 2), call)
        else:
            with pytest.raises(Refused, match="expected Ready"):
                await made.observe(seen(0, 1, 2), call)


def bare(access=None, **more):
    return RobotDoor("arm", SETTINGS | more, Frontend("ipc:///nowhere", None), access or Access())


def test_an_unprotected_door_has_no_token_but_the_size_of_messages():
    access = Access(SECRET, max_message=7)
    assert bare(access).access is access
    made = bare(access, unprotected=True)
    assert made.access.token is None and made.access.max_message == 7
    assert made.setting == "robots.arm.listen"


def test_a_robot_is_counted_while_it_is_connected():
    made = bare()
    with pytest.raises(ZeroDivisionError), made.connected():
        with made.connected():
            assert (made.counters.connected, made.counters.opened) == (2, 2)
        raise ZeroDivisionError
    assert (made.counters.connected, made.counters.opened) == (0, 2)


def test_a_fault_in_a_request_is_an_error_that_is_counted_and_logged(caplog):
    made = bare()
    delays = RobotDelays(made.counters)
    with made.counted(delays):
        pass
    with pytest.raises(Refused, match="late"), made.counted(delays):
        raise Refused("late", Code.TIMEOUT)
    assert not caplog.records
    with pytest.raises(Exception, match=r"the gateway failed at this request \(KeyError: .*its log says more"):
        with made.counted(delays):
            raise KeyError("x")
    assert made.counters.requests == 1 and made.counters.failures == {"late": 1, "model": 1}
    assert "robots.arm: a request failed: KeyError" in caplog.text and caplog.records[0].exc_info
