"""What is fed to an engine from the channels of a run."""

from __future__ import annotations

import uuid

import numpy as np

from jurybox.cluster.feeder import _Channel
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader


def channel() -> WeightsChannel:
    return WeightsChannel.create(segment_name(uuid.uuid4().hex[:8], "weights", 0), WeightsLayout.of({"w": np.zeros(3)}))


def test_feeding_that_begins_again_publishes_only_what_the_server_has_not_had() -> None:
    with channel() as run, channel() as served, Publisher(run) as learner:
        learner.publish({"w": np.ones(3)}, version=7)
        for _ in range(2):  # the second time after the host of the machine died, and the server did not
            with Publisher(served) as publisher:
                _Channel(WeightsReader(run), publisher).feed()
            assert served.newest == 7
        with Publisher(served) as publisher:
            feeding = _Channel(WeightsReader(run), publisher)
            learner.publish({"w": np.full(3, 2.0)}, version=8)
            feeding.feed()
        state, version, _ = WeightsReader(served).read(timeout=5.0)
        assert version == 8 and state["w"].tolist() == [2.0] * 3
