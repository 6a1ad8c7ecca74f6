"""The photo training's environments on a cluster: what each worker makes, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jurybox.training.cluster.seats import Seats
from jurybox.training.cluster.server_way import Way
from jurybox.training.environments.photo import PhotoConfig
from jurybox.training.recipes.photo_worker import environment_maker


def seats(config: PhotoConfig, numbers: Sequence[int], patience: float, way: Way | None) -> Seats:
    """The environments of these numbers, seeded as on one machine.

    Args:
        way: to the server that scores; the address is this machine's. None: the juror is in the environment.
    """
    here = config if way is None else replace(config, address=way.here())
    return Seats([environment_maker(here, number, patience) for number in numbers])
