"""Addresses of servers and of their engines."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import sys
from pathlib import Path

from jurybox.protocol.errors import Refused

_IPC = "ipc://"
_PROBE = 0.2  # seconds
NOT_LINUX = "servers run on Linux; give connect() a tcp:// or grpc:// address, or set JURYBOX_ADDRESS to one"
_ELSEWHERE = "or set server.address (JURYBOX_ADDRESS) to ipc:// and a path in a folder of your own"


def default_address() -> str:
    """Return JURYBOX_ADDRESS, or an ipc address in $XDG_RUNTIME_DIR/jurybox or /tmp/jurybox-<uid>.

    Raises:
        Refused: JURYBOX_ADDRESS is not set, and servers do not run on this operating system.
    """
    if sys.platform != "linux" and "JURYBOX_ADDRESS" not in os.environ:
        raise Refused(f"no server is named, and none runs here: {NOT_LINUX}")
    return os.environ.get("JURYBOX_ADDRESS") or local_address("engine")


def local_address(name: str) -> str:
    """Return the ipc address `name` in this user's folder: $XDG_RUNTIME_DIR/jurybox, or /tmp/jurybox-<uid>."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "jurybox" if runtime and _is_ours(Path(runtime)) else Path(f"/tmp/jurybox-{os.getuid()}")
    return f"{_IPC}{folder / name}"


def _is_ours(folder: Path) -> bool:
    """Return whether a folder exists and belongs to this user; under sudo the variable may name another user's."""
    return folder.is_dir() and folder.stat().st_uid == os.getuid()


def ipc_path(address: str) -> Path | None:
    """Return the socket's path of an ipc address; None for other addresses."""
    return Path(address.removeprefix(_IPC)) if address.startswith(_IPC) else None


def engine_address(address: str, engine: int) -> str:
    """Return the ZeroMQ address of an engine: a socket next to the server's, or one of the ports after the server's."""
    if address.startswith(_IPC):
        return f"{address}-{engine}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1 + engine}"


def out_of_reach(address: str) -> str:
    """Return why no server can be reached at an address, as the end of a sentence; empty if one may be.

    Of tcp:// addresses only those of this host are tried: for others it could take long.
    """
    path = ipc_path(address)
    if path is None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not address.startswith("tcp://") or not is_loopback(host.strip("[]")):
            return ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        there = _is_listened_on(family, (host.strip("[]"), int(port)))
        return "" if there else f"; nothing listens on {host}:{port}"
    try:
        path.lstat()
        if os.access(path, os.W_OK):
            there = _is_listened_on(socket.AF_UNIX, str(path))
            return "" if there else f"; nothing listens on {path}: its server was killed"
    except (FileNotFoundError, NotADirectoryError):
        return f"; there is no socket {path} here (a container must mount the server's folder {path.parent})"
    except PermissionError:
        pass  # for a parent folder: handled like the socket
    return f"; {path} is closed to user {os.getuid()}: run this process as the server's user"


def _is_listened_on(family: int, where: str | tuple[str, int]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE)
        try:
            probe.connect(where)
        except ConnectionRefusedError:
            return False
        except OSError:
            pass  # it is busy, for example
        return True


def prepare_folder(folder: Path, *, shared: bool = False) -> None:
    """Create the folder of an ipc address, and check that only this user and root can enter or replace it.

    Whoever can enter it can send requests, and a server runs code that its clients name. Whoever can replace it or one
    of its parents can pose as the server.

    Args:
        shared: accept a folder that other users may enter or replace, as a pod's emptyDir, whose mode is fixed. Sockets
            in it are still for this user alone.

    Raises:
        Refused: it cannot be created, belongs to another user, or other users may enter or replace it. The message
            names the remedy.
    """
    try:
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # of the link itself, in case another user has created one in its place
        if stat.S_ISLNK(found.st_mode) and found.st_uid in (os.getuid(), 0):
            found = folder.stat()
    except OSError as error:
        raise Refused(f"{folder} cannot be made: {error.strerror}. {where_to(folder)}") from error
    if found.st_uid not in (os.getuid(), 0):
        raise Refused(f"{folder} belongs to user {found.st_uid}, not to {os.getuid()}: {_ELSEWHERE[3:]}")
    if not stat.S_ISDIR(found.st_mode):
        raise Refused(f"{folder} is no folder: {_ELSEWHERE[3:]}")
    if shared:
        return
    if mode := stat.S_IMODE(found.st_mode) & 0o077:
        ours = "" if found.st_uid == os.getuid() else f"chown {os.getuid()} {folder} && "
        what = "write to" if mode & 0o022 else "enter"
        raise Refused(
            f"others may {what} {folder} (mode {stat.S_IMODE(found.st_mode):04o}): {ours}chmod 700 {folder} (systemd: "
            f"RuntimeDirectoryMode=0700; a tmpfs: mode=0700,uid={os.getuid()}; a pod's emptyDir, whose mode is fixed: "
            f"server.shared_folder = true, if all containers of the pod are trusted), {_ELSEWHERE}"
        )
    for above in folder.resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise Refused(f"others may put another folder in the place of {folder}: chmod o-w {above}, {_ELSEWHERE}")


def where_to(folder: Path) -> str:
    """Return the remedy if a server's folder cannot be written to."""
    mount = f"docker run --tmpfs {folder}:mode=0700,uid={os.getuid()},gid={os.getgid()}"
    return f"In a container mount a volume or a tmpfs there ({mount}), {_ELSEWHERE}"


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can reach `host`. Names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
