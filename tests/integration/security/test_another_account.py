"""What a user with an account of their own on the host can read, connect to, end and fill of another user's server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.serving import config, wait_until

OWNER, STRANGER = 12345, 12346  # no entry in /etc/passwd: the kernel knows users by number
SECRET = "0123456789abcdef0123"
MODELS = {
    "affine": {"factory": "tests.models:affine", "max_batch": 16, "rows": 64},
    "policy": {"factory": "tests.models:affine", "publish": "double_buffer"},
}
LOCAL = "127.0.0.1:0"
# Tries everything as the stranger, and prints what went well.
TRY = r"""
import contextlib, encodings.idna, json, os, resource, signal, socket, sys
pids, folder, elsewhere, ports, ours = json.loads(sys.argv[1])
stranger, group = int(sys.argv[2]), int(sys.argv[3])
os.setgroups([group]); os.setgid(stranger); os.setuid(stranger)
done = []

def tried(what, how, *arguments):
    with contextlib.suppress(OSError):
        found = how(*arguments)
        done.append(what + (f" {found!r}"[:80] if found else ""))

def read(path):
    with open(path, "rb") as file:
        return file.read(1)

def write(path):
    os.close(os.open(path, os.O_WRONLY))

def joined(kind, address):
    with socket.socket(socket.AF_UNIX, kind) as one:
        one.connect(address)

def walk(top):
    tried(f"list {top}", os.listdir, top)
    for path in ours:
        if path.startswith(top):
            tried(f"read {path}", read, path)
            tried(f"write {path}", write, path)
            tried(f"link {path}", os.link, path, os.path.join(elsewhere, "stolen"))
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
                tried(f"connect {path}", joined, kind, path)
    tried(f"create in {top}", lambda: os.close(os.open(os.path.join(top, "mine"), os.O_CREAT | os.O_WRONLY)))
    tried(f"replace {top}", os.rename, top, top + "-gone")
    tried(f"open {top} to others", os.chmod, top, 0o777)

walk(folder)
for path in ours:
    if not path.startswith(folder):
        tried(f"read {path}", read, path)
        tried(f"write {path}", write, path)
        tried(f"remove {path}", os.unlink, path)
        tried(f"take {path}", os.rename, path, path + "-mine")
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            tried(f"connect {path}", joined, kind, path)
for pid in pids:
    for name in ("mem", "environ", "maps", "auxv", "stack", "syscall"):
        tried(f"read {name} of {pid}", read, f"/proc/{pid}/{name}")
    for name in ("mem", "oom_score_adj", "clear_refs", "coredump_filter"):
        tried(f"write {name} of {pid}", write, f"/proc/{pid}/{name}")
    tried(f"fds of {pid}", os.listdir, f"/proc/{pid}/fd")
    for fd in range(200):
        tried(f"fd {fd} of {pid}", read, f"/proc/{pid}/fd/{fd}")
        tried(f"where fd {fd} of {pid} is", os.readlink, f"/proc/{pid}/fd/{fd}")
    for number in (0, signal.SIGCONT, signal.SIGSTOP, signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
        tried(f"signal {number} to {pid}", os.kill, pid, number)
    tried(f"slow down {pid}", os.setpriority, os.PRIO_PROCESS, pid, 19)
    tried(f"bind {pid}", os.sched_setaffinity, pid, {0})
    tried(f"limit {pid}", resource.prlimit, pid, resource.RLIMIT_NOFILE, (3, 3))
for line in open("/proc/net/unix"):
    name = line.split()[-1]
    if name.startswith("@") and "jurybox" in name:
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            tried(f"connect {name}", joined, kind, "\0" + name[1:])
for port in ports:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as one:
        one.sendall(b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}")
        with contextlib.suppress(OSError):
            answer = one.recv(100)
            if answer.startswith(b"HTTP") and not answer.startswith(b"HTTP/1.1 401"):
                done.append(f"asked {port}: {answer}")
print(json.dumps(done))
os._exit(0)
"""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="NOT TRIED: becoming other users needs root"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="NOT TRIED: needs setpriv of util-linux"),
]


def as_owner():
    """Command that runs the rest as the owner, who may pass all folders: the interpreter may be in one of root's."""
    user = [f"--reuid={OWNER}", f"--regid={OWNER}", "--clear-groups"]
    return ["setpriv", *user, "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search", "--"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of the owner's; all above it may be passed by everybody, as /run/user and /home may."""
    home = tmp_path_factory.mktemp("home")
    above = [path for path in home.parents if not path.stat().st_mode & 0o001]
    before = {path: path.stat().st_mode for path in above}
    for path in above:
        path.chmod(before[path] | 0o011)
    home.chmod(0o755)
    yield home
    for path, mode in before.items():
        path.chmod(mode)


@pytest.fixture(scope="module")
def server(home):
    folder = home / "run"
    folder.mkdir(mode=0o700)
    (folder / "token").write_text(SECRET + "\n")
    doors = dict.fromkeys(("http", "grpc", "tcp"), LOCAL)
    (folder / "token").chmod(0o600)
    shm = home / "shm"
    shm.mkdir()
    shm.chmod(0o1777)  # as /dev/shm is
    for path in (folder, folder / "token"):
        os.chown(path, OWNER, OWNER)
    file = folder / "server.toml"
    own = {"address": f"ipc://{folder}/engine", "token_file": f"{folder}/token", "devices": ["cpu"]}
    file.write_text(config(MODELS, **own, **doors))
    env = {**os.environ, "HOME": str(folder), "JURYBOX_SHM_DIR": str(shm)}
    log = home / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [*as_owner(), sys.executable, "-m", "jurybox.server.cli", "serve", str(file)],
            stdout=sink, stderr=sink, start_new_session=True, env=env,
        )  # fmt: skip
    try:
        wait_until(lambda: " serving " in log.read_text() or process.poll() is not None, 100)
        assert process.poll() is None, log.read_text()
        yield process, folder, shm, log
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.mark.runs
def test_another_account_reads_connects_to_ends_and_fills_nothing(server):
    process, folder, shm, log = server
    pids = [process.pid, *family(process.pid)]
    assert len(pids) >= 4
    assert all(Path(f"/proc/{pid}").stat().st_uid == OWNER for pid in pids)
    ours = {str(path) for place in (folder, shm) for path in place.rglob("*") if owner_of(path) == OWNER}
    assert {f"{folder}/token", f"{folder}/engine"} < ours and any(path.startswith(str(shm)) for path in ours)
    ports = [int(word.rsplit(":", 1)[1]) for word in log.read_text().split() if word.startswith(("http=1", "grpc=1"))]
    assert len(ports) == 2
    told = json.dumps([pids, str(folder), str(shm), ports, sorted(ours)])
    done = subprocess.run(
        [sys.executable, "-c", TRY, told, str(STRANGER), str(STRANGER)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert process.poll() is None
    assert [process.pid, *family(process.pid)] == pids


def owner_of(path):
    """The owner's number; None if the file is gone, such as memory that a client has just returned."""
    with suppress(FileNotFoundError):
        return path.lstat().st_uid


def family(pid):
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *family(int(child))]
    return found
