"""Descriptors: how many are left, and those that another process sends."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.descriptors import open_files

from jurybox.protocol import descriptors
from jurybox.protocol.descriptors import SocketPath, ask_for_descriptors, exhausted, raise_limit, remedy, require
from jurybox.protocol.errors import TooManyFiles

ME = os.getuid()


def soon() -> float:
    return time.monotonic() + 60


class Host:
    """Listens at a path, and answers one request with a byte and some descriptors."""

    def __init__(self, path: Path, status: bytes = b"k", descriptors: int = 0, *, deaf: bool = False) -> None:
        self.asked = b""
        self._status, self._count, self._deaf = status, descriptors, deaf
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with SocketPath(path) as short:
            self._socket.bind(short)
        self._socket.listen(1)
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            connection.settimeout(60)
            self.asked = connection.recv(100)
            if self._deaf:
                return
            if not self.asked:
                return
            pairs = [os.pipe() for _ in range(self._count)]
            socket.send_fds(connection, [self._status], [reading for reading, _ in pairs])
            for number, (reading, writing) in enumerate(pairs):
                os.write(writing, b"%d" % number)
                os.close(reading)
                os.close(writing)

    def close(self) -> None:
        self._thread.join(60)
        self._socket.close()


@pytest.fixture
def asking():
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        yield connection


def test_a_request_is_answered_with_a_byte_and_open_descriptors(tmp_path, asking):
    host = Host(tmp_path / "s", descriptors=4)
    before = open_files()
    answer = ask_for_descriptors(asking, tmp_path / "s", ME, b"segment 3", soon())
    host.close()
    assert answer is not None
    status, received = answer
    assert (status, host.asked) == (b"k", b"segment 3")
    assert [os.read(fd, 9) for fd in received] == [b"0", b"1", b"2", b"3"]
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in received:
        os.close(fd)
    assert open_files() == before - 1  # the host's socket is closed


def test_more_descriptors_than_this_process_may_have_are_an_error_and_none_stays_open(tmp_path, asking):
    host = Host(tmp_path / "s", descriptors=9)
    before = open_files()
    with pytest.raises(OSError) as refused:
        ask_for_descriptors(asking, tmp_path / "s", ME, b"segment 3", soon())
    host.close()
    assert exhausted(refused.value)
    assert open_files() == before - 1  # the host's socket is closed


@pytest.mark.parametrize("killed", [False, True])
def test_where_no_process_listens_there_is_no_answer(tmp_path, asking, killed):
    if killed:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listened:
            listened.bind(str(tmp_path / "s"))
    assert ask_for_descriptors(asking, tmp_path / "s", ME, b"x", soon()) is None


def test_a_host_that_ends_or_is_slow_may_be_asked_again(tmp_path, asking):
    host = Host(tmp_path / "s", deaf=True)
    status, received = ask_for_descriptors(asking, tmp_path / "s", ME, b"x", soon()) or (b"-", [0])
    host.close()
    assert (status, received) == (b"", [])
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other,
    ):
        busy.bind(str(tmp_path / "t"))
        busy.listen(1)
        assert ask_for_descriptors(other, tmp_path / "t", ME, b"x", time.monotonic() - 5) == (b"", [])


def test_another_users_process_is_asked_nothing(tmp_path, asking, monkeypatch):
    monkeypatch.setattr(descriptors, "peer_user", lambda connection: ME + 1)
    host = Host(tmp_path / "s")
    with pytest.raises(PermissionError, match=f"is of user {ME + 1}"):
        ask_for_descriptors(asking, tmp_path / "s", ME, b"a secret", soon())
    asking.close()
    host.close()
    assert host.asked == b""


def test_the_kernel_says_whose_the_peer_is():
    one, other = socket.socketpair()
    with one, other:
        assert descriptors.peer_user(one) == ME


def test_a_path_is_used_as_it_is_unless_it_is_too_long_for_a_socket(tmp_path, asking):
    fits = tmp_path / ("s" * (107 - len(str(tmp_path)) - 1))
    with SocketPath(fits) as short:
        assert short == str(fits)
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    before = open_files()
    with SocketPath(folder / "s") as short:
        assert len(short) < 107
        assert Path(short).parent.samefile(folder)
        assert open_files() == before + 1
    assert open_files() == before
    host = Host(folder / "s")
    assert ask_for_descriptors(asking, folder / "s", ME, b"x", soon()) == (b"k", [])
    host.close()


def test_a_path_of_one_byte_more_than_a_socket_takes_is_too_long(tmp_path):
    long = tmp_path / ("s" * (108 - len(str(tmp_path)) - 1))
    with SocketPath(long) as short:
        assert short != str(long)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(short)
    assert long.exists()


def test_files_that_are_left_are_counted_without_keeping_any(monkeypatch):
    before, eventfd, left = open_files(), os.eventfd, 25

    # Not by setrlimit: libzmq, of which this process may have threads, aborts if there are no descriptors.
    def limited(*given: int) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        left -= 1
        return eventfd(*given)

    monkeypatch.setattr(os, "eventfd", limited)
    require(20, "a test")
    assert open_files() == before
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"a test takes 20 files, 5 can be had: this process may have {soft} files open"
    with pytest.raises(TooManyFiles, match=says):
        require(20, "a test")
    assert open_files() == before


def test_another_failure_than_too_many_files_is_not_taken_for_it(monkeypatch):
    def fails(*_: object) -> int:
        raise OSError(errno.ENODEV, "no such device")

    monkeypatch.setattr(os, "eventfd", fails)
    with pytest.raises(OSError, match="no such device") as error:
        require(1, "a test")
    assert not isinstance(error.value, TooManyFiles)


@pytest.mark.parametrize(("number", "is_it"), [(errno.EMFILE, True), (errno.ENFILE, True), (errno.ENOENT, False)])
def test_too_many_files_of_the_process_or_the_machine_are_one_error(number, is_it):
    assert exhausted(OSError(number, "")) is is_it


@pytest.mark.parametrize(("limits", "set_to"), [((1024, 4096), [(4096, 4096)]), ((4096, 4096), [])])
def test_the_limit_is_raised_to_what_the_user_may_have(monkeypatch, limits, set_to):
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: calls.append(pair))
    assert raise_limit() == 4096
    assert calls == set_to
    assert f"may have {limits[0]} files" in remedy()
