"""The settings of other libraries in benchmarks/learning are those of the tasks, or the side is refused."""

from dataclasses import replace

import pytest
from benchmarks.learning import cleanrl, sample_factory
from benchmarks.learning.tasks import TASKS, Clock, Task


def flags_of(side: str, task: Task) -> dict[str, str]:
    """A side's flags by name; "+" are the values of one that has several."""
    found: dict[str, str] = {}
    given = cleanrl.flags(task, 7) if side == "cleanrl" else sample_factory.flags(task, 7, "folder")
    for each in given:
        if each.startswith("--"):
            name, _, value = each[2:].partition("=")
            found[name] = value
        else:
            found[name] = f"{found[name]} {each}".strip()
    return found


PPO = {
    "cleanrl": {
        "n_steps": "num-steps",
        "n_epochs": "update-epochs",
        "learning_rate": "learning-rate",
        "gamma": "gamma",
        "gae_lambda": "gae-lambda",
        "clip_range": "clip-coef",
        "ent_coef": "ent-coef",
    },
    "samplefactory": {
        "n_steps": "rollout",
        "batch_size": "batch_size",
        "n_epochs": "num_epochs",
        "learning_rate": "learning_rate",
        "gamma": "gamma",
        "gae_lambda": "gae_lambda",
        "clip_range": "ppo_clip_ratio",
        "ent_coef": "exploration_loss_coeff",
    },
}
"""Names of the flags for Stable-Baselines3's settings."""
DEFAULTS = {"n_epochs": 10, "batch_size": 64, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0}


@pytest.mark.parametrize("name", ["cartpole-ppo", "pendulum-ppo", "pong-ppo"])
@pytest.mark.parametrize("side", PPO)
def test_a_side_has_every_number_of_the_task_and_stable_baselines3s_where_the_task_has_none(
    side: str, name: str
) -> None:
    task = TASKS[name]
    found, wanted = flags_of(side, task), {**DEFAULTS, **task.settings}
    assert {each: float(found[flag]) for each, flag in PPO[side].items()} == {each: wanted[each] for each in PPO[side]}
    batches = task.settings["n_steps"] * task.envs // wanted["batch_size"]
    assert int(found["num-minibatches" if side == "cleanrl" else "num_batches_per_epoch"]) == batches
    assert int(found["num-envs" if side == "cleanrl" else "num_envs_per_worker"]) == task.envs


@pytest.mark.parametrize("side", PPO)
def test_pong_is_the_librarys_own_and_nothing_else_is_taken_for_it(side: str) -> None:
    assert "ong" in flags_of(side, TASKS["pong-ppo"])["env-id" if side == "cleanrl" else "env"]
    with pytest.raises(ValueError, match="expected .*a registered environment, or .*Pong"):
        flags_of(side, replace(TASKS["pong-ppo"], env="benchmarks.learning.worlds:positions"))


def test_sample_factory_has_the_layers_of_the_task() -> None:
    task = TASKS["cartpole-ppo"]
    wide = replace(task, settings={**task.settings, "hidden": [32, 16]})
    assert flags_of("samplefactory", task)["encoder_mlp_layers"] == "64 64"
    assert flags_of("samplefactory", wide)["encoder_mlp_layers"] == "32 16"


@pytest.mark.parametrize("side", PPO)
def test_a_setting_that_a_side_has_no_flag_for_is_refused(side: str) -> None:
    task = TASKS["cartpole-ppo"]
    with pytest.raises(ValueError, match="target_kl"):
        flags_of(side, replace(task, settings={**task.settings, "target_kl": 0.02}))


@pytest.mark.parametrize(("side", "name"), [("cleanrl", "cartpole-dqn"), ("samplefactory", "pendulum-sac")])
def test_an_algorithm_that_a_side_does_not_have_is_refused(side: str, name: str) -> None:
    with pytest.raises(ValueError, match=TASKS[name].algorithm):
        flags_of(side, TASKS[name])


@pytest.mark.parametrize(("steps", "count"), [(2048, 2), (4096, 4), (5 * 1024, 4), (10240, 10), (102400, 10)])
def test_a_short_run_of_ppo_is_evaluated_after_rollouts_alone_and_in_halves(steps: int, count: int) -> None:
    assert TASKS["pong-ppo"].short(steps).evaluations == count


def test_a_run_of_less_than_two_rollouts_is_refused() -> None:
    with pytest.raises(ValueError, match="2048 steps"):
        TASKS["pong-ppo"].short(2047)


def test_the_later_half_begins_with_the_evaluation_in_the_middle() -> None:
    clock, task = Clock(), TASKS["pong-ppo"].short(4096)
    clock.at, clock.evaluations = [(float(each), 0.0) for each in range(5)], [0.0] * 5  # one that came afterwards
    assert clock.told(task)["halves"] == [(1.0, 0.0), (3.0, 0.0)]
    del clock.at[3:]
    assert clock.told(task)["halves"] == []
