"""Env workers of the photo training, without torch: environments, and a scorer that tolerates a server's restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from jurybox.client import ModelNotFound, Refused, ServerGone, SharedMemoryError, Timeout
from jurybox.cluster.vector_env import EnvGroup
from jurybox.studies.photo.environment import PhotoConfig, PhotoEdit, Scorer, build

if TYPE_CHECKING:
    from jurybox.cluster.connection import ServerAddresses  # which imports Ray

# Seconds between two attempts while there is no server; a client that waits for one also sleeps on its own.
_PAUSE = 0.2

# What a client gets while a server is away or starts again. A juror that was loaded for this training is missing until
# the training has loaded it again. And the memory may vanish between the server's answer and its use.
_AWAY = (ServerGone, Refused, Timeout, ModelNotFound, SharedMemoryError)


class SteadyScorer:
    """A wrapper of a scorer: if the server goes away, the picture is scored by the next server.

    Batches are composed by chance, and the composition can change the last bit of a score. Within a few thousand steps
    this leads a training to a different policy. So the demo's juror is served with `deterministic`: the same seed gives
    the same policy.

    The client handles an engine that restarts, and the scorer a server that has been restarted. This class covers the
    time in between: a server that drains, refuses requests, is away for a while before the next one starts, and does
    not have the juror at once.

    Args:
        scorer: scorer that sends requests to the server; it connects at its first use and again after ``close``.
        timeout: seconds that a picture waits for a server before the error is raised.
        sleep, clock: replacements of the time module's functions, for tests.
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
        """The array that the picture is written to, uint8 (384, 384, 3) RGB. Read this property for every picture."""
        return self._scorer.buffer

    def score(self) -> float:
        """Return the score of the picture in ``buffer``.

        Raises:
            jurybox.client.Error: no server came back in time, or it refuses permanently.
        """
        # Copied first, which takes a few hundredths of a millisecond: a scorer that fails may release its row.
        picture = self._scorer.buffer.copy()
        give_up: float | None = None
        while True:
            try:
                if give_up is not None:
                    np.copyto(self._scorer.buffer, picture)
                return self._scorer.score()
            except _AWAY:
                now = self._clock()
                give_up = now + self._timeout if give_up is None else give_up
                if now >= give_up:
                    raise
            self._scorer.close()
            self._sleep(_PAUSE)

    def close(self) -> None:
        self._scorer.close()


def environment_maker(config: PhotoConfig, index: int, timeout: float) -> Callable[[], PhotoEdit]:
    """Return a picklable function that creates the environment of this index, with the seed ``config.seed + index``."""
    return partial(_make, config, index, timeout)


def _make(config: PhotoConfig, index: int, timeout: float) -> PhotoEdit:
    environment = build(config, index)
    environment.scorer = SteadyScorer(environment.scorer, timeout)
    environment.auditors = {name: SteadyScorer(each, timeout) for name, each in environment.auditors.items()}
    return environment


def env_group(
    config: PhotoConfig, numbers: Sequence[int], timeout: float, addresses: ServerAddresses | None
) -> EnvGroup:
    """Create the environments with these numbers; they have the same seeds as on one machine.

    Args:
        addresses: addresses of the server that scores, of which this machine's is used. None: the juror runs in the
            environment.
    """
    local_config = config if addresses is None else replace(config, address=addresses.resolve())
    return EnvGroup([environment_maker(local_config, number, timeout) for number in numbers])
