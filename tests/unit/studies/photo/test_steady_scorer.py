import numpy as np
import pytest

from jurybox.client import ModelFailed, ModelNotFound, Refused, ServerGone, SharedMemoryError
from jurybox.studies.photo.worker import SteadyScorer


class Flaky:
    """A scorer whose server is away for some calls; like the real one it loses its buffer when closed."""

    def __init__(self, errors):
        self.errors = list(errors)
        self._buffer = None
        self.closed = 0

    @property
    def buffer(self):
        if self._buffer is None:
            self._buffer = np.zeros((4, 4, 3), np.uint8)
        return self._buffer

    def score(self):
        if self.errors:
            self._buffer = None  # the row is lost with the server
            raise self.errors.pop(0)
        return float(self.buffer.mean())

    def close(self):
        self.closed += 1
        self._buffer = None


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def patient(flaky, timeout=5.0):
    clock = Clock()
    return SteadyScorer(flaky, timeout, sleep=clock.sleep, clock=clock), clock


def test_the_picture_is_scored_by_the_next_server():
    scorer, _ = patient(flaky := Flaky([ServerGone("stopped"), Refused("draining"), ServerGone("not yet")]))
    scorer.buffer[...] = 42
    assert scorer.score() == 42
    assert flaky.closed == 3
    assert (scorer.buffer == 42).all()


def test_a_juror_that_the_next_server_loads_later_is_waited_for():
    errors = [ServerGone("stopped"), ModelNotFound("not loaded yet"), SharedMemoryError("its owner may be gone")]
    scorer, _ = patient(Flaky(errors))
    scorer.buffer[...] = 42
    assert scorer.score() == 42


def test_patience_ends():
    scorer, clock = patient(Flaky([ServerGone("stopped")] * 1000))
    scorer.buffer[...] = 1
    with pytest.raises(ServerGone):
        scorer.score()
    assert 5.0 <= clock.now < 6.0


def test_errors_that_waiting_cannot_fix_are_raised_at_once():
    scorer, clock = patient(Flaky([ModelFailed("it raised")]))
    scorer.buffer[...] = 1
    with pytest.raises(ModelFailed):
        scorer.score()
    assert clock.now == 0
