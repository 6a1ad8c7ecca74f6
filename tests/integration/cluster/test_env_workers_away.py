"""Env workers of trainings without plans, on other nodes than the learner: same episodes as on one machine."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict

import pytest
from tests.integration.cluster.clusters import nodes
from tests.serving import serving

from jurybox.cluster.env_workers import Needs
from jurybox.studies.photo.environment import PhotoConfig
from jurybox.studies.photo.learning import METRICS, PhotoTraining, make_environments, plan
from jurybox.studies.workflow import train as workflow_run
from jurybox.studies.workflow.settings import WorkflowTraining
from jurybox.training.run_folder import RunLog
from jurybox.training.runtime.run import run
from jurybox.training.trainings.launchers import spread_named

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

AWAY = Needs(0.5, {"away": 1})
SEARCH = WorkflowTraining(
    envs=6, total_episodes=60, episode_length=20, max_train_episodes_per_env=2, evaluation_episodes=12, workers=2
)
MODEL = {"photo": {"factory": "tests.unit.studies.photo.cheap_juror:middle_grey", "max_batch": 8, "rows": 16}}
PHOTO = PhotoTraining(steps=32, envs=4, rollout=16, n_epochs=1, checkpoint_every=16)


def columns(folder, *names):
    with (folder / "metrics.csv").open() as file:
        return [tuple(row[name] for name in names) for row in csv.DictReader(file) if row["return_mean"]]


def learned(folder):
    return columns(folder, "return_mean", "return_std", "compliance", "fixes", "policy_loss", "value_loss")


def stops(after):
    """Interrupts a training after some steps, as if its process were killed."""

    def watch(shared):
        if made(shared) >= after:
            raise InterruptedError

    return watch


def test_a_search_with_its_networks_on_another_node_learns_the_same(tmp_path):
    with nodes("away") as cluster, spread_named("ray", cluster.address, AWAY) as spread:
        for name, settings in (("whole", SEARCH), ("halves", SEARCH.changed(halves=True))):
            workflow_run.run(settings.changed(workers=None), tmp_path / name / "local")
            workflow_run.run(settings, tmp_path / name / "ray", spread=spread)
            local, ray = (learned(tmp_path / name / launcher) for launcher in ("local", "ray"))
            assert len(local) == 10 and local == ray
        longer = SEARCH.changed(total_episodes=90)
        with pytest.raises(InterruptedError):  # there is a checkpoint after ten updates
            workflow_run.run(longer, tmp_path / "first here", watch=stops(72 * 20), spread=spread)
        assert learned(tmp_path / "whole" / "local") != learned(tmp_path / "halves" / "local")
    here = longer.changed(workers=None)
    workflow_run.run(here, tmp_path / "first here", resume=True)
    workflow_run.run(here, tmp_path / "at once")
    assert len(learned(tmp_path / "at once")) == 15
    assert learned(tmp_path / "at once") == learned(tmp_path / "first here"), "begun on a cluster, ended without"
    local, ray = (
        json.loads((tmp_path / "whole" / launcher / "summary.json").read_text()) for launcher in ("local", "ray")
    )
    assert local["return_mean"] == ray["return_mean"] and local["workflow"] == ray["workflow"]
    assert ray["env_worker_restarts"] == 0


def train(settings, folder, watch=None, *, spread=None):
    with RunLog(folder, [*METRICS, "env_worker_restarts", "episodes_cut"]) as log:
        run(plan(settings, spread=spread), folder, log, serial=True, watch=watch)


def made(shared):
    return shared.scoreboard.env_steps + shared.scoreboard.under_way


class KillsOnce:
    """Kills a node in the middle of a training, and adds another."""

    def __init__(self, cluster, doomed, at):
        self.cluster, self.doomed, self.at = cluster, doomed, at

    def __call__(self, shared):
        if self.doomed is not None and made(shared) >= self.at:
            doomed, self.doomed = self.doomed, None
            self.cluster.kill(doomed)
            self.cluster.add("away")


def test_a_search_continues_when_the_node_of_its_networks_dies(tmp_path):
    with nodes() as cluster:
        doomed = cluster.add("away")
        with spread_named("ray", cluster.address, AWAY) as spread:
            workflow_run.run(SEARCH, tmp_path, watch=KillsOnce(cluster, doomed, 18 * 20), spread=spread)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["episodes"] == 60 and summary["env_worker_restarts"] == 2, "both workers were on it"


def test_photos_are_edited_on_another_node_and_scored_over_the_network(tmp_path):
    with nodes() as cluster, serving(tmp_path / "server", MODEL, grpc="127.0.0.1:0") as server:
        settings = PHOTO.changed(seed=3, environment=PhotoConfig(address=server.address))
        train(settings, tmp_path / "local")
        doomed = cluster.add("away")
        with spread_named("ray", cluster.address, AWAY) as spread:
            environments = make_environments(settings, ray=asdict(AWAY))
            addresses = {scorer._scorer.address for scorer in environments.get_attr("scorer")}
            assert addresses == {f"grpc://{server.listening('grpc')}"}
            environments.close()
            train(settings, tmp_path / "ray", spread=spread)
            train(settings, tmp_path / "killed", KillsOnce(cluster, doomed, 20), spread=spread)
    names = ("episodes", "return_mean", "policy_loss", "value_loss", "score_after")
    assert len(columns(tmp_path / "local", *names)) == 2
    assert columns(tmp_path / "local", *names) == columns(tmp_path / "ray", *names)
    ((steps, restarts, cut),) = columns(tmp_path / "killed", "env_steps", "env_worker_restarts", "episodes_cut")[-1:]
    assert (steps, float(restarts), float(cut)) == ("32", 2, 4)
