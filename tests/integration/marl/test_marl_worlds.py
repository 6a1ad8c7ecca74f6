"""Any PettingZoo environment with discrete actions: in turns or parallel, observations of any dtype, unlike agents."""

from __future__ import annotations

import contextlib
import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import ParallelEnv
from tests.integration.marl.worlds import SPACES, Kinds

from jurybox.training.checkpoints import Checkpoints
from jurybox.training.environments.pettingzoo_env import AgentView, World
from jurybox.training.replay import Replay, Windows
from jurybox.training.roles.env_actor import Cast
from jurybox.training.roles.evaluation import EnvEvaluator, Suite
from jurybox.training.runtime.plan import End
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import State, Word
from jurybox.training.runtime.settings import changes_of
from jurybox.training.spaces import StrangeObservation
from jurybox.training.trainings.marl import ConfigError, MarlTraining, plan
from jurybox.training.trainings.marl_run import train

KINDS = f"{Kinds.__module__}:Kinds"
DQN = {"algorithm": "dqn", "steps": 40, "learning_starts": 10, "batch_size": 8, "hidden": (8,)}
DQN |= {"evaluation_episodes": 1, "log_every": 20}
PPO = {"algorithm": "ppo", "ppo": {"n_steps": 10, "n_epochs": 1}, "steps": 40, "batch_size": 8, "hidden": (8,)}
PPO |= {"evaluation_episodes": 1, "log_every": 20}


class Nothing:
    def scalars(self, step, values): ...


def observations_of(folder, agent):
    checkpoint = Checkpoints(folder / "checkpoints").latest()
    replay = Replay.load(checkpoint.folder / f"replay-{agent}.jbr", f"look-{os.getpid()}")
    try:
        return replay.parts[0].field_rows("observation", 0, len(replay)).copy()
    finally:
        replay.unlink()
        replay.close()


@pytest.mark.parametrize(
    "algorithm", ["ppo", *(pytest.param(other, marks=pytest.mark.runs) for other in ("iqn", "dqn"))]
)
def test_agents_with_all_kinds_of_observations_learn_together(tmp_path, algorithm):
    base = PPO if algorithm == "ppo" else {**DQN, "algorithm": algorithm}
    kinds = {f"sees_{kind}": kind for kind in SPACES}
    outcome = train(
        MarlTraining(**base, env=KINDS, env_args={"kinds": kinds, "first": 4}, log_dir=tmp_path), serial=True
    )
    assert outcome.end is End.STEPS and outcome.learner_steps > 0
    assert np.isfinite(outcome.evaluation["eval_return"])
    rows = {kind: observations_of(tmp_path, agent) for agent, kind in kinds.items()}
    binary = ("bool", "discrete", "multi_discrete", "multi_binary")
    assert {kind for kind, each in rows.items() if each.dtype == np.uint8} == set(binary)
    assert rows["uint16"].max() > 255 and rows["uint8"].max() > 200
    assert np.abs(rows["int64"]).max() > 2**31 and rows["float64"].dtype == np.float32
    # Rows hold both observations that are seen together; a replay that is sampled packs their bits.
    one_hot, two_hot = (
        rows[kind] if algorithm == "ppo" else np.unpackbits(rows[kind], axis=1)
        for kind in ("discrete", "multi_discrete")
    )
    assert (one_hot.sum(1) == 2).all() and (one_hot.sum(0) > 0).sum() == 2 * 5
    assert (two_hot.sum(1) == 4).all() and (two_hot.sum(0) > 0).sum() == 2 * 5


@pytest.mark.runs
@pytest.mark.parametrize("base", [pytest.param(DQN, marks=pytest.mark.slow), PPO], ids=["dqn", "ppo"])
def test_float_observations_are_unchanged_between_processes(tmp_path, base):
    settings = MarlTraining(**base, env=KINDS, env_args={"kinds": {"a": "float32", "b": "float32"}}, publish_interval=0)
    run(plan(settings), tmp_path / "serial", Nothing(), serial=True)
    run(plan(settings), tmp_path / "parallel", Nothing())
    one, two = (observations_of(tmp_path / name, "a") for name in ("serial", "parallel"))
    assert np.array_equal(one, two) and len(one) >= 30 and len(np.unique(one)) > 60


@pytest.mark.runs
def test_rewarded_actions_are_learned_from_floats(tmp_path):
    settings = MarlTraining(
        algorithm="dqn",
        env=KINDS,
        env_args={"kinds": {"a": "float32"}},
        steps=1000,
        learning_starts=100,
        train_freq=1,
        gamma=0.0,
        n_steps=1,
        exploration_final_eps=0.0,
        exploration_fraction=0.5,
        learning_rate=0.01,
        hidden=(16,),
        log_dir=tmp_path,
    )
    outcome = train(settings, serial=True)
    assert outcome.evaluation["eval_return_a"] > 7 > 5 > outcome.evaluation["eval_random_a"]


def test_agents_that_share_need_the_same_spaces(tmp_path):
    world = {"kinds": {"a": "float32", "b": "uint8"}}
    assert plan(MarlTraining(**DQN, env=KINDS, env_args=world))
    with pytest.raises(ConfigError, match="see or do different things"):
        plan(MarlTraining(**DQN, env=KINDS, env_args=world, share=["a", "b"]))


@pytest.mark.parametrize(
    ("kind", "observation", "message"),
    [
        ("uint8", np.full((4, 4, 1), 300), "holds 300"),
        ("discrete", 4, "an observation of a holds 4, expected -1 to 3"),
        ("float64", np.array([1.0, 1e300, 0.0]), "holds 1e\\+300"),
        ("float32", np.zeros(4, np.float32), r"has the shape \(4,\)"),
    ],
)
def test_an_observation_outside_its_space_is_an_error(kind, observation, message):
    view = AgentView("a", SPACES[kind], spaces.Discrete(3), 2)
    with pytest.raises(StrangeObservation, match=message):
        view.add(observation)


def test_rows_are_copies_of_arrays_that_an_environment_may_reuse():
    view = AgentView("a", SPACES["float32"], spaces.Discrete(3), 1)
    observation = np.ones(3, np.float32)
    view.add(observation)
    row = view.row()
    observation[:] = 7
    assert row.tolist() == [[1, 1, 1]] == view.inputs["observation"].tolist()


@pytest.mark.parametrize(
    ("environment", "world", "message"),
    [
        (KINDS, {"colour": "red"}, "cannot be made with .*colour"),
        ("builtins:dict", {}, "expected a PettingZoo environment"),
        ("gymnasium:make", {"id": "CartPole-v1"}, "expected a PettingZoo environment"),
        ("no.such:Env", {}, "no.such"),
    ],
)
def test_the_error_of_an_invalid_world_is_one_sentence(environment, world, message):
    with pytest.raises(ValueError, match=message):
        plan(MarlTraining(env=environment, env_args=world))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (['algorithm = "ppo"', "n_steps = 3"], "n_steps is set and would have no effect: ppo"),
        (['algorithm = "ppo"', "exploration_fraction = 0.5"], "exploration_fraction is set"),
        (['algorithm = "ppo"', "target_update_interval = 5"], "target_update_interval is set"),
        (['algorithm = "ppo"', "train_freq = 8"], "train_freq is set.*n_steps"),
        (['algorithm = "ppo"', "publish_interval = 10"], "publish_interval is set"),
        (['algorithm = "ppo"', "own = {agent_0 = {n_steps = 2}}"], "n_steps is set"),
        (['algorithm = "dqn"', "ppo = {n_steps = 5}"], "ppo is set.*dqn"),
        ([f'env = "{KINDS}"', "agents = 3", 'env_args = {kinds = {a = "bool"}}'], "agents is set"),
    ],
)
def test_settings_without_effect_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(MarlTraining.read(None, changes_of(changes, {})))


def test_only_ray_reserves_gpus(tmp_path):
    with pytest.raises(ConfigError, match="learner_gpus.*--launcher ray"):
        train(MarlTraining(learner_gpus=1, log_dir=tmp_path))


@pytest.mark.runs
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("base", "kills"), [pytest.param(DQN, 2, marks=pytest.mark.slow), (PPO, 1)], ids=["dqn", "ppo"]
)
def test_a_killed_actor_is_restarted_and_the_run_goes_on(tmp_path, base, kills):
    steps = 600 * kills + 100  # it must not end before `watch` has been called often enough
    settings = MarlTraining(**{**base, "steps": steps}, max_ahead=40, env_args={"turns": 15, "height": 9, "width": 9})
    killed = []

    def watch(shared):
        words = shared.scoreboard.words[0]
        due = len(killed) < kills and words[Word.ENV_STEPS] > 100 * (1 + len(killed))
        if due and words[Word.STATE] == State.RUNNING:
            with contextlib.suppress(ProcessLookupError):
                os.kill(words[Word.PID], signal.SIGKILL)
                killed.append(words[Word.PID])

    outcome = run(plan(settings), tmp_path, Nothing(), watch=watch)
    assert len(set(killed)) == outcome.restarts == kills
    assert outcome.end is End.STEPS and outcome.env_steps == steps


@pytest.mark.parametrize(
    ("environment", "world", "share"),
    [
        ("pettingzoo.classic.rps_v2:parallel_env", {"max_cycles": 10}, ["player_0", "player_1"]),
        ("pettingzoo.classic.rps_v2:env", {"max_cycles": 10}, []),
        ("mpe2.simple_tag_v3:parallel_env", {"max_cycles": 10}, []),
        ("mpe2.simple_spread_v3:env", {"max_cycles": 10}, []),
    ],
)
@pytest.mark.parametrize("base", [DQN, PPO], ids=["dqn", "ppo"])
def test_environments_of_other_packages(tmp_path, environment, world, share, base):
    pytest.importorskip("pygame", reason="PettingZoo's own environments need pygame: pip install pygame mpe2")
    pytest.importorskip(environment.partition(":")[0])
    settings = MarlTraining(**base, env=environment, env_args=world, share=share, log_dir=tmp_path)
    outcome = train(settings, serial=True)
    assert outcome.end is End.STEPS and outcome.learner_steps > 0


@pytest.mark.parametrize(
    ("base", "says"),
    [
        pytest.param(DQN, True, id="dqn, terminated"),
        pytest.param(PPO, False, id="ppo, just gone"),
        pytest.param(DQN, False, id="dqn, just gone", marks=pytest.mark.runs),
        pytest.param(PPO, True, id="ppo, terminated", marks=pytest.mark.runs),
    ],
)
def test_an_agent_that_returns_starts_fresh(tmp_path, monkeypatch, base, says):
    """Its observations contain nothing of an earlier visit, and no transition joins two visits."""
    seen = {"guest": [], "host": []}
    waiting = World.waiting

    def recorded(self):
        found = waiting(self)
        seen[found.agent].append(found.observation["observation"][0].copy())
        return found

    monkeypatch.setattr(World, "waiting", recorded)
    settings = MarlTraining(
        **base, env=f"{Kinds.__module__}:Guests", env_args={"says": says}, log_dir=tmp_path, n_stack=2
    )
    outcome = train(settings, serial=True)
    assert outcome.end is End.STEPS and outcome.learner_steps > 0
    visits = [frames for frames in seen["guest"] if frames[-1][1] == 1]
    assert len(visits) >= 6, "it returned"
    assert all((frames[0] == frames[1]).all() for frames in visits), "the first observation, twice"
    checkpoint = Checkpoints(tmp_path / "checkpoints").latest()
    with Replay.load(checkpoint.folder / "replay-guest.jbr", f"guests-{os.getpid()}") as replay:
        replay.unlink()
        if base is PPO:
            part, n = replay.parts[0], len(replay)
            now, after = (part.field_rows(name, 0, n).copy() for name in ("observation", "next_observation"))
            goes_on = part.field_rows("terminated", 0, n) == 0
        else:
            batch = replay.sample(200, replay.batch(200, Windows(n_step=1, gamma=1.0, next=("observation",))))
            now, after, goes_on = batch["observation"], batch["next_observation"], batch["discount"] > 0
        now, after = now[:, 2:], after[:, 2:]  # of the two observations that are seen together the newer one
    assert (after[goes_on][:, 0] >= now[goes_on][:, 0]).all()
    same = now[goes_on][:, 0] == after[goes_on][:, 0]
    # If it is just gone, its observation after its last turn is unknown: the last one is used instead.
    stayed = now[goes_on][same][:, 1] < 3
    assert (after[goes_on][same][stayed][:, 1] == now[goes_on][same][stayed][:, 1] + 1).all()
    if says:
        assert set(now[~goes_on][:, 1].tolist()) == {3.0}, "its visits end with its third turn"
    assert goes_on[now[:, 1] < 3].all()


class Corridor(ParallelEnv):
    """Action 1 ends the episode; it has 20 steps at most."""

    metadata: ClassVar = {"name": "corridor", "render_modes": []}
    seeds: ClassVar[list[int]] = []
    render_mode = None

    def __init__(self):
        self.possible_agents = ["a"]

    def observation_space(self, agent):
        return spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.seeds.append(seed)
        self.agents, self.steps = ["a"], 0
        return {"a": np.zeros(1, np.float32)}, {"a": {}}

    def step(self, actions):
        self.steps += 1
        ends, late = actions["a"] == 1, self.steps >= 20
        if ends or late:
            self.agents = []
        return {"a": np.zeros(1, np.float32)}, {"a": 1.0}, {"a": ends}, {"a": late}, {"a": {}}


def test_evaluations_play_the_same_episodes_whatever_the_policy_does():
    evaluator, drawn = EnvEvaluator.__new__(EnvEvaluator), []
    evaluator.context, evaluator._bound = SimpleNamespace(alive=lambda: None, resetting=nullcontext), None
    evaluator._films = None
    world, evaluator._seeds = World(1, f"{__name__}:Corridor", {}, {"a": 1}), [3, 1, 4, 7]
    evaluator._adapter, evaluator._cast = world, Cast(world, {})
    evaluator._cast.begin = lambda *_: None  # nobody plays: the test chooses
    Corridor.seeds.clear()
    for often in (0.1, 0.5, 1.0):
        numbers = []

        def chosen(waiting, often=often, numbers=numbers):
            numbers.append(evaluator._rng.random())
            return np.array([int(numbers[-1] < often)])

        lengths = [each.length for each in evaluator._play(chosen, Suite())]
        drawn.append([numbers[sum(lengths[:episode])] for episode in range(4)])
    assert Corridor.seeds == [3, 1, 4, 7] * 3
    assert drawn[0] == drawn[1] == drawn[2] and len(set(drawn[0])) == 4, "an episode's own random numbers, too"
