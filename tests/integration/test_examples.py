"""The scripts of examples/, run as a new user runs them: copied to a folder without the rest of the repository.

By default with small budgets on one shared server; with `-m slow` each script has its own server and must learn.
"""

from __future__ import annotations

import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from tests.serving import RunningServer, segments, serving, wait_until
from typer.testing import CliRunner

from jurybox.server.settings.config import load_settings

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))

# By script: arguments of a short run; the line with its two numbers; the least second number after a full run.
RETURN = r"mean return: first .*? (-?[\d.]+), last .*?(-?[\d.]+)$"
RUNS = {
    "served_policy": (["--episodes", "8"], RETURN, 200),
    "sb3_juror_reward": (["--steps", "256"], r"as they came ([\d.]+), .* corrected them ([\d.]+)$", 0.73),
    "trl_juror_reward": (["--steps", "2"], r"first steps ([\d.]+), last ([\d.]+)$", 0.35),
    "td3_shared_replay": (["--steps", "1020"], RETURN, -400),
    "sb3_sac_replay": (["--steps", "120"], r"untrained (-?[\d.]+), after \d+ steps (-?[\d.]+)$", -400),
    "lstm_sessions": (["--updates", "4"], r"first 10 updates (\d+)%, last 10 updates (\d+)%$", 95),
    "recurrent_policy": (["--steps", "1024"], r"at every step (\d+)%, with its memory (\d+)%$", 95),
    "fleet": (["--steps", "512"], r"mean return: with .*? ([\d.]+), with .*? ([\d.]+)$", 60),
    "torchrl_collector": (["--frames", "1280"], RETURN, 100),
    "envpool_served": (["--updates", "10"], RETURN, 200),
    "learner_and_actors": (["--generations", "2"], RETURN, 300),
    "rllib_opponent": (["--iterations", "1"], RETURN, 30),
}
OWN_PROCESSES = {"fleet", "learner_and_actors", "rllib_opponent"}  # whose output is not this process's
LONG = OWN_PROCESSES | {"served_policy"}
SERVERLESS = {"td3_shared_replay", "sb3_sac_replay", "learner_and_actors"}


def skip_unless_installed(script: str) -> None:
    """Skip the test if a script's library is not installed; name the command that installs it."""
    text = (EXAMPLES / f"{script}.py").read_text()
    if (package := re.search(r"pip install ([^\n]+?)(?:\"\"\")?$", text, re.MULTILINE)) is None:
        return
    module = {
        "torchrl_collector": "torchrl",
        "envpool_served": "envpool",
        "rllib_opponent": "ray.rllib",
        "trl_juror_reward": "trl",
    }[script]
    try:
        installed = find_spec(module) is not None
    except ModuleNotFoundError:
        installed = False
    if not installed:
        pytest.skip(f"examples/{script}.py needs {module}: pip install {package[1]}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "mine"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[RunningServer]:
    """A server in that folder, with the juror of own_juror/ as its compose.yaml serves it."""
    models = load_settings(place / "own_juror" / "server.toml").models
    fields = {name: model.model_dump(include={"factory", "args", "max_batch"}) for name, model in models.items()}
    path = {"PYTHONPATH": f"{place}:{place / 'own_juror'}", "OMP_NUM_THREADS": "1"}
    bring = ["jurybox.server.jurors:panel", *(f"{script.stem}:*" for script in SCRIPTS)]
    with serving(place.parent / "server", fields, path, grpc="127.0.0.1:0", factories=bring) as running:
        yield running


def test_each_script_is_short_and_has_a_run_and_a_place_in_the_docs() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    assert {script.stem for script in SCRIPTS} == {*RUNS, "plan_two_roles"}
    for script in [*SCRIPTS, *(EXAMPLES / "own_juror").glob("*.*")]:
        assert len(script.read_text().splitlines()) < 80, script
    for name in [*(script.name for script in SCRIPTS), "own_juror"]:
        assert f"examples/{name}" in page, name
    for named in re.findall(r"^python (\S+\.py)", page, re.MULTILINE):
        assert list(EXAMPLES.glob(f"**/{named}")), named


@pytest.mark.parametrize("script", [pytest.param(each, marks=[pytest.mark.runs] * (each in LONG)) for each in RUNS])
def test_each_script_runs_and_prints_its_result(script, place, request, monkeypatch, capsys) -> None:
    skip_unless_installed(script)
    arguments = list(RUNS[script][0])
    if script not in SERVERLESS:
        arguments += ["--server", request.getfixturevalue("server").address]
    before = segments()
    monkeypatch.chdir(place)
    if script in OWN_PROCESSES:
        line = [sys.executable, f"{script}.py", *arguments]
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=110, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr
        output = done.stdout
    else:
        monkeypatch.syspath_prepend(place)
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
        if script.startswith("sb3"):
            evaluation = import_module("stable_baselines3.common.evaluation")
            whole = evaluation.evaluate_policy
            monkeypatch.setattr(
                evaluation, "evaluate_policy", lambda *given, **more: whole(*given, **{**more, "n_eval_episodes": 1})
            )
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            runpy.run_path(f"{script}.py", run_name="__main__")
        finally:
            torch.set_num_threads(threads)
        output = capsys.readouterr().out
    assert all(math.isfinite(number) for number in numbers(script, output))
    if script not in SERVERLESS:
        server = request.getfixturevalue("server")
        with server.connect() as client:
            wait_until(lambda: client.models() == ["fields"], what="the unloading of its model")
    elif script in OWN_PROCESSES:
        assert segments() <= before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", RUNS)
def test_each_script_learns_on_a_server_of_its_own(script, place, tmp_path) -> None:
    skip_unless_installed(script)
    shutil.copy(place / f"{script}.py", tmp_path)
    line = [sys.executable, f"{script}.py"]
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=850, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert numbers(script, done.stdout)[1] >= RUNS[script][2], done.stdout


def numbers(script: str, output: str) -> tuple[float, float]:
    found = re.findall(RUNS[script][1], output, re.MULTILINE)
    assert len(found) == 1, output
    return float(found[0][0]), float(found[0][1])


def test_the_plan_is_run_and_its_policy_evaluated_from_its_folder(place, monkeypatch) -> None:
    from jurybox.training.policy_commands import policy
    from jurybox.training.runtime import RunLog, run_plan
    from jurybox.training.runtime.progress import COLUMNS

    monkeypatch.chdir(place)
    with monkeypatch.context() as patch, RunLog(Path("dqn"), [*COLUMNS, "loss"]) as log:
        patch.syspath_prepend(place)
        plan = import_module("plan_two_roles").plan(1020)
        assert run_plan(replace(plan, save_every=1000), Path("dqn"), log, serial=True).learner_steps == 10
    # `jurybox policy` can only import from its current folder.
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(place)])
    monkeypatch.delitem(sys.modules, "plan_two_roles")
    done = CliRunner().invoke(policy, ["evaluate", "dqn", "--episodes", "2"])
    assert done.exit_code == 0 and "mean return" in done.output, done.output


def test_the_own_juror_answers_the_script_beside_it(place, server) -> None:
    address = f"grpc://{server.listening('grpc')}"
    done = subprocess.run(
        [sys.executable, "ask.py"], capture_output=True, text=True, timeout=100, cwd=place / "own_juror",
        env={**os.environ, "JURYBOX_ADDRESS": address},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    scores = [line[28:] for line in done.stdout.splitlines()]
    assert scores[:3] == ["1.0", "0.5", "0.0"] and "an empty text" in scores[3]


def test_its_compose_file_is_as_restricted_as_the_projects_and_serves_its_folder() -> None:
    folder = EXAMPLES / "own_juror"
    ours = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["server"]
    (service,) = yaml.safe_load((folder / "compose.yaml").read_text())["services"].values()
    for key in ("image", "pull_policy", "user", "read_only", "cap_drop", "security_opt", "init"):
        assert service[key] == ours[key], key
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    (mounted, inside, _) = service["volumes"][0].split(":")
    assert (folder / mounted).resolve() == folder.resolve() and service["environment"]["PYTHONPATH"] == inside
    assert service["command"][:2] == ["serve", f"{inside}/server.toml"]
