"""Copies of weights to a device, which go on after the calls that began them: when a version counts as there."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from jurybox.protocol.weights import WeightsChannel  # noqa: E402
from jurybox.protocol.weights.publisher import Publisher  # noqa: E402
from jurybox.protocol.weights.reader import WeightsReader  # noqa: E402
from jurybox.server.engine.device import Mark, Stream  # noqa: E402
from jurybox.server.engine.weights_updater import Copy  # noqa: E402

CPU = torch.device("cpu")


class Half(torch.nn.Module):
    """Its weights are in another dtype than they are published in, so that they are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))


class Late(torch.overrides.TorchFunctionMode):
    """A stream whose copies are done when somebody waits for a mark behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Callable[[], Any]] = []
        self.after_marks: list[Mark] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def call() -> Any:
            return function(*args, **(kwargs or {}))

        return self.copies.append(call) if function is torch.Tensor.copy_ else call()

    def running(self) -> Late:
        return self

    def after(self, mark: Mark) -> None:
        self.after_marks.append(mark)

    def mark(self) -> Mark:
        event: Any = SimpleNamespace(query=lambda: not self.copies, synchronize=self.synchronize)
        return Mark(event)

    def synchronize(self) -> None:
        while self.copies:
            self.copies.pop(0)()


@pytest.mark.parametrize("on_device", [False, True], ids=["from the host", "from the learner's device"])
def test_a_version_is_there_once_its_copies_are_done_which_wait_for_the_last_use_of_the_one_before(
    make: Callable[..., WeightsChannel], on_device: bool
) -> None:
    channel, stream, used = make({"by": torch.zeros(2)}), Late(), Mark(None)
    learners: Any = SimpleNamespace(tensors=lambda claim: {"by": torch.full((2,), 3.0)}) if on_device else None
    late: Any = stream
    with Publisher(channel) as publisher:
        publisher.publish({"by": torch.full((2,), 3.0)})
        copy = Copy(WeightsReader(channel), Half(), late, CPU, learners)
        copy.used = used
        copy.fill(10)
    assert copy.version == 1 and copy.tensors["by"].tolist() == [3.0, 3.0] and not stream.copies
    assert stream.after_marks == [used]


def test_on_a_cpu_every_copy_is_done_at_once() -> None:
    mark = Stream(CPU).mark()
    mark.wait()
    assert mark.done() and mark.event is None
