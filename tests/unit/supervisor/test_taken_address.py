"""The address of a server that is ending: the next server waits a moment for it."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time

import pytest

from jurybox.protocol.errors import Refused
from jurybox.server.supervisor.run import AddressTaken, _hold_address


def test_the_next_server_waits_for_one_that_is_dying(tmp_path):
    address = f"ipc://{tmp_path}/engine"
    dying = _hold_address(address)
    threading.Timer(0.3, os.close, (dying,)).start()
    fd = _hold_address(address)
    with pytest.raises(BlockingIOError), (tmp_path / "engine.lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_a_read_only_file_system_is_an_error_that_says_what_to_mount(tmp_path, monkeypatch):
    """Like docker run --read-only with /run/jurybox, whose folder exists already."""

    def refuse(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Refused, match=rf"Read-only file system.*--tmpfs {tmp_path}:mode=0700,uid=.*JURYBOX_ADDRESS"):
        _hold_address(f"ipc://{tmp_path}/engine")


def test_a_living_server_keeps_its_address(tmp_path):
    address = f"ipc://{tmp_path}/engine"
    living = _hold_address(address)
    began = time.monotonic()
    with pytest.raises(AddressTaken, match="already runs"):
        _hold_address(address)
    assert time.monotonic() - began < 30
    os.close(living)
