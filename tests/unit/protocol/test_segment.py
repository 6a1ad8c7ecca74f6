import errno
import fcntl
import gc
import os
import resource
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.descriptors import open_files

from jurybox.protocol import ModelSpec, TensorSpec
from jurybox.protocol import segment as module
from jurybox.protocol.arena import Arena, ArenaLayout
from jurybox.protocol.errors import ProtocolMismatch, SharedMemoryError, TooManyFiles
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


@pytest.mark.parametrize("rows", [4, 4000])
def test_an_arena_of_another_layout_is_refused_whichever_is_larger(rows):
    name = segment_name("t", "arena")
    spec = ModelSpec("m", {"x": NUMBER}, {"y": NUMBER})
    had, wanted = (ArenaLayout(spec, each).size for each in (2000, rows))
    with Segment.create(name, had), pytest.raises(ProtocolMismatch) as refused:
        Arena.attach(name, ArenaLayout(spec, rows))
    assert f"has {had} bytes, {wanted} were expected for {rows} rows of model 'm'" in str(refused.value)


@pytest.mark.parametrize("wrong", [{"timeout": float("nan")}, {"threads": -1}, {"seed": "x"}])
def test_a_replay_that_could_not_be_made_leaves_neither_memory_nor_a_name(wrong, tmp_path):
    for where in ("t", tmp_path / "rows"):
        gc.collect()
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


@contextmanager
def free_descriptors(n: int):
    """This process can open n files more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + 16, hard))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(n):
            os.close(held.pop())
        yield
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("free", [0, 1, 2])
def test_without_a_descriptor_nothing_is_made_or_attached_and_the_error_says_so(free):
    with Segment.create(segment_name("t", "a"), 4096) as segment:
        before = open_files()
        with free_descriptors(free):
            with pytest.raises(TooManyFiles, match="ulimit -n"):
                Segment.create(segment_name("t", "b"), 4096)
            with pytest.raises(TooManyFiles, match="ulimit -n"):
                Segment.attach(segment.name)
        with free_descriptors(3):  # its own, that of the mapping, and one in between
            Segment.attach(segment.name).close()
            Segment.create(segment_name("t", "b"), 4096).release()
        assert open_files() == before
        assert [path.name for path in directory().iterdir()] == [segment.name]


def test_who_attaches_to_read_only_writes_nothing():
    with Segment.create(segment_name("t", "a"), 4096) as segment, Segment.attach(segment.name, writable=False) as guest:
        seen = guest.array(np.uint8, (4096,))
        segment.buffer[7] = 5
        assert seen[7] == 5 and not seen.flags.writeable
        with pytest.raises(TypeError):
            guest.buffer[7] = 6


def test_only_a_file_of_the_user_in_its_name_is_a_segment():
    """Every user can create files of any name in /dev/shm."""
    before = open_files()
    of_another = f"jurybox-{os.getuid() + 7}-t-a-0"
    (directory() / of_another).write_bytes(b"x")
    (directory() / "folder").mkdir()
    os.mkfifo(directory() / "fifo")
    for name in (of_another, "folder", "fifo"):
        with pytest.raises(SharedMemoryError, match=f"is of user {os.getuid()}, not of its owner|Is a directory"):
            Segment.attach(name)
    (directory() / "link").symlink_to(directory() / of_another)
    with pytest.raises(SharedMemoryError, match="symbolic links"):
        Segment.attach("link")
    (directory() / "empty").touch()
    with pytest.raises(SharedMemoryError, match="an empty file"):
        Segment.attach("empty")
    (directory() / "other").write_bytes(b"abc")
    with Segment.attach("other") as found:  # a name of another form has no user in it
        assert bytes(found.buffer) == b"abc" and found.size == 3
    assert open_files() == before


@pytest.mark.parametrize("when", ["swept", "being swept"])
def test_a_segment_that_is_removed_while_it_is_attached_is_not_attached(when, monkeypatch):
    owner = Segment.create(segment_name("t", "a"), 4096)
    opened, before = module._open_file, open_files()

    def late(name: str, *, writable: bool) -> int:
        number = opened(name, writable=writable)
        owner.close()
        if when == "swept":
            assert sweep() == [name]
        else:
            sweeper.append(os.open(directory() / name, os.O_RDWR))
            assert module.try_lock(sweeper[0], OWNER_LOCK)
        return number

    sweeper: list[int] = []
    monkeypatch.setattr(module, "_open_file", late)
    with pytest.raises(SharedMemoryError, match="was just removed: its owner is gone"):
        Segment.attach(owner.name, keep_alive=True)
    for number in sweeper:
        os.close(number)
    assert open_files() == before - 2, "those of its owner"


@pytest.mark.parametrize("why", [errno.EEXIST, errno.EIO, errno.EMFILE])
def test_a_segment_that_gets_no_name_is_closed_at_once_and_only_once(why, monkeypatch):
    def link(number: int, path: Path) -> None:
        raise OSError(why, "no name")

    monkeypatch.setattr(module, "_link", link)
    before = open_files()
    kind = {errno.EEXIST: SharedMemoryError, errno.EIO: OSError, errno.EMFILE: TooManyFiles}[why]
    with pytest.raises(kind, match={errno.EEXIST: "owner lives", errno.EIO: "no name"}.get(why, "ulimit -n")) as raised:
        Segment.create(segment_name("t", "a"), 4096)
    own = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    assert open_files() == before + 3, "although the error still has its frames"
    del raised
    gc.collect()
    for number in own:
        os.close(number)  # raises if the number was closed meanwhile


def test_memory_that_others_take_meanwhile_is_an_error_and_not_a_signal(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_too_much", lambda folder, size: False)
    with tiny_shared_memory(tmp_path / "shm", "1m"):
        with pytest.raises(SharedMemoryError, match="needs 4.0 MiB.*--shm-size"):
            Segment.create(segment_name("t", "a"), 4 << 20)
        with Segment.create(segment_name("t", "a"), 4096) as segment, pytest.raises(OSError, match="Invalid argument"):
            segment.allocate(-1, 8)


def test_who_attaches_opens_what_it_asked_for_and_removes_nothing():
    with Segment.create(segment_name("t", "a"), 4096) as owner:
        for writable, access in ((True, os.O_RDWR), (False, os.O_RDONLY)):
            guest = Segment.attach(owner.name, writable=writable)
            before = open_files()
            guest.separate(hold=False)
            assert open_files() == before
            assert fcntl.fcntl(guest.fd, fcntl.F_GETFL) & os.O_ACCMODE == access
            guest.release()
            dead(directory() / owner.name)
            assert (directory() / owner.name).exists() and open_files() == before - 2


def test_nothing_is_made_where_there_is_no_shared_memory(monkeypatch):
    monkeypatch.setenv("JURYBOX_SHM_DIR", "/nowhere")
    with pytest.raises(SharedMemoryError, match="No such file or directory; expected a writable tmpfs"):
        Segment.create(segment_name("t", "a"), 4096)


def test_the_limit_of_shared_memory_is_exact_and_pages_may_exceed_it_that_are_allocated_later(tmp_path):
    with tiny_shared_memory(tmp_path / "shm", "1m"):
        with Segment.create(segment_name("t", "a"), 1 << 20):
            assert available_bytes() == 0
        with Segment.create(segment_name("t", "a"), 2 << 20, allocate=False) as segment:
            assert (segment.size, available_bytes()) == (2 << 20, 1 << 20)
            segment.allocate(4096, 8192)
            assert available_bytes() == (1 << 20) - 8192
    with tiny_shared_memory(tmp_path / "files", "1m,nr_inodes=1"), pytest.raises(SharedMemoryError, match="no inodes"):
        Segment.create(segment_name("t", "a"), 4096)
    with tiny_shared_memory(tmp_path / "endless", "0"), Segment.create(segment_name("t", "a"), 4096) as segment:
        assert segment.buffer[4095] == 0


def test_pages_are_mapped_also_by_a_kernel_that_cannot_be_asked_to(monkeypatch):
    with Segment.create(segment_name("t", "a"), 3 * 4096) as segment:
        monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 12345)
        segment.populate()
        full = OSError(errno.ENOMEM, "none")

        def madvise(*_: int) -> None:
            raise full

        monkeypatch.setattr(segment, "_map", SimpleNamespace(madvise=madvise))
        with pytest.raises(OSError, match="none"):
            segment.populate()


def test_sockets_of_servers_that_ended_are_swept():
    name = directory() / f"jurybox-{os.getuid()}-id"
    paths = {each: Path(f"{name}{each}.sock") for each in ("listens", "full", "ended")}
    made = {each: socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for each in paths}
    for each, path in paths.items():
        made[each].bind(str(path))
    made["listens"].listen(8)
    made["full"].listen(0)
    made["ended"].close()
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting.connect(str(paths["full"]))
    assert [dead(paths[each]) for each in ("listens", "full", "ended")] == [False, False, True]
    assert sweep() == [paths["ended"].name]
    assert not paths["ended"].exists() and sweep() == []
    for each in (*made.values(), waiting):
        each.close()
    assert sorted(sweep()) == sorted(paths[each].name for each in ("full", "listens"))


def test_a_socket_that_is_being_made_is_not_swept_at_once(monkeypatch):
    monkeypatch.setattr(module, "_unfinished", {})
    path = directory() / f"jurybox-{os.getuid()}-id{module.UNFINISHED}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(str(path))
        now = [100.0]
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
        assert not dead(path) and sweep() == []
        now[0] += module._MAKING
        assert not dead(path) and sweep() == []
        now[0] += 0.1
        assert dead(path)
        made.listen()
        assert not dead(path)
    assert sweep() == [path.name] and not path.exists()


def test_what_is_not_ours_to_judge_is_not_swept():
    (directory() / segment_name("t", "folder")).mkdir()
    (directory() / segment_name("t", "link")).symlink_to("/dev/null")
    assert sweep() == []
    assert not dead(directory() / segment_name("t", "folder")) and not dead(directory() / segment_name("t", "link"))


def test_a_segment_without_a_file_is_withdrawn_by_its_name():
    with Segment.create(segment_name("t", "a"), 4096) as segment:
        withdrawn: list[str] = []
        other = Segment(segment.name, os.dup(segment.fd), 4096, owned=True, withdraw=withdrawn.append)
        other.release()
        assert withdrawn == [segment.name] and (directory() / segment.name).exists()


def test_locks_are_of_open_files_and_bytes():
    with Segment.create(segment_name("t", "a"), 4096) as segment, Segment.attach(segment.name) as guest:
        assert module.try_lock(segment.fd, 5) and not module.try_lock(guest.fd, 5)
        assert module.try_lock(segment.fd, 5), "it is its own"
        assert module.is_locked(guest.fd, 5) and not module.is_locked(segment.fd, 5)
        assert not module.is_locked(guest.fd, 4) and not module.is_locked(guest.fd, 6)
        assert not module.try_lock(guest.fd, 5, shared=True)
        module.unlock(segment.fd, 5)
        assert module.try_lock(guest.fd, 5, shared=True) and module.try_lock(segment.fd, 5, shared=True)
        assert not module.try_lock(segment.fd, 5), "the other one shares it"
    number = os.open("/dev/null", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            module.try_lock(number, 5)  # a lock to write needs a file that is open for it
    finally:
        os.close(number)
