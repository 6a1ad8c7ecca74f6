"""Throw-away environments with the wheel in them: interpreters that are at hand, wheels built once, packages by uv."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_TORCH = "torch; python_version < '3'"  # an override for uv: gigabytes that a client does not need
_ASK = """
import sys, sysconfig
print("%d.%d" % sys.version_info[:2] + "t" * bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
"""


def run(*command: object, timeout: float = 600.0, **more: object) -> str:
    """Return a command's output; raise AssertionError with its output if it fails."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(words[:6])} ...\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def pinned(package: str) -> str:
    """The line of constraints.txt for a package: "torch==2.13.0"."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}=="))


def uv() -> str:
    """The program uv, of this environment or on the path; the test is skipped where there is none."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        pytest.skip("uv is not here: pip install uv")
    return found


@cache
def interpreter(version: str) -> str | None:
    """A Python of that version ("3.13", "3.13t"): in MATRIX_PYTHONS, on the path, pyenv's, or one that uv manages."""
    name = f"python{version}"
    given = [Path(folder) for folder in os.environ.get("MATRIX_PYTHONS", "").split(os.pathsep) if folder]
    places = [*given, *map(Path, os.get_exec_path())]
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [str(place / name) for place in places]
    candidates += [str(path) for path in sorted(kept.glob(f"{version}*/bin/{name}"))]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            told = subprocess.run([candidate, "-c", _ASK], capture_output=True, text=True, check=False)
            if told.stdout.strip() == version:
                return candidate
    managed = subprocess.run(
        [uv(), "python", "find", "--managed-python", "--no-python-downloads", version], capture_output=True, text=True
    )
    return managed.stdout.strip() or None


@cache
def has_headers(python: str) -> bool:
    """Whether extensions can be built for an interpreter; Debian has the headers in python3-dev."""
    script = "import sysconfig, os.path as p; print(p.exists(p.join(sysconfig.get_paths()['include'], 'Python.h')))"
    return run(python, "-c", script).strip() == "True"


def needed_interpreter(version: str) -> str:
    """As `interpreter`; the test is skipped aloud where there is none."""
    found = interpreter(version)
    if found is None:
        pytest.skip(
            f"Python {version} is not here: uv python install {version}, or name its folder in MATRIX_PYTHONS "
            "(CONTRIBUTING.md)"
        )
    return found


class Wheels:
    """The wheels of this tree, each built at its first use.

    Args:
        folder: their folder. MATRIX_WHEELS names one with wheels that were built before.
    """

    def __init__(self, folder: Path) -> None:
        given = os.environ.get("MATRIX_WHEELS")
        self._folder = Path(given) if given else folder
        self._given = bool(given)

    def of(self, version: str) -> Path:
        """The wheel for a version of Python: from 3.12 on the same one, unless it is free-threaded."""
        own = f"cp{version.replace('.', '')}"
        tag = f"{own.rstrip('t')}-{own}" if version.endswith("t") or version < "3.12" else "cp312-abi3"
        needed_interpreter(version)
        pattern = f"jurybox-*-{tag}-*{os.uname().machine}.whl"
        if not list(self._folder.glob(pattern)) and not self._given:
            maker = needed_interpreter("3.12" if tag == "cp312-abi3" and interpreter("3.12") else version)
            run("nice", uv(), "build", "--quiet", "--wheel", "--python", maker, "--out-dir", self._folder, ROOT)
        found = sorted(self._folder.glob(pattern))
        assert found, f"no {pattern} in {self._folder}"
        return found[-1]


@dataclass(frozen=True)
class Environment:
    """An environment; `python` is its interpreter."""

    folder: Path
    python: Path

    @classmethod
    def make(
        cls,
        folder: Path,
        version: str,
        wheel: Path,
        *packages: str,
        extra: str = "",
        options: tuple[str, ...] = (),
        torch: str = "",
    ) -> Environment:
        """Resolve and install the wheel, with an extra of its own, and packages, all at once; then look for conflicts.

        With the requirement `torch`, or without it if that is empty. The test is skipped aloud where the package index
        cannot be reached.
        """
        run(uv(), "venv", "--quiet", "--python", needed_interpreter(version), folder)
        made = cls(folder, folder / "bin" / "python")
        overrides = folder / "overrides.txt"
        overrides.write_text(NO_TORCH)
        of_torch = [torch] if torch else ["--override", overrides]
        wanted = [f"jurybox{f'[{extra}]' if extra else ''} @ {wheel.as_uri()}", *packages, *of_torch]
        command = [uv(), "pip", "install", "--quiet", "--python", made.python, *wanted, *options]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=1200)
        if done.returncode and ("error sending request" in done.stderr or "dns error" in done.stderr):
            pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        for hiding in folder.glob("lib/python*/site-packages/tests"):  # a package's own, which would hide ours
            shutil.rmtree(hiding)
        if extra in ("", "grpc"):  # which does not require torch
            run(uv(), "pip", "check", "--quiet", "--python", made.python)
        return made

    def run(self, *command: object, timeout: float = 300.0, **env: str) -> str:
        """What the environment's Python prints."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return run(self.python, *command, timeout=timeout, env={**kept, "PYTHONDONTWRITEBYTECODE": "1", **env})

    def version_of(self, package: str) -> str:
        """Which version of a package is installed."""
        return self.run("-c", f"from importlib.metadata import version; print(version({package!r}))").strip()

    def lend_torch(self) -> None:
        """Let it import this environment's torch, and whatever else it has none of its own."""
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.origin is not None
        (place,) = self.folder.glob("lib/python*/site-packages")
        (place / "torch-of-another.pth").write_text(str(Path(spec.origin).parents[1]) + "\n")
