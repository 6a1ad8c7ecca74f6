"""`jurybox bench`: client processes that load a real server, and its report."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.serving import serving, wait_until

from jurybox.server.commands.bench_client import classes, quantile
from tests import preloaded

MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64},
    "moody": {"factory": "tests.models:moody", "max_batch": 8, "rows": 64},
    "sum": {"factory": "tests.open_models:running_sum", "max_batch": 8, "rows": 32},
    "text": {"factory": "tests.open_models:shout", "max_batch": 8, "rows": 64},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("bench"), MODELS) as running:
        yield running


CLI = "jurybox.server.cli"


def bench(server, *arguments):
    return preloaded.run(CLI, ["bench", *arguments, "--address", server.address])


def answered_requests(server, model):
    with server.connect() as connection:
        return next(each["requests"] for each in connection.status()["models"] if each["name"] == model)


def test_it_counts_the_requests_that_the_server_answered(server):
    before = answered_requests(server, "affine")
    done = bench(server, "affine", "--clients", "1,2", "--seconds", "0.5", "--rows", "2", "--json")
    assert done.returncode == 0, done.stderr
    one, two = json.loads(done.stdout)
    first_requests = 1 + 2  # each client sends one before the measurement
    counted = before + one["requests"] + two["requests"] + first_requests
    # An engine counts a request after it has answered.
    wait_until(lambda: answered_requests(server, "affine") >= counted, 30, "the last request's count")
    assert answered_requests(server, "affine") == counted
    assert (one["clients"], two["clients"]) == (1, 2)
    for found in (one, two):
        assert found["rows_per_second"] == pytest.approx(2 * found["requests_per_second"])
        assert 0 < found["latency"]["p50"] <= found["latency"]["p99"] <= found["latency"]["p999"] < 60
        assert found["errors"] == {} and 2 <= found["mean_batch"] <= 4


@pytest.mark.parametrize("model", ["sum", "text"])
def test_models_with_state_and_of_text_are_measured_too(server, model):
    done = bench(server, model, "--clients", "2", "--seconds", "0.3", "--rows", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == [
        "clients",
        "requests/s",
        "rows/s",
        "p50",
        "p99",
        "p99.9",
        "batch",
        "errors",
    ]


def test_rows_of_a_file_are_sent(server, tmp_path):
    np.savez(tmp_path / "rows.npz", observation=np.zeros((3, 5), np.float32))
    done = bench(server, "affine", "--inputs", str(tmp_path / "rows.npz"))
    assert done.returncode == 1 and "came float32 of shape (1, 5)" in done.stderr
    np.savez(tmp_path / "rows.npz", observation=np.full((3, 4), 666.0, np.float32))
    done = bench(server, "moody", "--clients", "1", "--seconds", "0.2", "--inputs", str(tmp_path / "rows.npz"))
    assert done.returncode == 1 and "this row breaks the model" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ((), 2, "which model? The server has affine, moody, sum, text"),
        (("nowhere",), 1, "nowhere"),
        (("affine", "--clients", "0"), 2, "expected numbers from 1 to 512"),
        (("affine", "--inputs", __file__), 2, "no .npz file"),
    ],
)
def test_the_error_says_why_it_cannot_measure(server, arguments, status, message):
    done = bench(server, *arguments)
    assert done.returncode == status
    assert message in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize("sent_signal", [pytest.param(signal.SIGINT, marks=pytest.mark.runs), signal.SIGKILL])
def test_its_clients_end_with_it(server, sent_signal):
    line = ["bench", "affine", "--clients", "3", "--seconds", "300", "--address", server.address]
    with Path(os.devnull).open("w") as nothing:
        started = preloaded.program(CLI, line, nothing.fileno())
    try:
        before = answered_requests(server, "affine")
        clients = []

        def all_clients_send():
            clients[:] = psutil.Process(started.pid).children()
            return len(clients) == 3 and answered_requests(server, "affine") > before + 30

        wait_until(all_clients_send, 120, "three clients send requests")
        os.kill(started.pid, sent_signal)
        assert started.wait(60) == (130 if sent_signal == signal.SIGINT else -signal.SIGKILL)
        wait_until(lambda: not any(client.is_running() for client in clients), 60, "the end of its clients")
    finally:
        started.kill()
        started.wait()
    assert bench(server, "affine", "--clients", "1", "--seconds", "0.2").returncode == 0


def test_quantiles_of_classes_are_within_a_percent():
    durations = np.random.default_rng(0).lognormal(-7, 1, 20_000)
    counts = classes(durations)
    for share in (0.01, 0.5, 0.99, 0.999):
        assert quantile(counts, share) == pytest.approx(np.quantile(durations, share), rel=0.02)
    assert quantile({}, 0.5) is None
