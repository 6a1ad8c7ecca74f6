"""Gymnasium, PettingZoo, the original's interface, pictures."""

from __future__ import annotations

import enum
import secrets
import sys
import types
import warnings

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from pettingzoo.test import parallel_api_test, parallel_seed_test
from tests.unit.hockey.hockey_runs import Nothing, settings

from jurybox.training.environments.hockey import Bot, HockeyGame, Mode, make_game
from jurybox.training.environments.hockey.drawing import draw, film
from jurybox.training.environments.hockey.parallel import HockeyParallel
from jurybox.training.environments.hockey.single import DISCRETE_ACTIONS, HockeyEnv
from jurybox.training.film import save_film
from jurybox.training.recipes.hockey import plan
from jurybox.training.runtime.run import run


@pytest.mark.parametrize("options", [{}, {"discrete": True}, {"keep": False}, {"mode": Mode.TRAIN_DEFENSE}])
def test_gymnasium_finds_nothing_wrong(options: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Observations are unbounded, as the original's; and the environment is not in Gymnasium's registry.
        warnings.filterwarnings("ignore", message=".*(infinity|not having a spec)")
        check_env(HockeyEnv(render_mode="rgb_array", **options), skip_render_check=False)


def test_pettingzoo_finds_nothing_wrong(capsys) -> None:
    parallel_api_test(HockeyParallel(), num_cycles=600)
    parallel_seed_test(HockeyParallel, num_cycles=100)


def test_single_and_parallel_play_the_same_game() -> None:
    single, parallel = HockeyEnv("weak", seed=3), HockeyParallel()
    seen, _ = single.reset(options={"first": 1})
    chance = int(gymnasium.utils.seeding.np_random(3)[0].integers(2**31))
    both, _ = parallel.reset(chance, options={"first": 1})
    bot = Bot("weak", chance)
    np.testing.assert_array_equal(seen, both["left"])
    for _ in range(60):
        action = np.array([0.3, -0.2, 0.1, 0.0], np.float32)
        seen, reward, *_ = single.step(action)
        both, rewards, *_ = parallel.step({"left": action, "right": bot.act(both["right"])})
        np.testing.assert_array_equal(seen, both["left"])
        assert reward == rewards["left"]
        if not parallel.agents:
            break


def test_a_discrete_action_is_a_row_of_the_table() -> None:
    a, b = HockeyEnv(discrete=True), HockeyEnv()
    for env in (a, b):
        env.reset(seed=1)
    for number in range(8):
        np.testing.assert_array_equal(a.step(number)[0], b.step(DISCRETE_ACTIONS[number])[0])


def test_frames_show_players_puck_and_score_without_a_display(monkeypatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    game = HockeyGame()
    game.reset(0)
    before = draw(game, score=(0, 0))
    assert before.dtype == np.uint8 and before.shape[1:] == (640, 3)
    np.testing.assert_array_equal(before, draw(game, score=(0, 0)))
    x, y = game.rink.puck.position
    pixel = before[round((4.45 - y) * 64), round((x + 5) * 64)]
    assert pixel.max() < 60  # the puck is black
    assert (before != draw(game, score=(1, 0))).any()
    for _ in range(10):
        game.step(np.ones((2, 4)))
    assert (before != draw(game, score=(0, 0))).any()


def test_a_game_becomes_a_gif_and_an_mp4(tmp_path) -> None:
    bot = Bot("strong", 1)
    frames = film(lambda rows: bot.act(rows[0])[None], Bot("weak"), games=1, every=5, width=200)
    assert len(frames) > 5
    save_film(frames, tmp_path / "game.gif", 10)
    save_film(frames, tmp_path / "game.mp4", 10)
    assert imageio.imread(tmp_path / "game.gif").shape[1:] == frames[0].shape
    assert (tmp_path / "game.mp4").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"\.gif, \.png"):
        save_film(frames, tmp_path / "game.avi", 10)


class TheirMode(enum.Enum):
    NORMAL = 0
    TRAIN_SHOOTING = 1
    TRAIN_DEFENSE = 2


class LikeTheOriginal:
    """The original's interface and its ways.

    Its actions are both players' joined; the end of time comes as terminated, one step late, and truncated never; it
    declares 18 observations even where the puck is not kept; its modes are an Enum of its own; `reset` draws a seed of
    its own where it gets none, and fails when it gets a mode.
    """

    def __init__(self, keep_mode: bool = True, mode: int | str | TheirMode = TheirMode.NORMAL, verbose: bool = False):
        self.mode = TheirMode[mode] if isinstance(mode, str) else TheirMode(mode)
        self.game = HockeyGame(self.mode.value, keep=keep_mode, time_out="original")
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (18,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (2 * self.game.action_size,), np.float32)

    def reset(self, one_starting=None, mode=None, seed=None, options=None):
        if mode is not None:
            raise TypeError("hasattr(): attribute name must be string")
        seed = secrets.randbits(31) if seed is None else seed
        self._seen = self.game.reset(seed, first=None if one_starting is None else 0 if one_starting else 1)
        return self._seen[0].astype(np.float64), self.get_info_agent_two()

    def step(self, action):
        assert action.shape == self.action_space.shape
        turn = self.game.step(np.clip(action, -1, 1).reshape(2, -1))
        self._seen, self._infos = turn.observations, turn.infos
        return turn.observations[0].astype(np.float64), turn.rewards[0], turn.terminated, False, dict(turn.infos[0])

    def obs_agent_two(self):
        return self._seen[1].astype(np.float64)

    def get_info_agent_two(self):
        return self.game._info(1, self.game.rink.scorer)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def like_the_original(monkeypatch) -> str:
    module = types.ModuleType("like_the_original")
    module.HockeyEnv, module.Mode = LikeTheOriginal, TheirMode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "like_the_original", module)
    return "like_the_original:HockeyEnv"


def test_another_environment_with_the_originals_interface_is_played_as_ours(like_the_original: str) -> None:
    ours, theirs = HockeyGame(), make_game(like_the_original)
    assert (theirs.observation_size, theirs.action_size) == (18, 4)
    a, b = ours.reset(4, first=1), theirs.reset(4, first=1)
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(a, b)
    for _ in range(200):
        actions = rng.uniform(-1, 1, (2, 4))
        mine, other = ours.step(actions), theirs.step(actions)
        np.testing.assert_array_equal(mine.observations, other.observations)
        assert other.rewards == pytest.approx(mine.rewards)
        if mine.terminated:
            break
    theirs.close()
    assert theirs.environment.closed  # type: ignore[attr-defined]


def test_a_game_without_keeping_the_puck_has_the_sizes_that_it_plays_with(like_the_original: str) -> None:
    game = make_game(like_the_original, keep=False)
    assert (game.observation_size, game.action_size) == (*game.reset(0).shape[1:], 3) == (16, 3)
    assert game.step(np.zeros((2, 3))).observations.shape == (2, 16)


def test_games_after_a_seeded_one_can_be_repeated(like_the_original: str) -> None:
    def starts(game) -> list[np.ndarray]:
        return [game.reset(5 if number == 0 else None, first=0) for number in range(3)]

    one, two = (make_game(like_the_original) for _ in range(2))
    np.testing.assert_array_equal(starts(one), starts(two))
    seeded = [make_game(like_the_original, seed=3).reset(first=0) for _ in range(2)]
    np.testing.assert_array_equal(*seeded)


def test_the_training_plays_it_by_its_name(like_the_original: str, tmp_path) -> None:
    s = settings(environment=like_the_original, steps=1200, evaluate_every=600)
    outcome = run(plan(s, tmp_path), tmp_path, Nothing(), serial=True)
    assert outcome.env_steps >= 1200 and outcome.episodes > 0 and outcome.learner_steps > 50


def test_its_end_of_time_comes_as_truncation(like_the_original: str) -> None:
    game = make_game(like_the_original, Mode.TRAIN_SHOOTING)
    game.reset(0)
    for step in range(81):
        turn = game.step(np.zeros((2, 4)))
        assert not turn.terminated
        assert turn.truncated == (step == 80)


def test_an_environment_that_is_not_installed_is_told_how_to_get(like_the_original: str) -> None:
    with pytest.raises(ImportError, match="pip install"):
        make_game("no_such_hockey.hockey_env:HockeyEnv")
    with pytest.raises(ImportError, match="no 'Icehockey'"):
        make_game("like_the_original:Icehockey")
    with pytest.raises(ValueError, match="module:Class"):
        make_game("hockey")
