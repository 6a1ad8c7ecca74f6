"""Weights on disk, and back into a channel and into a module."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
from tests.serving import wait_until

from jurybox.protocol.errors import Error, Refused, SpecMismatch, Timeout
from jurybox.protocol.weights.publisher import Publisher
from jurybox.protocol.weights.reader import WeightsReader

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
import safetensors.torch  # noqa: E402

from jurybox.server import safetensors_file  # noqa: E402
from jurybox.server.safetensors_file import DamagedFile  # noqa: E402
from jurybox.server.settings.config import ModelSettings  # noqa: E402
from jurybox.server.supervisor.models import HeldModel, Placed  # noqa: E402
from jurybox.server.supervisor.weights_saver import WeightsFiles, WeightsSaver  # noqa: E402
from jurybox.training.roles.local_policy import TorchWeights  # noqa: E402


@pytest.fixture
def state():
    return {"w": torch.rand(5, 3), "b": torch.rand(3).bfloat16(), "n": torch.tensor(3), "e": torch.zeros(0, 2)}


def save(channel, folder):
    files = WeightsFiles(channel, folder)
    files.save()
    files.close()


def test_every_kth_publication_is_saved_and_the_oldest_go(make, state, tmp_path):
    channel = make(state)
    publisher, files = Publisher(channel), WeightsFiles(channel, tmp_path, every=3, keep=2)
    saved = []
    for _ in range(10):
        publisher.publish(state)
        saved.append(files.save() if files.due() else None)
    assert [version for version in saved if version] == [1, 4, 7, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "manifest.json",
        "weights-000000000007.safetensors",
        "weights-000000000010.safetensors",
    ]


def test_a_restart_continues_from_the_last_saved_version(make, state, tmp_path):
    old = make(state)
    publisher = Publisher(old)
    for _ in range(41):
        publisher.publish(state, extra={"epsilon": 0.5, "mean": np.arange(3.0)})
    save(old, tmp_path)
    fresh = make(state)
    files = WeightsFiles(fresh, tmp_path)
    with Publisher(fresh) as successor:
        assert files.restore(successor) == 41 and successor.publish(state) == 42 and files.due()
        assert WeightsFiles(make(state), tmp_path / "empty").restore(successor) is None
    files.close()
    other = make(state)
    WeightsFiles(other, tmp_path).restore(Publisher(other))
    read, version, extra = WeightsReader(other).read()
    assert version == 41 and extra["epsilon"] == 0.5 and (extra["mean"] == np.arange(3.0)).all()
    np.testing.assert_array_equal(read["w"], state["w"].numpy())
    assert read["b"].dtype.name == "bfloat16"
    np.testing.assert_array_equal(read["b"].astype(np.float32), state["b"].float().numpy())


def test_a_damaged_file_is_passed_over_for_the_one_before_it(make, state, tmp_path, caplog):
    channel = make(state)
    publisher, files = Publisher(channel), WeightsFiles(channel, tmp_path)
    for _ in range(3):
        publisher.publish(state)
        files.save()
    (tmp_path / "weights-000000000003.safetensors").write_bytes(b"half a fi")
    (tmp_path / "weights-000000000002.safetensors").unlink()
    files.close()
    fresh = make(state)
    files = WeightsFiles(fresh, tmp_path)
    with Publisher(fresh) as publisher:
        assert files.restore(publisher) == 1 and not files.due()
        assert [saved.version for saved in files.saved] == [1] and files.last_version == 1
        assert (tmp_path / "weights-000000000003.safetensors.damaged").read_bytes() == b"half a fi"
        assert publisher.publish(state) == 2 and files.save() == 2, "their versions are saved again"
    assert caplog.text.count("passed over") == 2
    (tmp_path / "weights-000000000002.safetensors").unlink()
    (tmp_path / "weights-000000000001.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFile, match="every weights file .* move the folder away"):
        files.restore(Publisher(make(state)))


@pytest.mark.parametrize("wrong", [{"every": 0}, {"keep": 0}])
def test_at_least_every_version_and_one_file_are_kept(make, state, tmp_path, wrong):
    with pytest.raises(ValueError, match=f"expected every >= 1 and keep >= 1, .*{next(iter(wrong))}=0"):
        WeightsFiles(make(state), tmp_path, **wrong)
    WeightsFiles(make(state), tmp_path, every=1, keep=1).close()


def test_weights_restored_where_there_are_newer_ones_are_the_newest(make, state, tmp_path):
    old, live = make(state), make(state)
    with Publisher(old) as publisher:
        publisher.publish(state, version=7)
    save(old, tmp_path)
    files = WeightsFiles(live, tmp_path)
    with Publisher(live) as publisher:
        publisher.publish(state, version=20)
        assert files.restore(publisher) == live.newest == 21
    files.close()


def test_extra_values_are_described_in_the_manifest_and_whole_in_the_file(make, state, tmp_path):
    channel = make(state)
    extra = {"steps": [1, 2], "means": [np.arange(2.0), np.zeros(1)], "note": "x"}
    with Publisher(channel) as publisher:
        publisher.publish(state, extra=extra)
    save(channel, tmp_path)
    (row,) = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert row["extra"] == {"steps": [1, 2], "means": "list of 2", "note": "x"}


def test_a_folder_whose_manifest_cannot_be_read_is_left_unlocked(make, state, tmp_path):
    (tmp_path / "manifest.json").write_text("[")
    for _ in range(2):
        with pytest.raises(Error, match="move it away to begin anew"):
            WeightsFiles(make(state), tmp_path)
    (tmp_path / "manifest.json").unlink()
    WeightsFiles(make(state), tmp_path).close()


def test_a_folder_belongs_to_one_at_a_time(make, state, tmp_path):
    first = WeightsFiles(make(state), tmp_path)
    with pytest.raises(Refused, match="another server keeps weights"):
        WeightsFiles(make(state), tmp_path)
    first.close()
    WeightsFiles(make(state), tmp_path).close()


def test_files_of_a_killed_writer_are_removed_and_the_rest_stays(make, state, tmp_path):
    channel = make(state)
    Publisher(channel).publish(state)
    save(channel, tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / ".weights-000000000002.safetensors.aside").write_bytes(b"half")
    (tmp_path / "weights-000000000002.safetensors").write_bytes(b"renamed, never named in the manifest")
    (tmp_path / "notes.txt").write_text("somebody's")
    WeightsFiles(channel, tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "notes.txt"])


def test_other_programs_read_the_files_and_we_read_theirs(make, state, tmp_path):
    state = {**state, "mask": torch.tensor([True, False, True]), "half": torch.rand(7).half(), "z": torch.rand(2) * 1j}
    channel = make(state)
    Publisher(channel).publish(state, extra={"mean": np.arange(2.0), "epsilon": 0.5})
    save(channel, tmp_path)
    loaded = safetensors.torch.load_file(tmp_path / "weights-000000000001.safetensors")
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    (row,) = json.loads((tmp_path / "manifest.json").read_text())["files"]
    assert row["version"] == 1 and row["extra"] == {"mean": "float64[2]", "epsilon": 0.5}
    safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    layout, arrays, _ = safetensors_file.read(tmp_path / "theirs.safetensors")
    assert not channel.layout.difference(layout)
    assert (arrays["w"] == state["w"].numpy()).all() and (arrays["half"] == state["half"].numpy()).all()


CONTRADICTIONS = {
    "two tensors share bytes": ({"a": ([2], 0, 8), "b": ([2], 4, 12)}, 12),
    "bytes belong to nobody": ({"a": ([2], 0, 8), "b": ([2], 12, 20)}, 20),
    "a tensor has fewer bytes than its shape": ({"a": ([4], 0, 8), "b": ([2], 8, 16)}, 16),
    "bytes after the last": ({"a": ([2], 0, 8)}, 20),
    "the file is cut short": ({"a": ([2], 0, 8)}, 4),
}


@pytest.mark.parametrize("why", CONTRADICTIONS)
def test_a_file_whose_header_and_bytes_disagree_is_refused(tmp_path, why):
    tensors, size = CONTRADICTIONS[why]
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": at} for name, (shape, *at) in tensors.items()}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(DamagedFile, match="no safetensors file"):
        safetensors_file.read(tmp_path / "a.safetensors")


def test_a_save_that_fails_leaves_the_one_before_it(make, state, tmp_path, monkeypatch):
    channel = make(state)
    publisher, files = Publisher(channel), WeightsFiles(channel, tmp_path)
    publisher.publish(state)
    files.save()
    before = sorted(path.name for path in tmp_path.iterdir())
    publisher.publish(state)

    def full(_: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("jurybox.server.supervisor.weights_saver.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        files.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    monkeypatch.undo()
    assert [row["version"] for row in json.loads((tmp_path / "manifest.json").read_text())["files"]] == [1]
    assert files.save() == 2


def test_weights_of_another_layout_and_broken_manifests_are_refused(make, state, tmp_path):
    channel = make(state)
    Publisher(channel).publish(state)
    save(channel, tmp_path)
    other = make({**state, "w": torch.zeros(2)})
    files = WeightsFiles(other, tmp_path)
    with pytest.raises(SpecMismatch, match=r"'w': expected float32\[2\], got float32\[5, 3\]"):
        files.restore(Publisher(other))
    files.close()
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(Error, match="no manifest"):
        WeightsFiles(channel, tmp_path)


@pytest.fixture
def reports():
    return []


@pytest.fixture
def saver(reports):
    saver = WeightsSaver(lambda event, **fields: reports.append(fields["error"]))
    yield saver
    saver.close()


def held(index, folder, **settings):
    given = {"factory": "a:b", "publish": "double_buffer", "save_dir": str(folder), **settings}
    return HeldModel(index, f"m{index}", ModelSettings.model_validate(given))


def keep(saver, model, channel):
    """Save the publications of a load, as if it served at once."""
    restored = saver.prepare(model, channel, model.asked)
    saver.take_over(model, channel, model.asked)
    return restored


def two_rounds(saver, channel, folder):
    """Wait until the saver has looked at every other model once more, at least."""
    model = held(9, folder)
    keep(saver, model, channel)
    with Publisher(channel) as publisher:
        for version in (1, 2):
            publisher.publish(channel.layout.views(np.zeros(channel.layout.nbytes, np.uint8)))
            wait_until(lambda: model.saved == version, what="the save of another model")  # noqa: B023
    saver.drop(model)


def test_publications_before_a_save_dir_was_set_are_saved_and_not_taken_for_an_earlier_runs(
    make, state, saver, tmp_path
):
    model, earlier, live = held(0, tmp_path), make(state), make(state)
    with Publisher(earlier) as publisher:
        publisher.publish(state, version=1000)
    save(earlier, tmp_path / "m0")
    with Publisher(live) as publisher:
        publisher.publish(state, version=50)
        assert keep(saver, model, live) is None and model.saved == 0
        wait_until(lambda: model.saved == 50, what="the save of what was already published")
        publisher.publish(state)
        wait_until(lambda: model.saved == 51, what="the save of the next publication")
    saver.close()
    fresh = make(state)
    files = WeightsFiles(fresh, tmp_path / "m0")
    assert [saved.version for saved in files.saved] == [1000, 50, 51]
    assert files.restore(Publisher(fresh)) == 51


def test_weights_that_do_not_fit_the_folder_change_nothing_of_what_is_saved(make, state, saver, reports, tmp_path):
    model, channel = held(0, tmp_path), make(state)
    keep(saver, model, channel)
    with pytest.raises(SpecMismatch, match="safetensors cannot store"):
        keep(saver, model, make({"z": torch.zeros(2, dtype=torch.complex128)}))
    with Publisher(channel) as publisher:
        publisher.publish(state)
        wait_until(lambda: model.saved == 1)
        with pytest.raises(SpecMismatch, match=r"m0 keeps .* 'w': .*; expected another save_dir"):
            keep(saver, model, make({**state, "w": torch.zeros(2)}))
        publisher.publish(state)
        wait_until(lambda: model.saved == 2, what="the save after the refusals")
    assert reports == []


def test_a_folder_without_weights_passes_to_a_channel_of_another_layout(make, state, saver, tmp_path):
    model, other = held(0, tmp_path), make({"w": torch.zeros(2)})
    keep(saver, model, make(state))
    keep(saver, model, other)
    wait_until(lambda: not saver.busy(model, model.asked))
    with pytest.raises(Refused, match="another server keeps weights"):
        WeightsFiles(other, tmp_path / "m0")
    with Publisher(other) as publisher:
        publisher.publish({"w": torch.zeros(2)})
    wait_until(lambda: model.saved == 1)


def test_a_folder_passes_to_no_channel_of_another_layout_before_what_was_published_is_saved(
    make, state, saver, tmp_path, monkeypatch
):
    def busy(files, timeout=1.0):
        raise Timeout("a snapshot is being written")

    monkeypatch.setattr(WeightsFiles, "save", busy)
    model, channel = held(0, tmp_path), make(state)
    keep(saver, model, channel)
    with Publisher(channel) as publisher:
        publisher.publish(state)
    with pytest.raises(SpecMismatch, match="m0 keeps the weights of 'm0' as it is"):
        saver.prepare(model, make({"w": torch.zeros(2)}), model.asked)


def test_a_save_that_fails_is_not_repeated_at_once(make, state, saver, reports, tmp_path, monkeypatch):
    model, channel, tries = held(0, tmp_path), make(state), []
    save_files = WeightsFiles.save

    def full(files, timeout=1.0):
        if files.folder != tmp_path / "m0" or len(tries) == 2:
            return save_files(files, timeout)
        tries.append(time.monotonic())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WeightsFiles, "save", full)
    monkeypatch.setattr("jurybox.server.supervisor.weights_saver._AGAIN", 3600.0)
    keep(saver, model, channel)
    with Publisher(channel) as publisher:
        publisher.publish(state)
        wait_until(lambda: tries, what="the first try")
        two_rounds(saver, make(state), tmp_path / "another")
        assert len(tries) == len(reports) == 1
        monkeypatch.setattr("jurybox.server.supervisor.weights_saver._AGAIN", 0.0)
        saver._saving[0].again = 0.0  # the hour is over
        wait_until(lambda: model.saved == 1, what="the third try")
    assert len(tries) == 2 and len(reports) == 1  # the same failure is reported once


def test_a_load_that_fails_leaves_the_folder_to_the_one_before_it(make, state, saver, reports, tmp_path):
    model, channel, other = held(0, tmp_path), make(state), make({"w": torch.zeros(2)})
    elsewhere = held(0, tmp_path / "elsewhere").asked
    keep(saver, model, channel)
    saver.prepare(model, other, model.asked)
    saver.prepare(model, channel, elsewhere)
    model.placed, model.orders = {0: Placed(other, ""), 1: Placed(channel, "")}, {0: model.asked, 1: elsewhere}
    saver.discard(model)
    with Publisher(channel) as publisher:
        publisher.publish(state)
        two_rounds(saver, make(state), tmp_path / "another")
        assert model.saved == 0  # the other channel's load has found the folder empty, and may yet take it over
        model.placed.clear()
        saver.discard(model)
        wait_until(lambda: model.saved == 1, what="the save after the failed load")
    WeightsFiles(other, tmp_path / "elsewhere" / "m0").close()  # it is unlocked
    with pytest.raises(Refused, match="another server keeps weights"):
        WeightsFiles(channel, tmp_path / "m0")
    assert reports == []


def test_what_is_published_before_another_channel_takes_a_folder_over_is_not_saved_there(make, state, saver, tmp_path):
    model, channel, other = held(0, tmp_path), make(state), make({"w": torch.zeros(2)})
    keep(saver, model, channel)
    saver.prepare(model, other, model.asked)
    model.placed, model.orders = {0: Placed(other, "")}, {0: model.asked}
    with Publisher(channel) as publisher:
        publisher.publish(state)
    saver.take_over(model, other, model.asked)
    with Publisher(other) as publisher:
        publisher.publish({"w": torch.zeros(2)})
    wait_until(lambda: model.saved == 1, what="the save of the channel that took over")
    saver.close()
    files = WeightsFiles(other, tmp_path / "m0")
    assert [saved.layout_hash for saved in files.saved] == [other.layout.hash]
    files.close()


def test_no_unloading_waits_for_the_disk(make, state, saver, reports, tmp_path, monkeypatch):
    slow, quick = held(0, tmp_path), held(1, tmp_path)
    channels = (slow, make(state)), (quick, make(state))
    for model, channel in channels:
        keep(saver, model, channel)
    writing, may_write, write = threading.Event(), threading.Event(), safetensors_file.write

    def write_slowly(*arguments):
        writing.set()
        assert may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(safetensors_file, "write", write_slowly)
    try:
        with Publisher(channels[0][1]) as publisher:
            publisher.publish(state)
            assert writing.wait(60)
            publisher.publish(state)
        for model, channel in channels:  # these would wait for ever
            saver.drop(model)
            saver.release(channel)
            assert saver.busy(model, model.asked) and not channel.closed
        unsaved = make(state)
        saver.release(unsaved)
        assert unsaved.closed
    finally:
        may_write.set()
    wait_until(lambda: all(channel.closed for _, channel in channels), what="the end of the last saves")
    assert not saver.busy(slow, slow.asked) and not saver.busy(quick, quick.asked) and reports == []
    files = WeightsFiles(make(state), tmp_path / "m0")
    assert [saved.version for saved in files.saved] == [1, 2]
    files.close()


def test_the_end_waits_for_the_last_saves_and_says_so_meanwhile(make, state, saver, tmp_path, monkeypatch):
    model, channel, may_write, write = held(0, tmp_path), make(state), threading.Event(), safetensors_file.write

    def write_slowly(*arguments):
        assert may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(safetensors_file, "write", write_slowly)
    keep(saver, model, channel)
    calls = []

    def waiting():
        calls.append(saver._thread.is_alive())
        if len(calls) == 3:
            may_write.set()

    with Publisher(channel) as publisher:
        publisher.publish(state)
        saver.close(waiting)
    assert len(calls) >= 3 and calls[:3] == [True] * 3
    files = WeightsFiles(channel, tmp_path / "m0")  # it is unlocked
    assert [saved.version for saved in files.saved] == [1]
    files.close()


def test_a_load_is_told_what_was_restored_and_a_folder_that_does_not_fit_is_left_unlocked(make, state, saver, tmp_path):
    model, earlier = held(0, tmp_path), make(state)
    with Publisher(earlier) as publisher:
        publisher.publish(state, version=41)
    save(earlier, tmp_path / "m0")
    with pytest.raises(SpecMismatch, match="doesn't fit weights channel"):
        saver.prepare(model, make({"w": torch.zeros(2)}), model.asked)
    channel = make(state)
    assert keep(saver, model, channel) == channel.newest == model.saved == 41


@pytest.mark.parametrize("how", ["no folder", "no channel"])
def test_a_load_without_a_folder_or_publications_saves_nothing(make, state, saver, tmp_path, how):
    model = held(0, tmp_path)
    settings = model.asked.model_copy(update={"save_dir": ""}) if how == "no folder" else model.asked
    channel = None if how == "no channel" else make(state)
    assert saver.prepare(model, channel, settings) is None
    saver.take_over(model, channel, settings)
    saver.drop(model)
    assert not saver.busy(model, settings) and saver._thread is None and list(tmp_path.iterdir()) == []


def test_the_same_load_again_changes_only_how_often_it_is_saved(make, state, saver, tmp_path):
    model, channel = held(0, tmp_path), make(state)
    assert keep(saver, model, channel) is None
    again = model.asked.model_copy(update={"save_every": 5, "save_keep": 2})
    assert saver.prepare(model, channel, again) is None
    saver.take_over(model, channel, again)
    assert not saver.busy(model, again)
    files = saver._saving[0].files
    assert (files.every, files.keep, files.channel) == (5, 2, channel)


def test_a_model_that_is_saved_elsewhere_leaves_what_it_had_published_in_its_first_folder(make, state, saver, tmp_path):
    model, channel = held(0, tmp_path / "first"), make(state)
    elsewhere = held(0, tmp_path / "second").asked
    keep(saver, model, channel)
    with Publisher(channel) as publisher:
        publisher.publish(state)
        saver.prepare(model, channel, elsewhere)
        saver.take_over(model, channel, elsewhere)
        wait_until(lambda: not saver.busy(model, model.asked), what="the last save in the first folder")
        files = WeightsFiles(channel, tmp_path / "first" / "m0")  # it is unlocked
        assert [saved.version for saved in files.saved] == [1]
        files.close()
        wait_until(lambda: model.saved == 1, what="the first save in the second folder")
        with pytest.raises(Refused, match="another server keeps weights"):
            WeightsFiles(channel, tmp_path / "second" / "m0")


def test_folders_that_were_prepared_for_loads_are_unlocked_at_the_end(make, state, saver, tmp_path):
    model, channel = held(0, tmp_path), make(state)
    saver.prepare(model, channel, model.asked)
    with pytest.raises(Refused):
        WeightsFiles(channel, tmp_path / "m0")
    saver.close()
    WeightsFiles(channel, tmp_path / "m0").close()


def test_a_publisher_in_the_middle_of_a_snapshot_is_no_failure(make, state, saver, reports, tmp_path, monkeypatch):
    model, channel, tries, save_files = held(0, tmp_path), make(state), [], WeightsFiles.save

    def busy_once(files, timeout=1.0):
        tries.append(timeout)
        if len(tries) == 1:
            raise Timeout("a snapshot is being written")
        return save_files(files, timeout)

    monkeypatch.setattr(WeightsFiles, "save", busy_once)
    keep(saver, model, channel)
    with Publisher(channel) as publisher:
        publisher.publish(state)
    wait_until(lambda: model.saved == 1, what="the second try")
    assert reports == []


def test_a_last_save_that_fails_is_reported_and_unlocks_the_folder(make, state, saver, reports, tmp_path, monkeypatch):
    models = held(0, tmp_path), held(1, tmp_path)
    channels = make(state), make(state)
    save_files = WeightsFiles.save

    def fail(files, timeout=1.0):
        if files.folder.name == "m0":
            raise OSError(28, "No space left on device")
        return save_files(files, timeout)

    monkeypatch.setattr(WeightsFiles, "save", fail)
    for model, channel in zip(models, channels, strict=True):
        keep(saver, model, channel)
        with Publisher(channel) as publisher:
            publisher.publish(state)
    saver.close()
    assert reports and set(reports) == {"[Errno 28] No space left on device"}
    for name, versions in (("m0", []), ("m1", [1])):
        files = WeightsFiles(make(state), tmp_path / name)
        assert [saved.version for saved in files.saved] == versions
        files.close()


def test_a_module_follows_the_channel(make):
    learner, actor = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    channel = make(learner.state_dict())
    weights = TorchWeights(WeightsReader(channel), actor)
    assert not weights.refresh()
    with Publisher(channel) as first:
        first.publish(learner, extra={"epsilon": 0.1})
    assert weights.refresh() and not weights.refresh()
    assert weights.version == 1 and weights.extra == {"epsilon": 0.1} and torch.equal(actor.weight, learner.weight)
    kept, publisher = actor.weight, Publisher(channel)
    for version in (2, 3, 4):
        with torch.no_grad():
            learner.weight.add_(1)
        publisher.publish(learner)
        assert not torch.equal(actor.weight, learner.weight)
        assert weights.refresh() and weights.version == version
        assert (
            actor.weight is kept and torch.equal(actor.weight, learner.weight) and torch.equal(actor.bias, learner.bias)
        )
    with pytest.raises(SpecMismatch, match="'bias' is missing"):
        TorchWeights(WeightsReader(channel), torch.nn.Linear(4, 2, bias=False))
