"""Build and try Jurybox in every Python that this machine has: `make pythons`, after `make wheel`.

    .venv/bin/python .ci/pythons.py [--python 3.12 ...] [--units 3.12 ...] [--wheels dist]

For each of 3.10 to 3.14 that is on the path, in MATRIX_PYTHONS, pyenv's or uv's:

- The native part is built with g++ and clang++; warnings are errors.
- Each of these wheels, and the one that `make wheel` made, is installed into an environment without a compiler: no
  program but the environment's own is on the path. There `jurybox serve` serves a model, which is asked over shm, zmq,
  tcp, grpc and HTTP, and `jurybox train gym` trains for 2,000 steps. A Python that is too old for the server (3.10)
  gets what it can run: the client, and an engine of the server of this environment.
- The unit suite runs in each that has the server and the trainings, or in those that `--units` names. For the Python of
  this environment that is `make test`.

What is not here, and what a Python lacks, is named. Environments are kept in build/pythons, as long as constraints.txt
and pyproject.toml stay the same. torch comes from TORCH_INDEX if that answers, else with its CUDA libraries from PyPI;
uv keeps one copy of these for all environments.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]
from once_more import once_more  # noqa: E402
from tests.serving import serving  # noqa: E402
from tests.wheel.environments import Environment, Wheels, has_headers, interpreter, pinned, run, uv  # noqa: E402

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
SERVER_FROM = 11  # the minor version from which on the server runs
COMPILERS = ("g++", "clang++")
HERE = "{}.{}".format(*sys.version_info[:2])
PLACE = ROOT / "build" / "pythons"
PINNED = ROOT / "constraints.txt"
# No wheel of box2d, which the trainings need, is for these.
WITHOUT_TRAINING = {"3.14"}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def minor(version: str) -> int:
    return int(version.partition(".")[2])


def build(version: str, python: str, compiler: str) -> Path:
    """A wheel of this tree; AssertionError with the compiler's output if it does not build, or warns."""
    out = PLACE / "wheels" / f"{version}-{compiler}"
    shutil.rmtree(out, ignore_errors=True)
    settings = ("cmake.define.JURYBOX_WARNINGS_ARE_ERRORS=ON", f"build-dir={PLACE}/cmake/{version}-{compiler}")
    options = [word for setting in settings for word in ("--config-setting", setting)]
    command = [uv(), "build", "--quiet", "--wheel", "--python", python, "--out-dir", out, *options, ROOT]
    run(*command, env={**os.environ, "CXX": compiler}, timeout=1200)
    (made,) = out.glob("*.whl")
    return made


def install_torch(there: Environment, env: dict[str, str]) -> None:
    """As the Makefile does: from TORCH_INDEX alone, or else from PyPI with all that it needs."""
    command = [uv(), "pip", "install", "--quiet", "--python", there.python]
    index, torch = os.environ.get("TORCH_INDEX"), pinned("torch")
    if index:
        try:
            run(*command, "--no-deps", "--index-url", index, torch, env={**env, "UV_HTTP_RETRIES": "0"}, timeout=1200)
        except AssertionError:
            say("  no torch from TORCH_INDEX: taking PyPI's, with CUDA")
        else:
            return
    run(*command, torch, env=env, timeout=1200)


def environment(version: str, python: str, wheel: Path, extra: str) -> Environment:
    """An environment with what an extra of the wheel requires, in the versions of constraints.txt where they exist."""
    server = minor(version) >= SERVER_FROM
    key = hashlib.sha256(PINNED.read_bytes() + (ROOT / "pyproject.toml").read_bytes() + extra.encode())
    folder = PLACE / f"env-{version}-{key.hexdigest()[:12]}"
    there, complete = Environment(folder, folder / "bin" / "python"), folder / "complete"
    if complete.exists():
        return there
    for old in PLACE.glob(f"env-{version}-*"):
        shutil.rmtree(old)
    env = {**os.environ}
    if "PIP_FIND_LINKS" in env:  # what pip was told to use
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    run(uv(), "venv", "--quiet", "--python", python, folder)
    install_torch(there, env)
    pins = ("--constraints", PINNED) if server else ()  # some of these versions are not for older Pythons
    wanted = f"jurybox[{extra}] @ {wheel.as_uri()}"
    run(uv(), "pip", "install", "--quiet", "--python", there.python, *pins, wanted, env=env, timeout=1200)
    complete.touch()
    return there


def smoke(there: Environment, version: str, wheel: Path, train: bool) -> None:
    """Install a wheel in place of the one before, and try it without a compiler."""
    run(uv(), "pip", "install", "--quiet", "--python", there.python, "--no-deps", "--reinstall", wheel)
    env = {"PATH": str(there.folder / "bin"), "PYTHONPATH": str(ROOT)}
    model: dict[str, object] = {"factory": "tests.models:affine"}
    python = str(there.python)
    if minor(version) < SERVER_FROM:  # its engine has no PYTHONPATH
        (site,) = there.folder.glob("lib/python*/site-packages")
        (site / "models-of-the-tests.pth").write_text(f"{ROOT}\n")
        model["python"], python = python, sys.executable
    transports = dict.fromkeys(("tcp", "grpc", "http"), "127.0.0.1:0")
    with tempfile.TemporaryDirectory() as place:
        with serving(Path(place) / "server", {"affine": model}, env, python=python, **transports) as server:
            addresses = [f"{name}://{server.listening(name)}" for name in transports]
            said = there.run(ROOT / "tests" / "wheel" / "ask_all.py", server.address, *addresses, PATH=env["PATH"])
        if train:
            task = ["train", "gym", "--env", "CartPole-v1", "--algorithm", "ppo", "--steps", "2048"]  # one update
            command = [there.folder / "bin" / "jurybox", *task, "--out", Path(place) / "run"]
            run(*command, env={**os.environ, "PATH": env["PATH"]}, timeout=900, cwd=place)
            assert (Path(place) / "run" / "report.html").exists()
            said += "a training ran\n"
    say(f"  {wheel.parent.name}: {'; '.join(said.splitlines())}")


def units(there: Environment, wheel: Path) -> None:
    """The unit suite, with the tools of the tests in the environment; what failed is run again as once_more.py says."""
    wanted = f"jurybox[dev] @ {wheel.as_uri()}"
    run(uv(), "pip", "install", "--quiet", "--python", there.python, "--constraints", PINNED, wanted, timeout=1200)
    workers = ["-n", os.environ.get("WORKERS", "4"), "--dist", "loadfile", "--no-loadscope-reorder"]
    cache, suite = there.folder / "pytest_cache", ROOT / "tests" / "unit"
    shutil.rmtree(cache, ignore_errors=True)
    began = time.monotonic()
    try:
        said = there.run("-m", "pytest", "-q", "-o", f"cache_dir={cache}", *workers, suite, timeout=3600)
    except AssertionError as failed:
        say(str(failed))
        if not once_more(str(there.python), cache, str(suite)):
            raise
        return
    say(f"  the unit suite in {time.monotonic() - began:.0f} s: {said.splitlines()[-1]}")


def try_python(version: str, published: Wheels, with_units: bool) -> list[str]:
    """Everything, with one Python; what it lacks."""
    python = interpreter(version)
    assert python is not None
    began = time.monotonic()
    say(f"Python {version}, {python}")
    lacking = []
    wheels = []
    for compiler in COMPILERS:
        if shutil.which(compiler) is None:
            lacking.append(f"Python {version} with {compiler}, which is not here")
        elif not has_headers(python):
            lacking.append(f"Python {version} with {compiler}: {python} has no headers (Debian: python{version}-dev)")
        else:
            wheels.append(build(version, python, compiler))
            say(f"  built with {compiler}, without a warning")
    wheels.append(published.of(version))
    server, training = minor(version) >= SERVER_FROM, version not in WITHOUT_TRAINING
    extra = "engine,grpc" if not server else "training,grpc" if training else "server,grpc"
    if server and not training:
        lacking.append(f"the trainings with Python {version}: no wheel of box2d is for it")
    there = environment(version, python, wheels[0], extra)
    for wheel in wheels:
        smoke(there, version, wheel, train=server and training and wheel == wheels[-1])
    if with_units:
        units(there, wheels[-1])
    say(f"  {time.monotonic() - began:.0f} s")
    return lacking


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--python", action="append", choices=VERSIONS, help="only this one; may be given more than once"
    )
    parser.add_argument("--units", action="append", choices=VERSIONS, help="the unit suite in these; see above")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="where `make wheel` left them")
    given = parser.parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    os.environ["MATRIX_WHEELS"] = str(given.wheels)
    wanted = given.python or VERSIONS
    here = [version for version in wanted if interpreter(version)]
    suited = [version for version in here if minor(version) >= SERVER_FROM and version not in WITHOUT_TRAINING]
    in_units = given.units or set(suited) - {HERE}
    lacking = [f"Python {version}, which is not here" for version in wanted if version not in here]
    for version in here:
        lacking += try_python(version, Wheels(given.wheels), version in in_units)
    for each in lacking:
        say(f"not tried: {each}")
    say(f"tried: Python {', '.join(here)}")


if __name__ == "__main__":
    main()
