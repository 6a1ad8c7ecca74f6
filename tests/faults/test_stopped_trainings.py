"""Trainings of compose.yaml end within seconds of SIGTERM, as `docker compose stop` sends it, on a busy machine too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from tests.serving import serving, wait_until

SERVICES = yaml.safe_load((Path(__file__).parents[2] / "compose.yaml").read_text())["services"]
TRAININGS = [name for name, service in SERVICES.items() if "train" in service.get("profiles", ())]
MODELS = {"photo": {"factory": "jurybox.server.jurors:panel", "max_batch": 64}}
BURN = "import time\nuntil = time.monotonic() + 60\nwhile time.monotonic() < until: pass"
SOON = 10.0  # seconds: half of stop_grace_period, and several times what it takes with all cores busy

pytestmark = [pytest.mark.runs, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), MODELS) as server:
        yield server


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_of_compose_ends_soon_after_sigterm_on_a_busy_machine(server, tmp_path, name):
    command = [str(word).replace("ipc:///run/jurybox/engine", server.address) for word in SERVICES[name]["command"]]
    command[command.index("--out") + 1] = str(tmp_path / "run")
    environment = {**os.environ, "JURYBOX_ADDRESS": server.address, "TMPDIR": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("w") as to:
        training = subprocess.Popen(
            [sys.executable, "-m", "jurybox.training.cli", *command], stdout=to, stderr=to, env=environment
        )
    metrics, burning = tmp_path / "run" / "metrics.csv", []
    try:
        wait_until(
            lambda: training.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") > 1),
            300,  # compiling updates may take half of it, on a busy machine
            "the training's first row",
        )
        assert training.poll() is None, log.read_text()
        burning = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(os.cpu_count() or 2)]
        started = psutil.Process(training.pid).children(recursive=True)
        began = time.monotonic()
        training.send_signal(signal.SIGTERM)
        assert training.wait(60) == 128 + signal.SIGTERM, log.read_text()
        took = time.monotonic() - began
    finally:
        for process in (training, *burning):
            process.kill()
            process.wait()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive, "its processes end with it"
    assert took < SOON, log.read_text()
    assert "stopped" in log.read_text() and "Traceback" not in log.read_text()
    with server.connect() as client:
        wait_until(lambda: client.models() == ["photo"], 10, "the end of its models")
