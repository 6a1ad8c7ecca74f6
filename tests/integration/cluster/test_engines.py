"""Engines in a Ray cluster: found by name from any node, supplied with the run's weights, found again after a move."""

from __future__ import annotations

import collections
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.integration.cluster.clusters import nodes, placed, ray
from tests.unit.cluster.test_endpoints import answers
from tests.unit.studies.hockey.hockey_runs import Nothing, settings

from jurybox.client import Error
from jurybox.cluster import connection, engines
from jurybox.cluster.launcher import RayLauncher
from jurybox.cluster.traffic import Traffic
from jurybox.studies.hockey.served import ENGINE, engine_of
from jurybox.studies.hockey.train import plan, sizes_of
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.replay import Replay
from jurybox.training.runtime.plan import End, Timeouts
from jurybox.training.runtime.run import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PATIENT = Timeouts(start=180, actor=120, learner=120, stall=180, back_off=(0.2,))


def test_an_engine_is_found_by_its_name_from_every_node_and_found_again_when_its_node_dies():
    def doubled(name: str) -> tuple[str, float]:
        """Return the kind of endpoint that a caller here uses, and the answer through it."""
        with engines.connect(name, timeout=120) as server, server.model("double") as model:
            return server.address.partition(":")[0], float(model(np.full(4, 3.0, np.float32))[0])

    with nodes() as cluster:
        doomed = cluster.add("away")
        connection.connect(cluster.address)
        try:
            models = {"double": {"factory": "tests.models:affine", "args": {"offset": 0.0}}}
            engines.start("judge", models, resources={"away": 1}, timeout=150)
            remote_call = ray.remote(doubled).options(resources={"away": 1}, num_cpus=0)
            assert doubled("judge") == ("grpc", 6.0), "another machine, over the network"
            assert ray.get(remote_call.remote("judge"), timeout=100) == ("ipc", 6.0), "its own, through shared memory"

            client = engines.connect("judge")
            model = client.model("double")
            cluster.kill(doomed)
            cluster.add("away")
            with pytest.raises(Error) as caught:
                for _ in range(100):  # its server has to be stopped, which takes a moment
                    model(np.full(4, 3.0, np.float32), timeout=2.0)
                    time.sleep(0.1)
            assert str(caught.value)
            client.close()
            assert doubled("judge") == ("grpc", 6.0), "another server by the same name"
        finally:
            engines.stop("judge")
            connection.disconnect()


def rows_of(folder) -> int:
    saved = Checkpoints(folder / "checkpoints").latest().folder / "replay-rows.jbr"
    replay = Replay.load(saved, f"look-{time.time_ns()}")
    try:
        return int(replay.added)
    finally:
        replay.unlink()
        replay.close()


def test_hockey_on_three_nodes_counts_right_and_distributes_past_selves(tmp_path):
    s = settings(steps=4000, workers=2, snapshot_every=3, max_ahead=600, league={"pool": 3, "anchor_share": 0.1})
    with nodes("left", "right") as cluster, RayLauncher(cluster.address) as launcher:
        placed_plan = replace(plan(s, tmp_path), timeouts=PATIENT)
        placed_plan = placed(
            placed_plan, **{"actor-0": "left", "actor-1": "right", "learner": "head", "evaluator": "right"}
        )
        outcome = run(placed_plan, tmp_path, Nothing(), launcher=launcher)
        assert all(cluster.segments(name) == set() for name in ("head", "left", "right"))
    log = (tmp_path / "logs" / "run.log").read_text()
    assert outcome.end is End.STEPS and outcome.restarts == 0, log
    assert 4000 <= outcome.env_steps <= 4700, "counters of other nodes are a moment old"
    assert outcome.learner_steps == (4000 - 300) // 10
    # Each step has two rows, and each side one at a match's end; unfinished matches have none.
    assert 2 * outcome.env_steps <= rows_of(tmp_path) <= 2 * (outcome.env_steps + outcome.episodes) + 64
    assert len(list((tmp_path / "pool").glob("*.weights"))) >= 2, "past selves played on nodes that did not make them"


@pytest.fixture
def adoptions(monkeypatch):
    """Count how often each node adopts each publication."""
    adoptions, adopt = collections.Counter(), Traffic._adopt

    async def counting(self, member, channel, publication):
        await adopt(self, member, channel, publication)
        adoptions[member.node, member.known[channel]] += 1

    monkeypatch.setattr(Traffic, "_adopt", counting)
    return adoptions


def test_a_served_hockey_run_continues_when_the_engines_node_dies(tmp_path, adoptions):
    s = settings(
        steps=6000, workers=2, policy="served", snapshot_every=3, max_ahead=600,
        league={"pool": 3, "anchor_share": 0.1},
    )  # fmt: skip
    killed = []
    with nodes("left") as cluster, RayLauncher(cluster.address) as launcher:
        doomed = cluster.add("right")
        placed_plan = replace(plan(s, tmp_path, engine=ENGINE), timeouts=PATIENT)
        placed_plan = placed(
            placed_plan, **{"actor-0": "left", "actor-1": "head", "learner": "head", "evaluator": "head"}
        )
        spec = replace(engine_of(s, sizes_of(s)), resources={"right": 1})
        launcher.serve(spec, tmp_path / "server.log")

        def watch(shared):
            if not killed and shared.scoreboard.env_steps > 2000:
                killed.append(shared.scoreboard.env_steps)
                cluster.kill(doomed)
                cluster.add("right")

        outcome = run(placed_plan, tmp_path, Nothing(), launcher=launcher, watch=watch)
        assert answers(lambda: cluster.segments("left") == set())
    log = (tmp_path / "logs" / "run.log").read_text()
    assert killed and outcome.end is End.STEPS and outcome.env_steps >= 6000, log
    assert outcome.restarts == 0, "only the engine was on that node, and collectors found it again: " + log
    assert log.count("engine hockey serves on node") == 2, log
    assert ": engine hockey" not in log, "no role says it"
    assert "looked for again" in (tmp_path / "logs" / "actor-0.log").read_text()
    assert 2 * outcome.env_steps <= rows_of(tmp_path)
    assert adoptions and max(adoptions.values()) == 1, "each publication reached each node once"
