"""Sorrel's environments, agents and models, unchanged, under the runtime. Needs sorrel: see docs/marl.md."""

from __future__ import annotations

import csv
import os

import numpy as np
import pytest
import torch
from tests.serving import segments

pytest.importorskip("sorrel", reason="sorrel is not installed here (it needs Python 3.12): docs/marl.md says how")

from jurybox.studies.sorrel import run_experiment
from jurybox.studies.sorrel.experiment import SorrelError
from jurybox.studies.sorrel.models import EPOCH_BEGINS, EPOCH_ENDS, TRANSITION, GlobalRandom
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.replay import Replay

pytestmark = pytest.mark.timeout(600)  # importing sorrel takes each process seconds
WORLDS = "tests.integration.marl.sorrel_worlds"
TURNS, EPOCHS = 12, 5


def experiment_settings(folder, **more):
    settings = {"enabled": True, "log_dir": str(folder), "learning_starts": 20, "log_every": 20, **more}
    return {"multiprocessing": settings, "turns": TURNS, "epochs": EPOCHS}


def rows_of(folder, group, kind, *names):
    """Return columns of the rows of a kind over the whole run, in order."""
    checkpoint = Checkpoints(folder / "checkpoints").latest()
    replay = Replay.load(checkpoint.folder / f"replay-{group}.jbr", f"look-{os.getpid()}")
    try:
        part = replay.parts[0]
        kept = part.field_rows("kind", 0, len(replay)) == kind
        return [part.field_rows(name, 0, len(replay))[kept].copy() for name in names]
    finally:
        replay.unlink()
        replay.close()


def transitions_of(folder, group):
    """Return what an agent put into its memory over the whole run, in order."""
    return rows_of(folder, group, TRANSITION, "observation", "action", "reward", "extra_positions")


def metrics(folder):
    with (folder / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def test_processes_make_the_same_trajectory_as_sorrel_when_nothing_is_published(tmp_path, monkeypatch):
    before = segments()
    runs = {}
    for name, serial in (("serial", True), ("parallel", False)):
        arguments = experiment_settings(tmp_path / name, publish_interval=0)
        run_experiment(f"{WORLDS}:hunt", arguments, serial=serial)
        runs[name] = transitions_of(tmp_path / name, "agent_1")
    assert len(runs["serial"][1]) == (EPOCHS + 1) * TURNS and len(set(runs["serial"][1].tolist())) > 1
    assert all(np.array_equal(one, two) for one, two in zip(*runs.values(), strict=True))
    assert segments() <= before

    # Sorrel's own loop with the actor's seed and models that do not change.
    from tests.integration.marl.sorrel_worlds import Hunt, hunt

    from jurybox.studies.sorrel.experiment import Multiprocessing, plan

    monkeypatch.setattr(Hunt, "_model_train_step", lambda self, agent: np.array(0.0))
    seed = int(np.random.SeedSequence([0, 0, 1]).generate_state(1, np.uint64)[0] >> 1)
    with GlobalRandom(seed)():
        env = hunt(multiprocessing={}, turns=TURNS, epochs=EPOCHS)
    assert plan(env, Multiprocessing(), f"{WORLDS}:hunt", {}).roles[0].name == "actor"
    added = []
    memory = env.agents[1].model.memory
    original = memory.add
    memory.add = lambda obs, action, reward, done, **more: (
        added.append((np.array(obs, np.float32).reshape(-1), int(action), float(reward))),
        original(obs, action, reward, done, **more),
    )
    with GlobalRandom(seed)():
        env.run_experiment(animate=False, logging=False, output_dir=tmp_path / "sorrel")
    observations, actions, rewards, _ = runs["serial"]
    assert [action for _, action, _ in added] == actions.tolist()
    assert np.array_equal([observation for observation, _, _ in added], observations)
    assert np.array_equal(np.array([reward for _, _, reward in added], np.float32), rewards)


def test_models_learn_in_processes_of_their_own_and_are_returned(tmp_path):
    arguments = {**experiment_settings(tmp_path, publish_interval=2, max_ahead=8), "epsilon_decay": 0.1}
    experiment = run_experiment(f"{WORLDS}:hunt", arguments)
    turns = (EPOCHS + 1) * TURNS
    assert experiment.outcome.env_steps == turns and experiment.outcome.restarts == 0
    assert experiment.outcome.learner_steps == 2 * ((turns - 20) // 4)
    fresh = run_experiment(f"{WORLDS}:hunt", {**arguments, "multiprocessing": {}, "epochs": -1}).env
    for one, other in zip(experiment.env.agents, fresh.agents, strict=True):
        before, after = (each.model.state_dict()["qnetwork_local.head1.weight"] for each in (other, one))
        assert not torch.equal(before, after)
        assert one.model.epsilon == pytest.approx(0.4 * 0.9 ** (EPOCHS + 1))
    rows = metrics(tmp_path)
    assert any(row.get("loss_agent_0", 0) > 0 for row in rows)


def test_unless_enabled_sorrel_runs_the_experiment_itself(tmp_path):
    arguments = {"multiprocessing": {"enabled": False}, "turns": TURNS, "epochs": 1}
    experiment = run_experiment(
        f"{WORLDS}:hunt", arguments, animate=False, logging=False, output_dir=tmp_path / "sorrel"
    )
    assert experiment.outcome is None and experiment.env.agents[0].model.memory.size == 2 * (TURNS + 1)
    assert (tmp_path / "sorrel").is_dir() and not (tmp_path / "checkpoints").exists()


def test_agents_with_one_model_have_one_learner_and_a_threadsafe_copy_acts_by_new_weights(tmp_path):
    experiment = run_experiment(f"{WORLDS}:safe_hunt", experiment_settings(tmp_path, publish_interval=1), serial=True)
    assert set(experiment.outcome.busy) == {"actor", "learner-agent_0+agent_1"}
    assert experiment.outcome.learner_steps > 0


def test_an_on_policy_model_learns_from_whole_epochs_and_others_need_not_learn(tmp_path):
    experiment = run_experiment(f"{WORLDS}:on_policy_hunt", experiment_settings(tmp_path, max_ahead=0))
    assert set(experiment.outcome.busy) == {"actor", "learner-agent_0"}
    assert experiment.outcome.learner_steps == EPOCHS + 1, "one for each epoch, like in sorrel"
    assert any("loss_agent_0" in row for row in metrics(tmp_path))


def test_a_wrong_setting_is_named(tmp_path):
    with pytest.raises(SorrelError, match="publish_every"):
        run_experiment(f"{WORLDS}:hunt", experiment_settings(tmp_path, publish_every=3))


def test_a_name_that_no_model_has_gets_no_publish_mode(tmp_path):
    with pytest.raises(SorrelError, match="names agent_7; the models that learn are agent_0, agent_1"):
        run_experiment(f"{WORLDS}:hunt", experiment_settings(tmp_path, publish_mode={"agent_7": "snapshot"}))


@pytest.mark.parametrize(("world", "group"), [("hunt", "agent_1"), ("on_policy_hunt", "agent_0")])
def test_an_actor_that_dies_begins_its_epoch_again(tmp_path, world, group):
    settings = experiment_settings(tmp_path, publish_mode={group: "snapshot"}, max_ahead=0)
    arguments = {**settings, "make": world, "mark": str(tmp_path / "died"), "at": 2 * TURNS + 5}
    experiment = run_experiment(f"{WORLDS}:dying", arguments)
    turns = (EPOCHS + 1) * TURNS
    assert (experiment.outcome.restarts, experiment.outcome.env_steps) == (1, turns)
    (begun,), (ended,) = (rows_of(tmp_path, group, kind, "epoch") for kind in (EPOCH_BEGINS, EPOCH_ENDS))
    assert begun.tolist() == [0, 1, 2, 2, 3, 4, 5]
    assert ended.tolist() == [0, 1, 2, 3, 4], "the turns of the dead actor count, so the last epoch is cut"
    if group == "agent_0":
        assert experiment.outcome.learner_steps == len(ended), "it learns from whole epochs alone"
