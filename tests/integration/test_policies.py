"""Policies can be used after training: a tiny run of hockey and of photo, and every command that takes a policy."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.serving import wait_until
from tests.unit.runtime import toys
from tests.unit.studies.hockey.hockey_runs import settings as hockey_settings
from typer.testing import CliRunner

from jurybox.client import connect
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel
from jurybox.studies.hockey import train as hockey
from jurybox.studies.photo.environment import PhotoConfig
from jurybox.studies.photo.environment.edits import Edits, apply, apply_full
from jurybox.studies.photo.learning import PhotoTraining, plan
from jurybox.training import interrupts
from jurybox.training.algorithms import served_networks
from jurybox.training.film import save_film
from jurybox.training.policies import Acting, Acts, Description, Policy, PolicyError, choose, play, policies
from jurybox.training.policy_commands import edit, policy
from jurybox.training.runtime.run import run
from jurybox.training.spaces import ActionSpec, AgentSpec, Leaf

JUROR = "tests.unit.studies.photo.cheap_juror:middle_grey"


@pytest.fixture(scope="module")
def hockey_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hockey")
    small = {"steps": 600, "evaluate_every": 300, "checkpoint_every": 250, "evaluation_games": 1}
    run(hockey.plan(hockey_settings(**small), folder), folder, toys.Rows(), serial=True)
    return folder


@pytest.fixture(scope="module")
def photo_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photo")
    settings = PhotoTraining(
        environment=PhotoConfig(scorer="local", juror=JUROR), steps=16, envs=2, rollout=16, n_epochs=1, hidden=(8,)
    )
    run(plan(settings, serial=True), folder, toys.Rows(), serial=True)
    return folder


@pytest.fixture
def command(monkeypatch):
    """Return a function that runs a command in this process, which leaves its signals to pytest."""
    for take in ("take_over", "ignore_from_now_on"):
        monkeypatch.setattr(interrupts, take, lambda *_: None)

    def run(*arguments, app=policy, status=0):
        done = CliRunner().invoke(app, [str(each) for each in arguments])
        assert done.exit_code == status, done.output
        assert "Traceback" not in done.output
        return done.output

    return run


def test_a_run_lists_its_best_and_its_newest_policies(command, hockey_run, photo_run):
    output = command("list", hockey_run)
    lines = output.strip().splitlines()
    assert lines[0].startswith("best") and "points" in lines[0] and "600 env steps" in output
    assert [each.best for each in policies(hockey_run)] == [True, False, False]
    assert "16 env steps" in command("list", photo_run)


def test_the_best_policy_is_the_one_that_was_scored(hockey_run):
    best = choose(hockey_run)
    evaluation = json.loads((hockey_run / "checkpoints" / "best" / "evaluation.json").read_text())
    assert best.numbers == evaluation["numbers"] and best.env_steps == evaluation["env_steps"]
    from jurybox.studies.hockey import HockeyGames
    from jurybox.studies.hockey.games import play as play_games
    from jurybox.training.roles.evaluation import _SEED

    seeds = np.random.default_rng((_SEED, hockey_settings().seed)).integers(2**31, size=1).tolist()
    games, loaded = HockeyGames(), Policy(best)
    for opponent in ("weak", "strong"):
        (again,) = play_games(games, seeds, loaded, opponent)
        # NumPy's and torch's actions differ in the last bits, and a game makes that larger; another plays otherwise.
        assert again.total == pytest.approx(evaluation["numbers"][f"return_{opponent}"], abs=1e-2)


@pytest.mark.parametrize(
    "kind", [".png", *(pytest.param(kind, marks=pytest.mark.runs) for kind in (".webm", ".gif", ".mp4"))]
)
def test_episodes_are_played_and_filmed(command, tmp_path, hockey_run, kind):
    film = tmp_path / f"out{kind}"
    output = command("play", hockey_run, "--episodes", 1, "--video", film, "--seed", 3, "--set", "opponent='random'")
    assert "mean return" in output and film.stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == [film.name], "no partial file is left"


def test_a_film_of_any_length_needs_bounded_memory_and_keeps_its_order(tmp_path):
    frames = [np.full((8, 10, 3), number % 256, np.uint8) for number in range(100)]
    save_film(frames, tmp_path / "strip.png", 25)
    strip = cv2.imread(str(tmp_path / "strip.png"))
    assert strip.shape == (8, 120, 3)
    shades = strip[0, 5::10, 0].tolist()
    assert shades == sorted(shades) and shades[0] == 0 and shades[-1] > 80
    with pytest.raises(ValueError, match=r"\.mp4, \.webm, \.gif, \.png"):
        save_film(frames, tmp_path / "out.avi", 25)


def test_an_evaluation_gives_a_mean_with_an_interval_that_the_card_repeats(command, tmp_path, photo_run):
    output = command("evaluate", photo_run, "--episodes", 4)
    assert "95 %" in output and "4 episodes of 4 steps" in output
    again = play(Policy(choose(photo_run)), 4, seed=10_000)
    mean = f"{np.mean([each.total for each in again]):.4g}"
    assert f"mean return {mean} " in output
    written = command("export", photo_run, "--to", tmp_path / "policy.pt2").split()
    assert [Path(each).name for each in written] == ["policy.pt2", "policy.safetensors", "policy.md"]
    card = (tmp_path / "policy.md").read_text()
    assert f"mean return {mean} " in card and '"gamma": 0.0' in card and "float32 (n, 9), -1 to 1" in card


@pytest.mark.parametrize("which", ["hockey", pytest.param("photo", marks=pytest.mark.runs)])
def test_an_exported_policy_acts_like_the_run_for_any_number_of_rows(command, tmp_path, hockey_run, photo_run, which):
    run = hockey_run if which == "hockey" else photo_run
    command("export", run, "--to", tmp_path / "policy.pt2")
    trained, exported = Policy(choose(run)), Policy(choose(tmp_path / "policy.safetensors"))
    assert trained.digest == exported.digest
    program = torch.export.load(tmp_path / "policy.pt2").module()
    for n in (1, 2, 7):
        rows = np.random.default_rng(n).normal(0, 3, (n, *trained.inputs["observation"].shape)).astype(np.float32)
        np.testing.assert_array_equal(trained(rows), exported(rows))
        np.testing.assert_allclose(program(torch.from_numpy(rows)).numpy(), trained(rows), rtol=1e-5, atol=1e-6)
    assert np.abs(trained(rows * 100)).max() <= 1.0


@pytest.mark.parametrize(
    ("choose", "bounds", "expected"),
    [
        ("box", (-2.0, 4.0), [-2.0, 1.0, 4.0]),
        ("tanh", (-2.0, 4.0), [-2.0, 1.0, 4.0]),
        ("clip", (-20.0, 4.0), [-20.0, 0.0, 4.0]),
        ("best", (), [3, 3, 3]),
    ],
)
def test_an_output_becomes_an_action_as_the_description_says(choose, bounds, expected):
    outputs = {"other": TensorSpec("float32", (1,)), "action": TensorSpec("float32", (1,))}
    module = torch.nn.Identity()
    served = ServedModel(module, {"observation": TensorSpec("float32", (1,))}, outputs)
    acts = Acts("", {}, "", "action", choose, *([bound] for bound in bounds), first=3)
    module.forward = lambda observation: (observation * 0, observation)
    found = Acting(served, acts)(torch.tensor([[-100.0], [0.0], [100.0]]))
    np.testing.assert_allclose(found.numpy().ravel(), expected, atol=1e-5)


@contextmanager
def served(run, folder):
    environment = {**os.environ, "JURYBOX_DEVICES": '["cpu"]'}
    line = [sys.executable, "-c", "from jurybox.training.policy_commands import policy; policy()", "serve", str(run)]
    line += ["--address", f"ipc://{folder}/engine", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    log = folder / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(line, stdout=sink, stderr=sink, env=environment)
    try:
        wait_until(lambda: "supervisor serving" in log.read_text() or process.poll() is not None, 100, "the server")
        assert process.poll() is None, log.read_text()
        yield f"ipc://{folder}/engine"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.runs
@pytest.mark.timeout(200)
def test_a_server_answers_with_it_over_our_protocol_and_the_open_inference_protocol(tmp_path, hockey_run):
    tmp_path.chmod(0o700)
    loaded = Policy(choose(hockey_run))
    rows = np.random.default_rng(0).normal(0, 1, (3, 18)).astype(np.float32)
    with served(hockey_run, tmp_path) as address, connect(address, timeout=30) as server:
        np.testing.assert_allclose(server.model("policy").infer(rows), loaded(rows), rtol=1e-4, atol=1e-6)
        import urllib.request

        tensor = {"name": "observation", "shape": [3, 18], "datatype": "FP32", "data": rows.ravel().tolist()}
        url = f"http://{server.status()['server']['http']}/v2/models/policy/infer"
        body = json.dumps({"inputs": [tensor]}).encode()
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            (output,) = json.load(answer)["outputs"]
        assert output["name"] == "action"
        np.testing.assert_allclose(np.reshape(output["data"], (3, 4)), loaded(rows), rtol=1e-4, atol=1e-5)


# ---- jurybox edit


def edited(*arguments, command, status=0):
    import typer

    app = typer.Typer()
    app.command()(edit)
    return command(*arguments, app=app, status=status)


def test_pictures_are_edited_at_full_resolution_beside_a_contact_sheet(command, tmp_path, photo_run):
    given, out = tmp_path / "in", tmp_path / "out"
    given.mkdir()
    picture = np.random.default_rng(0).integers(0, 90, (500, 900, 3), np.uint8)
    cv2.imwrite(str(given / "wide.png"), picture)
    cv2.imwrite(str(given / "tall.jpg"), picture.transpose(1, 0, 2))
    (given / "broken.jpg").write_bytes(b"nothing")
    output = edited(given, "--policy", photo_run, "--out", out, command=command)
    assert "passed over" in output and "broken.jpg" in output and "2 pictures" in output
    assert cv2.imread(str(out / "wide.png")).shape == (500, 900, 3)
    assert cv2.imread(str(out / "tall.jpg")).shape == (900, 500, 3)
    assert cv2.imread(str(out / "contact-sheet.jpg")) is not None
    assert len((out / "edits.csv").read_text().splitlines()) == 3
    before = (out / "wide.png").read_bytes()
    edited(given / "wide.png", "--policy", photo_run, "--out", out, command=command)
    assert (out / "wide.png").read_bytes() == before and (out / "wide-2.png").exists(), "no file is overwritten"


def test_an_argument_that_the_photo_environment_does_not_have_is_refused(command, tmp_path, photo_run):
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((100, 100, 3), np.uint8))
    options = [tmp_path / "a.png", "--policy", photo_run, "--out", tmp_path / "out"]
    assert "'stepz' is no argument" in edited(*options, "--set", "stepz = 8", command=command, status=2)
    edited(*options, "--set", "steps = 1", command=command)


def test_editing_with_a_foreign_file_runs_nothing_that_it_names(command, tmp_path, photo_run):
    from safetensors.torch import load_file, save_file

    command("export", photo_run, "--to", tmp_path / "policy.pt2")
    description = choose(photo_run).description.as_dict()
    touched = tmp_path / "touched"
    description["environment_arguments"] |= {"juror": "os:system", "juror_args": {"command": f"touch {touched}"}}
    save_file(
        load_file(tmp_path / "policy.safetensors"),
        tmp_path / "theirs.safetensors",
        {"jurybox-policy": json.dumps(description)},
    )
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((100, 100, 3), np.uint8))
    options = [tmp_path / "a.png", "--policy", tmp_path / "theirs.safetensors", "--out", tmp_path / "out"]
    assert "--trust allows it" in edited(*options, command=command, status=2)
    assert not touched.exists()


def test_a_recipe_at_full_resolution_is_the_recipe_of_the_small_square():
    rng = np.random.default_rng(1)
    small = cv2.GaussianBlur(rng.integers(0, 255, (384, 384, 3), np.uint8), (0, 0), 6)
    recipe = Edits(exposure=0.5, contrast=0.2, saturation=-0.3, temperature=0.2, straighten=4.0, crop=0.1)
    np.testing.assert_allclose(apply_full(small, recipe, 384), apply(small, recipe), atol=3)
    large = cv2.resize(small, (1536, 1536), interpolation=cv2.INTER_CUBIC)
    shrunk = cv2.resize(apply_full(large, recipe, 384), (384, 384), interpolation=cv2.INTER_AREA)
    assert np.abs(shrunk.astype(int) - apply(small, recipe)).mean() < 2
    wide = rng.integers(1, 255, (200, 500, 3), np.uint8)
    turned = apply_full(wide, Edits(straighten=10.0), 384)
    assert turned.shape == wide.shape
    np.testing.assert_array_equal(apply_full(wide, Edits(), 384), wide)


# ---- errors


def test_the_error_of_an_invalid_policy_is_one_sentence(command, tmp_path, hockey_run, photo_run):
    assert "no run was begun there" in command("list", tmp_path / "nowhere", status=2)
    tmp_path.joinpath("checkpoints").mkdir()
    assert "no checkpoint with one yet" in command("play", tmp_path, status=2)
    assert "there are, by env steps" in command("play", hockey_run, "--which", 7, status=2)
    assert ".mp4, .webm, .gif, .png" in command("play", hockey_run, "--video", tmp_path / "a.avi", status=2)
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((100, 100, 3), np.uint8))
    output = edited(tmp_path / "a.png", "--policy", hockey_run, "--out", tmp_path / "o", command=command, status=2)
    assert "expected one of photo" in output
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 100)
    assert "no policy that 'jurybox policy export' wrote" in command("play", tmp_path / "bad.safetensors", status=2)


def test_damaged_weights_are_a_policy_error(command, tmp_path, hockey_run):
    run = tmp_path / "run"
    shutil.copytree(hockey_run, run)
    for weights in run.glob("checkpoints/*/*.state"):
        weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be read" in command("play", run, status=2)


def test_a_foreign_file_may_only_name_code_of_jurybox_without_trust(command, tmp_path, hockey_run):
    command("export", hockey_run, "--to", tmp_path / "policy.pt2")
    from safetensors.torch import load_file, save_file

    description = Description.of(choose(hockey_run).description.as_dict(), tmp_path).as_dict()
    description["environment"] = "os:abort"
    save_file(
        load_file(tmp_path / "policy.safetensors"),
        tmp_path / "bad.safetensors",
        {"jurybox-policy": json.dumps(description)},
    )
    assert "--trust allows it" in command("play", tmp_path / "bad.safetensors", status=2)
    for number in (1, 99):
        with pytest.raises(PolicyError, match=f"has the format {number}, this build reads 3: use the build that wrote"):
            Description.of({**description, "format": number}, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("environment_arguments", {"name": "os:system", "arguments": {"command": "touch %s"}}),
        ("network", ("jurybox.training.runtime.local_server:subprocess.run", {"args": ["touch", "%s"]})),
        ("network", ("jurybox.training.run_folder:write_atomically", {"path": "%s", "text": ""})),
        ("environment", "jurybox.training.runtime.local_server:LocalServer"),
    ],
)
def test_a_foreign_file_runs_nothing_through_jurybox_itself(key, value, tmp_path):
    spec = AgentSpec((Leaf("observation", (4,), "float32"),), ActionSpec(True, 2)).as_dict()
    arguments = {"algorithm": "ppo", "settings": {"hidden": [8]}, "spec": spec}
    made = served_networks.gym_policy(**arguments)
    acts = Acts("jurybox.training.algorithms.served_networks:gym_policy", arguments, "p", "logits", "best")
    rows = "jurybox.training.environments.gymnasium_env:played_environment"
    description = Description("gym", {"p": acts}, rows, {"name": "CartPole-v1", "arguments": {}}).as_dict()
    weights = {name: tensor.clone() for name, tensor in made.module.state_dict().items()}
    path, touched = tmp_path / "theirs.safetensors", tmp_path / "touched"
    save_file(weights, path, {"jurybox-policy": json.dumps(description)})
    assert play(Policy(choose(path)), 1)  # the unchanged one plays
    bad = json.loads(json.dumps(value).replace("%s", str(touched)))
    if key == "network":
        description["policies"]["p"] |= {"network": bad[0], "arguments": bad[1]}
    else:
        description[key] = bad
    save_file(weights, path, {"jurybox-policy": json.dumps(description)})
    with pytest.raises(PolicyError, match="--trust"), Policy(choose(path)).environment():
        pass
    assert not touched.exists()
