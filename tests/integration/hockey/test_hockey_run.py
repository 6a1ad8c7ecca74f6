"""`jurybox train hockey` in processes: the command as a user runs it, its policy served, its roles killed."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.serving import segments
from tests.unit.studies.hockey import like_the_original
from tests.unit.studies.hockey.hockey_runs import Nothing, settings

from jurybox.studies.hockey import HockeyGames, evaluate
from jurybox.studies.hockey.report import learned
from jurybox.studies.hockey.train import plan, train
from jurybox.training.interrupts import Signals
from jurybox.training.runtime.plan import End, Timeouts
from jurybox.training.runtime.progress import Timeline
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import ControlWord, Word

# fmt: off
SMALL = [
    "--set", "batch_size = 16", "--set", "hidden = [16, 16]",
    "--set", "evaluation_games = 2", "--set", "matrix_games = 0", "--set", "film_games = 0",
    "--set", "snapshot_every = 1", "--set", "log_every = 500", "--set", "league.anchor_share = 0.2",
    "--train-freq", "2", "--set", "evaluate_every = 0",
]
# fmt: on


def command(folder, *more: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "jurybox.training.cli", "train", "hockey", "--out", str(folder), *SMALL, *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.runs
def test_two_collectors_and_a_learner_use_the_budget(tmp_path) -> None:
    before = segments()
    done = command(tmp_path, "--workers", "2", "--envs", "8", "--steps", "2400", "--learning-starts", "200")
    assert done.returncode == 0, done.stderr
    assert "report:" in done.stdout and "against weak:" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    # Two collectors may check the budget at the same moment.
    assert 2400 <= summary["env_steps"] <= 2404 and summary["learner_steps"] == (2400 - 200) // 2
    assert summary["restarts"] == 0 and summary["episodes"] > 1 and not summary["serial"]
    lanes = [lane.role for lane in Timeline.read(tmp_path / "timeline.json").lanes]
    assert lanes == ["actor-0", "actor-1", "learner", "evaluator"]
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert any(row["critic_loss"] for row in rows) and any(row["eval_wins_strong"] for row in rows)
    assert max(float(row["pool"]) for row in rows if row["pool"]) > 0, "past selves joined"
    assert "Who worked when" in (tmp_path / "report.html").read_text()
    assert segments() <= before


@pytest.mark.runs
def test_the_same_command_trains_in_an_environment_with_the_originals_interface(tmp_path) -> None:
    before = segments()
    env = f"{like_the_original.__name__}:HockeyEnv"
    done = command(tmp_path, "--env", env, "--steps", "1200", "--learning-starts", "200", "--set", "anchor_size = 800")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["env_steps"] >= 1200 and summary["learner_steps"] >= 400 and summary["restarts"] == 0
    assert summary["episodes"] > 1 and "eval_wins_weak" in summary["evaluation"]
    assert learned(tmp_path) is not None
    assert segments() <= before


@pytest.mark.runs
def test_a_served_policy_plays_and_so_do_pinned_past_selves(tmp_path) -> None:
    before = segments()
    # Collectors far ahead would end all their games before the learner checks for snapshots a second time.
    league = {"pool": 3, "anchor_share": 0.1}
    s = settings(steps=3000, policy="served", snapshot_every=3, max_ahead=200, league=league)
    outcome = train(s, tmp_path)
    assert outcome.end is End.STEPS and outcome.restarts == 0, (tmp_path / "logs" / "run.log").read_text()
    assert outcome.learner_steps >= 250
    assert len(list((tmp_path / "pool").glob("*.weights"))) >= 2
    assert segments() <= before


@pytest.mark.runs
@pytest.mark.parametrize("rows", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_small_replay_is_overwritten_again_and_again_by_collectors_that_never_wait(tmp_path, rows) -> None:
    before, seen = segments(), {"samples": 0}
    s = settings(steps=30 * rows, workers=2, max_ahead="none", buffer_size=rows, publish_interval=1, max_lag=2)

    def watch(shared):
        replay = shared.replay("policy")
        seen["overwritten"] = replay.counters.overwritten
        if len(replay) < rows:
            return
        drawn = replay.sample(64)
        assert np.isfinite(drawn["observation"]).all() and (abs(drawn["action"]) <= 1).all()
        seen["samples"] += 1

    class Metrics(list):
        def scalars(self, step, values):
            self.append(values)

    metrics = Metrics()
    outcome = run(plan(s, tmp_path), tmp_path, metrics, watch=watch)
    assert outcome.end is End.STEPS and outcome.restarts == 0
    assert seen["overwritten"] > 50 * rows and seen["samples"] > 0, "two rows a step, one for each player"
    losses = [row["critic_loss"] for row in metrics if "critic_loss" in row]
    assert losses and np.isfinite(losses).all()
    assert outcome.forced_syncs > 0, "policies older than two publications were fetched at once"
    assert segments() <= before


def kill_at_random(folder: Path, times: int, seconds: float) -> tuple[int, object]:
    """Run hockey, and kill `times` random processes of it, with `seconds` between kills."""
    rng, kills, last_kill, signals = random.Random(7), [], [time.monotonic(), 0], Signals()

    def watch(shared):
        now, steps, rows = time.monotonic(), shared.scoreboard.env_steps, shared.replay("policy").added
        assert rows >= 2 * steps, "a step that was counted twice would have written its two rows once"
        # The rows of unfinished steps, a last observation for each side, and steps in progress.
        assert rows <= 2 * (shared.scoreboard.env_steps + shared.scoreboard.episodes) + 8 * (len(kills) + 2) + 16
        if now - last_kill[0] < seconds or steps < last_kill[1] + 200:
            return
        if shared.scoreboard.control[:, ControlWord.RESTARTS].sum() < len(kills):
            return  # the killed process has not ended yet
        if len(kills) == times:
            signals.ask()
            return
        victim = rng.randrange(len(shared.scoreboard.words))
        pid = shared.scoreboard.words[victim][Word.PID]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        kills.append(victim)
        last_kill[:] = [now, steps]

    s = settings(steps=10**9, workers=2, evaluate_every=3000, checkpoint_every=5000, snapshot_every=50, compile="never")
    planned = dataclasses.replace(plan(s, folder), timeouts=Timeouts(failures=1000, back_off=(0.0, 0.1)))
    outcome = run(planned, folder, Nothing(), watch=watch, signals=signals)
    return len(kills), outcome


def check(folder: Path, kills: int, outcome) -> None:
    assert outcome.end is End.SIGNAL
    assert outcome.restarts == kills, "each death was noticed once"
    assert outcome.learner_steps <= max(0, outcome.env_steps - 300) // 10, "no step was learned from twice"


@pytest.mark.runs
def test_a_hockey_run_goes_on_when_any_process_is_killed(tmp_path) -> None:
    before = segments()
    kills, outcome = kill_at_random(tmp_path, times=3, seconds=0.5)
    assert kills == 3
    check(tmp_path, kills, outcome)
    assert segments() <= before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hockey_run_survives_five_minutes_of_kills(tmp_path) -> None:
    before = segments()
    kills, outcome = kill_at_random(tmp_path, times=30, seconds=10.0)
    assert kills == 30
    check(tmp_path, kills, outcome)
    assert segments() <= before


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_minutes_of_training_clearly_beat_random_play(tmp_path) -> None:
    from jurybox.studies.hockey.settings import HockeyTraining

    rng = np.random.default_rng(0)
    games = HockeyGames(8)
    chance = evaluate(games, lambda rows: rng.uniform(-1, 1, (len(rows), 4)).astype(np.float32), "weak", 200)
    train(HockeyTraining(seconds=600, steps=10**8, matrix_games=0, film_games=0), tmp_path)
    best = evaluate(games, learned(tmp_path), "weak", 200)
    assert chance.points < -0.1
    assert best.points > chance.points + 0.2
    assert best.losses < chance.losses - 0.1
    assert best.score > chance.score + 3
