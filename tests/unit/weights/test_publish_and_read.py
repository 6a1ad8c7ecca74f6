"""A publisher and a reader on one channel: versions, refusals, waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from jurybox.client.remote.weights import _host_array
from jurybox.protocol.errors import Refused, SpecMismatch, Timeout
from jurybox.protocol.weights import WeightsChannel
from jurybox.protocol.weights.channel import all_finite
from jurybox.protocol.weights.layout import DTYPES
from jurybox.protocol.weights.publisher import DeviceStage, Publisher
from jurybox.protocol.weights.reader import WeightsReader

MODES = pytest.mark.parametrize("mode", ["double_buffer", "snapshot"])


@MODES
def test_published_weights_are_read(make, arrays, mode):
    channel = make(mode=mode)
    publisher, reader = Publisher(channel), WeightsReader(WeightsChannel.attach(channel.name))
    seen = 0
    for round_ in range(1, 6):
        sent = {name: (array + round_).astype(array.dtype) for name, array in arrays.items()}
        assert publisher.publish(sent, extra={"epsilon": round_ / 10, "mean": np.full(3, round_)}) == round_
        assert reader.newer_than(seen)
        state, seen, extra = reader.read()
        assert seen == round_ == extra["mean"][0] and extra["epsilon"] == round_ / 10 and not reader.newer_than(seen)
        for name, array in sent.items():
            np.testing.assert_array_equal(state[name], array)
            assert state[name].dtype == array.dtype and state[name].shape == array.shape
    publisher.close()


@MODES
def test_publications_are_counted_whatever_their_versions(make, mode):
    channel = make({"w": np.zeros(100)}, mode=mode)
    publisher = Publisher(channel)
    for n, version in enumerate((1000, None, None, 2000), 1):
        publisher.publish({"w": np.zeros(100)}, version=version)
        assert channel.publications == n
    assert channel.newest == 2000


def test_a_state_read_stays_as_it_is_and_out_is_filled_in_place(make):
    channel = make({"w": np.zeros(100)})
    publisher, reader = Publisher(channel), WeightsReader(channel)
    publisher.publish({"w": np.full(100, 1.0)})
    own, out = reader.read().state, reader.buffers()
    for target in (out, {"w": np.empty(100)}):
        publisher.publish({"w": np.full(100, 2.0)})
        assert reader.read(out=target).state is target
        assert (target["w"] == 2.0).all() and (own["w"] == 1.0).all()
    for bad in ({}, {"w": np.empty(99)}, {"w": np.empty(100, np.float32)}, {"w": np.empty(200)[::2]}):
        with pytest.raises(SpecMismatch, match="out"):
            reader.read(out=bad)


def test_an_extra_that_is_too_large_is_refused_and_nothing_published(make, arrays):
    channel = make(extra_bytes=100)
    publisher = Publisher(channel)
    with pytest.raises(SpecMismatch, match="has room for"):
        publisher.publish(arrays, extra={"blob": np.zeros(channel.extra_bytes)})
    assert channel.newest == 0


def test_another_layout_is_refused_with_the_difference_named(make, arrays):
    channel = make()
    publisher = Publisher(channel)
    publisher.publish(arrays)
    wrong = [
        ({name: array for name, array in arrays.items() if name != "steps"}, "'steps' is missing"),
        ({**arrays, "more": np.zeros(1)}, "'more' came"),
        ({**arrays, "layer.weight": np.zeros((4, 3), np.float32)}, r"expected float32\[3, 4\], got float32\[4, 3\]"),
        ({**arrays, "layer.bias": np.zeros(3, np.float32)}, r"expected float64\[3\], got float32\[3\]"),
    ]
    for state, said in wrong:
        with pytest.raises(SpecMismatch, match=said):
            publisher.publish(state)
    with pytest.raises(SpecMismatch, match="give a lone array a name"):
        publisher.publish(np.zeros(3))
    assert channel.newest == 1


@MODES
@pytest.mark.parametrize("dtype", [name for name, stored in DTYPES.items() if stored.width])
def test_non_finite_weights_are_refused_on_request_and_the_last_version_stays(make, mode, dtype):
    torch = pytest.importorskip("torch")
    good = {"fine": torch.ones(70_000).to(getattr(torch, dtype)), "w": torch.ones(70_000).to(getattr(torch, dtype))}
    channel = make(good, mode=mode)
    publisher, reader = Publisher(channel), WeightsReader(channel)
    publisher.publish(good, check_finite=True)
    infinity = [] if dtype == "float8_e4m3fn" else [float("inf")]  # that dtype has none
    for bad in [*infinity, float("nan")]:
        poisoned = torch.ones(70_000)
        poisoned[69_999] = bad
        state = {**good, "w": poisoned.to(getattr(torch, dtype))}
        with pytest.raises(Refused, match="tensor 'w' holds NaN"):
            publisher.publish(state, check_finite=True)
        read = reader.read()
        assert read.version == publisher.version and (read.state["w"] == read.state["fine"]).all()
    bad = {**good, "w": poisoned.to(getattr(torch, dtype))}
    publisher.publish(bad)  # not requested, not checked
    assert publisher.restore(bad, {"loss": np.nan}, 2**40) == reader.read().version == 2**40, "as it was saved"
    with pytest.raises(Refused, match="extra"):
        publisher.publish(good, extra={"deep": [np.array([1.0, np.nan])]}, check_finite=True)


def test_a_version_can_be_chosen_and_only_grows(make, arrays):
    channel = make()
    publisher, reader = Publisher(channel), WeightsReader(channel)
    for version in (3, 5, 7, 8, 100):  # odd steps would meet the slot of the newest, if slots went by parity
        assert publisher.publish(arrays, version=version) == version == reader.read().version
    with pytest.raises(Refused, match="versions only grow"):
        publisher.publish(arrays, version=100)
    assert publisher.publish(arrays) == 101


def test_a_second_publisher_is_refused_and_a_closed_one_makes_room(make, arrays):
    channel = make()
    with Publisher(channel) as first:
        first.publish(arrays)
        for other in (channel, WeightsChannel.attach(channel.name)):
            with pytest.raises(Refused, match=f"has a publisher, process {os.getpid()}"):
                Publisher(other)
    with pytest.raises(Refused, match="was closed"):
        first.publish(arrays)
    with Publisher(channel) as second:
        assert second.version == 1 and second.publish(arrays) == 2


def test_threads_may_share_a_publisher(make, arrays):
    publisher = Publisher(make())
    versions: list[int] = []
    threads = [
        threading.Thread(target=lambda: versions.extend(publisher.publish(arrays) for _ in range(50))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(versions) == list(range(1, 151))


def test_waits_are_bounded_and_their_errors_name_what_is_missing(make, arrays):
    channel, single = make(), make(mode="snapshot")
    with pytest.raises(Timeout, match="nothing has been published"):
        WeightsReader(channel).read(timeout=0.05)
    assert not WeightsReader(channel).wait_newer_than(0, timeout=0.05)
    Publisher(single).publish(arrays)
    single.slots.begin()  # a publisher in the middle of its work
    with pytest.raises(Timeout, match="it has one slot"):
        WeightsReader(single).read(timeout=0.05)


def test_a_waiting_reader_is_woken_by_the_publication(make, arrays):
    channel = make()
    reader, publisher, woken = WeightsReader(channel), Publisher(channel), []
    thread = threading.Thread(target=lambda: woken.append(reader.wait_newer_than(0, timeout=60)))
    thread.start()
    publisher.publish(arrays)
    thread.join(60)
    assert woken == [True]


def test_a_claim_lets_an_engine_copy_in_its_own_way(make, arrays):
    channel = make()
    publisher = Publisher(channel)
    assert channel.claim().version == 0
    publisher.publish(arrays, extra={"k": 1})
    claim = channel.claim()
    views = channel.layout.views(channel.slot(claim).copy())
    assert claim.version == 1 and channel.age_seconds(claim) >= 0 and channel.holds(claim)
    np.testing.assert_array_equal(views["layer.weight"], arrays["layer.weight"])
    publisher.publish(arrays)
    assert channel.holds(claim)
    publisher.publish(arrays)
    assert not channel.holds(claim)


def test_lazy_conjugates_and_negatives_publish_as_their_values(make):
    torch = pytest.importorskip("torch")
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    weights = {"conjugate": numbers.conj(), "negative": numbers.conj().imag}
    assert weights["conjugate"].is_conj() and weights["negative"].is_neg()
    channel = make(weights)
    Publisher(channel).publish(weights)
    state = WeightsReader(channel).read().state
    np.testing.assert_array_equal(state["conjugate"], [1 - 2j, 3 + 4j])
    np.testing.assert_array_equal(state["negative"], [-2, 4])
    for name, place in channel.layout.places.items():  # as they are published over gRPC
        np.testing.assert_array_equal(_host_array(weights[name], place), state[name])


def test_modules_and_torch_tensors_publish_as_they_are(make):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    channel = make(module.state_dict())
    publisher = Publisher(channel)
    publisher.publish(module)
    state = WeightsReader(channel).read().state
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(state[name], tensor.numpy())
    publisher.publish({**module.state_dict(), "0.weight": torch.arange(15.0).reshape(5, 3).T})  # not contiguous
    np.testing.assert_array_equal(WeightsReader(channel).read().state["0.weight"], np.arange(15.0).reshape(5, 3).T)
    with pytest.raises(SpecMismatch, match="got bfloat16"):
        publisher.publish(module.bfloat16())


def test_the_device_stage_brings_the_whole_over_in_one_transfer(make):
    torch = pytest.importorskip("torch")
    state = {"a": torch.rand(7, 3), "b": torch.ones(5, dtype=torch.bfloat16), "n": torch.tensor(3), "e": torch.zeros(0)}
    channel = make(state)
    stage = DeviceStage(channel, torch.device("cpu"))  # the same steps, on the one device that is always there
    stage.gather(state)
    assert stage.not_finite() is None
    slot = channel.slots.begin()
    stage.transfer(slot)
    channel.slots.commit(slot, 1, b"")
    read = WeightsReader(channel).read().state
    np.testing.assert_array_equal(read["a"], state["a"].numpy())
    assert read["b"].dtype.name == "bfloat16" and (read["b"] == 1).all() and read["n"] == 3
    state["b"][4] = float("inf")
    stage.gather(state)
    assert stage.not_finite() == "b"
    stage.close()


@pytest.mark.gpu
@MODES
def test_a_module_on_a_gpu_is_published_whole(make, mode):
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(300, 200).cuda()
    channel = make(module.state_dict(), mode=mode)
    with Publisher(channel) as publisher:
        publisher.publish(module, check_finite=True)
        state = WeightsReader(channel).read().state
        np.testing.assert_array_equal(state["weight"], module.weight.detach().cpu().numpy())
        module.bias.data[0] = float("nan")
        with pytest.raises(Refused, match="'bias' holds NaN"):
            publisher.publish(module, check_finite=True)


def test_the_client_s_end_never_imports_torch():
    code = "import sys; from jurybox.client import Publisher, WeightsReader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_overtaken_reader_says_how_often_it_tried():
    reader = WeightsReader.__new__(WeightsReader)
    reader.channel, reader.tries = SimpleNamespace(name="w", newest=1, mode="double_buffer"), 0
    assert "overtook all 7 tries in 0.5 s" in str(reader._timeout(0.5, 7))


def wrapped(how):
    torch = pytest.importorskip("torch")

    class Extra(torch.nn.Linear):
        def get_extra_state(self):
            return {"steps": 3}

        def set_extra_state(self, state):
            self.steps = state

    net = Extra(3, 2)
    torch.nn.init.constant_(net.weight, 7.0)
    parallel, compiled = torch.nn.DataParallel, torch.compile
    return {
        "plain": lambda: net,
        "compiled": lambda: compiled(net),
        "parallel": lambda: parallel(net),
        "compiled parallel": lambda: compiled(parallel(net)),
        "parallel compiled": lambda: parallel(compiled(net)),
        "part": lambda: torch.nn.ModuleDict({"module": compiled(net)}),
        "its state": lambda: parallel(net).state_dict(),
    }[how]()


HOWS = ["plain", "compiled", "parallel", "compiled parallel", "parallel compiled", "part", "its state"]


@pytest.mark.parametrize("how", HOWS)
def test_wrapped_modules_are_published_by_the_names_of_the_module(make, how):
    prefix = "module." if how == "part" else ""
    layout = {f"{prefix}weight": np.zeros((2, 3), np.float32), f"{prefix}bias": np.zeros(2, np.float32)}
    channel = make(layout)
    Publisher(channel).publish(wrapped(how))
    state = WeightsReader(channel).read().state
    assert state.keys() == layout.keys() and (state[f"{prefix}weight"] == 7).all()


def test_names_that_fit_behind_no_wrapper_are_an_error_with_the_names_that_came(make):
    channel = make({"weight": np.zeros(2, np.float32)})
    with pytest.raises(SpecMismatch, match="'weight' is missing.*'module.other' came"):
        Publisher(channel).publish({"module.other": np.zeros(2, np.float32)})


@pytest.mark.parametrize("forked", [False, True])
def test_a_forked_child_leaves_the_publishers_memory_on_the_device_to_its_parent(make, forked):
    with make() as channel, Publisher(channel) as publisher:
        closed = []
        publisher._place.stage = SimpleNamespace(close=lambda: closed.append(1))
        if forked:
            publisher._after_fork_in_child()
        publisher.close()
        publisher.close()
        assert closed == ([] if forked else [1])


@pytest.mark.parametrize(
    ("value", "finite"),
    [
        (1.5, True), (np.nan, False), (np.float32(np.inf), False), (7, True), ("nan", True), (None, True),
        (np.arange(3), True), (np.full(3, 0.5), True), (np.array([0.5, np.nan]), False),
        (np.array([np.inf * 1j]), False), (np.array([1 + 2j]), True),
        ([1.0, [2.0, -np.inf]], False), ((1.0, 2), True), ({"b": {"c": np.nan}}, False),
    ],
)  # fmt: skip
def test_an_extra_is_finite_if_all_of_its_numbers_are_wherever_they_stand(value, finite):
    assert all_finite({"first": 1.0, "a": value, "last": [0.0]}) is finite
    assert all_finite(None) and all_finite({})
