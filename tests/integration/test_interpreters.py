"""Models whose engine runs on another interpreter, in an environment of its own beside the server's."""

import ast
import json
import os
import signal
import site
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from tests.serving import launch, serving, wait_until

from jurybox.client import Refused
from jurybox.server.settings.config import InvalidConfig, load_settings
from jurybox.server.supervisor.interpreters import environment, misfits

ROOT = Path(__file__).parents[2]
X = np.ones((2, 4), np.float32)
# A factory of a package that only one of the environments has. Its answers show which one computed them.
JUROR = """
import os, sys
import numpy, torch
from jurybox.protocol import TensorSpec
from jurybox.server.models import ServedModel

def number(version):
    return float(".".join(version.split(".")[:2]))

class Where(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, observation):
        bare = "PYTHONPATH" not in os.environ
        told = [sys.version_info[1], number(torch.__version__), number(numpy.__version__), bare]
        return self.scale * observation[:, :1] + torch.tensor([told], dtype=torch.float32)

def where():
    out = {"told": TensorSpec("float32", (4,))}
    return ServedModel(Where(), {"observation": TensorSpec("float32", (4,))}, out)
"""


def install_juror(python: Path) -> None:
    """Install the package into an environment."""
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    output = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, check=True, env={"PATH": os.defpath}
    )
    (Path(output.stdout.strip()) / "only_there.py").write_text(JUROR)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The python of another environment, which borrows this one's packages and has one of its own."""
    folder = tmp_path_factory.mktemp("environment") / "old"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    here = {sysconfig.get_paths()["purelib"], *site.getsitepackages()}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(here)]
    (site_packages / "borrowed.pth").write_text("\n".join(lines) + "\n")
    install_juror(python)
    return python


def models(python):
    return {
        "old": {"factory": "only_there:where", "python": str(python), "publish": "double_buffer", "rows": 64},
        "new": {"factory": "tests.models:affine", "rows": 64},
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory, other):
    env = {"PYTHONPATH": str(tmp_path_factory.mktemp("nothing")), "VIRTUAL_ENV": "/nowhere"}
    more = {"http": "127.0.0.1:0", "factories": ["tests.models:*"]}
    with serving(tmp_path_factory.mktemp("server"), models(other), env, **more) as running:
        yield running


@pytest.fixture
def client(server):
    with server.connect() as connection:
        yield connection


def test_an_interpreter_of_its_own_has_its_own_packages_and_environment(server, client, other):
    answer = client.model("old", rows=4).infer(X)[0]
    assert answer[0] == 1 + sys.version_info[1] and answer[3] == 2.0  # each plus one from the observation
    assert client.model("new", rows=4).infer(X)[0, 0] == 3
    first, second = client.status()["engines"]
    assert "python" not in first and second["python"] == str(other)
    variables = dict(
        word.split("=", 1) for word in Path(f"/proc/{second['pid']}/environ").read_text().split("\0") if "=" in word
    )
    assert "PYTHONPATH" not in variables and variables["VIRTUAL_ENV"] == str(other.parent.parent)
    assert variables["PATH"].startswith(f"{other.parent}:")
    assert Path(f"/proc/{second['pid']}/cmdline").read_text().split("\0")[0] == str(other)
    assert Path(f"/proc/{first['pid']}/cmdline").read_text().split("\0")[0] == sys.executable
    states = {model["name"]: model["engines"] for model in client.status()["models"]}
    assert states == {"old": {"1": "ready"}, "new": {"0": "ready"}}


def test_every_kind_of_call_reaches_the_engine_that_has_the_model(server, client):
    for name, expected in (("old", 1 + sys.version_info[1]), ("new", 3)):
        model = client.model(name, rows=4)
        assert model(X[0])[0] == expected  # the call of one row
        for _ in range(20):
            assert model.infer(X)[0, 0] == expected
        assert np.asarray(model.submit(X).result(timeout=20).outputs)[0, 0] == expected
        with model.rows(2) as rows:
            rows.inputs["observation"][:] = X
            rows.infer()
            assert next(iter(rows.outputs.values()))[0, 0] == expected
    with server.connect(transport="zmq") as over_zmq:
        assert over_zmq.model("old", rows=4).infer(X)[0, 0] == 1 + sys.version_info[1]
        assert over_zmq.model("new", rows=4)(X[0])[0] == 3


def test_publications_reach_it_and_only_its_version_counts(client):
    import torch

    model = client.model("old", rows=4)
    with client.publisher("old") as publisher:
        version = publisher.publish({"scale": torch.tensor(5.0)})
        wait_until(lambda: model.infer(X)[0, 0] == 5 + sys.version_info[1], 20, "the publication")
        reader = client.weights("old")
        assert version == 1 and reader.lag() == 0  # engines without the model do not count
        publisher.publish({"scale": torch.tensor(1.0)})
        wait_until(lambda: model.infer(X)[0, 0] == 1 + sys.version_info[1], 20, "the next one")


def test_its_death_does_not_affect_the_other_engine(server, client):
    old, new = client.model("old", rows=4), client.model("new", rows=4)
    first, second = (engine["pid"] for engine in client.status()["engines"])
    os.kill(second, signal.SIGKILL)
    assert new.infer(X)[0, 0] == 3
    assert old.infer(X, timeout=60)[0, 0] == 1 + sys.version_info[1]  # sent again to the restarted engine
    assert client.status()["engines"][0]["pid"] == first


def test_it_sleeps_and_wakes(client):
    client.sleep("old")
    with pytest.raises(Refused, match="sleeps"):
        client.model("old")
    assert client.model("new", rows=4).infer(X)[0, 0] == 3
    client.wake("old")
    assert client.model("old", rows=4).infer(X)[0, 0] == 1 + sys.version_info[1]


def test_a_client_cannot_name_a_new_interpreter_or_move_a_model(client, other):
    loaded = {"factory": "tests.models:affine"}
    with pytest.raises(Refused, match="none that the configuration names"):
        client.load("third", {**loaded, "python": sys.executable})
    with pytest.raises(Refused, match="cannot move"):
        client.load("new", {**loaded, "python": str(other)})
    client.load("third", {**loaded, "python": str(other)})
    assert client.model("third", rows=4).infer(X)[0, 0] == 3
    assert {m["name"]: m["engines"] for m in client.status()["models"]}["third"] == {"1": "ready"}
    client.unload("third")


# ---- misfits


def fake(folder, name, body):
    """Write a program to use as an interpreter; return its path."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return str(path)


def fake_python(folder, **changes):
    good = {
        "python": [3, 10, 1], "torch": "2.1.0+cu121", "numpy": "1.26.4", "pyzmq": "25.0",
        "safetensors": "0.4.0", "jurybox": None, "protocol": 2,
    }  # fmt: skip
    from jurybox.protocol.wire import build_version

    text = json.dumps({**good, "jurybox": build_version(), **changes})
    return fake(folder, f"python-{abs(hash(text))}", f"cat <<'END'\nwarnings\n{text}\nEND")


def test_each_misfit_of_an_interpreter_is_one_sentence(tmp_path):
    assert misfits([fake_python(tmp_path)]) == []
    for changes, message in (
        ({"python": [3, 9, 18]}, "it is Python 3.9.18, expected 3.10 or newer"),
        ({"torch": "2.0.1"}, "torch 2.0.1 is installed there, expected 2.1 or newer"),
        ({"torch": None}, "torch is not installed there, expected 2.1 or newer"),
        ({"numpy": "1.25.2"}, "numpy 1.25.2 is installed there, expected 1.26 or newer"),
        ({"jurybox": None}, "jurybox is not installed there: install jurybox[engine] "),
        ({"jurybox": "0.0.9"}, "jurybox 0.0.9 is installed there, expected"),
        ({"broken": "ImportError: no native"}, "native part cannot be imported there (ImportError: no native)"),
        ({"protocol": 1}, "speaks protocol 1, expected 2"),
        ({"safetensors": None}, "safetensors is not installed there"),
    ):
        (found,) = misfits([python := fake_python(tmp_path, **changes)])
        assert found.startswith(f"python = {python!r}: ") and message in found
    assert len(misfits([fake_python(tmp_path, torch=None, numpy="1.20")])) == 2


def test_programs_that_are_no_interpreter_are_reported(tmp_path):
    (found,) = misfits([str(tmp_path / "nothing")])
    assert "there is no such program, expected the bin/python of an environment" in found
    (found,) = misfits([fake(tmp_path, "false", "echo cannot >&2; exit 3")])
    assert "(cannot): is it a Python?" in found
    (found,) = misfits([fake(tmp_path, "silent", "exit 3")])
    assert "(exit status 3): is it a Python?" in found
    (found,) = misfits([fake(tmp_path, "binary", r"printf '\377\376'; exit 3")])
    assert "(exit status 3): is it a Python?" in found
    (found,) = misfits([fake(tmp_path, "other", """echo '{"answer": 42}'; exit 3""")])
    assert "(exit status 3): is it a Python?" in found
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nothing")
    broken.chmod(0o700)
    (found,) = misfits([str(broken)])
    assert "it cannot be run" in found


def test_a_server_does_not_start_with_an_interpreter_that_does_not_fit(tmp_path):
    running = launch(tmp_path / "server", models(tmp_path / "nowhere" / "python"))
    assert running.process.wait(60) == 2
    assert "there is no such program" in running.text()


def test_settings_of_separate_engines_are_consistent(tmp_path):
    def settings(text):
        (tmp_path / "s.toml").write_text(text)
        return load_settings(tmp_path / "s.toml", environ={})

    one = '[models.{0}]\nfactory = "a:b"\npython = "envs/{1}"\n{2}\n'
    loaded = settings(
        '[server]\ndevices = ["cuda:0", "cuda:1"]\nreplicas = 2\ngpu_memory_fraction = 0.5\n'
        + one.format("x", "old", "gpu_memory_fraction = 0.2")
        + one.format("y", "old", "")
        + one.format("z", "older", "")
    )
    old, older = f"{tmp_path}/envs/old", f"{tmp_path}/envs/older"
    assert loaded.engines() == [
        *[(device, "", 0.5) for device in ("cuda:0", "cuda:0", "cuda:1", "cuda:1")],
        *[(device, old, 0.2) for device in ("cuda:0", "cuda:1")],
        *[(device, older, 0.5) for device in ("cuda:0", "cuda:1")],
    ]
    for text, message in (
        (
            one.format("x", "a", "gpu_memory_fraction = 0.2") + one.format("y", "a", "gpu_memory_fraction = 0.3"),
            "share",
        ),
        (one.format("x", "a", 'group = "g"') + one.format("y", "b", 'group = "g"'), "one engine computes a group"),
        ('[models.x]\nfactory = "a:b"\ngpu_memory_fraction = 0.2', "expected python with it"),
        (one.format("x", "a", "gpu_memory_fraction = 1.5"), "gpu_memory_fraction"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            settings(text)


def test_variables_of_the_servers_environment_do_not_reach_another(monkeypatch):
    monkeypatch.setenv("PATH", "/bin")
    assert environment("/usr/bin/python3") == {
        "PYTHONPATH": None, "PYTHONHOME": None, "VIRTUAL_ENV": None, "PATH": "/usr/bin:/bin",
    }  # fmt: skip


# ---- an engine's imports


_NEWER = {  # names newer than Python 3.10, by module
    "enum": {"StrEnum", "ReprEnum", "verify"},
    "typing": {"Self", "assert_never", "reveal_type", "LiteralString", "Never", "Required", "NotRequired", "Unpack",
               "TypeVarTuple", "override", "TypeAliasType", "dataclass_transform", "assert_type"},
    "datetime": {"UTC"},
    "asyncio": {"TaskGroup", "timeout", "Runner", "Barrier"},
    "hashlib": {"file_digest"},
    "contextlib": {"chdir"},
    "collections.abc": {"Buffer"},
    "itertools": {"batched"},
}  # fmt: skip


@pytest.mark.runs
def test_all_that_an_engine_imports_runs_on_python_3_10():
    script = "import sys, jurybox.server.engine.process\nfor m in list(sys.modules.values()):\n" + textwrap.indent(
        "file = getattr(m, '__file__', None) or ''\n"
        "if m.__name__.startswith('jurybox') and file.endswith('.py'): print(file)",
        "    ",
    )
    files = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert len(files) > 30
    for file in files:
        tree = ast.parse(Path(file).read_text(), file, feature_version=(3, 10))
        newer = sys.version_info >= (3, 11)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert not _NEWER.get(node.module or "", set()) & {alias.name for alias in node.names}, file
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.attr not in _NEWER.get(node.value.id, set()), (file, node.attr)
            elif isinstance(node, ast.Name):
                assert node.id not in ("ExceptionGroup", "BaseExceptionGroup"), file
            assert not newer or not isinstance(node, ast.TryStar), file
        always = [node for node in tree.body if isinstance(node, ast.Import)]
        assert "tomllib" not in {alias.name for node in always for alias in node.names}, file


# ---- two versions of Python, torch and NumPy


@pytest.mark.matrix
def test_an_engine_of_python_3_10_torch_2_1_and_numpy_1_26_beside_this_one(tmp_path):
    """MATRIX_OLD_PYTHON is the python of an environment with those, and this jurybox."""
    python = os.environ.get("MATRIX_OLD_PYTHON", "")
    if not python:
        pytest.skip("MATRIX_OLD_PYTHON names no environment: docs/serve.md says how to make one")
    install_juror(Path(python))
    import torch

    with serving(tmp_path, models(python)) as running, running.connect() as client:
        old, new = client.model("old", rows=16), client.model("new", rows=4)
        versions = old.infer(X)[0] - 1
        assert versions[0] == 10 and versions[1] < 2.2 and np.isclose(versions[2], 1.26) and versions[3]
        began = time.monotonic()
        while time.monotonic() < began + 3:
            assert old(X[0])[0] == 11 and new(X[0])[0] == 3
        with client.publisher("old") as publisher:
            publisher.publish({"scale": torch.tensor(3.0)})
            wait_until(lambda: old.infer(X)[0, 0] == 13, 20, "the publication")
            client.sleep("old")
            publisher.publish({"scale": torch.tensor(4.0)})
            client.wake("old")
            assert old.infer(X)[0, 0] == 14
        (pid,) = (engine["pid"] for engine in client.status()["engines"] if "python" in engine)
        os.kill(pid, signal.SIGKILL)
        assert old.infer(X, timeout=100)[0, 0] == 14
