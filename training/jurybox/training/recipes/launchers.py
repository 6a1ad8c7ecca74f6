"""`--launcher`: where the processes of a training run, on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jurybox.training.runtime.launching import Launcher, Local
from jurybox.training.runtime.plan import RunError, refuse_unused

if TYPE_CHECKING:
    from jurybox.training.cluster.connection import ServerAddresses
    from jurybox.training.cluster.env_workers import EnvWorkers, Needs


NAMES = ("local", "ray")
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class LauncherMissing(RunError):
    """There is no such launcher, or it is not installed."""


@contextmanager
def launcher_named(name: str, address: str | None = None) -> Iterator[Launcher]:
    """The launcher of that name; use it in a ``with``.

    Args:
        address: of the cluster, with "ray"; None: Ray on this machine alone.

    Raises:
        LauncherMissing: the name is unknown, or its library is not here; NoCluster: nobody answers at `address`.
    """
    if not wants_ray(name, address):
        yield Local()
        return
    from jurybox.training.cluster.launcher import RayLauncher

    with RayLauncher(address) as launcher:
        yield launcher


def check_gpus(launcher: Launcher | None, gpus: Mapping[str, float]) -> None:
    """Raises ConfigError if GPUs are requested (number by setting) and the launcher cannot reserve any."""
    if launcher is None or isinstance(launcher, Local):
        why = (
            "GPUs are set aside by --launcher ray; on one machine `device` or `device_per_agent` says where to compute"
        )
        refuse_unused([name for name, number in gpus.items() if number], dict.fromkeys(gpus, why))


def wants_ray(name: str, address: str | None) -> bool:
    """Whether the launcher of that name is Ray, which can then be imported and listens on the right interface.

    Raises:
        LauncherMissing: it is neither "ray" nor "local", "local" with an address, or Ray is not here.
    """
    if name not in NAMES:
        raise LauncherMissing(f"--launcher {name!r}: expected {' or '.join(NAMES)}")
    if name == "local":
        if address is not None:
            raise LauncherMissing(f"an address ({address}) goes with --launcher ray")
        return False
    if address is None:
        _on_loopback()
    try:
        import ray  # noqa: F401 (whether it is there)
    except ModuleNotFoundError as error:
        raise LauncherMissing(
            f"--launcher ray needs Ray, which is not installed ({error}): pip install 'jurybox[ray]'"
        ) from error
    return True


def _on_loopback() -> None:
    """Make a Ray of this machine listen on the loopback interface, as on macOS. Ray reads it at import."""
    asked = os.environ.setdefault(_LOOPBACK, "0")
    known = sys.modules.get("ray._private.ray_constants")
    if asked == "0" and known is not None and getattr(known, "ENABLE_RAY_CLUSTER", False):
        raise LauncherMissing(
            f"Ray was imported before this launcher was asked for, without {_LOOPBACK}=0, and would listen on every "
            f"interface of this machine: set that variable before the first 'import ray' (to 1 if others may reach it)"
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """A cluster for environments.

    Attributes:
        needs: what each worker gets.
        cores: that there are for them.
    """

    needs: Needs
    cores: int

    def workers(
        self,
        makers: Sequence[Callable[[], Any]],
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> EnvWorkers:
        """Start a worker for each of `makers`; see `EnvWorkers`."""
        from jurybox.training.cluster.env_workers import EnvWorkers

        return EnvWorkers(makers, self.needs, environment=environment, timeout=timeout)

    def addresses_of(self, address: str | None, far: str | None) -> ServerAddresses:
        """How workers reach a server; see `addresses_of`."""
        from jurybox.training.cluster.connection import addresses_of

        return addresses_of(address, far)


@contextmanager
def spread_named(name: str, address: str | None = None, needs: Needs | None = None) -> Iterator[Spread | None]:
    """The cluster for the environments of a training; None with "local". Use it in a ``with``.

    Args:
        name, address: as `launcher_named` takes them.
        needs: what each worker gets; a core by default.

    Raises:
        LauncherMissing: the name is unknown, or its library is not here; NoCluster: nobody answers at `address`.
    """
    if not wants_ray(name, address):
        yield None
        return
    import ray

    from jurybox.training.cluster.connection import connect, disconnect
    from jurybox.training.cluster.env_workers import Needs as Default

    connect(address)
    try:
        own = len(os.sched_getaffinity(0))
        there: Any = ray.cluster_resources  # Ray has no types for it
        cores = own if address is None else int(there().get("CPU", own))
        yield Spread(needs or Default(), max(1, cores))
    finally:
        disconnect()
