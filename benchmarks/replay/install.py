"""Install the peers of the replay benchmark, one virtual environment each.

    python -m benchmarks.replay.install [--peers-dir DIR] [NAME ...]

Failed installs are recorded (NAME.failed), and the benchmark reports them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

DEFAULT_DIR = Path.home() / ".cache" / "jurybox-bench"


@dataclass(frozen=True)
class Peer:
    """Packages in order of installation; and a script to run in the environment afterwards."""

    requirements: tuple[tuple[str, ...], ...]
    finish: str = ""


# The wheel's C++ extension (segment trees of the prioritised sampler) was built for another torch and does not load
# (undefined symbol); its sources are in the wheel, so it is built anew.
_REBUILD_TORCHRL = """
import pathlib, shutil, importlib.util, torch
from torch.utils.cpp_extension import load
home = pathlib.Path(importlib.util.find_spec("torchrl").submodule_search_locations[0])
build = home / "rebuilt"
build.mkdir(exist_ok=True)
load("_torchrl", [str(home / "csrc" / name) for name in ("pybind.cpp", "utils.cpp")], build_directory=str(build),
     extra_cflags=["-O3", "-std=c++20"], is_python_module=False)
for old in home.glob("_torchrl*.so"):
    old.unlink()
shutil.copy(build / "_torchrl.so", home / "_torchrl.so")
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
PrioritizedSampler(8, 0.6, 0.4)
"""

_TORCH = ("torch==2.13.0", "numpy==2.4.6")
PEERS = {
    "cpprb": Peer((("numpy==1.26.4", "cpprb==11.0.0", "setuptools<81"),)),
    "torchrl": Peer(
        (_TORCH, ("torchrl==0.14.1", "tensordict==0.14.3", "ninja", "setuptools<81"), _TORCH), _REBUILD_TORCHRL
    ),
    "reverb": Peer((("dm-reverb==0.14.0", "tensorflow-cpu==2.15.1", "numpy<2", "setuptools<81"),)),
}


def python_of(peers_dir: Path, name: str) -> Path:
    """The interpreter of a peer's environment."""
    return peers_dir / f"replay-{name}" / "bin" / "python"


def missing(peers_dir: Path, name: str) -> str:
    """Why a peer cannot run; empty if it can."""
    failed = peers_dir / f"replay-{name}.failed"
    if failed.exists():
        return f"not installable: {failed.read_text().strip()[:200]}"
    if not python_of(peers_dir, name).exists():
        return f"not installed: python -m benchmarks.replay.install {name}"
    return ""


def install(peers_dir: Path, name: str) -> str:
    """Make a peer's environment anew; gives why that failed, or an empty string."""
    home, failed = peers_dir / f"replay-{name}", peers_dir / f"replay-{name}.failed"
    shutil.rmtree(home, ignore_errors=True)
    failed.unlink(missing_ok=True)
    python = str(python_of(peers_dir, name))
    commands = [[sys.executable, "-m", "venv", str(home)]]
    for requirements in PEERS[name].requirements:
        commands.append([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *requirements])
    if PEERS[name].finish:
        # The compiler's helper (ninja) is found on the path.
        commands.append(["env", f"PATH={home / 'bin'}:/usr/local/bin:/usr/bin:/bin", python, "-c", PEERS[name].finish])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            text = (done.stderr + done.stdout).strip().splitlines()
            reason = next((line for line in reversed(text) if "rror" in line), f"{command[:4]} failed")
            failed.write_text(reason.strip() + "\n")
            (peers_dir / f"replay-{name}.log").write_text("\n".join(text) + "\n")
            return reason
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; all without one")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PEERS):
        parser.error(f"no peers {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    arguments.peers_dir.mkdir(parents=True, exist_ok=True)
    failures = 0
    for name in arguments.names or PEERS:
        reason = install(arguments.peers_dir, name)
        failures += bool(reason)
        print(f"{name}: {reason or 'installed'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
