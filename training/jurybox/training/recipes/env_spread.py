"""``--launcher`` for the trainings that are no plans: who holds their environments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jurybox.training.recipes.launchers import check_local, require_ray

if TYPE_CHECKING:
    from jurybox.training.cluster.env_workers import EnvWorkers, Needs
    from jurybox.training.cluster.server_way import Way


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

    def way_to(self, address: str | None, far: str | None) -> Way:
        """How workers reach a server; see `way_to`."""
        from jurybox.training.cluster.server_way import way_to

        return way_to(address, far)


@contextmanager
def spread_named(name: str, address: str | None = None, needs: Needs | None = None) -> Iterator[Spread | None]:
    """The cluster for the environments of a training, for the length of the block; None with "local".

    Args:
        name, address: as `launcher_named` takes them.
        needs: what each worker gets; a core by default.

    Raises:
        LauncherMissing: the name is unknown, or its library is not here; NoCluster: nobody answers at `address`.
    """
    if name == "local":
        check_local(address)
        yield None
        return
    require_ray(name, address)
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
