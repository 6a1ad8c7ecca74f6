"""`jurybox policy` with a run of `train marl`: one policy for each group, acting in its place among the others."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from jurybox.training import interrupts
from jurybox.training.environments.gymnasium_env import EnvironmentUnusable
from jurybox.training.environments.one_agent import AgentEnv
from jurybox.training.policies import Policy, PolicyError, choose, play, policies
from jurybox.training.policy_commands import policy
from jurybox.training.runtime.run import run
from jurybox.training.trainings.marl import MarlTraining, plan

KINDS = {"a": "float32", "b": "discrete", "c": "discrete", "d": "uint8"}


class Nothing:
    def scalars(self, step, values): ...


def trained(out, steps):
    """Four agents, two of which share a policy; action 2 is rewarded, and the numbers of actions start at 5."""
    settings = MarlTraining(
        env="tests.integration.marl.worlds:Kinds",
        env_args={"kinds": KINDS, "first": 5},
        share=(("b", "c"),),
        steps=steps,
        hidden=(16,),
        ppo={"n_steps": 64},
        learning_rate=0.01,
        evaluation_episodes=3,  # the best policy is kept, and one episode says little
        evaluate_every=steps // 2,
        checkpoint_every=steps // 2,
    )
    run(plan(settings), out, Nothing(), serial=True)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("marl"), 128)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("learned"), 640)


@pytest.fixture
def command(monkeypatch):
    for take in ("take_over", "ignore_from_now_on"):
        monkeypatch.setattr(interrupts, take, lambda *_: None)

    def call(*arguments, status=0):
        done = CliRunner().invoke(policy, [str(each) for each in arguments])
        assert done.exit_code == status and "Traceback" not in done.output, done.output
        return done.output

    return call


def test_a_run_has_a_policy_for_each_group_and_needs_its_name(folder, command):
    assert {each.name for each in policies(folder)} == {"a", "b+c", "d"}
    assert all(name in command("list", folder) for name in ("a", "b+c", "d"))
    assert "name one with --name" in command("evaluate", folder, status=2)


@pytest.mark.parametrize("name", ["a", "b+c", "d"])
def test_each_policy_plays_its_own_place(name, folder):
    episodes = [play(Policy(choose(folder, name=name)), 2) for _ in range(2)]
    assert [[(each.length, each.total) for each in again] for again in episodes[1:]] == [
        [(8, each.total) for each in episodes[0]]
    ]


@pytest.mark.runs
@pytest.mark.parametrize("name", ["a", "b+c", "d"])
def test_each_policy_plays_its_own_place_as_it_learned(name, learned):
    # An episode has eight steps with a reward of 1 for action 2; this many steps suffice to learn it.
    totals = [each.total for each in play(Policy(choose(learned, name=name)), 3)]
    assert np.mean(totals) >= 6, totals
    assert totals == [each.total for each in play(Policy(choose(learned, name=name)), 3)]


def test_a_place_in_a_shared_group_is_chosen_and_others_may_act_at_random(folder, command):
    output = command(
        "evaluate", folder, "--name", "b+c", "--episodes", 2, "--set", "agent='c'", "--set", "others='random'"
    )
    assert "mean return" in output
    assert "no agent 'e'" in command("evaluate", folder, "--name", "a", "--set", "agent='e'", status=2)


def test_the_others_act_by_their_own_policies(folder):
    first = Policy(choose(folder, name="a"))
    with first.environment() as env:
        assert isinstance(env, AgentEnv)
        used = []
        for agent, chooses in list(env._choosing.items()):
            env._choosing[agent] = lambda rows, agent=agent, chooses=chooses: used.append(agent) or chooses(rows)
        env.reset(seed=1)
        env.step(7)
    assert used == ["b", "c", "d"]


@pytest.mark.runs
def test_an_exported_policy_cannot_play_among_learned_others_but_among_random_ones(folder, tmp_path, command):
    command("export", folder, "--name", "a", "--to", tmp_path / "a.pt2")
    exported = torch.export.load(tmp_path / "a.pt2").module()
    policy_a = Policy(choose(folder, name="a"))
    seen = np.random.default_rng(0).normal(size=(5, *policy_a.inputs["observation"].shape)).astype(np.float32)
    rows = np.repeat(seen, 400, 0)
    drawn, ours = (act.reshape(5, 400) for act in (exported(torch.from_numpy(rows)).numpy(), policy_a(rows)))
    with torch.inference_mode():
        chances = policy_a.served.module(torch.from_numpy(seen))[0].softmax(1).numpy()
    for action in range(3):  # of 400 draws, six standard errors at most
        for found in (drawn, ours):
            assert np.abs((found == action + 5).mean(1) - chances[:, action]).max() < 0.16
    output = command("evaluate", tmp_path / "a.safetensors", "--trust", status=2)
    assert "the policies b+c, d" in output
    random = command("evaluate", tmp_path / "a.safetensors", "--trust", "--set", "others='random'", "--episodes", 2)
    assert "mean return" in random


def test_a_foreign_file_runs_no_code_through_our_own_factories(folder, tmp_path, command):
    command("export", folder, "--name", "a", "--to", tmp_path / "a.pt2")
    with pytest.raises(PolicyError, match=r"tests\.integration\.marl\.worlds:Kinds.*--trust"):
        play(Policy(choose(tmp_path / "a.safetensors")), 1)


def test_a_description_names_all_files_of_a_checkpoint(folder):
    for place in (folder / "checkpoints").glob("step-*"):
        description = json.loads((place / "policy.json").read_text())
        assert all((place / acts["weights"]).is_file() for acts in description["policies"].values())
    with pytest.raises(EnvironmentUnusable, match="others = 'bold'"):
        AgentEnv("tests.integration.marl.worlds:Kinds", {"kinds": KINDS}, "a", {"a": "a"}, {}, {}, others="bold")
