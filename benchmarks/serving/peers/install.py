"""Install the peers: one virtual environment each, all with the same torch.

    python -m benchmarks.serving.peers.install [--peers-dir DIR] [--anew] [NAME ...]

What stands there in the versions asked for is left alone. One install at a time: a second waits for the first. What
cannot be installed is written down beside it (NAME.failed), so that the benchmark can say why a peer is missing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEFAULT_DIR = Path.home() / ".cache" / "jurybox-bench"
# Everybody computes with the same torch: what differs is the serving.
COMMON = ("torch==2.13.0",)


@dataclass(frozen=True)
class Peer:
    """What to install for a peer.

    Attributes:
        requirements: pinned; the first names the peer, its version is the one reported.
        system_python: use Debian's own interpreter where there is one. Triton's Python backend links libpython and
            fails under CPython 3.11.7 (``RLock has no attribute _recursion_count``).
    """

    requirements: tuple[str, ...]
    numpy: str = "numpy==2.4.6"
    system_python: bool = False


PEERS = {
    "mosec": Peer(("mosec==0.9.8",)),
    "triton": Peer(
        ("nvidia-pytriton==0.7.0", "tritonclient[grpc]==2.73.0"),
        numpy="numpy==1.26.4",  # nvidia-pytriton takes no later one
        system_python=True,
    ),
    "torchrl": Peer(("torchrl==0.14.1", "tensordict==0.14.3")),
    "litserve": Peer(("litserve==0.2.19",)),
    "ray": Peer(("ray[serve]==2.60.0",)),
}


def python_of(peers_dir: Path, name: str) -> Path:
    """The interpreter of a peer's environment."""
    return peers_dir / name / "bin" / "python"


def missing(peers_dir: Path, name: str) -> str:
    """Why a peer cannot run; empty where it can."""
    if (peers_dir / f"{name}.versions.json").exists() and python_of(peers_dir, name).exists():
        return ""
    failed = peers_dir / f"{name}.failed"
    if failed.exists():
        return f"not installable: {failed.read_text().strip().splitlines()[-1][:200]}"
    return f"not installed: python -m benchmarks.serving.peers.install {name}"


def versions(peers_dir: Path, name: str) -> dict[str, str]:
    """Versions of what a peer's environment holds, as pip reports them."""
    return dict(json.loads((peers_dir / f"{name}.versions.json").read_text()))


def current(peers_dir: Path, name: str) -> bool:
    """Whether a peer stands there in the versions that are asked for."""
    if missing(peers_dir, name):
        return False
    found = versions(peers_dir, name)
    pinned = (text.split("==") for text in (*PEERS[name].requirements, *COMMON, PEERS[name].numpy))
    return all(found.get(package.split("[")[0].lower(), "").split("+")[0] == version for package, version in pinned)


@contextmanager
def alone(peers_dir: Path) -> Iterator[None]:
    """Hold the folder against other installs; the kernel lets go of it when this process ends."""
    peers_dir.mkdir(parents=True, exist_ok=True)
    with (peers_dir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another install in {peers_dir}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(peers_dir: Path, name: str) -> str:
    """Make a peer's environment anew; gives why that failed, or an empty string."""
    peer = PEERS[name]
    home = peers_dir / name
    shutil.rmtree(home, ignore_errors=True)
    for old in peers_dir.glob(f"{name}.*"):
        old.unlink()
    constraints = peers_dir / f"{name}.constraints.txt"
    constraints.write_text("\n".join((*COMMON, peer.numpy)) + "\n")
    interpreter = sys.executable
    if peer.system_python:
        system = Path("/usr/bin/python3.11")
        interpreter = str(system) if system.exists() else interpreter
    pip = [str(python_of(peers_dir, name)), "-m", "pip", "--disable-pip-version-check"]
    with (peers_dir / f"{name}.log").open("w") as log:
        for command in (
            [interpreter, "-m", "venv", str(home)],
            [*pip, "install", "--quiet", "--constraint", str(constraints), *COMMON, peer.numpy],
            [*pip, "install", "--quiet", "--constraint", str(constraints), *peer.requirements],
        ):
            log.write(" ".join(command) + "\n")
            log.flush()
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
                log.flush()
                lines = [line for line in Path(log.name).read_text().splitlines() if "ERROR" in line or "rror:" in line]
                reason = lines[-1] if lines else f"{' '.join(command)} failed: see {log.name}"
                (peers_dir / f"{name}.failed").write_text(reason + "\n")
                return reason
    listed = subprocess.run([*pip, "list", "--format", "json"], capture_output=True, check=True).stdout
    found = {item["name"].lower(): item["version"] for item in json.loads(listed)}
    (peers_dir / f"{name}.versions.json").write_text(json.dumps(found, indent=1))
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR)
    parser.add_argument("--anew", action="store_true", help="those that stand there, too")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}; all without one")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PEERS):
        parser.error(f"no peers {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    failures = 0
    with alone(arguments.peers_dir):
        for name in arguments.names or PEERS:
            if not arguments.anew and current(arguments.peers_dir, name):
                print(f"{name}: is there", flush=True)
                continue
            reason = install(arguments.peers_dir, name)
            failures += bool(reason)
            print(f"{name}: {reason or 'installed'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
