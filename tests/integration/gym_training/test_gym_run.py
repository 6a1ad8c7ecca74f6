"""`jurybox train gym` in processes: as a user runs it, its policy local and served, resumed, interrupted, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request

import numpy as np
import pytest
from tests.serving import segments, serving

from jurybox.training import policies
from jurybox.training.checkpoints import Checkpoints
from jurybox.training.run_folder import read_metrics
from jurybox.training.runtime.run import run
from jurybox.training.runtime.scoreboard import State, Word
from jurybox.training.trainings.gym import GymTraining, _audits, plan, train

LINE = [sys.executable, "-m", "jurybox.training.cli", "train", "gym"]
CORRIDOR = "tests.unit.gym_training.gym_worlds:Corridor"
SMALL_SAC = ["--set", "batch_size = 16", "--set", "hidden = [16, 16]", "--set", "evaluation_episodes = 2"]
SMALL_PPO = ["--n-steps", "32", "--set", "hidden = [16, 16]", "--set", "evaluation_episodes = 2"]


def command(folder, *more: str) -> subprocess.CompletedProcess[str]:
    line = [*LINE, "--out", str(folder), *more]
    return subprocess.run(line, capture_output=True, text=True, timeout=190, check=False)


@pytest.mark.runs
def test_workers_act_with_local_policies_and_the_run_is_resumed(tmp_path) -> None:
    before = segments()
    small = [*SMALL_PPO, "--env", "CartPole-v1", "--algorithm", "ppo", "--workers", "2", "--envs", "4"]
    small += ["--evaluate-every", "512", "--set", "log_every = 256"]
    done = command(tmp_path, *small, "--steps", "1024")
    assert done.returncode == 0, done.stderr
    assert "report:" in done.stdout and "the last evaluation" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    # Two workers may check the budget at the same moment.
    assert 1024 <= summary["env_steps"] <= 1026 and summary["learner_steps"] == 1024 // 128 and not summary["serial"]
    again = command(tmp_path, *small, "--steps", "1536", "--resume", "--serial")
    assert again.returncode == 0, again.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["env_steps"] >= 1536 and summary["learner_steps"] == 1536 // 128
    rows = read_metrics(tmp_path / "metrics.csv")
    assert rows[-1]["env_steps"] >= 1536 and any("policy_loss" in row for row in rows)
    # A worker that did not run while the other filled a rollout sends steps of an older policy, which are dropped.
    assert max(row.get("stale", 0) for row in rows) < 500, "PPO learned from the newest policy's steps"
    elsewhere = tmp_path.rename(tmp_path.with_name("another machine"))
    more = command(elsewhere, *small, "--workers", "4", "--steps", "2048", "--resume")
    assert more.returncode == 0, more.stderr
    summary = json.loads((elsewhere / "summary.json").read_text())
    assert summary["env_steps"] >= 2048 and len([name for name in summary["busy"] if name.startswith("actor")]) == 4
    assert segments() <= before


@pytest.mark.runs
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["--env", "CartPole-v1", "--algorithm", "ppo", *SMALL_PPO, "--envs", "4", "--steps", "512"],
            marks=pytest.mark.slow,
        ),
        ["--env", "Pendulum-v1", "--algorithm", "sac", *SMALL_SAC, "--steps", "300"],
    ],
    ids=["ppo", "sac"],
)
def test_a_private_server_computes_the_actions(tmp_path, options) -> None:
    before = segments()
    done = command(tmp_path, *options, "--policy", "served", "--evaluate-every", "0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "server.log").exists() and Checkpoints(tmp_path / "checkpoints").best() is not None
    assert json.loads((tmp_path / "summary.json").read_text())["restarts"] == 0
    assert segments() <= before


@pytest.mark.runs
@pytest.mark.parametrize(("algorithm", "policy"), [("dqn", "local"), ("sac", "served")])
def test_a_policy_that_remembers_learns_from_a_replay_in_processes_and_is_resumed_and_played(
    tmp_path, algorithm, policy
) -> None:
    before, world = segments(), {"dqn": "Recall", "sac": "Aim"}[algorithm]
    line = ["--env", f"tests.unit.gym_training.test_recurrent_replay_policies:{world}", "--algorithm", algorithm]
    line += [*SMALL_SAC, "--recurrent", "gru", "--hidden-size", "8", "--sequence-length", "4", "--burn-in", "2"]
    line += ["--workers", "2", "--envs", "4", "--policy", policy]
    for steps, more in ((400, []), (800, ["--resume"])):
        done = command(tmp_path, *line, "--steps", str(steps), *more)
        assert done.returncode == 0, done.stderr
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["env_steps"] >= steps and summary["restarts"] == 0 and summary["learner_steps"] > 10
    loaded = policies.Policy(policies.choose(tmp_path))
    assert loaded.recurrent and len(policies.play(loaded, 2, seed=1)) == 2
    assert segments() <= before


@pytest.mark.runs
@pytest.mark.parametrize(
    "env",
    [
        {"env": "CartPole-v1"},
        {"env": "tests.unit.gym_training.test_raw_observations:Sampled", "env_args": {"space": "parts"}},
        {"env": CORRIDOR, "env_args": {"several": True}, "action_masks": True},
    ],
    ids=["CartPole", "Dict", "masks"],
)
def test_served_and_local_policies_learn_the_same_serially(tmp_path, env) -> None:
    """The outputs are equal except for some bits, and so are the first steps; the learned weights are nearly equal."""
    options = {"algorithm": "ppo", "n_steps": 32, "hidden": (16,), "steps": 64, "evaluation_episodes": 1, **env}
    outcomes = {}
    for policy in ("local", "served"):
        settings = GymTraining.checked({**options, "policy": policy})
        outcomes[policy] = train(settings, tmp_path / policy, serial=True)
    assert outcomes["local"].learner_steps == outcomes["served"].learner_steps == 2
    assert outcomes["local"].episodes == outcomes["served"].episodes
    assert outcomes["local"].evaluation == outcomes["served"].evaluation


@pytest.mark.runs
def test_a_server_answers_a_row_of_json_with_several_choices_that_the_mask_allows(tmp_path) -> None:
    tmp_path.chmod(0o700)
    settings = GymTraining.checked(
        {
            "env": CORRIDOR,
            "env_args": {"several": True},
            "action_masks": True,
            "steps": 64,
            "n_steps": 32,
            "hidden": (8,),
        }
    )
    train(settings, tmp_path / "run", serial=True)
    loaded = policies.Policy(policies.choose(tmp_path / "run"))
    config = tomllib.loads(policies.served_config(loaded, tmp_path / "exported", tmp_path / "run", {}).read_text())
    models = {"policy": {**config["models"]["policy"], "exported": str(tmp_path / "exported" / "policy.pt2")}}
    mask = np.zeros((2, 9), bool)
    mask[[0, 0, 1, 1], [4, 8, 1, 6]] = True
    rows = {"observation": ("INT64", [3, 0]), "action_mask": ("BOOL", mask.ravel().tolist())}
    shapes = {"observation": [2], "action_mask": [2, 9]}
    inputs = [{"name": name, "datatype": of, "shape": shapes[name], "data": data} for name, (of, data) in rows.items()]
    with serving(tmp_path / "server", models, http="127.0.0.1:0") as server, server.connect(timeout=30) as client:
        url = f"http://{client.status()['server']['http']}/v2/models/policy/infer"
        body = json.dumps({"inputs": inputs}).encode()
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            (output,) = json.load(answer)["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("action", "INT64", [2, 2])
    assert output["data"] == [4, 2, 1, 0]


def test_audits_of_an_environment_are_logged_and_drawn_and_not_rewarded(tmp_path) -> None:
    returns = {}
    for world, audit in (("Audited", ("other",)), ("Mixed", ())):
        env = f"tests.unit.gym_training.gym_worlds:{world}"
        small = {"n_steps": 32, "n_epochs": 1, "hidden": (8,), "evaluation_episodes": 1}
        settings = GymTraining(env=env, steps=96, log_every=40, audit=audit, **small)
        returns[world] = train(settings, tmp_path / world, serial=True).evaluation
        rows = read_metrics(tmp_path / world / "metrics.csv")
        assert {row["audit_other"] for row in rows if "audit_other" in row} == ({0.25} if audit else set())
        drawn = _audits(settings, [{"env_steps": float(step), "audit_other": 0.25} for step in (1, 2)])
        assert (drawn is not None and drawn.heading == "The audit") == bool(audit)
    assert returns["Audited"] == returns["Mixed"]


@pytest.mark.runs
def test_ctrl_c_ends_it_in_order_with_a_checkpoint(tmp_path) -> None:
    before = segments()
    line = [
        *LINE,
        "--env",
        "CartPole-v1",
        "--out",
        str(tmp_path),
        *SMALL_PPO,
        "--steps",
        "100000000",
        "--set",
        "log_every = 32",
    ]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 80
        while not ((tmp_path / "metrics.csv").exists() and len(read_metrics(tmp_path / "metrics.csv")) > 2):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in output, output
    assert Checkpoints(tmp_path / "checkpoints").latest() is not None
    assert segments() <= before


@pytest.mark.runs
@pytest.mark.parametrize("victim", [pytest.param("actor-0", marks=pytest.mark.slow), "learner"])
def test_a_killed_role_is_restarted(tmp_path, victim) -> None:
    small = {"n_steps": 32, "hidden": (16,), "evaluation_episodes": 1, "evaluate_every": 0}
    settings = GymTraining.checked({**small, "steps": 3000})
    planned = plan(settings)
    number = [role.name for role in planned.roles].index(victim)
    killed: list[int] = []

    def watch(shared) -> None:
        words = shared.scoreboard.words[number]
        if not killed and words[Word.STATE] == State.RUNNING and shared.scoreboard.env_steps > 100:
            killed.append(int(words[Word.PID]))
            os.kill(killed[0], signal.SIGKILL)

    class Nothing:
        def scalars(self, step, values) -> None: ...

    outcome = run(planned, tmp_path, Nothing(), watch=watch)
    assert killed and outcome.restarts >= 1 and outcome.env_steps >= 3000
    assert outcome.learner_steps == outcome.env_steps // 32


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["local", "served"])
def test_ppo_balances_the_pole(tmp_path, policy) -> None:
    options = {
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "learning_rate": 1e-3,
    }
    settings = GymTraining.checked({**options, "envs": 8, "steps": 51_200, "policy": policy, "workers": 2})
    assert train(settings, tmp_path / "run").evaluation["eval_return"] > 400


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_the_pendulum_is_swung_up(tmp_path, algorithm) -> None:
    options = {"learning_rate": 1e-3, "batch_size": 128, "hidden": (64, 64), "steps": 8000, "gamma": 0.98}
    settings = GymTraining.checked({**options, "env": "Pendulum-v1", "algorithm": algorithm})
    train(settings, tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints").best()["numbers"]["return"] > -250


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dqn_balances_the_pole(tmp_path) -> None:
    options = {"learning_rate": 2.3e-3, "batch_size": 64, "learning_starts": 1000, "target_update_interval": 10}
    options |= {"train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16, "exploration_final_eps": 0.04}
    settings = GymTraining.checked({**options, "algorithm": "dqn", "steps": 50_000, "hidden": (256, 256)})
    train(settings, tmp_path / "run", serial=True)
    assert Checkpoints(tmp_path / "run" / "checkpoints").best()["numbers"]["return"] > 400
