"""Robots over websockets: openpi's protocol and vllm-omni's variant, with a client that writes its own bytes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.robot_models import DIMENSION, HORIZON
from tests.serving import serving, wait_until, walls
from websockets.asyncio.client import connect as async_websocket
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.sync.client import connect as websocket

from jurybox.client import Refused
from jurybox.client.chunks import AsyncChunkPolicy
from jurybox.server.gateway.robots.msgpack_arrays import packb, unpackb

NAMES = ("seen", "counting", "watching", "by_part")
MODELS = {name: {"factory": f"tests.robot_models:{name}", "max_batch": 32} for name in NAMES}
FEW = {"few": {"factory": "tests.robot_models:counting", "rows": 4}}
ROBOTS = """
[robots.arm]
model = "seen"
listen = "127.0.0.1:0"
clients = 8
metadata = { reset_pose = [0.0, 0.5], name = "arm" }
[robots.counter]
model = "counting"
listen = "127.0.0.1:0"
clients = 100
timeout = 30.0
"""
OMNI = """
[robots.dreamzero]
model = "watching"
listen = "127.0.0.1:0"
clients = 4
[robots.groot]
model = "by_part"
listen = "127.0.0.1:0"
clients = 4
"""
LATE = """
[robots.late]
model = "counting"
listen = "127.0.0.1:0"
clients = 2
timeout = 0.5
ping = 2.0
"""
FULL = """
[robots.full]
model = "few"
listen = "127.0.0.1:0"
clients = 4
"""
ALONE = """
[robots.alone]
model = "seen"
listen = "127.0.0.1:0"
clients = 1
"""
SECRET = "0123456789abcdef0123"
KNOWN = {"Authorization": f"Bearer {SECRET}"}
VLLM = "/v1/realtime/robot/openpi"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS | FEW, more=ROBOTS + OMNI + LATE + FULL) as running:
        yield running


@pytest.fixture(scope="module")
def addresses(server):
    with server.connect() as client:
        return client.status()["server"]["robots"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """The addresses of a server with a token, metrics and a message limit of one MiB."""
    with serving(
        tmp_path_factory.mktemp("guarded"),
        MODELS,
        env={"JURYBOX_TOKEN": SECRET},
        more=ROBOTS + ALONE,
        http="127.0.0.1:0",
        max_message_mib=1,
    ) as running:
        with running.connect() as client:
            yield client.status()["server"]


@contextlib.contextmanager
def asyncio_websocket(uri, **options):
    """websockets' asyncio client with the interface of its synchronous one.

    The synchronous one reads in a separate thread while it writes. Python 3.11's TLS objects do not support this: one
    handshake in a thousand hangs, or ends without a response (as in miguelgrinberg/python-engineio, issue 461).
    """
    with asyncio.Runner() as runner:

        async def begin():
            return await async_websocket(uri, **options)

        connection = runner.run(begin())
        try:
            yield SimpleNamespace(
                send=lambda message: runner.run(connection.send(message)),
                recv=lambda timeout: runner.run(asyncio.wait_for(connection.recv(), timeout)),
            )
        finally:
            runner.run(connection.close())


@contextlib.contextmanager
def robot(address, path="", **options):
    """Connect and read the metadata; yield a function that sends a request and returns the answer."""
    scheme, connect = ("wss", asyncio_websocket) if "ssl" in options else ("ws", websocket)
    with connect(f"{scheme}://{address}{path}", compression=None, open_timeout=60, **options) as connection:
        metadata = unpackb(connection.recv(60))

        def ask(request):
            connection.send(request if isinstance(request, (bytes, str)) else packb(request))
            answer = connection.recv(60)
            return answer if isinstance(answer, str) else unpackb(answer)

        ask.metadata, ask.connection = metadata, connection
        yield ask


def observation(state=(1.0, 2.0, 3.0), prompt="lift", fill=10):
    return {
        "observation/image": np.full((8, 6, 3), fill, np.uint8),
        "observation/state": np.array(state),  # float64, as clients send
        "prompt": prompt,
    }


def expected(first, second):
    return np.broadcast_to(np.float32([first, second]), (HORIZON, DIMENSION))


def test_a_model_is_not_loaded_with_too_few_rows_for_its_robots(server):
    with server.connect() as client, pytest.raises(Refused, match="rows = 1, expected at least 2: robots.full keep"):
        client.load("few", {**FEW["few"], "rows": 1})


def test_metadata_first_then_a_chunk_for_every_observation(addresses):
    with robot(addresses["arm"]) as ask:
        assert ask.metadata == {"reset_pose": [0.0, 0.5], "name": "arm"}
        first = ask(observation())
        np.testing.assert_allclose(first["actions"], expected(16, 4))
        assert first["actions"].dtype == np.float32 and first["actions"].shape == (HORIZON, DIMENSION)
        assert first["policy_timing"]["infer_ms"] > 0 and set(first["server_timing"]) == {"infer_ms"}
        assert ask(observation())["server_timing"]["prev_total_ms"] > 0


def test_nested_names_images_of_floats_and_channels_first_are_understood(addresses):
    with robot(addresses["arm"], "/any/path?of=theirs") as ask:
        plain = observation()
        nested = {"observation": {"image": plain["observation/image"], "state": [1, 2, 3]}, "prompt": np.array("lift")}
        np.testing.assert_allclose(ask(nested)["actions"], expected(16, 4))
        turned = plain | {"observation/image": np.full((3, 8, 6), 0.5, np.float32), "left": np.zeros(3)}
        np.testing.assert_allclose(ask(turned)["actions"], expected(6 + 127, 4))


WRONG = {
    "a state too short": (observation(state=(1.0, 2.0)), "observation/state"),
    "no prompt": ({key: value for key, value in observation().items() if key != "prompt"}, "prompt is missing"),
    "a prompt too long": (observation(prompt="x" * 101), "at most 100 bytes"),
    "a prompt of numbers": (observation(prompt=np.zeros(3)), "expected text"),
    "an image of another size": (observation() | {"observation/image": np.zeros((9, 6, 3), np.uint8)}, "[9, 6, 3]"),
    "an image too bright": (observation() | {"observation/image": np.full((8, 6, 3), 2.0)}, "from 0 to 1"),
    "an image of NaN": (observation() | {"observation/image": np.full((8, 6, 3), np.nan)}, "from 0 to 1"),
    "a state of int64 pixels": (observation() | {"observation/image": np.full((8, 6, 3), 300)}, "cannot hold"),
    "a state beyond float32": (observation(state=(1e300, 0, 0)), "cannot"),
    "a row that the model refuses": (observation(state=(-1.0, 0, 0)), "the arm is broken"),
    "an endpoint unknown": (observation() | {"endpoint": "train"}, "endpoint"),
    "no time at all": (observation() | {"answer_within": 0}, "answer_within is 0: expected seconds"),
    "a time of text": (observation() | {"answer_within": "soon"}, "answer_within is soon: expected seconds"),
    "no map": ([1, 2], "a map"),
    "no msgpack": (b"\xc1", "0xc1"),
    "dtype object": (
        {"observation/state": {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "|O", b"shape": [1]}},
        "dtype",
    ),
    "text": ("hello", "text frame"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_malformed_observation_fails_alone(addresses, name):
    wrong, reason = WRONG[name]
    with robot(addresses["arm"]) as ask, robot(addresses["arm"]) as other:
        other.connection.send(packb(observation()))
        answer = ask(wrong)
        assert isinstance(answer, str) and reason in answer
        np.testing.assert_allclose(unpackb(other.connection.recv(60))["actions"], expected(16, 4))
        np.testing.assert_allclose(ask(observation())["actions"], expected(16, 4))  # and the connection stays open


def test_the_variant_of_vllm_omni(addresses):
    with robot(addresses["arm"], VLLM) as ask:
        answer = ask(observation() | {"session_id": "a", "endpoint": "infer", "seed": 1, "sampling_params": {}})
        np.testing.assert_allclose(answer, expected(16, 4))
        assert answer.dtype == np.float32
        assert ask({"endpoint": "reset", "session_id": "a"}) == {"status": "reset successful"}
        failed = ask(observation(state=(1.0,)))
        assert failed["type"] == "error" and "observation/state" in failed["message"]
        ask.connection.send("a text frame is ignored")
        np.testing.assert_allclose(ask(observation()), expected(16, 4))


@pytest.mark.parametrize("path", ["", VLLM])
def test_a_robot_may_send_one_frame_first_and_four_later_under_one_key(addresses, path):
    """As DreamZero's client does; images of floats and with their channels first are understood in frames, too."""
    state = {"observation/joints": np.zeros(7), "prompt": "lift"}
    with robot(addresses["dreamzero"], path) as ask:

        def told(frames):
            answer = ask(state | {"observation/front": frames})
            return (answer["actions"] if isinstance(answer, dict) else answer)[0].tolist()

        assert told(np.full((8, 6, 3), 7, np.uint8)) == [1, 7]
        assert told(np.arange(4, dtype=np.uint8)[:, None, None, None].repeat(8, 1).repeat(6, 2).repeat(3, 3)) == [4, 3]
        assert told(np.full((3, 8, 6), 0.5)) == [1, 127]
        assert told(np.full((2, 3, 8, 6), 0.5)) == [2, 127]


@pytest.mark.parametrize("axis", [True, False])
def test_gr00ts_observations_have_a_batch_axis_and_text_in_lists(addresses, axis):
    """As its client sends them over vllm-omni's path; the answer is a map, with the axis if the observation has it."""
    lead = (1,) if axis else ()
    request = {
        "video": {"front": np.full((*lead, 2, 8, 6, 3), 5, np.uint8)},
        "state": {"arm": np.full((*lead, 1, 2), 0.5, np.float32)},
        "language": {"task": [["lift"]] if axis else ["lift"]},
        "session_id": "a",
        "endpoint": "infer",
    }
    with robot(addresses["groot"], VLLM) as ask:
        answer = ask(request)
        assert set(answer) == {"arm", "gripper"}
        assert answer["arm"].shape == (*lead, HORIZON, DIMENSION) and answer["gripper"].shape == (*lead, HORIZON, 1)
        assert np.all(answer["arm"] == 4.5) and np.all(answer["gripper"] == 5) and answer["arm"].dtype == np.float32
        two = ask(request | {"language": {"task": [["lift"], ["drop"]]}})
        assert "expected one text, came a list of 2" in two["message"]
        mixed = ask(request | {"state": {"arm": np.zeros((1, 2) if axis else (1, 1, 2))}})
        assert "expected it in all arrays or in none" in mixed["message"]
    with robot(addresses["groot"]) as ask:  # openpi's clients read `actions`
        assert "robots expect one output, or one named actions" in ask(request)


def test_health_is_served_by_plain_http(addresses):
    with urllib.request.urlopen(f"http://{addresses['arm']}/healthz", timeout=60) as answer:
        assert (answer.status, answer.read()) == (200, b"OK\n")
    with pytest.raises(urllib.error.HTTPError):  # other paths are for websockets only
        urllib.request.urlopen(f"http://{addresses['arm']}/", timeout=60)


def test_a_robot_that_answers_no_ping_is_disconnected_after_the_ports_time(addresses):
    host, _, port = addresses["late"].rpartition(":")
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    with socket.create_connection((host, int(port)), 15) as connection:  # less than the first ping takes by default
        head = f"GET / HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n"
        connection.sendall(head.encode())
        came = b""
        while part := connection.recv(1 << 16):  # until the server closes
            came += part
    assert b"\x89\x04" in came, "a ping, whose payload has four bytes"
    assert b"keepalive ping timeout" in came


def test_a_web_page_may_not_steer_a_robot(addresses):
    with pytest.raises(InvalidStatus), robot(addresses["arm"], origin="http://evil.example"):
        pass


def test_a_frame_too_large_ends_its_connection_alone(guarded):
    address = guarded["robots"]["arm"]
    with robot(address, additional_headers=KNOWN) as ask, robot(address, additional_headers=KNOWN) as other:
        with pytest.raises(ConnectionClosed):
            ask(b"\0" * (2 << 20))
        np.testing.assert_allclose(other(observation())["actions"], expected(16, 4))


def test_the_token_is_checked_as_in_openpi(guarded):
    address = guarded["robots"]["arm"]
    for header in (None, "Api-Key wrong", f"Api-Key {SECRET}x", "Bearer "):
        headers = {"Authorization": header} if header else None
        with pytest.raises(InvalidStatus) as refused, robot(address, additional_headers=headers):
            pass
        assert refused.value.response.status_code == 401
    for header in (f"Api-Key {SECRET}", f"Bearer {SECRET}"):
        with robot(address, additional_headers={"Authorization": header}) as ask:
            np.testing.assert_allclose(ask(observation())["actions"], expected(16, 4))
    with urllib.request.urlopen(f"http://{address}/healthz", timeout=60) as answer:
        assert answer.status == 200


@pytest.fixture(scope="module")
def walled(tmp_path_factory):
    """The robots' addresses of a server with a token and a certificate, and the certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    with serving(tmp_path_factory.mktemp("walled"), MODELS, more=ROBOTS, **walls(folder, SECRET)) as running:
        with running.connect() as client:
            yield client.status()["server"]["robots"], folder / "cert.pem"


def trusting(certificate):
    return ssl.create_default_context(cafile=certificate)


@pytest.mark.parametrize("header", [f"Api-Key {SECRET}", f"Bearer {SECRET}", f"api-key {SECRET}"])
def test_over_tls_a_robot_with_the_token_is_answered(walled, header):
    addresses, certificate = walled
    headers = {"Authorization": header}
    with robot(addresses["arm"], ssl=trusting(certificate), additional_headers=headers) as ask:
        assert ask.metadata["name"] == "arm"
        np.testing.assert_allclose(ask(observation())["actions"], expected(16, 4))
        assert "observation/state" in ask(WRONG["a state too short"][0])
        np.testing.assert_allclose(ask(observation())["actions"], expected(16, 4))
    with robot(addresses["counter"], VLLM, ssl=trusting(certificate), additional_headers=headers) as ask:
        assert [ask({"state": np.array([2.0])})[0].tolist() for _ in range(2)] == [[2, 1], [4, 2]]


def refusal(*arguments, **options):
    """Return the response that refuses a robot."""
    with pytest.raises(InvalidStatus) as refused, robot(*arguments, **options):
        pass
    return refused.value.response


@pytest.mark.parametrize(
    "header", [None, "", "Api-Key", "Api-Key ", "Api-Key wrong", f"Api-Key {SECRET}x", f"Api-Key {SECRET[:-1]}",
               f"Basic {SECRET}", "Bearer ", SECRET],
)  # fmt: skip
@pytest.mark.parametrize("path", ["", VLLM, "/healthz/more", "//healthz"])
def test_over_tls_a_robot_without_the_token_is_refused_before_any_message(walled, header, path):
    addresses, certificate = walled
    headers = None if header is None else {"Authorization": header}
    response = refusal(addresses["arm"], path, ssl=trusting(certificate), additional_headers=headers)
    assert response.status_code == 401
    body = response.body.decode()
    assert "Authorization: Api-Key TOKEN" in body and SECRET not in body


def test_over_tls_two_tokens_at_once_are_refused(walled):
    addresses, certificate = walled
    both = [("Authorization", "Api-Key wrong"), ("Authorization", f"Api-Key {SECRET}")]
    assert refusal(addresses["arm"], ssl=trusting(certificate), additional_headers=both).status_code == 401


def test_over_tls_a_web_page_is_refused_with_the_token_too(walled):
    addresses, certificate = walled
    headers = {"Authorization": f"Api-Key {SECRET}"}
    options = {"ssl": trusting(certificate), "additional_headers": headers, "origin": "https://evil.example"}
    assert refusal(addresses["arm"], **options).status_code == 403


def test_clients_without_tls_or_the_right_certificate_are_refused(walled):
    addresses, certificate = walled
    headers = {"Authorization": f"Api-Key {SECRET}"}
    with pytest.raises(ssl.SSLCertVerificationError):
        with robot(addresses["arm"], ssl=ssl.create_default_context(), additional_headers=headers):
            pass
    old = trusting(certificate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        with robot(addresses["arm"], ssl=old, additional_headers=headers):
            pass
    with pytest.raises((OSError, InvalidMessage, EOFError)):
        with robot(addresses["arm"], additional_headers=headers):
            pass
    with socket.create_connection(tuple(addresses["arm"].rsplit(":", 1)), timeout=60) as plain:
        plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert b"200" not in plain.recv(1000)
    with urllib.request.urlopen(
        f"https://{addresses['arm']}/healthz", timeout=60, context=trusting(certificate)
    ) as answer:  # without the token
        assert (answer.status, answer.read()) == (200, b"OK\n")
    # The port still serves.
    with robot(addresses["arm"], ssl=trusting(certificate), additional_headers=headers) as ask:
        np.testing.assert_allclose(ask(observation())["actions"], expected(16, 4))


def test_a_connection_is_an_episode_and_reset_begins_another(addresses):
    step = {"state": np.array([2.0])}
    with robot(addresses["counter"]) as ask, robot(addresses["counter"]) as other:
        assert [ask(step)["actions"][0].tolist() for _ in range(3)] == [[2, 1], [4, 2], [6, 3]]
        assert other(step)["actions"][0].tolist() == [2, 1]
        assert ask({"endpoint": "reset"}) == {"status": "reset successful"}
        assert ask(step)["actions"][0].tolist() == [2, 1]
        assert ask(step | {"reset": True})["actions"][0].tolist() == [2, 1]
        assert isinstance(ask({"state": np.zeros(2)}), str)  # a failed step does not count
        assert ask(step)["actions"][0].tolist() == [4, 2]
        assert other(step)["actions"][0].tolist() == [4, 2]


def test_another_session_id_begins_another_episode_and_an_ended_one_never_continues(addresses):
    step = {"state": np.array([1.0])}
    with robot(addresses["counter"], VLLM) as ask:
        assert [ask(step | {"session_id": name})[0, 1] for name in ("a", "a", "b", "b")] == [1, 2, 1, 2]
        refused = ask(step | {"session_id": "a"})
        assert refused["type"] == "error" and "ended" in refused["message"]
        assert ask(step | {"session_id": "b"})[0, 1] == 3


@pytest.mark.parametrize("path", ["/", VLLM])
def test_a_session_never_continues_from_observations_without_a_name(addresses, path):
    step = {"state": np.array([1.0])}

    def total(ask, more):
        answer = ask(step | more)
        return (answer["actions"] if isinstance(answer, dict) else answer)[0, 1]

    with robot(addresses["counter"], path) as ask:
        assert [total(ask, more) for more in ({}, {}, {"session_id": "a"}, {"session_id": "a"})] == [1, 2, 1, 2]


def test_a_reset_is_true_or_false(addresses):
    step = {"state": np.array([1.0])}
    with robot(addresses["counter"]) as ask:
        assert [ask(step)["actions"][0, 1] for _ in range(2)] == [1, 2]
        assert ask(step | {"reset": np.array(True)})["actions"][0, 1] == 1
        assert "reset: expected true or false" in ask(step | {"reset": 1})
        assert ask(step | {"reset": False})["actions"][0, 1] == 2


def test_metrics_count_what_robots_do(guarded):
    def metrics():
        request = urllib.request.Request(f"http://{guarded['http']}/metrics", headers=KNOWN)
        with urllib.request.urlopen(request, timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name.removeprefix("jurybox_robot_"), *sorted(sample.labels.values())): sample.value
            for family in families
            for sample in family.samples
            if "_robot_" in sample.name
        }

    assert metrics()["requests_total", "alone"] == metrics()["connections_opened_total", "counter"] == 0
    with pytest.raises(InvalidStatus), robot(guarded["robots"]["alone"]):
        pass
    with robot(guarded["robots"]["alone"], additional_headers=KNOWN) as ask:
        for report in ({}, {"chunk_report": {"delay": 0.5, "stale": 2, "starved": 3}}):
            assert "actions" in ask(observation() | report)
        assert "chunk_report" in ask(observation() | {"chunk_report": {"delay": -1.0}})
        assert isinstance(ask(WRONG["a state too short"][0]), str)
        with pytest.raises(ConnectionClosed), robot(guarded["robots"]["alone"], additional_headers=KNOWN):
            pass
        assert metrics()["connections", "alone"] == 1
    with robot(guarded["robots"]["counter"], additional_headers=KNOWN) as ask:
        for _ in range(2):
            ask({"state": np.array([1.0])})
            ask({"endpoint": "reset"})
    wait_until(lambda: metrics()["connections", "alone"] == 0, 60)
    found = metrics()
    expected_values = {
        ("connections_opened_total", "alone"): 1,
        ("connections_refused_total", "alone", "token"): 1,
        ("connections_refused_total", "alone", "full"): 1,
        ("requests_total", "alone"): 2,
        ("request_failures_total", "alone", "malformed"): 1,
        ("request_failures_total", "alone", "observation"): 1,
        ("delay_seconds_count", "alone"): 2,
        ("batch_wait_seconds_count", "alone"): 2,
        ("client_delay_seconds_sum", "alone"): 0.5,
        ("client_chunks_dropped_total", "alone", "stale"): 2,
        ("client_starved_steps_total", "alone"): 3,
        ("requests_total", "counter"): 2,
        ("sessions_total", "counter"): 2,
    }
    assert {key: found[key] for key in expected_values} == expected_values
    assert found["jitter_seconds", "alone"] >= 0 and found["delay_seconds_sum", "alone"] > 0


def test_a_hundred_reconnecting_robots_lose_nothing_and_leave_nothing(server, addresses):
    with server.connect() as client:
        with robot(addresses["counter"]) as ask:
            ask({"state": np.array([1.0])})
        gateway = Path(f"/proc/{server.pids()['gateway']}")

        def left() -> dict[str, object]:
            """Return what connections could leave behind: leases and open files."""
            return {"lanes": client.status()["lanes"], "files": len(list((gateway / "fd").iterdir()))}

        wait_until(lambda: left() == left(), 60)
        before = left()
        wrong: list[object] = []
        together = threading.Barrier(100, timeout=100)

        def connect_repeatedly(number: int) -> None:
            try:
                together.wait()
                for life in range(3):
                    with robot(addresses["counter"]) as ask:
                        for step in range(1, 4):
                            answer = ask({"state": np.array([float(number)])})
                            if answer["actions"][0].tolist() != [number * step, step]:
                                wrong.append((number, life, step, answer))
                        # Some of them close while their next observation is computed, all without a handshake.
                        if life == 1:
                            if number % 2:
                                ask.connection.send(packb({"state": np.array([1.0])}))
                            ask.connection.socket.close()
            except Exception as error:  # noqa: BLE001
                wrong.append((number, repr(error)))

        threads = [threading.Thread(target=connect_repeatedly, args=(number,)) for number in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(110)
        assert not wrong, wrong[:3]

        def nothing_more() -> bool:
            now = left()  # what an earlier test's connection had open may have been closed meanwhile
            return now["lanes"] == before["lanes"] and now["files"] <= before["files"]

        wait_until(nothing_more, 60, f"{left()} to become {before}")

        # All slots are free again: the maximum number of robots can connect.
        def hundred() -> bool:
            with contextlib.ExitStack() as stack:
                return all(
                    stack.enter_context(robot(addresses["counter"]))({"state": np.array([1.0])})["actions"][0, 1] == 1
                    for _ in range(100)
                )

        assert hundred()


def test_chunks_are_executed_ahead_through_the_port_and_episodes_start_fresh(addresses):
    with robot(addresses["counter"]) as ask:
        with AsyncChunkPolicy(lambda request, _: ask(request)["actions"], reset_key="reset") as policy:
            for _ in range(2):
                policy.begin({"state": np.array([3.0])}, timeout=60)
                assert [policy.act({"state": np.array([3.0])}).tolist() for _ in range(2)] == [[3, 1], [3, 1]]
                wait_until(lambda: policy._done is not None, 60, "the second answer")
                assert policy.act({"state": np.array([3.0])}).tolist() == [6, 2]
                wait_until(lambda: policy._done is not None, 60, "the third answer")
                policy.reset()
            assert policy.stats.failed == 0


def test_an_engine_that_dies_ends_its_episodes_and_none_continues_without_state(server, addresses):
    step = {"state": np.array([1.0])}
    with robot(addresses["counter"]) as ask, robot(addresses["counter"], VLLM) as other:
        assert ask(step)["actions"][0, 1] == 1 and other(step)[0, 1] == 1
        os.kill(server.pids()["engine-0"], signal.SIGKILL)
        assert "lost" in ask(step)
        with pytest.raises(ConnectionClosed):  # openpi's clients reconnect to start an episode
            ask(step)
        for _ in range(2):
            assert "lost" in other(step)["message"]
        other({"endpoint": "reset"})
        assert [other(step)[0, 1] for _ in range(2)] == [1, 2]
    with robot(addresses["counter"]) as ask:
        assert ask(step)["actions"][0, 1] == 1


def test_an_episode_with_a_late_answer_does_not_continue_from_that_step(addresses):
    step, slow = {"state": np.array([1.0])}, {"state": np.array([1000.0])}
    with robot(addresses["late"]) as ask, robot(addresses["late"], VLLM) as other:
        wait_until(lambda: not isinstance(ask(step | {"reset": True}), str), 60, "an answer in time")
        assert other(step | {"reset": True}) is not None
        assert "did not answer within 0." in ask(slow)
        assert "lost" in ask(step)
        with pytest.raises(ConnectionClosed):
            ask(step)
        assert "did not answer within 0." in other(slow)["message"]
        wait_until(lambda: "lost" in other(step)["message"], 60)
        other({"endpoint": "reset"})

        def first():
            answer = other(step | {"reset": True})  # the engine may still compute the slow one
            return isinstance(answer, np.ndarray) and answer[0].tolist() == [1, 1]

        wait_until(first, 60, "the first step of another episode")
        assert other(step)[0].tolist() == [2, 2]


def test_robots_may_use_all_rows_of_a_model_with_state(addresses):
    with contextlib.ExitStack() as stack:
        arms = [stack.enter_context(robot(addresses["full"])) for _ in range(4)]
        for step in (1, 2):
            for ask in arms:
                np.testing.assert_allclose(ask({"state": [1.0]})["actions"], expected(step, step))


def test_an_expired_observation_is_dropped_and_not_computed(addresses):
    with robot(addresses["counter"]) as slow, robot(addresses["counter"], VLLM) as ask:
        assert slow({"state": np.array([1.0])})["actions"][0, 1] == 1
        assert ask({"state": np.array([1.0]), "answer_within": 30.0})[0, 1] == 1
        slow.connection.send(packb({"state": np.array([1000.0])}))  # the engine is busy for a second and a half
        late = ask({"state": np.array([1.0]), "answer_within": 0.2})
        if isinstance(late, dict):  # it arrived after the slow one, as it nearly always does
            assert re.search(r"within 0\.[012]\d* s", late["message"]), late  # some of the time may have passed
            assert "lost" in ask({"state": np.array([1.0])})["message"]
        assert ask({"state": np.array([5.0]), "reset": True})[0].tolist() == [5, 1]
        assert unpackb(slow.connection.recv(60))["actions"][0].tolist() == [1001, 2]


def test_an_observation_that_fails_in_a_batch_fails_alone(addresses):
    wrong = {1: WRONG["a row that the model refuses"], 4: WRONG["a state too short"], 6: WRONG["no msgpack"]}
    answers: dict[tuple[int, int], object] = {}
    together = threading.Barrier(8, timeout=60)

    def asks(number):
        with robot(addresses["arm"]) as ask:
            for step in range(20):
                together.wait()
                answers[number, step] = ask(wrong[number][0] if number in wrong else observation(fill=number))

    threads = [threading.Thread(target=asks, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert len(answers) == 160
    for (number, _), answer in answers.items():
        if number in wrong:
            assert isinstance(answer, str) and wrong[number][1] in answer, answer
        else:
            np.testing.assert_allclose(answer["actions"], expected(6 + number, 4))


def test_random_frames_get_an_error_each_and_the_connection_stays_open(addresses):
    rng = random.Random(1)
    whole = packb(observation())
    with robot(addresses["arm"]) as ask, robot(addresses["arm"], VLLM) as other:
        for _ in range(150):
            frame = bytearray(whole)
            for _ in range(rng.randrange(1, 8)):
                frame[rng.randrange(70) if rng.random() < 0.5 else -rng.randrange(1, 140)] = rng.randrange(256)
            for send in (ask, other):
                answer = send(bytes(frame[: rng.randrange(1, len(frame) + 1)] if rng.random() < 0.3 else frame))
                assert isinstance(answer, (str, dict, np.ndarray))
        np.testing.assert_allclose(ask(observation())["actions"], expected(16, 4))
        np.testing.assert_allclose(other(observation()), expected(16, 4))


def test_one_robot_too_many_gets_an_error(addresses):
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(robot(addresses["arm"]))
        with pytest.raises(ConnectionClosed, match="8 robots are connected"), robot(addresses["arm"]):
            pass


@pytest.fixture(scope="module")
def openpi(tmp_path_factory):
    """A PYTHONPATH with the unmodified openpi-client, which uses the packages installed here."""
    if importlib.util.find_spec("openpi_client"):
        return ""
    folder = tmp_path_factory.mktemp("openpi")
    options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(folder), "openpi-client==0.1.2"]
    try:
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options], capture_output=True, timeout=100)
    except subprocess.TimeoutExpired:
        pytest.skip("openpi-client 0.1.2 could not be installed in time")
    if done.returncode:
        pytest.skip(f"openpi-client 0.1.2 cannot be installed here: {done.stderr.decode()[-300:]}")
    return str(folder)


OPENPI = """
import sys
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy
host, port = sys.argv[1].split(":")
policy = WebsocketClientPolicy(host, int(port), api_key="whatever")
assert policy.get_server_metadata() == {"reset_pose": [0.0, 0.5], "name": "arm"}, policy.get_server_metadata()
observation = {"observation/image": np.full((8, 6, 3), 10, np.uint8), "observation/state": np.array([1., 2., 3.]),
               "prompt": "lift"}
for _ in range(3):
    answer = policy.infer(observation)
    assert answer["actions"].shape == (5, 2) and answer["actions"].dtype == np.float32
    assert np.allclose(answer["actions"], [16, 4]), answer
    assert answer["policy_timing"]["infer_ms"] > 0
try:
    policy.infer({**observation, "observation/state": np.zeros(2)})
except RuntimeError as error:
    assert "observation/state" in str(error)
else:
    raise AssertionError("no error")
policy.reset()
assert np.allclose(policy.infer(observation)["actions"], [16, 4])
print("all is well")
"""


def test_openpis_own_client_works_unchanged(addresses, openpi):
    environ = {"PYTHONPATH": openpi, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", OPENPI, addresses["arm"]], env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.stdout == "all is well\n", done.stderr


def test_a_killed_gateway_is_restarted_on_its_port(server, addresses):
    old = server.pids()["gateway"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: server.pids().get("gateway") not in (None, old), 100, "another gateway")

    def answers() -> bool:
        try:
            with robot(addresses["arm"]) as ask:
                np.testing.assert_allclose(ask(observation())["actions"], expected(16, 4))
                return True
        except (OSError, ConnectionClosed):
            return False

    wait_until(answers, 100, "an answer of the new gateway")
