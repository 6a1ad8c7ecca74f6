from __future__ import annotations

import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from jurybox.studies.photo.environment import (
    Edits,
    PhotoConfig,
    RandomEdits,
    apply,
    build,
    evaluate,
    make_environment,
    no_edits,
)
from jurybox.studies.photo.environment.audit import damages_of
from jurybox.studies.photo.environment.edits import Degradation, degrade
from jurybox.studies.photo.environment.photo_edit import STEP_SIZES
from jurybox.studies.photo.learning import PhotoTraining
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.runtime.settings import changes_of

FAULTS = ("exposure", "haze", "saturation", "temperature", "blur", "noise", "tilt")


def rollout(environment, seed, actions):
    seen, info = environment.reset(seed=seed)
    moments = [(seen, 0.0, info)]
    for action in actions:
        seen, reward, *_, info = environment.step(action)
        moments.append((seen, reward, info))
    return moments


@pytest.fixture
def actions():
    return np.random.default_rng(3).uniform(-1, 1, (4, 9)).astype(np.float32)


def test_gymnasium_finds_nothing_wrong_with_it(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(make(render_mode="rgb_array"), skip_render_check=True)


def test_the_same_seed_gives_the_same_episode_in_another_environment(make, actions):
    for one, other in zip(rollout(make(), 5, actions), rollout(make(), 5, actions), strict=True):
        assert np.array_equal(one[0], other[0]) and one[1:] == other[1:]
    assert rollout(make(), 6, actions)[0][2] != rollout(make(), 5, actions)[0][2]


def test_a_seed_given_at_the_start_fixes_the_first_episode(make):
    first, second, other = (make(seed=seed) for seed in (8, 8, 9))
    starts = [environment.reset()[1] for environment in (first, second, other)]
    assert starts[0] == starts[1] != starts[2]
    assert first.reset()[1] != starts[0], "the next episode is another one"


def test_rewards_add_up_to_the_improvement(make, actions):
    moments = rollout(make(reward_scale=10.0, score_range=(0.0, 2.0)), 1, actions)
    gained = moments[-1][2]["score"] - moments[0][2]["score"]
    assert sum(reward for _, reward, _ in moments) == pytest.approx(10.0 * gained / 2.0)
    assert all(info["score_before"] == moments[0][2]["score"] for _, _, info in moments)


def test_an_episode_terminates_after_its_steps_and_is_never_truncated(make):
    environment = make(steps=3)
    environment.reset(seed=0)
    ends = [environment.step(np.zeros(9, np.float32))[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (True, False)]
    with pytest.raises(RuntimeError, match="call reset"):
        environment.step(np.zeros(9, np.float32))


def test_stepping_before_a_reset_is_refused(make):
    with pytest.raises(RuntimeError, match="call reset"):
        make().step(np.zeros(9, np.float32))


@pytest.mark.parametrize("action", [np.zeros(8), np.full(9, np.nan)])
def test_a_wrong_action_is_refused_and_takes_no_step(make, action):
    environment = make(steps=1)
    environment.reset(seed=0)
    with pytest.raises(ValueError, match="9 finite numbers"):
        environment.step(action)
    assert environment.step(np.zeros(9, np.float32))[2]


@pytest.mark.parametrize("deflection", [1.0, -1.0, 5.0, 0.5])
def test_an_action_moves_every_tool_by_its_share_of_a_step_and_no_further(make, deflection):
    info = rollout(make(), 0, np.full((1, 9), deflection, np.float32))[-1][2]
    expected = Edits().moved(np.clip(deflection, -1, 1) * STEP_SIZES).as_dict()
    assert info["edits"] == pytest.approx(expected) and info["edits"]["exposure"] != 0


def test_the_scorer_sees_the_original_edited_once_however_many_steps_it_took(make, scorer, actions):
    environment = make(scorer=scorer)
    infos = [info for _, _, info in rollout(environment, 2, actions)]
    damaged = scorer.scored[0]
    assert len(scorer.scored) == 5
    for picture, info in zip(scorer.scored, infos, strict=True):
        assert np.array_equal(picture, apply(damaged, Edits(**info["edits"])))


def test_pictures_are_rendered_into_the_scorers_own_buffer(make, scorer, actions):
    buffer = scorer.buffer
    environment = make(scorer=scorer, render_mode="rgb_array")
    rollout(environment, 2, actions)
    assert scorer.buffer is buffer
    assert np.array_equal(environment.render(), buffer)
    assert not np.shares_memory(environment.render(), buffer)


def test_no_edits_change_nothing(make):
    environment = make()
    moments = rollout(environment, 4, np.zeros((4, 9), np.float32))
    assert [reward for _, reward, _ in moments] == [0.0] * 5


def test_a_new_episode_starts_from_no_edits(make, scorer, actions):
    environment = make(scorer=scorer)
    rollout(environment, 1, actions)
    seen, info = environment.reset(seed=1)
    assert info["edits"] == Edits().as_dict()
    assert np.array_equal(scorer.scored[-1], scorer.scored[0])
    assert np.array_equal(seen, make().reset(seed=1)[0])


def test_info_has_photo_edits_scores_and_damage(make, actions):
    info = rollout(make(), 1, actions)[-1][2]
    assert set(info) == {"score", "score_before", "photo", "edits", "degradation"}
    assert info["edits"] == Edits(**info["edits"]).as_dict() != Edits().as_dict()


def test_training_never_draws_a_held_out_photo(make, library):
    drawn = {side: set() for side in ("training", "held_out")}
    for side, names in drawn.items():
        environment = make(split=side, seed=0)
        names.update(environment.reset()[1]["photo"] for _ in range(60))
    assert drawn["training"] == {photo.name for photo in library.training}
    assert drawn["held_out"] == {photo.name for photo in library.held_out}
    with pytest.raises(ValueError, match=r"no training photo is called 'chelsea\.png'"):
        make(split="training").reset(options={"photo": "chelsea.png"})


def test_closing_the_environment_closes_its_scorer(make, scorer):
    make(scorer=scorer).close()
    assert scorer.closed == 1


@pytest.mark.parametrize("settings", [{"steps": 0}, {"score_range": (1.0, 1.0)}, {"render_mode": "human"}])
def test_unusable_settings_are_refused(make, settings):
    with pytest.raises(ValueError, match="expected"):
        make(**settings)


def test_the_factory_crosses_to_another_process_and_seeds_by_index():
    config = PhotoConfig(seed=40, steps=5)
    environments = [pickle.loads(pickle.dumps(make_environment(config, index)))() for index in (0, 3, 3)]
    assert [environment.np_random_seed for environment in environments] == [40, 43, 43]
    assert {environment.steps for environment in environments} == {5}
    assert environments[1].np_random.random() == environments[2].np_random.random()


def test_the_factory_uses_no_server_before_the_first_reset():
    environment = build(PhotoConfig(address="ipc:///nowhere/at/all", timeout=0.1))
    environment.close()


def test_an_unknown_kind_of_scorer_is_refused():
    with pytest.raises(ValueError, match="'server' or 'local'"):
        build(PhotoConfig(scorer="oracle"))  # type: ignore[arg-type]


def test_policies_are_compared_on_exactly_the_same_damaged_photos(make, library):
    environment = make(split="held_out", seed=99)
    untouched = evaluate(environment, no_edits, range(2))
    environment.reset()
    randomly = evaluate(environment, RandomEdits(1), range(2))
    assert len(untouched.outcomes) == 2 * len(library.held_out)
    for one, other in zip(untouched.outcomes, randomly.outcomes, strict=True):
        assert (one.photo, one.seed, one.before) == (other.photo, other.seed, other.before)
        assert np.array_equal(one.damaged, other.damaged)
        assert np.array_equal(one.damaged, one.edited) and not np.array_equal(other.damaged, other.edited)
    assert untouched.improvement == 0.0 and not any(each.after > each.before for each in untouched.outcomes)
    assert randomly.improvement == pytest.approx(randomly.after - untouched.after)


def test_photos_of_one_seed_are_damaged_differently(make, library):
    outcomes = evaluate(make(split="held_out"), no_edits, [3]).outcomes
    assert len(outcomes) == len(library.held_out) > 1
    assert len({tuple(outcome.degradation.values()) for outcome in outcomes}) == len(outcomes)


def test_some_episodes_have_an_intact_photo_and_none_if_damage_is_requested(make):
    environment = make(intact=0.5, seed=4)
    drawn = [environment.reset()[1]["degradation"] for _ in range(40)]
    assert 8 < sum(not any(each[name] for name in FAULTS) for each in drawn) < 32
    asked = [environment.reset(options={"intact": False})[1]["degradation"] for _ in range(12)]
    assert all(any(each[name] for name in FAULTS) for each in asked)
    with pytest.raises(ValueError, match="from 0 to 1"):
        make(intact=1.5)


def test_a_requested_damage_is_done_to_the_crop_that_the_seed_has_anyway(make):
    environment = make(intact=1.0, tilted=1.0, seed=4)
    environment.reset(seed=7)
    whole = environment.undamaged()
    asked = environment.reset(seed=7, options={"degradation": {"temperature": 0.8}})[1]["degradation"]
    assert {name: value for name, value in asked.items() if value != getattr(Degradation(), name)} == {
        "temperature": 0.8
    }
    assert np.array_equal(environment.undamaged(), whole)
    assert np.array_equal(environment.picture(), degrade(whole, Degradation(temperature=0.8)))
    with pytest.raises(TypeError, match="warmth"):
        environment.reset(options={"degradation": {"warmth": 0.8}})


def test_of_the_photos_without_a_tilt_a_share_is_tilted_and_no_intact_one(make):
    plain, tilted = ([make(seed=4, tilted=share).reset()[1]["degradation"] for _ in range(1)] for share in (0.0, 1.0))
    assert {**tilted[0], "tilt": 0.0} == {**plain[0], "tilt": 0.0}, "all else is drawn as without it"
    environment = make(seed=4, tilted=1.0)
    assert all(environment.reset(options={"intact": False})[1]["degradation"]["tilt"] for _ in range(10))
    assert not environment.reset(options={"intact": True})[1]["degradation"]["tilt"]
    held = PhotoConfig(intact=0.5, tilted=0.5).held_out()
    assert (held.intact, held.tilted) == (0.0, 0.0), "the evaluation's damage is always the same"
    with pytest.raises(ValueError, match="from 0 to 1"):
        make(tilted=-0.5)


def test_a_share_of_the_damaged_photos_has_one_fault_alone(make):
    def drawn(**shares):
        environment = make(seed=4, **shares)
        return [environment.reset(options={"intact": False})[1]["degradation"] for _ in range(10)]

    def faults(each):
        return len(damages_of(each))

    assert all(faults(each) == 1 for each in drawn(lone=1.0))
    assert all(faults(each) >= 2 for each in drawn(lone=0.0))
    assert {faults(each) > 1 for each in drawn(lone=0.5)} == {True, False}
    assert all(each["tilt"] and faults(each) <= 2 for each in drawn(lone=1.0, tilted=1.0)), "the tilt is beside it"
    assert PhotoConfig(lone=0.5).held_out().lone == 0.0
    with pytest.raises(ValueError, match="from 0 to 1"):
        make(lone=1.5)


def test_an_outcome_has_the_score_of_every_step(make):
    outcome = evaluate(make(steps=3), RandomEdits(0), [7]).outcomes[0]
    assert len(outcome.scores) == 4 and outcome.after == outcome.scores[-1] != outcome.before == outcome.scores[0]
    assert np.array_equal(apply(outcome.damaged, Edits(**outcome.edits)), outcome.edited)


def test_an_evaluation_without_seeds_is_refused(make):
    with pytest.raises(ValueError, match="at least one seed"):
        evaluate(make(), no_edits, [])


@pytest.mark.runs
def test_a_hill_climber_improves_every_held_out_photo_and_random_edits_do_not(make):
    environment = make(split="held_out", steps=60)

    class Climb:
        """Keeps an edit that raised the score in the observation, and reverts any other."""

        def __init__(self):
            self.rng = np.random.default_rng(0)
            self.before = -np.inf
            self.move = None

        def __call__(self, seen):
            from jurybox.studies.photo.environment.observation import SCORE, TIME

            score = float(seen[SCORE][0])
            if seen[TIME][0] == -1.0:
                self.before, self.move = score, None
            if self.move is not None and score <= self.before:
                undo, self.move = -self.move, None
                return undo
            self.before = score
            self.move = np.zeros(9, np.float32)
            self.move[self.rng.integers(5)] = self.rng.choice([-0.5, 0.5])
            return self.move

    climbed = evaluate(environment, Climb(), range(1))
    randomly = evaluate(environment, RandomEdits(0), range(2))
    assert climbed.improvement > 0.15 and all(each.after > each.before for each in climbed.outcomes)
    assert randomly.improvement < climbed.improvement / 2


def test_with_a_price_an_intact_photo_is_best_left_alone(make):
    class Content:
        """Finds every picture as good as any other."""

        def __init__(self):
            self.buffer = np.zeros((384, 384, 3), np.uint8)

        def score(self):
            return 0.5

        def close(self):
            pass

    environment = make(scorer=Content(), price=0.01)
    environment.reset(seed=4, options={"intact": True})
    assert environment.step(np.zeros(9, np.float32))[1] == 0.0
    for tool in range(9):
        environment.reset(seed=4, options={"intact": True})
        action = np.zeros(9, np.float32)
        action[tool] = 1.0
        assert environment.step(action)[1] < 0.0


def test_the_price_depends_on_the_distance_and_is_refunded_with_the_edit(make, actions):
    free, priced = rollout(make(), 1, actions), rollout(make(price=0.01), 1, actions)
    environment = make(price=0.01)
    rollout(environment, 1, actions)
    paid = sum(step[1] for step in free) - sum(step[1] for step in priced)
    assert paid == pytest.approx(10.0 * 0.01 * environment.moved())
    back = rollout(make(price=0.01), 1, [actions[0] / 4, -actions[0] / 4])
    assert sum(step[1] for step in back) == pytest.approx(0.0, abs=0.02)


def test_one_setting_of_the_environment_leaves_the_others_and_the_seed_is_the_trainings() -> None:
    read = PhotoTraining.read(None, changes_of(["environment.price = 0.004"], {}))
    assert read.environment == replace(PhotoTraining().environment, price=0.004)
    with pytest.raises(ConfigError, match=r"environment\.seed .* set seed instead"):
        PhotoTraining.read(None, changes_of(["environment.seed = 3"], {}))
