"""The photo training and its demo against real servers, with a cheap juror."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from tests.serving import START, launch, serving, wait_until
from tests.unit.runtime.toys import Rows
from typer.testing import CliRunner

from jurybox.client import connect
from jurybox.protocol.segment import directory
from jurybox.server.jurors import ranked
from jurybox.studies.photo import train as photo_run
from jurybox.studies.photo.environment import PhotoConfig, PhotoLibrary
from jurybox.studies.photo.environment.photo_edit import build
from jurybox.studies.photo.environment.scorer import LocalScorer
from jurybox.studies.photo.learning import PhotoTraining, plan
from jurybox.studies.photo.train import juror_of
from jurybox.training import interrupts
from jurybox.training.cli import train as train_app
from jurybox.training.run_folder import read_metrics
from jurybox.training.runtime.local_server import LocalServer, ServerNotStarted
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.runtime.run import run as run_plan
from jurybox.training.trainings.progress import Watcher

JUROR = "tests.unit.studies.photo.cheap_juror:middle_grey"
MODEL = {"photo": {"factory": JUROR, "max_batch": 8, "rows": 16}}
CLI = [sys.executable, "-m", "jurybox.training.cli"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server with every transport, for trainings that do not stop it."""
    with serving(
        tmp_path_factory.mktemp("server"), MODEL, http="127.0.0.1:0", grpc="127.0.0.1:0", tcp="127.0.0.1:0"
    ) as running:
        yield running


def command(*arguments, **environment):
    return subprocess.run(
        [*CLI, *map(str, arguments)], capture_output=True, text=True, timeout=150, env={**os.environ, **environment}
    )


@pytest.mark.runs
@pytest.mark.timeout(400)
def test_a_training_against_a_server_writes_all_its_files_and_can_be_resumed(tmp_path, server):
    out = tmp_path / "run"
    options = ["train", "photo", "--workers", 2, "--rollout", 16, "--damages", 2, "--seed", 5, "--out", out]
    options += ["--server", server.address, "--set", f'environment.audit.other="{JUROR}"']
    done = command(*options, "--steps", 32)
    assert done.returncode == 0, done.stderr
    resumed = command(*options, "--steps", 48, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["env_steps"], summary["episodes"], summary["seed"]) == (48, 12, 5)
    assert summary["learner_steps"] > 0 and summary["verdict"] in ("yes", "no", "undecided")
    rows = read_metrics(out / "metrics.csv")
    assert [row["env_steps"] for row in rows] == [16, 32, 48]
    audited = [row for row in rows if "audit_other" in row]
    assert audited and all({"audit_psnr", "audit_psnr_before", "audit_other_before"} <= row.keys() for row in audited)
    assert summary["audit"]["learned"].keys() == {"psnr", "ssim", "ciede2000", "other"}
    assert "audit juror other" in (out / "report.html").read_text()
    assert list((out / "tensorboard").iterdir()) and list((out / "checkpoints").iterdir())
    report = (out / "report.html").read_text()
    assert "rows in a batch" in report and "level" in report  # the server's section, the juror's second output
    photos = len(PhotoLibrary.shipped().held_out)
    cases, kinds, jurors, measures, intact = 2 * photos, 4, 3, 3, photos
    tilted = 2 * photos  # each photo tilted to both sides, for every second seed
    lines = cases * (kinds * jurors + 3 * measures) + intact * (2 + measures) + tilted * 2
    assert len((out / "evaluation.csv").read_text().splitlines()) == 1 + lines
    assert summary["held_out"].keys() == {"no edits", "random edits", "learned"}


@pytest.mark.runs
@pytest.mark.timeout(240)
@pytest.mark.parametrize("transport", ["grpc", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_training_against_a_server_of_another_host_ends_with_its_report(tmp_path, server, transport):
    out = tmp_path / "run"
    options = ["train", "photo", "--workers", 2, "--rollout", 16, "--damages", 2, "--steps", 32, "--out", out]
    address = f"{transport}://{server.listening(transport)}"
    done = subprocess.run([*CLI, *map(str, options), "--server", address], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["env_steps"] == 32 and summary["verdict"] in ("yes", "no", "undecided")
    assert "held-out photos" in (out / "report.html").read_text()
    assert "rows in a batch" in (out / "report.html").read_text(), "the server's section"


def test_without_a_server_the_error_says_how_to_start_one(tmp_path, monkeypatch):
    for take in ("take_over", "ignore_from_now_on"):  # the signals of this process are pytest's
        monkeypatch.setattr(interrupts, take, lambda *_: None)
    options = ["photo", "--out", str(tmp_path / "run"), "--server", f"ipc://{tmp_path}/nobody"]
    done = CliRunner().invoke(train_app, options)
    assert done.exit_code == 3
    assert "jurybox serve photo.toml" in done.output and "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


class Restarts:
    """Replaces the server in the middle of a training."""

    def __init__(self, folder, first, models=MODEL, **options):
        self.folder, self.server, self.replaced_at = folder, first, None
        self.models, self.options = models, options

    def __call__(self, shared):
        done = shared.scoreboard.env_steps + shared.scoreboard.under_way
        if done >= 16 and self.replaced_at is None:
            self.replaced_at = done
            assert self.server.stop() == 0
            self.server = launch(self.folder, self.models, **self.options)


@pytest.mark.runs
def test_workers_continue_when_the_server_is_restarted(tmp_path):
    settings = PhotoTraining(environment=PhotoConfig(), seed=1, steps=32, envs=2, rollout=32, n_epochs=1)
    first = launch(tmp_path / "server", MODEL)
    watcher = Restarts(tmp_path / "server", first)
    config = replace(settings.environment, address=first.address)
    try:
        outcome = run_plan(
            plan(settings.changed(environment=config)), tmp_path / "run", Rows(), serial=True, watch=watcher
        )
    finally:
        watcher.server.stop()
        if first.process.poll() is None:
            first.stop()
    assert watcher.replaced_at == 16
    assert outcome.env_steps == 32


@pytest.mark.slow
def test_workers_wait_until_a_restarted_server_has_the_juror_that_the_training_loads(tmp_path):
    allowed = {"factories": ["tests.unit.studies.photo.cheap_juror:*"]}
    first = launch(tmp_path / "server", {}, **allowed)
    watcher = Restarts(tmp_path / "server", first, {}, **allowed)
    config = PhotoConfig(address=first.address, juror=JUROR)
    settings = PhotoTraining(environment=config, seed=1, steps=32, envs=2, rollout=32, n_epochs=1)
    try:
        wait_until(lambda: "supervisor serving" in first.text(), START)
        with juror_of(settings, tmp_path) as loaded:
            planned = plan(settings.changed(environment=loaded))
            outcome = run_plan(planned, tmp_path / "run", Rows(), serial=True, watch=watcher)
    finally:
        for each in {watcher.server, first}:
            if each.process.poll() is None:
                each.stop()
    assert watcher.replaced_at == 16
    assert outcome.env_steps == 32


def test_the_server_marks_an_audit_juror(tmp_path, server):
    settings = PhotoTraining(environment=PhotoConfig(address=server.address, audit={"other": JUROR}))
    with juror_of(settings, tmp_path) as config, connect(server.address) as client:
        (name,) = config.audit_models.values()
        marks = {model["name"]: model["audit"] for model in client.status()["models"]}
        assert marks["photo"] is False and marks[name] is True and config.model == "photo"
        text = urllib.request.urlopen(f"http://{server.listening('http')}/metrics", timeout=10).read().decode()
        assert f'jurybox_model_audit{{model="{name}"}} 1.0' in text and 'jurybox_model_audit{model="photo"} 0.0' in text
        status = [sys.executable, "-m", "jurybox.server.cli", "status", "--address", server.address]
        shown = subprocess.run(status, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"})
        assert f"{name} (audit)" in shown.stdout, shown


def test_the_juror_has_as_many_engines_as_requested_on_a_private_server_only(tmp_path, monkeypatch):
    seen = {}

    class RecordedServer(LocalServer):
        def start(self):
            seen["config"] = tomllib.loads(self._config())["server"]
            raise ServerNotStarted("enough is known")

    monkeypatch.setattr("jurybox.training.runtime.serving.LocalServer", RecordedServer)
    monkeypatch.setattr("jurybox.studies.photo.train.LocalServer", RecordedServer)
    monkeypatch.delenv("JURYBOX_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # without a server
    with pytest.raises(ServerNotStarted), juror_of(PhotoTraining(), tmp_path, replicas=3):
        pass
    assert seen.pop("config")["replicas"] == 3
    with pytest.raises(ServerNotStarted), ExitStack() as resources:
        photo_run.demo(tmp_path / "demo", Watcher(), resources, seed=0, replicas=2)
    assert seen.pop("config")["replicas"] == 2


def test_a_juror_with_other_weights_is_loaded_with_them_and_not_confused_with_a_loaded_one(tmp_path, server):
    weights = tmp_path / "other.safetensors"
    torch.manual_seed(3)
    save_file(ranked(trained=False).module.state_dict(), weights)
    given = {"juror": "jurybox.server.jurors:ranked", "juror_args": {"weights": str(weights)}}
    picture = np.full((384, 384, 3), 90, np.uint8)
    settings = PhotoTraining(environment=PhotoConfig(address=server.address, model="other", **given))
    with juror_of(settings, tmp_path) as config, connect(server.address) as client:
        served = float(np.squeeze(client.model(config.model, rows=1).infer(picture[None])))
    environment = build(PhotoConfig(scorer="local", **given))
    np.copyto(environment.scorer.buffer, picture)
    assert served == pytest.approx(environment.scorer.score(), abs=1e-3)
    np.copyto((shipped := LocalScorer("jurybox.server.jurors:ranked")).buffer, picture)
    assert abs(shipped.score() - served) > 0.01
    settings = PhotoTraining(environment=PhotoConfig(address=server.address, **given))
    with pytest.raises(ConfigError, match="juror_args are for a juror that is loaded for this run"):
        with juror_of(settings, tmp_path):
            pass


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"replicas": 2}, "--juror-replicas is of a private server.* set `replicas` in its configuration"),
        ({"http": True}, "--server-http is of a private server.* set `http` in its configuration"),
    ],
)
def test_what_a_private_server_has_cannot_be_chosen_for_a_shared_one(tmp_path, server, options, told):
    settings = PhotoTraining(environment=PhotoConfig(address=server.address))
    with pytest.raises(ConfigError, match=told), juror_of(settings, tmp_path, **options):
        pass


@pytest.fixture
def shared_memory():
    """A folder in shared memory for one demo only, so that all that is left in it is the demo's."""
    folder = Path(tempfile.mkdtemp(prefix="jurybox-demo-test-", dir=directory()))
    yield folder
    shutil.rmtree(folder)


class RunningDemo:
    def __init__(self, out, shared_memory, temporary, steps):
        self.out, self.shared_memory, self.temporary = out, shared_memory, temporary
        temporary.mkdir()
        self.log = out.with_suffix(".log")
        options = ["demo", "photo", "--out", str(out), "--juror", JUROR, "--steps", str(steps), "--damages", "2"]
        options += ["--workers", "2"]
        with self.log.open("w") as sink:
            self.process = subprocess.Popen(
                [*CLI, *options],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                env={**os.environ, "JURYBOX_SHM_DIR": str(shared_memory), "TMPDIR": str(temporary)},
            )
        self.family = {}

    def says(self, text):
        self.look()
        return text in self.log.read_text()

    def look(self):
        """Remember every process that this one has started so far."""
        try:
            root = psutil.Process(self.process.pid)
            self.family |= {child.pid: child for child in root.children(recursive=True)}
        except psutil.NoSuchProcess:
            pass

    def ctrl_c(self):
        """Send SIGINT to the whole foreground group, like a terminal."""
        self.look()
        os.killpg(self.process.pid, signal.SIGINT)

    def leaves_nothing(self):
        wait_until(lambda: not self.survivors(), 30, f"the end of {self.survivors()}")
        assert [path.name for path in self.shared_memory.iterdir()] == []
        assert list(self.temporary.glob("jurybox-demo-*")) == []

    def survivors(self):
        return [
            child for child in self.family.values() if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        ]


@pytest.fixture
def demo(tmp_path, shared_memory, request):
    """A demo of 512 steps, long enough to be interrupted anywhere, or of as many as a test sets."""
    running = RunningDemo(tmp_path / "demo", shared_memory, tmp_path / "tmp", getattr(request, "param", 512))
    yield running
    running.look()
    for process in (
        [*running.survivors(), psutil.Process(running.process.pid)] if running.process.poll() is None else []
    ):
        process.kill()
    running.process.wait()


@pytest.mark.parametrize("demo", [128], indirect=True, ids=["128 steps"])
@pytest.mark.runs
@pytest.mark.timeout(400)
def test_a_demo_leaves_its_report_and_no_process(demo):
    wait_until(lambda: demo.says("evaluating"), 200, "the evaluation")
    assert demo.family
    assert demo.process.wait(100) == 0, demo.log.read_text()
    assert (demo.out / "report.html").stat().st_size > 10_000
    assert "report:" in demo.log.read_text()
    assert has_trained(demo)
    demo.leaves_nothing()


def has_trained(demo):
    demo.look()
    metrics = demo.out / "metrics.csv"
    return metrics.exists() and len(metrics.read_text().splitlines()) > 1


MOMENTS = {
    "server starts": lambda demo: demo.says("starting a server") and any(demo.family),
    "workers start": lambda demo: demo.says("is ready") and len(demo.family) > 3,
    "training": lambda demo: demo.says("training:"),
    "after an update": has_trained,
    "evaluation": lambda demo: demo.says("evaluating"),
}


@pytest.mark.runs
@pytest.mark.parametrize(
    ("moment", "presses"),
    [
        ("training", 3),
        *(
            pytest.param(moment, presses, marks=pytest.mark.slow)
            for moment, presses in [
                ("server starts", 1),
                ("server starts", 3),
                ("training", 1),
                ("workers start", 1),
                ("after an update", 3),
                ("evaluation", 2),
            ]
        ),
    ],
)
@pytest.mark.timeout(400)
def test_ctrl_c_leaves_no_process_and_no_shared_memory(demo, moment, presses):
    wait_until(lambda: MOMENTS[moment](demo), 200, moment)
    for _ in range(presses):
        demo.ctrl_c()
    assert demo.process.wait(60) == 130, demo.log.read_text()
    assert "Traceback" not in demo.log.read_text()
    demo.leaves_nothing()


@pytest.mark.slow
def test_the_server_and_workers_of_a_killed_demo_end(demo):
    wait_until(lambda: has_trained(demo), 60, "training")
    demo.look()
    demo.process.kill()
    demo.process.wait()
    wait_until(lambda: not demo.survivors(), 15, "the end of server and workers")
    assert list(demo.shared_memory.iterdir()) == []
