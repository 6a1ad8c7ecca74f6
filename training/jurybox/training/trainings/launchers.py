"""The option `--launcher`: whether a training's processes run on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jurybox.protocol.revision import install_command
from jurybox.training.runtime.launching import Launcher, Local
from jurybox.training.runtime.plan import RunError, refuse_unused

if TYPE_CHECKING:
    from jurybox.cluster.env_workers import Needs


NAMES = ("local", "ray")
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


class LauncherMissing(RunError):
    """The launcher is unknown or not installed."""


@contextmanager
def launcher_named(name: str, address: str | None = None) -> Iterator[Launcher]:
    """Create the launcher of that name. Use it in a ``with`` statement.

    Args:
        address: with "ray", the address of the cluster; None: Ray on this machine only.

    Raises:
        LauncherMissing: the name is unknown, or its library is not installed.
        NoCluster: there is no cluster at `address`.
    """
    if not wants_ray(name, address):
        yield Local()
        return
    from jurybox.cluster.launcher import RayLauncher

    with RayLauncher(address) as launcher:
        yield launcher


def check_gpus(launcher: Launcher | None, gpus: Mapping[str, float]) -> None:
    """Raise ConfigError if GPUs are requested (number by setting) and the launcher cannot reserve any."""
    if launcher is None or isinstance(launcher, Local):
        why = (
            "GPUs are set aside by --launcher ray; on one machine `device` or `device_per_agent` says where to compute"
        )
        refuse_unused([name for name, number in gpus.items() if number], dict.fromkeys(gpus, why))


def wants_ray(name: str, address: str | None) -> bool:
    """Return whether the launcher of that name is Ray.

    If it is, Ray is imported; without an address, it listens on the loopback interface only.

    Raises:
        LauncherMissing: the name is neither "ray" nor "local", "local" has an address, or Ray is not installed.
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
        import ray  # noqa: F401 (checks that it is installed)
    except ModuleNotFoundError as error:
        raise LauncherMissing(
            f"--launcher ray needs Ray, which is not installed ({error}): {install_command('ray')}"
        ) from error
    return True


def _on_loopback() -> None:
    """Make Ray on this machine listen on the loopback interface only, as on macOS. Ray reads the variable at import."""
    flag = os.environ.setdefault(_LOOPBACK, "0")
    known = sys.modules.get("ray._private.ray_constants")
    if flag == "0" and known is not None and getattr(known, "ENABLE_RAY_CLUSTER", False):
        raise LauncherMissing(
            f"Ray was imported before this launcher was asked for, without {_LOOPBACK}=0, and would listen on every "
            f"interface of this machine: set that variable before the first 'import ray' (to 1 if others may reach it)"
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """A cluster that environment workers run on.

    Attributes:
        needs: resources of each worker (see `EnvWorkers`); None: one core.
        cores: number of CPU cores for the workers.
    """

    needs: Needs | None
    cores: int


@contextmanager
def spread_named(name: str, address: str | None = None, needs: Needs | None = None) -> Iterator[Spread | None]:
    """Connect to the cluster for a training's environments; None with "local". Use it in a ``with`` statement.

    Args:
        name, address: as in `launcher_named`.
        needs: resources of each worker; one core by default.

    Raises:
        LauncherMissing: the name is unknown, or its library is not installed.
        NoCluster: there is no cluster at `address`.
    """
    if not wants_ray(name, address):
        yield None
        return
    import ray

    from jurybox.cluster.connection import connect, disconnect

    connect(address)
    try:
        own = len(os.sched_getaffinity(0))
        resources: Any = ray.cluster_resources  # Ray does not annotate it
        cores = own if address is None else int(resources().get("CPU", own))
        yield Spread(needs, max(1, cores))
    finally:
        disconnect()
