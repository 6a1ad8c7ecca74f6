"""An answer names the weights version that computed it, whatever happens between a batch's begin and its answer."""

from types import SimpleNamespace

import torch
from tests.unit.engine.test_device_served import Arena, slot_of, tickets

from jurybox import native
from jurybox.server.engine.batches import Batches


def test_a_batch_under_way_during_the_first_publication_names_the_weights_it_was_computed_with():
    versions = []
    batches = Batches(
        lambda records, code, version, message: versions.append(version), native.ArrivalTracker(8), lambda: 0, print
    )
    slot = slot_of(Arena())
    updater = slot.served.weights_updater = SimpleNamespace(version=0, use=lambda version: None)
    with torch.inference_mode():
        batches.run(slot, tickets((0, 1)), 1, 0)
        updater.version = 1  # adopted between two turns
        batches.run(slot, tickets((1, 1)), 1, 0)
        batches.land_all()
    assert versions == [0, 1]
