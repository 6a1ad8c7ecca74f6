"""Make this checkout run with the installed Python, torch and CUDA: without a network, pip or an installation.

All files go to a folder for PYTHONPATH: packages from wheels that were brought along, the native module, built by the
installed C++ compiler, and the metadata of an installed distribution. This module needs only the standard library.

    python -m benchmarks.gpu.prepare NAMES     prints the packages of `make gpu-wheels`
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("protos", "client", "server", "training")
COMMIT = "commit.txt"  # beside the wheels: a copied tree has no history
_COMPILE_TIMEOUT = 240.0

# Packages that machines for torch lack, or have in incompatible versions; never torch or numpy.
CARRIED = (
    *("annotated-doc", "annotated-types", "anyio", "Box2D", "fastapi", "Farama-Notifications", "grpcio"),
    *("grpcio-health-checking", "grpcio-reflection", "gymnasium", "h11", "hypothesis", "idna", "lz4", "nanobind"),
    *(
        "pettingzoo",
        "protobuf",
        "pydantic",
        "pydantic_core",
        "pytest-timeout",
        "pyzmq",
        "safetensors",
        "sortedcontainers",
    ),
    *("stable_baselines3", "starlette", "typing-inspection", "uvicorn", "websockets", "zstandard"),
)


class NotPrepared(Exception):
    """This checkout cannot run here; the text names what is missing."""


@dataclass
class Prepared:
    """How to run it.

    Attributes:
        environment: variables for every child process.
        facts: of the machine and of how the code was made ready, for environment.json.
    """

    environment: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)


def prepare(folder: Path, wheels: Path) -> Prepared:
    """Make it ready in `folder`; `wheels` may be missing or empty.

    Raises:
        NotPrepared: nanobind, a compiler or Python's headers are missing, or the native part does not compile.
    """
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    installed = _installed()
    facts: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(wheels)}
    if installed:  # with all requirements: wheels for another machine stay packed
        facts["native"] = f"installed: {installed}"
        paths: list[Path] = []
    else:
        facts["wheels"], facts["wheels_left_out"] = unpack(wheels, site)
        facts["native"] = f"compiled: {compile_native(site, folder / 'objects')}"
        _describe(site)
        paths = [site, *(ROOT / name for name in SOURCES)]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = os.pathsep.join([*map(str, paths), str(ROOT), *given])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    environment.pop("JURYBOX_ADDRESS", None)  # of some other server
    return Prepared(environment, facts)


def commit(wheels: Path) -> str:
    """The commit of this checkout; without a history, the one recorded beside the wheels."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ) if shutil.which("git") else None  # fmt: skip
    if said is not None and said.returncode == 0:
        return said.stdout.strip()
    noted = wheels / COMMIT
    return noted.read_text().strip() if noted.exists() else "unknown"


def unpack(wheels: Path, site: Path) -> tuple[list[str], list[str]]:
    """Unpack wheels for this Python; gives the names of those, and of those that are for another one."""
    used, left_out = [], []
    for wheel in sorted(wheels.glob("*.whl")):
        if not fits(wheel.name):
            left_out.append(wheel.name)
            continue
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                # NAME-VERSION.data/purelib/... belongs to the other files; scripts and headers are not needed.
                parts = name.split("/")
                if parts[0].endswith(".data"):
                    if parts[1] not in ("purelib", "platlib"):
                        continue
                    parts = parts[2:]
                target = site.joinpath(*parts)
                if not target.resolve().is_relative_to(site.resolve()):
                    raise NotPrepared(f"{wheel.name} wants to write outside its folder: {name}")
                if name.endswith("/"):
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
        used.append("-".join(wheel.name.split("-")[:2]))
    return used, left_out


def fits(wheel: str) -> bool:
    """Whether a wheel is for this Python and processor, by its name."""
    pythons, abis, platforms = wheel.removesuffix(".whl").split("-")[-3:]
    major, minor = sys.version_info[:2]
    if platforms != "any" and not platforms.endswith(sysconfig.get_platform().rpartition("-")[2]):
        return False
    for python in pythons.split("."):
        if python in (f"py{major}", f"cp{major}{minor}"):
            return True
        older = re.fullmatch(rf"(?:cp|py){major}(\d+)", python)
        if older and int(older[1]) <= minor and ("abi3" in abis.split(".") or "none" in abis.split(".")):
            return True
    return False


def compile_native(site: Path, objects: Path) -> str:
    """Compile the native module into `site`; return the compiler and its version."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NotPrepared("expected a C++17 compiler (c++, g++ or clang++, or CXX), found none")
    binding = nanobind(site)
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise NotPrepared(f"expected Python's headers, found no {headers / 'Python.h'}")
    folders = [headers, binding / "include", binding / "ext/robin_map/include", ROOT / "native"]
    # As CMake builds a release, see native/CMakeLists.txt; nanobind wants the last two.
    flags = ["-O3", "-DNDEBUG", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"]
    flags += [f"-I{each}" for each in folders]
    sources = [binding / "src/nb_combined.cpp", ROOT / "native/module.cpp", *sorted(ROOT.glob("native/*/bind_*.cpp"))]
    objects.mkdir(parents=True, exist_ok=True)

    def compiled(source: Path) -> str:
        made = objects / f"{source.stem}.o"
        _run([compiler, *flags, "-c", str(source), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        parts = list(threads.map(compiled, sources))
    module = site / "jurybox" / f"native{sysconfig.get_config_var('EXT_SUFFIX')}"
    module.parent.mkdir(exist_ok=True)
    _run([compiler, "-shared", "-pthread", *parts, "-o", str(module)])
    return _run([compiler, "--version"]).splitlines()[0]


def nanobind(site: Path) -> Path:
    """The folder of nanobind's sources: carried along, or of this Python."""
    if (site / "nanobind/src/nb_combined.cpp").exists():
        return site / "nanobind"
    found = importlib.util.find_spec("nanobind")
    if found is None or found.origin is None:
        raise NotPrepared("expected nanobind, found none: carry its wheel along (make gpu-wheels)")
    return Path(found.origin).parent


def machine(environment: dict[str, str]) -> dict[str, Any]:
    """The device, its driver, torch and the host, as a child process with `environment` sees them."""
    code = """
import json, os, platform
from importlib import metadata
facts = {"python": platform.python_version(), "kernel": platform.release(), "cores": len(os.sched_getaffinity(0))}
facts["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
facts["packages"] = {}
for name in ("numpy", "pyzmq", "grpcio", "protobuf", "fastapi", "pydantic", "triton", "gymnasium", "stable_baselines3"):
    try:
        facts["packages"][name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        facts["packages"][name] = None
import torch
facts |= {"torch": torch.__version__, "cuda": torch.version.cuda, "device": ""}
facts["cuda_available"] = torch.cuda.is_available()
if facts["cuda_available"]:
    shown = torch.cuda.get_device_properties(0)
    facts |= {"device": shown.name, "device_gib": round(shown.total_memory / 2**30, 1),
              "multiprocessors": shown.multi_processor_count, "devices": torch.cuda.device_count()}
print(json.dumps(facts))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    if done.returncode:
        raise NotPrepared(f"torch cannot be used here: {done.stderr.strip().splitlines()[-1:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if shutil.which("nvidia-smi"):
        asked = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit,mig.mode.current"
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        facts["nvidia_smi"] = {"asked": asked, "said": (said.stdout or said.stderr).strip()[:1000]}
    return facts


def _installed() -> str:
    """Where this checkout's native module is, if this Python has the checkout installed; else ""."""
    code = "from jurybox import native, protocol; print(native.__file__); print(protocol.__file__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.splitlines()
    return lines[0] if done.returncode == 0 and Path(lines[1]).resolve().is_relative_to(ROOT) else ""


def _describe(site: Path) -> None:
    """The metadata of an installed distribution for importlib.metadata: its version, its commands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = site / f"jurybox-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jurybox\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise NotPrepared(f"{command[0]} took longer than {_COMPILE_TIMEOUT:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        raise NotPrepared(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    if sys.argv[1:] == ["NAMES"]:
        pinned = {}
        for line in (ROOT / "constraints.txt").read_text().splitlines():
            name, _, version = line.partition("==")
            pinned[name.lower().replace("_", "-")] = version
        wanted = [name.lower().replace("_", "-") for name in CARRIED]
        sys.stdout.write("\n".join(f"{name}=={pinned[name]}" if name in pinned else name for name in wanted) + "\n")
        return
    ready = prepare(ROOT / "build/gpu", ROOT / "build/gpu-wheels")
    sys.stdout.write(json.dumps(ready.facts | machine(ready.environment), indent=1) + "\n")


if __name__ == "__main__":
    main()
