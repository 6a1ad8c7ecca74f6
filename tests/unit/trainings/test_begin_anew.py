"""--resume continues from the newest checkpoint; if a run ended before its first, it begins anew and reports it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.serving import START, segments, wait_until
from tests.unit.runtime import toys
from tests.unit.studies.hockey.hockey_runs import settings as hockey_settings
from tests.unit.studies.photo.test_photo_resume import SMALL as PHOTO
from tests.unit.studies.photo.test_photo_resume import few_photos  # noqa: F401
from tests.unit.studies.workflow.test_trainer import SETTINGS as WORKFLOW

from jurybox.studies.hockey.train import train as train_hockey
from jurybox.studies.photo import train as photo_run
from jurybox.studies.sorrel import experiment as sorrel_experiment
from jurybox.studies.workflow import train as workflow_run
from jurybox.training.checkpoints import CheckpointError
from jurybox.training.run_folder import RunLog, RunLogError, alone_in, write_settings
from jurybox.training.runtime.local_server import ServerNotStarted
from jurybox.training.trainings.progress import Watcher
from jurybox.training.trainings.training import Run, check_folder

MARL = [
    "--set",
    'algorithm = "dqn"',
    "--set",
    "learning_starts = 20",
    "--set",
    "batch_size = 8",
    "--set",
    "hidden = [8]",
]
MARL += ["--set", "evaluation_episodes = 1", "--set", "env_args = {turns = 15, height = 9, width = 9}"]
MARL += ["--set", "log_every = 20", "--set", "max_ahead = 40", "--set", "checkpoint_every = 0"]


def command(folder, *more):
    return [sys.executable, "-m", "jurybox.training.cli", "train", "marl", "--out", str(folder), *MARL, *more]


def begun(folder, settings):
    """What a run leaves that was killed before its first checkpoint: settings, the beginning of metrics, scraps."""
    with RunLog(folder, ["loss"]) as log:
        write_settings(folder, settings)
        log.scalars(10, {"loss": 1.0})
    scrap = folder / "checkpoints" / ".writing-1"
    scrap.mkdir(parents=True)
    (scrap / "learner.state").write_bytes(b"half of it")


class Said(Watcher):
    def __init__(self):
        self.lines = []

    def log(self, text):
        self.lines.append(text)


@pytest.mark.runs
def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path):
    before = segments()
    folder = tmp_path / "run"
    running = subprocess.Popen(
        command(folder, "--steps", "1000000"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        metrics = folder / "metrics.csv"
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2, START)
        told = subprocess.run(
            command(folder, "--steps", "60", "--resume"), capture_output=True, text=True, timeout=START
        )
        assert told.returncode == 2 and f"a run is going on in {folder} (process {running.pid})" in told.stderr
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    done = subprocess.run(command(folder, "--steps", "60", "--resume"), capture_output=True, text=True, timeout=START)
    assert done.returncode == 0, done.stderr
    assert "ended before its first checkpoint" in done.stdout and "it begins anew" in done.stdout
    assert json.loads((folder / "summary.json").read_text())["env_steps"] == 60
    assert (folder / "before-1" / "metrics.csv").exists()
    resumed = command(folder, "--steps", "100", "--resume", "--serial")
    again = subprocess.run(resumed, capture_output=True, text=True, timeout=START)
    assert again.returncode == 0 and "anew" not in again.stdout
    assert json.loads((folder / "summary.json").read_text())["env_steps"] == 100
    wait_until(lambda: segments() - before == set(), 30)


@pytest.mark.runs
def test_so_does_a_photo_training(tmp_path):
    begun(tmp_path, PHOTO)
    said = Said()
    photo_run.run(PHOTO, tmp_path, said, command="", resume=True, serial=True)
    assert any("it begins anew" in line for line in said.lines)
    assert json.loads((tmp_path / "summary.json").read_text())["env_steps"] == 32
    assert not list((tmp_path / "checkpoints").glob(".writing-*"))


@pytest.mark.runs
def test_so_does_a_search(tmp_path, capsys):
    few = WORKFLOW.changed(total_episodes=40, mixed_share=0.0)
    begun(tmp_path, few)
    workflow_run.run(few, tmp_path, resume=True, console=Console(soft_wrap=True))
    assert "it begins anew" in capsys.readouterr().out
    assert json.loads((tmp_path / "summary.json").read_text())["episodes"] == 40


def test_so_does_a_hockey_training_and_its_past_selves_are_no_others(tmp_path, capsys):
    s = hockey_settings(steps=600)
    begun(tmp_path, s)
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "000000000017.weights").write_bytes(b"of the run before")
    train_hockey(s, tmp_path, serial=True, resume=True, console=Console(soft_wrap=True))
    assert "it begins anew" in capsys.readouterr().out
    assert not (tmp_path / "pool" / "000000000017.weights").exists()


def test_so_does_a_sorrel_experiment(tmp_path, monkeypatch):
    def experiment(**changes):
        given = {"enabled": True, "log_dir": str(tmp_path), "check_steps": 0, **changes}
        env = SimpleNamespace(config={"multiprocessing": given}, agents=[])
        monkeypatch.setattr(sorrel_experiment, "load", lambda make: lambda: env)
        return sorrel_experiment.run_experiment("worlds:hunt", serial=True, resume=True, console=console).outcome

    monkeypatch.setattr(sorrel_experiment, "plan", lambda env, settings, *_: toys.plan(steps=40, seed=settings.seed))
    console = Console(file=io.StringIO(), soft_wrap=True)
    with pytest.raises(CheckpointError, match="no run was begun there"):
        experiment()
    begun(tmp_path, sorrel_experiment.Multiprocessing())
    with alone_in(tmp_path), pytest.raises(RunLogError, match="a run is going on"):
        experiment()
    assert experiment(seed=3).env_steps == 40
    assert "it begins anew" in console.file.getvalue()
    assert json.loads((tmp_path / "settings.json").read_text())["seed"] == 3
    experiment(seed=3)
    assert console.file.getvalue().count("anew") == 1, "the second time it goes on from the checkpoint at the end"


RUNS = {
    "photo": (PHOTO, lambda folder: photo_run.run(PHOTO, folder, Watcher(), command="", resume=True, serial=True)),
    "workflow": (WORKFLOW, lambda folder: workflow_run.run(WORKFLOW, folder, resume=True)),
    "hockey": (hockey_settings(), lambda folder: train_hockey(hockey_settings(), folder, serial=True, resume=True)),
}


@pytest.mark.parametrize("training", RUNS)
def test_the_files_of_a_run_that_is_going_on_are_left_alone(tmp_path, training):
    settings, resume = RUNS[training]
    begun(tmp_path, settings)
    with alone_in(tmp_path):
        message = re.escape(f"a run is going on in {tmp_path} (process {os.getpid()})")
        for refused in (resume, check_folder):
            with pytest.raises(RunLogError, match=message):
                refused(tmp_path)
    assert (tmp_path / "checkpoints" / ".writing-1" / "learner.state").exists()
    assert (tmp_path / "metrics.csv").exists() and not (tmp_path / "before-1").exists()
    check_folder(tmp_path)


def test_a_killed_run_leaves_its_folder_free(tmp_path):
    program = (
        "import pathlib, sys, time; from jurybox.training.run_folder import alone_in\n"
        "with alone_in(pathlib.Path(sys.argv[1])): print('mine', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "mine\n"
        with pytest.raises(RunLogError, match=rf"\(process {holder.pid}\)"), alone_in(tmp_path):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with alone_in(tmp_path):
        pass


def test_a_demo_removes_the_files_of_a_demo_only(tmp_path, monkeypatch):
    def demo(folder):
        with ExitStack() as resources:
            photo_run.demo(folder, Watcher(), resources, seed=0)

    def not_started(server):
        raise ServerNotStarted("what comes before is enough")

    monkeypatch.setattr(photo_run.LocalServer, "start", not_started)
    with pytest.raises(ServerNotStarted):
        demo(tmp_path / "demo")
    begun(tmp_path / "demo", PHOTO)
    begun(tmp_path / "training", PHOTO)
    (tmp_path / "demo" / "thesis.txt").write_text("mine")
    with alone_in(tmp_path / "demo"), pytest.raises(RunLogError, match="a run is going on"):
        demo(tmp_path / "demo")
    with pytest.raises(ServerNotStarted):
        demo(tmp_path / "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir() if not path.name.startswith(".")] == ["thesis.txt"]
    with pytest.raises(RunLogError, match="holds a run that is not a demo's"):
        demo(tmp_path / "training")
    assert (tmp_path / "training" / "metrics.csv").exists()


@pytest.mark.runs
def test_a_demos_folder_stays_a_demos_until_a_training_goes_on_with_it(tmp_path):
    def train(**options):
        photo_run._work(PHOTO, Run(tmp_path, None, serial=True, **options))

    begun(tmp_path, PHOTO)
    (tmp_path / ".demo").touch()
    with pytest.raises(RunLogError, match="holds a run already"):
        train()
    assert (tmp_path / ".demo").exists()
    train(resume=True)
    assert not (tmp_path / ".demo").exists()


def test_a_run_begun_with_other_settings_is_not_restarted(tmp_path):
    begun(tmp_path, PHOTO)
    with pytest.raises(CheckpointError, match="learning_rate was"):
        photo_run.run(PHOTO.changed(learning_rate=0.5), tmp_path, Watcher(), command="", resume=True, serial=True)
    assert (tmp_path / "metrics.csv").exists()


def test_without_a_run_there_is_nothing_to_resume(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="start without --resume"):
        photo_run.run(PHOTO, tmp_path, Watcher(), command="", resume=True, serial=True)


def test_a_line_that_a_killed_run_did_not_finish_is_no_row(tmp_path):
    with RunLog(tmp_path, ["loss"]) as log:
        log.scalars(100, {"loss": 1.0})
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("12")  # of 120, and a loss
    with RunLog(tmp_path, ["loss"], resume_at=100) as log:
        assert log.rows() == [{"env_steps": 100.0, "loss": 1.0}]


def test_two_runs_in_one_folder_are_refused(tmp_path):
    assert issubclass(RunLogError, RuntimeError)
    with RunLog(tmp_path, ["loss"]), pytest.raises(RunLogError, match="holds a run already"):
        RunLog(tmp_path, ["loss"])
