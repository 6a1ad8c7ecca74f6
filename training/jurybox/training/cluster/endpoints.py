"""How an engine somewhere in a cluster is reached, and a book of that for those who have no Ray. Knows nothing of Ray.

A endpoint is told by name. Who looks it up on the engine's own machine connects through shared memory, everybody else
over the network.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jurybox.client import Server, connect
from jurybox.protocol.errors import Error, Refused, ServerGone
from jurybox.protocol.segment import directory

BOOK = "engines"  # the run's folder with it, where a launcher keeps one
_NAME = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)
_ATTEMPT = 3.0  # seconds for one connection of those tried until the engine is found
_LOOK = 0.1
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_machine() -> str:
    """The same for all processes that share memory, and for no others: this boot, and the folder of segments."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else os.uname().nodename
    status = directory().stat()
    return f"{boot}-{status.st_dev}-{status.st_ino}"


def check_name(name: str) -> str:
    """The name itself. Raises Refused where it is none for an engine."""
    if not _NAME.fullmatch(name):
        raise Refused(f"{name!r} is no name for an engine: expected letters, digits, '_' and '-'")
    return name


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine is, in one of its lives.

    Attributes:
        name: of the engine.
        life: another one after each start.
        machine: as `this_machine` says there.
        ipc: its address on that machine.
        grpc: its address from elsewhere.
        token: that it asks for there; None where it listens on a loopback alone.
        authority: its certificate as PEM; "" in the same case.
    """

    name: str
    life: str
    machine: str
    ipc: str
    grpc: str
    token: str | None = field(default=None, repr=False)
    authority: str = field(default="", repr=False)

    @property
    def here(self) -> bool:
        """Whether it is on this machine."""
        return self.machine == this_machine()

    @property
    def address(self) -> str:
        """Its address for this process."""
        return self.ipc if self.here else self.grpc

    def connect(self, timeout: float = 10.0) -> Server:
        """As `jurybox.client.connect`: with the native shm_rings on its machine, over gRPC from elsewhere."""
        if self.here:
            return connect(self.ipc, timeout=timeout)
        return connect(self.grpc, timeout=timeout, token=self.token, tls_ca=self.authority.encode() or None)


def reach(
    name: str, look: Callable[[], Endpoint | None], timeout: float = 60.0, alive: Callable[[], None] = lambda: None
) -> Server:
    """Connect to an engine, wherever `look` says that it is by now.

    Args:
        timeout: seconds, in which it may be moving. alive: called while it waits.

    Raises:
        ServerGone: it was not found in time; the message says what came of the last try.
    """
    until, why = time.monotonic() + timeout, "nobody has told where it is"
    while True:
        endpoint = look()
        if endpoint is not None:
            try:
                return endpoint.connect(min(_ATTEMPT, timeout))
            except Error as error:
                why = f"it was last at {endpoint.address}: {error}"
        alive()
        if time.monotonic() > until:
            raise ServerGone(
                f"engine {name!r} was not found within {timeout:g} s ({why}). Expected one of that name in the "
                "cluster, and a network between it and this machine; its log is server.log in the run's folder"
            )
        time.sleep(_LOOK)


def show(folder: Path, number: int, endpoint: Endpoint) -> None:
    """Put a endpoint into a book. Pages are never changed: the one with the highest number counts."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(dir=folder, prefix=".endpoint-")  # for its owner's eyes: it holds a token
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(endpoint), file)
    Path(made).rename(folder / f"{check_name(endpoint.name)}.{number:06}.endpoint")


def find(folder: Path, name: str) -> Endpoint | None:
    """The newest endpoint of an engine in a book; None where there is none yet."""
    pages = sorted(folder.glob(f"{check_name(name)}.*.endpoint"))
    return Endpoint(**json.loads(pages[-1].read_text())) if pages else None


def clear(folder: Path, name: str) -> None:
    """Take an engine out of a book."""
    for page in folder.glob(f"{check_name(name)}.*.endpoint"):
        page.unlink()
