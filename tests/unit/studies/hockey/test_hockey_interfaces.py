"""Gymnasium, PettingZoo, the original's interface, pictures."""

from __future__ import annotations

import importlib
import inspect
import types
import warnings

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from pettingzoo.test import parallel_api_test, parallel_seed_test
from tests.unit.studies.hockey import like_the_original
from tests.unit.studies.hockey.hockey_runs import Nothing, settings

from jurybox.studies.hockey import Bot, HockeyGame, Mode, make_game
from jurybox.studies.hockey.drawing import draw, film
from jurybox.studies.hockey.parallel import HockeyParallel
from jurybox.studies.hockey.single import DISCRETE_ACTIONS, HockeyEnv
from jurybox.studies.hockey.train import plan
from jurybox.training.film import save_film
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
    frames = film(lambda rows: bot.act(rows[0])[None], "weak", games=1, every=5, width=200)
    assert len(frames) > 5
    save_film(frames, tmp_path / "game.gif", 10)
    save_film(frames, tmp_path / "game.mp4", 10)
    assert imageio.imread(tmp_path / "game.gif").shape[1:] == frames[0].shape
    assert (tmp_path / "game.mp4").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"\.gif, \.png"):
        save_film(frames, tmp_path / "game.avi", 10)


LIKE_THE_ORIGINAL = f"{like_the_original.__name__}:HockeyEnv"


def interface(module: types.ModuleType) -> dict[str, object]:
    """What a user of the module's `HockeyEnv` can rely on."""
    kind = module.HockeyEnv
    public = {name for name in vars(kind) if not name.startswith("_") and name != "r_uniform"}
    methods = {name: inspect.signature(getattr(kind, name)) for name in public if callable(getattr(kind, name))}
    env = kind()
    state, info = env.reset(seed=3)
    row = env.step(np.zeros(8))
    return {
        "made with": [(p.name, p.kind) for p in inspect.signature(kind).parameters.values()],
        "methods": {n: [(p.name, p.kind, p.default) for p in s.parameters.values()] for n, s in methods.items()},
        "others": sorted(public - methods.keys()),
        "spaces": (kind.metadata, env.observation_space, env.action_space, env.discrete_action_space, env.num_actions),
        "state": (state.dtype, state.shape, env.obs_agent_two().dtype, env.obs_agent_two().shape),
        "infos": [{name: type(value) for name, value in each.items()} for each in (info, env.get_info_agent_two())],
        "a step": [type(value) for value in row],
        "modes": [(mode.name, mode.value) for mode in module.Mode],
        "bases": [base.__name__ for base in kind.__mro__],
    }


def test_the_stand_in_has_the_originals_interface() -> None:
    original = pytest.importorskip("hockey.hockey_env", reason="the original is not installed")
    assert interface(like_the_original) == interface(original)


def test_the_stand_in_has_the_originals_ways() -> None:
    try:
        modules = [like_the_original, importlib.import_module("hockey.hockey_env")]
    except ImportError:
        modules = [like_the_original]
    for module in modules:
        env = module.HockeyEnv()
        sides = []
        for _ in range(3):
            env.reset()
            sides.append(bool(env.obs_agent_two()[12] > 0))  # the puck is in the other's half, as player two sees it
        assert sides == [False, True, False], "nobody is told to start: players do in turn, player two first"
        assert [env.reset(one_starting=one)[0][12] < 0 for one in (True, True, False)] == [True, True, False]
        with pytest.raises(TypeError):
            env.reset(mode=module.Mode.NORMAL)
        assert module.HockeyEnv(mode="TRAIN_DEFENSE").mode is module.HockeyEnv(mode=2).mode is module.Mode.TRAIN_DEFENSE
        shooting = module.HockeyEnv(mode=module.Mode.TRAIN_SHOOTING)
        ended = [shooting.step(np.zeros(8))[2:4] for _ in range(82)]
        assert ended == [(False, False)] * 80 + [(True, False)] * 2, "time is up late, as terminated; steps go on"


def test_another_environment_with_the_originals_interface_is_played_as_ours() -> None:
    ours, theirs = HockeyGame(), make_game(LIKE_THE_ORIGINAL)
    assert (theirs.observation_size, theirs.action_size) == (18, 4)
    a, b = ours.reset(4, first=1), theirs.reset(4, first=1)
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(a, b)
    for _ in range(200):
        actions = rng.uniform(-1, 1, (2, 4)).astype(np.float32)  # the original's precision
        mine, other = ours.step(actions), theirs.step(actions)
        np.testing.assert_array_equal(mine.observations, other.observations)
        assert other.rewards == pytest.approx(mine.rewards)
        if mine.terminated:
            break
    theirs.close()
    assert not theirs.environment.isopen  # type: ignore[attr-defined]


def test_a_game_without_keeping_the_puck_has_the_sizes_that_it_plays_with() -> None:
    game = make_game(LIKE_THE_ORIGINAL, keep=False)
    assert (game.observation_size, game.action_size) == (*game.reset(0).shape[1:], 3) == (16, 3)
    assert game.step(np.zeros((2, 3))).observations.shape == (2, 16)


def test_games_after_a_seeded_one_can_be_repeated() -> None:
    def starts(game) -> list[np.ndarray]:
        return [game.reset(5 if number == 0 else None, first=0) for number in range(3)]

    one, two = (make_game(LIKE_THE_ORIGINAL) for _ in range(2))
    np.testing.assert_array_equal(starts(one), starts(two))
    seeded = [make_game(LIKE_THE_ORIGINAL, seed=3).reset(first=0) for _ in range(2)]
    np.testing.assert_array_equal(*seeded)


def test_the_training_plays_it_by_its_name(tmp_path) -> None:
    s = settings(env=LIKE_THE_ORIGINAL, envs=2, steps=400, evaluate_every=0)
    outcome = run(plan(s, tmp_path), tmp_path, Nothing(), serial=True)
    assert outcome.env_steps >= 400 and outcome.episodes > 0 and outcome.learner_steps > 5


def test_its_time_limit_is_reported_as_truncation() -> None:
    game = make_game(LIKE_THE_ORIGINAL, Mode.TRAIN_SHOOTING)
    game.reset(0)
    for step in range(81):
        turn = game.step(np.zeros((2, 4)))
        assert not turn.terminated
        assert turn.truncated == (step == 80)


def test_the_error_for_a_missing_environment_says_how_to_install_it() -> None:
    with pytest.raises(ImportError, match="pip install"):
        make_game("no_such_hockey.hockey_env:HockeyEnv")
    with pytest.raises(ImportError, match="no 'Icehockey'"):
        make_game(LIKE_THE_ORIGINAL.replace("HockeyEnv", "Icehockey"))
    with pytest.raises(ValueError, match="module:Class"):
        make_game("hockey")
