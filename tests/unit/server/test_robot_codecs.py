"""What robots of each protocol send is read or refused in a sentence, and nothing else, whatever the bytes are."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from tests.lerobot_classes import NEW, lerobot_classes
from tests.loops import turns

from jurybox import native
from jurybox.client.ticket import Reply
from jurybox.protocol.errors import Busy, Error, SpecMismatch
from jurybox.protocol.parameters import Parameter
from jurybox.protocol.spec import ModelSpec, TensorSpec
from jurybox.server.frontend.frontend import Frontend
from jurybox.server.gateway.npy import npy_file, npy_head
from jurybox.server.gateway.rep_server import RepServer
from jurybox.server.gateway.robots import json_arrays, lerobot_messages, msgpack_arrays
from jurybox.server.gateway.robots.counters import PortCounters
from jurybox.server.gateway.robots.gr00t_observations import Gr00tObservation, gr00t_observation
from jurybox.server.gateway.robots.lerobot_features import RobotFeatures, bilinear
from jurybox.server.gateway.robots.lerobot_robots import LeRobotRobot, LeRobotRobots
from jurybox.server.gateway.robots.observations import rows_of
from jurybox.server.gateway.robots.policy import RobotPolicy
from jurybox.server.security.doors import Doors
from jurybox.server.security.limits import ROBOTS, Charge, budget_of
from jurybox.server.security.pace import Turns
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.endpoints import listen
from jurybox.server.settings.robot_protocols import modalities, problem
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


def test_inputs_are_found_in_whatever_order_a_model_declares_them():
    turned = ModelSpec(SPEC.name, dict(reversed(SPEC.inputs.items())), SPEC.outputs)
    found, expected = rows_of(observation(2), turned).values, rows_of(observation(2), SPEC).values
    assert found.keys() == expected.keys() and next(iter(turned.inputs)) == "text"
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


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


def setup_pickle(features=None, most=3, **more):
    features = {"a": {"names": ["m"]}} if features is None else features
    with lerobot_classes(NEW) as classes:
        return pickle.dumps(classes.RemotePolicyConfig("act", "x" * 300, features, most, **more))


def test_what_a_robot_of_lerobot_says_of_itself_is_read():
    found = lerobot_messages.setup_of(b"\x10\x05" + field(1, setup_pickle(rename_map={"a": "b"})))
    assert (found.policy, found.most) == ("act " + "x" * 196, 3)
    assert (found.features, found.renamed) == ({"a": {"names": ["m"]}}, {"a": "b"})


EXPECTED = "expected lerobot_features, actions_per_chunk of 1 and more, and rename_map"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"features": [1]}, EXPECTED),
        ({"most": 0}, EXPECTED),
        ({"most": True}, EXPECTED),
        ({"most": 1.0}, EXPECTED),
        ({"rename_map": [1]}, EXPECTED),
        ({"features": {1: {}}}, "expected names of features as text"),
        ({"rename_map": {1: "a"}}, "expected names of features as text"),
        ({"rename_map": {"a": 1}}, "expected names of features as text"),
    ],
)
def test_a_robot_of_lerobot_that_says_something_else_is_refused(given, why):
    lerobot_messages.setup_of(field(1, setup_pickle(most=1)))
    with pytest.raises(msgpack_arrays.Malformed, match=f"RemotePolicyConfig: {why}"):
        lerobot_messages.setup_of(field(1, setup_pickle(**given)))


@pytest.mark.parametrize(
    ("timestamp", "timestep", "values", "must_go", "valid"),
    [
        (1, 0, {}, False, True),
        (1.5, 0, {}, 1, True),
        ("1", 0, {}, False, False),
        (1.5, True, {}, False, False),
        (1.5, 0.0, {}, False, False),
        (1.5, 0, [], False, False),
    ],
)
def test_an_observation_of_lerobot_has_a_time_a_step_and_values(timestamp, timestep, values, must_go, valid):
    with lerobot_classes(NEW) as classes:
        data = pickle.dumps(classes.TimedObservation(timestamp, timestep, values, must_go))
    if valid:
        found = lerobot_messages.observed(data)
        assert (found.timestamp, found.timestep, found.must_go) == (float(timestamp), 0, False)
        assert type(found.timestamp) is float
    else:
        with pytest.raises(msgpack_arrays.Malformed, match="TimedObservation: expected timestamp, timestep and an obs"):
            lerobot_messages.observed(data)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "the pickle ends after 0 bytes"),
        (b"\x08\x01", "expected a pickled RemotePolicyConfig, came NoneType"),
        (field(1, pickle.dumps([1])), "expected a pickled RemotePolicyConfig, came list"),
        (field(1, observation_pickle()), "expected a pickled RemotePolicyConfig, came Instance"),
        (b"\x0a\x05abc", "a message is truncated"),
        (b"\x0a", "a message is truncated"),
        (b"\x0a\x80", "a message is truncated"),
        (b"\x09" + bytes(8), "a field of wire type 1: expected numbers and bytes"),
        (b"\x08" + b"\xff" * 10 + b"\x01", "a number of more than 64 bits"),
    ],
)
def test_a_message_that_is_no_setup_is_refused_with_its_fault(message, why):
    with pytest.raises(msgpack_arrays.Malformed, match=why):
        lerobot_messages.setup_of(message)


async def joined(*messages, most=1000):
    async def stream():
        for message in messages:
            yield message

    budget = budget_of(1 << 20)
    charge = Charge(budget, native.Account(budget, ROBOTS))
    return await lerobot_messages.joined(stream(), charge, most), charge.size


def part(state, data):
    return bytes((8, state)) + field(2, data)


async def test_the_parts_of_an_observation_are_joined_up_to_its_end():
    assert await joined(part(3, b"abc")) == (b"abc", 3)
    assert await joined(part(1, b"abc"), part(2, b"d"), part(3, b"ef"), part(2, b"x")) == (b"abcdef", 6)
    assert await joined(part(1, b"abc"), part(1, b"d"), part(3, b"ef")) == (b"def", 3), "one that begins anew"
    assert await joined(part(1, bytes(600)), part(1, bytes(600)), part(3, bytes(400))) == (bytes(1000), 1000)
    big = (1 << 63) | 3
    number = b"\x08" + bytes(big >> 7 * i & 127 | 128 for i in range(9)) + b"\x01"
    with pytest.raises(msgpack_arrays.Malformed, match=f"transfer state {big}"):
        await joined(number)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([part(1, b"a"), part(2, b"b")], "ended before its last part"),
        ([], "ended before its last part"),
        ([part(0, b"a")], "transfer state 0: expected begin, middle or end"),
        ([part(4, b"a")], "transfer state 4: expected begin, middle or end"),
        ([field(2, b"a")], "transfer state 0: expected begin, middle or end"),
        ([b"\x08\x03\x10\x01"], "transfer state 3: expected begin, middle or end"),
        ([part(1, bytes(600)), part(3, bytes(401))], "an observation may have at most 1000 bytes"),
    ],
)
async def test_a_stream_that_is_no_observation_is_refused(messages, why):
    with pytest.raises(Error, match=why):
        await joined(*messages)


@pytest.mark.parametrize("steps", [1, 2, 200])
def test_actions_are_written_as_lerobot_reads_them(steps):
    found = lerobot_messages.Observed(NEW, 10.0, 7, {}, must_go=False)
    message = lerobot_messages.actions_message(found, np.arange(2.0 * steps, dtype=np.float32).reshape(steps, 2), 4.0)
    assert message[:1] == b"\x0a"
    head = next(i for i in range(1, 12) if message[i] < 128) + 1
    assert sum((byte & 127) << 7 * i for i, byte in enumerate(message[1:head])) == len(message) - head
    pytest.importorskip("torch")
    with lerobot_classes(NEW) as classes:
        actions = pickle.loads(message[head:])
        assert [type(one) for one in actions] == [classes.TimedAction] * steps
    assert [(one.timestamp, one.timestep) for one in actions] == [(10.0 + i / 4, 7 + i) for i in range(steps)]
    assert [one.action.tolist() for one in actions] == [[2 * i, 2 * i + 1] for i in range(steps)]


STATE, TOP = "observation.state", "observation.images.top"


def features(inputs, named, **more):
    setup = lerobot_messages.Setup("act", named, 5, more.pop("renamed", {}))
    return RobotFeatures(setup, ModelSpec("policy", inputs, {"actions": NUMBERS}, **more))


@pytest.mark.parametrize(
    ("inputs", "named", "why"),
    [
        ({"words": TEXT}, {}, "input 'words' of model 'policy' is text: a robot's only text is 'task'"),
        ({STATE: NUMBERS}, {}, f"model 'policy' needs '{STATE}': this robot has nothing"),
        ({STATE: NUMBERS}, {"b": {}, "a": {}}, f"model 'policy' needs '{STATE}': this robot has a, b"),
        ({STATE: NUMBERS}, {STATE: {"names": ["a"]}}, r"of this robot has 1 motors: the model expects float32\[2\]"),
        ({STATE: NUMBERS}, {STATE: {}}, f"'{STATE}' of this robot: expected the names of its motors"),
        ({STATE: NUMBERS}, {STATE: ["a", "b"]}, "expected the names of its motors"),
        ({STATE: NUMBERS}, {STATE: {"names": ("a", "b")}}, "expected the names of its motors"),
        ({STATE: NUMBERS}, {STATE: {"names": ["a", 1]}}, "expected the names of its motors"),
    ],
)
def test_a_robot_that_lacks_what_a_model_needs_is_refused(inputs, named, why):
    with pytest.raises(SpecMismatch, match=why):
        features(inputs, named)


def test_a_robots_observation_becomes_the_inputs_of_the_model():
    named = {STATE: {"names": ["a", "b"]}, "observation.images.left": {}, "more": {}}
    inputs = {STATE: NUMBERS, TOP: TensorSpec("uint8", (8, 6, 3)), "task": TEXT}
    robot = features(inputs, named, renamed={"observation.images.left": TOP})
    found = robot.inputs({"a": 1.0, "b": 2, "left": PICTURE, "top": 0, "task": "lift"})
    assert found[STATE].tolist() == [1, 2] and found["task"] == "lift"
    assert found[TOP] is PICTURE, "of its size it is not computed anew"
    assert robot.inputs({"a": 1.0, "b": 2, "left": PICTURE})["task"] == ""


def test_a_state_may_have_another_name_in_the_model():
    robot = features({"joints": NUMBERS}, {STATE: {"names": ["a", "b"]}}, renamed={STATE: "joints"})
    assert robot.inputs({"a": 1.0, "b": 2.0})["joints"].tolist() == [1, 2]


def test_a_task_that_is_a_parameter_has_its_default_for_robots_without_one():
    robot = features({STATE: NUMBERS, "task": TEXT}, {STATE: {"names": ["a", "b"]}}, parameters=FREE_TASK)
    assert "task" not in robot.inputs({"a": 1.0, "b": 2.0})
    assert robot.inputs({"a": 1.0, "b": 2.0, "task": "lift"})["task"] == "lift"
    assert "task" not in features({STATE: NUMBERS}, {STATE: {"names": ["a", "b"]}}).inputs(
        {"a": 1.0, "b": 2.0, "task": "lift"}
    )


FREE_TASK = {"task": Parameter("task", "any")}


@pytest.mark.parametrize(
    ("shape", "picture", "expected"),
    [
        ((4, 3, 3), PICTURE, (4, 3, 3)),
        ((4, 3, 3), np.moveaxis(PICTURE, 2, 0), (4, 3, 3)),
        ((8, 6, 3), np.moveaxis(PICTURE, 2, 0), (8, 6, 3)),
        ((2, 3, 3), np.zeros((3, 5, 3), np.uint8), (2, 3, 3)),
        ((-1, -1, 3), PICTURE, (8, 6, 3)),
        ((-1, 3, 3), PICTURE, (8, 6, 3)),
        ((1, 4, 3, 3), PICTURE, (8, 6, 3)),
        ((1, 1, 3), PICTURE, (1, 1, 3)),
    ],
)
def test_a_picture_gets_the_size_that_the_model_has(shape, picture, expected):
    robot = features({TOP: TensorSpec("uint8", shape, capacity=999 if -1 in shape else None)}, {TOP: {}})
    assert robot.inputs({"top": picture})[TOP].shape == expected


def test_channels_that_come_first_are_moved_behind():
    robot = features({TOP: TensorSpec("uint8", (8, 6, 3))}, {TOP: {}})
    np.testing.assert_array_equal(robot.inputs({"top": np.moveaxis(PICTURE, 2, 0)})[TOP], PICTURE)


@pytest.mark.parametrize(
    ("picture", "why"),
    [
        (None, r"camera 'top' of the observation: expected a picture \(height, width, 3\)"),
        ([[[1]]], "camera 'top' of the observation: expected a picture"),
        (np.zeros((8, 6)), "camera 'top' of the observation: expected a picture"),
        (np.zeros((0, 6, 3), np.uint8), r"a picture of \[0, 6, 3\]: expected at most 16384 pixels on a side"),
        (np.zeros((16385, 1, 3), np.uint8), r"a picture of \[16385, 1, 3\]: expected at most 16384 pixels"),
    ],
)
def test_what_is_no_picture_is_refused(picture, why):
    robot = features({TOP: TensorSpec("uint8", (1, 1, 3))}, {TOP: {}})
    with pytest.raises(SpecMismatch, match=why):
        robot.inputs({"top": picture})
    assert robot.inputs({"top": np.zeros((16384, 1, 3), np.uint8)})[TOP].shape == (1, 1, 3)


@pytest.mark.parametrize(("dtype", "expected"), [("uint8", [2, 4]), ("float32", [1.75, 4.25])])
def test_a_resized_picture_lies_between_its_pixels_and_is_rounded_if_it_is_of_integers(dtype, expected):
    picture = np.array([1, 2, 4, 5], dtype).reshape(1, 4, 1)
    found = bilinear(picture, 1, 2)
    assert found.dtype == dtype
    expected = np.array([1.5, 4.5]) if dtype == "float32" else np.array([2, 4])
    np.testing.assert_allclose(found.ravel(), expected)


@pytest.mark.parametrize(
    ("speaks", "inputs", "outputs"),
    [
        ("openpi", {"x": NUMBERS}, {"a": NUMBERS, "b": NUMBERS}),
        ("act", {"x": NUMBERS}, {"a": NUMBERS}),
        ("gr00t", {"video/top": TensorSpec("uint8", (2, 8, 6, 3)), "language/task": TEXT}, {"arm": NUMBERS}),
        ("lerobot", {STATE: NUMBERS, "task": TEXT}, {"value": NUMBERS, "actions": TensorSpec("float32", (5, 2))}),
        ("lerobot", {STATE: NUMBERS}, {"any": NUMBERS}),
    ],
)
def test_a_model_that_answers_a_protocol_is_loaded(speaks, inputs, outputs):
    assert problem(speaks, ModelSpec("policy", inputs, outputs)) == ""


def test_a_model_of_lerobot_may_have_parameters_of_any_name():
    spec = ModelSpec("m", {STATE: NUMBERS, "w": TEXT}, {"a": NUMBERS}, parameters={"w": Parameter("w", "x")})
    assert problem("lerobot", spec) == ""


@pytest.mark.parametrize("shape", [(), (1, 2, 3)])
def test_actions_of_lerobot_are_steps_of_motors(shape):
    spec = ModelSpec("m", {STATE: NUMBERS}, {"actions": TensorSpec("float32", shape)})
    assert "m' has actions: expected one output, or actions, of (steps, motors)" in problem("lerobot", spec)


@pytest.mark.parametrize(
    ("name", "shape", "times"),
    [
        ("video/top", (4, 8, 6, 3), 4),
        ("video/top", (8, 6, 3), 1),
        ("state/arm", (4, 2), 4),
        ("state/arm", (2,), 1),
        ("state/arm", (-1, 2), 1),
    ],
)
def test_the_times_of_a_modality_end_with_the_present_and_those_of_actions_begin_with_it(name, shape, times):
    outputs = {"action.arm": TensorSpec("float32", (3, 2)), "hand": TensorSpec("float32", (3, 1))}
    found = modalities(
        ModelSpec("m", {name: TensorSpec("uint8", shape, capacity=99 if -1 in shape else None)}, outputs)
    )
    kind, _, key = name.partition("/")
    assert found == {
        kind: {"delta_indices": [[-3, -2, -1, 0], [0]][times == 1], "modality_keys": [key]},
        "action": {"delta_indices": [0, 1, 2], "modality_keys": ["arm", "hand"]},
    }


def test_an_output_of_one_step_has_one_time():
    found = modalities(ModelSpec("m", {"state/a": NUMBERS, "language/task": TEXT}, {"arm": NUMBERS}))
    assert found["action"]["delta_indices"] == found["language"]["delta_indices"] == [0]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(("batched", "rows", "lead"), [(True, 1, True), (False, 1, False), (False, 2, True)])
def test_actions_of_gr00t_have_the_names_and_axes_of_its_observation(flat, batched, rows, lead):
    outputs = {"arm": np.zeros((rows, 4, 2)), "action.hand": np.zeros((rows, 4, 1))}
    found = Gr00tObservation({}, flat, batched).answer(outputs)
    assert list(found) == (["action.arm", "action.hand"] if flat else ["arm", "hand"])
    assert found["action.arm" if flat else "arm"].shape == ((rows, 4, 2) if lead else (4, 2))


PARAMETERS = {"speed": Parameter("pace", 1.5), "mode": Parameter("mode", "slow")}
TUNED = {"x": NUMBERS, "pace": TensorSpec("float32", ()), "mode": TEXT}


@pytest.mark.parametrize(
    ("given", "pace", "mode"),
    [
        ({}, 1.5, b"slow"),
        ({"speed": 2.0}, 2.0, b"slow"),
        ({"pace": 3.0}, 3.0, b"slow"),
        ({"mode": "fast"}, 1.5, b"fast"),
    ],
)
def test_a_parameter_comes_by_its_name_or_as_its_input_or_has_its_default(given, pace, mode):
    spec = ModelSpec("m", TUNED, {"a": NUMBERS}, parameters=PARAMETERS)
    found = rows_of({"x": np.zeros((2, 2))} | given, spec).values
    assert [float(one) for one in found["pace"]] == [pace] * 2 and found["mode"] == [mode] * 2


def test_a_parameter_does_not_come_twice():
    spec = ModelSpec("m", TUNED, {"a": NUMBERS}, parameters=PARAMETERS)
    with pytest.raises(SpecMismatch, match="parameter 'speed' is the input 'pace', which came, too"):
        rows_of({"x": np.zeros(2), "speed": 1.0, "pace": 1.0}, spec)


def test_as_many_rows_as_the_limit_may_come_at_once():
    assert rows_of(observation(1024), SPEC).n == 1024


@pytest.mark.parametrize(
    ("text", "why"),
    [(["a", ["b", "c"]], "expected text, came list"), ([["a"], ["b"], ["c"]], "expected 2 texts, came a list of 3")],
)
def test_each_row_has_one_text(text, why):
    with pytest.raises(SpecMismatch, match=why):
        rows_of(observation(2, text=text), SPEC)
    found = rows_of(observation(2, text=np.array(["a", "b"])), SPEC)
    assert found.values["text"] == [b"a", b"b"]
    assert rows_of(observation(2, text=[["a", "b"]]), SPEC).values["text"] == [b"a", b"b"]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("given", [[], np.zeros(0, np.int64)])
def test_arrays_without_entries_are_converted(dtype, given):
    spec = TensorSpec(dtype, (-1,), capacity=9)
    if dtype == "int8" and isinstance(given, list):  # of no numbers it is not known which kind they are
        with pytest.raises(SpecMismatch):
            rows(spec, given)
    else:
        (found,) = rows(spec, given)
        assert (found.dtype, found.shape) == (np.dtype(dtype), (0,))


def test_a_single_value_stays_one_and_what_is_turned_is_copied_in_order():
    (found,) = rows(TensorSpec("float32", ()), 2)
    assert found.shape == () and found == 2
    (found,) = rows(FRAME, np.moveaxis(PIXELS, -1, 0))
    assert found.flags.c_contiguous
    for single in (True, 1.5):
        with pytest.raises(SpecMismatch):
            rows(TensorSpec("int8", ()), single)


async def test_a_robot_waits_for_a_place_only_so_long_and_is_counted():
    counters = PortCounters()
    policy = RobotPolicy(Frontend("ipc:///nowhere", None), "policy", 1, 1.0, counters)
    async with policy.episode(0.0):
        with pytest.raises(Busy, match=r"1 robots are connected, which is the maximum \(robots.NAME.clients\)"):
            async with policy.episode(0.0):
                pass
        waiting = asyncio.create_task(policy.episode(20.0).__aenter__())
        await turns()
        assert not waiting.done()
    await waiting
    assert counters.refused == {"full": 1}
    assert policy.takes("any"), "before the model is known it may take anything"


async def test_answers_have_the_axes_of_their_observation():
    policy = RobotPolicy(Frontend("ipc:///nowhere", None), "policy", 1, 1.0)
    spec = ModelSpec("policy", {"x": NUMBERS, "v": TensorSpec("float32", (-1,), capacity=9)}, {"a": NUMBERS, "t": TEXT})
    seen = []

    class Rows:
        known, closed = spec, False

        def close(self):
            self.closed = True

        async def compute(self, request, place, *, begins):
            read = request.read(spec, False)
            seen.append((read, place, begins))
            return Reply({"a": [np.full(2, i) for i in range(read.n)], "t": [b"x"] * read.n}, 1)

    policy._rows = lane = Rows()
    assert policy.takes("x") and not policy.takes("y")
    one = await policy.ask({"x": np.zeros(2), "v": np.zeros(3)}, 0, begins=True)
    assert (one["a"].tolist(), one["t"]) == ([0, 0], b"x")
    two = await policy.ask({"x": np.zeros((2, 2)), "v": np.zeros((2, 3))}, 0, begins=False)
    assert two["a"].tolist() == [[0, 0], [1, 1]] and two["t"] == [b"x", b"x"]
    assert [(read.inputs["x"].shape, type(read.inputs["v"])) for read, *_ in seen] == [((1, 2), list), ((2, 2), list)]
    assert [begins for *_, begins in seen] == [True, False]
    with pytest.raises(SpecMismatch, match="robots expect one output, or one named actions"):
        await policy.ask({"x": np.zeros(2), "v": np.zeros(3)}, 0, begins=True, needs_actions=True)
    await policy.close()
    assert lane.closed


async def test_the_steps_that_were_answered_last_are_remembered():
    spec = ModelSpec("policy", {STATE: NUMBERS}, {"actions": NUMBERS})
    budget = budget_of(1000)
    robot = LeRobotRobot(native.Account(budget, ROBOTS))
    robot.features = RobotFeatures(lerobot_messages.Setup("act", {STATE: {"names": ["a", "b"]}}, 5, {}), spec)

    def seen(step):
        return lerobot_messages.Observed(NEW, 0.0, step, {"a": 10.0 * step, "b": 0.0}, must_go=False)

    for step in range(4097):
        robot.answering(seen(step))
    assert not robot.keep(seen(1), Charge(budget, robot.account))
    assert robot.keep(seen(0), Charge(budget, robot.account)), "of 4097 the oldest is forgotten"


async def test_robots_that_are_gone_leave_nothing_behind():
    robots = LeRobotRobots(budget_of(1 << 20), ROBOTS)
    farewells = {}
    for number in range(5):
        robot = robots.of(SimpleNamespace(peer=lambda number=number: f"robot {number}", farewells=farewells), new=True)
        assert robots.of(SimpleNamespace(peer=lambda number=number: f"robot {number}")) is robot
        farewells.pop("robot")()
    await turns()
    assert not robots._robots and not robots._ending
    with pytest.raises(Error, match="expected Ready"):
        robots.of(SimpleNamespace(peer=lambda: "robot 0"))
    await robots.close()
