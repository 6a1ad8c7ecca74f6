"""A new training is a `Training` and a row of the command line's table; everything else it gets from the skeleton."""

from __future__ import annotations

import csv
import json
import re
from functools import partial

import pytest
from pydantic import Field
from tests.unit.runtime import toys
from typer.testing import CliRunner

from jurybox.studies.sorrel.experiment import Multiprocessing, SorrelError
from jurybox.training import interrupts
from jurybox.training.checkpoints import CheckpointError
from jurybox.training.cli import TRAININGS, Command, train
from jurybox.training.run_folder import check_same, read_metrics, write_settings
from jurybox.training.runtime.progress import COLUMNS
from jurybox.training.runtime.settings import Settings
from jurybox.training.trainings.gym import GymTraining
from jurybox.training.trainings.recorded_run import recorded_run
from jurybox.training.trainings.setting_flags import Setting, settings_of
from jurybox.training.trainings.training import Run, Training, carry_out


class ToyTraining(Settings):
    title = "toy"
    may_change = ("steps",)

    steps: int = Field(40, ge=1)
    gamma: float = Field(0.9, ge=0, le=1)
    learning_starts: int = Field(4, ge=0)


def work(settings: ToyTraining, run: Run) -> str:
    """The whole of the training's own: a plan, and a report's own text."""
    planned = toys.plan(steps=settings.steps, seed=settings.seed)
    report = lambda outcome, rows, log: f"<p>{run.command}: {outcome.text}</p>"  # noqa: E731
    outcome = carry_out(partial(recorded_run, planned, run.folder, COLUMNS, settings, report), run)
    return f"{outcome.text}: {outcome.env_steps} steps of toys"


TRAINING = Training("toy", ToyTraining, work)


@pytest.fixture(autouse=True)
def signals_are_pytests(monkeypatch):
    for take in ("take_over", "ignore_from_now_on"):
        monkeypatch.setattr(interrupts, take, lambda *_: None)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(TRAININGS, "toy", Command(f"{__name__}:TRAINING", "Teach toys.", ("steps",)))


def run(*arguments):
    return CliRunner().invoke(train, ["toy", *arguments])


def test_it_has_every_common_flag_and_one_for_each_setting():
    shown = run("--help").output
    for flag in ("--out", "--config", "--set", "--serial", "--resume", "--launcher", "--ray-address"):
        assert flag in shown
    for flag in ("--seed INTEGER", "--steps INTEGER", "--gamma NUMBER", "--learning-starts INTEGER"):
        assert flag in shown


@pytest.mark.parametrize("flag", ["--learning-starts", "--learning_starts"])
def test_a_flag_is_a_setting_and_is_checked_as_one(tmp_path, flag):
    done = run("--out", str(tmp_path / "run"), flag, "7", "--gamma", "0.5", "--serial")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["learning_starts"] == 7
    wrong = run("--out", str(tmp_path / "other"), flag, "-1")
    assert wrong.exit_code == 2 and "learning_starts: Input should be greater" in " ".join(wrong.output.split())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--learning-start", "3"], "No such option: --learning-start; did you mean '--learning-starts'"),
        (["--total-timesteps", "3"], "No such option: --total-timesteps: it is called --steps here"),
        (["--total_timesteps", "3"], "it is called --steps here"),
        (["--async_training"], "actors and learners always run side by side; --serial runs them in one process"),
        (["--quite-another"], "No such option: --quite-another; --help lists all"),
        (["--set", "total_timesteps = 3"], "no such setting: total_timesteps is called steps here"),
        (["--set", "learning_start = 3"], "no such setting; did you mean 'learning_starts'?"),
        (["--set", "async_training = true"], "no such setting: actors and learners always run side by side"),
    ],
)
def test_an_unknown_flag_or_setting_is_answered_with_its_name_here(tmp_path, given, told):
    done = run("--out", str(tmp_path / "run"), *given)
    assert done.exit_code == 2
    assert told in " ".join(re.sub("[│\n]", " ", done.output).split()), done.output


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("marl", ["--mode", "snapshot"], "it is called --publish-mode here"),
        ("marl", ["--set", "mode = 'snapshot'"], "mode is called publish_mode here"),
        ("marl", ["--num-learner-processes", "2"], "`share` gives several agents one"),
        ("marl", ["--set", "multiprocessing = {enabled = true, mode = 'snapshot'}"], "its mode is publish_mode here"),
        ("marl", ["--set", "multiprocessing.num_learner_processes = 2"], "`share` gives several agents one learner"),
    ],
)
def test_names_of_other_programs_are_answered_with_the_way_here(tmp_path, name, given, told):
    done = CliRunner().invoke(train, [name, "--out", str(tmp_path / "run"), *given])
    assert done.exit_code == 2
    assert told in " ".join(re.sub("[│\n]", " ", done.output).split()), done.output


def test_it_writes_the_files_of_every_training(tmp_path):
    config = tmp_path / "toy.toml"
    config.write_text("steps = 30\ngamma = 0.5\n")
    out = tmp_path / "run"
    done = run("--config", str(config), "--out", str(out), "--set", "gamma = 0.25", "--seed", "3", "--serial")
    assert done.exit_code == 0, done.output
    assert "steps of toys" in done.output and f"report: {out / 'report.html'}" in done.output.replace("\n", "")
    settings = json.loads((out / "settings.json").read_text())
    assert settings == {"seed": 3, "steps": 30, "gamma": 0.25, "learning_starts": 4}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["env_steps"] >= 30 and summary["seed"] == 3
    assert (out / "report.html").exists() and (out / "checkpoints").is_dir() and read_metrics(out / "metrics.csv")
    refused = run("--out", str(out), "--set", "gamma = 0.5", "--seed", "3", "--serial", "--resume")
    assert refused.exit_code == 2 and "gamma was 0.25, is 0.5" in refused.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "gamma = 2"], "gamma: Input should be less than or equal to 1"),
        (["--set", "warm = 2"], "warm"),
        (["--serial", "--launcher", "ray"], "--launcher"),
        (["--ray-address", "auto"], "--launcher ray"),
    ],
)
def test_errors_are_raised_before_the_start(tmp_path, arguments, told):
    done = run("--out", str(tmp_path / "run"), *arguments)
    assert done.exit_code == 2 and told in " ".join(done.output.split()), done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", TRAININGS)
def test_every_setting_of_a_training_is_a_flag_with_a_meaning_and_a_default(name):
    command = TRAININGS[name]
    module, _, attribute = command.training.partition(":")
    training = getattr(pytest.importorskip(module), attribute)
    assert training.name == name
    settings = {each.name: each for each in settings_of(training.settings)}
    variants = training.settings.variants({}).values()
    assert settings.keys() == {name for variant in variants for name in variant().as_dict()}
    assert [each.name for each in settings.values() if not each.meaning or not each.default] == []
    assert {*command.first, *command.short} <= settings.keys()
    shown = CliRunner().invoke(train, [name, "--help"], terminal_width=80).output
    assert max(map(len, shown.splitlines())) <= 80
    for each in settings.values():
        assert re.search(rf"(^|\s){re.escape(each.flag)}[\s/]", shown), each.flag  # whole


def test_values_of_flags_are_those_of_a_file():
    def value(kind, text, literal=False):
        return Setting("x", kind, "none", "", literal=literal).value_of(text)

    assert value("integer", "3") == 3 and value("number", "1e-3") == 0.001 and value("list", "64,64") == [64, 64]
    assert (
        value("list", "[64, 64]") == [64, 64] and value("list", "64") == [64] and value("table", "{a = 1}") == {"a": 1}
    )
    assert value("number|auto", "auto") == "auto" and value("text", "3", literal=True) == "3"


@pytest.mark.parametrize("name", TRAININGS)
def test_a_run_with_unknown_settings_is_not_resumed(name, tmp_path):
    module, _, attribute = TRAININGS[name].training.partition(":")
    settings = getattr(pytest.importorskip(module), attribute).settings()
    (tmp_path / "settings.json").write_text(json.dumps(settings.as_dict()))
    check_same(tmp_path, settings)
    (tmp_path / "settings.json").write_text(json.dumps({**settings.as_dict(), "never_heard": 1}))
    with pytest.raises(CheckpointError, match="settings that this build does not know: never_heard"):
        check_same(tmp_path, settings)


def test_a_run_of_another_algorithm_is_refused_for_that_and_not_for_its_settings(tmp_path):
    write_settings(tmp_path, GymTraining.checked({"algorithm": "dqn"}))
    with pytest.raises(CheckpointError, match=r"other settings \(.*algorithm was 'dqn', is 'ppo'"):
        check_same(tmp_path, GymTraining.checked({"algorithm": "ppo"}))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("buffer_capacity", "buffer_capacity is called buffer_size here"),
        ("mode", "mode is called publish_mode here"),
        ("num_learner_processes", "each model has a learner process of its own"),
    ],
)
def test_a_sorrel_configuration_with_an_unknown_name_is_refused(name, told):
    with pytest.raises(SorrelError, match=told):
        Multiprocessing.of({"multiprocessing": {"enabled": True, name: 8}})


@pytest.mark.runs
def test_several_seeds_from_one_command_are_separate_runs_that_are_compared(tmp_path):
    out = tmp_path / "runs"
    done = run("--out", str(out), "--seeds", "3,5", "--serial", "--steps", "24")
    assert done.exit_code == 0, done.output
    assert "interquartile mean of the return" in done.output
    for seed in (3, 5):
        assert json.loads((out / f"seed-{seed}" / "settings.json").read_text())["seed"] == seed
        assert (out / f"seed-{seed}" / "report.html").exists()
    more = run("--out", str(out), "--seeds", "3,5,7", "--serial", "--steps", "30", "--resume")
    assert more.exit_code == 0, more.output
    with (out / "seeds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["env_steps"]) for row in rows] == [("3", "30"), ("5", "30"), ("7", "30")]


def test_a_seed_whose_run_was_killed_while_it_started_is_begun_with_resume(tmp_path):
    run("--out", str(tmp_path), "--seeds", "3", "--serial", "--steps", "24")
    (tmp_path / "seed-5").mkdir()
    for name in (".lock", "server.log"):
        (tmp_path / "seed-5" / name).touch()
    done = run("--out", str(tmp_path), "--seeds", "3,5", "--serial", "--steps", "24", "--resume")
    assert done.exit_code == 0 and "interquartile mean of the return" in done.output, done.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--seeds", "1,1"), "different whole numbers"),
        (("--seeds", "1;2"), "different whole numbers"),
        (("--seeds", "1,2", "--seed", "3"), "--seed and --seeds together"),
        (("--seeds", "1,2", "--set", "seed = 3"), "--seed and --seeds together"),
    ],
)
def test_useless_seeds_are_refused_before_the_start(tmp_path, options, told):
    done = run("--out", str(tmp_path / "runs"), *options)
    assert done.exit_code == 2 and told in done.output.replace("\n", " "), done.output
    assert not (tmp_path / "runs").exists()
