"""However a training's command ends, it prints one sentence; a traceback that is of use is in a file."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
import typer
from tests.unit.runtime.toys import plan
from tests.unit.studies.photo.test_photo_resume import SMALL as PHOTO
from tests.unit.studies.photo.test_photo_resume import few_photos  # noqa: F401
from typer.testing import CliRunner

from jurybox.client import Refused, ServerGone
from jurybox.studies.hockey.settings import HockeyTraining
from jurybox.studies.photo import train as photo_run
from jurybox.studies.photo.evaluation import evaluate_policy
from jurybox.studies.workflow.settings import WorkflowTraining
from jurybox.training import interrupts
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.cli import train as commands
from jurybox.training.policy_commands import policy
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.runtime.settings import Settings, changes_of
from jurybox.training.trainings import gym, training
from jurybox.training.trainings.marl import MarlTraining
from jurybox.training.trainings.progress import Watcher
from jurybox.training.trainings.recorded_run import recorded_run
from jurybox.training.trainings.training import RunFailed


@pytest.fixture(autouse=True)
def signals_are_pytests(monkeypatch):
    for take in ("take_over", "ignore_from_now_on"):
        monkeypatch.setattr(interrupts, take, lambda *_: None)


def ended(error, out, capsys, **more):
    def work(console, resources):
        raise error

    with pytest.raises(typer.Exit) as caught:
        training.until_interrupted(work, out, message="", **more)
    return caught.value.exit_code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "metrics.csv"), 1, "the disk is full: No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "Permission denied (/x)"),
        (KeyError("colour"), 1, "the training ended with KeyError: 'colour'"),
        (RuntimeError("first line\nTraceback ..."), 1, "the training ended with RuntimeError: first line"),
        (RunFailed("learner died 5 times in a row"), 1, "learner died 5 times in a row"),
        (ConfigError("batch is too large"), 2, "batch is too large"),
        (ModuleNotFoundError("No module named 'torch'", name="torch.nn"), 2, "torch is not installed"),
        (ServerGone("the server is gone"), 3, "the server is gone"),
    ],
)
def test_an_error_is_one_sentence(tmp_path, capsys, error, status, said):
    code, told = ended(error, tmp_path, capsys)
    assert code == status and said in told
    assert "Traceback" not in told and len(told.strip().splitlines()) <= 2
    kept = list(tmp_path.glob("jurybox-error-*.txt"))
    assert len(kept) == (1 if status == 1 and not isinstance(error, RunFailed) else 0)
    assert not kept or (str(kept[0]) in told and type(error).__name__ in kept[0].read_text())


def test_an_error_names_the_command_that_ended(tmp_path, capsys):
    assert "the export ended with KeyError: 'a'" in ended(KeyError("a"), tmp_path, capsys, what="the export")[1]
    told = ended(OSError(errno.ENOSPC, "No space left on device", "x"), tmp_path, capsys, what="the export")[1]
    assert "Make room" in told and "--resume" not in told
    done = CliRunner().invoke(policy, ["export", str(tmp_path), "--to", str(tmp_path / "x.pt2")])
    assert done.exit_code and "the training" not in done.output


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_promises_to_go_on_only_where_there_is_a_checkpoint(tmp_path, monkeypatch, begun):
    def interrupted(settings, run):
        if begun:
            with Checkpoints(run.folder / "checkpoints").writing(1234, {}):
                pass
        raise KeyboardInterrupt

    monkeypatch.setattr(gym, "TRAINING", replace(gym.TRAINING, work=interrupted))
    done = CliRunner().invoke(commands, ["gym", "--env", "CartPole-v1", "--out", str(tmp_path / "out")])
    assert done.exit_code == 130
    assert ("--resume goes on from the checkpoint at 1,234 env steps" in done.output) is begun
    assert ("before the first checkpoint, so there is nothing to go on from" in done.output) is not begun


@pytest.mark.parametrize(
    "arguments",
    [
        ["workflow", "--envs", "100", "--total-episodes", "50"],
        ["workflow", "--workers", "4"],
        ["workflow", "--env", "cyborg", "--quirk"],
        ["workflow", "--halves", "--envs", "1"],
        ["hockey", "--set", "prioritized = false", "--set", "alpha = 0.3"],
        ["hockey", "--set", "league.hardness = 3.0"],
        ["hockey", "--set", "league = {pool = 0}", "--set", "snapshot_every = 5"],
        ["hockey", "--set", "learner_gpus = 1"],
        ["hockey", "--set", "learner_gpus = 1", "--set", 'device = "cuda"'],
        ["hockey", "--serial", "--launcher", "ray"],
        ["marl", "--serial", "--launcher", "ray"],
        ["marl", "--set", 'algorithm = "ppo"', "--set", "n_steps = 2"],
        ["marl", "--ray-address", "auto"],
        ["photo", "--network-address", "tcp://host:1"],
        ["photo", "--workers", "3", "--envs", "8"],
        ["photo", "--server", "localhost:8000"],
        ["gym", "--policy", "served", "--server", "localhost:8000"],
    ],
)
def test_senseless_settings_are_errors_before_the_start(tmp_path, arguments):
    done = CliRunner().invoke(commands, [*arguments, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output and done.output.strip()
    assert not (tmp_path / "out" / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("device", "devices", "said"),
    [
        ("cuda", 0, "torch finds 0 CUDA devices"),
        ("cuda:2", 2, '"cuda:0" to "cuda:1"'),
        ("gpu", 1, "no device of torch"),
    ],
)
def test_a_missing_device_is_an_error_before_the_start(tmp_path, monkeypatch, device, devices, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    done = CliRunner().invoke(commands, ["gym", "--set", f'device = "{device}"', "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and said in done.output, done.output
    assert not (tmp_path / "out").exists()


def test_settings_that_go_together_are_taken():
    settings = HockeyTraining.read(
        None, changes_of(["league.weighting = 'hard'", "league.hardness = 3.0", "alpha = 0.5"], {})
    )
    assert settings.league.weighting == "hard" and settings.league.hardness == 3.0, "one does not undo the other"
    many = MarlTraining.read(
        None, changes_of(["env_args.turns = 5", "env_args.height = 9", "ppo.n_epochs = 2", "ppo.clip_range = 0.1"], {})
    )
    assert many.env_args == {"turns": 5, "height": 9} and (many.ppo.n_epochs, many.ppo.clip_range) == (2, 0.1)
    assert WorkflowTraining(quirk=True).quirk


def test_a_value_that_is_no_toml_is_text():
    given = changes_of(["device=cuda", "steps = 1_000", "env_args.'a=b' = red car", 'hidden="x"'], {})
    assert given == {"device": "cuda", "steps": 1000, "env_args": {"a=b": "red car"}, "hidden": "x"}
    for wrong in ("steps", "=3", "a b=3"):
        with pytest.raises(ConfigError, match="expected NAME=VALUE"):
            changes_of([wrong], {})


def test_an_unknown_setting_is_named_with_its_line_and_what_may_have_been_meant(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text("seed = 1\nbatch_sise = 3\n\n[league]\npoool = 3\n")
    with pytest.raises(ConfigError) as caught:
        HockeyTraining.read(file, changes_of(["leage.pool=3"], {}))
    said = str(caught.value)
    assert f"{file}:2: batch_sise: no such setting; did you mean 'batch_size'" in said
    assert f"{file}:5: league.poool: no such setting; did you mean 'pool'" in said
    assert "; leage: no such setting; did you mean 'league'" in said
    with pytest.raises(ConfigError) as caught:
        HockeyTraining.read(file, changes_of(["batch_sise=4", "league.poool=1"], {}))
    assert str(file) not in str(caught.value), "the command line overrides the file"


def test_a_photo_training_whose_evaluation_fails_leaves_its_report_and_summary(tmp_path, monkeypatch):
    def gone(*arguments, **more):
        raise ServerGone("the server went away")

    with monkeypatch.context() as patched, pytest.raises(ServerGone):
        patched.setattr(photo_run, "evaluate_policy", gone)
        photo_run.run(PHOTO, tmp_path, Watcher(), command="jurybox train photo", serial=True)
    assert "the server went away" in (tmp_path / "report.html").read_text()
    summary = (tmp_path / "summary.json").read_text()
    assert '"env_steps": 32' in summary and "evaluation_failed" in summary


@pytest.mark.runs
def test_what_failed_in_an_evaluation_is_reported_no_longer_after_the_next(tmp_path, monkeypatch):
    test_a_photo_training_whose_evaluation_fails_leaves_its_report_and_summary(tmp_path, monkeypatch)
    assert photo_run.evaluate_policy is evaluate_policy
    photo_run.run(PHOTO, tmp_path, Watcher(), command="", resume=True, serial=True)
    summary = (tmp_path / "summary.json").read_text()
    assert "held-out photos" in (tmp_path / "report.html").read_text()
    assert "verdict" in summary and "evaluation_failed" not in summary, "what failed is reported no longer"


def test_a_missing_learned_distance_is_an_error_before_the_training(tmp_path):
    with pytest.raises(ConfigError, match="perceptual: expected 'package.module:function'"):
        photo_run.run(PHOTO.changed(perceptual="no_such:thing"), tmp_path, Watcher(), command="", serial=True)
    assert not (tmp_path / "metrics.csv").exists()


def test_a_server_without_a_status_document_costs_the_report_its_section_only(monkeypatch):
    class Remote:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def status(self):
            raise Refused("the status document is not part of the Open Inference Protocol")

    monkeypatch.setattr(photo_run, "connect", lambda *arguments, **more: Remote())
    assert photo_run._status(PHOTO.changed(environment=replace(PHOTO.environment, scorer="server"))) is None


def test_a_run_whose_report_fails_writes_one_with_the_error(tmp_path):
    def report(outcome, rows, log):
        raise ZeroDivisionError("no games were filmed")

    with pytest.raises(ZeroDivisionError):
        recorded_run(plan(steps=60), tmp_path, ("loss",), Settings(), report, serial=True)
    assert "no games were filmed" in (tmp_path / "report.html").read_text()
    assert '"env_steps": 60' in (tmp_path / "summary.json").read_text()


def test_gym_without_an_environment_shows_what_to_give(tmp_path):
    done = CliRunner().invoke(commands, ["gym", "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "which environment? Give one" in done.output
    assert "--env CartPole-v1" in done.output and "--env my_module:MyEnv" in done.output
    assert not (tmp_path / "out").exists()
