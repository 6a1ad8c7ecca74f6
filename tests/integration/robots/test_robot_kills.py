"""Engines killed within requests of robots: an error, or the actions of that observation, through every door.

ROBOT_KILLS sets how often.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import numpy as np
import pytest
from tests.integration.robots import test_act, test_gr00t, test_lerobot_door
from tests.integration.robots.test_robot_server import robot as openpi_robot
from tests.lerobot_classes import NEW, lerobot_classes
from tests.serving import serving, wait_until, wait_until_computing

MODELS = {name: {"factory": f"tests.robot_models:{name}", "max_batch": 16} for name in ("vla", "by_part", "arm")}
SPEAKS = {"openpi": "vla", "act": "vla", "gr00t": "by_part", "lerobot": "arm"}
TEXT = 3  # bytes of every instruction
KILLS = int(os.environ.get("ROBOT_KILLS", "3"))
HELD = 0.6  # seconds in which every request comes in through its door
PROVEN = 1.2  # seconds of service after which a death counts as caused by the kill alone


DOORS = "".join(
    f'[robots.{speaks}]\nmodel = "{model}"\nspeaks = "{speaks}"\nlisten = "127.0.0.1:0"\ntimeout = 5.0\n'
    for speaks, model in SPEAKS.items()
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS, more=DOORS, max_restarts=10_000) as running:
        yield running


@pytest.fixture(scope="module")
def addresses(server):
    with server.connect() as client:
        return client.status()["server"]["robots"]


# Each yields a function that sends an observation with a number, and returns what the actions say it was; None: an
# error came instead, in the door's own form.


@contextlib.contextmanager
def openpi(address):
    with contextlib.ExitStack() as stack:
        asked = [stack.enter_context(openpi_robot(address))]

        def ask(number):
            answer = asked[0]({"image": np.full((8, 6, 3), number, np.uint8), "instruction": "x" * TEXT})
            return None if isinstance(answer, str) else answer["actions"].tolist()[:2]

        yield ask


@contextlib.contextmanager
def act(address):
    def ask(number):
        answer = test_act.ask(f"http://{address}", test_act.openvla(number, "x" * TEXT))
        if answer.status_code == 200:
            return test_act.restored(answer.json()).tolist()[:2]
        assert answer.status_code >= 400 and set(answer.json()) == {"detail"}
        return None

    yield ask


@contextlib.contextmanager
def gr00t(address):
    with test_gr00t.robot(address) as robot:

        def ask(number):
            answer = robot(test_gr00t.action(test_gr00t.observation(fill=number, text="x" * TEXT)))
            if isinstance(answer, list):
                return [float(answer[0]["gripper"][0, 0, 0]), float(answer[0]["arm"][0, 0, 0]) - 0.5]
            assert set(answer) == {"error"}
            return None

        yield ask


@contextlib.contextmanager
def lerobot(address):
    with lerobot_classes(NEW) as classes, test_lerobot_door.robot(address, classes) as robot:

        def ask(number):
            try:
                robot.observe(number, (0.0, 0.0), number, "x" * TEXT, must_go=True)
                actions = robot.act()
            except grpc.RpcError:
                return None
            assert actions[0].timestep == number
            return actions[0].action.tolist()

        yield ask


CLIENTS = {"openpi": openpi, "act": act, "gr00t": gr00t, "lerobot": lerobot}


def test_a_kill_within_requests_gives_an_error_and_never_an_action_that_was_not_computed(server, addresses):
    over = threading.Event()

    def until_over(speaks):
        right, errors, wrong = 0, 0, []
        with CLIENTS[speaks](addresses[speaks]) as ask:
            number = 0
            while not over.is_set():
                number = number % 250 + 1
                if (said := ask(number)) is None:
                    errors += 1
                    time.sleep(0.05)
                elif said == [number, TEXT]:
                    right += 1
                else:
                    wrong.append((number, said))
        return right, errors, wrong

    with ThreadPoolExecutor(8) as pool:
        asked = {
            speaks: [pool.submit(until_over, speaks) for _ in range(2)] for speaks in SPEAKS if speaks != "lerobot"
        }
        asked["lerobot"] = [pool.submit(until_over, "lerobot")]
        try:
            for _ in range(KILLS):
                time.sleep(PROVEN)
                old = server.pids()["engine-0"]
                os.kill(old, signal.SIGKILL)
                wait_until(lambda old=old: server.pids().get("engine-0") not in (None, old), 60, "another engine")
            time.sleep(PROVEN)
        finally:
            over.set()
        found = {speaks: [one.result(120) for one in futures] for speaks, futures in asked.items()}
    print({speaks: [results[:2] for results in found[speaks]] for speaks in found})
    assert not [wrong for results in found.values() for *_, wrong in results if wrong]
    assert all(right > 0 for results in found.values() for right, *_ in results), found
    for speaks, client in CLIENTS.items():
        with client(addresses[speaks]) as ask:
            wait_until(lambda ask=ask: ask(9) == [9, TEXT], 60, f"an answer through {speaks}")


def test_a_stop_waits_for_the_answers_to_robots_and_refuses_their_next_observations(tmp_path):
    models = {
        name: {"factory": "tests.robot_models:slow", "args": {"name": name, "pause": 1.5 if name == "arm" else 0.4}}
        for name in SPEAKS.values()
    }
    with serving(tmp_path, models, more=DOORS) as server, ExitStack() as stack, server.connect() as client:
        where = client.status()["server"]["robots"]
        asks = {speaks: stack.enter_context(client_of(where[speaks])) for speaks, client_of in CLIENTS.items()}
        assert all(ask(1) == [1, TEXT] for ask in asks.values())
        with ThreadPoolExecutor(4) as pool:
            asked = {speaks: pool.submit(ask, 7) for speaks, ask in asks.items()}
            wait_until_computing(client, "vla")
            time.sleep(HELD)
            server.process.send_signal(signal.SIGTERM)
            assert {speaks: one.result(60) for speaks, one in asked.items()} == {key: [7, TEXT] for key in SPEAKS}
        assert server.process.wait(60) == 0
