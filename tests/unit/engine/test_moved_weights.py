"""A model that sleeps: its weights, inputs and states leave the device, and all of it comes back."""

import numpy as np
import torch
from tests.serving import wait_until
from tests.unit.engine.test_device_served import CPU, ROWS, Arena, Plus, served, tickets

from jurybox.protocol.device_memory import FAKE, driver
from jurybox.protocol.errors import Refused
from jurybox.protocol.segment import segment_name
from jurybox.protocol.weights import WeightsChannel, WeightsLayout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.server.engine.device_regions import PublishedOnDevice
from jurybox.server.engine.served import move
from jurybox.server.engine.weights_updater import WeightsUpdater


class Tied(torch.nn.Module):
    """Two layers of one memory, a view of it, a buffer that is not saved, and a layer by the name of the hook."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("row", self.first.weight.data[1])
        self.register_buffer("hidden", torch.arange(3.0), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        self.sleep = torch.nn.Linear(1, 1)


def test_tensors_that_share_memory_share_it_after_a_move():
    module = Tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    identities = [id(parameter) for parameter in module.parameters()]
    address = module.first.weight.data_ptr()
    moved = move(module, CPU)
    assert module.first.weight.data_ptr() != address
    assert moved == sum(4 * n for n in (16, 4, 4, 1, 1, 3))
    assert [id(parameter) for parameter in module.parameters()] == identities
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    with torch.no_grad():
        module.second.weight[1] += 1
    torch.testing.assert_close(module.row, before["first.weight"][1] + 1)


def elsewhere(arena, module):
    """A served model whose device is treated as one with its own memory."""
    device = served(arena, module)
    device._away = True
    return device


def test_a_model_that_slept_answers_as_before():
    arena = Arena()
    device = elsewhere(arena, Plus())
    batch = tickets((2, 3))
    for buffer in device._buffers:
        buffer.graphs = "captured"
    assert device.sleep() == 4
    assert all(not buffer._inputs and buffer.graphs is None for buffer in device._buffers)
    assert device.wake() == 4
    with torch.inference_mode():
        device.run(batch, 3)
    np.testing.assert_array_equal(arena.outputs["action"][2:5], arena.inputs["observation"][2:5] + 1)
    device.close()


def test_weights_published_while_a_model_sleeps_are_adopted_when_it_wakes():
    arena, adopted, later = Arena(), [], []
    module = Plus()
    device = elsewhere(arena, module)
    channel = WeightsChannel.create(segment_name("sleep", "weights", 1), WeightsLayout.of(module.state_dict()))
    publisher = Publisher(channel)
    device.weights_updater = WeightsUpdater(
        channel, module, CPU, 0, later.append, lambda version, age: adopted.append(version), device.forwards
    )
    try:
        publisher.publish({"bias": torch.full((1,), 10.0)})
        device.weights_updater.start()
        with torch.inference_mode():
            device.run(tickets((0, 1)), 1)
        assert arena.outputs["action"][0, 0] == arena.inputs["observation"][0, 0] + 10
        device.sleep()
        assert not device.weights_updater._copies and not device.weights_updater._thread.is_alive()
        for value in (20.0, 30.0):
            publisher.publish({"bias": torch.full((1,), value)})
        assert not later
        device.wake()
        assert device.version == 3 and adopted == [1, 3]
        with torch.inference_mode():
            device.run(tickets((0, 1)), 1)
        assert arena.outputs["action"][0, 0] == arena.inputs["observation"][0, 0] + 30
        publisher.publish({"bias": torch.full((1,), 40.0)})
        wait_until(lambda: later, 10, "a publication after waking")
    finally:
        device.close()
        device.weights_updater.join()
        channel.close()


def test_a_publication_that_was_on_its_way_when_the_model_fell_asleep_is_not_switched_to():
    """The thread has filled a copy and requested the switch; then the model sleeps, and its copies are freed."""
    arena, later, adopted = Arena(), [], []
    module = Plus()
    device = elsewhere(arena, module)
    channel = WeightsChannel.create(segment_name("sleep", "weights", 2), WeightsLayout.of(module.state_dict()))
    device.weights_updater = WeightsUpdater(
        channel, module, CPU, 0, later.append, lambda version, age: adopted.append(version), device.forwards
    )
    try:
        device.weights_updater.start()
        Publisher(channel).publish({"bias": torch.full((1,), 10.0)})
        wait_until(lambda: later, 10, "the publication")
        device.sleep()
        later.pop()()
        assert not adopted
        device.wake()
        assert adopted == [1] and device.version == 1
    finally:
        device.close()
        device.weights_updater.join()
        channel.close()


def test_a_module_with_its_own_to_moves_its_tensors():
    class Own(Plus):
        seen = ()

        def sleep(self):
            self.seen = (*self.seen, "sleep")
            return 7

        def wake(self):
            self.seen = (*self.seen, "wake")

    module = Own(ROWS)
    device = served(Arena(), module)
    assert device.sleep() == 7 and device.wake() == 0
    assert module.seen == ("sleep", "wake")


def test_a_learners_device_memory_is_opened_again_after_a_sleep_but_not_if_it_cannot_be(tmp_path, monkeypatch):
    monkeypatch.setenv(FAKE, str(tmp_path))
    memory, opened = driver(0), []
    layout = WeightsLayout.of(Plus().state_dict())
    channel = WeightsChannel.create(segment_name("sleep", "weights", 3), layout)
    record = channel.device[0]
    pointer = memory.allocate(layout.nbytes)
    handle = memory.export(pointer)
    record["handles"][:] = np.frombuffer(handle[:24] + bytes(4) + handle[28:], np.uint8)  # as another process's
    record["generation"] = 1
    publisher, published = Publisher(channel), PublishedOnDevice(channel, CPU)
    try:
        publisher.publish({"bias": torch.ones(1)})
        record["versions"][:], record["generation"] = 1, 1
        for _ in range(2):
            assert published.tensors(channel.claim()) is not None
            published.close()

        def refuse(handle):
            opened.append(handle)
            raise Refused("the memory of that handle is gone")

        monkeypatch.setattr(memory, "open", refuse)
        for _ in range(2):
            assert published.tensors(channel.claim()) is None
        assert len(opened) == 1
    finally:
        publisher.close()
        channel.close()
        memory.free(pointer)
