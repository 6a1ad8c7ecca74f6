"""What robots of each protocol send is read or refused in a sentence, and nothing else, whatever the bytes are."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import random

import numpy as np
import pytest
import zmq
from tests.lerobot_classes import NEW, lerobot_classes

from jurybox import native
from jurybox.protocol.errors import Error, SpecMismatch
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.npy import npy_file, npy_head
from jurybox.server.gateway.rep_server import RepServer
from jurybox.server.gateway.robots import json_arrays, lerobot_messages, msgpack_arrays
from jurybox.server.gateway.robots.gr00t_observations import gr00t_observation
from jurybox.server.gateway.robots.lerobot_features import RobotFeatures, bilinear
from jurybox.server.gateway.robots.lerobot_robots import LeRobotRobot
from jurybox.server.gateway.robots.observations import rows_of
from jurybox.server.gateway.robots.policy import RobotPolicy
from jurybox.server.security.doors import Doors
from jurybox.server.security.limits import ROBOTS, Charge, budget_of
from jurybox.server.security.pace import Turns
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.endpoints import listen
from jurybox.server.supervisor.robot_fit import require_steerable

PICTURE = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)


def json_body():
    array = {"__numpy__": base64.b64encode(PICTURE.tobytes()).decode(), "dtype": "|u1", "shape": [8, 6, 3]}
    return json.dumps({"image": array, "state": [[1.0, 2.0]], "text": ["lift"], "flag": True}).encode()


def npy_message():
    return msgpack_arrays.packb({"a": {"__ndarray_class__": True, "as_npy": npy_file(PICTURE)}, "b": [["x"]]})


def field(number, data):
    assert len(data) < 1 << 14
    return bytes((number << 3 | 2, len(data) & 127 | 128, len(data) >> 7)) + data


def observation_pickle():
    with lerobot_classes(NEW) as classes:
        return pickle.dumps(classes.TimedObservation(1.5, 3, {"a": np.float32(1), "top": PICTURE, "task": "x"}, True))


def setup_message():
    with lerobot_classes(NEW) as classes:
        return field(1, pickle.dumps(classes.RemotePolicyConfig("act", "x", {"a": {"names": ["m"]}}, 3)))


READERS = {
    "json_numpy": (json_body, json_arrays.loads),
    "npy in msgpack": (npy_message, msgpack_arrays.unpackb),
    "LeRobot's observation": (observation_pickle, lerobot_messages.observed),
    "LeRobot's setup": (setup_message, lerobot_messages.setup_of),
}


@pytest.mark.parametrize("name", READERS)
def test_mutated_messages_are_read_or_refused_and_nothing_else(name):
    make, read = READERS[name]
    whole, rng = make(), random.Random(name)
    read(whole)
    refused = 0
    for _ in range(4000):
        message = bytearray(whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.2 else whole)
        for _ in range(rng.randint(1, 4) if message else 0):
            message[rng.randrange(len(message))] = rng.randrange(256)
        try:
            read(bytes(message))
        except msgpack_arrays.Malformed as error:
            refused += 1
            assert 0 < len(str(error)) < 2000
    assert refused > 500


def test_an_observation_of_lerobot_is_read_with_its_values():
    found = lerobot_messages.observed(observation_pickle())
    assert (found.module, found.timestamp, found.timestep, found.must_go) == (NEW, 1.5, 3, True)
    assert found.values["a"] == 1 and found.values["task"] == "x"
    np.testing.assert_array_equal(found.values["top"], PICTURE)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">i8", "|b1", "<U3"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5)])
def test_files_that_numpy_writes_are_read_as_numpy_reads_them(order, dtype, shape):
    array = np.ones(shape, dtype, order=order)
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    data = file.getvalue()
    head = npy_head(memoryview(data))
    assert tuple(head.shape) == shape and len(data) - head.start == array.nbytes
    found = msgpack_arrays.unpackb(msgpack_arrays.packb({"x": {"__ndarray_class__": True, "as_npy": data}}))["x"]
    np.testing.assert_array_equal(found, array)
    np.testing.assert_array_equal(np.load(io.BytesIO(npy_file(array)), allow_pickle=False), array)


def test_a_head_that_numpy_would_evaluate_is_refused_by_its_form():
    for descr, shape in (("'|O'", "(1,)"), ("[('a', 'f4')]", "(1,)"), ("'<f4'", "(1,) * 10**9"), ("'<f4'", "[1]")):
        text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n"
        file = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(8)
        if descr == "'|O'":
            with pytest.raises(msgpack_arrays.Malformed, match="dtype"):
                msgpack_arrays.unpackb(msgpack_arrays.packb({"x": {"__ndarray_class__": True, "as_npy": file}}))
        else:
            with pytest.raises(ValueError, match="not that of an array"):
                npy_head(memoryview(file))


async def test_what_a_stream_of_observations_keeps_is_counted_before_it_is_kept():
    budget = budget_of(1000)
    charge = Charge(budget, native.Account(budget, ROBOTS))
    held = []

    async def messages():
        for part in range(10):
            held.append(charge.size)
            yield (b"\x08\x01" if not part else b"\x08\x02") + field(2, bytes(300))

    with pytest.raises(Error, match="at most 1000 bytes"):
        await lerobot_messages.joined(messages(), charge, 1000)
    assert held == [0, 300, 600, 900]


SPEC = ModelSpec(
    "policy",
    {
        "image": TensorSpec("uint8", (8, 6, 3)),
        "state": TensorSpec("float32", (2,)),
        "text": TensorSpec("bytes", capacity=9),
    },
    {"actions": TensorSpec("float32", (2,))},
)


def observation(*lead, text="lift"):
    return {"image": np.zeros((*lead, 8, 6, 3), np.uint8), "state": np.zeros((*lead, 2)), "text": text}


@pytest.mark.parametrize("lead", [(), (1,), (4,), (1, 1), (4, 1)])
def test_arrays_may_have_a_batch_axis_and_behind_it_a_single_time(lead):
    found = rows_of(observation(*lead), SPEC)
    n = lead[0] if lead else 1
    assert (found.n, found.batched) == (n, bool(lead))
    assert [len(values) for values in found.values.values()] == [n] * 3 and found.values["text"] == [b"lift"] * n
    assert found.values["image"][0].shape == (8, 6, 3)
    found = rows_of(observation(*lead, text=[[f"{i}"] for i in range(n)]), SPEC)
    assert found.values["text"] == [f"{i}".encode() for i in range(n)]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (observation(4, text=["a", "b"]), "expected 4 texts, came a list of 2"),
        (observation(0), "came uint8"),
        (observation(4, 2), "came uint8"),
        (observation(1025), "came uint8"),
        (observation(4) | {"state": np.zeros((3, 2))}, "4 rows in 'image' and 3 in 'state'"),
        (observation(4) | {"state": np.zeros(2)}, "a batch axis in 'image' and none in 'state'"),
    ],
)
def test_rows_that_do_not_belong_together_are_refused(given, why):
    with pytest.raises(SpecMismatch, match=why):
        rows_of(given, SPEC)


NUMBERS, TEXT = TensorSpec("float32", (2,)), TensorSpec("bytes", capacity=9)
MISFITS = [
    ("act", {"x": NUMBERS}, {"actions": NUMBERS}, {"memory": NUMBERS}, "keeps state"),
    ("gr00t", {"image": NUMBERS}, {"arm": NUMBERS}, {}, "input 'image'.*expected video/CAMERA"),
    ("gr00t", {"language/task": NUMBERS}, {"arm": NUMBERS}, {}, "language/NAME for text"),
    ("gr00t", {"action/arm": NUMBERS}, {"arm": NUMBERS}, {}, "input 'action/arm'"),
    ("gr00t", {"state/a": NUMBERS}, {"error": NUMBERS}, {}, "would be read as an error"),
    ("gr00t", {"state/a": NUMBERS, "state/b": TensorSpec("float32", (3, 2))}, {"arm": NUMBERS}, {}, "different times"),
    ("lerobot", {"image": NUMBERS}, {"actions": NUMBERS}, {}, "input 'image'.*expected observation.state"),
    ("lerobot", {"task": NUMBERS}, {"actions": NUMBERS}, {}, "task for text"),
    ("lerobot", {"observation.state": TEXT}, {"actions": NUMBERS}, {}, "task for text"),
    (
        "lerobot",
        {"observation.state": NUMBERS},
        {"arm": NUMBERS, "hand": NUMBERS},
        {},
        "expected one output, or actions",
    ),
    ("lerobot", {"observation.state": NUMBERS}, {"arm": TensorSpec("float32", (1, 2, 3))}, {}, "expected one output"),
]


@pytest.mark.parametrize(("speaks", "inputs", "outputs", "state", "why"), MISFITS)
def test_a_model_that_can_never_answer_a_protocol_is_refused_when_it_loads(speaks, inputs, outputs, state, why):
    robots = {"arm": {"model": "policy", "speaks": speaks, "listen": "127.0.0.1:0"}}
    models = {"policy": {"factory": "tests.models:affine"}}
    settings = Configuration.model_validate({"models": models, "robots": robots})
    with pytest.raises(SpecMismatch, match=rf"\[robots.arm\] can never be answered: .*{why}"):
        require_steerable(settings, ModelSpec("policy", inputs, outputs, state))
    require_steerable(settings, ModelSpec("other", inputs, outputs, state))


@pytest.mark.parametrize("size", [(8, 6), (3, 5), (480, 640), (1, 1), (24, 18)])
def test_pictures_are_resized_as_torch_does_it(size):
    torch = pytest.importorskip("torch")
    picture = np.random.default_rng(0).integers(0, 256, (24, 18, 3), np.uint8)
    wanted = torch.nn.functional.interpolate(
        torch.tensor(picture, dtype=torch.float32).permute(2, 0, 1)[None], size=size, mode="bilinear"
    )[0].permute(1, 2, 0)
    found = bilinear(picture, *size)
    assert found.dtype == np.uint8 and np.abs(found - wanted.numpy()).max() <= 0.51


@pytest.mark.parametrize(("motors", "moved", "kept"), [([1.0], [1.5], False), ([1.0], [3.0], True), ([], [], True)])
async def test_whether_a_robot_has_moved_is_seen_also_where_the_model_takes_only_pictures(motors, moved, kept):
    names = [f"m{i}" for i in range(len(motors))]
    features = {"observation.images.top": {}} | ({"observation.state": {"names": names}} if names else {})
    spec = ModelSpec("policy", {"observation.images.top": TensorSpec("uint8", (8, 6, 3))}, {"actions": NUMBERS})
    budget = budget_of(1000)
    robot = LeRobotRobot(native.Account(budget, ROBOTS))
    robot.features = RobotFeatures(lerobot_messages.Setup("act", features, 5, {}), spec)

    def seen(step, state):
        return lerobot_messages.Observed(NEW, 0.0, step, dict(zip(names, state, strict=True)), must_go=False)

    first = seen(0, motors)
    assert robot.keep(first, Charge(budget, robot.account)) and robot.take()[0] is first
    robot.answering(first)
    assert robot.keep(seen(1, moved), Charge(budget, robot.account)) is kept


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("axes", [{"video": 4, "state": 2}, {"video": 5, "state": 3}, {"video": 5, "state": 2}, {}])
def test_only_an_observation_of_gr00t_that_has_no_batch_axis_at_all_gets_one(flat, axes):
    arrays = {kind: np.zeros((1,) * n) for kind, n in axes.items()}
    texts = {"task": ["lift"]} if flat else {"language": {"task": ["lift"]}}
    given = texts | {(f"{kind}.a" if flat else kind): (one if flat else {"a": one}) for kind, one in arrays.items()}
    found = gr00t_observation(given)
    older = axes == {"video": 4, "state": 2}
    assert (found.flat, found.batched) == (flat and bool(axes), not older)
    shapes = {kind: found.values[f"{kind}/a"].ndim for kind in axes}
    assert shapes == ({"video": 5, "state": 3} if older else axes)
    assert found.values["language/task"] == ["lift"]


def test_a_motors_position_is_a_number_or_an_array_of_one():
    names = ["hip", "knee", "wrist"]
    features = {"observation.state": {"dtype": "float32", "shape": [3], "names": names}}
    spec = ModelSpec("policy", {"observation.state": TensorSpec("float32", (3,))}, {"actions": NUMBERS})
    motors = RobotFeatures(lerobot_messages.Setup("act", features, 5, {}), spec)
    there = {"hip": 1, "knee": np.float32([2.5]), "wrist": np.array(-3.0)}
    assert motors.state(there).tolist() == [1.0, 2.5, -3.0]
    for wrong in (np.zeros(2), "1", None, True, [1.0]):
        with pytest.raises(SpecMismatch, match=r"^motor 'knee' of the observation: expected a number$"):
            motors.state({**there, "knee": wrong})


async def test_requests_that_are_episodes_take_the_place_freed_last_as_that_of_a_robot_that_returns():
    """So batches wait for robots that send every request over another connection, too."""
    policy = RobotPolicy(Frontend("ipc:///nowhere", None), "policy", 4, 1.0)

    async def places(*, returns):
        found = []
        for _ in range(3):
            async with policy.episode(1.0, returns=returns) as one, policy.episode(1.0, returns=returns) as other:
                found.append({one._place, other._place})
        return found

    first, *later = await places(returns=True)
    assert later == [first, first]
    first, *later = await places(returns=False)
    assert later[0] != first


async def test_a_fault_of_a_rep_server_is_answered_too():
    async def broken(_peer, body):
        if body == b"good":
            return b"well"
        raise RuntimeError("a fault")

    listener = listen("127.0.0.1:0", "robots.x.listen")
    where = "tcp://{}:{}".format(*listener.getsockname())
    server = RepServer(
        listener, 1 << 20, budget_of(1 << 20), ROBOTS, Doors(), Turns(),
        begin=lambda _: None, answer=broken, refused=lambda error: str(error).encode(),
    )  # fmt: skip
    server.start()
    found = []

    def ask():
        with zmq.Context() as context, context.socket(zmq.REQ) as connection:
            connection.linger, connection.rcvtimeo = 0, 20_000
            connection.connect(where)
            for body in (b"bad", b"good"):
                connection.send(body)
                found.append(connection.recv())

    await asyncio.to_thread(ask)
    await server.stop()
    assert b"the gateway failed at this request" in found[0] and found[1] == b"well"


def rows(spec, value):
    """What a model with one input of this spec gets for a value."""
    return rows_of({"x": value}, ModelSpec("arm", {"x": spec}, {"a": spec})).values["x"]


FRAME, FRAMES = TensorSpec("uint8", (4, 5, 3)), TensorSpec("uint8", (1, 4, 5, 3))
PIXELS = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)


@pytest.mark.parametrize("spec", [FRAME, FRAMES], ids=["picture", "frames"])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("made", ["as it is", "channels first", "floats"])
def test_a_picture_may_come_with_its_channels_first_and_as_floats_and_be_the_only_frame(spec, batch, made):
    given = {
        "as it is": PIXELS,
        "channels first": np.moveaxis(PIXELS, -1, 0),
        "floats": (PIXELS / 255 + 1e-6).astype(np.float32),
    }[made]
    if batch and spec is FRAMES:
        given = given[None]  # the batch axis; behind it a single frame
    (found,) = rows(spec, given[None] if batch else given)
    assert (found.shape, found.dtype) == (spec.shape, np.uint8)
    np.testing.assert_array_equal(found.reshape(4, 5, 3), PIXELS)


@pytest.mark.parametrize(
    ("low", "high", "pixels"), [(0.0, 1.0, [0, 255]), (-0.01, 1.0, None), (0.0, 1.01, None), (0.0, np.nan, None)]
)
def test_floats_of_a_picture_are_from_0_to_1(low, high, pixels):
    given = np.full((4, 5, 3), low, np.float32)
    given[0, 0, 0] = high
    if pixels is None:
        with pytest.raises(SpecMismatch, match="expected floats from 0 to 1, came .*: send uint8"):
            rows(FRAME, given)
    else:
        (found,) = rows(FRAME, given)
        assert sorted(set(found.ravel().tolist())) == pixels


@pytest.mark.parametrize("shape", [(5, 4, 3), (3, 5, 4), (4, 5), (4, 5, 4), (2, 2, 4, 5, 3)])
def test_a_picture_of_another_form_is_refused_with_its_shape(shape):
    with pytest.raises(SpecMismatch) as caught:
        rows(FRAME, np.zeros(shape, np.uint8))
    assert f"came uint8{list(shape)}" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        ("uint8", np.array([0, 255], np.int64), [0, 255]),
        ("uint8", np.array([0, 256], np.int64), None),
        ("uint8", np.array([-1, 0], np.int64), None),
        ("int8", np.array([-128, 127], np.int16), [-128, 127]),
        ("int8", np.array([-129, 0], np.int16), None),
        ("int64", np.array([1.0, 2.0]), None),
        ("int32", np.array([True, False]), None),
        ("float32", np.array([1, 2], np.int8), [1, 2]),
        ("float32", np.array([1e300, 0.0]), None),
        ("float32", np.array([np.inf, -np.inf]), [np.inf, -np.inf]),
        ("float32", [1, 2.5], [1, 2.5]),
        ("int64", [1, 2], [1, 2]),
        ("int64", [1, 2.0], None),
        ("float32", [1, "2"], None),
        ("float32", "12", None),
        ("float32", np.array(["1", "2"]), None),
    ],
)
def test_numbers_are_converted_where_they_keep_their_meaning(dtype, given, expected):
    if expected is None:
        with pytest.raises(SpecMismatch, match="'x' of the observation"):
            rows(TensorSpec(dtype, (2,)), given)
    else:
        (found,) = rows(TensorSpec(dtype, (2,)), given)
        assert (found.dtype, found.tolist()) == (np.dtype(dtype), expected)


def test_a_single_number_is_that_of_every_row_and_entries_that_are_no_inputs_are_ignored():
    spec = ModelSpec("arm", {"speed": TensorSpec("float32", ()), "s": TensorSpec("float32", (2,))}, {"a": NUMBERS})
    found = rows_of({"speed": 0.5, "s": np.ones((3, 2)), "other": {"deep": "x"}}, spec)
    assert (found.n, found.batched, list(found.values)) == (3, True, ["speed", "s"])
    assert [float(one) for one in found.values["speed"]] == [0.5] * 3
    with pytest.raises(SpecMismatch, match="needs speed, s; s is missing: came other/deep, speed"):
        rows_of({"speed": 0.5, "other": {"deep": "x"}}, spec)
    with pytest.raises(SpecMismatch, match="speed, s is missing: came nothing"):
        rows_of({}, spec)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("lift", b"lift"),
        (b"lift", b"lift"),
        (["lift"], b"lift"),
        ([["lift"]], b"lift"),
        (np.array("lift"), b"lift"),
        (np.array(["lift"]), b"lift"),
        ("x" * 20, b"x" * 20),
        ("x" * 21, "expected at most 20 bytes, came 21"),
        (["a", "b"], "expected one text, came a list of 2"),
        ([], "expected one text, came a list of 0"),
        (7, "expected text, came int"),
        ([7], "expected text, came int"),
    ],
)
def test_a_text_may_be_alone_or_the_only_item_of_a_list(given, expected):
    spec = ModelSpec("arm", {"text": TensorSpec("bytes", capacity=20)}, {"a": NUMBERS})
    if isinstance(expected, bytes):
        assert rows_of({"text": given}, spec).values["text"] == [expected]
    else:
        with pytest.raises(SpecMismatch, match=expected):
            rows_of({"text": given}, spec)
