"""LeRobot's asynchronous inference: clients that pickle its classes, old and new, and its own client if it is there."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import random
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import grpc
import numpy as np
import pytest
import torch
from tests.lerobot_classes import NEW, OLD, lerobot_classes
from tests.serving import launch, serves_grpc_itself, serving, wait_until
from tests.shared_batches import answers_of_shared_batches
from tests.unit.server.test_lerobot_checkpoints import answered, checkpoint, observations

from jurybox.server.robot_policies import lerobot

MODELS = {name: {"factory": f"tests.robot_models:{name}", "max_batch": 16} for name in ("arm", "totals")}
MOTORS = ["shoulder.pos", "elbow.pos"]
SECRET = "0123456789abcdef0123"
CHUNK = 2 << 20  # bytes of one message of an observation


def door(name: str, more: str = "", model: str = "") -> str:
    return f'[robots.{name}]\nmodel = "{model or name}"\nspeaks = "lerobot"\nlisten = "127.0.0.1:0"\n{more}\n'


DOORS = door("arm") + door("totals", "fps = 10.0") + door("few", "clients = 1", "arm")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(
        tmp_path_factory.mktemp("server"), MODELS, more=DOORS, max_message_mib=8, http="127.0.0.1:0"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def addresses(server):
    with server.connect() as client:
        return client.status()["server"]["robots"]


@pytest.fixture(params=[NEW, OLD])
def classes(request):
    with lerobot_classes(request.param) as module:
        yield module


def varint(value):
    encoded = b""
    while value > 127:
        encoded += bytes((value & 127 | 128,))
        value >>= 7
    return encoded + bytes((value,))


def data(number, value):
    return bytes((number << 3 | 2,)) + varint(len(value)) + value


class Robot:
    """A client like LeRobot's, with its own bytes."""

    def __init__(self, address, classes, package="transport", *, own=True):
        self.classes = classes
        # Channels of one process to one address share a connection, if they have no pool of their own.
        self.channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", int(own))])
        at = f"/{package}.AsyncInference/"
        self._ready, self._setup = (self.channel.unary_unary(at + one) for one in ("Ready", "SendPolicyInstructions"))
        self._observe = self.channel.stream_unary(at + "SendObservations")
        self._act = self.channel.unary_unary(at + "GetActions")
        self._stream = self.channel.unary_stream(at + "StreamActions")

    def ready(self):
        assert self._ready(b"", timeout=60) == b""

    def setup(self, motors=MOTORS, cameras=("top",), most=50, size=(8, 6, 3), **more):
        features = {"observation.state": {"dtype": "float32", "shape": (len(motors),), "names": list(motors)}}
        for camera in cameras:
            features[f"observation.images.{camera}"] = {
                "dtype": "image", "shape": size, "names": ["height", "width", "channels"],
                "info": {"is_depth_map": False},
            }  # fmt: skip
        given = self.classes.RemotePolicyConfig("act", "somebody/something", features, most, "cuda", **more)
        assert self._setup(data(1, pickle.dumps(given)), timeout=60) == b""

    def send(self, body):
        parts = [body[at : at + CHUNK] for at in range(0, len(body), CHUNK)] or [b""]
        states = [3] if len(parts) == 1 else [1, *[2] * (len(parts) - 2), 3]
        messages = (b"\x08" + bytes((state,)) + data(2, part) for state, part in zip(states, parts, strict=True))
        assert self._observe(messages, timeout=60) == b""

    def observe(
        self, step=0, motors=(1.0, 2.0), fill=10, task="lift", must_go=False, protocol=4, size=(8, 6, 3), **more
    ):
        values = {name: np.float32(value) for name, value in zip(MOTORS, motors, strict=False)}
        values |= {"top": np.full(size, fill, np.uint8), "task": task, **more}
        given = self.classes.TimedObservation(1000.5, step, values, must_go)
        self.send(pickle.dumps(given, protocol=protocol))

    def act(self):
        return self.read(self._act(b"", timeout=60))

    def stream(self):
        return [self.read(one) for one in self._stream(b"", timeout=60)]

    def read(self, message):
        if not message:
            return []
        assert message[0] == 0x0A
        at = next(i for i in range(1, 12) if message[i] < 128) + 1
        return pickle.loads(message[at:])


@contextmanager
def robot(address, classes, package="transport", ready=True):
    made = Robot(address, classes, package)
    try:
        if ready:
            made.ready()
            made.setup()
        yield made
    finally:
        made.channel.close()


@pytest.mark.parametrize("protocol", [4, 5])
def test_an_observation_is_answered_by_timed_actions(addresses, classes, protocol):
    with robot(addresses["arm"], classes) as arm:
        arm.observe(7, protocol=protocol)
        actions = arm.act()
        assert len(actions) == 5 and all(type(one) is classes.TimedAction for one in actions)
        assert [one.timestep for one in actions] == [7, 8, 9, 10, 11]
        np.testing.assert_allclose([one.timestamp for one in actions], 1000.5 + np.arange(5) / 30)
        assert all(one.action.dtype == torch.float32 and one.action.device.type == "cpu" for one in actions)
        assert all(one.action.tolist() == [13, 4] for one in actions)


@pytest.mark.parametrize("first", [True, False], ids=["channels first", "channels last"])
def test_tensors_of_torch_are_read_as_the_arrays_that_they_are(addresses, classes, first):
    picture = (torch.arange(8 * 6 * 3) % 251).to(torch.uint8).reshape(8, 6, 3)
    motors = {MOTORS[0]: torch.tensor(1.5), MOTORS[1]: torch.tensor([2.5], dtype=torch.bfloat16)}
    with robot(addresses["arm"], classes) as arm:
        arm.observe(3, (1.5, 2.5), must_go=True, top=picture.numpy())
        wanted = arm.act()
        given = picture.permute(2, 0, 1).contiguous() if first else picture
        arm.observe(4, must_go=True, top=given, **motors)
        found = arm.act()
    assert found[0].timestep == 4 and torch.equal(found[0].action, wanted[0].action)
    with robot(addresses["arm"], classes) as arm:
        with pytest.raises(grpc.RpcError, match="refused, nothing is imported or called here"):
            arm.observe(5, must_go=True, top=torch.nn.Parameter(torch.zeros(8, 6, 3)))


def test_robots_of_the_first_versions_stream_their_actions(addresses):
    with lerobot_classes(OLD) as classes, robot(addresses["arm"], classes, "async_inference") as arm:
        arm.observe()
        (actions,) = arm.stream()
        assert [one.action.tolist() for one in actions] == [[13, 4]] * 5


@pytest.fixture
def new():
    with lerobot_classes(NEW) as module:
        yield module


def test_a_chunk_has_as_many_steps_as_the_robot_wants_at_the_ports_rate(addresses, new):
    with robot(addresses["totals"], new) as arm:
        arm.setup(most=2, cameras=())
        arm.observe()
        actions = arm.act()
        np.testing.assert_allclose([one.timestamp for one in actions], [1000.5, 1000.6])


def test_names_are_changed_as_the_robot_says(addresses, new):
    with robot(addresses["arm"], new) as arm:
        arm.setup(cameras=("phone",), rename_map={"observation.images.phone": "observation.images.top"})
        arm.observe(phone=np.full((8, 6, 3), 20, np.uint8))
        assert arm.act()[0].action.tolist() == [23, 4]


def test_motors_are_ordered_as_the_features_say_and_numbers_may_be_pythons(addresses, new):
    with robot(addresses["totals"], new) as arm:
        arm.setup(motors=MOTORS[::-1], cameras=())
        arm.observe(motors=(1.0, 30.0))
        assert arm.act()[0].action.tolist() == [30, 1]
        arm.ready()
        arm.observe(motors=(), **{"shoulder.pos": 5, "elbow.pos": 6.0})
        assert arm.act()[0].action.tolist() == [6, 1]


def test_large_pictures_come_in_parts_and_are_resized_as_by_lerobot(addresses, new):
    rng = np.random.default_rng(1)
    picture = rng.integers(0, 255, (1024, 1000, 3), np.uint8)
    wanted = torch.nn.functional.interpolate(
        torch.tensor(picture, dtype=torch.float32).permute(2, 0, 1)[None], size=(8, 6), mode="bilinear"
    )
    with robot(addresses["arm"], new) as arm:
        arm.observe(top=picture)
        assert arm.act()[0].action[0].item() == pytest.approx(3 + wanted.mean().item(), abs=0.2)


def test_the_newest_observation_is_answered_and_a_similar_one_only_if_it_must(addresses, new):
    with robot(addresses["arm"], new) as arm:
        arm.observe(0, motors=(1, 2))
        arm.observe(1, motors=(5, 2))
        assert arm.act()[0].timestep == 1
        arm.observe(1, motors=(50, 2))  # answered already
        arm.observe(2, motors=(5.5, 2))  # the arm has hardly moved
        began = time.monotonic()
        assert arm.act() == [] and time.monotonic() - began > 1.5
        arm.observe(2, motors=(5.5, 2), must_go=True)
        assert arm.act()[0].timestep == 2
        arm.ready()
        arm.observe(2, motors=(5.5, 2))
        assert arm.act()[0].timestep == 2


def wait_until_called(server):
    """Wait until a call is in progress: the server has read it, and holds it."""

    def called():
        page = urllib.request.urlopen(f"http://{server.listening('http')}/metrics", timeout=60).read().decode()
        (calls,) = (line.split()[1] for line in page.splitlines() if line.startswith("jurybox_client_calls "))
        return float(calls) > 0

    wait_until(called, 60, "a call in progress")


def test_actions_wait_for_an_observation_that_is_on_its_way(server, addresses, new):
    with robot(addresses["arm"], new) as arm, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(arm.act)
        wait_until_called(server)
        arm.observe(3)
        assert coming.result(60)[0].timestep == 3


def test_a_connection_is_an_episode_and_ready_begins_another(addresses, new):
    with robot(addresses["totals"], new, ready=False) as arm, robot(addresses["totals"], new, ready=False) as other:
        for one in (arm, other):
            one.ready()
            one.setup(cameras=())
        for step in range(1, 4):
            arm.observe(step, motors=(10.0, 0), must_go=True)
            assert arm.act()[0].action.tolist() == [10 * step, step]
        other.observe(0, motors=(1, 0))
        assert other.act()[0].action.tolist() == [1, 1]
        arm.ready()
        arm.observe(0, motors=(10, 0))
        assert arm.act()[0].action.tolist() == [10, 1]


def test_two_robots_in_one_connection_are_told_so_and_get_no_actions_of_each_other(server, addresses, new):
    first, second = (Robot(addresses["arm"], new, own=False) for _ in range(2))
    with first.channel, second.channel, ThreadPoolExecutor(1) as pool:
        first.ready()
        first.setup()
        waiting = pool.submit(first.act)
        wait_until_called(server)
        for call in (second.ready, second.act):
            with pytest.raises(grpc.RpcError) as error:
                call()
            assert "a connection is one robot" in said(error)[1]
        first.observe(4)
        first.observe(5, must_go=True)
        assert [one.action.tolist() for one in waiting.result(60) or first.act()] == [[13, 4]] * 5


def said(error):
    return error.value.code(), error.value.details()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"motors": [*MOTORS, "wrist.pos"]}, "3 motors: the model expects float32[2]"),
        ({"cameras": ()}, "needs 'observation.images.top'"),
        ({"most": 0}, "actions_per_chunk"),
        ({"rename_map": {"observation.state": "observation.other"}}, "needs 'observation.state'"),
        ({"rename_map": {1: 2}}, "as text"),
    ],
)
def test_a_robot_that_can_never_be_answered_is_told_at_its_start(addresses, new, given, why):
    with robot(addresses["arm"], new, ready=False) as arm:
        arm.ready()
        with pytest.raises(grpc.RpcError) as error:
            arm.setup(**given)
        code, text = said(error)
        assert code is grpc.StatusCode.INVALID_ARGUMENT and why in text


def test_calls_out_of_order_are_told_and_a_loop_without_pause_is_slowed(addresses, new):
    with robot(addresses["arm"], new, ready=False) as arm:
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as error:
            arm.act()
        assert "expected Ready" in said(error)[1] and time.monotonic() - began > 0.8
        arm.ready()
        with pytest.raises(grpc.RpcError) as error:
            arm.observe()
        assert "SendPolicyInstructions before" in said(error)[1]


WRONG = {
    "a motor is missing": ({"motors": (1.0,)}, "'elbow.pos'"),
    "a motor of text": ({"elbow.pos": "x"}, "'elbow.pos'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_observation_that_does_not_fit_is_refused_when_it_is_sent(addresses, new, name):
    given, why = WRONG[name]
    with robot(addresses["arm"], new) as arm:
        with pytest.raises(grpc.RpcError) as error:
            arm.observe(**given)
        assert why in said(error)[1]
        arm.observe()
        assert arm.act()[0].action.tolist() == [13, 4]


@pytest.mark.parametrize(
    ("given", "why"),
    [({"top": None}, "expected a picture"), ({"task": 3}, "expected text"), ({"motors": (-1.0, 0.0)}, "broken")],
)
def test_actions_that_cannot_be_computed_are_an_error_after_a_pause_and_the_next_ones_come(addresses, new, given, why):
    with robot(addresses["arm"], new) as arm:
        arm.observe(1, **given, must_go=True)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as error:
            arm.act()
        assert why in said(error)[1] and time.monotonic() - began > 0.8
        arm.observe(1)  # the same step, and it need not be a must
        assert arm.act()[0].action.tolist() == [13, 4]


class Evil:
    def __reduce__(self):
        return os.system, ("echo jurybox was here",)


def test_only_pickles_of_the_three_classes_are_read_and_nothing_is_called(addresses, new):
    with robot(addresses["arm"], new) as arm:
        for wrong in (
            Evil(),
            {"a": 1},
            new.Other(3),
            new.TimedObservation(0.0, 0, {"x": Evil()}),
            new.TimedObservation(0.0, "0", {}),
            new.RemotePolicyConfig("act", "x", {}, 1),
            io.BytesIO(b""),
        ):
            with pytest.raises(grpc.RpcError) as error:
                arm.send(pickle.dumps(wrong))
            assert said(error)[0] is grpc.StatusCode.INVALID_ARGUMENT, wrong
        with pytest.raises(grpc.RpcError):
            arm._setup(data(1, pickle.dumps(Evil())), timeout=60)
        arm.observe()
        assert arm.act()[0].action.tolist() == [13, 4]


def test_a_stream_that_ends_early_or_is_too_large_is_refused(addresses, new):
    with robot(addresses["arm"], new) as arm:
        for messages, code in (
            ([], "INVALID_ARGUMENT"),
            ([b"\x08\x01" + data(2, b"x")], "INVALID_ARGUMENT"),
            ([b"\x08\x07" + data(2, b"x")], "INVALID_ARGUMENT"),
            ([b"\xff\xff"], "INVALID_ARGUMENT"),
            ([b"\x08\x02" + data(2, bytes(CHUNK))] * 6, "RESOURCE_EXHAUSTED"),
        ):
            with pytest.raises(grpc.RpcError) as error:
                arm._observe(iter(messages), timeout=60)
            assert said(error)[0].name == code
        arm.observe()
        assert arm.act()[0].action.tolist() == [13, 4]


def test_random_bytes_are_refused_and_the_next_observation_is_answered(addresses, new):
    rng = random.Random(3)
    values = dict.fromkeys(MOTORS, 1.0) | {"top": np.zeros((8, 6, 3), np.uint8), "task": "x"}
    whole = pickle.dumps(new.TimedObservation(1.0, 0, values))
    with robot(addresses["arm"], new) as arm:
        for _ in range(150):
            body = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            try:
                arm.send(bytes(body))
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
        arm.ready()
        arm.observe()
        assert arm.act()[0].action.tolist() == [13, 4]


def test_one_robot_too_many_is_told_at_its_start_until_a_place_is_free(server, addresses, new):
    with robot(addresses["few"], new):
        with robot(addresses["few"], new, ready=False) as other:
            with pytest.raises(grpc.RpcError) as error:
                other.ready()
            assert "1 robots are connected" in said(error)[1]
    if not serves_grpc_itself():
        pytest.skip("grpcio tells nobody that a connection has ended: the place is kept for a minute")
    with robot(addresses["few"], new, ready=False) as arm:

        def is_ready():  # the server learns of the first one's end at its own pace
            with suppress(grpc.RpcError):
                return arm.ready() is None

        wait_until(is_ready, 30, "a free place")
        arm.setup()
        arm.observe()
        assert arm.act()[0].action.tolist() == [13, 4]


def test_robots_that_ask_at_the_same_time_share_batches(server, addresses, new):
    def right(arm, number, step):
        arm.observe(step, motors=(float(10 * step), number), must_go=True)
        return [one.action.tolist() for one in arm.act()] == [[10 * step + number + 10, 4]] * 5

    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        arms = [stack.enter_context(robot(addresses["arm"], new)) for _ in range(8)]
        assert all(pool.map(lambda number: all(right(arms[number], number, step) for step in range(10)), range(8)))
        steps = iter(range(10, 1000))  # a robot answers no observation twice
        asks = [lambda arm=arm, number=number: right(arm, number, next(steps)) for number, arm in enumerate(arms)]
        assert all(answers_of_shared_batches(server, "arm", asks))


def test_a_checkpoint_of_act_answers_as_in_this_process(tmp_path, new):
    folder = checkpoint(tmp_path / "policy", "seen")
    model = {"factory": "jurybox.server.robot_policies:lerobot", "args": {"folder": str(folder)}, "max_batch": 4}
    wanted, rows = answered(lerobot(str(folder)), "seen"), observations("seen")
    cameras = [name.removeprefix("observation.images.") for name in rows if name.startswith("observation.images.")]
    state = rows["observation.state"]
    motors = [f"joint_{i}" for i in range(state.shape[1])]
    with serving(tmp_path / "server", {"act": model}, more=door("act")) as running, running.connect() as client:
        client.model("act", rows=1, timeout=100).close()
        with robot(client.status()["server"]["robots"]["act"], new, ready=False) as arm:
            arm.ready()
            arm.setup(motors=motors, cameras=cameras, most=1000)
            for row in range(len(state)):
                values = dict(zip(motors, state[row], strict=True))
                values |= {camera: rows[f"observation.images.{camera}"][row] for camera in cameras}
                arm.send(pickle.dumps(new.TimedObservation(1.0, row, values, True)))
                np.testing.assert_allclose(np.array([one.action.numpy() for one in arm.act()]), wanted[row], atol=1e-5)


@pytest.mark.runs
def test_the_door_is_the_same_over_grpcio(tmp_path, new):
    """Where the system has no libnghttp2. grpcio does not tell the end of a connection, so places wait for a minute."""
    with serving(tmp_path, MODELS, more=DOORS, grpc_http2="grpcio") as server:
        with server.connect() as client:
            addresses = client.status()["server"]["robots"]
        with robot(addresses["arm"], new) as arm, robot(addresses["totals"], new, ready=False) as other:
            arm.observe(3, top=np.full((1024, 1000, 3), 10, np.uint8))
            assert [one.timestep for one in arm.act()] == [3, 4, 5, 6, 7]
            with pytest.raises(grpc.RpcError) as error:
                arm.setup(cameras=())
            assert "needs 'observation.images.top'" in said(error)[1]
            with pytest.raises(grpc.RpcError) as error:
                arm.send(pickle.dumps(Evil()))
            assert said(error)[0] is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.RpcError) as error:
                other.act()
            assert "expected Ready" in said(error)[1]
            arm.observe(4, must_go=True)
            assert arm.act()[0].action.tolist() == [13, 4]
            arm.observe(9, must_go=True)
            (actions,) = arm.stream()
            assert actions[0].timestep == 9


def test_with_a_token_the_port_is_refused_at_start_unless_it_is_unprotected(tmp_path, new):
    models = {"arm": MODELS["arm"]}
    running = launch(tmp_path / "a", models, env={"JURYBOX_TOKEN": SECRET}, more=door("arm"))
    assert running.process.wait(60) == 2 and "expected unprotected = true" in running.text()
    opened = door("arm", "unprotected = true")
    with serving(tmp_path / "b", models, env={"JURYBOX_TOKEN": SECRET}, more=opened) as server:
        with server.connect() as client:
            address = client.status()["server"]["robots"]["arm"]
        with robot(address, new) as arm:
            arm.observe()
            assert arm.act()[0].action.tolist() == [13, 4]


LEROBOT = """
import sys, threading, time
import numpy as np
import lerobot.async_inference.robot_client as module
from lerobot.async_inference.configs import RobotClientConfig, get_aggregate_function

address, motors = sys.argv[1], sys.argv[2].split(",")


class Mock:
    observation_features = {**dict.fromkeys(motors, float), "top": (48, 64, 3)}
    action_features = dict.fromkeys(motors, float)
    sent = []

    def connect(self): pass
    def disconnect(self): pass

    def get_observation(self):
        return {**dict.fromkeys(motors, float(len(self.sent))), "top": np.full((48, 64, 3), 10, np.uint8)}

    def send_action(self, action):
        self.sent.append(action)
        return action


robot = Mock()
module.make_robot_from_config = lambda _: robot
config = RobotClientConfig.__new__(RobotClientConfig)
config.__dict__ |= dict(
    policy_type="act", pretrained_name_or_path="any", robot=None, actions_per_chunk=5, task="lift", fps=30,
    server_address=address, policy_device="cpu", client_device="cpu", chunk_size_threshold=0.5,
    aggregate_fn_name="latest_only", aggregate_fn=get_aggregate_function("latest_only"),
    debug_visualize_queue_size=False,
)
client = module.RobotClient(config)
if not client.start():
    sys.exit("not started")
for work in (client.receive_actions, lambda: client.control_loop("lift")):
    threading.Thread(target=work, daemon=True).start()
until = time.time() + 60
while len(robot.sent) < 30 and time.time() < until:
    time.sleep(0.05)
client.stop()
assert all(action["elbow.pos"] == 4 for action in robot.sent)
print("sent", len(robot.sent) >= 30, robot.sent[0], flush=True)
"""


def test_lerobots_own_client_works_unchanged(addresses, tmp_path):
    """`RobotClient` of lerobot 0.4.4, with a robot whose motors and camera are made up."""
    if importlib.util.find_spec("lerobot") is None:
        pytest.skip("lerobot is not installed here: pip install 'lerobot[async]'")

    def ran(motors):
        command = [sys.executable, "-c", LEROBOT, addresses["arm"], motors]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)

    done = ran(",".join(MOTORS))
    assert done.stdout == "sent True {'shoulder.pos': 10.0, 'elbow.pos': 4.0}\n", done.stderr
    refused = ran("a,b,c")
    assert "not started" in refused.stderr and "3 motors: the model expects" in refused.stderr
