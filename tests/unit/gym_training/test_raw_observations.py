"""A policy takes the environment's own observation: in a worker, on a server, exported, and in `jurybox policy`."""

from __future__ import annotations

import json
from collections.abc import Mapping

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from jurybox.server.inproc import InprocServer
from jurybox.training import policies
from jurybox.training.algorithms.registry import make
from jurybox.training.algorithms.served import raw_network
from jurybox.training.algorithms.torch_states import as_tensors
from jurybox.training.checkpoints import CheckpointError, Checkpoints, read_state
from jurybox.training.environments.gymnasium_env import Actions, EnvironmentUnusable, GymEnvs, Observations
from jurybox.training.runtime.plan import load
from jurybox.training.spaces import ActionSpec, AgentSpec, named
from jurybox.training.trainings.gym import GymTraining, algorithm_of, spaces_of, train

INF = np.inf
SPACES = {
    "bytes": spaces.Box(0, 255, (2,), np.uint8),
    "bytes as numbers": spaces.Box(0, 200, (2, 3), np.uint8),
    "whole numbers": spaces.Box(-5, 5, (2,), np.int64),
    "one number": spaces.Box(-1, 1, (), np.float64),
    "choices from 5 on": spaces.Discrete(3, start=5),
    "two choices": spaces.MultiDiscrete([[2], [3]], start=[[-1], [4]]),
    "bits": spaces.MultiBinary((2, 2)),
    "a picture": spaces.Box(0, 255, (36, 40, 3), np.uint8),
    "parts": spaces.Dict(
        {
            "has key": spaces.Discrete(3, start=-1),
            "arm": spaces.Tuple((spaces.Box(0, 255, (2,), np.uint8), spaces.Dict({"x": spaces.Box(-INF, INF, (1,))}))),
            "camera": spaces.Box(0, 255, (3, 36, 36), np.uint8),
        }
    ),
    "a pair": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 255, (2,), np.uint8))),
}


ACTIONS = {
    "choices": spaces.MultiDiscrete([[3], [2]], start=[[1], [-2]]),
    "bits": spaces.MultiBinary((2, 2)),
}


class Sampled(gymnasium.Env):
    """Observes samples of one of the spaces."""

    def __init__(self, space, numbers=False, bounded=True, actions=None, masks=False):
        self._masks = masks
        self.observation_space = SPACES[space]
        bound = np.array([3, 5], np.float32) if bounded else np.array([np.inf, 5], np.float32)
        self.action_space = spaces.Box(-bound, bound) if numbers else spaces.Discrete(4, start=2)
        self.action_space = self.action_space if actions is None else ACTIONS[actions]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), self.told()

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        return self.observation_space.sample(), 0.1 * self.t, False, self.t == 4, self.told()

    def told(self):
        if not self._masks:
            return {}
        spec = Actions(self.action_space).spec
        mask = self.np_random.random(spec.size) < 0.5
        mask[np.cumsum(spec.counts or (spec.size,)) - 1 - self.np_random.integers(2)] = True
        return {"action_mask": mask}


def trained(folder, algorithm, space, **changes):
    numbers = algorithm in ("td3", "sac")
    env_args = {"space": space, **({"numbers": True} if numbers else {}), **changes}
    own = {"n_steps": 8, "n_epochs": 1} if algorithm == "ppo" else {"learning_starts": 4, "buffer_size": 100}
    small = {"steps": 16, "batch_size": 4, "hidden": (8,), "evaluation_episodes": 1, "algorithm": algorithm}
    s = GymTraining.checked({**small, **own, "env": f"{__name__}:Sampled", "env_args": env_args})
    s = s.changed(action_masks=changes.get("masks", False))
    train(s, folder, serial=True)
    return s, policies.choose(folder)


@pytest.mark.parametrize("space", SPACES)
def test_a_network_computes_the_same_from_rows_and_from_observations_of_any_space(space) -> None:
    observations = Observations(SPACES[space])
    SPACES[space].seed(0)
    seen = [SPACES[space].sample() for _ in range(5)]
    rows = torch.from_numpy(np.stack([observations.row(each) for each in seen]))
    inputs = [observations.inputs(each) for each in seen]
    raw = [torch.from_numpy(np.stack([each[name] for each in inputs])) for name in inputs[0]]
    of = observations.seen
    spec = AgentSpec(of.inputs, ActionSpec(True, 3), bool(of.numbers))
    ppo = make("ppo", {"hidden": (8,)}, json.loads(json.dumps(spec.as_dict())))
    from_rows, from_inputs = ppo.seeded(ppo.network, 0), raw_network(ppo)
    with torch.no_grad():
        for one, two in zip(from_rows(rows), from_inputs(*raw), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    named_inputs = [named(each) for each in seen]
    assert all(each.keys() == given.keys() for each, given in zip(named_inputs, inputs, strict=True))


CASES = [
    ("ppo", "bytes", {"numbers": True, "bounded": False}),
    ("ppo", "parts", {"actions": "choices", "masks": True}),
    ("dqn", "parts", {"masks": True}),
]
MORE = [
    ("sac", "a pair", {}),
    ("ppo", "parts", {}),
    ("ppo", "bytes", {}),
    ("dqn", "parts", {}),
    ("td3", "a pair", {}),
    ("iqn", "parts", {}),
    ("ppo", "a pair", {"numbers": True}),
    ("ppo", "parts", {"actions": "choices"}),
    ("ppo", "a pair", {"actions": "bits"}),
    ("ppo", "bytes", {"masks": True}),
    ("iqn", "bytes", {"masks": True}),
]


@pytest.mark.parametrize(
    ("algorithm", "space", "changes"), [*CASES, *(pytest.param(*case, marks=pytest.mark.runs) for case in MORE)]
)
def test_worker_server_export_and_play_choose_the_same_action(tmp_path, algorithm, space, changes) -> None:
    s, found = trained(tmp_path / "run", algorithm, space, **changes)
    _, spec = spaces_of(s)
    made = make(**algorithm_of(s, spec))
    state = as_tensors(read_state(found.where / "weights-policy.state")["state"])
    drawn = torch.Generator().manual_seed(0)  # after so short a training all observations get nearly the same outputs
    state = {name: torch.randn(value.shape, generator=drawn) * 0.2 for name, value in state.items()}

    # From rows, as a learner.
    envs = GymEnvs(6, s.env, s.env_args, clips=made.chooses[1] == "clip", masked=spec.masked)
    for number in range(6):
        envs.begin(number, number)
    waits = envs.waiting()
    observation, rows = waits.observation, waits.rows
    network = made.network()
    network.load_state_dict(state)
    with torch.inference_mode():
        masks = [torch.from_numpy(observation["action_mask"])] if spec.masked else []
        given = network(torch.from_numpy(rows), *masks)
    each = given if isinstance(given, tuple) else (given,)
    outputs = {name: part.numpy() for name, part in zip(made.outputs, each, strict=True)}
    chosen = made.greedy(outputs)
    expected = [envs.to_env(one) for one in chosen]

    # In a worker and on a server: what the environment gave, by name.
    worker = raw_network(make(**algorithm_of(s, spec)))
    worker.load_state_dict(state)
    with torch.inference_mode():
        given = worker(*(torch.from_numpy(observation[name]) for name in spec.arguments))
    for part, values in zip(given if isinstance(given, tuple) else (given,), outputs.values(), strict=True):
        np.testing.assert_allclose(part.numpy(), values, rtol=1e-4, atol=1e-5)
    served = load(found.acts.network)(**json.loads(json.dumps(found.acts.arguments)))
    served.module.load_state_dict(state)
    with InprocServer({"policy": served}) as server:
        reply = server.model("policy").infer(dict(observation))
        answers = reply if isinstance(reply, Mapping) else {next(iter(served.outputs)): reply}
        for name, values in outputs.items():
            np.testing.assert_allclose(answers[name], values, rtol=1e-4, atol=1e-5)

    # Played, and exported.
    policy = policies.Policy(found, trust=True)
    policy.served.module.load_state_dict(state)
    (program, *_) = policies.export(policy, tmp_path / "policy.pt2", tmp_path / "run")
    act = torch.export.load(program).module()
    with policy.environment() as env:
        for number in range(6):
            observation, info = env.reset(seed=number)
            action = policy.act(observation, policy.mask(env, info))
            np.testing.assert_allclose(np.ravel(action), np.ravel(expected[number]), atol=1e-4)
            parts = {**named(observation), **info}
            arrays = [np.asarray(parts[name], spec.dtype)[None] for name, spec in policy.inputs.items()]
            action = act(*map(torch.from_numpy, arrays))[0].numpy()
            np.testing.assert_allclose(np.ravel(action), np.ravel(expected[number]), atol=1e-4)
    assert any(np.ptp(each, 0).max() > 1e-3 for each in outputs.values()), "the observation matters"
    assert policies.play(policy, 1)[0].length == 4


def test_a_policy_of_stacked_gray_pictures_is_played_as_it_was_trained(tmp_path) -> None:
    small = {"steps": 16, "batch_size": 4, "hidden": (8,), "evaluation_episodes": 1, "n_steps": 8, "n_epochs": 1}
    of = {"env": f"{__name__}:Sampled", "env_args": {"space": "a picture"}, "grayscale": True, "resize": [36, 36]}
    s = GymTraining.checked({**small, **of, "n_stack": 2})
    assert train(s, tmp_path / "run", serial=True).env_steps == 16
    policy = policies.Policy(policies.choose(tmp_path / "run"), trust=True)
    assert policy.inputs["observation"].shape == (2, 36, 36)
    assert policies.play(policy, 1)[0].length == 4


def test_bytes_that_were_divided_before_are_refused_and_not_acted_on(tmp_path) -> None:
    _, found = trained(tmp_path / "run", "ppo", "bytes")
    policy = policies.Policy(found, trust=True)
    assert policy.inputs["observation"].dtype == "uint8"
    observed = np.array([[3, 200]], np.uint8)
    assert policy(observed).shape == policy(observed.astype(np.float64).astype(np.uint8)).shape == (1,)
    for wrong in (observed / np.float32(255), observed.astype(np.float32)):
        with pytest.raises(policies.PolicyError, match="the input 'observation' .*: expected uint8 of shape"):
            policy(wrong)
    (program, _, card) = policies.export(policy, tmp_path / "policy.pt2", tmp_path / "run")
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        torch.export.load(program).module()(torch.zeros(1, 2))
    assert "`observation` uint8 (n, 2)" in card.read_text()
    with pytest.raises(policies.PolicyError, match="takes observation: got speed"):
        policy({"speed": observed})


def test_a_checkpoint_whose_policies_have_another_format_is_not_resumed(tmp_path) -> None:
    s, _ = trained(tmp_path, "ppo", "bytes")
    path = Checkpoints(tmp_path / "checkpoints").existing().folder / "policy.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(CheckpointError, match="format 2, this build's are of the format 3"):
        train(s.changed(steps=32), tmp_path, serial=True, resume=True)


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (spaces.Dict({"": spaces.Discrete(2)}), "expected 1 to 200 characters"),
        (spaces.Dict({"a.b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}), "the same name"),
        (spaces.Box(-1, 1, (2,), np.longdouble), "is a Box of"),
    ],
)
def test_parts_that_cannot_be_inputs_are_refused_before_the_start(space, told) -> None:
    with pytest.raises(EnvironmentUnusable, match=told):
        Observations(space)
