"""Engines of a cluster as plain data: what an engine serves, and its address. Does not import Ray."""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jurybox.client import Server, connect
from jurybox.protocol.errors import Error, Refused, ServerGone
from jurybox.protocol.locks import seconds
from jurybox.protocol.segment import directory

Models = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Feeds:
    """Which channels and folders of a run an engine serves.

    Attributes:
        channels: for each channel of the run, the model that gets its newest weights; it keeps the version numbers.
        folders: for each folder of the run with a file VERSION.weights for each policy that is kept (a state with
            "state"), the model that gets them as versions.
        most: maximum number of these versions, the newest, for a server that has none yet.
    """

    channels: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    most: int = 32


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine, and its part of a run.

    Attributes:
        name: the name under which clients find it.
        models: as under [models.NAME] of a server's configuration.
        feeds: what it serves of the run.
        cpus, gpus, resources: what Ray reserves for it. It serves on the GPU if it has one, else on the CPU.
        threads: number of threads for torch.
        server: further settings of its [server].
    """

    name: str
    models: Models
    feeds: Feeds = field(default_factory=Feeds)
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    threads: int = 1
    server: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Serves(Protocol):
    """A launcher that can place engines."""

    def serve(self, spec: EngineSpec, log: Path) -> None:
        """Start an engine with the next run; its server's log goes to a file on this machine."""


# The endpoint of an engine somewhere in a cluster, and a registry of endpoints for processes without Ray.
#
# An endpoint is found by name. A process on the engine's own machine connects through shared memory, all others
# over the network.


REGISTRY = "engines"  # the run's folder with it, where a launcher keeps one
_NAME = re.compile(r"[A-Za-z0-9][\w-]*", re.ASCII)
_ATTEMPT = 3.0  # seconds for one connection of those tried until the engine is found
_POLL_SECONDS = 0.1
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_machine() -> str:
    """An id of all processes that share memory: this boot, and the folder of segments."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else os.uname().nodename
    status = directory().stat()
    return f"{boot}-{status.st_dev}-{status.st_ino}"


def check_name(name: str) -> str:
    """Validate the name of an engine. Raises Refused."""
    if not _NAME.fullmatch(name):
        raise Refused(f"{name!r} is no name for an engine: expected letters, digits, '_' and '-'")
    return name


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of an engine, in one incarnation.

    Attributes:
        name: of the engine.
        life: a new value after each start.
        machine: the result of `this_machine` there.
        ipc: its address on that machine.
        grpc: its address from elsewhere.
        token: the token it requires there; None where it listens on a loopback only.
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
    def is_local(self) -> bool:
        """Whether the engine is on this machine."""
        return self.machine == this_machine()

    @property
    def address(self) -> str:
        """The address for this process."""
        return self.ipc if self.is_local else self.grpc

    def connect(self, timeout: float = 10.0) -> Server:
        """As `jurybox.client.connect`: over the shm transport on its machine, over gRPC from others."""
        if self.is_local:
            return connect(self.ipc, timeout=timeout)
        return connect(self.grpc, timeout=timeout, token=self.token, tls_ca=self.authority.encode() or None)


def reach(
    name: str, find: Callable[[], Endpoint | None], timeout: float = 60.0, alive: Callable[[], None] = lambda: None
) -> Server:
    """Connect to an engine at the endpoint that `find` returns.

    Args:
        timeout: seconds to wait, also for an engine that is moving. alive: called while it waits.

    Raises:
        ServerGone: it was not found in time; the message has the error of the last attempt.
    """
    until, why = time.monotonic() + seconds(timeout), "its address has not been published"
    while True:
        endpoint = find()
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
        time.sleep(_POLL_SECONDS)


def show(folder: Path, number: int, endpoint: Endpoint) -> None:
    """Add an endpoint to a registry. Entries are never changed: the one with the highest number counts."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(dir=folder, prefix=".endpoint-")  # readable by its owner only: it holds a token
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(endpoint), file)
    Path(made).rename(folder / f"{check_name(endpoint.name)}.{number:06}.endpoint")


def find(folder: Path, name: str) -> Endpoint | None:
    """The newest endpoint of an engine in a registry; None if there is none yet."""
    pages = sorted(folder.glob(f"{check_name(name)}.*.endpoint"))
    return Endpoint(**json.loads(pages[-1].read_text())) if pages else None


def clear(folder: Path, name: str) -> None:
    """Remove an engine from a registry."""
    for page in folder.glob(f"{check_name(name)}.*.endpoint"):
        page.unlink()


def locks(folder: Path, host: str) -> tuple[str, str, dict[str, str]]:
    """Create a token, and a key with a certificate for an IP address, as files in `folder`.

    Returns:
        The token, the certificate as PEM, and the settings of [server] that name the files.

    Raises:
        ValueError: `host` is no IP address.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jurybox-engine")])
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ip_address(host))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # for those whose clocks are slow
        .not_valid_after(now + timedelta(days=365))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(alternative, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    authority = certificate.public_bytes(serialization.Encoding.PEM).decode()
    token = secrets.token_hex(32)
    _secret(folder / "token", token)
    _secret(folder / "tls.key", private.decode())
    (folder / "tls.pem").write_text(authority)
    settings = {"token_file": "token", "tls_cert": "tls.pem", "tls_key": "tls.key"}
    return token, authority, {name: str(folder / file) for name, file in settings.items()}


def _secret(path: Path, content: str) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
