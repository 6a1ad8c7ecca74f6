"""Everything that README.md, CONTRIBUTING.md and docs/ show is tried, verbatim.

Every block names its language. Python runs, all blocks of a page in one process and in their order, against one real
server. TOML is read as the server's configuration or a training's. Bash is parsed, every `jurybox` command in it by the
command line's own parser; modules, tests and make's targets that it names exist; requests to a local server are run.
A block that cannot be tried says why in the line above it: <!-- not run: REASON -->.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.serving import RunningServer, segments, serving, wait_until
from typer.core import TyperGroup
from typer.main import get_command

from jurybox.protocol.segment import directory
from jurybox.server.commands.app import app
from jurybox.server.engine.model_code import ModelOrder, load
from jurybox.server.settings.config import ModelSettings, load_settings
from jurybox.training.replay import Replay

ROOT = Path(__file__).parents[2]
LANGUAGES = {"bash", "console", "mermaid", "promql", "python", "text", "toml", "yaml"}
MOST_NOT_RUN = 10  # raise this only with a reason in the page

PARTS = {  # by page, the page whose files it uses
    "benchmarks/results/photo-exploits.md": "benchmarks/results/photo.md",
    "benchmarks/results/photo.md": "",
    "benchmarks/gpu/README.md": "",
}

MODELS = {
    "patients": {"factory": "tests.models:patients"},
    "photo": {"factory": "jurybox.server.jurors:panel", "max_batch": 8, "rows": 64},
    "exposure": {"factory": "jurybox.server.jurors:exposure", "args": {"size": 36}, "max_batch": 16, "rows": 64},
    "policy": {"factory": "tests.models:affine"},
    "memory": {"factory": "tests.open_models:running_sum", "max_batch": 8, "rows": 64},
    "policy/agent0": {"factory": "tests.models:affine", "publish": "double_buffer"},
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    skipped: str  # why it is not tried; empty if it is

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    pages += [ROOT / page for page in PARTS]
    for path in pages:
        lines, began, before = path.read_text().splitlines(), None, ""
        for number, line in enumerate(lines):
            if not line.startswith("```"):
                continue
            if began is None:
                began, before = number, lines[number - 1]
                continue
            reason = re.fullmatch(r"<!-- not run: (.+) -->", before)
            text = "\n".join(lines[began + 1 : number]) + "\n"
            page = str(path.relative_to(ROOT))
            yield Block(page, began + 1, lines[began][3:], text, reason[1] if reason else "")
            began = None


ALL = list(blocks())
TRIED = [block for block in ALL if not block.skipped]


def of(*languages: str) -> list[Block]:
    return [block for block in TRIED if block.language in languages]


def test_every_block_names_its_language_and_few_are_not_tried() -> None:
    assert [str(block) for block in ALL if block.language not in LANGUAGES] == []
    assert len(of("python")) >= 14 and len(of("bash")) >= 25 and len(of("toml")) >= 8
    assert len(ALL) - len(TRIED) <= MOST_NOT_RUN


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("pages")
    with serving(folder, MODELS, http="127.0.0.1:0", grpc="127.0.0.1:0") as running:
        yield running


class MyNet(torch.nn.Linear):
    def __init__(self, hidden: int) -> None:
        super().__init__(52, 145)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(observation), observation.sum(1)


class Affine(torch.nn.Module):
    """The weights of tests.models:affine."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = (torch.nn.Parameter(torch.tensor(value)) for value in (2.0, 1.0))


def presupposed() -> dict[str, Any]:
    """Return the names that a page assumes: pictures, a module, data of an environment."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (4, 384, 384, 3), dtype=np.uint8)
    policies = np.zeros((300, 4672), np.float32)
    return {
        "image": images[0], "images": images, "module": Affine(), "MyNet": MyNet, "x": np.zeros((1, 4), np.float32),
        "planes": np.zeros((119, 8, 8), np.float32), "many_planes": np.zeros((300, 119, 8, 8), np.float32),
        "policy": policies[0], "policies": policies, "values": np.zeros(300, np.float32),
        "observations": np.zeros((8, 4), np.float32), "rewards": np.zeros(8, np.float32),
        "terminated": np.zeros(8, bool), "truncated": np.zeros(8, bool),
        "final_observation": np.zeros(4, np.float32), "errors": torch.ones(256),
    }  # fmt: skip


def files_of(page: str) -> dict[str, str]:
    """Return the Python files that a page shows, by name."""
    shown = [block.text for block in of("python") if block.page == page]
    return {file[1]: text for text in shown if (file := re.match(r"# (\w+\.py)\n", text))}


def shown_by(page: str) -> tuple[dict[str, dict[str, object]], dict[str, dict[str, object]]]:
    """Return models and robots of a page's first configuration, if the factories are in files that the page shows."""
    tables = next((tomllib.loads(one.text) for one in of("toml") if one.page == page), {})
    models = tables.get("models", {})
    modules = [str(model.get("factory", "")).partition(":")[0] for model in models.values()]
    has_own = any(f"{module}.py" in files_of(page) for module in modules)
    return (models, tables.get("robots", {})) if has_own else ({}, {})


OWN = ["serve", "write_a_juror", "robots", "robots_act", "robots_gr00t", "robots_lerobot"]


@pytest.mark.parametrize("page", [f"docs/{name}.md" for name in OWN])
def test_a_page_that_shows_a_model_of_its_own_is_run_with_that_model(page) -> None:
    models, robots = shown_by(page)
    assert models and bool(robots) == ("robots" in page)


@pytest.mark.parametrize("page", sorted({block.page for block in of("python")}))
def test_the_python_of_a_page_runs_and_leaves_nothing_behind(page, server, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
    before, files = segments(), set(directory().iterdir())
    models, robots = shown_by(page)
    if models:
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        more = "".join(
            f'[robots.{name}]\nmodel = "{door["model"]}"\nspeaks = "{door.get("speaks", "openpi")}"\n'
            'listen = "127.0.0.1:0"\n'
            for name, door in robots.items()
        )
        with tempfile.TemporaryDirectory(prefix="jb") as sockets:  # pytest's folders are too long for a socket
            with serving(Path(sockets), models, {"PYTHONPATH": path}, more=more) as own:
                with own.connect() as client:
                    where = client.status()["server"].get("robots", {}) if robots else {}
                run_python(page, own, monkeypatch, {str(robots[name]["listen"]): where[name] for name in robots})
    else:
        run_python(page, server, monkeypatch)
    assert segments() - before == set()
    assert set(directory().iterdir()) - files == set()


def run_python(
    page: str, server: RunningServer, monkeypatch: pytest.MonkeyPatch, ports: Mapping[str, str] | None = None
) -> None:
    monkeypatch.setenv("JURYBOX_ADDRESS", server.address)
    names, grpc = presupposed(), server.listening("grpc")
    for block in of("python"):
        if block.page != page:
            continue
        code = block.text
        for shown, used in {
            **(ports or {}),
            "policy.learn(8192)": "policy.learn(256)",  # the slow test makes all steps
            "n_eval_episodes=256": "n_eval_episodes=32",
            "localhost:8001": grpc,
            '"grpcs://server-host:8001", token="..."': f'"grpc://{grpc}"',
            'resident("cuda"': 'resident("cuda"' if torch.cuda.is_available() else 'resident("cpu"',
        }.items():
            code = code.replace(shown, used)
        exec(compile("\n" * block.line + code, str(ROOT / page), "exec"), names)
    for replay in {id(value): value for value in names.values() if isinstance(value, Replay)}.values():
        replay.unlink()  # a replay stays while a process has it open, and this process does
        replay.close()
    names.clear()


def test_the_client_of_the_page_on_act_gets_what_the_page_says(server, tmp_path, monkeypatch, capsys) -> None:
    page = "docs/robots_act.md"
    test_the_python_of_a_page_runs_and_leaves_nothing_behind(page, server, tmp_path, monkeypatch)
    assert f"`{capsys.readouterr().out.strip()}`" in (ROOT / page).read_text()


def test_a_nested_observation_is_named_as_the_page_on_policies_says(server, monkeypatch) -> None:
    monkeypatch.setenv("JURYBOX_ADDRESS", server.address)
    names = presupposed()
    block = next(block for block in of("python") if "numbers.age" in block.text and block.page == "docs/policies.md")
    exec(block.text, names)
    assert {name: value.tolist() for name, value in names["named"].items()} == {
        name: value.tolist() for name, value in names["row"].items()
    }
    assert names["answers"].shape == (8, 4)
    np.testing.assert_allclose(names["answers"], np.stack([names["answer"]] * 8), rtol=1e-5)


def test_the_readmes_client_gets_the_same_scores_by_every_call(server, monkeypatch, capsys) -> None:
    monkeypatch.setenv("JURYBOX_ADDRESS", server.address)
    names = presupposed()
    exec(next(block for block in of("python") if block.page == "README.md").text, names)
    assert names["scores"].shape == (4,)
    assert names["scores"][0] == pytest.approx(names["score"], abs=1e-4)
    assert names["reply"].outputs["score"] == pytest.approx(names["scores"], abs=1e-4)
    assert 0 < float(capsys.readouterr().out) < 1


def test_the_readmes_model_is_one_that_a_server_loads(tmp_path, monkeypatch) -> None:
    code = next(block for block in of("python") if "def policy" in block.text).text
    (tmp_path / "readme_policy.py").write_text(f"from {__name__} import MyNet\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    settings = ModelSettings(factory="readme_policy:policy", args={"hidden": 512})
    loaded = load("mine", ModelOrder.of(settings.model_dump(mode="json")), torch.device("cpu"))
    assert set(loaded.model.outputs) == {"logits", "value"}


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_is_a_valid_configuration(block, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "shown.toml"
    text, tables = block.text, tomllib.loads(block.text)
    first = next(one for one in of("toml") if one.page == block.page)
    if "dialects" in tables and "models" not in tables:  # for the models that its page shows before
        text = first.text.partition("[dialects.")[0] + text
    if "robots" in tables and "models" not in tables:  # for the port that its page shows before
        text = first.text + text
    file.write_text(text)
    if {"server", "models", "dialects", "robots"} & set(tables):
        (tmp_path / "siglip").mkdir()
        assert load_settings(file, environ={}).models
        return
    if "env" in tables:
        from jurybox.training.trainings import gym

        assert gym.plan(gym.GymTraining.read(file, {})).roles
        return
    if "imitation" in tables:
        from jurybox.studies.photo.learning import PhotoTraining

        assert PhotoTraining.read(file, {}).imitation
        return
    from jurybox.training.trainings.marl import MarlTraining, plan

    assert plan(MarlTraining.read(file, {})).roles


def test_the_pages_detector_for_geneval_is_one_that_a_server_loads(tmp_path) -> None:
    (tmp_path / "my_detector.py").write_text(files_of("docs/dialects_flow_grpo.md")["my_detector.py"])
    toml = next(block.text for block in of("toml") if "my_detector:geneval" in block.text)
    models = tomllib.loads(toml)["models"]
    with serving(tmp_path / "server", models, {"PYTHONPATH": str(tmp_path)}) as running, running.connect() as client:
        assert client.models() == sorted(models)


@pytest.mark.runs
@pytest.mark.parametrize("has_example", [True, False])
def test_the_pages_detector_for_geneval_is_loaded_by_its_configuration(tmp_path, has_example) -> None:
    """It is computed with its own example, since made-up text is no JSON; without one, the error says so."""
    shown = files_of("docs/dialects_flow_grpo.md")["my_detector.py"]
    (tmp_path / "my_detector.py").write_text(shown if has_example else re.sub(r" +example=.*\n", "", shown))
    toml = next(block.text for block in of("toml") if "my_detector:geneval" in block.text)
    (tmp_path / "shown.toml").write_text(toml.replace("port = 18085", "port = 0"))
    with tempfile.TemporaryDirectory(prefix="jb") as sockets:
        server = {"address": f"ipc://{sockets}/engine", "http": "127.0.0.1:0", "devices": "cpu"}
        settings = [f"--set=server.{key}={value}" for key, value in server.items()]
        command = [sys.executable, "-m", "jurybox.server.cli", "serve", "shown.toml", "--dry-run", *settings]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == (0 if has_example else 3), said
    assert ("all models work" if has_example else "returns some with ServedModel(example=...)") in said, said


def test_the_pages_judges_have_one_base_in_memory_and_heads_of_their_own(tmp_path) -> None:
    count = "open(__file__ + '.loads', 'a').write('x')"
    shown = files_of("docs/share_a_gpu.md")["heads.py"]
    (tmp_path / "heads.py").write_text(shown.replace("torch.manual_seed(0)", f"torch.manual_seed(0); {count}"))
    models = tomllib.loads(next(block.text for block in of("toml") if block.text.startswith("# heads.toml")))["models"]
    rows = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    with serving(tmp_path / "server", models, {"PYTHONPATH": str(tmp_path)}) as running, running.connect() as client:
        judges = {name: client.model(name) for name in models}
        before = {name: judge.infer(rows) for name, judge in judges.items()}
        assert (tmp_path / "heads.py.loads").read_text() == "x"
        with client.publisher("helpful") as publisher:
            # The whole of its weights: others are refused.
            publisher.publish({"head.weight": torch.zeros(1, 256), "head.bias": torch.tensor([2.0])})
            wait_until(lambda: judges["helpful"].infer(rows).tolist() == [2.0] * 3, 60)
            publisher.publish({"head.bias": torch.tensor([3.0])}, partial=True)
            wait_until(lambda: judges["helpful"].infer(rows).tolist() == [3.0] * 3, 60)
        np.testing.assert_array_equal(judges["harmless"].infer(rows), before["harmless"])
    assert np.ptp(before["harmless"]) > 0  # the base was used


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_yaml_is_a_service_with_the_volume_and_variables_of_compose_yaml(block) -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    for service in yaml.safe_load(block.text)["services"].values():
        assert service["environment"].items() <= compose["x-client"]["environment"].items()
        assert service["user"] == compose["x-client"]["user"]
        assert set(service["volumes"]) <= {"shared:/run/jurybox"}


def commands(text: str) -> Iterator[list[str]]:
    """Yield the simple commands of a script as words, without variables set before them."""
    for line in text.replace("\\\n", " ").split("\n" if "'{" not in text else "\0"):
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split, words.commenters = True, "#"
        command: list[str] = []
        for word in [*words, ";"]:
            if not set(word) <= set(";&|()<>"):
                command += [] if not command and re.fullmatch(r"\w+=.*", word) else [word]
            elif command:
                yield command
                command = []


_jurybox = cache(get_command)


def parse(words: list[str]) -> None:
    """Parse the words after `jurybox` as the command line does; raise an error if they are invalid."""
    command: Any = _jurybox(app)
    context = None
    while isinstance(command, TyperGroup):  # not click's Group: typer bundles its own click since 0.26
        context = command.make_context(command.name or "jurybox", words, parent=context, resilient_parsing=False)
        name, found, words = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None, name
        command = found
    command.make_context(command.name, list(words), parent=context)


@pytest.mark.parametrize("words", ["train gym --no-such-option 1", "train chess", "status surplus"])
def test_an_invalid_command_is_detected(words: str) -> None:
    with pytest.raises(Exception, match="(?i)no such|unexpected extra"):
        parse(words.split())


def target(name: str) -> bool:
    return bool(re.search(rf"^{re.escape(name)}:", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("block", of("bash", "console"), ids=str)
def test_every_command_is_valid(block, tmp_path, monkeypatch) -> None:
    text = block.text
    if block.language == "console":
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=20)
    assert checked.returncode == 0, checked.stderr
    monkeypatch.chdir(tmp_path)
    (tmp_path / "holiday").mkdir()  # a reader's pictures
    for one in of("toml"):  # files that the page shows, by name
        if one.page in (block.page, PARTS.get(block.page)) and (named := re.match(r"# (\w+\.toml)\n", one.text)):
            (tmp_path / named[1]).write_text(one.text)
    for name, text in files_of(block.page).items():
        (tmp_path / name).write_text(text)
    for command in commands(text):
        program, *words = command
        match Path(program).name, words:
            case "jurybox", ["--version"]:
                pass
            case "jurybox", _:
                parse(words)
            case ("python", ["-m", "pytest", path, *_]) | ("pytest", [path, *_]):
                assert (ROOT / path).exists(), path
            case "python", ["-m", module, *_]:
                monkeypatch.syspath_prepend(ROOT)
                assert find_spec(module), module
            case "make", _:
                assert all(target(word) for word in words if "=" not in word), words
            case "cp" | "rsync" | "docker", _:  # files of the repository that it names exist
                named = [word for word in words if word.startswith(("deploy/", "docker/"))]
                assert all((ROOT / name).exists() for name in named), words


REQUEST = re.compile(r"^(?:curl .*(?:127\.0\.0\.1|localhost):8000|(?:\.venv/bin/)?jurybox (?:status|models|health)\b)")


def statements(text: str) -> Iterator[str]:
    """Yield the statements of a script that send requests to a server on this host."""
    statement = ""
    for line in text.splitlines():
        statement += line + "\n"
        if statement.count("'") % 2 == 0 and not line.endswith("\\"):
            if REQUEST.match(statement):
                yield statement
            statement = ""


REQUESTS = [(block, statement) for block in of("bash") for statement in statements(block.text)]


def test_requests_to_a_server_are_answered(server) -> None:
    assert len(REQUESTS) >= 6
    bin_of_this = Path(sys.executable).parent
    has_curl = shutil.which("curl") is not None
    for block, statement in REQUESTS:
        if "curl " in statement and not has_curl:
            continue
        script = re.sub(r"(127\.0\.0\.1|localhost):8000", server.listening("http"), statement)
        script = script.replace(".venv/bin/", "").replace("curl ", "curl --fail --silent --show-error --max-time 20 ")
        done = subprocess.run(
            ["bash", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "JURYBOX_ADDRESS": server.address, "PATH": f"{bin_of_this}:{os.environ['PATH']}"},
        )
        assert done.returncode == 0, f"{block}: {script}{done.stderr}"
        assert done.stdout
    if not has_curl:
        pytest.skip("no curl here: only the other requests were made")


@pytest.mark.slow
def test_the_start_page_leads_to_a_policy_that_has_learned_and_answers(tmp_path) -> None:
    page = (ROOT / "docs/start.md").read_text()
    for file, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.S):
        (tmp_path / file).write_text(code)
        assert sum(bool(line.strip()) for line in code.splitlines()) < 40
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(prefix="jb") as sockets:
        env = {**os.environ, "PATH": path, "JURYBOX_ADDRESS": f"ipc://{sockets}/engine"}

        def run(command: str) -> str:
            words = shlex.split(command)
            done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        training = re.search(r"^jurybox train gym .*$", page, re.M)
        assert training and "--policy served" in training[0]
        run(training[0])
        evaluation = re.search(r"mean return (\S+) ", run("jurybox policy evaluate trained --episodes 50"))
        assert evaluation and float(evaluation[1]) > -20  # at random: -80
        serve = "jurybox policy serve trained --http 127.0.0.1:0 --grpc 127.0.0.1:0 --address"
        server = subprocess.Popen([*serve.split(), env["JURYBOX_ADDRESS"]], cwd=tmp_path, env=env)
        try:
            wait_until(lambda: Path(sockets, "engine").exists() or server.poll() is not None, 120)
            assert float(run(f"{sys.executable} ask.py").split()[-1]) > -30
        finally:
            server.terminate()
            server.wait(60)


@pytest.mark.slow
def test_the_page_of_a_first_reward_leads_to_a_policy_that_scores_better(tmp_path) -> None:
    page = "docs/first_reward.md"
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text)
    models = next(tomllib.loads(one.text)["models"] for one in of("toml") if one.page == page)
    with tempfile.TemporaryDirectory(prefix="jb") as sockets, serving(Path(sockets), models) as own:
        env = {**os.environ, "JURYBOX_ADDRESS": own.address, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "learn.py"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.findall(r"0\.\d+", done.stdout))
    assert after > before + 0.1
