"""README's two commands on a fresh machine: `make test-fresh`. Needs root, Linux, mmdebstrap and the network.

    .venv/bin/python .ci/fresh.py [--debian 12 13] [--commands demo test] [--place FOLDER] [--page]

For each release of Debian it makes a minimal root with nothing but PACKAGES, clones this commit into the home of a
plain user, and runs the commands there, as README prints them. Their times are compared with those that README names.
With --page docs/install.md lists the results. Debian's mirror, the name server and pip's settings are those of this
machine.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "install.md"
PYTORCH = "download.pytorch.org"
NAMES = {"12": "bookworm", "13": "trixie"}
PACKAGES = ("python3", "python3-dev", "python3-venv", "make", "g++")  # what README says that one needs
USER, ID = "user", 1000
NUMBERS = [
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen",
]  # fmt: skip
FIRST, LAST = "<!-- fresh machines: make test-fresh -->", "<!-- end of fresh machines -->"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def told(*command: object) -> str:
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def named_minutes(readme: str, command: str) -> int:
    """How many minutes README says that a command takes."""
    found = re.search(rf"^make {command} +#.*\babout (\w+) minutes", readme, re.MULTILINE)
    if found is None or found[1] not in NUMBERS:
        sys.exit(f"README.md has no line 'make {command}  # ... about N minutes'")
    return NUMBERS.index(found[1]) + 1


def mirror() -> str:
    """Where this machine's apt gets Debian's packages from."""
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(CODENAME) $(SITE)", "Created-By: Packages"]
    for line in told(*command).splitlines():
        origin, codename, site = line.split()
        if origin == "Debian" and "security" not in codename and "updates" not in codename:
            return site
    sys.exit("apt of this machine knows no archive of Debian: apt-get update")


def pip_settings() -> dict[str, str]:
    """pip's settings on this machine, as variables of the environment."""
    found = re.findall(r"^[\w:]+\.([\w-]+)='(.*)'$", told(sys.executable, "-m", "pip", "config", "list"), re.MULTILINE)
    return {f"PIP_{name.upper().replace('-', '_')}": value for name, value in found}


def torch_index() -> dict[str, str]:
    """TORCH_INDEX for the commands: PyPI where this machine cannot reach PyTorch's index, as `make` asks then."""
    if "TORCH_INDEX" in os.environ:
        return {"TORCH_INDEX": os.environ["TORCH_INDEX"]}
    try:
        with socket.create_connection((PYTORCH, 443), timeout=5):
            return {}
    except OSError:
        say(f"{PYTORCH} cannot be reached from here: the commands run with TORCH_INDEX=")
        return {"TORCH_INDEX": ""}


def make_root(release: str, root: Path) -> None:
    """A minimal root with PACKAGES and the user, new each time; what mmdebstrap made is kept beside it."""
    kept = root.with_name(f"{root.name}.tar")
    if not kept.exists():
        checks = [line for line in told("apt-config", "dump").splitlines() if line.startswith("Acquire::Check-")]
        as_here = [f"--aptopt={line.rstrip(';')}" for line in checks]
        unfinished = kept.with_suffix(".part.tar")
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}", *as_here]
        told(*command, NAMES[release], unfinished, mirror())
        unfinished.rename(kept)
    told("rm", "-rf", "--one-file-system", root)
    root.mkdir()
    told("tar", "-xf", kept, "-C", root, "--numeric-owner")
    told("chroot", root, "useradd", "--uid", ID, "--create-home", USER)


def prepare(root: Path, settings: dict[str, str]) -> list[Path]:
    """A clean clone, and what pip's settings name; return the folders that must be seen in the root, too."""
    home = root / "home" / USER
    told("git", "clone", "--quiet", "--no-local", ROOT, home / "jurybox")
    told("chown", "-R", f"{ID}:{ID}", home)
    for name in ("hosts", "resolv.conf"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    folders = []
    for word in " ".join(settings.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_file() and path.is_absolute():
            (root / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, root / path.relative_to("/"))
        elif path.is_dir() and path.is_absolute():
            folders.append(path.parent if path.name == "simple" else path)  # an index names files beside it
    return sorted(set(folders))


def run_there(root: Path, folders: list[Path], settings: dict[str, str], command: str, log: Path) -> tuple[int, float]:
    """Run a command as the user, in the clone; return its exit status and seconds. None of its processes stays."""
    lines = [f"mount --rbind /{name} {root}/{name}" for name in ("dev", "sys")]
    lines += [f"mount -t tmpfs tmpfs {root}/dev/shm", f"mount -t proc proc {root}/proc"]
    for folder in folders:
        (root / folder.relative_to("/")).mkdir(parents=True, exist_ok=True)
        lines.append(f"mount --bind -o ro {folder} {root}{folder}")
    env = {"HOME": f"/home/{USER}", "USER": USER, "LANG": "C.UTF-8", "PATH": "/usr/local/bin:/usr/bin:/bin", **settings}
    proxies = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    words = ["env", "-i", *(f"{name}={value}" for name, value in {**env, **proxies}.items())]
    as_user = ["setpriv", f"--reuid={ID}", f"--regid={ID}", "--clear-groups"]
    words += [shutil.which("chroot") or "chroot", str(root), *as_user]
    words += ["sh", "-c", f"cd && cd jurybox && {command}"]
    script = " && ".join([*lines, shlex.join(words)])
    began = time.monotonic()
    with log.open("w") as sink:
        # The shell is the first process there, which waits for those that others have left.
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", f"{script}; exit $?"]
        done = subprocess.run(namespaces, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL, check=False)
    return done.returncode, time.monotonic() - began


def row(release: str, command: str, status: int, seconds: float, root: Path) -> str:
    """A row of the page's table."""
    python = told("chroot", root, "python3", "--version").split()[1]
    debian = (root / "etc" / "debian_version").read_text().strip()
    named = named_minutes(README.read_text(), command)
    result = "passed" if status == 0 else f"**failed** ({status})"
    date = datetime.datetime.now(datetime.UTC).date()
    commit = told("git", "-C", ROOT, "rev-parse", "--short=8", "HEAD").strip()
    where = f"Debian {release} ({debian}), Python {python}"
    return f"| {where} | `make {command}` | {date}, {commit} | {result} | {seconds / 60:.1f} min | {named} min |"


def list_on_page(rows: dict[tuple[str, str], str]) -> None:
    """Put rows into the table of the page, each in the place of an older one."""
    text = PAGE.read_text()
    before, rest = text.split(FIRST)
    table, after = rest.split(LAST)
    head, kept = table.strip().splitlines()[:2], table.strip().splitlines()[2:]
    lines = {}
    for line in kept:
        found = re.match(r"\| Debian (\d+) .*?\| `make (\w+)`", line)
        assert found is not None, line
        lines[found[1], found[2]] = line
    ordered = [line for _, line in sorted({**lines, **rows}.items())]
    PAGE.write_text(before + "\n".join([FIRST, "", *head, *ordered, "", LAST]) + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--debian", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--commands", nargs="+", choices=["demo", "test"], default=["demo", "test"])
    parser.add_argument("--place", type=Path, default=Path("/var/tmp/jurybox-fresh"), help="a scratch; 4 GB a root")
    parser.add_argument("--page", action="store_true", help="list the results in docs/install.md")
    given = parser.parse_args()
    if os.getuid() != 0 or shutil.which("mmdebstrap") is None:
        sys.exit("a fresh root needs root, and mmdebstrap: apt-get install mmdebstrap")
    given.place.mkdir(parents=True, exist_ok=True)
    settings, rows, failed = pip_settings() | torch_index(), {}, False
    for release in given.debian:
        root = given.place / release
        say(f"Debian {release}: {root}")
        make_root(release, root)
        folders = prepare(root, settings)
        for command in given.commands:
            log = given.place / f"{release}-{command}.log"
            status, seconds = run_there(root, folders, settings, f"make {command}", log)
            failed |= status != 0
            rows[release, command] = row(release, command, status, seconds, root)
            say(rows[release, command])
            if status != 0:
                say("\n".join(log.read_text().splitlines()[-30:]))
    if given.page:
        list_on_page(rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
