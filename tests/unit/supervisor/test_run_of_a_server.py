"""What a server does before its supervisor runs and after it: ports, its address, memory of the dead, and signals."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jurybox.protocol.errors import Refused
from jurybox.server.logs import LEVELS, Log
from jurybox.server.settings.config import Configuration
from jurybox.server.settings.endpoints import CannotListen
from jurybox.server.supervisor import run as run_module
from jurybox.server.supervisor.run import AddressTaken, _hold_address, _Signals, require_free, run

NOWHERE = {"http": "", "grpc": "", "tcp": ""}


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A run leaves signals ignored, since its process ends."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Served:
    """Supervisors that end at once with status 7, and what they were made of."""

    def __init__(self) -> None:
        self.settings: list[Configuration] = []
        self.shown: list[Configuration | None] = []
        self.limits = 0
        self.fails: Exception | None = None
        self.lines: list[dict[str, Any]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def __call__(self, settings: Configuration, signals: socket.socket, *_: object) -> Served:
        if self.fails is not None:
            raise self.fails
        assert signals.getblocking() is False
        self.settings.append(settings)
        return self

    def run(self, shown: Configuration | None) -> int:
        self.shown.append(shown)
        self.meanwhile()
        return 7

    def configure(self, role: str, level: str, format: str, keep: object) -> Log:
        return Log(role, LEVELS[level], str, sys.stderr, lambda line: self.lines.append({**line}))

    def raise_limit(self) -> None:
        self.limits += 1


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    found = Served()
    monkeypatch.setattr(run_module, "Supervisor", found)
    monkeypatch.setattr(run_module, "configure", found.configure)  # which would take in the logs of all libraries
    monkeypatch.setattr(run_module, "raise_limit", found.raise_limit)
    monkeypatch.setattr(run_module, "sweep", list)
    monkeypatch.setattr(run_module, "_DYING", 0.0)
    return found


def settings(folder: Path, server: dict[str, Any] | None = None, **tables: Any) -> Configuration:
    own = {"address": f"ipc://{folder}/engine", **NOWHERE, **(server or {})}
    return Configuration.model_validate({"server": own, "models": {"m": {"factory": "a:b"}}, **tables})


def test_a_server_holds_its_address_while_it_runs_and_no_longer(served: Served, tmp_path: Path) -> None:
    asked = settings(tmp_path)

    def taken() -> None:
        with pytest.raises(AddressTaken, match="a server already runs at"):
            _hold_address(asked.server.address)

    served.meanwhile = taken
    for runs in (1, 2):
        assert run(asked) == 7 and served.limits == runs
    assert served.settings == [asked, asked] and served.shown == [None, None]
    os.close(_hold_address(asked.server.address) or 0)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "its status is not replaced any more"


def test_a_server_whose_address_is_taken_does_not_start(served: Served, tmp_path: Path) -> None:
    lock = _hold_address(settings(tmp_path).server.address)
    assert run(settings(tmp_path)) == 3 and not served.settings
    (line,) = served.lines
    assert line["event"] == "could not start" and "already runs" in line["error"]
    os.close(lock or 0)


@pytest.mark.parametrize("error", [OSError("no memory"), Refused("no memory")], ids=["OSError", "Refused"])
def test_a_supervisor_that_cannot_be_made_is_a_server_that_could_not_start(
    served: Served, tmp_path: Path, error: Exception
) -> None:
    served.fails = error
    assert run(settings(tmp_path)) == 3
    assert [(line["event"], line["error"]) for line in served.lines] == [("could not start", "no memory")]
    os.close(_hold_address(settings(tmp_path).server.address) or 0)


def test_a_server_with_a_taken_port_makes_no_supervisor(served: Served, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run(settings(tmp_path, {"http": where})) == 3 and not served.settings


@pytest.mark.parametrize("stale", [[], ["a", "b"]])
def test_memory_of_dead_owners_is_removed_before_a_server_starts(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: list[str]
) -> None:
    monkeypatch.setattr(run_module, "sweep", lambda: stale)
    run(settings(tmp_path))
    said = [(line["event"], line["segments"]) for line in served.lines]
    assert said == ([("removed shared memory of dead owners", 2)] if stale else [])


def test_a_dry_run_is_a_server_beside_the_one_that_is_meant(served: Served, tmp_path: Path) -> None:
    tables = {
        "models": {"m": {"factory": "a:b", "publish": "snapshot", "save_dir": str(tmp_path / "w")}},
        "robots": {"arm": {"model": "m", "listen": "127.0.0.1:4000"}},
        "dialects": {
            "own": {"speaks": "cosmos", "model": "m", "port": 4001},
            "shared": {"speaks": "cosmos", "model": "m"},
        },
    }
    meant = settings(tmp_path, {"http": "127.0.0.1:4002", "grpc": "", "tcp": "0.0.0.0:4003"}, **tables)
    lock = _hold_address(meant.server.address)
    folders: list[Path] = []
    served.meanwhile = lambda: folders.append(Path(served.settings[0].server.address.removeprefix("ipc://")).parent)
    assert run(meant, dry_run=True) == 7
    os.close(lock or 0)
    (tried,) = served.settings
    assert served.shown == [meant]
    assert folders[0] != tmp_path and not folders[0].exists(), "its folder is gone with it"
    assert (tried.server.http, tried.server.grpc, tried.server.tcp) == ("127.0.0.1:0", "", "0.0.0.0:0")
    assert tried.robots["arm"].listen == "127.0.0.1:0"
    assert {name: one.port for name, one in tried.dialects.items()} == {"own": 0, "shared": None}
    assert tried.models["m"].save_dir is None and tried.models["m"].publish == "snapshot"
    assert tried.server.model_copy(update={"address": "", **NOWHERE}) == meant.server.model_copy(
        update={"address": "", **NOWHERE}
    )


# ---- the address


@pytest.mark.parametrize("shared", [True, False])
def test_the_folder_of_an_address_is_shared_only_if_the_settings_say_so(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    prepared: list[tuple[Path, bool]] = []
    monkeypatch.setattr(run_module, "prepare_folder", lambda folder, *, shared: prepared.append((folder, shared)))
    run(settings(tmp_path, {"shared_folder": shared}))
    assert prepared == [(tmp_path, shared)]


def test_the_lock_of_an_address_is_the_users_own_and_follows_no_link(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(_hold_address(f"ipc://{tmp_path}/engine") or 0)
    finally:
        os.umask(before)
    lock = tmp_path / "engine.lock"
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    lock.rename(tmp_path / "elsewhere")
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match=f"cannot write to {lock}"):
        _hold_address(f"ipc://{tmp_path}/engine")


def test_a_refused_address_leaves_no_descriptor_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_DYING", 0.0)
    address = f"ipc://{tmp_path}/engine"
    lock = _hold_address(address)
    with pytest.raises(AddressTaken):
        _hold_address(address)
    names = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert [fd.name for fd in names if fd.exists() and fd.resolve() == tmp_path / "engine.lock"] == [str(lock)]
    os.close(lock or 0)


def test_an_address_that_is_no_file_is_not_held() -> None:
    assert _hold_address("tcp://127.0.0.1:1234") is None


# ---- ports


class Ports:
    """A host on which listening fails with these errors, one after another, and then succeeds."""

    def __init__(self, *errors: OSError) -> None:
        self.errors = list(errors)
        self.asked: list[tuple[str, str]] = []

    def listen(self, where: str, setting: str) -> socket.socket:
        self.asked.append((where, setting))
        if self.errors:
            error = self.errors.pop(0)
            raise CannotListen(str(error)) from error
        return socket.socket()


TAKEN = OSError(errno.EADDRINUSE, "in use")


def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ports: Ports, **server: str) -> None:
    monkeypatch.setattr(run_module, "listen", ports.listen)
    require_free(settings(tmp_path, server))


def test_a_port_of_a_server_that_is_dying_gets_a_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_module, "_DYING", 30.0)
    ports = Ports(TAKEN, TAKEN)
    ask(monkeypatch, tmp_path, ports, http="127.0.0.1:80", tcp="127.0.0.1:81")
    assert ports.asked == [("127.0.0.1:80", "server.http")] * 3 + [("127.0.0.1:81", "server.tcp")]


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "not allowed"), socket.gaierror("no such host")])
def test_a_port_that_can_never_be_had_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: OSError
) -> None:
    monkeypatch.setattr(run_module, "_DYING", 30.0)
    ports = Ports(error)
    with pytest.raises(CannotListen):
        ask(monkeypatch, tmp_path, ports, http="127.0.0.1:80")
    assert len(ports.asked) == 1


def test_the_relay_may_listen_at_the_name_of_a_network_interface(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ports = Ports(socket.gaierror("no such host"))
    ask(monkeypatch, tmp_path, ports, tcp="eth0:81")
    assert ports.asked == [("eth0:81", "server.tcp")]


# ---- signals


def test_what_was_woken_by_signals_before_a_run_is_woken_again_after_it() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        with _Signals():
            pass
        assert signal.set_wakeup_fd(-1) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        theirs.close()
