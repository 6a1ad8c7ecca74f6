"""Parameters of requests that reach the model: each door passes them on to the inputs that the settings name."""

import base64
import io
import json

import httpx
import msgpack
import numpy as np
import pytest
import zmq
from tests.serving import launch, serving, wait_until

from jurybox.protocol import TensorSpec
from jurybox.protocol.parameters import Parameter
from jurybox.protocol.spec import ModelSpec
from jurybox.server.gateway.robots.lerobot_features import RobotFeatures
from jurybox.server.gateway.robots.lerobot_messages import Setup
from jurybox.server.gateway.robots.observations import rows_of

MODELS = {
    "steered": {
        "factory": "tests.robot_models:steered",
        "rows": 256,
        "parameters": {
            "seed": {"default": 0},
            "guidance": {"default": 1.0, "input": "scale"},
            "instruction": {"default": "lift", "input": "task"},
        },
    },
    "arm": {
        "factory": "tests.robot_models:steered",
        "args": {"state": "observation.state"},
        "parameters": {"seed": {"default": 5}, "scale": {"default": 2}, "task": {"default": ""}},
    },
    "scaled": {
        "factory": "tests.reward_models:scaled",
        "rows": 640,
        "lane_rows": 64,
        "parameters": {"guidance": {"default": 1.0, "input": "scale"}, "seed": {"default": 0}},
    },
}
DIALECTS = {
    "texts": {"speaks": "reward_model", "model": "scaled"},
    "helpful": {"speaks": "openrlhf", "model": "scaled"},
}
ROBOTS = "".join(
    f'[robots.{speaks}]\nmodel = "{model}"\nspeaks = "{speaks}"\nlisten = "127.0.0.1:0"\nclients = 4\n'
    for speaks, model in (("act", "steered"), ("gr00t", "steered"), ("openpi", "steered"), ("lerobot", "arm"))
)
STATE = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    where = dict.fromkeys(("http", "grpc"), "127.0.0.1:0")
    folder = tmp_path_factory.mktemp("parameters")
    with serving(folder, MODELS, dialects=DIALECTS, more=ROBOTS, **where) as running:
        yield running


@pytest.fixture(scope="module")
def robots(server):
    with server.connect() as client:
        return client.status()["server"]["robots"]


def over_http(server, parameters, **more):
    tensor = {"name": "state/arm", "datatype": "FP32", "shape": [2, 3], "data": [1.0, 2.0, 3.0] * 2}
    body = {"inputs": [tensor, *more.values()], "parameters": parameters}
    answer = httpx.post(f"http://{server.listening('http')}/v2/models/steered/infer", json=body, timeout=60)
    if answer.status_code != 200:
        raise ValueError(answer.json()["error"])
    first, second = np.array(answer.json()["outputs"][0]["data"]).reshape(2, 5, 2)
    np.testing.assert_array_equal(first, second)
    return first[0].tolist()


def over_grpc(server, parameters, **more):
    client = pytest.importorskip("tritonclient.grpc")
    from tritonclient.utils import InferenceServerException

    tensor = client.InferInput("state/arm", [2, 3], "FP32")
    tensor.set_data_from_numpy(np.stack([STATE, STATE]))
    inputs = [tensor]
    for one in more.values():
        inputs.append(client.InferInput(one["name"], one["shape"], one["datatype"]))
        inputs[-1].set_data_from_numpy(np.array(one["data"], np.int64))
    with client.InferenceServerClient(server.listening("grpc")) as connection:
        try:
            answer = connection.infer("steered", inputs, parameters=parameters)
        except InferenceServerException as error:
            raise ValueError(error.message()) from error
    first, second = answer.as_numpy("actions")
    np.testing.assert_array_equal(first, second)
    return first[0].tolist()


@pytest.mark.parametrize("infer", [over_http, over_grpc])
def test_parameters_of_the_open_inference_protocol_are_inputs_of_all_rows(server, infer):
    assert infer(server, {}) == [6.0, 4.0]
    assert infer(server, {"seed": 7}) == [13.0, 4.0]
    assert infer(server, {"seed": -1, "guidance": 0.5, "instruction": "größer"}) == [2.0, 8.0]
    seed = {"name": "seed", "datatype": "INT64", "shape": [2], "data": [4, 4]}
    assert infer(server, {"guidance": 2.0}, seed=seed) == [16.0, 4.0]


@pytest.mark.parametrize("infer", [over_http, over_grpc])
@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"temperature": 1}, r"parameter 'temperature' is not known here; there are: .*seed, guidance, instruction"),
        ({"scale": 1.0}, "parameter 'scale' is not known here"),
        ({"seed": 1.5}, "parameter 'seed': expected a whole number from -9223372036854775808"),
        ({"seed": True}, "parameter 'seed': expected a whole number"),
        ({"guidance": "1.0"}, "parameter 'guidance': expected a number, came '1.0'"),
        ({"guidance": 1e300}, "parameter 'guidance': expected a finite number that float32 holds"),
        ({"instruction": 3}, "parameter 'instruction': expected text, came 3"),
        ({"instruction": "x" * 21}, "parameter 'instruction' has 21 bytes, the model takes at most 20"),
    ],
)
def test_a_parameter_that_is_not_declared_or_does_not_fit_is_refused_by_name(server, infer, parameters, why):
    with pytest.raises(ValueError, match=why):
        infer(server, parameters)


def test_a_value_that_comes_twice_is_refused(server):
    seed = {"name": "seed", "datatype": "INT64", "shape": [2], "data": [4, 4]}
    with pytest.raises(ValueError, match="parameter 'seed' is the input 'seed', which came, too"):
        over_http(server, {"seed": 4}, seed=seed)
    with pytest.raises(ValueError, match="not known here"):
        over_http(server, {"seed": [4]} | {"x": 1})
    with pytest.raises(ValueError, match="expected a whole number from .* came a list"):
        over_http(server, {"seed": [4]})


@pytest.mark.parametrize("path", ["texts/classify", "texts/v1/embeddings", "helpful"])
def test_fields_of_a_dialects_body_are_parameters(server, path):
    texts = {"query": ["abcd", "ef"]} if path == "helpful" else {"input": ["abcd", "ef"], "user": "someone"}

    def scores(**parameters):
        answer = httpx.post(f"http://{server.listening('http')}/dialects/{path}", json=texts | parameters, timeout=60)
        found = answer.json()
        if answer.status_code != 200:
            return str(found)
        if path == "helpful":
            return found["rewards"]
        return [one.get("probs", one.get("embedding"))[0] for one in found["data"]]

    assert scores() == [4.0, 2.0]
    assert scores(guidance=0.5, seed=10) == [12.0, 11.0]
    assert "parameter 'seed': expected a whole number" in scores(seed="10")


def ask_act(address, given):
    def numpied(array):
        data = base64.b64encode(array.tobytes()).decode()
        return {"__numpy__": data, "dtype": array.dtype.str, "shape": list(array.shape)}

    body = {"state": {"arm": numpied(STATE)}, **given}
    answer = httpx.post(f"http://{address}/act", json=body, timeout=60).json()
    if "detail" in answer:
        return answer["detail"]
    return np.frombuffer(base64.b64decode(answer[0]["__numpy__"]), answer[0]["dtype"]).tolist()


def ask_gr00t(address, given):
    file = io.BytesIO()
    np.save(file, STATE.reshape(1, 1, 3))
    state = {"arm": {"__ndarray_class__": True, "as_npy": file.getvalue()}}
    with zmq.Context() as context, context.socket(zmq.REQ) as connection:
        connection.linger, connection.rcvtimeo = 0, 60_000
        connection.connect(f"tcp://{address}")
        data = {"observation": {"state": state}, "options": given or None}
        connection.send(msgpack.packb({"endpoint": "get_action", "data": data}))
        answer = msgpack.unpackb(connection.recv())
    if "error" in answer:
        return answer["error"]
    return np.load(io.BytesIO(answer[0]["actions"]["as_npy"]))[0, 0].tolist()


def ask_openpi(address, given):
    websockets = pytest.importorskip("websockets.sync.client")
    array = {b"__ndarray__": True, b"data": STATE.tobytes(), b"dtype": STATE.dtype.str, b"shape": STATE.shape}
    with websockets.connect(f"ws://{address}", compression=None, max_size=None) as connection:
        connection.recv()
        connection.send(msgpack.packb({"state/arm": array, **given}))
        answer = connection.recv()
    if isinstance(answer, str):
        return answer
    actions = msgpack.unpackb(answer, raw=True)[b"actions"]
    return np.frombuffer(actions[b"data"], np.float32)[:2].tolist()


@pytest.mark.parametrize("ask", [ask_act, ask_gr00t, ask_openpi])
def test_robots_send_parameters_with_their_observations(robots, ask):
    address = robots[ask.__name__.removeprefix("ask_")]
    assert ask(address, {}) == [6.0, 4.0]
    assert ask(address, {"seed": 7, "instruction": "put"}) == [13.0, 3.0]
    assert ask(address, {"guidance": 0.5}) == [3.0, 4.0]
    assert "task" in ask(address, {"instruction": "x" * 21}) and "20 bytes" in ask(address, {"instruction": "x" * 21})


def test_an_option_of_a_robot_that_the_model_does_not_declare_is_refused(robots):
    answer = ask_gr00t(robots["gr00t"], {"temperature": 1.0})
    assert "option 'temperature' is no parameter of model 'steered'; there are: seed, guidance, instruction" in answer


def test_the_modality_document_and_the_models_description_tell_parameters_from_what_is_observed(server, robots):
    with zmq.Context() as context, context.socket(zmq.REQ) as connection:
        connection.linger, connection.rcvtimeo = 0, 60_000
        connection.connect(f"tcp://{robots['gr00t']}")
        connection.send(msgpack.packb({"endpoint": "get_modality_config"}))
        assert set(msgpack.unpackb(connection.recv())) == {"state", "action"}
    with server.connect() as client:
        (told,) = [model for model in client.status()["models"] if model["name"] == "steered"]
    assert told["parameters"]["guidance"] == {"input": "scale", "default": 1.0}
    config = httpx.get(f"http://{server.listening('http')}/v2/models/steered/config", timeout=60).json()
    contract = json.loads(config["parameters"]["jurybox"]["string_value"])
    assert contract["parameters"]["instruction"] == ["task", "lift"]


def test_a_lerobots_task_is_its_own_and_other_parameters_have_their_defaults():
    inputs = {
        "observation.state": TensorSpec("float32", (3,)),
        "seed": TensorSpec("int64"),
        "task": TensorSpec("bytes", capacity=9),
    }
    parameters = {"seed": Parameter("seed", 5), "task": Parameter("task", "lift")}
    spec = ModelSpec("arm", inputs, {"actions": TensorSpec("float32", (5, 2))}, parameters=parameters)
    motors = ["a", "b", "c"]
    features = RobotFeatures(Setup("act", {"observation.state": {"names": motors}}, 5, {}), spec)
    for task in ({}, {"task": "fold"}):
        rows = rows_of(features.inputs(dict.fromkeys(motors, 1.0) | task), spec)
        assert (rows.values["seed"], rows.values["task"]) == ([5], [task.get("task", "lift").encode()])


def test_hooks_in_a_trainers_process_have_the_defaults_too(server):
    from jurybox.client.juror import Juror

    for address in (server.address, f"grpc://{server.listening('grpc')}"):
        juror = Juror("scaled", address=address)
        assert juror.scores({"text": ["abc", "d"]}, 2) == [3.0, 1.0]
        assert juror.scores({"text": ["abc", "d"], "seed": [5, 6]}, 2) == [8.0, 7.0]
        juror.close()


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"seed": {"default": 0.5}}, "parameter 'seed.default': expected a whole number"),
        ({"seed": {"default": "a"}}, "parameter 'seed.default': expected a whole number"),
        ({"arm": {"default": 0.5, "input": "state/arm"}}, "expected one of a single value or of bytes"),
        ({"seed": {"default": 0, "input": "sead"}}, "parameter 'seed' is the input 'sead': expected one of"),
        ({"a": {"default": 0, "input": "seed"}, "b": {"default": 0, "input": "seed"}}, "two parameters of model"),
        ({"priority": {"default": 0, "input": "seed"}}, "a name of letters"),
    ],
)
def test_a_parameter_that_cannot_be_an_input_is_found_at_the_start(tmp_path, parameters, why):
    running = launch(tmp_path, {"steered": {"factory": "tests.robot_models:steered", "parameters": parameters}})
    try:
        wait_until(lambda: why in running.text(), 100.0)
    finally:
        running.process.kill()
        running.process.wait()
