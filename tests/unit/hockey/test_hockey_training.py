"""The serial training: what it writes, what it learns from, and going on exactly where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from jurybox.protocol.segment import directory
from jurybox.training.algorithms.league import League, LeagueSettings
from jurybox.training.algorithms.td3 import TD3Settings
from jurybox.training.environments.hockey import HockeyGame
from jurybox.training.recipes import hockey_checkpoint
from jurybox.training.recipes.checkpoints import CheckpointError
from jurybox.training.recipes.hockey_collector import Collector, make_replay, shaped
from jurybox.training.recipes.hockey_evaluation import evaluate
from jurybox.training.recipes.hockey_opponents import Opponents
from jurybox.training.recipes.hockey_serial import COLUMNS, SerialHockey
from jurybox.training.recipes.hockey_settings import HockeyTraining, Shaping
from jurybox.training.replay import Windows
from jurybox.training.runlog import RunLog

LEARNER = TD3Settings(hidden_actor=(16, 16), hidden_critic=(16, 16))


def settings(**changes) -> HockeyTraining:
    options = {
        "games": 2,
        "warmup": 300,
        "ratio": 0.1,
        "batch": 16,
        "capacity": 5000,
        "learner": LEARNER,
        "league": LeagueSettings(pool=2, least_games=2),
        "snapshot_every": 4,
        "evaluate_every": 10**9,
        "evaluation_games": 2,
        "checkpoint_every": 10**9,
        **changes,
    }
    return HockeyTraining(**options)


def tensors(training: SerialHockey) -> list[torch.Tensor]:
    learner = training.learner
    networks = (learner.actor, learner.critic, learner.target_actor, learner.target_critic)
    moments = [
        value
        for optimizer in ("actor_optimizer", "critic_optimizer")
        for state in learner.state_dict()[optimizer]["state"].values()
        for value in state.values()
    ]
    return [*(p.detach().clone() for network in networks for p in network.parameters()), *(m.clone() for m in moments)]


@pytest.mark.parametrize("prioritized", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_that_goes_on_computes_bit_for_bit_what_it_would_have(tmp_path: Path, prioritized: bool) -> None:
    s = settings(prioritized=prioritized)
    with RunLog(tmp_path / "straight", COLUMNS) as log, SerialHockey(s, log) as straight:
        for _ in range(10):
            straight.round()
        expected, steps = tensors(straight), straight.env_steps
        table = straight.league.matrix.table(straight.league.players)
        rows = len(straight.replay)
    with RunLog(tmp_path / "halves", COLUMNS) as log, SerialHockey(s, log) as first:
        for _ in range(5):
            first.round()
        first.save("last")
    with RunLog(tmp_path / "halves", COLUMNS, resume_at=first.env_steps) as log:
        checkpoint = hockey_checkpoint.read(tmp_path / "halves" / "checkpoints")
        with SerialHockey(s, log, resume=checkpoint) as second:
            assert second.learner.updates > 0 and second.league.pool
            for _ in range(5):
                second.round()
            assert second.env_steps == steps and second.episodes == 20 and len(second.replay) == rows
            for a, b in zip(expected, tensors(second), strict=True):
                assert torch.equal(a, b)
            np.testing.assert_array_equal(table, second.league.matrix.table(second.league.players))


def test_a_training_leaves_metrics_checkpoints_and_a_summary_and_no_shared_memory(tmp_path: Path) -> None:
    before = set(os.listdir(directory()))
    s = settings(steps=1500, evaluate_every=700, checkpoint_every=1000)
    with RunLog(tmp_path, COLUMNS) as log, SerialHockey(s, log) as training:
        training.train()
        assert training.env_steps >= 1500
        rows = log.rows()
    assert set(os.listdir(directory())) == before
    assert {"wins_weak", "losses_strong", "critic_loss", "cpu_seconds"} <= set(rows[-1])
    assert rows[-1]["ties_weak"] + rows[-1]["wins_weak"] + rows[-1]["losses_weak"] == pytest.approx(1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["env_steps"] == training.env_steps and summary["learner_steps"] == training.learner.updates > 50
    last = hockey_checkpoint.read(tmp_path / "checkpoints", "last")
    assert last.counted["env_steps"] == training.env_steps and last.replay is not None
    best = hockey_checkpoint.read(tmp_path / "checkpoints", "best")
    assert best.replay == tmp_path / "checkpoints" / "best" / ".." / "last" / "replay.jbr"


def test_a_time_budget_ends_a_training(tmp_path: Path) -> None:
    now = iter(range(1000))
    with (
        RunLog(tmp_path, COLUMNS) as log,
        SerialHockey(settings(seconds=3.0), log, clock=lambda: float(next(now))) as training,
    ):
        training.train()
    assert 0 < training.episodes < 20


def test_rows_hold_what_both_players_saw_did_and_got() -> None:
    s = settings(shaping=Shaping(touch=0.5))
    seen: list[np.ndarray] = []
    with make_replay(f"both-{os.getpid()}", s, 18, 4) as replay:
        collector = Collector([HockeyGame(), HockeyGame()], replay, s, seen.append)
        results = collector.round(0, None, League(s.league), Opponents())
        steps = sum(result.steps for result in results)
        assert len(seen[0]) == 2 * steps
        batch = replay.sample(500, windows=Windows(n_step=1, next="observation"))
        own, following = batch["observation"], batch["next_observation"]
        moved = following[:, :2] - own[:, :2]
        np.testing.assert_allclose(moved, following[:, 3:5] / 50, atol=0.12)  # by the turning body's offset at most
        assert (np.abs(batch["action"]) <= 1).all()
        ended = batch["discount"] == 0
        assert (np.abs(batch["reward"][ended]) > 9).all() and (np.abs(batch["reward"][~ended]) < 9).all()


def test_rows_of_the_learner_alone_where_that_is_asked_for() -> None:
    s = settings(both_sides=False)
    with make_replay(f"own-{os.getpid()}", s, 18, 4) as replay:
        collector = Collector([HockeyGame()], replay, s, lambda rows: None)
        (result,) = collector.round(0, None, League(s.league), Opponents())
        rows = replay.added
    # A game cut short keeps its last observation as well.
    assert rows == result.steps + (result.winner == 0)


def test_the_reward_is_the_environments_own_unless_told_otherwise() -> None:
    game = HockeyGame()
    game.reset(0)
    rng = np.random.default_rng(0)
    while not game.over:
        turn = game.step(rng.uniform(-1, 1, (2, 4)))
        for player in (0, 1):
            assert shaped(turn, player, Shaping()) == pytest.approx(turn.rewards[player])


def test_an_evaluation_plays_the_same_games_each_time() -> None:
    def policy(rows: np.ndarray) -> np.ndarray:
        return np.tanh(rows[:, [12, 13, 2, 0]] - rows[:, [0, 1, 5, 1]])

    one = evaluate([HockeyGame()], policy, "weak", 6)
    side_by_side = evaluate([HockeyGame() for _ in range(4)], policy, "weak", 6)
    assert one == side_by_side
    assert one.wins + one.ties + one.losses == pytest.approx(1)
    assert one != evaluate([HockeyGame()], policy, "weak", 6, seed=1)


def test_a_pools_member_plays_as_the_learner_did(tmp_path: Path) -> None:
    with RunLog(tmp_path, COLUMNS) as log, SerialHockey(settings(), log) as training:
        for _ in range(8):
            training.round()
        name = training.league.pool[-1]
        row = np.random.default_rng(0).normal(size=18).astype(np.float32)
        before = training.opponents.player(name).act(row).copy()
        for _ in range(2):
            training.round()
        if name in training.league.pool:
            np.testing.assert_array_equal(training.opponents.player(name).act(row), before)
        assert set(training.opponents.actors) == set(training.league.pool)
        with pytest.raises(KeyError, match="nobody plays"):
            training.opponents.player("pool:123456")


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="without --resume"):
        hockey_checkpoint.read(tmp_path)


def test_a_checkpoint_that_was_half_written_leaves_the_one_before(tmp_path: Path) -> None:
    hockey_checkpoint.save(tmp_path, "last", counted={"env_steps": 1}, tensors={}, replay=None)
    with pytest.raises(TypeError):
        hockey_checkpoint.save(tmp_path, "last", counted={"env_steps": object()}, tensors={}, replay=None)
    assert hockey_checkpoint.read(tmp_path).counted["env_steps"] == 1
    # A crash between the two renames: the old one is found under the name it had for a moment.
    (tmp_path / "last").rename(tmp_path / ".old-last")
    assert hockey_checkpoint.read(tmp_path).counted["env_steps"] == 1
