"""A publisher within its own publication: a signal handler or a destructor that publishes or closes it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.moments import Moment, each_moment

from jurybox.protocol import locks
from jurybox.protocol.errors import Refused
from jurybox.protocol.weights import publisher
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader

OURS = (publisher.__file__, locks.__file__)


def weights(number):
    return {"w": np.full((4, 4), number, np.float32), "b": np.full(4, number, np.float32)}


@pytest.fixture(params=["double_buffer", "snapshot"])
def channel(request, make):
    return make(weights(0), request.param)


def test_a_publication_in_a_handler_at_any_place_of_another_is_made_or_refused(channel):
    published, nested = {}, []

    def handler():
        try:
            published[maker.publish(weights(-1 - len(nested)))] = -1 - len(nested)
            nested.append("made")
        except Refused as error:
            assert "is under way in this thread: this is a signal handler or a destructor inside of it" in str(error)
            nested.append("refused")

    with Publisher(channel) as maker:
        read = WeightsReader(channel)
        for number, moment in enumerate(each_moment(OURS, handler), 1):
            with moment:
                version = maker.publish(weights(number))
            assert version not in published
            published[version] = number
            state, seen, _ = read.read()
            assert seen == max(published) == channel.newest
            assert (state["w"] == published[seen]).all() and (state["b"] == published[seen]).all()
    assert nested.count("made") > 3 and nested.count("refused") > 10


def test_a_publisher_closed_in_a_handler_at_any_place_of_a_publication_is_closed_at_its_end(channel):
    made = refused = 0
    for number in itertools.count():
        maker, before = Publisher(channel), channel.newest  # the channel is free again
        with Moment(OURS, number, maker.close) as moment:
            try:
                assert maker.publish(weights(number)) == before + 1 == channel.newest
                made += 1
            except Refused as error:
                assert "was closed" in str(error) and channel.newest == before
                refused += 1
        if not moment.fell:
            break
        with pytest.raises(Refused, match="was closed"):
            maker.publish(weights(number))
    assert made > 10 and refused > 2
    maker.close()


def test_ctrl_c_at_any_place_of_a_publication_leaves_a_publisher_that_works(channel):
    def interrupt():
        raise KeyboardInterrupt

    with Publisher(channel) as maker:
        read = WeightsReader(channel)
        for number, moment in enumerate(each_moment(OURS, interrupt), 1):
            before = channel.newest
            try:
                with moment:
                    maker.publish(weights(number))
            except KeyboardInterrupt:
                assert channel.newest in (before, before + 1)
            version = maker.publish(weights(-number))
            state, seen, _ = read.read()
            assert seen == version and (state["w"] == -number).all()
