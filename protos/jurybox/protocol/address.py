"""Addresses: where a server is by default, and where its engines are when only its own address is known."""

from __future__ import annotations

import os
from pathlib import Path

from jurybox.protocol.errors import Refused

_IPC = "ipc://"


def default_address() -> str:
    """JURYBOX_ADDRESS, or an ipc address in $XDG_RUNTIME_DIR/jurybox, or in /tmp/jurybox-<uid>."""
    if given := os.environ.get("JURYBOX_ADDRESS"):
        return given
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "jurybox" if runtime else Path(f"/tmp/jurybox-{os.getuid()}")
    return f"{_IPC}{folder / 'engine'}"


def ipc_path(address: str) -> Path | None:
    """The socket's path of an ipc address; None for any other."""
    return Path(address.removeprefix(_IPC)) if address.startswith(_IPC) else None


def engine_address(address: str, engine: int) -> str:
    """The ZeroMQ door of an engine: beside the server's socket, or on the ports after the server's."""
    if address.startswith(_IPC):
        return f"{address}-{engine}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1 + engine}"


def prepare_folder(folder: Path) -> None:
    """Make the folder of an ipc address, for this user alone.

    Raises:
        Refused: it belongs to somebody else, who could answer in the server's name.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat().st_uid
    if owner not in (os.getuid(), 0):
        raise Refused(
            f"{folder} belongs to user {owner}, not to {os.getuid()}: set server.address to a folder of your own"
        )
