"""`docker compose --profile train`: trainings as clients, each in a container of its own, and a juror of one's own."""

import json
import subprocess
import sys

import pytest
from tests.containers.engine import ROOT, bridges, docker, free_port

pytestmark = [pytest.mark.containers, pytest.mark.timeout(1800)]

# fmt: off
SMALL = {
    "hockey": [
        "--steps", "400", "--learning-starts", "100", "--workers", "1", "--set", "batch_size = 16",
        "--set", "hidden = [16, 16]", "--set", "evaluation_games = 2", "--set", "matrix_games = 0",
        "--set", "film_games = 0",
    ],
    "workflow": [
        "--envs", "4", "--total-episodes", "24", "--episode-length", "10", "--max-train-episodes-per-env", "2",
    ],
    "marl": [
        "--steps", "60", "--set", 'algorithm = "dqn"', "--set", "learning_starts = 20", "--set", "batch_size = 8",
        "--set", "hidden = [16, 16]", "--set", "env_args = {turns = 15, height = 9, width = 9, gems = [4, 2, 1]}",
        "--set", "evaluation_episodes = 1",
    ],
    "gym": [
        "--env", "CartPole-v1", "--algorithm", "dqn", "--steps", "300", "--envs", "2", "--set", "buffer_size = 1000",
        "--set", "evaluation_episodes = 1", "--evaluate-every", "0",
    ],
}
# fmt: on


def test_a_training_in_its_own_container_leaves_its_report(project, image):
    said = project.compose(
        "--profile", "train", "run", "--name", f"{project.name}-train", "train", "train", "photo", "--out",
        "/runs/photo", "--workers", "2", "--steps", "64", "--rollout", "64", "--damages", "2", timeout=600,
    )  # fmt: skip
    assert "report: /runs/photo/report.html" in said
    assert project.status()["lanes"]["in_use"] <= 2, "the gateway's own are left at most"

    again = project.compose("--profile", "train", "up", "--no-build", "train", timeout=200)
    assert "/runs/photo holds a run already" in again
    assert "exited with code 2" in again


@pytest.mark.parametrize("training", SMALL)
def test_a_training_of_compose_has_its_policies_on_the_server_for_as_long_as_it_runs(project, image, training):
    command = json.loads(project.compose("--profile", "train", "config", "--format", "json"))
    command = command["services"][training]["command"]  # as `up` runs it, and a smaller budget
    said = project.compose("--profile", "train", "run", "--rm", training, *command, *SMALL[training], timeout=600)
    assert f"report: /runs/{training}/report.html" in said
    assert [model["name"] for model in project.status()["models"]] == ["photo"]


def test_a_training_on_the_host_is_a_client_of_the_server_in_its_container(project, tmp_path):
    address = f"grpc://127.0.0.1:{project.grpc}"
    line = [sys.executable, "-m", "jurybox.training.cli", "train", "gym", "--policy", "served", "--server", address]
    done = subprocess.run(
        [*line, "--out", str(tmp_path / "run"), *SMALL["gym"]], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "run" / "report.html").exists()
    assert [model["name"] for model in project.status()["models"]] == ["photo"]


def test_a_juror_of_ones_own_answers_from_its_container(images, tmp_path):
    folder, project = ROOT / "examples" / "own_juror", f"{images['name']}-own-{images['tag']}"
    ports = {"HTTP_PORT": str(free_port()), "GRPC_PORT": str(free_port())}
    files = ["-f", str(folder / "compose.yaml")]
    if not bridges():
        on_the_host = tmp_path / "host.yaml"
        on_the_host.write_text(
            "services: {server: {network_mode: host, ports: !reset [], environment: {"
            f"JURYBOX_HTTP: '127.0.0.1:{ports['HTTP_PORT']}', JURYBOX_GRPC: '127.0.0.1:{ports['GRPC_PORT']}'}}}}}}\n"
        )
        files += ["-f", str(on_the_host)]
    env = {"IMAGE": images["name"], "TAG": images["tag"], **ports}
    try:
        docker(
            "compose", "-p", project, *files, "up", "--detach", "--wait", "--wait-timeout", "180", timeout=200, env=env
        )
        asked = subprocess.run(
            [sys.executable, str(folder / "ask.py")], capture_output=True, text=True, timeout=120,
            env={"JURYBOX_ADDRESS": f"grpc://127.0.0.1:{ports['GRPC_PORT']}"},
        )  # fmt: skip
    finally:
        docker("compose", "-p", project, *files, "down", "--volumes", "--timeout", "5", check=False, env=env)
    assert asked.returncode == 0, asked.stderr[-3000:]
    scores = [line[28:] for line in asked.stdout.splitlines()]
    assert scores == ["1.0", "0.5", "0.0", "an empty text"]
