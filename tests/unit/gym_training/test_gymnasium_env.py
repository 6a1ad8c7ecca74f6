"""Any environment by its name; observations of every space as rows; actions within their bounds."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from jurybox.training.environments.gymnasium_env import (
    Actions,
    EnvironmentUnusable,
    Observations,
    Seen,
    StrangeObservation,
    make_environment,
)

INF = np.inf


class Given(gymnasium.Env):
    """An environment with these spaces; observes samples."""

    def __init__(self, observation=None, action=None):
        self.observation_space = observation or spaces.Box(-1, 1, (2,))
        self.action_space = action or spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


def factory(**arguments):
    return Given(**arguments)


def something_else():
    return "an environment"


def broken():
    raise RuntimeError("no licence")


def row(space, value):
    return Observations(space).row(value).tolist()


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (spaces.Box(-INF, INF, (2,), np.float64), np.array([1.5, -2e6]), [1.5, -2e6]),
        (spaces.Box(-5, 5, (2, 2), np.int64), np.array([[1, 2], [3, -4]]), [1, 2, 3, -4]),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([0, 255], np.uint8), [0, 255]),
        (spaces.Box(0, 1, (2,), np.uint8), np.array([0, 1], np.uint8), [0, 1]),
        (spaces.Box(0, 1, (), np.float32), np.float32(0.5), [0.5]),
        (spaces.Discrete(3), 1, [0, 1, 0]),
        (spaces.Discrete(3, start=-1), np.int64(-1), [1, 0, 0]),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
        (spaces.MultiDiscrete([[2], [2]]), np.array([[1], [0]]), [0, 1, 1, 0]),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1]),
        (spaces.MultiBinary((2, 1)), np.array([[1], [0]], np.int8), [1, 0]),
        (spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (1,)))), (1, np.array([0.25])), [0, 1, 0.25]),
        (
            spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Dict({"x": spaces.Box(-INF, INF, (1,))})}),
            {"b": 0, "a": {"x": np.array([7.0], np.float32)}},
            [7, 1, 0],
        ),
    ],
)
def test_an_observation_of_any_space_is_a_row(space, value, expected) -> None:
    assert row(space, value) == pytest.approx(expected)
    observations = Observations(space)
    assert observations.row(space.sample()).dtype == observations.seen.dtype


def test_values_of_zero_and_one_are_stored_as_bytes() -> None:
    assert Observations(spaces.Discrete(4)).seen == Seen(4, (), True)
    assert Observations(spaces.Dict({"a": spaces.MultiBinary(2), "b": spaces.Box(0, 1, (1,))})).seen.dtype == "float32"


@pytest.mark.parametrize(
    ("shape", "kept"), [((48, 40, 3), (3, 48, 40)), ((4, 84, 84), (4, 84, 84)), ((36, 36, 1), (1, 36, 36))]
)
def test_a_picture_keeps_its_bytes_channels_first(shape, kept) -> None:
    observations = Observations(spaces.Box(0, 255, shape, np.uint8))
    assert observations.seen == Seen(0, (kept,))
    picture = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    found = observations.row(picture).reshape(kept)
    assert np.array_equal(found, picture if shape == kept else picture.transpose(2, 0, 1))


def test_a_small_picture_is_numbers() -> None:
    assert Observations(spaces.Box(0, 255, (8, 8, 3), np.uint8)).seen == Seen(192)


def test_numbers_beside_a_picture_are_kept_to_the_bit() -> None:
    space = spaces.Dict({"camera": spaces.Box(0, 255, (36, 36, 3), np.uint8), "speed": spaces.Box(-INF, INF, (2,))})
    observations = Observations(space)
    speed = np.array([0.1, -1e30], np.float32)
    found = observations.row({"camera": np.full((36, 36, 3), 9, np.uint8), "speed": speed})
    assert found.dtype == np.uint8 and observations.seen.size == len(found) == 8 + 36 * 36 * 3
    assert np.array_equal(found[:8].view(np.float32), speed) and (found[8:] == 9).all()


@pytest.mark.parametrize(
    ("space", "value", "told"),
    [
        (spaces.Discrete(3), 3, "holds 3"),
        (spaces.MultiDiscrete([2, 2]), np.array([0, 1, 1]), r"has the shape \(3,\)"),
        (spaces.MultiBinary(2), np.array([0, 2]), "other numbers than 0 and 1"),
        (spaces.Box(0, 1, (2,), np.uint8), np.array([0, 7]), "other numbers than 0 and 1"),
        (spaces.Box(-1, 1, (2,)), np.zeros(3), r"has the shape \(3,\)"),
        (spaces.Box(-INF, INF, (2,)), np.array([0, np.nan]), "holds nan"),
        (spaces.Box(-INF, INF, (1,), np.float64), np.array([1e300]), "1e.300, which is not finite"),
        (spaces.Box(0, 9, (2,), np.int64), np.array([1.5, 2.0]), "holds 1.5: expected int64"),
        (spaces.Box(0, 255, (2,), np.uint8), np.array([256, 0]), "holds 256: expected uint8"),
        (spaces.Box(-1, 1, (2,)), None, "is a NoneType, None: expected float32 of shape"),
        (spaces.Box(-1, 1, (2,)), [[1], [1, 2]], r"is a list, \[\[1\], \[1, 2\]\]: expected"),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 0}, r"an observation has no 'a': got \['b'\], expected"),
        (spaces.Dict({"a": spaces.Discrete(2)}), 3, "an observation has no 'a': got a int"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]), (1,), "an observation has no 1: got a tuple"),
        (spaces.Box(0, 255, (36, 36, 3), np.uint8), np.zeros((36, 36, 3), np.float32), "dtype float32"),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"a": 5}, r"observation\['a'\] holds 5"),
    ],
)
def test_an_observation_outside_its_space_is_an_error_with_its_place(space, value, told) -> None:
    with pytest.raises(StrangeObservation, match=told):
        Observations(space).row(value)


@pytest.mark.parametrize("space", [spaces.Text(5), spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))})])
def test_a_space_without_a_fixed_shape_is_refused(space) -> None:
    with pytest.raises(EnvironmentUnusable, match="expected Box, Discrete"):
        Observations(space)


def test_actions_are_scaled_to_their_bounds_and_cut_off_there() -> None:
    box = Actions(spaces.Box(np.array([-2, 0], np.float32), np.array([2, 10], np.float32)))
    assert box.chosen([0.0, -1.0]).tolist() == [0, 0] and box.chosen([1.0, 0.5]).tolist() == [2, 7.5]
    assert box.clipped([3.0, 4.0]).tolist() == [2, 4] and box.chosen([9.0, 0.0]).tolist() == [2, 5]
    assert box.chosen([0.0, 0.0]).dtype == np.float32
    assert Actions(spaces.Box(0, 9, (1,), np.int64)).chosen([0.9]).tolist() == [9]
    assert Actions(spaces.Discrete(3, start=5)).chosen(np.int64(2)) == 7
    unbounded = Actions(spaces.Box(-INF, INF, (2,)))
    assert not unbounded.spec.bounded and unbounded.clipped([1e9, -1e9]).tolist() == [1e9, -1e9]


@pytest.mark.parametrize(
    ("space", "chosen", "action"),
    [
        (spaces.MultiDiscrete([2, 3], start=[5, -1]), [1, 0], [6, -1]),
        (spaces.MultiDiscrete([[2], [3]]), [1, 2], [[1], [2]]),
        (spaces.MultiBinary((2, 2)), [1, 0, 0, 1], [[1, 0], [0, 1]]),
    ],
)
def test_several_choices_are_the_environments_action(space, chosen, action) -> None:
    actions = Actions(space)
    for convert in (actions.chosen, actions.clipped):
        made = convert(np.array(chosen))
        assert made.tolist() == action and made.dtype == space.dtype and space.contains(made)
    drawn = actions.spec.sample(np.random.default_rng(0), 500)
    assert drawn.shape == (500, len(chosen)) and all(space.contains(actions.chosen(each)) for each in drawn)
    assert [set(each) for each in drawn.T.tolist()] == [set(range(count)) for count in actions.spec.counts]


@pytest.mark.parametrize("space", [spaces.Tuple([spaces.Text(3)]), spaces.Text(3)])
def test_actions_of_other_spaces_are_refused(space) -> None:
    with pytest.raises(EnvironmentUnusable, match="expected Box, Discrete, MultiDiscrete or MultiBinary"):
        Actions(space)


def test_an_action_without_parts_is_refused() -> None:
    with pytest.raises(EnvironmentUnusable, match="is empty: there is nothing to choose"):
        Actions(spaces.Dict({}))


KINDS = {
    "MultiDiscrete": spaces.MultiDiscrete([3, 4], start=[5, -1]),
    "Discrete": spaces.Discrete(3),
    "Discrete that begins elsewhere": spaces.Discrete(3, start=-1),
    "MultiBinary": spaces.MultiBinary(3),
    "Box": spaces.Box(-1, 1, (2,)),
    "parts": spaces.Dict(a=spaces.Discrete(3, start=2), b=spaces.Tuple([spaces.MultiDiscrete([2, 5])])),
}


@pytest.mark.parametrize("space", KINDS.values(), ids=KINDS)
def test_a_stack_is_seen_as_its_observations_one_after_the_other(space) -> None:
    env = make_environment(f"{__name__}:factory", {"observation": space}, n_stack=3)
    one, stack = Observations(space), Observations(env.observation_space)
    assert stack.seen.numbers == 3 * one.seen.numbers
    assert [(each.kind, each.binary, each.dtype) for each in stack.seen.inputs] == [
        (each.kind, each.binary, each.dtype) for each in one.seen.inputs
    ]
    env.reset(seed=0)
    for _ in range(3):
        found = env.step(0)[0]
        assert found in env.observation_space
    again = make_environment(f"{__name__}:factory", {"observation": space})
    again.reset(seed=0)
    singles = [one.inputs(again.step(0)[0]) for _ in range(3)]
    for name, value in stack.inputs(found).items():
        np.testing.assert_array_equal(value, np.stack([each[name] for each in singles]))


def test_observations_are_stacked_and_pictures_made_gray_and_small_by_gymnasiums_wrappers() -> None:
    colours = spaces.Box(0, 255, (60, 80, 3), np.uint8)
    env = make_environment(f"{__name__}:factory", {"observation": colours}, grayscale=True, resize=(36, 40), n_stack=3)
    seen = Observations(env.observation_space).seen
    assert seen.pictures == ((3, 36, 40),) and seen.inputs[0].dtype == "uint8"
    first, _ = env.reset(seed=0)
    second = env.step(0)[0]
    assert (first[0] == first[2]).all() and (second[:2] == first[1:]).all() and env.observation_space.contains(second)
    numbers = make_environment("CartPole-v1", n_stack=2)
    assert Observations(numbers.observation_space).seen.numbers == 8


@pytest.mark.parametrize(
    ("options", "space", "told"),
    [
        (
            {"n_stack": 2},
            spaces.Box(0, 255, (36, 36, 3), np.uint8),
            "n_stack = 2 makes four dimensions.*grayscale",
        ),
        ({"grayscale": True}, spaces.Box(-1, 1, (3,)), "are for pictures of uint8 .height, width, 3."),
        ({"resize": (36, 36)}, spaces.Discrete(3), "are for pictures of uint8"),
    ],
)
def test_preprocessing_of_what_is_no_picture_is_refused(options, space, told) -> None:
    with pytest.raises(EnvironmentUnusable, match=told):
        make_environment(f"{__name__}:factory", {"observation": space}, **options)


def test_an_environment_is_made_by_its_name_or_by_a_function() -> None:
    cart = make_environment("CartPole-v1", {"render_mode": None})
    assert cart.spec is not None and cart.spec.id == "CartPole-v1"
    made = make_environment(f"{__name__}:factory", {"action": spaces.Discrete(7)})
    assert isinstance(made, Given) and made.action_space.n == 7
    assert make_environment("gymnasium:CartPole-v1").spec.id == "CartPole-v1"


def test_episodes_that_need_not_end_are_truncated() -> None:
    env = make_environment("Pendulum-v1", max_episode_steps=3)
    env.reset(seed=0)
    assert [env.step(np.zeros(1, np.float32))[3] for _ in range(3)] == [False, False, True]


def test_episodes_may_be_longer_than_the_environment_is_registered_with() -> None:
    env = make_environment("Pendulum-v1", max_episode_steps=300)
    env.reset(seed=0)
    ends = [env.step(np.zeros(1, np.float32))[3] for _ in range(300)]
    assert ends.index(True) == 299
    assert make_environment("Pendulum-v1", {"max_episode_steps": 300}).spec.max_episode_steps == 300
    limited = make_environment("tests.unit.gym_training.gym_worlds:mixed", max_episode_steps=1)
    limited.reset(seed=0)
    assert limited.step(0)[3], "what a function makes is limited, too"


def test_a_module_of_the_folder_that_one_is_in_is_found(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_worlds_here.py").write_text("import gymnasium\ndef make(): return gymnasium.make('CartPole-v1')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    assert isinstance(make_environment("my_worlds_here:make"), gymnasium.Env)


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("CartPol-v1", {}, "doesn't exist"),
        ("CartPole-v1", {"colour": 1}, "colour"),
        ("no_such_module:make", {}, "neither in this folder nor on PYTHONPATH"),
        (f"{__name__}:something_else", {}, "expected a gymnasium.Env"),
        (f"{__name__}:broken", {}, "no licence"),
    ],
)
def test_one_that_cannot_be_created_is_an_error_in_one_sentence(name, arguments, told) -> None:
    with pytest.raises(EnvironmentUnusable, match=told):
        make_environment(name, arguments)
