"""Metrics, the stream behind the live page, and `jurybox top`, on a real server under load."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.serving import serving, wait_until

from jurybox.server.gateway.live import _MOST_WATCHERS
from tests import preloaded

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64, "publish": "double_buffer"},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("watched"), MODELS, http="127.0.0.1:0", drain_timeout=100.0) as running:
        with running.connect() as connection:
            running.http = f"http://{connection.status()['server']['http']}"
        yield running


@contextmanager
def load(server, seconds: float = 60.0) -> Iterator[list[int]]:
    """Run a client that sends requests continuously; enter after its first answer, with the sizes of the answers."""
    stop, first = threading.Event(), threading.Event()
    answered: list[int] = []

    def ask() -> None:
        deadline = time.monotonic() + seconds
        with server.connect() as connection:
            model = connection.model("affine", rows=4)
            while not stop.is_set() and time.monotonic() < deadline:
                answered.append(len(model.infer(np.zeros((3, 4), np.float32), timeout=20)))
                first.set()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert first.wait(60)
        yield answered
    finally:
        stop.set()
        thread.join(30)


def scrape(server) -> dict[tuple[str, str], float]:
    """Return the samples of the model "affine" or of no model, by name and their other labels."""
    answer = httpx.get(f"{server.http}/metrics", timeout=10)
    assert answer.status_code == 200
    return {
        (sample.name, json.dumps({key: label for key, label in sample.labels.items() if key != "model"})): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.labels.get("model", "affine") == "affine"
    }


def unlabelled(samples: dict[tuple[str, str], float], name: str) -> float:
    return samples[f"jurybox_{name}", "{}"]


def wait_until_counted(server, requests: float) -> None:
    """Wait until the model's requests are as many: an engine counts them after it has answered."""
    wait_until(
        lambda: unlabelled(scrape(server), "requests_total") >= requests, 30, f"the count of {requests} requests"
    )
    assert unlabelled(scrape(server), "requests_total") == requests


def test_metrics_count_a_clients_requests(server):
    before = scrape(server)
    with server.connect() as connection:
        model = connection.model("affine", rows=8)
        for _ in range(20):
            model.infer(np.zeros((5, 4), np.float32))
        wait_until(lambda: unlabelled(scrape(server), "lanes_in_use") == 1, 30, "the lane")
    wait_until_counted(server, unlabelled(before, "requests_total") + 20)
    after = scrape(server)
    assert unlabelled(after, "rows_total") - unlabelled(before, "rows_total") == 100
    assert (
        unlabelled(after, "request_duration_seconds_count") - unlabelled(before, "request_duration_seconds_count") == 20
    )
    request_seconds = unlabelled(after, "request_duration_seconds_sum") - unlabelled(
        before, "request_duration_seconds_sum"
    )
    queue_seconds = unlabelled(after, "queue_wait_seconds_sum") - unlabelled(before, "queue_wait_seconds_sum")
    assert 0 < queue_seconds < request_seconds < 20
    assert unlabelled(after, "arena_bytes") > 0


def test_publications_show_as_versions_and_adoptions(server):
    before = scrape(server)
    with server.connect() as connection:
        version = connection.publisher("affine").publish({"scale": np.float32(3.0), "offset": np.float32(0.0)})
        wait_until(lambda: unlabelled(scrape(server), "weights_version") == version, 30, "the adoption")
    updates = unlabelled(before, "weights_updates_total") + 1
    wait_until(lambda: unlabelled(scrape(server), "weights_updates_total") == updates, 30, "the adoption's count")
    after = scrape(server)
    assert unlabelled(after, "weights_update_duration_seconds_count") == 1 + unlabelled(
        before, "weights_update_duration_seconds_count"
    )
    assert unlabelled(after, "weights_lag_versions") == 0


def test_no_counter_goes_backwards_or_jumps_when_an_engine_is_killed(server):
    engine = json.dumps({"engine": "0"})
    counted = unlabelled(scrape(server), "requests_total")
    with load(server) as answered:
        wait_until(lambda: len(answered) > 100, 60, "requests")
    wait_until_counted(server, counted + len(answered))
    before = scrape(server)
    os.kill(server.pids()["engine-0"], signal.SIGKILL)
    lowest = dict(before)
    wait_until(lambda: scrape(server)["jurybox_engine_up", engine] == 0, 30, "the death")
    deadline = time.monotonic() + 30
    while True:
        now = scrape(server)
        for (name, labels), value in now.items():
            if name.endswith(("_total", "_count", "_sum", "_bucket")):
                assert value >= lowest[name, labels], f"{name}{labels} went backwards"
        lowest = now
        if now["jurybox_engine_up", engine] == 1:
            break
        assert time.monotonic() < deadline, "the engine did not come back"
    after = scrape(server)
    # If the killed engine's counts were reported twice, they would double.
    assert unlabelled(after, "requests_total") == unlabelled(before, "requests_total")
    assert unlabelled(after, "rows_total") == unlabelled(before, "rows_total")
    assert after["jurybox_engine_restarts_total", engine] == before["jurybox_engine_restarts_total", engine] + 1
    with server.connect() as connection:
        connection.model("affine").infer(np.zeros((1, 4), np.float32), timeout=20)
    wait_until_counted(server, unlabelled(before, "requests_total") + 1)


def samples(server, wanted: int) -> list[dict]:
    """Return documents from the stream."""
    found: list[dict] = []
    with httpx.stream("GET", f"{server.http}/events", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        event = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: ") and event == "sample":
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == wanted:
                return found
    raise AssertionError(f"the stream ended after {len(found)} samples")


def test_the_stream_shows_the_load_as_it_happens(server):
    with load(server):
        last = samples(server, 6)[-1]
    affine = next(model for model in last["models"] if model["name"] == "affine")
    assert affine["rates"]["rows"] > 0
    assert affine["batch"]["mean"] == 3.0
    assert affine["lanes"]["in_use"] in (1, 2)  # the gateway also has one after a health check
    assert 0 < affine["latency"]["request"]["p50"] <= affine["latency"]["request"]["p99"] < 30
    assert last["engines"][0]["state"] == "serving"
    assert 0 < last["engines"][0]["busy"] <= 1
    assert any(event["event"] == "serving" for event in last["events"])


def test_an_engines_death_is_an_event(server):
    assert any(event["event"] == "child died" for event in samples(server, 1)[0]["events"])


def test_a_failed_model_call_is_an_event(server):
    with httpx.stream("GET", f"{server.http}/events", timeout=30) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))  # a client subscribed before it
        with server.connect() as connection, pytest.raises(Exception, match="this row breaks the model"):
            connection.model("moody").infer(np.full((1, 4), 666, np.float32))
        samples_until_it = zip(range(50), (line for line in lines if line.startswith("data: ")), strict=False)
        assert any('"the model failed"' in line for _, line in samples_until_it)


def test_watchers_that_leave_make_room_for_others(server):
    """More come than may watch at once."""
    with httpx.Client(timeout=10) as client:

        def opened():
            answers = [client.send(client.build_request("GET", f"{server.http}/events"), stream=True) for _ in range(8)]
            try:
                if any(answer.status_code != 200 for answer in answers):
                    return False  # the server has not noticed yet that the earlier ones left
                lines = [next(line for line in answer.iter_lines() if line.startswith("data: ")) for answer in answers]
                return len(lines) == 8
            finally:
                for answer in answers:
                    answer.close()

        for _ in range(_MOST_WATCHERS // 8 + 1):
            wait_until(opened, 30, "room for eight watchers")
    assert samples(server, 2)


def top(address: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run("jurybox.server.cli", ["top", "--once", "--interval", "0.5", "--address", address])


def test_top_once_prints_the_load(server):
    with load(server):
        run = top(server.address)
    assert run.returncode == 0, run.stderr
    assert "rows/s" in run.stdout
    assert "affine" in run.stdout
    assert "serving" in run.stdout


def press(keys: bytes, address: str) -> tuple[int, str]:
    """Run `jurybox top` in a terminal and press keys there; return its exit status and what the terminal showed."""
    parent, child = pty.openpty()
    echo = termios.tcgetattr(child)[3]
    command = [sys.executable, "-m", "jurybox.server.cli", "top", "--interval", "60", "--address", address]
    top = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm"})
    try:
        screen, deadline = b"", time.monotonic() + 60
        while b"affine" not in screen and time.monotonic() < deadline:
            if select.select([parent], [], [], 1.0)[0]:
                screen += os.read(parent, 65536)
        os.write(parent, keys)
        deadline = time.monotonic() + 30
        while top.poll() is None and time.monotonic() < deadline:
            if select.select([parent], [], [], 0.1)[0]:
                screen += os.read(parent, 65536)  # unread output would block it
        status = top.wait(1)
        assert termios.tcgetattr(child)[3] == echo, "top did not restore the terminal"
        return status, screen.decode(errors="replace")
    finally:
        os.close(child)
        os.close(parent)
        if top.poll() is None:
            top.kill()
            top.wait()


def test_q_ends_top_at_once_and_restores_the_terminal(server):
    status, screen = press(b"xq", server.address)
    assert (status, "affine" in screen) == (0, True)


def test_tops_error_says_that_no_server_runs_there(tmp_path):
    run = top(f"ipc://{tmp_path}/none")
    assert run.returncode == 1
    assert "is a server running there?" in run.stderr


def test_an_open_page_does_not_delay_the_servers_stop(server):
    """This test is last because it ends the shared server."""
    with httpx.stream("GET", f"{server.http}/events", timeout=10) as answer:
        next(answer.iter_lines())
        assert server.stop(timeout=50) == 0
