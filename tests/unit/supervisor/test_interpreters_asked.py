"""Interpreters for engines, played by small programs: what each says of itself decides whether it may run one."""

from __future__ import annotations

import json
import os
import sys

import pytest

from jurybox.protocol.wire import PROTOCOL_VERSION, build_version
from jurybox.server.supervisor import interpreters
from jurybox.server.supervisor.interpreters import environment, misfits

FINE = {
    "python": [3, 10, 0], "torch": "2.1.0", "numpy": "1.26", "pyzmq": "1", "safetensors": "1",
    "jurybox": build_version(), "protocol": PROTOCOL_VERSION,
}  # fmt: skip


@pytest.fixture
def program(tmp_path):
    def written(shell: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{shell}\n")
        path.chmod(0o755)
        return str(path)

    return written


@pytest.fixture
def saying(program):
    def asked(**told: object) -> list[str]:
        python = program(f"cat <<'END'\nnoise at the start\n{json.dumps({**FINE, **told})}\nEND")
        assert misfits([]) == []
        found = misfits([python])
        assert all(each.startswith(f"python = {python!r}: ") for each in found)
        return [each.removeprefix(f"python = {python!r}: ") for each in found]

    return asked


def test_one_with_all_that_an_engine_needs_may_run_it(saying):
    assert saying() == []
    assert saying(torch="2.13.0+cpu", numpy="10.0.0rc1", python=[4, 0, 0]) == []


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"python": [3, 9, 18]}, ["it is Python 3.9.18, expected 3.10 or newer"]),
        ({"jurybox": None}, ["jurybox is not installed there: install jurybox[engine]"]),
        ({"jurybox": "0.0.1"}, ["jurybox 0.0.1 is installed there, expected"]),
        ({"broken": "ImportError: no"}, ["jurybox's native part cannot be imported there (ImportError: no)"]),
        ({"protocol": 1}, [f"jurybox there speaks protocol 1, expected {PROTOCOL_VERSION}"]),
        ({"torch": None}, ["torch is not installed there, expected 2.1 or newer"]),
        ({"torch": "2.0.9"}, ["torch 2.0.9 is installed there, expected 2.1 or newer"]),
        ({"numpy": "1.25.9"}, ["numpy 1.25.9 is installed there, expected 1.26 or newer"]),
        ({"pyzmq": None}, ["pyzmq is not installed there: install it with that interpreter's pip"]),
        (
            {"numpy": None, "safetensors": None, "protocol": 1},
            ["jurybox there speaks", "numpy is not", "safetensors is"],
        ),
    ],
)
def test_all_that_one_lacks_is_named(saying, told, why):
    found = saying(**told)
    assert len(found) == len(why) and all(one.startswith(said) for one, said in zip(found, why, strict=True))


@pytest.mark.parametrize(
    ("shell", "why"),
    [
        ("echo no python >&2; exit 3", "it does not report its packages (no python): is it a Python?"),
        ("exit 3", "it does not report its packages (exit status 3): is it a Python?"),
        ("echo '[1]'", "it does not report its packages (exit status 0): is it a Python?"),
        ("""echo '{"python": [3, 12, 0]}'""", "it does not report its packages (exit status 0)"),
        ("head -c 100 /dev/urandom", "it does not report its packages"),
    ],
)
def test_a_program_that_says_something_else_is_no_python(program, shell, why):
    (found,) = misfits([program(shell)])
    assert why in found


def test_what_cannot_be_run_or_does_not_end_is_told_apart(tmp_path, program, monkeypatch):
    absent, folder, plain, other = tmp_path / "none", tmp_path / "folder", tmp_path / "plain", tmp_path / "other"
    folder.mkdir()
    plain.write_text("#!/bin/sh\n")
    other.write_bytes(b"\x7fELF of another machine")
    other.chmod(0o755)
    found = misfits([str(absent), str(folder), str(plain), str(other)])
    assert len(found) == 4 and all("there is no such program" in one for one in found[:3])
    assert "it cannot be run (" in found[3] and "is it a Python of this machine?" in found[3]
    monkeypatch.setattr(interpreters, "_TIMEOUT", 0.2)
    (late,) = misfits([program("exec sleep 60")])
    assert late.endswith("it did not report its packages within 0 s: is it a Python?")


def test_one_is_asked_without_the_servers_packages_and_first_on_its_own_path(program, monkeypatch, tmp_path):
    told = tmp_path / "told"
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PYTHONHOME", "/ours")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    misfits([python := program(f'echo "$PYTHONPATH|$PYTHONHOME|$VIRTUAL_ENV|$PATH" > {told}; cat')])
    assert told.read_text() == f"|||{tmp_path}:/bin:/usr/bin\n"
    own = tmp_path / "env" / "bin"
    own.mkdir(parents=True)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (own / "python").symlink_to(python)
    assert environment(str(own / "python"))["VIRTUAL_ENV"] == str(tmp_path / "env")
    assert environment(python)["VIRTUAL_ENV"] is None
    monkeypatch.delenv("PATH")
    assert environment(python)["PATH"] == f"{tmp_path}{os.pathsep}{os.defpath}"


def test_this_interpreter_may_run_an_engine():
    assert misfits([sys.executable]) == []
