"""A search with CybORG, whose random state is in no checkpoint: it is resumed, and one of its workers is killed."""

from __future__ import annotations

import json
import os
import signal
from functools import partial

import pytest
from tests.unit.studies.workflow.cyborg_shape import make
from tests.unit.studies.workflow.test_trainer import SETTINGS, Stopped

from jurybox.studies.workflow import environments, trainer
from jurybox.studies.workflow import train as workflow_run
from jurybox.studies.workflow.cage import CyborgEnv
from jurybox.studies.workflow.trainer import WorkflowTrainer

CYBORG = SETTINGS.changed(env="cyborg", workers=1, total_episodes=40, mixed_share=0.0)
FEW = CYBORG.changed(envs=2, total_episodes=10)


@pytest.fixture(autouse=True)
def shaped(monkeypatch):
    monkeypatch.setattr(environments, "_cyborg", lambda settings: partial(CyborgEnv, episode_length=12, make=make))


def test_a_resumed_search_plays_other_episodes_than_before(tmp_path, monkeypatch) -> None:
    returns, play, evaluate, advance = [], trainer.play, trainer.play_episodes, WorkflowTrainer.advance

    def played(*arguments, **options):
        rollout, episodes = play(*arguments, **options)
        returns.extend(episodes.returns)
        return rollout, episodes

    def evaluated(*arguments, **options):
        episodes = evaluate(*arguments, **options)
        returns.extend(each.total for each in episodes)
        return episodes

    def stops(self):
        if self.updates == 2:
            raise Stopped
        return advance(self)

    monkeypatch.setattr(trainer, "play", played)
    monkeypatch.setattr(trainer, "play_episodes", evaluated)
    monkeypatch.setattr(workflow_run, "_CHECKPOINT_EVERY", 1)
    monkeypatch.setattr(WorkflowTrainer, "advance", stops)
    with pytest.raises(Stopped):
        workflow_run.run(CYBORG, tmp_path, serial=True)
    monkeypatch.setattr(WorkflowTrainer, "advance", advance)
    workflow_run.run(CYBORG, tmp_path, resume=True, serial=True)
    assert len(returns) > 80 and len(set(returns)) == len(returns)


@pytest.mark.runs
def test_replaced_workers_are_counted_and_the_count_survives_a_resume(tmp_path, monkeypatch) -> None:
    made, make_all = [], environments.make

    def kept(*arguments, **options):
        made.append(make_all(*arguments, **options))
        return made[-1]

    killed = []

    def kill_once(shared):
        if shared.scoreboard.env_steps >= 2 * 12 and not killed:
            killed.append(made[0][0][0].pids[0])
            os.kill(killed[0], signal.SIGKILL)

    def restarts():
        return json.loads((tmp_path / "summary.json").read_text())["env_worker_restarts"]

    monkeypatch.setattr(environments, "make", kept)
    workflow_run.run(FEW, tmp_path, watch=kill_once)
    assert restarts() == 1
    workflow_run.run(FEW, tmp_path, resume=True, serial=True)
    assert restarts() == 1


@pytest.mark.runs
def test_a_search_goes_on_in_a_moved_folder_with_another_number_of_workers(tmp_path, monkeypatch) -> None:
    workflow_run.run(FEW, tmp_path / "run", serial=True)
    folder = (tmp_path / "run").rename(tmp_path / "moved")
    workflow_run.run(FEW.changed(workers=2, total_episodes=14), folder, resume=True)
    assert json.loads((folder / "summary.json").read_text())["episodes"] >= 14
