"""The gym training: settings under Stable-Baselines3's names, the update ratio, the samples, and resuming."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import acting_network, algorithm, spec_of

from jurybox.training.algorithms.base import Progress, Update, log_softmax
from jurybox.training.algorithms.networks import features_of
from jurybox.training.algorithms.ppo import PPO, advantages_of
from jurybox.training.algorithms.registry import algorithm_named
from jurybox.training.algorithms.schedules import at
from jurybox.training.algorithms.statistics import Normaliser
from jurybox.training.checkpoints import Checkpoints, read_state
from jurybox.training.roles import learner as learners
from jurybox.training.roles.learner import BatchOnDevice, OffPolicyLearner, OnPolicyLearner, rollout
from jurybox.training.run_folder import read_metrics
from jurybox.training.runtime.plan import ConfigError
from jurybox.training.runtime.role_context import RoleContext
from jurybox.training.runtime.scoreboard import Word
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.runtime.turns import Rules, make_turn
from jurybox.training.trainings.gym import GymTraining, plan, train

MIXED = {"env": "tests.unit.gym_training.gym_worlds:mixed"}
# fmt: off
SMALL = {
    "ppo": {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "hidden": (8,)},
    "dqn": {"buffer_size": 500, "learning_starts": 10, "batch_size": 8, "hidden": (8,)},
    "iqn": {"buffer_size": 500, "learning_starts": 10, "batch_size": 8, "hidden": (8,)},
    "td3": {"buffer_size": 500, "learning_starts": 10, "batch_size": 8, "hidden": (8,), "env_args": {"numbers": True}},
    "sac": {"buffer_size": 500, "learning_starts": 10, "batch_size": 8, "hidden": (8,), "env_args": {"numbers": True}},
}
# fmt: on


def settings(algorithm: str, **changes) -> GymTraining:
    small = {**MIXED, "algorithm": algorithm, "steps": 64, "evaluation_episodes": 2, "log_every": 16}
    return GymTraining.checked({**small, **SMALL[algorithm], **changes})


def weights(folder):
    """Of the published policy in a run's newest checkpoint."""
    newest = Checkpoints(folder / "checkpoints").latest()
    assert newest is not None
    return read_state(newest.folder / "weights-policy.state")["state"]


# ---- settings


def test_every_algorithms_defaults_are_stable_baselines3s() -> None:
    import inspect

    import stable_baselines3

    ours_alone = {"exploration", "hidden", "publish_interval", "max_ahead", "action_noise", "buffer_size"}
    ours_alone |= {"critic_learning_rate", "pre_tanh_penalty", "reward_scale"}  # of td3, off by default
    ours_alone |= {"recurrent", "hidden_size", "sequence_length", "burn_in"}  # hidden_size is RecurrentPPO's
    policy = {"policy_delay", "target_policy_noise", "target_noise_clip"}
    for name in ("ppo", "dqn", "td3", "sac"):
        made = inspect.signature(getattr(stable_baselines3, name.upper()).__init__).parameters
        fields = algorithm_named(name).Settings.model_fields
        for each in fields.keys() - ours_alone - policy:
            assert fields[each].default == made[each].default, (name, each)


@pytest.mark.parametrize(
    ("asked", "steps", "pictures", "compiler", "compiles", "warns"),
    [
        ({}, 10_010, False, True, True, False),
        ({}, 10_009, False, True, False, False),
        ({}, 10_010, True, True, False, False),
        ({}, 10_010, False, False, False, False),
        ({"compile": "always"}, 100, False, True, True, False),
        ({"compile": "always"}, 100, False, False, False, True),
        ({"compile": "never"}, 10_010, False, True, False, False),
    ],
)
def test_updates_are_compiled_by_default_where_that_saves_time(
    monkeypatch, caplog, asked, steps, pictures, compiler, compiles, warns
) -> None:
    monkeypatch.setattr(learners, "compiler_missing", lambda: None if compiler else "no compiler here")
    of = settings("dqn", steps=steps, train_freq=1, **asked)
    made = OffPolicyLearner.__new__(OffPolicyLearner)
    planned = plan(of)
    made.context = SimpleNamespace(
        plan=planned, number=next(n for n, each in enumerate(planned.roles) if each.publishes)
    )
    made.algorithm = algorithm("dqn", spec_of(4, ((1, 8, 8),) if pictures else (), False, True, 2))
    assert made._compiles(of.compile, "cpu") is compiles
    assert [each.levelname for each in caplog.records] == ["WARNING"] * warns


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"algorithm": "dqn", "clip_range": 0.1}, "clip_range: dqn does not use it"),
        ({"algorithm": "ppo", "tau": 0.1}, "tau: ppo does not use it"),
        ({"algorithm": "sac", "action_noise": 0.1}, "action_noise: sac does not use it"),
        ({"algorithm": "td3", "ent_coef": 0.1}, "ent_coef: td3 does not use it"),
        ({"server": "ipc:///nowhere"}, "server is set"),
        ({"algorithm": "ppo", "ent_coef": "auto"}, "ent_coef: 'auto': expected a number, .lin_0.001."),
        ({"algorithm": "dqn", "exploration": 0.1, "exploration_fraction": 0.2}, "exploration says how probable"),
        ({"algorithm": "sac", "ent_coef": "loud"}, "expected a number above 0"),
        ({"algorithm": "dqn", "gradient_steps": 0}, "nothing would be learned"),
        ({"envs": 3, "workers": 2}, "the same number for each worker"),
        ({"algorithm": "dqn", "n_steps": 3, "envs": 4, "buffer_size": 16}, "expected 17 rows.*raise buffer_size"),
        ({"algorithm": "sac", "buffer_size": 2}, "buffer_size=2 with n_steps=1 and envs=1: expected 3"),
        ({"n_envs": 2}, "n_envs is called envs here"),
        ({"algorithm": "a2c"}, "expected ppo, dqn, iqn, td3, sac, or module:Class of your own"),
        ({"algorithm": "sac", "hidden": []}, "one layer or more"),
        ({"algorithm": "dqn", "hidden": [8, 0]}, "layers of one unit or more"),
    ],
)
def test_a_setting_that_cannot_be_or_has_no_effect_is_an_error(tmp_path, said, told) -> None:
    file = tmp_path / "gym.toml"
    file.write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in said.items()))
    with pytest.raises(ConfigError, match=told):
        GymTraining.read(file, {})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"algorithm": "dqn", "env": "Pendulum-v1"}, "take ppo, td3 or sac"),
        ({"algorithm": "sac", "env": "CartPole-v1"}, "take ppo or dqn"),
        ({"algorithm": "td3", "env": "CartPole-v1"}, "take ppo or dqn"),
        ({"algorithm": "dqn", "env": "tests.unit.gym_training.gym_worlds:Levers"}, "several choices at once: take ppo"),
        ({"algorithm": "sac", "env": "tests.unit.gym_training.gym_worlds:Levers"}, "several choices: take ppo"),
        ({"env": "CartPole-v7"}, "CartPole-v7"),
        ({"algorithm": "td3", "env": "tests.unit.gym_training.test_gym_training:unbounded"}, "bound them in a wrapper"),
    ],
)
def test_incompatible_settings_are_errors_before_the_start(tmp_path, changes, told) -> None:
    with pytest.raises(ConfigError, match=told):
        train(GymTraining.checked(changes), tmp_path / "run", serial=True)
    assert not (tmp_path / "run").exists()


def unbounded():
    from gymnasium import spaces
    from tests.unit.gym_training.gym_worlds import Mixed

    env = Mixed(numbers=True)
    env.action_space = spaces.Box(-np.inf, np.inf, (1,))
    return env


def test_a_round_is_of_every_environment_as_in_stable_baselines3() -> None:
    pace = settings("dqn", envs=4, train_freq=3, gradient_steps=2).pace
    assert (pace.train_freq, pace.gradient_steps, pace.learning_starts) == (12, 2, 10)
    assert settings("sac", envs=4, gradient_steps=-1).pace.gradient_steps == 4
    assert settings("ppo", envs=4).pace.train_freq == 64 and settings("ppo").pace.max_ahead == 0


@pytest.mark.parametrize(
    ("envs", "train_freq", "gradient_steps", "starts"), [(1, 4, 1, 10), (2, 3, 2, 12), (3, 1, -1, 5)]
)
def test_a_serial_run_learns_as_often_as_stable_baselines3(envs, train_freq, gradient_steps, starts) -> None:
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env

    given = {"train_freq": train_freq, "gradient_steps": gradient_steps, "learning_starts": starts, "batch_size": 4}
    theirs = stable_baselines3.DQN("MlpPolicy", make_vec_env("CartPole-v1", envs), **given)
    theirs.learn(60)
    ours = settings("dqn", envs=envs, **given).pace
    assert ours.learner_steps(60) == theirs._n_updates > 0
    for made in range(0, 30, ours.gradient_steps):  # actors wait for a learner where its next round is due
        due = ours.env_steps(made, 0)
        assert ours.learner_steps(due) > made >= ours.learner_steps(due - 1)


# ---- samples


def targets_moved(s: GymTraining, updates: int) -> list[tuple[int, float]]:
    """Of DQN with these settings: before which updates its target moved, and how far."""
    dqn = algorithm("dqn", spec_of(1, (), False, True, 2), **s.own.model_dump())
    dqn.envs = s.envs
    dqn.setup(0, "cpu")
    moved, rows = [], torch.zeros(1, 1)
    dqn.move_target = lambda tau: moved.append((dqn.updates, tau))
    batch = {"observation": rows, "next_observation": rows, "action": torch.zeros(1), "reward": torch.ones(1)}
    for made in range(updates):
        dqn.update({**batch, "discount": torch.ones(1)}, Progress(s.pace.env_steps(made, 0), s.steps))
    return moved


def test_dqns_target_moves_when_the_environments_have_made_so_many_steps() -> None:
    s = settings("dqn", learning_starts=10, train_freq=4, gradient_steps=2, target_update_interval=8)
    # Rounds are at 12, 16, 20, 24 and 28 env steps; 16 and 24 are reached before the second and the fourth.
    assert targets_moved(s, 10) == [(2, 1.0), (6, 1.0)]


@pytest.mark.parametrize(("envs", "moves"), [(4, 10), (16, 10), (64, 16)])
def test_dqns_target_moves_as_often_with_more_environments(envs, moves) -> None:
    often = {"learning_starts": 1, "train_freq": 1, "gradient_steps": 1, "target_update_interval": 100, "steps": 1024}
    moved = targets_moved(settings("dqn", envs=envs, **often), 1024 // envs)
    assert len(moved) == moves, "every 100 of 1,024 env steps, in whole steps of all environments"


def test_dqns_target_moves_once_for_each_interval_of_a_round() -> None:
    changes = {"learning_starts": 8, "train_freq": 4, "gradient_steps": 1, "target_update_interval": 2, "tau": 0.5}
    moved = targets_moved(settings("dqn", envs=2, **changes), 2)
    assert moved == [(0, 1 - 0.5**4), (1, 1 - 0.5**4)], "four steps of both environments, each halves the distance"


def test_rows_of_many_environments_do_not_hold_up_their_learner(tmp_path) -> None:
    s = settings("dqn", envs=16, n_steps=10, steps=320)
    assert s.pace.learning_starts + s.pace.train_freq < s.replayed.unsampled(s.envs), (
        "the pace stops before the learner may begin"
    )
    assert train(s, tmp_path, serial=True).learner_steps > 0


@pytest.mark.parametrize("algorithm", ["dqn", pytest.param("td3", marks=pytest.mark.runs)])
def test_the_smallest_replay_that_is_not_refused_is_learned_from(tmp_path, algorithm) -> None:
    s = settings(algorithm, envs=4, n_steps=3, buffer_size=17, steps=320)
    assert train(s, tmp_path, serial=True).learner_steps > 0


def test_a_restarted_ppo_learner_keeps_the_statistics_of_observations() -> None:
    def learner():
        made = OnPolicyLearner.__new__(OnPolicyLearner)
        made.algorithm = algorithm("ppo", spec_of(1, (), True, True, 2), hidden=(8,))
        made.algorithm.setup(0, "cpu")
        made._features, made._normaliser = features_of(made.algorithm.acting), Normaliser(1)
        made.updates, made._returns = 0, Normaliser(1)
        return made

    before, after, rng = learner(), learner(), np.random.default_rng(0)
    before.see(rng.normal(0, 10, (5000, 1)).astype(np.float32))
    before.see_returns(rng.normal(3, 7, 500))
    network, extra = before.publication()
    state = {name: value.numpy().copy() for name, value in network.state_dict().items()}
    after.adopt(SimpleNamespace(read=lambda: (state, 1, extra)))
    assert after.scaled(np.ones(1)) == before.scaled(np.ones(1)) != 1.0
    assert after.scaled(np.array([-1e9, 1e9])).tolist() == [-10.0, 10.0]
    rollout = rng.normal(30, 0.5, (100, 1)).astype(np.float32)
    for each in (before, after):
        each.see(rollout)
    np.testing.assert_allclose(after._normaliser.mean, before._normaliser.mean, rtol=1e-4)
    np.testing.assert_allclose(after._normaliser.std, before._normaliser.std, rtol=1e-4)


@pytest.fixture
def ppo_run():
    """Make a run's shared memory: returns it, a maker of its learner's turn, and a writer of a worker's rows."""
    planned = plan(settings("ppo"))
    number = [role.name for role in planned.roles].index("learner")
    with ExitStack() as resources:

        def make():
            shared = resources.enter_context(SharedResources.create(planned))
            rng, moments = np.random.default_rng(0), count()

            def learner(state=None, life=1):
                context = RoleContext(planned, number, shared, lambda message: None, life=life)
                turn = make_turn(context, Rules(planned, shared.scoreboard, serial=True), state)
                resources.callback(turn.close)
                return turn

            def act(rows, updates):
                for _ in range(rows):
                    shared.replay("policy").add(
                        observation=rng.normal(size=4).astype(np.float32), action=int(rng.integers(2)), reward=1.0,
                        terminated=False, next_observation=np.zeros(4, np.float32), log_prob=float(np.log(0.5)),
                        ended=False, environment=0, t=next(moments), updates=updates,
                    )  # fmt: skip

            return shared, learner, act

        yield make


def test_a_resumed_ppo_learner_takes_the_rows_that_workers_added_before_it_was_ready(ppo_run, tmp_path) -> None:
    shared, learner, act = ppo_run()
    turn = learner()
    act(5, updates=0)
    state = turn.role.save()  # which holds them
    act(2, updates=0)  # a worker's last rows, before the replay itself was saved
    shared.replay("policy").save(tmp_path / "rows")
    shared, learner, act = ppo_run()
    shared.replay("policy").restore(tmp_path / "rows")
    act(9, updates=0)
    resumed = learner(state).role
    assert resumed._cursor.at == state["at"] == 5
    seen = []
    resumed.algorithm.update = lambda rollout, _: seen.append(len(rollout.reward)) or Update({})
    resumed.step()
    assert seen == [16] and resumed.updates == 1


def test_a_ppo_learner_gives_signs_of_life_during_an_update(ppo_run) -> None:
    shared, learner, act = ppo_run()
    turn = learner()
    act(16, updates=0)
    beats, loss = [], turn.role.algorithm._loss

    def slow(batch, *coefficients):
        beats.append(int(turn.context.words[Word.HEARTBEAT]))
        return loss(batch, *coefficients)

    turn.role.algorithm._loss = slow
    turn.take()
    assert len(beats) == 2 and beats[0] < beats[1], "one before each minibatch"


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_restarted_ppo_learner_takes_the_rows_that_its_predecessor_left(ppo_run, checkpoint) -> None:
    shared, learner, act = ppo_run()
    first = learner()
    act(16, updates=0)
    first.take()
    act(3, updates=1)
    state = first.role.save() if checkpoint else None
    act(13, updates=1)
    first.role._take_rows()
    first.close()  # killed before it had trained on them
    steps = first.context.words[Word.LEARNER_STEPS]
    second = learner(state, life=2)
    assert second.role.updates == 1
    second.take()
    assert second.role.updates == 2, "its first step is no empty one"
    assert second.context.words[Word.LEARNER_STEPS] == steps + 1
    trained = second.role.algorithm.gradient_steps - (state["learner"]["gradient_steps"] if checkpoint else 0)
    assert trained == 2, "of 16 rows, in one minibatch for each epoch: none of those that were trained on"


def test_a_batch_is_filled_again_only_after_its_copies_to_the_gpu(monkeypatch) -> None:
    done = []

    class Column:
        def to(self, device, non_blocking=False):
            done.append(f"copied to {device}" + " later" * non_blocking)
            return self

    class Event:
        def record(self, stream):
            done.append(f"recorded on {stream}")

        def synchronize(self):
            done.append("waited")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    made = OffPolicyLearner.__new__(OffPolicyLearner)
    s = settings("dqn", device="cuda:1")
    planned = SimpleNamespace(pace_of=lambda number: s.pace, budget=SimpleNamespace(steps=s.steps))
    made.context = SimpleNamespace(own_steps=0, number=0, metrics=lambda **_: None, plan=planned)
    made.seed = made.updates = 0
    made._normaliser, made._batch = None, SimpleNamespace(n=4, weights=None)
    made._augment = made._rows_of = None
    made._beta, made._anchor_ratio, made._device = 0.4, 0.25, "cuda:1"
    made._on_device = BatchOnDevice.__new__(BatchOnDevice)
    made._on_device._fields, made._on_device._device, made._on_device._copied = {"reward": Column()}, "cuda:1", Event()
    made.replay = SimpleNamespace(parts=[], seed=lambda seed: None, sample=lambda n, out, **_: done.append("filled"))
    made.algorithm = SimpleNamespace(
        check_metrics=lambda *_: None,
        settings=s.own,
        update=lambda batch, progress: done.append("learned") or Update({}),
    )
    for _ in range(2):
        made.step()
    assert done == 2 * ["waited", "filled", "copied to cuda:1 later", "recorded on the stream of cuda:1", "learned"]


class Values:
    """Values of observations: their first number."""

    def values(self, rows):
        return rows[:, 0].astype(np.float32)


def test_a_rollout_bootstraps_truncated_episodes_and_not_terminated_ones() -> None:
    n = 4
    rows = {
        "observation": np.zeros((n, 1), np.float32),
        "next_observation": np.full((n, 1), 10, np.float32),
        "action": np.zeros(n, np.int64),
        "reward": np.ones(n, np.float32),
        "log_prob": np.zeros(n, np.float32),
        "terminated": np.array([False, True, False, False]),
        "ended": np.array([False, True, True, False]),  # terminated, truncated, and one that continues
        "environment": np.zeros(n, np.int64),
        "t": np.array([1, 2, 4, 6]),
        "updates": np.zeros(n, np.int64),
    }
    found = rollout(rows, Values())
    rules = SimpleNamespace(gamma=0.5, gae_lambda=1.0, gae=True, bootstrap=True)
    assert advantages_of(found, rules)[:, 0].tolist() == [1.5, 1.0, 6.0, 6.0]


def test_rows_of_several_environments_are_in_columns_in_any_write_order() -> None:
    environment, t = np.array([1, 0, 1, 0]), np.array([1, 2, 2, 1])
    rows = {
        "observation": np.array([[10], [2], [20], [1]], np.float32),
        "next_observation": np.zeros((4, 1), np.float32),
        "environment": environment,
        "t": t,
        **{name: np.zeros(4, bool) for name in ("terminated", "ended")},
        **{name: np.zeros(4, np.float32) for name in ("reward", "log_prob", "action", "updates")},
    }
    found = rollout(rows, Values())
    assert found.observation[..., 0].tolist() == [[1, 10], [2, 20]] and found.ended.tolist() == [
        [False] * 2,
        [True] * 2,
    ]
    lost = {name: column[:3] for name, column in rows.items()}  # a worker died
    assert rollout(lost, Values()).observation.shape == (3, 1, 1)


@pytest.mark.parametrize("algorithm", ["dqn", pytest.param("td3", marks=pytest.mark.runs)])
def test_an_episode_that_was_cut_is_bootstrapped_and_one_that_ended_is_not(tmp_path, algorithm) -> None:
    from jurybox.training.replay import Replay, Windows

    discounts = {}
    for terminates in (False, True):
        s = settings(algorithm, gamma=0.5, checkpoint_every=0)
        s = s.changed(env_args={**s.env_args, "terminates": terminates})
        folder = tmp_path / str(terminates)
        train(s, folder, serial=True)
        newest = Checkpoints(folder / "checkpoints").latest()
        with Replay.load(newest.folder / "replay-policy.jbr", f"cut-{algorithm}-{terminates}") as replay:
            replay.unlink()
            batch = replay.sample(200, replay.batch(200, Windows(n_step=1, gamma=0.5, next=("observation",))))
            discounts[terminates] = set(batch["discount"].tolist())
    assert discounts == {False: {0.5}, True: {0.0, 0.5}}


# ---- choices


def test_exploration_and_its_absence() -> None:
    random, start = np.random.default_rng(0), Progress(0, 100)
    numbers = spec_of(1, (), False, False, 1)
    dqn = algorithm("dqn", spec_of(1, (), False, True, 3), exploration_initial_eps=0.3)
    values = {"values": np.tile(np.array([[0.0, 1.0, 0.5]], np.float32), (2000, 1))}
    chosen, _ = dqn.explore(values, random, start)
    assert (chosen != 1).mean() == pytest.approx(0.2, abs=0.03)
    assert dqn.exploration(Progress(5, 100)) == {"epsilon": pytest.approx(0.175)}
    assert dqn.exploration(Progress(50, 100)) == {"epsilon": 0.05}
    logits = {"logits": np.tile(np.array([[0.0, np.log(3.0)]], np.float32), (4000, 1))}
    chosen, columns = algorithm("ppo", spec_of(1, (), False, True, 2)).explore(logits, random, start)
    assert chosen.mean() == pytest.approx(0.75, abs=0.03)
    assert np.allclose(np.exp(columns["log_prob"]), np.where(chosen == 1, 0.75, 0.25))
    normal = {"mean": np.full((4000, 1), 0.5, np.float32), "log_std": np.full((4000, 1), -1.0, np.float32)}
    drawn, columns = algorithm("ppo", numbers).explore(normal, random, start)
    density = columns["log_prob"]
    assert drawn.std() == pytest.approx(np.exp(-1), abs=0.02) and density.shape == (4000,)
    assert density[0] == pytest.approx(-0.5 * ((drawn[0, 0] - 0.5) / np.exp(-1)) ** 2 + 1 - 0.5 * np.log(2 * np.pi))
    sac = algorithm("sac", numbers)
    assert np.abs(sac.explore(normal, random, start)[0]).max() <= 1
    assert sac.greedy(normal)[0, 0] == pytest.approx(np.tanh(0.5))
    noisy, _ = algorithm("td3", numbers).explore({"action": np.zeros((4000, 1), np.float32)}, random, start)
    assert noisy.std() == pytest.approx(0.1, abs=0.01)
    assert log_softmax(np.array([[1000.0, 0.0]]))[0, 0] == pytest.approx(0.0)


# ---- runs


@pytest.mark.parametrize("algorithm", SMALL)
def test_a_run_writes_the_files_of_every_training_and_its_best_policy_is_the_scored_one(tmp_path, algorithm) -> None:
    folder = tmp_path / "run"
    outcome = train(settings(algorithm, evaluate_every=16, envs=2), folder, serial=True, command="jurybox train gym")
    assert outcome.env_steps == 64 and outcome.learner_steps > 0
    rows = read_metrics(folder / "metrics.csv")
    evaluated = {row["env_steps"]: row["eval_return"] for row in rows if "eval_return" in row}
    assert list(evaluated) == [16, 32, 48, 64]
    best = Checkpoints(folder / "checkpoints").best()
    assert best is not None and best["numbers"]["return"] == max(evaluated.values())
    report = (folder / "report.html").read_text()
    assert "Evaluations" in report and "checkpoints/best holds its weights" in report and algorithm in report
    assert json.loads((folder / "summary.json").read_text())["env_steps"] == 64


def test_schedules_are_metrics_and_go_on_where_a_resumed_run_goes_on(tmp_path, monkeypatch) -> None:
    schedules = {"learning_rate": "lin_0.01", "clip_range": "cos_0.3_0.1", "ent_coef": "lin_0.01_0.1"}
    told, tell = [], OnPolicyLearner.tell
    monkeypatch.setattr(OnPolicyLearner, "tell", lambda self, **metrics: (told.append(metrics), tell(self, **metrics)))
    s = settings("ppo", **schedules)
    train(s, tmp_path / "run", serial=True)
    train(s.changed(steps=128), tmp_path / "run", serial=True, resume=True)
    due = [(16 * n, 64) for n in range(1, 5)] + [(16 * n, 128) for n in range(5, 9)]
    for name, schedule in schedules.items():
        found = [metrics[name] for metrics in told if name in metrics]
        assert found == pytest.approx([at(schedule, 1 - steps / total) for steps, total in due]), name
        assert any(name in row for row in read_metrics(tmp_path / "run" / "metrics.csv"))


SOME = [pytest.param(name, marks=[pytest.mark.runs] * (name not in ("ppo", "dqn"))) for name in SMALL]


@pytest.mark.parametrize("algorithm", SOME)
def test_a_resumed_run_makes_the_steps_of_one_without_a_stop_and_depends_on_its_checkpoint_alone(
    tmp_path, algorithm
) -> None:
    s = settings(algorithm, normalize_observations=True, normalize_rewards=True)
    whole = train(s, tmp_path / "whole", serial=True)
    train(s.changed(steps=24), tmp_path / "one", serial=True)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        resumed = train(s, tmp_path / name, serial=True, resume=True)
        assert (resumed.env_steps, resumed.learner_steps) == (whole.env_steps, whole.learner_steps)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
    assert not all(np.array_equal(one[name], each) for name, each in weights(tmp_path / "whole").items())


@pytest.mark.parametrize("algorithm", ["ppo", pytest.param("sac", marks=pytest.mark.runs)])
def test_pictures_and_numbers_together_are_learned_from(tmp_path, algorithm) -> None:
    s = settings(algorithm, steps=40, learning_rate=1e-4, batch_size=4)
    s = s.changed(env_args={**s.env_args, "picture": True}, evaluation_episodes=1)
    outcome = train(s, tmp_path / "run", serial=True)
    assert outcome.learner_steps > 0
    made = acting_network(algorithm, 4, [(1, 36, 36)], False, algorithm == "ppo", 1 + (algorithm == "ppo"), (8,))
    assert {name: tuple(value.shape) for name, value in made.state_dict().items()} == {
        name: value.shape for name, value in weights(tmp_path / "run").items()
    }


@pytest.mark.parametrize("algorithm", SOME)
def test_the_unit_of_normalised_rewards_does_not_matter(tmp_path, algorithm) -> None:
    found = []
    for scale, normal in ((1.0, True), (1024.0, True), (1.0, False)):
        s = settings(algorithm, env_args={**SMALL[algorithm].get("env_args", {}), "scale": scale}, evaluate_every=0)
        s = s.changed(normalize_rewards=normal)
        outcome = train(s, tmp_path / f"{scale} {normal}", serial=True)
        found.append((weights(tmp_path / f"{scale} {normal}"), outcome.evaluation["eval_return"]))
    (one, low), (other, high), (without, _) = found
    assert all(np.array_equal(other[name], each) for name, each in one.items()), "a power of two changes no digit"
    assert high == pytest.approx(1024 * low), "returns that are reported are the environment's own"
    assert any(not np.array_equal(without[name], each) for name, each in one.items())


def test_rewards_are_normalised_as_by_stable_baselines3(tmp_path, monkeypatch) -> None:
    from stable_baselines3.common.running_mean_std import RunningMeanStd

    given, update = [], PPO.update
    monkeypatch.setattr(PPO, "update", lambda self, rollout, at: (given.append(rollout), update(self, rollout, at))[1])
    for normal in (False, True):
        train(settings("ppo", envs=2, gamma=0.9, normalize_rewards=normal), tmp_path / str(normal), serial=True)
    raw, normalised = given[0], given[2]  # the first rollouts, of the same policy
    returns, seen = np.zeros(2), []
    for reward, ended in zip(raw.reward, raw.ended, strict=True):
        returns = 0.9 * returns + reward
        seen.append(returns)
        returns = np.where(ended, 0.0, returns)
    statistics = RunningMeanStd(epsilon=0.0, shape=())
    statistics.update(np.concatenate(seen))
    np.testing.assert_allclose(normalised.reward, raw.reward / np.sqrt(statistics.var + 1e-8), rtol=1e-5)
    rows = read_metrics(tmp_path / "True" / "metrics.csv")
    assert any(row.get("return_deviation", 0) > 0 for row in rows)


@pytest.mark.runs
@pytest.mark.parametrize("bits", [False, True])
def test_several_choices_at_once_are_learned(tmp_path, bits) -> None:
    rates = {"hidden": (32,), "learning_rate": 0.01, "gamma": 0.0, "n_steps": 32, "batch_size": 64, "n_epochs": 8}
    s = settings("ppo", env="tests.unit.gym_training.gym_worlds:Levers", env_args={"bits": bits}, **rates)
    s = s.changed(envs=4, steps=1024, evaluation_episodes=30, evaluate_every=0)
    assert train(s, tmp_path, serial=True).evaluation["eval_return"] > 0.9, "at random 0.36, of bits 0.5"


def test_the_plan_describes_rows() -> None:
    planned = plan(settings("dqn"))
    assert planned.replays[0].fields["observation"].shape == (4,)
    binary = plan(GymTraining.checked({"env": "FrozenLake-v1", "algorithm": "dqn"})).replays[0]
    assert binary.fields["observation"].stored == "bits" and binary.capacity == 1_000_000
    pictures = plan(settings("sac", buffer_size=None, env_args={"numbers": True, "picture": True})).replays[0]
    assert 10**6 < pictures.capacity * 36 * 36 <= 2**31
