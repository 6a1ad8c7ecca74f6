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
def load(server, seconds: float = 60.0) -> Iterator[None]:
    """One client that asks again and again, from the first answer on."""
    stop, answered = threading.Event(), threading.Event()

    def ask() -> None:
        until = time.monotonic() + seconds
        with server.connect() as connection:
            model = connection.model("affine", rows=4)
            while not stop.is_set() and time.monotonic() < until:
                model.infer(np.zeros((3, 4), np.float32), timeout=20)
                answered.set()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert answered.wait(60)
        yield
    finally:
        stop.set()
        thread.join(30)


def scrape(server) -> dict[tuple[str, str], float]:
    """Samples of the model "affine", or of no model, by name and the rest of their labels."""
    answer = httpx.get(f"{server.http}/metrics", timeout=10)
    assert answer.status_code == 200
    return {
        (sample.name, json.dumps({key: label for key, label in sample.labels.items() if key != "model"})): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.labels.get("model", "affine") == "affine"
    }


def plain(samples: dict[tuple[str, str], float], name: str) -> float:
    return samples[f"jurybox_{name}", "{}"]


def test_metrics_count_what_a_client_did(server):
    before = scrape(server)
    with server.connect() as connection:
        model = connection.model("affine", rows=8)
        for _ in range(20):
            model.infer(np.zeros((5, 4), np.float32))
        wait_until(lambda: plain(scrape(server), "lanes_in_use") == 1, 30, "the lane")
    after = scrape(server)
    assert plain(after, "requests_total") - plain(before, "requests_total") == 20
    assert plain(after, "rows_total") - plain(before, "rows_total") == 100
    assert plain(after, "request_duration_seconds_count") - plain(before, "request_duration_seconds_count") == 20
    spent = plain(after, "request_duration_seconds_sum") - plain(before, "request_duration_seconds_sum")
    waited = plain(after, "queue_wait_seconds_sum") - plain(before, "queue_wait_seconds_sum")
    assert 0 < waited < spent < 20
    assert plain(after, "arena_bytes") > 0


def test_publications_show_as_versions_and_adoptions(server):
    before = scrape(server)
    with server.connect() as connection:
        version = connection.publisher("affine").publish({"scale": np.float32(3.0), "offset": np.float32(0.0)})
        wait_until(lambda: plain(scrape(server), "weights_version") == version, 30, "the adoption")
    after = scrape(server)
    assert plain(after, "weights_updates_total") == plain(before, "weights_updates_total") + 1
    assert plain(after, "weights_update_duration_seconds_count") == 1 + plain(
        before, "weights_update_duration_seconds_count"
    )
    assert plain(after, "weights_lag_versions") == 0


def test_no_counter_goes_backwards_or_jumps_when_an_engine_is_killed(server):
    engine = json.dumps({"engine": "0"})
    with load(server):
        wait_until(lambda: plain(scrape(server), "requests_total") > 100, 20, "requests")
    counts: list[float] = []

    def all_is_counted() -> bool:  # what was in flight, too
        time.sleep(0.2)
        counts.append(plain(scrape(server), "requests_total"))
        return len(set(counts[-3:])) == 1 and len(counts) > 2

    wait_until(all_is_counted, 30, "the last of what was in flight")
    before = scrape(server)
    os.kill(server.pids()["engine-0"], signal.SIGKILL)
    lowest = dict(before)
    wait_until(lambda: scrape(server)["jurybox_engine_up", engine] == 0, 30, "the death")
    until = time.monotonic() + 30
    while True:
        now = scrape(server)
        for (name, labels), value in now.items():
            if name.endswith(("_total", "_count", "_sum", "_bucket")):
                assert value >= lowest[name, labels], f"{name}{labels} went backwards"
        lowest = now
        if now["jurybox_engine_up", engine] == 1:
            break
        assert time.monotonic() < until, "the engine did not come back"
    after = scrape(server)
    # A predecessor's counts told again would double them.
    assert plain(after, "requests_total") == plain(before, "requests_total")
    assert plain(after, "rows_total") == plain(before, "rows_total")
    assert after["jurybox_engine_restarts_total", engine] == before["jurybox_engine_restarts_total", engine] + 1
    with server.connect() as connection:
        connection.model("affine").infer(np.zeros((1, 4), np.float32), timeout=20)
    assert plain(scrape(server), "requests_total") == plain(before, "requests_total") + 1


def samples(server, wanted: int) -> list[dict]:
    """Documents from the stream."""
    found: list[dict] = []
    with httpx.stream("GET", f"{server.http}/events", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
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
    assert affine["lanes"]["in_use"] in (1, 2)  # the gateway holds one, too, once its health was asked
    assert 0 < affine["latency"]["request"]["p50"] <= affine["latency"]["request"]["p99"] < 30
    assert last["engines"][0]["state"] == "serving"
    assert 0 < last["engines"][0]["busy"] <= 1
    assert any(event["event"] == "serving" for event in last["events"])


def test_a_death_is_among_the_events(server):
    assert any(event["event"] == "child died" for event in samples(server, 1)[0]["events"])


def test_a_failed_model_call_is_an_event(server):
    with httpx.stream("GET", f"{server.http}/events", timeout=30) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data: "))  # somebody watches from before it on
        with server.connect() as connection, pytest.raises(Exception, match="this row breaks the model"):
            connection.model("moody").infer(np.full((1, 4), 666, np.float32))
        samples_until_it = zip(range(50), (line for line in lines if line.startswith("data: ")), strict=False)
        assert any('"the model failed"' in line for _, line in samples_until_it)


def test_many_watchers_are_one_to_the_server_and_none_when_they_left(server):
    with httpx.Client(timeout=10) as client:
        streams = [client.build_request("GET", f"{server.http}/events") for _ in range(5)]
        answers = [client.send(request, stream=True) for request in streams]
        lines = [next(line for line in answer.iter_lines() if line.startswith("data: ")) for answer in answers]
        assert len(lines) == 5
        for answer in answers:
            answer.close()
    assert samples(server, 2)


def top(address: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jurybox.server.cli", "top", "--once", "--interval", "0.5", "--address", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_top_prints_what_the_page_shows(server):
    with load(server):
        run = top(server.address)
    assert run.returncode == 0, run.stderr
    assert "rows/s" in run.stdout
    assert "affine" in run.stdout
    assert "serving" in run.stdout


def press(keys: bytes, address: str) -> tuple[int, str]:
    """Run `jurybox top` in a terminal and press keys there: its exit status, and what the terminal showed."""
    parent, child = pty.openpty()
    echo = termios.tcgetattr(child)[3]
    command = [sys.executable, "-m", "jurybox.server.cli", "top", "--interval", "60", "--address", address]
    top = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm"})
    try:
        screen, until = b"", time.monotonic() + 60
        while b"affine" not in screen and time.monotonic() < until:
            if select.select([parent], [], [], 1.0)[0]:
                screen += os.read(parent, 65536)
        os.write(parent, keys)
        until = time.monotonic() + 30
        while top.poll() is None and time.monotonic() < until:
            if select.select([parent], [], [], 0.1)[0]:
                screen += os.read(parent, 65536)  # what nobody reads would block it
        status = top.wait(1)
        assert termios.tcgetattr(child)[3] == echo, "the terminal was left as top wanted it"
        return status, screen.decode(errors="replace")
    finally:
        os.close(child)
        os.close(parent)
        if top.poll() is None:
            top.kill()
            top.wait()


def test_q_ends_top_at_once_and_leaves_the_terminal_as_it_was(server):
    status, screen = press(b"xq", server.address)
    assert (status, "affine" in screen) == (0, True)


def test_top_says_that_nobody_is_there(tmp_path):
    run = top(f"ipc://{tmp_path}/none")
    assert run.returncode == 1
    assert "is a server running there?" in run.stderr


def test_a_page_that_is_open_does_not_hold_the_server_back_when_it_stops(server):
    """The last, since it ends the server of all."""
    with httpx.stream("GET", f"{server.http}/events", timeout=10) as answer:
        next(answer.iter_lines())
        assert server.stop(timeout=50) == 0
