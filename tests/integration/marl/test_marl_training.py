"""The multi-agent training: the same trajectory in one process or several, and a run folder with its results."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from tests.serving import segments
from typer.testing import CliRunner

from jurybox.training import interrupts
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.cli import train as train_app
from jurybox.training.replay import Replay
from jurybox.training.runtime.run import run
from jurybox.training.runtime.settings import changes_of
from jurybox.training.trainings.marl import ConfigError, MarlTraining, plan
from jurybox.training.trainings.marl_run import train

SMALL = {
    "algorithm": "dqn",
    "steps": 60,
    "learning_starts": 20,
    "batch_size": 8,
    "hidden": (16, 16),
    "env_args": {"turns": 15, "height": 9, "width": 9, "gems": (4, 2, 1)},
    "evaluation_episodes": 1,
    "exploration_initial_eps": 0.3,
    "exploration_final_eps": 0.3,
    "log_every": 20,
}


class Nothing:
    def scalars(self, step, values): ...


def rows(folder, group):
    """Return what a group's replay contained at the end, in order."""
    checkpoint = Checkpoints(folder / "checkpoints").latest()
    replay = Replay.load(checkpoint.folder / f"replay-{group}.jbr", f"look-{os.getpid()}")
    try:
        part = replay.parts[0]
        return {name: part.field_rows(name, 0, len(replay)).copy() for name in ("observation", "action", "reward")}
    finally:
        replay.unlink()
        replay.close()


@pytest.mark.runs
def test_processes_make_the_same_trajectory_as_one_process_when_publication_is_frozen(tmp_path):
    before = segments()
    settings = MarlTraining(**SMALL, publish_interval=0, share=(("agent_0", "agent_1"),))
    run(plan(settings), tmp_path / "serial", Nothing(), serial=True)
    run(plan(settings), tmp_path / "parallel", Nothing())
    one, two = (rows(tmp_path / name, "agent_0+agent_1") for name in ("serial", "parallel"))
    assert len(one["action"]) >= 2 * 56, "two agents; the last action of each has no reward yet"
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert len(set(one["action"].tolist())) > 2
    assert segments() <= before


@pytest.mark.runs
def test_a_resumed_serial_training_depends_on_its_checkpoint_alone(tmp_path):
    def settings(name, steps):
        return MarlTraining(**{**SMALL, "steps": steps, "algorithm": "iqn"}, log_dir=tmp_path / name)

    train(settings("one", 40), serial=True)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        outcome = train(settings(name, 80), serial=True, resume=True)
        assert outcome.env_steps == 80 and outcome.learner_steps == 2 * 15
    first, second = (Checkpoints(tmp_path / name / "checkpoints").existing() for name in ("one", "two"))
    for learner in ("learner-agent_0", "learner-agent_1"):
        one, two = first.state(learner), second.state(learner)
        assert one["updates"] == two["updates"] == 15
        one, two = one["learner"]["acting"], two["learner"]["acting"]
        assert all(np.array_equal(one[name], two[name]) for name in one)
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["env_steps"] == 80 and "eval_return_agent_1" in summary["evaluation"]
    report = (tmp_path / "one" / "report.html").read_text()
    assert "agent_1" in report and "Random play" in report
    assert (tmp_path / "one" / "metrics.csv").read_text().count("\n") > 4


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_several_worlds_feed_the_same_learners(tmp_path, algorithm):
    ppo_settings = {"ppo": {"n_steps": 20, "n_epochs": 1}, "algorithm": "ppo"} if algorithm == "ppo" else {}
    settings = {
        name: value for name, value in SMALL.items() if not ppo_settings or not name.startswith(("expl", "learning_s"))
    }
    outcome = train(MarlTraining(**{**settings, **ppo_settings}, envs=3, log_dir=tmp_path), serial=True)
    assert set(outcome.busy) >= {"actor-0", "actor-1", "actor-2"} and outcome.env_steps == 60
    assert outcome.learner_steps > 0 and outcome.episodes >= 3
    taken = Checkpoints(tmp_path / "checkpoints").existing()
    worlds = [taken.document["roles"][f"actor-{number}"][1][0] for number in range(3)]
    assert worlds == [20, 20, 20]
    if ppo_settings:
        replay = Replay.load(taken.folder / "replay-agent_0.jbr", f"worlds-{os.getpid()}")
        try:
            assert set(replay.parts[0].field_rows("environment", 0, len(replay)).tolist()) == {0, 2, 4}
        finally:
            replay.unlink()
            replay.close()


def test_learners_wait_until_rows_of_many_worlds_can_be_sampled(tmp_path):
    # The worlds take turns: after 32 turns each agent has one row in each world, of which none has a successor.
    changed = {"learning_starts": 1, "steps": 200, "envs": 32, "share": (("agent_0", "agent_1"),)}
    outcome = train(MarlTraining(**{**SMALL, **changed}, log_dir=tmp_path), serial=True)
    assert outcome.env_steps == 200 and outcome.learner_steps == 200 // 4


def test_each_world_has_a_worker():
    assert MarlTraining(workers=2).n_envs == MarlTraining(envs=2).n_envs == 2
    with pytest.raises(ValueError, match="each world has an actor process of its own"):
        MarlTraining(workers=2, envs=4)


def test_options_override_settings_of_the_file(tmp_path):
    config = tmp_path / "marl.toml"
    config.write_text('publish_mode = "snapshot"\nbatch_size = 32\n[env_args]\nturns = 7\n')
    settings = MarlTraining.read(
        config, changes_of(["batch_size = 16", "exploration_fraction = 0.5"], {"agents": 3, "seed": None})
    )
    assert (settings.publish_mode, settings.batch_size, settings.agents, settings.seed) == ("snapshot", 16, 3, 0)
    assert settings.world_settings == {"agents": 3, "turns": 7}
    # The document's own defaults.
    plain = MarlTraining(algorithm="dqn")
    assert (plain.buffer_size, plain.batch_size, plain.train_freq) == (10_000, 64, 4)
    assert (plain.rate, plain.log_every, plain.publish_mode) == (0.00025, 100, "double_buffer")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["batch = 3"], "batch"),
        (["batch_size = 0"], "batch_size"),
        (["batch_size"], "NAME=VALUE"),
        (["environment = 'a:b'"], "environment is called env here"),
        (["world = {turns = 3}"], "world is called env_args here"),
        (["frames = 2"], "frames is called n_stack here"),
    ],
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        MarlTraining.read(None, changes_of(changes, {}))
    with pytest.raises(ConfigError, match="agent_7"):
        plan(MarlTraining(share=(("agent_0", "agent_7"),)))


def test_the_state_of_a_missing_run_is_refused(tmp_path, monkeypatch):
    for take in ("take_over", "ignore_from_now_on"):  # the signals of this process are pytest's
        monkeypatch.setattr(interrupts, take, lambda *_: None)
    done = CliRunner().invoke(train_app, ["marl", "--debug-state", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "no run is going on" in done.output


def test_ppo_is_the_default_and_an_agent_may_have_its_own_publication_mode():
    settings = MarlTraining(own={"agent_1": {"publish_mode": "snapshot"}})
    assert (settings.algorithm, settings.rate) == ("ppo", 0.001)
    planned = plan(settings)
    assert {channel.name: channel.mode for channel in planned.channels} == {
        "agent_0": "double_buffer",
        "agent_1": "snapshot",
    }
    assert planned.save_every == 10_000 and planned.roles[-1].evaluate_every == 20_000
    assert planned.pace.max_ahead == settings.ppo.n_steps
    assert plan(MarlTraining(algorithm="dqn")).pace.max_ahead is None
