"""Tickets that bring their engine down."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.client import ModelFailed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ticket_that_kills_every_engine_it_is_sent_to_is_given_up_and_the_server_lives(server, door):
    with server.connect(door=door) as client:
        model = client.model("moody", rows=4)
        with pytest.raises(ModelFailed, match="3 engines died one after another with this ticket"):
            model.infer(np.full((1, 4), 668, np.float32), timeout=200)
        x = np.ones((2, 4), np.float32)
        np.testing.assert_array_equal(model.infer(x, timeout=60), x + 1)
    assert server.text().count("child died") == 3
    assert server.process.poll() is None
