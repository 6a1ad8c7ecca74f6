"""A training that would learn nothing is refused before it starts; one that has learned nothing says so and fails."""

from __future__ import annotations

import json

import pytest
from tests.unit.runtime import test_trainers as trainers
from tests.unit.runtime.toys import Rows, plan
from typer.testing import CliRunner

from jurybox.studies.hockey.settings import HockeyTraining
from jurybox.studies.photo import train as photo
from jurybox.studies.workflow import train as workflow
from jurybox.studies.workflow.settings import WorkflowTraining
from jurybox.training.algorithms.dqn import DQN
from jurybox.training.cli import train as train_command
from jurybox.training.runtime.plan import Budget, ConfigError, End
from jurybox.training.runtime.progress import COLUMNS
from jurybox.training.runtime.run import run
from jurybox.training.runtime.settings import Settings
from jurybox.training.trainings import marl
from jurybox.training.trainings.gym import GymTraining
from jurybox.training.trainings.recorded_run import recorded_run
from jurybox.training.trainings.training import Run, RunFailed, carry_out


class Own(DQN):
    """An algorithm of the user's."""


def test_the_command_refuses_a_training_that_would_learn_nothing(tmp_path) -> None:
    options = ["--env", "CartPole-v1", "--algorithm", "dqn", "--steps", "300", "--learning-starts", "300"]
    result = CliRunner().invoke(train_command, ["gym", *options, "--train-freq", "1", "--out", str(tmp_path / "run")])
    said = " ".join(result.output.split())
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert "steps=300 with learning_starts=300, train_freq=1, envs=1: nothing would be learned" in said
    assert "first update is due after 301 env steps; raise steps to 301 or more, or lower learning_starts" in said


@pytest.mark.parametrize(
    ("algorithm", "values", "due", "waits"),
    [
        ("ppo", {"n_steps": 64, "envs": 4}, 256, "n_steps=64, envs=4"),
        ("dqn", {"learning_starts": 30, "train_freq": 4}, 32, "learning_starts=30, train_freq=4"),
        ("sac", {"learning_starts": 1, "n_steps": 3, "envs": 2}, 9, "n_steps=3, envs=2"),
        ("td3", {"learning_starts": 1, "recurrent": "gru", "batch_size": 16}, 26, "burn_in=8, sequence_length=16"),
        ("tests.unit.trainings.test_nothing_learned:Own", {"learning_starts": 7}, 8, "learning_starts=7"),
    ],
)
def test_gym_says_how_many_steps_an_update_needs(algorithm, values, due, waits) -> None:
    values = {"algorithm": algorithm, "train_freq": 1, **values}
    if algorithm == "ppo":
        del values["train_freq"]
    with pytest.raises(ValueError, match=f"steps={due - 1} with {waits}.* due after {due} env steps"):
        GymTraining(steps=due - 1, **values)
    assert GymTraining(steps=due, **values).steps == due


def test_hockey_says_how_many_steps_an_update_needs() -> None:
    with pytest.raises(ValueError, match="steps=10000 with learning_starts=10000, train_freq=8: .* after 10008 env"):
        HockeyTraining(steps=10_000)
    rows = {"learning_starts": 1, "envs": 2, "n_steps": 8, "record_opponents": False}
    with pytest.raises(ValueError, match="steps=18 with n_steps=8, envs=2: .* after 19 env steps"):
        HockeyTraining(steps=18, **rows)
    assert HockeyTraining(steps=19, **rows).steps == 19


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": 255}, "steps=255 with ppo.n_steps=256 of agent_0: .* after 256 env steps"),
        ({"steps": 1003, "algorithm": "dqn"}, "learning_starts=1000, train_freq=4 of agent_0: .* after 1004 env"),
        ({"steps": 300, "own": {"agent_1": {"algorithm": "dqn"}}}, "learning_starts=1000, train_freq=4 of agent_1:"),
    ],
)
def test_marl_says_whose_update_needs_more_steps(values, said) -> None:
    def serve(models):
        raise AssertionError("a server was started before")

    with pytest.raises(ConfigError, match=said):
        marl.plan(marl.MarlTraining(**values), serve)


def test_a_plan_of_the_users_is_refused_before_its_folder_is_made(tmp_path) -> None:
    planned = plan(steps=20, warmup=20, collect=2)
    with pytest.raises(ConfigError, match="learning_starts=20, train_freq=2 of learner's pace: .* after 22 env steps"):
        recorded_run(planned, tmp_path / "run", COLUMNS, Settings(), lambda *of: None, serial=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("serial", [True, False])
def test_a_run_whose_time_is_up_before_an_update_says_so_and_fails(tmp_path, serial) -> None:
    planned = plan(steps=10**9, warmup=10**8, budget=Budget(10**9, seconds=0.2))

    def start(**options):
        options["console"] = None
        return recorded_run(planned, tmp_path, COLUMNS, Settings(), lambda outcome, *of: outcome.text, **options)

    with pytest.raises(RunFailed, match="^the time is up, and nothing was learned: .*after 100,000,002 env"):
        carry_out(start, Run(tmp_path, None, serial=serial))
    said = "the time is up, and nothing was learned"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["end"].startswith(said) and summary["learned"] is False
    assert (tmp_path / "report.html").read_text().startswith(said)
    assert f"the run is over: {said}" in (tmp_path / "logs" / "run.log").read_text()


def test_a_run_that_reaches_its_target_before_an_update_says_so(tmp_path) -> None:
    planned = plan(steps=10**6, warmup=10**5, evaluate=10, budget=Budget(10**6, target=("version", 1.0)))
    outcome = run(planned, tmp_path, Rows(), serial=True)
    assert outcome.end is End.TARGET and outcome.text.startswith("the target is reached, and nothing was learned")


@pytest.mark.parametrize("serial", [True, False])
def test_a_trainer_that_never_updates_has_learned_nothing(tmp_path, serial) -> None:
    outcome = run(trainers.plan(steps=100, seconds=0.2, pause=0.1), tmp_path, Rows(), serial=serial)
    assert outcome.text == (
        "the time is up, and nothing was learned: no update was made, so the policy is as it began; let it run for "
        "longer, or lower what its first update waits for (learning_starts, n_steps)"
    )
    assert not outcome.learned and run(trainers.plan(), tmp_path / "whole", Rows(), serial=True).learned


@pytest.mark.parametrize("training", ["photo", "workflow"])
def test_a_study_that_has_learned_nothing_fails(tmp_path, monkeypatch, training) -> None:
    idle = run(trainers.plan(steps=100, seconds=0.1, pause=0.1), tmp_path / "run", Rows(), serial=True)
    module = {"photo": photo, "workflow": workflow}[training]
    monkeypatch.setattr(module, "recorded_run", lambda *of, **options: idle)
    with pytest.raises(RunFailed, match="nothing was learned"):
        if training == "workflow":
            workflow.run(WorkflowTraining(), tmp_path)
        else:
            photo.run(photo.PhotoTraining(perceptual=None), tmp_path, photo.Watcher(), command="", serial=True)


def test_a_resumed_run_has_learned_what_the_part_before_it_learned(tmp_path) -> None:
    assert run(plan(steps=60), tmp_path, Rows(), serial=True).learned
    slow = plan(steps=10**9, budget=Budget(10**9, seconds=0.01), actor={"pause": 0.05})
    assert run(slow, tmp_path, Rows(), serial=True, resume=True).learned
