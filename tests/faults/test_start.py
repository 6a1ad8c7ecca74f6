"""Starting where it cannot work, and starting again and again."""

import gc
import os
import signal
import socket
from pathlib import Path

import numpy as np
import pytest
from tests.descriptors import open_files
from tests.faults.conftest import MODELS, leaving_nothing
from tests.models import affine
from tests.serving import launch, segments, serving, wait_until

from jurybox.server.inproc import InprocServer
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.endpoints import CannotListen
from jurybox.server.supervisor.run import require_free


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model that keeps serving, without the one that fails, whatever is started beside it."""
    models = {**MODELS, "broken": {"factory": "tests.models:broken"}}
    with leaving_nothing(), serving(tmp_path_factory.mktemp("server"), models) as running:
        yield running


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def ended(running, timeout=60):
    code = running.process.wait(timeout)
    return code, running.text()


def test_a_second_server_at_the_same_address_is_refused_and_the_first_keeps_serving(server):
    second = launch(server.log.parent, MODELS)
    code, text = ended(second)
    assert code == 3
    assert "a server already runs at" in text
    with server.connect() as client:
        assert client.model("affine")(np.ones(4, np.float32)).tolist() == [3, 3, 3, 3]


def test_two_servers_on_one_host_do_not_meet_and_neither_sweeps_the_other(server, tmp_path):
    models = {"affine": {"factory": "tests.models:affine", "args": {"scale": 5.0}}}
    with server.connect() as a, serving(tmp_path / "other", models) as other, other.connect() as b:
        x = np.ones((2, 4), np.float32)
        assert np.array_equal(a.model("affine").infer(x), 2 * x + 1)
        assert np.array_equal(b.model("affine").infer(x), 5 * x + 1)
        assert a.status()["server"] != b.status()["server"]


def test_too_little_memory_is_a_clear_error_at_start(memory, tmp_path, nothing_left):
    memory.left(64 << 20)
    models = {"affine": {"factory": "tests.models:affine", "rows": 4_000_000}}
    code, text = ended(launch(tmp_path / "run", models, under=memory.under))
    assert code == 3
    assert "64.0 MiB are left of the machine's memory" in text
    assert "docker run --memory" in text


def test_a_server_whose_models_all_fail_does_not_start_and_reports_each_reason(tmp_path, nothing_left):
    why = {
        "tests.models:broken": "this factory never works",
        "tests.nothing:x": "cannot import",
        "not_there:x": str(Path.cwd()),
        "tests.models:nothing": "has no 'nothing'",
        "tests.models:Two": "ServedModel",
    }
    code, text = ended(launch(tmp_path, {f"m{at}": {"factory": factory} for at, factory in enumerate(why)}))
    assert code == 3
    for at, says in enumerate(why.values()):
        assert any(f"model=m{at} " in line and says in line for line in text.splitlines()), (at, text)


def test_start_and_stop_leave_only_the_models_output(tmp_path, nothing_left):
    with serving(tmp_path, {**MODELS, "last": {"factory": "tests.models:last_words"}}) as server:
        with server.connect() as client:
            client.model("affine")(np.ones(4, np.float32))
        assert server.stop() == 0
    assert "these are the last words of a model" in server.text()


def test_a_hundred_servers_in_one_process_leave_neither_memory_nor_descriptors():
    before, descriptors = segments(), open_files()
    for _ in range(100):
        with InprocServer({"affine": affine()}) as server, server.model("affine") as model:
            model(np.ones(4, np.float32))
    wait_until(lambda: segments() == before, 30, "shared memory as it was before")
    gc.collect()
    assert open_files() < descriptors + 10  # one descriptor a server would be a hundred


@pytest.mark.slow
def test_start_and_stop_one_hundred_times_leaves_nothing(tmp_path, nothing_left):
    for _ in range(100):
        with serving(tmp_path, MODELS) as server:
            with server.connect() as client:
                client.model("affine")(np.ones(4, np.float32))
            assert server.stop() == 0


def test_a_dry_run_reports_what_it_tried_and_not_that_it_serves(tmp_path, nothing_left):
    def tried(models):
        running = launch(tmp_path, models, flags=["--dry-run"])
        return ended(running, 90)

    code, text = tried({"affine": {"factory": "tests.models:affine"}})
    assert (code, "dry run done, all models work" in text, "supervisor serving" in text) == (0, True, False)
    code, text = tried({"affine": MODELS["affine"], "broken": {"factory": "tests.models:broken"}})
    assert (code, "supervisor serving" in text) == (3, False)
    assert "dry run done, some models failed" in text and "failed=broken" in text and "broken (" not in text


def test_a_dry_run_works_beside_the_server_of_the_same_configuration(tmp_path, nothing_left):
    """Which holds its address, its ports and the folders of its weights."""
    models = {"affine": {"factory": "tests.models:affine", "publish": "double_buffer", "save_dir": str(tmp_path / "w")}}
    ports = {name: f"127.0.0.1:{free_port()}" for name in ("http", "grpc", "tcp", "robots")}
    robots = f'[robots.arm]\nmodel = "affine"\nlisten = "{ports.pop("robots")}"\n'
    with serving(tmp_path, models, more=robots, **ports) as first:
        code, text = ended(launch(tmp_path, models, flags=["--dry-run"], more=robots, **ports), 90)
        assert code == 0 and "dry run done, all models work" in text, text
        assert f"address=ipc://{tmp_path}/engine " in text and f"http={ports['http']} " in text  # what would be used
        with first.connect() as client:
            assert client.model("affine")(np.ones(4, np.float32)).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("door", ["http", "grpc", "tcp", "robots", "dialects"])
def test_a_taken_port_is_noticed_before_anything_is_started(monkeypatch, door):
    monkeypatch.setattr("jurybox.server.supervisor.run._DYING", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = f"127.0.0.1:{port}"
        tables = {
            "robots": {"arm": {"model": "affine", "listen": where}},
            "dialects": {"cosmos": {"model": "affine", "port": port}},
        }
        off = {"http": "", "grpc": "", "tcp": ""}
        own = {"server": {**off, door: where}} if door in off else {"server": off, door: tables[door]}
        settings = Configuration.model_validate({"models": {"affine": {"factory": "tests.models:affine"}}, **own})
        with pytest.raises(CannotListen, match=rf":{port}: port {port} is in use by another program; set .*{door}\b"):
            require_free(settings)
    require_free(settings)


def test_a_server_with_a_taken_port_ends_without_loading_a_model(tmp_path, nothing_left):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        models = {"affine": {"factory": "tests.models:affine"}}
        code, text = ended(launch(tmp_path, models, http=where, log_level="debug"))
    assert code == 3 and "set server.http to another host:port" in text
    assert "started role=" not in text, text  # of a child


BESIDE = """
from tests.models import affine

def broken():
    raise RuntimeError("no weights")
"""


def test_factories_are_found_beside_the_configuration_and_their_errors_come_first_and_are_short(tmp_path, nothing_left):
    """As files are, to which `exported` and `weights` are relative; the server was started in another folder."""
    name = f"beside_{os.getpid()}"
    tmp_path.chmod(0o700)
    (tmp_path / f"{name}.py").write_text(BESIDE)
    models = {"good": {"factory": f"{name}:affine"}, "bad": {"factory": f"{name}:broken"}}
    code, text = ended(launch(tmp_path, models, flags=["--dry-run"]), 90)
    assert code == 3 and 'models="good (ready)"' in text and "failed=bad" in text, text
    first = next(line for line in text.splitlines() if "no weights" in line)
    assert "model failed model=bad" in first and f"raised RuntimeError: no weights ({name}.py:5)" in first
    assert "Traceback" not in text and len(first) < 300


@pytest.mark.parametrize("moment", ["its address is taken", "its engine starts", "its engine has no model yet"])
def test_ctrl_c_while_a_server_starts_prints_one_line(tmp_path, nothing_left, moment):
    """It also reaches the children, which the terminal interrupts in the midst of their imports."""
    running = launch(tmp_path, {"slow": {"factory": "tests.models:affine"}}, flags=["--set", "server.log_level=debug"])

    def reached():
        if moment == "its address is taken":
            return (tmp_path / "engine.lock").exists()
        lines = [line for line in running.text().splitlines() if " started role=engine-0" in line]
        return bool(lines) and (moment == "its engine starts" or "torch" in maps_of(lines[0]))

    def maps_of(line):
        return Path(f"/proc/{line.rpartition('child=')[2]}/maps").read_text()

    wait_until(reached)
    before = len(running.text().splitlines())
    os.killpg(running.process.pid, signal.SIGINT)
    code, text = ended(running)
    lines = [line for line in text.splitlines()[before:] if " debug supervisor started" not in line]
    assert len(lines) == 1 and "interrupted before it served" in lines[0], text
    assert code in (0, 130)


def test_a_server_that_serves_without_some_models_reports_it(server):
    line = next(line for line in server.text().splitlines() if "supervisor serving" in line)
    assert " warning supervisor serving, without models that failed " in line
    assert "affine (ready)" in line and "failed=broken" in line and "broken (" not in line
