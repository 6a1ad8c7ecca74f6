"""Plans run by Ray on two nodes: the runs do not depend on where their roles are."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import replace

import numpy as np
import pytest
from tests.integration.cluster.clusters import nodes, placed, ray
from tests.unit.runtime.toys import Rows, plan

from jurybox.cluster.launcher import RayLauncher
from jurybox.cluster.traffic import Traffic
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.replay import Replay
from jurybox.training.runtime.plan import End, Timeouts
from jurybox.training.runtime.progress import Timeline
from jurybox.training.runtime.run import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENT = Timeouts(start=120, actor=60, learner=60, stall=60, back_off=(0.2,))


def test_two_nodes_make_the_steps_of_one_and_share_no_memory(tmp_path):
    rows, seen = Rows(), set()
    with nodes("away") as cluster, RayLauncher(cluster.address) as launcher:
        placed_plan = placed(
            plan(steps=3000, actors=2, slack=400, evaluate=1500, save_every=2000, timeouts=PATIENT),
            actor="away", learner="head", judge="away",
        )  # fmt: skip
        outcome = run(
            placed_plan, tmp_path, rows, launcher=launcher, watch=lambda _: seen.update(cluster.segments("away"))
        )
        assert cluster.segments("away") == cluster.segments("head") == set()
    assert outcome.end is End.STEPS and outcome.restarts == 0
    assert 3000 <= outcome.env_steps <= 3400, "counters of other nodes are a moment old"
    assert outcome.learner_steps == (3000 - 20) // 2
    assert outcome.evaluation["eval_version"] == 1 + outcome.learner_steps // 5, "the last weights reached that node"
    assert any("run-0" in name for name in seen) and any("weights" in name for name in seen), (
        "it has its own scoreboard"
    )
    assert any("loss" in values for _, values in rows)
    lanes = {lane.role: lane for lane in Timeline.read(tmp_path / "timeline.json").lanes}
    assert all(lane.intervals for lane in lanes.values()), "those of the other node came, too"
    times = [each for lane in lanes.values() for start, end, _ in lane.intervals for each in (start, end)]
    assert min(times) == 0.0 and max(times) < outcome.seconds + 1.0, "on one clock"
    for name in ("actor-0", "actor-1", "learner", "judge"):
        assert "begins its life 1" in (tmp_path / "logs" / f"{name}.log").read_text()
    checkpoint = Checkpoints(tmp_path / "checkpoints").latest()
    assert checkpoint.env_steps == outcome.env_steps


def test_every_row_of_another_node_reaches_the_learner_s_replay(tmp_path):
    with nodes("away") as cluster, RayLauncher(cluster.address) as launcher:
        placed_plan = placed(plan(steps=2000, actors=2, slack=300, timeouts=PATIENT), actor="away", learner="head")
        outcome = run(placed_plan, tmp_path, Rows(), launcher=launcher)
    saved = Checkpoints(tmp_path / "checkpoints").latest().folder / "replay-rows.jbr"
    replay = Replay.load(saved, f"look-{secrets.token_hex(4)}")
    try:
        assert len(replay) == outcome.env_steps
        values = replay.sample(len(replay), replace=False)["value"]
        assert len(np.unique(values)) == outcome.env_steps, "each row arrived once"
    finally:
        replay.unlink()
        replay.close()


def test_a_learner_away_from_the_orchestrator_is_saved_and_resumed(tmp_path):
    with nodes("away") as cluster, RayLauncher(cluster.address) as launcher:
        placed_plan = placed(plan(steps=600, timeouts=PATIENT), actor="head", learner="away")
        first = run(placed_plan, tmp_path, Rows(), launcher=launcher)
        more = placed(plan(steps=1000, timeouts=PATIENT), actor="head", learner="away")
        second = run(more, tmp_path, Rows(), resume=True, launcher=launcher)
    assert first.learner_steps == (600 - 20) // 2 and second.learner_steps == (1000 - 20) // 2
    assert "with 290 steps behind it" in (tmp_path / "logs" / "learner.log").read_text(), "it continued from there"


@pytest.mark.parametrize("role", ["actor", "learner"])
def test_a_node_dies_with_its_workers_and_the_run_continues_elsewhere(tmp_path, role):
    other = {"actor": "learner", "learner": "actor"}[role]
    with nodes() as cluster, RayLauncher(cluster.address) as launcher:
        doomed = cluster.add("away")
        placed_plan = plan(steps=2500, slack=200, actor={"pause": 0.002}, timeouts=PATIENT)
        placed_plan = placed(placed_plan, **{other: "head", role: "away"})
        killed = []

        def watch(shared):
            if not killed and shared.scoreboard.env_steps > 300:
                killed.append(shared.scoreboard.env_steps)
                # Not in a thread, where Ray starts no nodes: this blocks the orchestrator for some seconds.
                cluster.kill(doomed)
                cluster.add("away")

        outcome = run(placed_plan, tmp_path, Rows(), launcher=launcher, watch=watch)
    assert killed and outcome.end is End.STEPS and outcome.env_steps >= 2500
    assert outcome.restarts == 1, "only the node's role"
    log, names = (tmp_path / "logs" / "run.log").read_text(), {"actor": "actor-0", "learner": "learner"}
    assert f"{names[role]} " in log and "is gone with its machine" in log and "failed" not in log
    lives = {
        each: (tmp_path / "logs" / f"{name}.log").read_text().count("begins its life") for each, name in names.items()
    }
    assert lives == {role: 2, other: 1}


def test_a_host_that_cannot_be_made_is_counted_as_a_failure_and_says_why(tmp_path):
    timeouts = replace(PATIENT, failures=2)
    with nodes("away") as cluster, RayLauncher(cluster.address) as launcher:
        shutil.rmtree(cluster.folder("away"))  # its shared memory, as if there were no room
        placed_plan = placed(plan(steps=200, timeouts=timeouts), actor="away", learner="head")
        outcome = run(placed_plan, tmp_path, Rows(), launcher=launcher)
    log = (tmp_path / "logs" / "run.log").read_text()
    assert outcome.end is End.FAILED and "2 times in a row" in outcome.text
    assert "actor-0 failed: " in log and str(cluster.folder("away")) in log and "is gone with its machine" not in log
    assert "Host.__init__" in (tmp_path / "logs" / "actor-0.log").read_text()


def test_a_place_that_cannot_be_made_is_counted_as_a_failure_and_says_why(tmp_path, monkeypatch):
    class Broken:
        def __init__(self, *_):
            raise OSError("there is no room for the files of a role")

        def where(self):
            """Never answers."""

        close = kill = where

    monkeypatch.setattr("jurybox.cluster.launcher.RolePlace", Broken)
    with RayLauncher() as launcher:
        outcome = run(plan(timeouts=replace(PATIENT, failures=2)), tmp_path, Rows(), launcher=launcher)
    assert outcome.end is End.FAILED and "2 times in a row" in outcome.text
    assert "failed: OSError: there is no room for the files of a role" in (tmp_path / "logs" / "run.log").read_text()


def test_a_machine_that_is_lost_while_its_replay_is_saved_costs_the_checkpoint_alone(tmp_path, monkeypatch):
    saves = []

    async def replay_file(self, name):
        saves.append(name)
        if len(saves) == 1:
            raise ray.exceptions.RayActorError
        return await of_traffic(self, name)

    of_traffic = Traffic.replay_file
    monkeypatch.setattr(Traffic, "replay_file", replay_file)
    with RayLauncher() as launcher:
        slow = plan(steps=400, actor={"pause": 0.005}, save_every=100, timeouts=PATIENT)
        outcome = run(slow, tmp_path, Rows(), launcher=launcher)
    assert outcome.end is End.STEPS and outcome.restarts == 0
    assert "the machine that samples replay 'rows' did not send it" in (tmp_path / "logs" / "run.log").read_text()
    assert Checkpoints(tmp_path / "checkpoints").latest().env_steps == outcome.env_steps
