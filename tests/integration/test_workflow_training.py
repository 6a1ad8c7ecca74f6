"""`jurybox train workflow` as a user runs it, and with its policy served."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from jurybox.studies.workflow.cage import CageRows
from jurybox.studies.workflow.cage.tables import N_ACTIONS
from jurybox.studies.workflow.networks import INPUTS
from jurybox.studies.workflow.policy import Defender, learner_of
from jurybox.studies.workflow.rollouts import play as roll
from jurybox.studies.workflow.settings import WorkflowTraining
from jurybox.studies.workflow.train import run
from jurybox.training.algorithms.ppo import PPOSettings
from jurybox.training.cli import train
from jurybox.training.policies import Policy, choose, export, play, policies
from jurybox.training.runtime.plan import RunError

SMALL = WorkflowTraining(
    envs=4,
    total_episodes=24,
    episode_length=10,
    max_train_episodes_per_env=2,
    evaluation_episodes=1,
    ppo=PPOSettings(batch_size=40, n_epochs=1, hidden=(16,)),
)


def returns(folder: Path) -> list[str]:
    with (folder / "metrics.csv").open() as file:
        return [row["return_mean"] for row in csv.DictReader(file) if row["phase"]]


@pytest.mark.runs
def test_a_served_policy_learns_the_same_as_a_local_one(tmp_path) -> None:
    local, served = tmp_path / "local", tmp_path / "served"
    run(SMALL, local)
    run(SMALL.changed(policy="served"), served)
    assert (served / "server.log").exists() and (served / "report.html").exists()
    assert len(returns(local)) == 6 and returns(local) == returns(served)
    summary = json.loads((served / "summary.json").read_text())
    assert summary["episodes"] == 24 and summary["env_steps"] == 240


def test_metrics_show_the_reward_and_its_part_for_the_order(searched) -> None:
    with (searched / "metrics.csv").open() as file:
        updates = [row for row in csv.DictReader(file) if row["phase"]]
    rows = [{name: float(value) for name, value in row.items() if value} for row in updates]
    assert rows[0]["phase"] == 0 and rows[0]["alignment_reward"] == pytest.approx(0, abs=1e-5), (
        "without an order there is no such reward"
    )
    assert all(row["alignment_reward"] <= 1e-5 for row in rows), (
        "a fix out of order has a negative reward, one in order has none"
    )
    for row in rows:  # these settings give no head start, so all episodes count towards the return
        assert row["total_reward"] == pytest.approx(row["return_mean"] + row["alignment_reward"], abs=1e-4)


def test_the_attacker_may_be_set_by_cyborgs_names() -> None:
    assert WorkflowTraining(red="B_lineAgent") == WorkflowTraining(red="B_line")
    assert WorkflowTraining(red="RedMeanderAgent").red == "Meander"
    done = CliRunner().invoke(train, ["workflow", "--red-agent", "NobodyAgent"])
    assert done.exit_code == 2 and "red" in done.output


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["local", "served"])
def test_the_command_prints_the_path_of_its_report(tmp_path, policy) -> None:
    command = [sys.executable, "-m", "jurybox.training.cli", "train", "workflow", "--out", str(tmp_path / "run")]
    command += ["--envs", "8", "--total-episodes", "80", "--episode-length", "10"]
    command += ["--max-train-episodes-per-env", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--policy", policy], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr
    assert "report:" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["episodes"] == 80 and summary["env_steps"] == 800


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gate_is_reached_by_learning_for_orders_that_begin_with_each_type(tmp_path) -> None:
    """Without masks, as docs/workflow.md has it: two minutes of one core."""
    settings = WorkflowTraining(
        order_masks=False,
        show_turns=True,
        gate=0.95,
        gate_on="compliance",
        alignment_reward="lin_2",
        update_every_steps=20,
        ppo=PPOSettings(batch_size=500),
        total_episodes=4000,
        reference_share=0.0,
        mixed_share=0.6,
        evaluation_episodes=50,
    )
    run(settings, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["verdict"] == "passed" and summary["workflows_passed"] > 1
    _, *first = summary["prices"]
    assert len(first) == 5 and all(each["compliance"] >= 0.95 for each in first)


@pytest.mark.parametrize(
    "bad", [["--red", "Nobody"], ["--env", "mars"], ["--gate", "7"], ["--gate-on", "x"], ["--alignment-reward", "-1"]]
)
def test_invalid_options_are_a_usage_error(tmp_path, bad) -> None:
    done = CliRunner().invoke(train, ["workflow", "--out", str(tmp_path), *bad])
    named = bad[0].removeprefix("--") in done.output.replace("_", "-")
    assert done.exit_code == 2 and named and "Traceback" not in done.output


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("searched")
    run(SMALL.changed(gate=0.01, min_judged=1, head_start=0), folder)
    return folder


def test_the_last_policy_and_the_evaluated_one_are_kept_with_their_workflow(searched) -> None:
    best, *others = policies(searched)
    assert best.best and best.numbers["return"] == json.loads((searched / "summary.json").read_text())["return_mean"]
    assert [each.best for each in others] == [False] * len(others) and others
    order = json.loads((searched / "summary.json").read_text())["workflow"]
    assert best.description.environment_arguments["order"] == order
    assert choose(searched, "latest").env_steps == 240


@pytest.mark.parametrize(("order", "use_masks"), [(None, False), ((3, 1, 2, 0, 4), True)])
def test_a_policy_acts_the_same_outside_the_search(searched, order, use_masks, monkeypatch) -> None:
    """Five episodes from one seed each: the same returns from `jurybox policy` as from the search's own rollouts."""
    found = choose(searched)
    greedy = {name: replace(acts, choose="best") for name, acts in found.description.policies.items()}
    policy = Policy(replace(found, description=replace(found.description, policies=greedy)))
    learner = learner_of(SMALL.ppo)
    learner.setup(0, "cpu")
    learner.acting.load_state_dict(policy.served.module.state_dict())
    played = play(policy, 5, changes={"order": order, "use_masks": use_masks, "episode_length": 30})
    for seed, episode in enumerate(played):
        env = CageRows(1, first=0, of=1, masks=use_masks, episode_length=30, autoreset_mode="Disabled")
        first = env.reset(seed=seed)
        monkeypatch.setattr(env, "reset", lambda first=first: first)  # `roll` would reset to a new draw
        options = {"weight": 0.0, "use_masks": use_masks, "mask_orders": True, "greedy": True}
        _, expected = roll(env, Defender(learner), order, steps=30, **options)
        assert episode.total == pytest.approx(float(expected.returns[0])) and episode.length == 30


@pytest.mark.slow
def test_an_exported_policy_never_chooses_a_masked_action(searched, tmp_path) -> None:
    policy = Policy(choose(searched))
    export(policy, tmp_path / "policy.pt2", searched)
    exported = torch.export.load(tmp_path / "policy.pt2").module()
    masks = torch.rand(20, N_ACTIONS).round().bool()
    actions = exported(torch.rand(20, INPUTS).round(), masks)
    assert masks[torch.arange(20), actions].all()
    with pytest.raises(RunError, match="no such network"), Policy(choose(searched)).environment({"red": "Nobody"}):
        pass
