"""No wait takes a time-out that never ends for one: nan, which no clock reaches."""

from __future__ import annotations

import math
from functools import partial

import gymnasium as gym
import numpy as np
import pytest

from jurybox.client.juror import Juror
from jurybox.client.remote.weights import RemotePublisher, RemoteWeightsReader
from jurybox.client.server import connect
from jurybox.protocol.locks import LONGEST, seconds
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader
from jurybox.training.replay import Field, Replay
from jurybox.training.vector.process_env import ProcessVectorEnv

NAN = math.nan


def test_a_time_out_is_clipped_to_what_no_clock_overflows_with():
    given = (-math.inf, -1.0, 0.0, 0.5, LONGEST, LONGEST * 2, math.inf)
    assert [seconds(each) for each in given] == [0.0, 0.0, 0.0, 0.5, LONGEST, LONGEST, LONGEST]
    assert seconds(3) == 3
    with pytest.raises(ValueError, match="timeout=nan: expected seconds"):
        seconds(NAN)


@pytest.fixture
def channel():
    layout = WeightsLayout.of({"a": np.zeros(3, np.float32)})
    with WeightsChannel.create(segment_name("timeouts", "weights"), layout) as made:
        yield made


def test_a_reader_of_weights_waits_for_nothing_that_is_not_over(channel):
    reader = WeightsReader(channel, in_use=lambda: 0)
    flat = np.empty(channel.layout.nbytes, np.uint8)
    waits = {
        "read": reader.read, "read into": partial(reader.read, out=reader.buffers()),
        "read_flat": partial(reader.read_flat, flat), "read_bytes": partial(reader.read_bytes, flat),
        "wait_newer_than": partial(reader.wait_newer_than, 0),
    }  # fmt: skip
    with Publisher(channel) as learner:
        for published in (False, True):
            for name, wait in waits.items():
                with pytest.raises(ValueError, match="timeout=nan: expected seconds"):
                    pytest.fail(f"{name} returned {wait(timeout=NAN)}")
            if not published:
                learner.publish({"a": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match="timeout=nan"):
        reader.wait_until_fresh(NAN, max_lag=0)


def test_a_replay_waits_for_no_rows_longer_than_it_is_told():
    name = segment_name("timeouts", "replay")
    with pytest.raises(ValueError, match="timeout=nan"):
        Replay.create(name, 8, {"x": Field(())}, timeout=NAN)
    with Replay.create(name, 8, {"x": Field(())}, timeout=5.0) as replay:
        replay.extend(x=np.ones(4, np.float32))
        for wait in (partial(replay.sample, 2), partial(replay.prefetch, 2), partial(Replay.attach, name)):
            with pytest.raises(ValueError, match="timeout=nan"):
                wait(timeout=NAN)
        with replay.prefetch(2, timeout=None) as batches:
            assert len(next(iter(batches))["x"]) == 2, "the replay's own time-out"


@pytest.mark.parametrize(
    "make",
    [
        partial(Juror, "m"),
        partial(connect, "ipc:///nowhere"),
        partial(connect, "ipc:///nowhere", timeout=1.0),
        partial(RemoteWeightsReader, None, "m"),
        partial(RemotePublisher, None, "m"),
        partial(ProcessVectorEnv, [partial(gym.make, "CartPole-v1")]),
        partial(ProcessVectorEnv, [partial(gym.make, "CartPole-v1")], timeout=1.0),
    ],
)
def test_nothing_is_made_with_a_default_that_never_ends(make):
    name = "start_timeout" if "timeout" in make.keywords else "timeout"
    with pytest.raises(ValueError, match="timeout=nan"):
        make(**{name: NAN})


@pytest.mark.parametrize("use", ["step_wait", "recv"])
def test_a_vector_environment_waits_for_no_step_longer_than_it_is_told(use):
    with ProcessVectorEnv([partial(gym.make, "CartPole-v1")], workers=1) as env:
        env.reset(seed=1)
        env.step_async(np.array([0]))
        with pytest.raises(ValueError, match="timeout=nan"):
            getattr(env, use)(timeout=NAN)
        assert env.step_wait()[1].shape == (1,), "its step is not lost"
