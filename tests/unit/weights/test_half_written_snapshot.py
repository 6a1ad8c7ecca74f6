"""A snapshot whose publisher was killed in the middle: the model serves without it, and adopts the next one."""

from __future__ import annotations

import pytest
from tests.serving import wait_until

from jurybox.protocol.weights.publisher import Publisher

torch = pytest.importorskip("torch")

from jurybox.server.engine import weights_updater  # noqa: E402
from jurybox.server.engine.weights_updater import WeightsUpdater  # noqa: E402


def test_a_model_is_loaded_though_its_snapshot_is_incomplete_and_adopts_the_next_publication(make, monkeypatch):
    monkeypatch.setattr(weights_updater, "_NO_NEWS", 0.2)
    module = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(7.0)
    channel = make(module.state_dict(), "snapshot")
    with Publisher(channel) as publisher:
        publisher.publish({"weight": torch.full((1, 2), 1.0)})
        channel.slots.begin()  # and no more: a publisher that is killed now leaves the sequence odd
    reports, adopted = [], []
    updater = WeightsUpdater(
        channel,
        module,
        torch.device("cpu"),
        0,
        lambda action: action(),
        lambda version, age: adopted.append(version),
        report=lambda event, **fields: reports.append(event),
    )
    updater.start()
    try:
        updater.use(0)
        assert (updater.version, adopted, reports) == (0, [], ["weights not adopted"])
        assert (module.weight == 7.0).all()
        with Publisher(channel) as publisher:
            version = publisher.publish({"weight": torch.full((1, 2), 3.0)})
            wait_until(lambda: adopted == [version], what="the next publication")
        updater.use(0)
        assert version == 2 and (module.weight == 3.0).all()
    finally:
        updater.stop()
        updater.join()
