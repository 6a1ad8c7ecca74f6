"""Trainings as clients of a running server: over its socket and over gRPC, two at once, leaving nothing behind."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.serving import START, launch, serving, wait_until

CLI = [sys.executable, "-m", "jurybox.training.cli", "train"]
# fmt: off
HOCKEY = [
    "hockey", "--policy", "served", "--envs", "8", "--steps", "1200", "--learning-starts", "200", "--train-freq", "4",
    "--set", "batch_size = 16", "--set", "hidden = [16, 16]",
    "--set", "evaluation_games = 1", "--set", "matrix_games = 0", "--set", "film_games = 0", "--set", "max_ahead = 200",
    "--set", "snapshot_every = 2", "--set", "league.pool = 3", "--set", "league.anchor_share = 0.1",
    "--evaluate-every", "0",
]
WORKFLOW = [
    "workflow", "--policy", "served", "--envs", "4", "--total-episodes", "16", "--episode-length", "10",
    "--max-train-episodes-per-env", "2", "--set", "evaluation_episodes = 4",
]
MARL = [
    "marl", "--policy", "served", "--steps", "60", "--set", 'algorithm = "dqn"', "--set", "learning_starts = 20",
    "--set", "batch_size = 8",
    "--set", "hidden = [16, 16]", "--set", "env_args = {turns = 15, height = 9, width = 9, gems = [4, 2, 1]}",
    "--set", "evaluation_episodes = 1",
]
GYM = [
    "gym", "--policy", "served", "--env", "CartPole-v1", "--algorithm", "dqn", "--steps", "300", "--envs", "2",
    "--set", "buffer_size = 1000", "--set", "evaluation_episodes = 1", "--evaluate-every", "0",
]
PHOTO = ["photo", "--workers", "2", "--rollout", "16", "--damages", "2", "--steps", "16"]
JUROR = ["--set", "environment.juror = 'tests.unit.studies.photo.cheap_juror:middle_grey'"]
# fmt: on


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    allowed = ["jurybox.training.algorithms.served_networks:*", "tests.unit.studies.photo.cheap_juror:*"]
    with serving(tmp_path_factory.mktemp("server"), {}, grpc="127.0.0.1:0", remote_factories=allowed) as running:
        yield running


def train(out, *options):
    return subprocess.run(
        [*CLI, *options, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.runs
@pytest.mark.timeout(320)
@pytest.mark.parametrize(
    "training",
    [GYM, *(pytest.param(each, marks=pytest.mark.slow) for each in (WORKFLOW, HOCKEY, MARL, [*PHOTO, *JUROR]))],
    ids=lambda options: options[0],
)
def test_two_concurrent_runs_over_both_transports_end_with_reports_and_leave_no_model(tmp_path, server, training):
    addresses = {"ipc": server.address, "grpc": f"grpc://{server.listening('grpc')}"}
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(
            lambda transport: train(tmp_path / transport, *training, "--server", addresses[transport]), addresses
        )
        for transport, done in zip(addresses, ended, strict=True):
            assert done.returncode == 0, f"{transport}: {done.stderr[-3000:]}"
            assert (tmp_path / transport / "report.html").exists()
            summary = json.loads((tmp_path / transport / "summary.json").read_text())
            assert summary["env_steps"] >= 16 and not summary.get("restarts")
            assert not (tmp_path / transport / "server.log").exists(), "no private server was started"
    with server.connect() as client:
        assert client.models() == []


@pytest.mark.runs
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*WORKFLOW, "--server", "tcp://127.0.0.1:1"], "is no address of a server that takes weights"),
        ([*WORKFLOW, "--server", "ipc:///nowhere/engine"], "is a server running there"),
        (["marl", "--server", "ipc:///nowhere/engine"], 'policy is "local"'),
    ],
)
def test_the_error_of_an_unusable_address_is_one_sentence(tmp_path, options, message):
    done = train(tmp_path / "run", *options)
    assert done.returncode in (2, 3)
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.runs
def test_the_error_of_a_server_that_does_not_allow_the_policy_says_which_line_to_add(tmp_path):
    with serving(tmp_path / "server", {}, grpc="127.0.0.1:0", factories=["tests.models:*"]) as server:
        done = train(tmp_path / "run", *WORKFLOW, "--server", f"grpc://{server.listening('grpc')}")
    assert done.returncode == 3, done.stderr
    assert 'remote_factories = ["jurybox.training.algorithms.served_networks:*"]' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_restarted_server_gets_the_models_again_and_the_run_goes_on(tmp_path):
    allowed = {"factories": ["tests.models:*"]}
    server = launch(tmp_path / "server", {}, **allowed)
    servers, metrics = [server], tmp_path / "run" / "metrics.csv"
    longer = [*HOCKEY, "--steps", "6000", "--set", "log_every = 300"]
    try:
        wait_until(lambda: "supervisor serving" in server.text(), START)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(train, tmp_path / "run", *longer, "--server", server.address)
            wait_until(lambda: running.done() or (metrics.exists() and len(metrics.read_text().splitlines()) > 1), 200)
            assert server.stop() == 0
            servers.append(launch(tmp_path / "server", {}, **allowed))
            done = running.result(280)
        assert done.returncode == 0, done.stderr[-3000:]
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert summary["env_steps"] >= 6000 and "which is loaded again" in done.stderr + done.stdout
        with servers[-1].connect() as client:
            assert client.models() == []
    finally:
        for each in servers:
            if each.process.poll() is None:
                each.stop()
