"""Rules, observations and rewards of the game of two."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jurybox.studies.hockey import BOTS, Bot, HockeyGame, HockeyGames, Mode, RandomPlayer, make_opponent, play
from jurybox.studies.hockey.game import MIRROR_ACTION, MIRROR_OBSERVATION

NOTHING = np.zeros((2, 4))
ORIGINAL = (0.4025, 0.453, 0.1445)  # strong against weak, either on either side, 2,000 games each


def run(game: HockeyGame, seed: int, steps: int = 400, first: int | None = None) -> list[tuple]:
    rng = np.random.default_rng(seed)
    trace = [game.reset(seed, first=first)]
    while not game.over and len(trace) <= steps:
        trace.append(game.step(rng.uniform(-1, 1, (2, 4))))
    return trace


def test_a_game_depends_only_on_its_seed() -> None:
    used, fresh = HockeyGame(), HockeyGame()
    for seed in range(3):
        run(used, seed)
    for ours, theirs in zip(run(used, 7), run(fresh, 7), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def test_each_player_sees_the_rink_from_its_own_side() -> None:
    game = HockeyGame()
    for turn in run(game, 3)[1:]:
        own, other = turn.observations
        np.testing.assert_array_equal(other[[0, 1, 3, 4]], -own[[6, 7, 9, 10]])
        np.testing.assert_array_equal(other[[2, 5]], own[[8, 11]])
        np.testing.assert_array_equal(other[12:16], -own[12:16])
        np.testing.assert_array_equal(other[[16, 17]], own[[17, 16]])


def test_both_sides_play_the_same_game() -> None:
    """Swapping the players swaps what happens: no side has an advantage."""
    game = HockeyGame()
    rng = np.random.default_rng(5)
    actions = rng.uniform(-1, 1, (60, 2, 4))
    game.reset(1)
    rink = game.rink
    rink.reset((-3.0, 0.5), (2.5, -0.4), (-1.5, 0.3), (0.0, 0.0))
    ours = [game.step(a) for a in actions]
    game.reset(1)
    rink.reset((-2.5, 0.4), (3.0, -0.5), (1.5, -0.3), (0.0, 0.0))
    theirs = [game.step(a[::-1]) for a in actions[: len(ours)]]
    for a, b in zip(ours[:40], theirs[:40], strict=True):
        np.testing.assert_allclose(a.observations[0], b.observations[1], atol=1e-3)
        assert a.rewards[0] == pytest.approx(b.rewards[1], abs=1e-4)


def test_the_looking_glass_shows_a_game_that_can_be_played() -> None:
    game = HockeyGame()
    actions = np.random.default_rng(5).uniform(-1, 1, (40, 2, 4))
    game.reset(1)
    game.rink.reset((-3.0, 0.5), (2.5, -0.4), (-1.5, 0.3), (0.0, 0.0))
    ours = [game.step(a).observations for a in actions]
    game.reset(1)
    game.rink.reset((-3.0, -0.5), (2.5, 0.4), (-1.5, -0.3), (0.0, 0.0))
    mirrored = [game.step(a * MIRROR_ACTION).observations for a in actions]
    for a, b in zip(ours, mirrored, strict=True):
        np.testing.assert_allclose(a * MIRROR_OBSERVATION, b, atol=0.01)  # contacts are solved in another order


@pytest.mark.parametrize(("mode", "steps"), [(Mode.NORMAL, 250), (Mode.TRAIN_SHOOTING, 80), (Mode.TRAIN_DEFENSE, 80)])
def test_time_is_up_as_truncation_or_as_the_original_has_it(mode: Mode, steps: int) -> None:
    def length(game: HockeyGame) -> tuple[int, bool, bool]:
        for seed in range(50):
            game.reset(seed)
            n = 0
            while not game.over:
                turn = game.step(NOTHING)
                n += 1
            if not turn.infos[0]["winner"]:
                return n, turn.terminated, turn.truncated
        raise AssertionError("every game had a goal")

    assert length(HockeyGame(mode)) == (steps, False, True)
    assert length(HockeyGame(mode, time_out="original")) == (steps + 1, True, False)


def test_starting_positions_depend_on_the_mode() -> None:
    game = HockeyGame()
    for seed in range(30):
        seen = game.reset(seed, first=seed % 2)[0]
        assert tuple(seen[[0, 1, 6, 7]]) == (-3.0, 0.0, 3.0, 0.0)
        side = -1 if seed % 2 == 0 else 1
        assert 1 <= side * seen[12] <= 2 and abs(seen[13]) <= 1 and not seen[14:].any()
    shooting = HockeyGame(Mode.TRAIN_SHOOTING)
    defence = HockeyGame(Mode.TRAIN_DEFENSE)
    places = []
    for seed in range(30):
        seen = shooting.reset(seed)[0]
        assert -2 <= seen[12] <= -1 and -0.34 < seen[6] < 3.5
        places.append(tuple(seen[6:8]))
        seen = defence.reset(seed)[0]
        assert seen[12] > 0 and not seen[14:16].any() and math.dist(seen[6:8], seen[12:14]) > 0.68
        seen = defence.step(NOTHING).observations[0]
        assert seen[14] < 0 and math.hypot(seen[14], seen[15]) == pytest.approx(60.0, abs=0.1)
    assert len(set(places)) == 30


def test_the_puck_begins_on_either_side_in_turn() -> None:
    game = HockeyGame()
    sides = [np.sign(game.reset(0 if i == 0 else None)[0][12]) for i in range(6)]
    assert sides == [-1, 1, -1, 1, -1, 1]


def test_a_goal_is_ten_for_one_and_minus_ten_for_the_other() -> None:
    game = HockeyGame()
    game.reset(0)
    game.rink.reset((-3.0, -2.0), (3.0, -2.0), (2.0, 0.5), (20.0, 0.0))
    while not game.over:
        turn = game.step(NOTHING)
    assert turn.terminated and not turn.truncated
    assert [info["winner"] for info in turn.infos] == [1, -1]
    for reward, info in zip(turn.rewards, turn.infos, strict=True):
        assert reward == pytest.approx(10 * info["winner"] + info["reward_closeness_to_puck"])


def test_closeness_counts_in_the_own_half_unless_the_puck_moves_away() -> None:
    game = HockeyGame()
    for velocity, expected in ((0.0, True), (3.0, False), (-3.0, True)):
        game.reset(0)
        game.rink.reset((-3.0, 2.0), (3.0, 0.0), (-1.5, -1.0), (velocity, 0.0))
        turn = game.step(NOTHING)
        own, puck = turn.observations[0][:2], turn.observations[0][12:14]
        far = float(np.hypot(*(own - puck)))
        # -30 over a whole game at 250 / 60 units' distance half of the time
        assert turn.infos[0]["reward_closeness_to_puck"] == pytest.approx(
            -30 / (4.1667 * 125) * far if expected else 0.0, rel=1e-3
        )
        assert turn.infos[1]["reward_closeness_to_puck"] == 0.0
        assert turn.infos[0]["reward_puck_direction"] == pytest.approx(velocity / (250 * 25), rel=0.01)


def test_a_catch_is_reported_once() -> None:
    game = HockeyGame()
    game.reset(0)
    game.rink.reset((-3.0, 0.0), (3.0, 0.0), (-2.0, 0.0), (-5.0, 0.0))
    touches = [game.step(NOTHING).infos[0]["reward_touch_puck"] for _ in range(20)]
    assert sum(touches) == 1


def test_without_keep_there_are_two_values_less_to_see_and_one_to_do() -> None:
    game = HockeyGame(keep=False)
    assert game.reset(0).shape == (2, 16)
    assert game.step(np.zeros((2, 3))).observations.shape == (2, 16)


@pytest.mark.parametrize("actions", [np.zeros((2, 3)), np.zeros(8), np.full((2, 4), np.nan)])
def test_wrong_actions_are_refused(actions: np.ndarray) -> None:
    game = HockeyGame()
    game.reset(0)
    with pytest.raises(ValueError, match="finite numbers for each of 2 players"):
        game.step(actions)


def test_a_game_that_is_over_must_be_begun_anew() -> None:
    with pytest.raises(RuntimeError, match="reset"):
        HockeyGame().step(NOTHING)


def test_an_unknown_opponent_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="weak, strong, random"):
        make_opponent("medium")
    assert {type(make_opponent(name)).__name__ for name in BOTS} == {"Bot", "RandomPlayer"}


def standing(left, right_name: str, n: int = 60) -> tuple[float, float, float]:
    def policy(rows: np.ndarray) -> np.ndarray:
        return np.stack([left.act(row) for row in rows])

    games = play(HockeyGames(), range(n), policy, right_name)
    return tuple(sum(game.numbers[which] for game in games) / n for which in ("wins", "ties", "losses"))


@pytest.mark.runs
def test_bots_beat_a_random_player() -> None:
    for name in ("weak", "strong"):
        wins, _, losses = standing(RandomPlayer(), name, 12)
        assert losses > wins + 0.1


@pytest.mark.runs
def test_strong_beats_weak_as_often_as_in_the_original() -> None:
    """The original's 4,000 games: 40.2 % won, 45.3 % tied, 14.4 % lost; here to within three standard errors."""
    n = 150
    for share, expected in zip(standing(Bot("strong"), "weak", n), ORIGINAL, strict=True):
        assert abs(share - expected) < 3 * math.sqrt(expected * (1 - expected) / n)


@pytest.mark.slow
def test_two_thousand_games_of_bots_end_as_those_of_the_original() -> None:
    n = 2000
    for share, expected in zip(standing(Bot("strong"), "weak", n), ORIGINAL, strict=True):
        variance = expected * (1 - expected)
        assert abs(share - expected) < 3 * math.sqrt(variance / n + variance / 4000)


def test_bots_reach_the_speeds_that_were_measured() -> None:
    """Strong against weak: player speed to about 10.9, puck to about 61, racket to about 1.3."""
    most = np.zeros(18)

    class Seen(Bot):
        def act(self, observation):
            np.maximum(most, np.abs(observation), out=most)
            return super().act(observation)

    standing(Seen("strong"), "weak", 15)
    assert 9.5 < most[3] < 11.5 and most[12] < 5.2 and 2.9 < most[13] < 3.2
    assert 45 < most[14] < 63 and most[2] < 1.7 and most[16] == 15
