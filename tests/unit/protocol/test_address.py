import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jurybox.protocol.address import (
    default_address,
    engine_address,
    ipc_path,
    is_loopback,
    out_of_reach,
    prepare_folder,
)
from jurybox.protocol.errors import Refused


def test_the_environment_decides_then_the_users_runtime_folder_then_tmp(monkeypatch, tmp_path):
    monkeypatch.setenv("JURYBOX_ADDRESS", "ipc:///somewhere/else")
    assert default_address() == "ipc:///somewhere/else"
    monkeypatch.delenv("JURYBOX_ADDRESS")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_address() == f"ipc://{tmp_path}/jurybox/engine"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert default_address() == f"ipc:///tmp/jurybox-{os.getuid()}/engine"


def test_engines_are_beside_the_server():
    assert engine_address("ipc:///run/x", 2) == "ipc:///run/x-2"
    assert engine_address("tcp://127.0.0.1:7000", 2) == "tcp://127.0.0.1:7003"
    assert ipc_path("tcp://127.0.0.1:7000") is None


def test_the_folder_is_made_for_its_user_alone(tmp_path):
    before = os.umask(0)
    try:
        prepare_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o755, 0o770, 0o711])
def test_a_folder_that_others_may_enter_is_refused(tmp_path, mode):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    (tmp_path / "link").symlink_to(folder)
    for name in ("open", "link"):
        with pytest.raises(Refused, match=f"mode {mode:04o}.*chmod 700"):
            prepare_folder(tmp_path / name)
    folder.chmod(0o700)
    prepare_folder(folder)


def test_a_folder_that_others_may_put_another_in_the_place_of_is_refused(tmp_path):
    (tmp_path / "open" / "ours").mkdir(parents=True)
    (tmp_path / "open" / "ours").chmod(0o700)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(Refused, match=f"chmod o-w {tmp_path}/open"):
        prepare_folder(tmp_path / "open" / "ours")
    (tmp_path / "open").chmod(0o1777)  # like /tmp, where all users may move their own files
    prepare_folder(tmp_path / "open" / "ours")


@pytest.mark.parametrize("mode", [0o777, 0o2770, 0o2777])
def test_a_pods_folder_is_accepted_if_that_is_said_and_the_refusal_says_how(tmp_path, mode):
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod").chmod(mode)
    with pytest.raises(Refused, match="a pod's emptyDir.*server.shared_folder = true"):
        prepare_folder(tmp_path / "pod")
    prepare_folder(tmp_path / "pod", shared=True)
    with pytest.raises(Refused, match="no folder"):
        prepare_folder(Path("/dev/null"), shared=True)


def test_a_folder_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="docker run --tmpfs .*JURYBOX_ADDRESS"):
        prepare_folder(tmp_path / "file" / "folder")


def test_a_folder_or_link_of_another_user_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("giving files away needs root")
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 12345, 12345)
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    for name in ("theirs", "link"):
        with pytest.raises(Refused, match="belongs to user 12345"):
            prepare_folder(tmp_path / name)


def test_a_missing_or_foreign_socket_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        assert out_of_reach(f"tcp://{where}") == out_of_reach("tcp://192.0.2.1:7") == ""
    assert out_of_reach(f"tcp://{where}") == f"; nothing listens on {where}"
    assert f"there is no socket {tmp_path}/engine here" in out_of_reach(f"ipc://{tmp_path}/engine")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engine"))
        listener.listen()
        assert out_of_reach(f"ipc://{tmp_path}/engine") == ""
    assert f"nothing listens on {tmp_path}/engine: its server was killed" in out_of_reach(f"ipc://{tmp_path}/engine")
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    asked = (
        "import os, sys; from jurybox.protocol.address import out_of_reach; os.setuid(12345)\n"
        "print(out_of_reach(sys.argv[1]))"
    )
    with tempfile.TemporaryDirectory() as theirs:  # mode 0700, as the server makes its folder
        done = subprocess.run(
            [sys.executable, "-c", asked, f"ipc://{theirs}/engine"], capture_output=True, text=True, check=False
        )
    assert f"{theirs}/engine is closed to user 12345: run this process as the server's user" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("mode", "what"), [(0o750, "enter"), (0o701, "enter"), (0o720, "write to"), (0o702, "write to")]
)
def test_the_refusal_of_an_open_folder_says_what_others_may_do(tmp_path, mode, what):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(Refused, match=rf"others may {what} {tmp_path}/open \(mode {mode:04o}\): chmod 700"):
        prepare_folder(tmp_path / "open")


@pytest.mark.parametrize(
    ("host", "ours"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("", False), ("*", False),
     ("0.0.0.0", False), ("192.0.2.1", False), ("localhost.example.org", False)],
)  # fmt: skip
def test_an_address_of_this_host_alone_is_known_by_its_number_or_as_localhost(host, ours):
    assert is_loopback(host) == ours
