import gc
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.descriptors import open_files

from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol import segment as module
from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.errors import ProtocolMismatch, SharedMemoryError
from jurybox.protocol.scoreboard import Scoreboard
from jurybox.protocol.segment import OWNER_LOCK, Segment, available_bytes, dead, directory, segment_name, sibling, sweep
from jurybox.protocol.shm_rings import ShmRings
from jurybox.protocol.timings import Timings
from jurybox.protocol.weights import WeightsChannel
from jurybox.training.replay import Field, Replay
from jurybox.training.runtime.scoreboard import RunScoreboard

pytestmark = pytest.mark.usefixtures("empty_shared_memory")

KILLED = """
import os, sys
from jurybox.protocol.segment import Segment
Segment.create(sys.argv[1], 4096)
os.kill(os.getpid(), 9)
"""


@contextmanager
def tiny_shared_memory(folder: Path, size: str):
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    before = os.environ["JURYBOX_SHM_DIR"]
    os.environ["JURYBOX_SHM_DIR"] = str(folder)
    try:
        yield
    finally:
        os.environ["JURYBOX_SHM_DIR"] = before
        subprocess.run(["umount", folder], check=True)


def test_others_read_what_the_owner_writes():
    with Segment.create(segment_name("t", "a"), 8192) as owner:
        other = Segment.attach(owner.name)
        owner.array("f4", (4,), 4096)[:] = [1, 2, 3, 4]
        assert other.array("f4", (4,), 4096).tolist() == [1, 2, 3, 4]
        other.close()


def test_the_file_is_for_its_user_alone():
    with Segment.create(segment_name("t", "a"), 4096) as segment:
        assert (directory() / segment.name).stat().st_mode & 0o777 == 0o600


def test_a_living_owners_name_cannot_be_taken():
    with Segment.create(segment_name("t", "a"), 4096) as segment, pytest.raises(SharedMemoryError, match="owner lives"):
        Segment.create(segment.name, 4096)


def test_a_dead_owners_segment_is_swept_and_its_name_free():
    name = segment_name("t", "dead")
    subprocess.run([sys.executable, "-c", KILLED, name], check=False)
    assert (directory() / name).exists()
    with Segment.create(name, 4096):
        pass
    subprocess.run([sys.executable, "-c", KILLED, name], check=False)
    assert sweep() == [name]
    assert not (directory() / name).exists()


def test_a_living_owners_segment_is_never_swept_even_while_arrays_outlive_others():
    with Segment.create(segment_name("t", "a"), 4096) as segment:
        guest = Segment.attach(segment.name)
        guest.close()
        assert sweep() == []
        assert segment.buffer[0] == 0


def test_an_array_that_outlives_its_segment_does_not_keep_it_from_being_swept():
    segment = Segment.create(segment_name("t", "a"), 4096)
    array = segment.array("u1", (4096,))
    segment.close()
    assert sweep() == [segment.name]
    array[:] = 1  # the memory itself lives as long as a view of it


def test_a_segment_in_use_is_not_removed():
    owner = Segment.create(segment_name("t", "shared"), 4096)
    holder = Segment.attach(owner.name, keep_alive=True)
    owner.close()
    assert sweep() == []
    holder.close()
    assert sweep() == [owner.name]


def test_the_error_for_a_missing_segment_has_its_path():
    with pytest.raises(SharedMemoryError, match=str(directory())):
        Segment.attach("jurybox-0-none")


def test_too_little_memory_is_an_error_at_once_that_says_what_to_do(tmp_path):
    with tiny_shared_memory(tmp_path / "shm", "1m"):
        with pytest.raises(SharedMemoryError, match=r"needs 4.0 MiB, 1.0 of 1.0 MiB are free.*--shm-size"):
            Segment.create(segment_name("t", "large"), 4 << 20)
        assert list(directory().iterdir()) == []
        assert available_bytes() == 1 << 20


def test_every_page_is_there_from_the_start(tmp_path):
    with tiny_shared_memory(tmp_path / "shm", "1m"):
        with Segment.create(segment_name("t", "a"), 700 << 10) as segment:
            with pytest.raises(SharedMemoryError):
                Segment.create(segment_name("t", "b"), 700 << 10)
            np.asarray(segment.buffer)[:] = 1  # would be a SIGBUS if pages were made on first touch


def test_a_segment_that_was_closed_says_so():
    segment = Segment.create(segment_name("t", "a"), 4096)
    segment.release()
    for use in (lambda: segment.buffer, segment.populate, lambda: segment.array("u1", (1,))):
        with pytest.raises(SharedMemoryError, match="was closed in this process"):
            use()
    assert segment.fd == -1
    segment.release()  # once more does nothing
    segment.separate(hold=True)
    assert segment.fd == -1


def test_pages_may_be_made_later_and_none_is_nothing(tmp_path):
    with tiny_shared_memory(tmp_path / "shm", "1m"):
        with Segment.create(segment_name("t", "a"), 512 << 10) as segment:
            segment.allocate(0, 0)
            segment.allocate(4096, 4096)
            segment.populate()
            with pytest.raises(SharedMemoryError, match="--shm-size"):
                segment.allocate(0, 4 << 20)


def test_an_owner_is_dead_once_it_has_closed_its_segment():
    owner = Segment.create(segment_name("t", "a"), 4096)
    path = directory() / owner.name
    guest = Segment.attach(owner.name)
    assert guest.owner_lives() and dead(path) is False
    owner.close()
    assert not guest.owner_lives() and dead(path) is True
    guest.close()
    owner.unlink()
    assert dead(path) is False, "what is gone is not ours to judge"


@pytest.mark.parametrize("hold", [True, False])
def test_who_reopens_a_segment_after_a_fork_is_not_its_owner_and_holds_it_if_asked(hold):
    owner = Segment.create(segment_name("t", "a"), 4096)
    guest = Segment.attach(owner.name, keep_alive=True)
    number, before = guest.fd, os.fstat(guest.fd).st_ino
    guest.separate(hold=hold)
    assert (guest.fd, os.fstat(guest.fd).st_ino, os.get_inheritable(guest.fd)) == (number, before, False)
    assert not guest.owned
    owner.close()
    assert sweep() == ([] if hold else [owner.name])
    guest.close()
    sweep()


def test_a_names_parts_are_its_user_its_owner_and_its_kind():
    name = segment_name("id", "rings", 3)
    assert name == f"jurybox-{os.getuid()}-id-rings-3"
    assert sibling(name, "arena", 12) == f"jurybox-{os.getuid()}-id-arena-12"
    assert module.socket_of(name) == directory() / f"jurybox-{os.getuid()}-id.sock"
    assert module._user_of(name) == os.getuid()
    assert module._user_of("jurybox-7-x-y-0") == 7
    for other in ("jurybox", "jurybox-7", "other-7-x-y-0", "jurybox-me-x-y-0"):
        assert module._user_of(other) is None


NUMBER = TensorSpec("float32")


def other_than(name):
    """What is in shared memory under a name is something else, of one page."""
    return {
        "arena": lambda: Arena.attach(name, ArenaLayout(ModelSpec("m", {"x": NUMBER}, {"y": NUMBER}), 8)),
        "scoreboard": lambda: Scoreboard.attach(name),
        "timings": lambda: Timings.attach(name),
        "rings": lambda: ShmRings.attach(name),
        "weights": lambda: WeightsChannel.attach(name),
        "run": lambda: RunScoreboard.attach(name),
        "replay": lambda: Replay.attach("t"),
        "taken": lambda: Segment.create(name, 4096),
    }


@pytest.mark.parametrize("what", other_than(""))
def test_what_is_something_else_leaves_no_descriptor_and_no_lock(what):
    """Whoever asks again and again would otherwise run out of them."""
    with Segment.create(segment_name("t", "replay"), 4096) as segment:
        segment.array(np.uint8, (4096,))[:] = 255
        before = open_files()
        for _ in range(3):
            with pytest.raises((ProtocolMismatch, SharedMemoryError, TypeError, ValueError)):
                other_than(segment.name)[what]()
        gc.collect()
        assert open_files() == before
    assert not (directory() / segment.name).exists()


@pytest.mark.parametrize("wrong", [{"timeout": float("nan")}, {"threads": -1}, {"seed": "x"}])
def test_a_replay_that_could_not_be_made_leaves_neither_memory_nor_a_name(wrong, tmp_path):
    for where in ("t", tmp_path / "rows"):
        before = open_files()
        with pytest.raises((TypeError, ValueError)):
            Replay.create(where, 8, {"x": Field(())}, **wrong)
        gc.collect()
        assert open_files() == before and not list(directory().iterdir()) and not list(tmp_path.iterdir())
        with Replay.create(where, 8, {"x": Field(())}) as replay:
            replay.unlink()


def test_a_segment_that_nobody_has_any_more_closes_itself_and_arrays_over_it_stay():
    before = open_files()
    owner = Segment.create(segment_name("t", "a"), 4096)
    array = owner.array(np.uint8, (4096,))
    array[:] = 7
    descriptor, other = owner.fd, Segment.attach(owner.name)
    assert module.is_locked(other.fd, OWNER_LOCK)
    del owner
    gc.collect()
    assert not module.is_locked(other.fd, OWNER_LOCK) and (array == 7).all()
    own = os.open("/dev/null", os.O_RDONLY)
    assert own == descriptor, "the number is another's now"
    other.close()
    other.close()
    del other
    gc.collect()
    assert os.fstat(own) and sweep() == [segment_name("t", "a")]
    os.close(own)
    del array
    gc.collect()
    assert open_files() == before
