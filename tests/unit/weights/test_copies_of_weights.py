"""The copies of a model's weights: which versions stay usable, where each is copied from, and what a switch calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.serving import wait_until

torch = pytest.importorskip("torch")

from jurybox.protocol.device_memory import FAKE, driver  # noqa: E402
from jurybox.protocol.errors import Timeout, VersionNotHeld  # noqa: E402
from jurybox.protocol.weights import WeightsChannel  # noqa: E402
from jurybox.protocol.weights.publisher import Publisher  # noqa: E402
from jurybox.protocol.weights.reader import WeightsReader  # noqa: E402
from jurybox.server.engine import weights_updater  # noqa: E402
from jurybox.server.engine.device import Stream  # noqa: E402
from jurybox.server.engine.weights_updater import Copy, WeightsUpdater  # noqa: E402

CPU = torch.device("cpu")


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.zeros(2))
        self.changes: list[float] = []

    def weights_changed(self) -> None:
        self.changes.append(self.by[0].item())


class Updated:
    """A module with its updater, whose loop is the test."""

    def __init__(self, channel: WeightsChannel, module: torch.nn.Module, keep: int, **more: Any) -> None:
        self.channel, self.module = channel, module
        self.later: list[Callable[[], None]] = []
        self.adopted: list[tuple[int, float]] = []
        self.reports: list[tuple[str, object]] = []
        self.publisher = Publisher(channel)
        self.updater = WeightsUpdater(
            channel,
            module,
            CPU,
            keep,
            self.later.append,
            lambda version, age: self.adopted.append((version, age)),
            report=lambda event, **fields: self.reports.append((event, fields.get("error"))),
            **more,
        )

    def publish(self, value: float) -> None:
        self.publisher.publish({"by": torch.full((2,), value)})

    def adopt(self, *values: float) -> None:
        """Publish each of these values and use it."""
        for value in values:
            self.publish(value)
            wait_until(lambda: self.later, 30, "a copy of the publication")
            self.later.pop()()

    def value(self) -> float:
        return float(self.module.get_parameter("by")[0].item())


@pytest.fixture
def updated(make: Callable[..., WeightsChannel]) -> Iterator[Callable[..., Updated]]:
    with ExitStack() as undo:

        def updated_(keep: int = 0, module: torch.nn.Module | None = None, **more: Any) -> Updated:
            module = module or Scale()
            found = Updated(make({"by": module.get_parameter("by").detach()}), module, keep, **more)
            undo.callback(found.publisher.close)
            undo.callback(found.updater.join)
            undo.callback(found.updater.stop)
            return found

        yield updated_


# ---- versions


@pytest.mark.parametrize("in_place", [False, True], ids=["pointed at a copy", "in place"])
def test_the_newest_version_and_as_many_earlier_ones_as_are_kept_can_be_used(
    updated: Callable[..., Updated], in_place: bool
) -> None:
    model = updated(keep=2, in_place=in_place)
    model.updater.start()
    model.adopt(10.0, 20.0, 30.0, 40.0, 50.0)
    assert [version for version, _ in model.adopted] == [1, 2, 3, 4, 5] and model.updater.version == 5
    for version, value in ((0, 50.0), (3, 30.0), (5, 50.0), (4, 40.0), (0, 50.0)):
        model.updater.use(version)
        assert model.value() == value
    for version in (2, 6):
        with pytest.raises(VersionNotHeld, match=rf"weights version {version} is not held, 3, 4, 5 are: .*keep_versio"):
            model.updater.use(version)
    assert model.value() == 50.0


def test_before_the_first_publication_no_version_is_held_and_the_models_own_weights_are_used(
    updated: Callable[..., Updated],
) -> None:
    model = updated(keep=1)
    model.updater.start()
    model.updater.use(0)
    assert (model.updater.version, model.adopted, model.value(), model.module.changes) == (0, [], 0.0, [])
    with pytest.raises(VersionNotHeld, match="weights version 1 is not held, none are"):
        model.updater.use(1)


def test_a_publication_from_before_the_model_was_loaded_is_used_from_its_first_batch(
    updated: Callable[..., Updated],
) -> None:
    model = updated()
    model.publish(7.0)
    model.updater.start()
    model.updater.use(0)
    assert model.value() == 7.0 and not model.later
    ((version, age),) = model.adopted
    assert version == 1 and age >= 0


def test_a_model_is_told_of_a_change_of_its_weights_once_and_only_if_they_change(
    updated: Callable[..., Updated],
) -> None:
    model = updated(keep=1)
    model.updater.start()
    model.adopt(10.0, 20.0)
    for version in (0, 0, 2, 1, 1, 0):
        model.updater.use(version)
    assert model.module.changes == [20.0, 10.0, 20.0]


@pytest.mark.parametrize(
    ("copies", "in_place", "told"),
    [(False, True, []), (False, False, [10.0]), (True, True, [10.0]), (None, True, [10.0])],
)
def test_a_module_that_copies_no_weights_is_not_told_of_values_that_change_in_place(
    updated: Callable[..., Updated], copies: bool | None, in_place: bool, told: list[float]
) -> None:
    module = Scale()
    if copies is not None:
        module.copies = copies
    model = updated(module=module, in_place=in_place)
    model.updater.start()
    model.adopt(10.0)
    model.updater.use(0)
    assert module.changes == told and model.value() == 10.0


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_keep_their_address_only_if_they_are_changed_in_place(
    updated: Callable[..., Updated], in_place: bool
) -> None:
    model = updated(in_place=in_place)
    view = model.module.get_parameter("by").data[:]
    model.updater.start()
    model.adopt(10.0)
    model.updater.use(0)
    assert model.value() == 10.0 and (view[0].item() == 10.0) == in_place


def test_a_switch_that_failed_in_the_middle_is_done_again(updated: Callable[..., Updated]) -> None:
    calls: list[int] = []

    def before() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("the device is busy")

    model = updated(before=before, in_place=True)
    model.updater.start()
    model.adopt(10.0)
    with pytest.raises(RuntimeError, match="the device is busy"):
        model.updater.use(0)
    model.updater.use(0)
    assert model.value() == 10.0 and len(calls) == 2


def test_the_age_of_a_version_counts_until_the_loop_uses_it(updated: Callable[..., Updated]) -> None:
    model = updated()
    model.updater.start()
    model.publish(10.0)
    wait_until(lambda: model.later, 30, "a copy of the publication")
    copied = time.monotonic()
    wait_until(lambda: time.monotonic() > copied + 0.03)
    waited = time.monotonic() - copied
    model.later.pop()()
    assert model.adopted[0][1] >= waited


# ---- the thread


def test_a_publication_that_cannot_be_copied_is_logged_and_the_next_one_adopted(
    updated: Callable[..., Updated], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_updater, "_SLICE", 0.01)
    fill, fails = Copy.fill, [Timeout("it is being published"), ValueError("odd bytes")]

    def failing(copy: Copy, timeout: float) -> float:
        if fails:
            raise fails.pop(0)
        return fill(copy, timeout)

    monkeypatch.setattr(Copy, "fill", failing)
    model = updated()
    model.updater.start()
    model.adopt(10.0)
    assert model.reports == [("weights not adopted", "ValueError: odd bytes")]
    assert model.adopted[0][0] == 1


def test_no_thread_that_copies_weights_keeps_a_process_from_ending(updated: Callable[..., Updated]) -> None:
    before = set(threading.enumerate())
    model = updated()
    model.updater.start()
    begun = set(threading.enumerate()) - before
    assert begun and all(thread.daemon for thread in begun)


def test_a_model_whose_channel_was_closed_keeps_its_weights_and_its_thread_ends(
    updated: Callable[..., Updated],
) -> None:
    model = updated()
    model.updater.start()
    model.adopt(10.0)
    model.updater.use(0)
    model.channel.close()
    wait_until(lambda: not model.updater._thread.is_alive(), 30, "the end of the thread")
    assert model.value() == 10.0 and not model.reports


def test_a_sleep_that_a_copy_in_progress_keeps_from_ending_says_so(
    updated: Callable[..., Updated], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_updater, "_PARTING", 0.05)
    filling, go_on = threading.Event(), threading.Event()

    def slow(copy: Copy, timeout: float) -> float:
        filling.set()
        go_on.wait(30)
        return 0.0

    monkeypatch.setattr(Copy, "fill", slow)
    model = updated()
    model.updater.start()
    model.publish(10.0)
    assert filling.wait(30)
    try:
        with pytest.raises(Timeout, match="a publication has been on its way to the device for 0 s"):
            model.updater.sleep()
        assert model.updater._copies, "the copy in progress is not taken away from the thread"
    finally:
        go_on.set()


# ---- from the learner's device


@pytest.mark.parametrize("there", [True, False], ids=["on this device", "on the host alone"])
def test_a_publication_is_copied_from_the_learners_device_if_it_is_there(
    updated: Callable[..., Updated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setenv(FAKE, str(tmp_path))
    memory = driver(0)
    model = updated()
    size = model.channel.layout.nbytes
    pointer = memory.allocate(size)
    try:
        memory.array(pointer, (size,), np.dtype(np.uint8))[:8].view(np.float32)[:] = 5.0
        handle = memory.export(pointer)
        handle = handle[:24] + bytes(4) + handle[28:]  # as another process's
        model.publish(1.0)
        record = model.channel.device[0]
        record["handles"][:] = np.frombuffer(handle, np.uint8)
        record["versions"][:], record["generation"] = int(there), 1
        model.updater.start()
        model.updater.use(0)
        assert model.value() == (5.0 if there else 1.0) and model.updater.version == 1
        closed: list[int] = []
        close = memory.close
        monkeypatch.setattr(memory, "close", lambda pointer: (closed.append(pointer), close(pointer)))
        model.updater.sleep()
        assert bool(closed) == there and not model.updater._copies, "asleep, it keeps nobody's memory"
    finally:
        memory.free(pointer)


def test_without_a_device_of_its_own_an_engine_copies_from_the_host(
    updated: Callable[..., Updated], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FAKE, raising=False)
    model = updated()
    model.publish(1.0)
    record = model.channel.device[0]
    record["versions"][:], record["generation"] = 1, 1
    asked: list[int] = []
    monkeypatch.setattr(
        "jurybox.server.engine.device_regions.PublishedOnDevice.tensors", lambda self, claim: asked.append(1)
    )
    model.updater.start()
    model.updater.use(0)
    assert model.value() == 1.0 and not asked


@pytest.mark.parametrize("overwritten", [0, 1, 2, 99])
def test_a_publication_that_is_overwritten_while_it_is_copied_from_a_device_is_copied_again(
    make: Callable[..., WeightsChannel], overwritten: int
) -> None:
    module = Scale()
    channel = make({"by": module.by.detach()})
    looks: list[int] = []
    with Publisher(channel) as publisher:

        def tensors(claim: Any) -> dict[str, torch.Tensor]:
            looks.append(claim.version)
            if len(looks) <= overwritten:
                for version in (claim.version + 1, claim.version + 2):
                    publisher.publish({"by": torch.full((2,), float(version))})
            return {"by": torch.full((2,), 100.0 + claim.version)}

        publisher.publish({"by": torch.full((2,), 1.0)})
        on_device: Any = SimpleNamespace(tensors=tensors)
        copy = Copy(WeightsReader(channel), module, Stream(CPU), CPU, on_device)
        age = copy.fill(10)
        newest = 1 + 2 * len(looks[:overwritten])
        assert copy.version == newest == channel.newest and age >= 0
        there = overwritten < 3
        assert len(looks) == min(overwritten + 1, 3) and copy.from_device == int(there)
        assert copy.tensors["by"][0].item() == (100.0 if there else 0.0) + newest


def test_what_a_channel_publishes_in_one_dtype_is_used_in_the_modules(make: Callable[..., WeightsChannel]) -> None:
    channel = make({"by": torch.zeros(2)})
    with Publisher(channel) as publisher:
        publisher.publish({"by": torch.full((2,), 3.0)})
        for module in (Scale(), Scale().to(torch.bfloat16)):
            copy = Copy(WeightsReader(channel), module, Stream(CPU), CPU)
            copy.fill(10)
            assert copy.tensors["by"].dtype is module.by.dtype and copy.tensors["by"].tolist() == [3.0, 3.0]


def test_copies_keep_the_strides_of_the_modules_weights(make: Callable[..., WeightsChannel]) -> None:
    module = torch.nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    given = torch.arange(48.0).reshape(4, 3, 2, 2)
    channel = make({"weight": torch.zeros(4, 3, 2, 2)})
    with Publisher(channel) as publisher:
        publisher.publish({"weight": given})
        copy = Copy(WeightsReader(channel), module, Stream(CPU), CPU)
        copy.fill(10)
    assert copy.tensors["weight"].stride() == module.weight.stride() and torch.equal(copy.tensors["weight"], given)
