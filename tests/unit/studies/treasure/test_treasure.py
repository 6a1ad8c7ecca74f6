"""The treasure hunt keeps its rules, and PettingZoo's."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from pettingzoo.test import api_test, seed_test

from jurybox.studies.treasure import FIRST_GEM, FLOOR, WALL, Move, TreasureConfig, TreasureHunt, TreasureWorld


def world(**changes):
    return TreasureWorld(TreasureConfig(**changes), np.random.default_rng(3))


def test_pettingzoo_finds_nothing_wrong():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # It warns of integer planes, which are intended here.
        warnings.filterwarnings("ignore", message=".*(Observation|observation).*")
        api_test(TreasureHunt(agents=3, turns=20), num_cycles=200)
        seed_test(lambda: TreasureHunt(agents=2, turns=20), num_cycles=50)


def test_no_two_agents_are_on_one_tile_and_none_in_a_wall():
    crowded = world(agents=20, height=9, width=9, gems=(5, 3, 2), walls=0.1)
    random = np.random.default_rng(0)
    for _ in range(300):
        crowded.entities_act()
        for agent in range(20):
            crowded.act(agent, int(random.integers(5)))
            places = {tuple(place) for place in crowded.places}
            assert len(places) == 20
            assert all(crowded.tiles[place] != WALL for place in places)


def test_a_gem_is_worth_its_value_once():
    small = world(agents=1, height=5, width=5, gems=(0, 0, 1), walls=0.0, growth=0.0)
    total = 0.0
    for _ in range(20):
        gem = np.argwhere(small.tiles == FIRST_GEM + 2)
        if len(gem):
            (row, column), (here, there) = gem[0], small.places[0]
            move = Move.UP if row < here else Move.DOWN if row > here else Move.LEFT if column < there else Move.RIGHT
            total += small.act(0, move)
        else:
            total += small.act(0, int(small.random.integers(4)))
    assert total == 10.0


def test_gems_grow_again_up_to_their_number_and_before_agents_act():
    env = TreasureHunt(agents=1, gems=(4, 0, 0), growth=1.0, turns=50)
    env.reset(seed=1)
    for _ in range(40):
        assert np.count_nonzero(env.world.tiles == FIRST_GEM) == 4
        env.step(int(env.world.random.integers(5)))


def test_an_agent_sees_its_window_and_not_itself():
    wide = world(agents=2, walls=0.1)
    random = np.random.default_rng(0)
    padded = lambda: np.pad(wide.tiles, 2, constant_values=WALL)  # noqa: E731
    for _ in range(200):
        wide.entities_act()
        for agent in (0, 1):
            seen, (row, column) = wide.pov(agent), wide.places[agent]
            window = padded()[row : row + 5, column : column + 5]
            assert np.array_equal(seen[0], window == WALL)
            assert all(np.array_equal(seen[2 + kind], window == FIRST_GEM + kind) for kind in range(3))
            other = wide.places[1 - agent] - wide.places[agent] + 2
            expected = np.zeros((5, 5))
            if (other >= 0).all() and (other < 5).all():
                expected[tuple(other)] = 1
            assert np.array_equal(seen[1], expected)
            wide.act(agent, int(random.integers(5)))


@pytest.mark.parametrize(
    "walls", [pytest.param(0.0, marks=pytest.mark.runs), pytest.param(0.1, marks=pytest.mark.runs), 0.4]
)
def test_walls_never_cut_the_floor_in_two(walls):
    for seed in range(10):
        tiles = TreasureWorld(TreasureConfig(walls=walls, gems=(2, 1, 1)), np.random.default_rng(seed)).tiles
        floor = {tuple(place) for place in np.argwhere(tiles != WALL)}
        reached, ahead = set(), [next(iter(floor))]
        while ahead:
            row, column = ahead.pop()
            if (row, column) in floor - reached:
                reached.add((row, column))
                ahead += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        assert reached == floor


def test_settings_of_the_world_are_arguments_and_nothing_else_is():
    env = TreasureHunt(agents=5, turns=7, render_mode="rgb_array")
    assert len(env.possible_agents) == 5 and env.config == TreasureConfig(agents=5, turns=7)
    with pytest.raises(TypeError):
        TreasureHunt(TreasureConfig(), agents=5)  # which of the two would count?


def test_worlds_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="odd view"):
        TreasureConfig(view=4)
    with pytest.raises(ValueError, match="too few"):
        TreasureConfig(height=5, width=5)
    assert FLOOR == 0
