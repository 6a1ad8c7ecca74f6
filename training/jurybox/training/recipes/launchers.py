"""``--launcher``: where the processes of a training run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from jurybox.training.runtime.errors import RunError
from jurybox.training.runtime.launching import Launcher, Local

NAMES = ("local", "ray")


class LauncherMissing(RunError):
    """There is no such launcher, or it is not installed."""


@contextmanager
def launcher_named(name: str, address: str | None = None) -> Iterator[Launcher]:
    """The launcher of that name, for the length of the block.

    Args:
        address: of the cluster, with "ray"; None: Ray on this machine alone.

    Raises:
        LauncherMissing: the name is unknown, or its library is not here; NoCluster: nobody answers at `address`.
    """
    if name == "local":
        if address is not None:
            raise LauncherMissing(f"an address ({address}) goes with --launcher ray")
        yield Local()
    elif name == "ray":
        if address is None:
            # Read when Ray is imported: it then listens on this machine's loopback alone, as it does on macOS.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        try:
            from jurybox.training.cluster.launcher import RayLauncher
        except ModuleNotFoundError as error:
            raise LauncherMissing(
                f"--launcher ray needs Ray, which is not installed ({error}): pip install 'jurybox[ray]'"
            ) from error
        with RayLauncher(address) as launcher:
            yield launcher
    else:
        raise LauncherMissing(f"--launcher {name!r}: expected {' or '.join(NAMES)}")
