"""`POST /act`: the HTTP servers of OpenVLA, OpenVLA-OFT and GR00T, with clients that write their own bytes."""

from __future__ import annotations

import base64
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import httpx
import numpy as np
import pytest
from tests.robot_models import DIMENSION, HORIZON
from tests.serving import launch, serving
from tests.shared_batches import answers_of_shared_batches

MODELS = {name: {"factory": f"tests.robot_models:{name}", "max_batch": 32} for name in ("vla", "oft", "by_part")}
SECRET = "0123456789abcdef0123"


def door(name: str, more: str = "", speaks: str = "act") -> str:
    return f'[robots.{name}]\nmodel = "{name}"\nspeaks = "{speaks}"\nlisten = "127.0.0.1:0"\n{more}\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    more = "".join(door(name) for name in MODELS)
    with serving(tmp_path_factory.mktemp("server"), MODELS, more=more, max_message_mib=1) as running:
        yield running


@pytest.fixture(scope="module")
def addresses(server):
    with server.connect() as client:
        return {name: f"http://{where}" for name, where in client.status()["server"]["robots"].items()}


def numpied(value):
    """An array as json_numpy writes it."""
    value = np.asarray(value)
    data = base64.b64encode(value.tobytes()).decode()
    return {"__numpy__": data, "dtype": value.dtype.str, "shape": list(value.shape)}


def restored(value):
    """What json_numpy reads."""
    if isinstance(value, list):
        return [restored(one) for one in value]
    assert set(value) == {"__numpy__", "dtype", "shape"}
    return np.frombuffer(base64.b64decode(value["__numpy__"]), value["dtype"]).reshape(value["shape"])


def picture(fill=10):
    return np.full((8, 6, 3), fill, np.uint8)


def openvla(fill=10, instruction="lift"):
    return {"image": numpied(picture(fill)), "instruction": instruction, "unnorm_key": "bridge_orig"}


def ask(address, request, path="/act", **options):
    content = request if isinstance(request, bytes) else json.dumps(request).encode()
    return httpx.post(
        address + path, content=content, headers={"content-type": "application/json"}, timeout=60, **options
    )


def test_openvla_gets_one_action_as_a_bare_array(addresses):
    answer = ask(addresses["vla"], openvla())
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    action = restored(answer.json())
    assert action.dtype == np.float32 and action.tolist() == [10, 4, 0, 0, 0, 0, 0]
    assert restored(ask(addresses["vla"], openvla(), "/act/").json()).tolist() == action.tolist()


def test_oft_gets_its_chunk_as_a_list_of_actions(addresses):
    state = np.array([1.0, 2.0, 3.0])
    request = {"full_image": numpied(picture()), "left_wrist_image": numpied(picture()), "instruction": "lift"}
    for given in (numpied(state), state.tolist()):
        actions = restored(ask(addresses["oft"], request | {"state": given}).json())
        assert len(actions) == HORIZON and all(action.tolist() == [16, 4] for action in actions)


def test_json_within_json_is_answered_as_json_within_json(addresses):
    answer = ask(addresses["vla"], {"encoded": json.dumps(openvla())}).json()
    assert isinstance(answer, str) and restored(json.loads(answer))[:2].tolist() == [10, 4]
    both = ask(addresses["vla"], {"encoded": json.dumps(openvla()), "instruction": "lift"})
    assert both.status_code == 400 and "no other field" in both.json()["detail"]


def test_json_numpy_itself_writes_and_reads_what_is_sent(addresses):
    try:
        import json_numpy
    except ImportError:
        pytest.skip("json_numpy is not installed here: pip install json-numpy")
    for request in (
        {"image": picture(), "instruction": "lift", "unnorm_key": "bridge_orig"},
        {"image": picture(), "instruction": np.str_("lift")},
    ):
        body = json_numpy.dumps(request)
        action = json_numpy.loads(ask(addresses["vla"], body.encode()).text)
        assert isinstance(action, np.ndarray) and action[:2].tolist() == [10, 4]
        doubled = ask(addresses["vla"], json.dumps({"encoded": body}).encode()).json()
        np.testing.assert_array_equal(json_numpy.loads(doubled), action)
    chunk = {"full_image": picture(), "state": np.array([1.0, 2.0, 3.0]), "instruction": "lift"}
    actions = json_numpy.loads(ask(addresses["oft"], json_numpy.dumps(chunk).encode()).text)
    np.testing.assert_array_equal(np.array(actions), [[16, 4]] * HORIZON)


@pytest.mark.parametrize("lead", [(), (1,), (3,)])
@pytest.mark.parametrize("cpp", [False, True])
def test_gr00t_gets_each_part_as_nested_lists(addresses, lead, cpp):
    video = np.full((*lead, 2, 8, 6, 3), 5, np.uint8)
    given = {"__ndarray__": numpied(video)["__numpy__"], "dtype": "uint8", "shape": list(video.shape)}
    observation = {
        "video.front": given if cpp else numpied(video),
        "state.arm": np.full((*lead, 1, 2), 0.5).tolist(),
        "task": ["lift"] * (lead[0] if lead else 1),
    }
    answer = ask(addresses["by_part"], {"observation": observation})
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"action.arm", "action.gripper"}
    arm, gripper = (np.array(answer.json()[f"action.{name}"]) for name in ("arm", "gripper"))
    assert arm.shape == (*lead, HORIZON, DIMENSION) and np.all(arm == 4.5)
    assert gripper.shape == (*lead, HORIZON, 1) and np.all(gripper == 5)


def test_each_row_of_a_batch_has_its_own_text_and_state(addresses):
    texts = ["lift", "put it down", "x"]
    observation = {
        "video.front": numpied(np.zeros((3, 2, 8, 6, 3), np.uint8)),
        "state.arm": numpied(np.arange(6, dtype=np.float32).reshape(3, 1, 2)),
        "task": texts,
    }
    answer = ask(addresses["by_part"], {"observation": observation}).json()
    assert [rows[0][0] for rows in answer["action.arm"]] == [len(text) + 2 * i for i, text in enumerate(texts)]
    two = ask(addresses["by_part"], {"observation": observation | {"task": texts[:2]}})
    assert two.status_code == 422 and "expected 3 texts, came a list of 2" in two.json()["detail"]


def test_a_batch_larger_than_the_model_takes_at_once_is_computed_in_parts(addresses):
    observation = {
        "video.front": numpied(np.zeros((70, 2, 8, 6, 3), np.uint8)),  # max_batch is 32
        "state.arm": numpied(np.arange(140, dtype=np.float32).reshape(70, 1, 2)),
        "task": [[""]] * 70,
    }
    answer = ask(addresses["by_part"], {"observation": observation}).json()
    assert [rows[0][0] for rows in answer["action.arm"]] == list(range(0, 140, 2))


def test_health_and_reset_answer_as_the_originals(addresses):
    assert httpx.get(addresses["vla"] + "/health", timeout=60).json() == {"status": "healthy", "model": "vla"}
    assert ask(addresses["vla"], {}, "/reset").json() == {"status": "reset"}
    assert httpx.get(addresses["vla"] + "/act", timeout=60).status_code == 405


WRONG = {
    "no JSON": (b"hello", "not JSON"),
    "no object": (b"[1]", "a JSON object"),
    "nothing": ({}, "is missing"),
    "an image of another size": (openvla() | {"image": numpied(np.zeros((9, 6, 3), np.uint8))}, "[9, 6, 3]"),
    "an instruction of numbers": (openvla() | {"instruction": 3}, "expected text"),
    "an instruction too long": (openvla(instruction="x" * 101), "at most 100 bytes"),
    "no base64": (openvla() | {"image": {"__numpy__": "?", "dtype": "|u1", "shape": [1]}}, "not base64"),
    "too few bytes": (openvla() | {"image": numpied(picture()) | {"shape": [8, 6, 4]}}, "needs 192 bytes"),
    "objects": (openvla() | {"image": {"__numpy__": "AAAAAAAAAAA=", "dtype": "|O", "shape": [1]}}, "dtype '|O'"),
    "a structure": (openvla() | {"image": {"__numpy__": "AA==", "dtype": [["a", "|u1"]], "shape": [1]}}, "dtype list"),
    "a negative size": (openvla() | {"image": {"__numpy__": "", "dtype": "|u1", "shape": [-1]}}, "shape"),
    "a row that the model refuses": (openvla(fill=0), "the camera is covered"),
    "too many values": (b'{"image": [' + b"1," * 10_001 + b"1]}", "more than 10000 values"),
    "deeper than it needs": (b'{"image": ' + b"[[" * 20_000 + b"]]" * 20_000 + b"}", ""),
    "GR00T without a camera": ({"observation": {"state.arm": [[0.0, 0.0]], "task": ["x"]}}, "is missing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_request_that_fails_has_an_error_status_and_says_why(addresses, name):
    request, reason = WRONG[name]
    answer = ask(addresses["by_part" if "GR00T" in name else "vla"], request)
    assert 400 <= answer.status_code < 500 and set(answer.json()) == {"detail"}
    assert reason in answer.json()["detail"]
    with pytest.raises(Exception):  # noqa: B017  no client of these servers can read it as an action
        np.array(restored(answer.json()), np.float32)


def test_a_body_beyond_the_limit_is_refused_in_the_same_form(addresses):
    answer = ask(addresses["vla"], b'{"image": "' + b"x" * (2 << 20) + b'"}')
    assert answer.status_code == 413 and "at most 1048576 bytes" in answer.json()["detail"]


def test_random_bodies_are_refused_and_the_next_request_is_answered(addresses):
    rng = random.Random(1)
    whole = json.dumps(openvla()).encode()
    with httpx.Client(timeout=60) as client:
        for _ in range(100):
            body = bytearray(whole)
            for _ in range(rng.randint(1, 4)):
                body[rng.randrange(len(body))] = rng.randrange(256)
            answer = client.post(addresses["vla"] + "/act", content=bytes(body))
            assert answer.status_code == 200 or set(answer.json()) == {"detail"}
        assert restored(client.post(addresses["vla"] + "/act", content=whole).json())[:2].tolist() == [10, 4]


def test_robots_that_ask_at_the_same_time_share_batches(server, addresses):
    def right(client: httpx.Client, number: int, step: int) -> bool:
        answer = client.post(addresses["vla"] + "/act", json=openvla(step, "x" * (number + 1))).json()
        return bool(restored(answer)[:2].tolist() == [step, number + 1])

    with ExitStack() as stack, ThreadPoolExecutor(8) as pool:
        clients = [stack.enter_context(httpx.Client(timeout=60)) for _ in range(8)]

        def rounds(number: int) -> bool:
            return all(right(clients[number], number, step) for step in range(1, 21))

        assert all(pool.map(rounds, range(8)))
        asks = [partial(right, client, number, 30) for number, client in enumerate(clients)]
        assert all(answers_of_shared_batches(server, "vla", asks))


def test_the_token_is_required_unless_the_port_is_unprotected(tmp_path):
    models = {"vla": MODELS["vla"]}
    opened = door("vla").replace("[robots.vla]", "[robots.open]") + "unprotected = true\n"
    with serving(tmp_path, models, env={"JURYBOX_TOKEN": SECRET}, more=door("vla") + opened) as server:
        with server.connect() as client:
            where = {name: f"http://{at}" for name, at in client.status()["server"]["robots"].items()}
        assert ask(where["vla"], openvla()).status_code == 401
        headers = {"authorization": f"Bearer {SECRET}"}
        known = httpx.post(where["vla"] + "/act", json=openvla(), headers=headers, timeout=60)
        assert restored(known.json())[0] == 10
        assert httpx.get(where["vla"] + "/health", timeout=60).status_code == 200
        assert restored(ask(where["open"], openvla()).json())[0] == 10


@pytest.mark.parametrize("flags", [(), pytest.param(("--dry-run",), marks=pytest.mark.runs)])
def test_a_server_does_not_start_with_a_model_that_keeps_state(tmp_path, flags):
    running = launch(
        tmp_path, {"counting": {"factory": "tests.robot_models:counting"}}, flags=flags, more=door("counting")
    )
    assert running.process.wait(60) == 3
    assert "[robots.counting] can never be answered: model 'counting' keeps state" in running.text()
