import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jurybox.protocol import segment as module
from jurybox.protocol.errors import SharedMemoryError
from jurybox.protocol.segment import Segment, available_bytes, dead, directory, segment_name, sibling, sweep

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
