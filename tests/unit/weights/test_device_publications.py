"""Publications from a device, played on the processor: the same steps, with a driver whose memory is files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jurybox.protocol.device_memory import FakeDriver
from jurybox.protocol.errors import Refused, SpecMismatch
from jurybox.protocol.weights import publisher as publisher_module
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader

MODES = pytest.mark.parametrize("mode", ["double_buffer", "snapshot"])


@pytest.fixture
def on_device(monkeypatch):
    """Take torch's tensors for those of a device."""
    monkeypatch.setattr(publisher_module, "_on_device", lambda tensor: isinstance(tensor, torch.Tensor))


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A driver, and what publishers of this test share with it."""
    monkeypatch.setattr(publisher_module, "_SHARED", shared := {})
    return FakeDriver(str(tmp_path)), shared


def weights(first=0.0):
    return {
        "a": torch.arange(6.0).reshape(2, 3) + first,
        "f": torch.ones(3, dtype=torch.float8_e5m2),
        "n": torch.tensor(4),
    }


def read(channel):
    state, version, extra = WeightsReader(channel).read()
    return state["a"].tolist(), version, extra


@MODES
def test_a_state_on_a_device_is_published_whole_and_its_buffer_stays(make, on_device, mode):
    channel = make(weights(), mode=mode)
    with Publisher(channel) as learner:
        assert learner._place.stage is None
        for version in (1, 2, 3):
            assert learner.publish(weights(version), {"step": version}) == version
            assert read(channel) == ((np.arange(6.0).reshape(2, 3) + version).tolist(), version, {"step": version})
        state = WeightsReader(channel).read().state
        assert state["f"].astype(np.float32).tolist() == [1, 1, 1] and state["n"] == 4
        stage = learner._place.stage
        assert len(stage._targets) == (2 if mode == "double_buffer" else 1)
        learner.publish(weights())
        assert learner._place.stage is stage, "one buffer for all publications"
        learner.close_stage()
        assert learner._place.stage is None and learner.publish(weights(7)) == 5
        assert learner._place.stage is not stage and read(channel)[0][0][0] == 7
        learner.publish(weights(9), version=40)
        assert read(channel)[:2] == ((np.arange(6.0).reshape(2, 3) + 9).tolist(), 40)


def test_a_buffer_on_another_device_replaces_the_one_before(make, on_device):
    channel = make(weights())
    with Publisher(channel) as learner:
        learner.publish(weights())
        before = learner._place.stage
        before.device = torch.device("cuda", 1)
        learner.publish(weights(1))
        assert learner._place.stage is not before and learner._place.stage.device.type == "cpu"
        assert not channel.device["generation"].any(), "without a driver nothing is shared"


@pytest.mark.parametrize(("name", "dtype"), [("a", torch.float32), ("f", torch.float8_e5m2)])
def test_values_that_are_not_finite_are_refused_by_name_and_nothing_is_published(make, on_device, name, dtype):
    channel, wrong = make(weights()), weights()
    wrong[name] = torch.full_like(wrong[name].float(), float("inf")).to(dtype)
    with Publisher(channel) as learner:
        learner.publish(weights(), check_finite=True)
        with pytest.raises(Refused, match=f"tensor '{name}' holds NaN or infinity.*nothing was published"):
            learner.publish(wrong, check_finite=True)
        assert channel.newest == 1 and read(channel)[0][0] == [0, 1, 2]
        assert learner.publish(wrong) == 2, "unless it is not asked for"
    whole = make({"n": torch.tensor(4)})
    with Publisher(whole) as learner:
        assert learner.publish({"n": torch.tensor(5)}, check_finite=True) == 1, "whole numbers are finite"


def test_another_layout_is_refused_and_no_buffer_made(make, on_device):
    channel = make(weights())
    with Publisher(channel) as learner:
        with pytest.raises(SpecMismatch, match="'a': expected float32"):
            learner.publish(weights() | {"a": torch.ones(3)})
        assert learner._place.stage is None and channel.newest == 0


def test_a_part_on_a_device_is_added_to_the_version_before(make, on_device):
    channel = make(weights())
    with Publisher(channel) as learner:
        learner.publish(weights())
        assert learner.publish({"n": torch.tensor(8)}, partial=True) == 2
        state = WeightsReader(channel).read().state
        assert state["n"] == 8 and state["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


@MODES
def test_a_copy_stays_on_the_device_for_engines_there_and_is_valid_by_its_version(make, on_device, memory, mode):
    driver, shared = memory
    channel = make(weights(), mode=mode)
    record = channel.device[0]
    with Publisher(channel, driver=driver) as learner:
        assert not record["generation"]
        for version in (1, 2, 3):
            learner.publish(weights(version))
            claim = channel.claim()
            assert record["versions"][claim.slot] == version == claim.version
            (pointers,) = shared.values()
            there = driver.array(pointers[claim.slot], (channel.layout.nbytes,), np.dtype(np.uint8))
            assert bytes(there) == bytes(channel.slot(claim)), "what readers on the host get, byte for byte"
            assert bytes(record["handles"][claim.slot]) == driver.export(pointers[claim.slot])
        assert int(record["generation"]) % 2 == 1 and len(pointers) == (2 if mode == "double_buffer" else 1)
        if mode == "double_buffer":
            assert record["versions"][1 - claim.slot] == 2
        generation = int(record["generation"])
        learner.close_stage()
        learner.publish(weights(4))
        assert shared and next(iter(shared.values())) is pointers, "others may have it open: it is used again"
        assert int(record["generation"]) != generation, "who has it open opens it again"
    with Publisher(channel, driver=driver) as learner:
        assert not record["generation"] and not record["versions"].any(), "what an earlier publisher left is not valid"
        assert learner.publish(weights(5)) == 5 and len(shared) == 1


def test_a_copy_that_is_being_written_is_not_valid(make, on_device, memory):
    driver, _ = memory
    channel = make(weights(), mode="snapshot")
    with Publisher(channel, driver=driver) as learner:
        learner.publish(weights())
        stage, seen = learner._place.stage, []

        class Flat:
            def copy_(self, flat):
                seen.append(int(channel.device[0]["versions"][0]))

        stage._shared = [Flat()]
        learner.publish(weights(1))
        assert seen == [0] and channel.device[0]["versions"][0] == 2


def test_channels_have_their_own_copies(make, on_device, memory):
    driver, shared = memory
    for number in range(2):
        channel = make(weights())
        with Publisher(channel, driver=driver) as learner:
            learner.publish(weights(number))
        assert len(shared) == number + 1
    assert len({pointer for pointers in shared.values() for pointer in pointers}) == 4
