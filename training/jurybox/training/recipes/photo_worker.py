"""Env workers of the photo training, without torch: environments, and a scorer that survives a server's restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from jurybox.client import Refused, ServerGone, Timeout
from jurybox.training.cluster.vector_env import EnvGroup
from jurybox.training.environments.photo import PhotoConfig, PhotoEdit, Scorer, build

if TYPE_CHECKING:
    from jurybox.training.cluster.connection import ServerAddresses  # which imports Ray

# Between two looks for a server that is not there; a client that waits for it sleeps in between by itself.
_PAUSE = 0.2


class SteadyScorer:
    """Wraps a scorer: if its server goes away, the next server scores the picture.

    Which pictures meet in a batch is chance, and can change the last bit of a score; a training makes another policy of
    it in a few thousand steps. So the demo's juror is served with `deterministic`: the same seed gives the same policy.

    An engine that restarts is the client's to bridge, a server that was restarted already is the scorer's. This is
    for the time between: a server that drains, refuses, and is gone for a while before there is another.

    Args:
        scorer: the one that asks the server; connects at its first use and again after ``close``.
        timeout: seconds that a picture waits for a server before the error is the caller's.
        sleep, clock: instead of the time module's, for tests.
    """

    def __init__(
        self,
        scorer: Scorer,
        timeout: float = 60.0,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scorer = scorer
        self._timeout = timeout
        self._sleep = sleep
        self._clock = clock

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """uint8 (384, 384, 3) RGB: the picture to be scored is written here. Ask for it anew for every picture."""
        return self._scorer.buffer

    def score(self) -> float:
        """The score of what is in ``buffer``.

        Raises:
            jurybox.client.Error: no server came back in time, or it refuses for good.
        """
        # Copied beforehand, a few hundredths of a millisecond: a scorer that failed may have let go of its row.
        picture = self._scorer.buffer.copy()
        give_up: float | None = None
        while True:
            try:
                if give_up is not None:
                    np.copyto(self._scorer.buffer, picture)
                return self._scorer.score()
            except (ServerGone, Refused, Timeout):
                now = self._clock()
                give_up = now + self._timeout if give_up is None else give_up
                if now >= give_up:
                    raise
            self._scorer.close()
            self._sleep(_PAUSE)

    def close(self) -> None:
        self._scorer.close()


def environment_maker(config: PhotoConfig, index: int, timeout: float) -> Callable[[], PhotoEdit]:
    """A picklable function that makes the i-th environment, seeded ``config.seed + index``."""
    return partial(_make, config, index, timeout)


def _make(config: PhotoConfig, index: int, timeout: float) -> PhotoEdit:
    environment = build(config, index)
    environment.scorer = SteadyScorer(environment.scorer, timeout)
    environment.auditors = {name: SteadyScorer(each, timeout) for name, each in environment.auditors.items()}
    return environment


def env_group(
    config: PhotoConfig, numbers: Sequence[int], timeout: float, addresses: ServerAddresses | None
) -> EnvGroup:
    """The environments of these numbers, seeded as on one machine.

    Args:
        addresses: to the server that scores; the address is this machine's. None: the juror is in the environment.
    """
    here = config if addresses is None else replace(config, address=addresses.here())
    return EnvGroup([environment_maker(here, number, timeout) for number in numbers])
