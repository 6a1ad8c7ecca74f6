"""A part of the tensors is published as a complete version, or not at all."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from jurybox.client import Refused, SpecMismatch
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader

MODES = ["double_buffer", "snapshot"]


@pytest.fixture(params=MODES)
def channel(make, request):
    return make(mode=request.param)


def same(read, expected):
    assert read.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(read[name], array)


def test_tensors_that_are_not_given_keep_their_values(channel, arrays):
    with Publisher(channel) as publisher:
        publisher.publish(arrays, extra={"epsilon": 0.5})
        for step in range(1, 6):  # both slots in turn, and each tensor is taken over from a version that took it over
            name = ("steps", "layer.bias")[step % 2]
            arrays[name] = np.asarray(arrays[name] + step)
            assert publisher.publish({name: arrays[name]}, {"step": step}, partial=True) == step + 1
            state, version, extra = WeightsReader(channel).read()
            assert version == step + 1 and extra == {"step": step}
            same(state, arrays)
    with Publisher(channel) as successor:  # of another process, perhaps
        arrays["steps"] = np.array(99, np.int64)
        successor.publish({"steps": torch.tensor(99)}, partial=True)
        same(WeightsReader(channel).read().state, arrays)
        arrays = {name: np.zeros_like(array) for name, array in arrays.items()}
        successor.publish(arrays)
        same(WeightsReader(channel).read().state, arrays)


def test_a_reader_beside_it_never_sees_a_mixture(make):
    big = {"base": np.zeros(300_000, np.float32), "head": np.zeros(300_000, np.float32)}
    channel = make(big)
    done, seen = threading.Event(), []

    def read():
        reader, out = WeightsReader(channel), None
        while not done.is_set():
            state, version, extra = reader.read(out=out, timeout=30.0)
            out = state
            values = [np.unique(state[name]).tolist() for name in ("base", "head")]
            seen.append((version, values == [[extra["base"]], [extra["head"]]]))

    with Publisher(channel) as publisher:
        publisher.publish(big, {"base": 0.0, "head": 0.0})
        thread = threading.Thread(target=read)
        thread.start()
        for step in range(1, 200):
            base = step // 10 * 10
            part = {"head": np.full(300_000, step, np.float32)}
            if step % 10 == 0:
                part["base"] = np.full(300_000, base, np.float32)
            publisher.publish(part, {"base": float(base), "head": float(step)}, partial=step % 10 != 0)
        done.set()
        thread.join(30.0)
    assert seen and all(whole for _, whole in seen)


def test_what_is_no_part_of_the_weights_is_refused_and_changes_nothing(channel, arrays):
    with Publisher(channel) as publisher:
        with pytest.raises(Refused, match=r"no complete version .*publish all of them first"):
            publisher.publish({"steps": np.array(1)}, partial=True)
        publisher.publish(arrays)
        for wrong, said in (
            ({"nobody": np.zeros(1)}, r"have no tensor 'nobody': expected some of layer\.weight, layer\.bias"),
            ({"steps": np.array(1), "nobody": np.zeros(1)}, "'nobody' came and is not in the layout"),
            ({"steps": np.array(1.5)}, r"'steps': expected int64\[\], got float64\[\]"),
            ({"layer.bias": np.zeros(4)}, r"'layer.bias': expected float64\[3\], got float64\[4\]"),
            ({}, "without a tensor"),
        ):
            with pytest.raises(SpecMismatch, match=said):
                publisher.publish(wrong, partial=True)
        with pytest.raises(SpecMismatch, match="'steps' is missing"):
            publisher.publish({"mask": arrays["mask"]})
        with pytest.raises(Refused, match=r"'layer.bias' holds NaN"):
            publisher.publish({"layer.bias": np.full(3, np.nan)}, partial=True, check_finite=True)
        assert WeightsReader(channel).read().version == 1
        same(WeightsReader(channel).read().state, arrays)
        assert publisher.publish({"steps": np.array(8)}, partial=True) == 2


def test_a_part_is_not_added_to_a_version_that_was_being_written_when_its_publisher_died(channel, arrays):
    with Publisher(channel) as publisher:
        publisher.publish(arrays)
        torn = channel.slots.begin()  # killed here
        channel.writable_slot(torn)[:] = 0xA5
    with Publisher(channel) as publisher:
        if channel.mode == "snapshot":
            with pytest.raises(Refused, match="publish all of them first"):
                publisher.publish({"steps": np.array(8)}, partial=True)
            publisher.publish(arrays)
        arrays["steps"] = np.array(8, np.int64)
        publisher.publish({"steps": arrays["steps"]}, partial=True)
        same(WeightsReader(channel).read().state, arrays)


def test_names_of_wrappers_are_recognised_in_a_part(make):
    module = torch.nn.Linear(2, 3)
    channel = make({name: tensor.numpy(force=True) for name, tensor in module.state_dict().items()})
    with Publisher(channel) as publisher:
        publisher.publish(module)
        publisher.publish({"module._orig_mod.bias": torch.ones(3)}, partial=True)
        state = WeightsReader(channel).read().state
        assert (state["bias"] == 1).all() and (state["weight"] == module.weight.numpy(force=True)).all()
