"""Schedules of settings: what they give, and that an update with one is that with the number that it gives then."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from tests.unit.algorithms.acting import algorithm, spec_of
from tests.unit.algorithms.test_recorded_losses import DISCRETE, SMALL, batch, rollout

from jurybox.training.algorithms.base import Progress
from jurybox.training.algorithms.schedules import AnySchedule, NoiseSchedule, Schedule, ShareSchedule, at

HALF = Progress(50, 100)
KINDS = {"positive": Schedule, "any": AnySchedule, "noise": NoiseSchedule, "share": ShareSchedule}


@pytest.mark.parametrize(
    ("schedule", "first", "quarter", "last"),
    [
        (0.3, 0.3, 0.3, 0.3),
        ("lin_0.4", 0.4, 0.1, 0.0),
        ("lin_1e-3_2e-3", 1e-3, 1.75e-3, 2e-3),
        ("cos_0.4_0.2", 0.4, 0.2 + 0.1 * (1 - math.sqrt(0.5)), 0.2),
        ("cos_-1", -1.0, -0.5 * (1 - math.sqrt(0.5)), 0.0),
    ],
)
def test_a_schedule_goes_from_its_first_to_its_last_number(schedule, first, quarter, last) -> None:
    given = at(schedule, 1.0), at(schedule, 0.25), at(schedule, 0.0)
    assert given == pytest.approx((first, quarter, last), abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "value", "told"),
    [
        ("positive", "linear_1", r'expected a number, "lin_0.001" \(to 0\)'),
        ("positive", "lin_1_2_3", "expected a number"),
        ("positive", "lin_nan", "expected a number"),
        ("positive", "lin_", "expected a number"),
        ("positive", 0.0, "above 0"),
        ("positive", "lin_0", "above 0"),
        ("positive", "lin_0.1_-0.1", "above 0; one end of a schedule may be 0"),
        ("positive", math.inf, "above 0"),
        ("any", "nan", "finite"),
        ("noise", "cos_0.1_-0.1", "from 0 on"),
        ("share", "lin_1.5_0", "from 0 to 1"),
    ],
)
def test_what_is_no_schedule_is_refused_with_what_is_expected(kind, value, told) -> None:
    with pytest.raises(ValueError, match=told):
        TypeAdapter(KINDS[kind]).validate_python(value)


@pytest.mark.parametrize("value", ["lin_0_1e-3", "lin_1e-3", "cos_1e-3_1e-4", 1e-3])
def test_a_schedule_stays_as_it_was_given(value) -> None:
    assert TypeAdapter(Schedule).validate_python(value) == value
    assert TypeAdapter(Schedule).validate_python("1e-3") == 1e-3, "a number may be text"


def learned(name: str, **changes) -> dict[str, torch.Tensor]:
    """Return everything that an algorithm has learned with after three updates at the half of a run."""
    kind, discrete = name.split(maxsplit=1)[0], name.split(maxsplit=1)[0] in DISCRETE and "numbers" not in name
    made = algorithm(kind, spec_of(4, (), False, discrete, 3 if discrete else 2), **{**SMALL, **changes})
    made.setup(5, "cpu")
    rng = np.random.default_rng(1)
    for _ in range(3):
        made.update(rollout(rng, discrete) if made.on_policy else batch(rng, discrete), HALF)
    modules = {name: part for name, part in made.parts().items() if isinstance(part, torch.nn.Module)}
    return {f"{name}.{key}": value for name, part in modules.items() for key, value in part.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *((name, "learning_rate") for name in ("dqn", "iqn", "td3", "sac", "ppo", "ppo of numbers")),
        ("ppo", "clip_range"),
        ("ppo", "ent_coef"),
        ("sac", "ent_coef"),
    ],
)
def test_an_update_with_a_schedule_is_that_with_the_number_that_it_gives_then(name, setting) -> None:
    constant, scheduled = learned(name, **{setting: 0.125}), learned(name, **{setting: "lin_0.1875_0.0625"})
    assert constant.keys() == scheduled.keys()
    for key, value in constant.items():
        # SAC's temperature is the exponential of a logarithm.
        assert torch.allclose(scheduled[key], value, rtol=1e-6, atol=0.0), key
    other = learned(name, **{setting: 0.1875})
    assert any(not torch.equal(other[key], value) for key, value in constant.items()), "the setting has an effect"


def test_exploration_follows_its_schedule() -> None:
    dqn = algorithm("dqn", spec_of(4, (), False, True, 3), exploration="cos_1_0.1")
    assert [dqn.exploration(Progress(n, 100))["epsilon"] for n in (0, 50, 100)] == pytest.approx([1.0, 0.55, 0.1])
    outputs = {"action": np.zeros((4, 2), np.float32)}
    noise = {}
    for action_noise in (0.25, "lin_0.375_0.125"):
        td3 = algorithm("td3", spec_of(4, (), False, False, 2), action_noise=action_noise)
        noise[action_noise] = td3.explore(outputs, np.random.default_rng(0), HALF)[0]
    assert np.array_equal(*noise.values())
