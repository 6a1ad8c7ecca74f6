"""The training in one process: what it writes, what it learns from, and going on exactly where it was."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tomllib
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.studies.hockey.hockey_runs import Nothing, settings

from jurybox.protocol.segment import directory
from jurybox.studies.hockey import HockeyGame, HockeyGames, evaluate
from jurybox.studies.hockey import report as hockey_report
from jurybox.studies.hockey.algorithm import algorithm_of
from jurybox.studies.hockey.curriculum import Opponents, name_of, number_of
from jurybox.studies.hockey.game import MIRROR_OBSERVATION
from jurybox.studies.hockey.games import shaped
from jurybox.studies.hockey.opponents import Pool, actor_of
from jurybox.studies.hockey.settings import LEAVING, HockeyTraining, Shaping
from jurybox.studies.hockey.train import plan, train
from jurybox.training.algorithms.base import AlgorithmUnusable, Update
from jurybox.training.algorithms.registry import make
from jurybox.training.checkpoints import CheckpointError, Checkpoints, read_state, write_state
from jurybox.training.replay import Replay, Windows
from jurybox.training.replay.part import ANCHOR_MARK
from jurybox.training.runtime.plan import ConfigError, End, Outcome, load
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.settings import changes_of
from jurybox.training.runtime.shared_resources import SharedResources


def same(one, two, where=""):
    """Two trees, bit for bit."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for name in one:
            same(one[name], two[name], f"{where}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for number, pair in enumerate(zip(one, two, strict=True)):
            same(*pair, f"{where}[{number}]")
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, two, equal_nan=True), where
    else:
        assert one == two, where


@pytest.mark.runs
@pytest.mark.parametrize(
    ("prioritized", "anchor_size"),
    [*(pytest.param(prioritized, 0, marks=pytest.mark.slow) for prioritized in (False, True)), (True, 700)],
)
def test_a_resumed_serial_run_depends_on_its_checkpoint_alone(
    tmp_path: Path, prioritized: bool, anchor_size: int
) -> None:
    s = {"prioritized": prioritized, "anchor_size": anchor_size, "workers": 2}
    run(plan(settings(**s, steps=1500), tmp_path / "one"), tmp_path / "one", Nothing(), serial=True)
    left = Checkpoints(tmp_path / "one" / "checkpoints").existing().state("actor-1")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        planned = plan(settings(**s, steps=3000), tmp_path / name)
        resumed = run(planned, tmp_path / name, Nothing(), serial=True, resume=True)
        assert resumed.env_steps >= 3000 and resumed.learner_steps >= 260
    one, two = (Checkpoints(tmp_path / name / "checkpoints").existing() for name in ("one", "two"))
    for role in ("learner", "actor-0", "actor-1"):
        same(one.state(role), two.state(role), role)
    assert one.state("actor-1") != left and one.state("learner")["curriculum"]["league"]["pool"], "one joined it"
    assert (one.folder / "weights-policy.state").read_bytes() == (two.folder / "weights-policy.state").read_bytes()


def test_the_learner_waits_until_rows_of_many_games_can_be_sampled(tmp_path: Path) -> None:
    s = settings(envs=12, learning_starts=12, steps=200)
    assert s.learning_starts * 2 < s.unsampled, "the first step is due before any row has its successors"
    outcome = run(plan(s, tmp_path), tmp_path, Nothing(), serial=True)
    assert outcome.learner_steps == outcome.env_steps // 10 - 12 // 10


@pytest.mark.runs
def test_a_training_leaves_everything_that_a_curve_needs_and_no_shared_memory(tmp_path: Path, monkeypatch) -> None:
    before = set(os.listdir(directory()))
    monkeypatch.setattr(hockey_report, "_FILM_EVERY", 25)  # a picture of each half a second
    s = settings(steps=600, evaluate_every=500, matrix_games=1, film_games=1)
    outcome = train(s, tmp_path, serial=True)
    assert set(os.listdir(directory())) == before
    assert outcome.env_steps >= 600 and outcome.learner_steps >= 30
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {"seconds", "wins", "critic_loss", "eval_wins_weak", "eval_losses_strong"} <= set(lines[0].split(","))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["env_steps"] == outcome.env_steps and summary["serial"]
    shares = [summary["evaluation"][f"eval_{what}_weak"] for what in ("wins", "ties", "losses")]
    assert sum(shares) == pytest.approx(1)
    report = (tmp_path / "report.html").read_text()
    assert "data:image/gif;base64," in report and "learned against strong" in report and "Games won" in report
    assert (tmp_path / "checkpoints" / "best" / "weights-policy.state").exists()
    with pytest.raises(CheckpointError, match="batch_size"):
        train(settings(steps=700, batch_size=8), tmp_path, serial=True, resume=True)


def test_nothing_to_resume_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="without --resume"):
        train(settings(), tmp_path, serial=True, resume=True)


@contextmanager
def hockey_actor(folder: Path, odds=None, *, first=lambda shared: None, number=0, shared=None, **changes):
    """An actor with the first weights of a learner, whose opponents are drawn with these odds."""
    planned = plan(settings(**{"learning_starts": 1, **changes}), folder)
    with ExitStack() as stack:
        shared = shared or stack.enter_context(SharedResources.create(planned))
        first(shared)
        weights = weights_of(settings(**changes))
        extra = {"updates": 0, "curriculum": {"odds": odds or {"anchor:weak": 1.0}}}
        stack.enter_context(shared.publisher("policy")).publish(weights, extra=extra)
        context = RoleContext(planned, number, shared, lambda message: None)
        actor = load(planned.roles[number].make)(context, **planned.roles[number].settings)
        stack.callback(actor.close)
        for _, _, each in context.followed:
            each.refresh()
        yield actor


def played(actor, steps):
    """Play so many steps, and count them as a driver does; returns them and the episodes that ended."""
    made, over, context = 0, [], actor.context
    context.episode = lambda **numbers: over.append(numbers)
    while made < steps:
        made += (step := actor.step())
        context.words[Word.ENV_STEPS] += step
    return made, over


def test_games_against_bots_stay_in_the_anchor_and_all_others_go_to_the_ring(tmp_path: Path) -> None:
    def opponents_seen(odds, *, warm=False, size=1000):
        Pool(tmp_path / "pool").keep("pool:7", weights_of(settings()))
        starts = 10**6 if warm else 1
        with hockey_actor(tmp_path, odds, anchor_size=size, learning_starts=starts) as actor:
            actor.context.words[Word.ENV_STEPS] = 1
            played(actor, 700)
            replay = actor.context.replay("policy")
            ring, kept = (part.ring.size for part in replay.parts)
            if kept and not ring:
                batch = replay.sample(64, windows=Windows(n_step=8, next="observation"), anchor_ratio=0.25)
                assert np.abs(batch["next_observation"] - batch["observation"])[:, 2].max() < 3, "of the same game"
            return ring, kept

    ring, kept = opponents_seen({"pool:7": 1.0})
    assert kept == 0 and ring >= 1400, "games against past selves are overwritten in their time"
    ring, kept = opponents_seen({"anchor:weak": 1.0}, warm=True)
    assert kept == 0 and ring >= 1400, "what was played at random is nothing to keep"
    ring, kept = opponents_seen({"anchor:weak": 1.0}, size=5000)
    assert ring == 0 and kept >= 1400
    ring, kept = opponents_seen({"anchor:weak": 1.0}, size=400)
    assert kept == 400 and ring > 200, "once it is full, games begin in the ring again"


@pytest.mark.runs
def test_each_batch_contains_a_share_of_the_anchor(tmp_path: Path, monkeypatch) -> None:
    ratios, sample = [], Replay.sample

    def watched(replay, n, *args, **options):
        batch = sample(replay, n, *args, **options)
        if n == 16:
            ratios.append((replay.parts[1].ring.size >= s.least_kept, float((batch.indices >= ANCHOR_MARK).mean())))
        return batch

    monkeypatch.setattr(Replay, "sample", watched)
    s = settings(steps=1500, anchor_size=600, anchor_ratio=0.5)
    run(plan(s, tmp_path), tmp_path, Nothing(), serial=True)
    assert set(ratios) == {(False, 0.0), (True, 0.5)}, "nothing is asked of it before it has something to give"
    with pytest.raises(ValueError, match=f"at least {s.least_kept}"):
        settings(anchor_size=s.least_kept - 1)


def test_without_a_limit_ahead_neither_side_waits_and_the_age_of_policies_is_bounded_and_shown() -> None:
    free = HockeyTraining(max_ahead="none")
    assert free.pace.free and free.pace.max_ahead is None and not HockeyTraining().pace.free
    with pytest.raises(ConfigError, match="max_ahead"):
        HockeyTraining.checked({"max_ahead": "any"})
    with pytest.raises(ConfigError, match="nothing would limit the age of collectors' policies"):
        HockeyTraining.checked({"max_ahead": "none", "max_lag": None})
    with pytest.raises(ConfigError, match='train_freq is set and would have no effect: max_ahead is "none"'):
        HockeyTraining.read(None, {"max_ahead": "none", "train_freq": 4})
    outcome = SimpleNamespace(forced_syncs=3, learner_steps=5000)
    shown = hockey_report.age_of_policies(free, outcome, [{"lag": 2.0}, {"lag": 25.0}])
    assert "13.5 publications behind on average, 25 at most" in shown
    assert "more than 20 are fetched before the next step (3 times)" in shown


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("num_collectors", "is called workers here"),
        ("replay_capacity", "is called buffer_size here"),
        ("weight_publish_interval", "is called publish_interval here"),
        ("sync_interval", "is called weight_sync_interval here"),
        ("envs_per_collector", "envs is the number of games over all workers"),
        ("dual_buffer", "anchor_size rows are kept"),
        ("noise_colour", "it is noise_color here"),
        ("learner", "its settings have no prefix here"),
        ("net_arch", "is called hidden here"),
    ],
)
def test_names_of_other_programs_are_answered_with_ours(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        HockeyTraining.checked({name: 1})


def test_the_anchor_is_refused_where_rows_come_from_other_machines(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="anchor_size does not go"):
        train(settings(anchor_size=400), tmp_path, launcher=object())


def test_one_half_is_asked_for_before_the_other_steps(tmp_path: Path) -> None:
    Pool(tmp_path / "pool").keep("pool:7", weights_of(settings()))
    with hockey_actor(tmp_path, {"pool:7": 1.0}, envs=5) as actor:
        (client,) = {id(each.policy): each.policy for each in actor._splits[0].cast._players.values()}.values()
        asked, submit = [], client.submit

        def submitted(observation, who="newest", split=0):
            asked.append((split, who, len(observation["observation"])))
            given = submit(observation, who, split)
            return lambda: asked.append((split, who, "given")) or given()

        client.submit = submitted
        for number in range(6):
            one, other = number % 2, 1 - number % 2
            asked.clear()
            assert actor.step() == (3, 2)[one]
            requested = [(split, who) for split, who, rows in asked if rows != "given"]
            first = next(place for place, (*_, rows) in enumerate(asked) if rows == "given")
            assert {(other, "newest"), (other, "pool:7")} <= set(requested), "of both players"
            assert all(rows != "given" for *_, rows in asked[:first]) and len(requested) == (4 if number == 0 else 2)
            assert {split for split, _, rows in asked if rows == "given"} == {one}


def test_rows_contain_observations_actions_and_rewards_of_both_players(tmp_path: Path) -> None:
    with hockey_actor(tmp_path, shaping={"touch": 0.5}, learning_starts=10**6) as actor:
        steps, results = played(actor, 1500)
        replay = actor.context.replay("policy")
        ties = sum(result["ties"] for result in results)
        assert replay.added == 2 * (steps + ties), "a game cut short keeps its last observation as well"
        batch = replay.sample(1000, windows=Windows(n_step=1, next="observation"))
        own, following = batch["observation"], batch["next_observation"]
        ended = batch["discount"] == 0  # after a goal there is no next observation
        moved, expected = following[~ended, :2] - own[~ended, :2], following[~ended, 3:5] / 50
        # The place is the turning body's, the speed its centre's; and a wall may have stopped it on its way.
        np.testing.assert_allclose(moved, expected, atol=0.25)
        assert np.median(np.abs(moved - expected)) < 0.005
        assert (np.abs(batch["action"]) <= 1).all()
        assert (np.abs(batch["reward"][ended]) > 9).all() and (np.abs(batch["reward"][~ended]) < 9).all()


def test_rows_of_the_learner_alone_on_request(tmp_path: Path) -> None:
    with hockey_actor(tmp_path, record_opponents=False) as actor:
        steps, results = played(actor, 1000)
        replay = actor.context.replay("policy")
        assert replay.added == steps + sum(result["ties"] for result in results)


def test_games_are_reported_and_told_to_the_league_from_the_players_side(tmp_path: Path) -> None:
    with hockey_actor(tmp_path, {"anchor:strong": 0.0, "anchor:weak": 1.0}) as actor:
        _, results = played(actor, 1500)
        told = actor.context.replay("results").sample(len(results), replace=False)
        assert len(results) >= 4 and set(told["label"].tolist()) == {-2}, "the second of the anchors"
        assert sorted(told["points"].tolist()) == sorted(int(each["points"]) for each in results)
        for each in results:
            assert each["wins"] + each["ties"] + each["losses"] == 1 and each["points"] == each["wins"] - each["losses"]
            assert each["total"] == each["return_player"] and "return_opponent" not in each, "a bot's is nobody's"


def test_a_resumed_actor_leaves_the_matches_that_went_on_and_begins_others(tmp_path: Path) -> None:
    with hockey_actor(tmp_path) as actor:
        played(actor, 40)
        actor.context.replay("policy").save(tmp_path / "rows")
        state = actor.save()
    with hockey_actor(tmp_path, first=lambda shared: shared.replay("policy").restore(tmp_path / "rows")) as actor:
        replay = actor.context.replay("policy")
        rows = replay.added
        actor.restore(state)
        played(actor, 40)
        batch = replay.sample(500, windows=Windows(n_step=1, next="observation"))
        # The last row of a game that was left has no next one, so it is not handed out; none is led into another game.
        assert np.abs(batch["next_observation"][:, :2] - batch["observation"][:, :2]).max() < 0.5 and rows > 30


def test_actors_share_one_ladder_of_noise_and_play_different_games(tmp_path: Path) -> None:
    changes = {"action_noise": (0.1, 0.8), "workers": 2, "envs": 4, "learning_starts": 10**6}
    with ExitStack() as stack:
        one = stack.enter_context(hockey_actor(tmp_path, **changes))
        two = stack.enter_context(hockey_actor(tmp_path, number=1, **changes))
        ladder = sorted(scale for actor in (one, two) for scale in actor._exploration.scales)
        np.testing.assert_allclose(ladder, [0.1, 0.2, 0.4, 0.8])
        for actor in (one, two):
            played(actor, 4)
        rows = [actor.context.replay("policy").sample(4, replace=False, uniform=True) for actor in (one, two)]
        for name in ("observation", "action"):
            assert not np.isin(rows[0][name][:, 0], rows[1][name][:, 0]).all(), name


def test_the_reward_is_the_environments_own_and_the_pucks_way_forward() -> None:
    game = HockeyGame()
    game.reset(0)
    rng = np.random.default_rng(0)
    while not game.over:
        turn = game.step(rng.uniform(-1, 1, (2, 4)))
        for player in (0, 1):
            way = turn.infos[player]["reward_puck_direction"]
            assert shaped(turn, player, Shaping(direction=0.0)) == pytest.approx(turn.rewards[player])
            assert shaped(turn, player, Shaping()) == pytest.approx(turn.rewards[player] + 10 * way)


def test_an_evaluation_plays_the_same_games_each_time() -> None:
    def policy(rows: np.ndarray) -> np.ndarray:
        return np.tanh(rows[:, [12, 13, 2, 0]] - rows[:, [0, 1, 5, 1]])

    one = evaluate(HockeyGames(1), policy, "weak", 3)
    side_by_side = evaluate(HockeyGames(2), policy, "weak", 3)
    assert one == side_by_side
    assert one.wins + one.ties + one.losses == pytest.approx(1)
    assert one != evaluate(HockeyGames(1), policy, "weak", 3, seed=1)


def weights_of(s):
    """Weights that a learner publishes at first."""
    made = make(**algorithm_of(s, (18, 4)))
    return {name: tensor.numpy() for name, tensor in made.seeded(made.network, 0).state_dict(keep_vars=False).items()}


def test_a_pool_member_plays_as_before_and_a_missing_one_is_named(tmp_path: Path) -> None:
    state = weights_of(HockeyTraining())
    Pool(tmp_path).keep("pool:17", state)
    row = np.random.default_rng(0).normal(size=(1, 18)).astype(np.float32)
    elsewhere = Pool(tmp_path)
    np.testing.assert_array_equal(elsewhere.actor("pool:17")(row), actor_of(state)(row))
    assert elsewhere.names() == ["pool:17"]
    for name in ("pool:123456", "pool:../x", "nobody"):
        with pytest.raises(KeyError, match="nobody plays"):
            elsewhere.actor(name)


def test_opponents_have_numbers_and_names() -> None:
    anchors = ("anchor:weak", "anchor:strong")
    for name in (*anchors, "pool:1", "pool:123"):
        assert name_of(number_of(name, anchors), anchors) == name


def test_settings_come_from_file_then_options(tmp_path: Path) -> None:
    config = tmp_path / "hockey.toml"
    config.write_text("batch_size = 32\nworkers = 3\ntau = 0.01\nlearning_rate = 0.1\n[league]\npool = 4\n")
    s = HockeyTraining.read(
        config,
        changes_of(
            ["learning_rate = 0.2", "action_noise = [0.1, 0.3]", "league.decay = 0.9"], {"workers": 2, "seed": None}
        ),
    )
    assert (s.batch_size, s.workers, s.action_noise) == (32, 2, (0.1, 0.3))
    assert (s.tau, s.learning_rate, s.policy_delay) == (0.01, 0.2, 2)
    assert (s.league.pool, s.league.decay) == (4, 0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["batches = 3"], "batches"),
        (["batch_size = 0"], "batch_size"),
        (["league.pools = 1"], "pools"),
        (["batch_size"], "NAME=VALUE"),
    ],
)
def test_a_wrong_setting_is_named(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        HockeyTraining.read(None, changes_of(changes, {}))


def test_one_setting_of_a_part_leaves_the_others_as_the_training_has_them() -> None:
    s, usual = HockeyTraining.read(None, changes_of(["league.pool = 3", "shaping.touch = 0.5"], {})), HockeyTraining()
    assert usual.league.anchor_share == 0.75, "the training's own default, not the league's"
    assert s.league == dataclasses.replace(usual.league, pool=3)
    assert s.shaping == dataclasses.replace(usual.shaping, touch=0.5)
    assert HockeyTraining(**s.model_dump(mode="json")) == s


def test_an_environment_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.at_all"):
        plan(settings(env="nowhere.at_all:Env"), tmp_path)


@pytest.mark.runs
def test_past_selves_that_have_left_leave_no_files_and_no_memory(tmp_path: Path) -> None:
    s = settings(steps=4000, snapshot_every=1, train_freq=2, league={"pool": 2, "least_games": 2, "anchor_share": 0.9})
    run(plan(s, tmp_path), tmp_path, Nothing(), serial=True)
    state = Checkpoints(tmp_path / "checkpoints").latest().state("learner")["curriculum"]
    versions = [int(path.stem) for path in sorted((tmp_path / "pool").glob("*.weights"))]
    assert versions[-1] // 50 > 20, "more have joined than may stay"
    assert len(versions) <= 2 + LEAVING
    names = [f"pool:{version}" for version in versions]
    assert names[-2:] == state["league"]["pool"] == list(state["past"])


@pytest.mark.runs
def test_a_resumed_run_has_the_past_selves_of_its_checkpoint_and_no_others(tmp_path: Path) -> None:
    s = {"snapshot_every": 2, "train_freq": 2}
    run(plan(settings(**s, steps=2000), tmp_path), tmp_path, Nothing(), serial=True)
    state = Checkpoints(tmp_path / "checkpoints").latest().state("learner")["curriculum"]
    folder = tmp_path / "pool"
    for path in folder.iterdir():
        path.unlink()
    # Of a part of the run that was killed after the checkpoint.
    (folder / f"{10**9:012d}.weights").write_bytes(b"later than the checkpoint")
    run(plan(settings(**s, steps=2004), tmp_path), tmp_path, Nothing(), serial=True, resume=True)
    names = set(Pool(folder).names())
    assert state["league"]["pool"] and names >= set(state["league"]["pool"]) and f"pool:{10**9}" not in names
    first = state["league"]["pool"][0]
    for name, value in Pool(folder).actor(first).state.items():
        np.testing.assert_array_equal(value, state["past"][first][name])


class Served:
    """The server of past selves."""

    def __init__(self) -> None:
        self.kept: dict[str, dict] = {}

    def keep(self, name: str, state) -> None:
        self.kept[name] = state

    def close(self) -> None: ...


@contextmanager
def hockey_learner(folder: Path, state=None, life=1, first=lambda shared: None, **changes):
    """A learner with a served policy; `first` may use the run's shared memory before it is made."""
    planned = plan(settings(**changes), folder)
    number = [role.name for role in planned.roles].index("learner")
    with SharedResources.create(planned) as shared:
        first(shared)
        context = RoleContext(planned, number, shared, lambda message: None, life=life)
        learner = load(planned.roles[number].make)(context, **planned.roles[number].settings)
        try:
            learner.curriculum.served = Served()
            if state is not None:
                learner.restore(state)
            yield learner
        finally:
            learner.close()


@pytest.mark.parametrize("life", [1, 2])
def test_a_learner_takes_the_past_selves_of_its_checkpoint_whose_files_are_gone(tmp_path: Path, life: int) -> None:
    with hockey_learner(tmp_path) as learner:
        for version in (10, 20):
            name, _ = learner.curriculum.league.add(version)
            learner.curriculum.pool.keep(name, learner.weights())
        write_state(tmp_path / "learner.state", learner.save())
        # Both left the league after the checkpoint.
        learner.curriculum.pool.keep("pool:30", learner.weights())
        learner.curriculum.pool.retain(["pool:30"])
    state = read_state(tmp_path / "learner.state")
    with hockey_learner(tmp_path, state, life) as learner:
        served, past = learner.curriculum.served.kept, state["curriculum"]["past"]
        assert list(served) == ["pool:10", "pool:20"]
        same(dict(served["pool:10"]), past["pool:10"])
        same(learner.save()["curriculum"]["past"], past)  # of their files, which collectors read, too
        assert ("pool:30" in learner.curriculum.pool.names()) == (life == 2), "other collectors may play against it"


@pytest.mark.parametrize(("life", "games"), [(1, 7), (2, 0)])
def test_a_resumed_learner_counts_the_results_that_collectors_added_before_it_was_ready(
    tmp_path: Path, life: int, games: int
) -> None:
    def played(shared, games=3) -> None:
        results = shared.replay("results")
        for _ in range(games):
            results.add(label=-1, points=1)  # the first anchor

    def resumed(shared) -> None:
        shared.replay("results").restore(tmp_path / "results")
        played(shared, 4)

    with hockey_learner(tmp_path) as learner:
        anchor = learner.curriculum.league.anchors[0]
        played(learner.context.shared)
        state = learner.save()
        assert learner.curriculum.league.games(anchor) == 0, "counted at the next step, as without a checkpoint"
        learner.context.shared.replay("results").save(tmp_path / "results")
    with hockey_learner(tmp_path, state, life, first=resumed) as learner:
        learner.follow_curriculum()
        assert learner.curriculum.league.games(anchor) == pytest.approx(games, rel=0.1), (
            "a killed one's successor: published"
        )


def test_what_a_learner_gives_a_snapshot_stays_as_it_was(tmp_path: Path) -> None:
    with hockey_learner(tmp_path) as learner:
        before = learner.weights()
        kept = {name: value.copy() for name, value in before.items()}
        with torch.no_grad():
            for parameter in learner.algorithm.acting.parameters():
                parameter.add_(1)
        same(before, kept)
        assert not np.array_equal(learner.weights()["layers.0.weight"], kept["layers.0.weight"])


def test_a_killed_learners_successor_goes_on_with_the_published_league(tmp_path: Path) -> None:
    with hockey_learner(tmp_path) as learner:
        learner.curriculum.league.add(40)
        learner.curriculum.record({"label": np.array([-1, 40, 40]), "points": np.array([1, -1, 0])})
        published = json.loads(json.dumps(learner.publication()[1]))
        expected, weights = learner.curriculum.published(), learner.weights()
    with hockey_learner(tmp_path, life=2) as learner:
        learner.adopt(SimpleNamespace(read=lambda: (weights, 1, published)))
        assert learner.curriculum.published() == expected
    rng = np.random.default_rng(0)
    drawn = [Opponents.draw(published["curriculum"], rng) for _ in range(200)]
    assert {(task.players["opponent"], task.label, task.anchor) for task in drawn} == {
        ("anchor:weak", -1, True), ("anchor:strong", -2, True), ("pool:40", 40, False)
    }  # fmt: skip


@pytest.mark.parametrize("mirror", [False, True])
def test_batches_have_weights_and_are_mirrored_and_an_algorithm_without_priorities_is_refused(
    tmp_path: Path, mirror: bool
) -> None:
    with hockey_learner(tmp_path, mirror=mirror) as learner:
        stream = learner.replay.stream()
        for _ in range(40):
            stream.add(observation=np.ones(18), action=np.ones(4), reward=0.0, terminated=False)
        seen = []
        learner.algorithm.update = lambda batch, progress: seen.append(batch) or Update({})
        with pytest.raises(AlgorithmUnusable, match="returned no priorities"):
            learner.step()
        assert seen[0]["weights"].shape == (16,), "it could have used them"
        assert (seen[0]["observation"][1::2] == 1).all()
        np.testing.assert_array_equal(seen[0]["observation"][0], MIRROR_OBSERVATION if mirror else np.ones(18))


def test_a_pool_holds_so_many_in_memory_and_reads_the_others_again(tmp_path: Path) -> None:
    state = weights_of(settings())
    pool = Pool(tmp_path, most=2)
    for version in range(5):
        pool.keep(f"pool:{version}", state)
        pool.actor(f"pool:{version}")
    assert list(pool._actors) == ["pool:3", "pool:4"]
    pool.actor("pool:0")
    assert list(pool._actors) == ["pool:4", "pool:0"]


def test_a_gpus_utilization_is_logged_and_a_cpus_or_an_unknown_one_is_not(monkeypatch):
    from jurybox.studies.hockey.train import columns
    from jurybox.training.roles.learner import device_utilization

    monkeypatch.setattr("torch.cuda.utilization", lambda device: 73)
    assert device_utilization("cuda:0") == {"device_utilization": 73.0} and device_utilization("cpu") == {}

    def missing(device):
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr("torch.cuda.utilization", missing)
    assert device_utilization("cuda:0") == {}
    assert "device_utilization" in columns(settings(device="cuda:0"))
    assert "device_utilization" not in columns(settings())
    # torch.cuda.utilization asks this package, which torch does not require.
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert any(line.startswith("nvidia-ml-py") for line in project["optional-dependencies"]["training"])


def test_a_report_after_a_signal_plays_no_games(tmp_path, monkeypatch):
    def plays(*_):
        raise AssertionError("whoever stops a run waits for its end")

    for name in ("win_matrix", "_film", "learned"):
        monkeypatch.setattr(hockey_report, name, plays)
    stopped = Outcome(
        end=End.SIGNAL, text=End.SIGNAL.value, env_steps=100, learner_steps=10, epochs=1, episodes=2, seconds=1.0,
        return_mean=None, return_std=None, restarts=0, forced_syncs=0, busy={}, serial=True, evaluation={},
    )  # fmt: skip
    assert "A stop was requested" in hockey_report.report(HockeyTraining(), stopped, [], tmp_path, "")
