"""Interpreters for engines other than the server's: whether their packages are compatible, and their environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jurybox.protocol.wire import PROTOCOL_VERSION, build_version

# The oldest versions that an engine runs with, and the packages that it needs in any version.
_OLDEST = {"torch": (2, 1), "numpy": (1, 26)}
_NEEDED = ("pyzmq", "safetensors")
_PYTHON = (3, 10)
_TIMEOUT = 60.0  # seconds; the imports may have to read a cold disk
# It must run with any Python 3, so that an interpreter that is too old can report its version.
_ASK = """
import json, sys
found = {"python": list(sys.version_info[:3])}
try:
    from importlib.metadata import version
except ImportError:
    version = None
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except Exception:
        found[name] = None
try:
    import jurybox.native
    from jurybox.protocol.wire import PROTOCOL_VERSION
    found["protocol"] = PROTOCOL_VERSION
except Exception as error:
    found["broken"] = type(error).__name__ + ": " + str(error)
sys.stdout.write("\\n" + json.dumps(found))
"""


def environment(python: str) -> dict[str, str | None]:
    """Return the variables to set (None: to remove) for a child that another interpreter than the server's runs.

    PYTHONPATH, PYTHONHOME and VIRTUAL_ENV belong to the server's environment: with them the child would import packages
    that were built for another Python. The folder in which the server was started stays on the child's path.
    """
    bin_folder = Path(python).parent  # not resolved: the python of a virtual environment is a symbolic link
    own = (bin_folder.parent / "pyvenv.cfg").is_file()
    return {
        "PYTHONPATH": None,
        "PYTHONHOME": None,
        "VIRTUAL_ENV": str(bin_folder.parent) if own else None,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def misfits(pythons: Collection[str]) -> list[str]:
    """Return the problems that keep interpreters from running an engine, one sentence each; empty if all can."""
    return [f"python = {python!r}: {why}" for python in pythons for why in _misfits(python)]


def _misfits(python: str) -> list[str]:
    if not os.access(python, os.X_OK) or not Path(python).is_file():
        return ["there is no such program, expected the bin/python of an environment with jurybox[engine] in it"]
    names = [*_OLDEST, *_NEEDED, "jurybox"]
    variables = {**os.environ, **environment(python)}
    try:
        asked = subprocess.run(
            [python, "-c", _ASK, *names],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
            env={name: value for name, value in variables.items() if value is not None},
        )
        installed: dict[str, Any] = json.loads(asked.stdout.strip().rpartition("\n")[2])
        if not isinstance(installed, dict) or not {"python", *names} <= installed.keys():
            raise ValueError
        return list(_unfit(installed))
    except subprocess.TimeoutExpired:
        return [f"it did not report its packages within {_TIMEOUT:.0f} s: is it a Python?"]
    except OSError as error:
        return [f"it cannot be run ({error.strerror}): is it a Python of this machine?"]
    except ValueError:
        last = asked.stderr.strip().rpartition("\n")[2]
        return [f"it does not report its packages ({last or f'exit status {asked.returncode}'}): is it a Python?"]


def _unfit(installed: dict[str, Any]) -> Collection[str]:
    python = tuple(installed["python"])
    if python < _PYTHON:
        return [f"it is Python {_dotted(python)}, expected {_dotted(_PYTHON)} or newer"]
    found = []
    if installed["jurybox"] is None:
        found.append(
            f"jurybox is not installed there: install jurybox[engine] {build_version()}, from a wheel for that Python "
            "(docs/serve.md)"
        )
    elif installed["jurybox"] != build_version():
        found.append(f"jurybox {installed['jurybox']} is installed there, expected {build_version()} as the server's")
    elif broken := installed.get("broken"):
        found.append(f"jurybox's native part cannot be imported there ({broken}): install the wheel for that Python")
    elif installed["protocol"] != PROTOCOL_VERSION:
        found.append(
            f"jurybox there speaks protocol {installed['protocol']}, expected {PROTOCOL_VERSION}: install this one"
        )
    for name, oldest in _OLDEST.items():
        if (version := installed[name]) is None:
            found.append(f"{name} is not installed there, expected {_dotted(oldest)} or newer")
        elif tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
            found.append(f"{name} {version} is installed there, expected {_dotted(oldest)} or newer")
    found += [
        f"{name} is not installed there: install it with that interpreter's pip"
        for name in _NEEDED
        if installed[name] is None
    ]
    return found


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
