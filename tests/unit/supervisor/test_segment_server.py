"""Sealed memory passed over a socket: its size cannot change, and only its owner's user gets it."""

import errno
import fcntl
import os
import resource
import secrets
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from tests.serving import segments, wait_until

from jurybox.protocol.errors import SharedMemoryError, TooManyFiles
from jurybox.protocol.segment import Segment, directory, is_locked, segment_name, socket_of, sweep, try_lock
from jurybox.protocol.shm_rings import ShmRings
from jurybox.server.memory import available_memory
from jurybox.server.supervisor import segment_server
from jurybox.server.supervisor.segment_server import SegmentServer

pytestmark = pytest.mark.usefixtures("empty_shared_memory")

SIZE = 8192


@pytest.fixture
def server():
    owner = secrets.token_hex(4)
    with SegmentServer(owner) as server:
        server.owner = owner
        yield server


@pytest.fixture
def segment(server):
    segment = server.create(segment_name(server.owner, "arena", 1), SIZE)
    yield segment
    segment.close()
    segment.unlink()


def run(code, *arguments, check=True, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)], text=True, capture_output=True,
        check=check, **options,
    )  # fmt: skip


def test_a_process_reads_what_another_writes(segment):
    code = """
        import sys
        from jurybox.protocol.segment import Segment
        segment = Segment.attach(sys.argv[1])
        segment.array("u1", (4,))[:] = (1, 2, 3, 4)
        print(segment.size, segment.owned, segment.owner_lives())
    """
    assert run(code, segment.name).stdout.split() == [str(SIZE), "False", "True"]
    assert segment.array("u1", (5,)).tolist() == [1, 2, 3, 4, 0]


def test_another_user_gets_nothing_and_is_not_waited_for(server, segment, monkeypatch):
    monkeypatch.setattr(segment_server, "peer_user", lambda connection: os.getuid() + 1)
    monkeypatch.setattr(segment_server, "_SILENT", 1000.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(str(socket_of(segment.name)))
        assert connection.recv(1) == b"", "closed, though no request came"


def test_its_size_cannot_change(segment):
    attached = Segment.attach(segment.name)
    for descriptor in (attached.fd, segment.fd):
        for size in (0, 100, 2 * SIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
            with pytest.raises(PermissionError):
                os.truncate(f"/proc/self/fd/{descriptor}", size)
        with pytest.raises(PermissionError):
            os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_TRUNC)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # nor its writers
    assert segment.array("u1", (SIZE,)).sum() == 0
    attached.close()


def test_watchers_cannot_write(segment):
    watching = Segment.attach(segment.name, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        watching.array("u1", (1,))[0] = 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(watching.fd, b"x")
    watching.close()


def test_locks_are_each_attachments_own(segment):
    one, other = Segment.attach(segment.name), Segment.attach(segment.name)
    assert try_lock(one.fd, 7)
    assert not try_lock(other.fd, 7)
    assert is_locked(segment.fd, 7)
    one.close()
    assert try_lock(other.fd, 7)
    other.close()


def test_the_owners_lock_ends_with_the_owner_even_if_others_are_attached():
    code = """
        import sys
        from jurybox.protocol.segment import segment_name
        from jurybox.server.supervisor.segment_server import SegmentServer
        segment = SegmentServer(sys.argv[1]).create(segment_name(sys.argv[1], "scoreboard"), 4096)
        print("made", flush=True)
        sys.stdin.read()
    """
    owner = secrets.token_hex(4)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        attached = [Segment.attach(segment_name(owner, "scoreboard"), writable=bool(n % 2)) for n in range(4)]
        # A client that does not receive the answer: it waits in a socket, with its descriptors.
        unread = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unread.connect(str(socket_of(segment_name(owner, "scoreboard"))))
        unread.send(b"w" + segment_name(owner, "scoreboard").encode())
        wait_until(lambda: unread.recv(1, socket.MSG_PEEK), 10)
        assert all(each.owner_lives() for each in attached)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not any(each.owner_lives() for each in attached)
    assert attached[0].array("u1", (4096,)).sum() == 0  # the memory exists as long as a process uses it
    with pytest.raises(SharedMemoryError, match="its owner may be gone"):
        Segment.attach(segment_name(owner, "scoreboard"))
    socket_file = socket_of(segment_name(owner, "scoreboard"))
    assert socket_file.is_socket()
    assert socket_file.name in sweep()
    assert not socket_file.exists()
    unread.close()


def test_a_living_owners_socket_is_not_swept(server, segment):
    assert sweep() == []
    assert Segment.attach(segment.name).size == SIZE


def test_nothing_is_left_in_any_file_system():
    before = segments()
    owner = secrets.token_hex(4)
    with SegmentServer(owner) as server:
        segment = server.create(segment_name(owner, "scoreboard"), SIZE)
        assert segments() - before == {socket_of(segment.name).name}
        assert server.sizes() == {segment.name: SIZE}
        assert stat.S_IMODE(socket_of(segment.name).stat().st_mode) == 0o600
        segment.close()
        segment.unlink()
        assert server.sizes() == {}
        with pytest.raises(SharedMemoryError, match="no such segment"):
            Segment.attach(segment.name)
    assert segments() == before


def test_the_socket_is_private_with_any_umask():
    before = os.umask(0)
    try:
        owner = secrets.token_hex(4)
        with SegmentServer(owner):
            assert stat.S_IMODE(socket_of(segment_name(owner, "scoreboard")).stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_a_folder_with_a_long_name_does(tmp_path, monkeypatch):
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(folder))
    with SegmentServer("long") as server:
        name = server.create(segment_name("long", "scoreboard"), SIZE).name
        assert Segment.attach(name).size == SIZE
        assert sweep() == []
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_an_error_that_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(tmp_path / "missing"))
    with pytest.raises(SharedMemoryError, match="JURYBOX_SHM_DIR"):
        SegmentServer("nowhere")


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_gets_nothing_though_modes_let_him_in(segment):
    path = socket_of(segment.name)
    path.chmod(0o777)
    above = [folder for folder in path.parents if not folder.stat().st_mode & 0o001]
    before = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in above}
    code = """
        import os, socket, sys
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.setgroups([]); os.setgid(12345); os.setuid(12345)
        connection.settimeout(20)
        connection.connect(sys.argv[1])
        try:
            connection.send(b"w" + sys.argv[2].encode())
            print(socket.recv_fds(connection, 1, 4)[:2])
        except OSError as error:
            print(type(error).__name__)
    """
    try:
        for folder in above:
            folder.chmod(before[folder] | 0o011)
        said = run(code, path, segment.name).stdout.strip()
    finally:
        for folder, mode in before.items():
            folder.chmod(mode)
    assert said in ("(b'', [])", "ConnectionResetError", "BrokenPipeError"), said


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_a_socket_of_another_user_is_not_used(tmp_path, monkeypatch):
    """In /dev/shm all users may create files: one with our server's name passes its own memory."""
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(tmp_path))
    name = segment_name("dead", "scoreboard")
    code = """
        import os, socket, sys
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(sys.argv[1])
        os.setgroups([]); os.setgid(12345); os.setuid(12345)
        listener.listen(4)
        print("listening", flush=True)
        while True:
            connection = listener.accept()[0]
            connection.recv(256)
            socket.send_fds(connection, [b"\\0"], [os.memfd_create("false")])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(socket_of(name))], stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        with pytest.raises(SharedMemoryError, match="is of user 12345"):
            Segment.attach(name)
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_file_of_another_user_is_not_mapped(tmp_path, monkeypatch):
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(tmp_path))
    file = tmp_path / segment_name("dead", "scoreboard")
    file.write_bytes(bytes(SIZE))
    os.chown(file, 12345, 12345)
    with pytest.raises(SharedMemoryError, match="is of user 12345, not of its owner"):
        Segment.attach(file.name)


def test_a_file_without_content_is_an_error_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(tmp_path))
    (tmp_path / segment_name("cut", "scoreboard")).touch()
    with pytest.raises(SharedMemoryError, match="cannot be opened"):
        Segment.attach(segment_name("cut", "scoreboard"))


def test_silence_and_floods_do_not_prevent_attaching(server, segment):
    path = str(socket_of(segment.name))
    silent = []
    before = len(os.listdir("/proc/self/fd"))
    for number in range(300):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(path)
        if number % 3 == 0:
            connection.send(os.urandom(200))  # not a request
        silent.append(connection)
    began = time.monotonic()
    for _ in range(20):
        Segment.attach(segment.name).close()
    assert time.monotonic() - began < 20
    # Of 300 there are 300 ends here, and a bounded number on the server's side, in this same process.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) - before <= 300 + 80, 30)
    for connection in silent:
        connection.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, 30)


@pytest.mark.parametrize(
    "request_",
    [b"", b"w", b"w../../etc/passwd", b"wjurybox-0-x-scoreboard-0", b"x" * 5000, b"w\xff\xfe", b"w" + b"\0" * 40],
)
def test_no_request_ends_the_thread(server, segment, request_):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(socket_of(segment.name)))
        connection.send(request_)
        connection.settimeout(10)
        assert socket.recv_fds(connection, 16, 4)[1] == []
    assert Segment.attach(segment.name).size == SIZE


def test_a_server_that_is_stopped_is_an_error_in_time(monkeypatch):
    code = """
        import os, signal, sys
        from jurybox.protocol.segment import segment_name
        from jurybox.server.supervisor.segment_server import SegmentServer
        segment = SegmentServer(sys.argv[1]).create(segment_name(sys.argv[1], "scoreboard"), 4096)
        print("made", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        print("on", flush=True)
        sys.stdin.read()
    """
    owner = secrets.token_hex(4)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        process.stdout.readline()
        wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().split(")")[1].split()[0] == "T", 30)
        began = time.monotonic()
        with pytest.raises(SharedMemoryError, match="stopped or overloaded"):
            Segment.attach(segment_name(owner, "scoreboard"))
        assert time.monotonic() - began < 30
        assert sweep() == []  # it lives
        process.send_signal(signal.SIGCONT)
        process.stdout.readline()
        assert Segment.attach(segment_name(owner, "scoreboard")).size == 4096
    finally:
        process.kill()
        process.wait()
        sweep()


def test_too_few_descriptors_are_named_as_such(segment):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        highest = max(map(int, os.listdir("/proc/self/fd"))) + 4
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        with pytest.raises(OSError, match="Too many"):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(TooManyFiles, match="ulimit -n"):
            Segment.attach(segment.name)
    finally:
        for number in taken:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert Segment.attach(segment.name).size == SIZE


def test_a_ring_segments_pipe_wakes_attached_clients(server):
    rings = server.create_rings(segment_name(server.owner, "rings", 1), SIZE)
    engine, client = ShmRings.attach(rings.segment.name), ShmRings.attach(rings.segment.name)
    os.write(client.pipe, b"!")
    assert os.read(engine.pipe, 16) == b"!"
    client.close()
    with pytest.raises(BlockingIOError):
        os.read(engine.pipe, 16)  # not the end of the file, although all writers are closed
    engine.close()
    rings.close()
    with pytest.raises(SharedMemoryError):
        ShmRings.attach(rings.segment.name)
    plain = server.create(segment_name(server.owner, "arena", 2), SIZE)
    with pytest.raises(SharedMemoryError, match="no rings"):
        ShmRings.attach(plain.name)
    plain.close()
    plain.unlink()


def test_more_than_there_is_memory_for_is_refused_before_anybody_is_ended(server):
    with pytest.raises(SharedMemoryError, match=r"needs 1048576\.0 MiB, .* MiB are left of .*fewer rows"):
        server.create(segment_name(server.owner, "arena", 9), 1 << 40)
    assert server.sizes() == {}


def test_the_tightest_of_machine_and_control_groups_counts(tmp_path):
    mib = 1 << 20
    (tmp_path / "proc" / "self").mkdir(parents=True)
    group = tmp_path / "cgroup" / "a" / "b"
    group.mkdir(parents=True)
    meminfo = tmp_path / "proc" / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\nSwapFree: 96 kB\n")

    def found():
        return available_memory(tmp_path / "proc", tmp_path / "cgroup")

    assert found() == (4096 << 10, "the machine's memory")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/a/b\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1\n")
    assert found()[1] == "the machine's memory"
    (group.parent / "memory.max").write_text(str(10 * mib))
    (group.parent / "memory.current").write_text(str(8 * mib))
    assert found() == (2 * mib, f"the limit {group.parent}/memory.max")
    (group.parent / "memory.stat").write_text(f"anon 5\ninactive_file {mib}\nactive_file {mib // 2}\n")
    assert found()[0] == 7 * mib // 2
    meminfo.write_text("MemAvailable: 1024 kB\n")
    assert found() == (mib, "the machine's memory")
    # The first version, as a container sees it: its own group at the top, its path from outside.
    (tmp_path / "proc" / "self" / "cgroup").write_text("5:cpu:/docker/x\n4:memory:/docker/x\n")
    (tmp_path / "cgroup" / "memory").mkdir()
    (tmp_path / "cgroup" / "memory" / "memory.limit_in_bytes").write_text(str(mib))
    (tmp_path / "cgroup" / "memory" / "memory.usage_in_bytes").write_text(str(mib))
    assert found() == (0, f"the limit {tmp_path}/cgroup/memory/memory.limit_in_bytes")


def test_missing_columns_are_errors_with_their_place(server, monkeypatch):
    monkeypatch.setattr(segment_server, "available_memory", lambda: (20 << 20, "the limit /x/memory.max"))
    with pytest.raises(SharedMemoryError, match=r"needs 8\.0 MiB, 20\.0 MiB are left of the limit /x/memory\.max"):
        server.create(segment_name(server.owner, "arena", 1), 8 << 20)
    small = server.create(segment_name(server.owner, "arena", 1), 1 << 20)
    np.testing.assert_array_equal(small.array("u1", (4,)), 0)
    small.close()
    assert directory().is_dir()


@pytest.mark.parametrize(
    ("call", "number", "kind", "said"),
    [
        ("fcntl.fcntl", errno.EINVAL, SharedMemoryError, f"cannot create shared memory .* of {SIZE} bytes: Invalid"),
        ("os.pipe2", errno.EMFILE, TooManyFiles, "cannot create the pipe of .*ulimit -n"),
    ],
)
def test_a_segment_that_cannot_be_made_leaves_nothing_behind(server, monkeypatch, call, number, kind, said):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    name, before = segment_name(server.owner, "rings", 1), sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(kind, match=said):
            server.create_rings(name, SIZE)
    assert sorted(os.listdir("/proc/self/fd")) == before and server.sizes() == {}
    rings = server.create_rings(name, SIZE)
    assert server.sizes() == {name: SIZE}
    rings.close()
    assert server.sizes() == {}


def test_a_server_without_a_descriptor_says_so_and_keeps_none_of_those_that_it_had_opened(server, monkeypatch):
    rings = server.create_rings(segment_name(server.owner, "rings", 1), SIZE)
    opened, real = [], os.open

    def second_fails(path, *arguments, **others):
        if str(path).startswith("/proc/self/fd/"):
            opened.append(path)
            if len(opened) == 2:
                raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *arguments, **others)

    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", second_fails)
        with pytest.raises(SharedMemoryError, match="has no descriptor left"):
            ShmRings.attach(rings.segment.name)
    wait_until(lambda: sorted(os.listdir("/proc/self/fd")) == before, 20)
    ShmRings.attach(rings.segment.name).close()
    rings.close()


def test_a_server_that_was_closed_hands_out_nothing_and_may_be_closed_again():
    server = SegmentServer(owner := secrets.token_hex(4))
    segment = server.create(segment_name(owner, "arena", 1), SIZE)
    server.close()
    assert not socket_of(segment.name).exists() and server.sizes() == {}
    with pytest.raises(SharedMemoryError):
        Segment.attach(segment.name)
    server.close()
    segment.close()
