"""Addresses that a server listens on: which are taken, what a wrong or taken one is called, and who may connect."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from jurybox.server.settings.endpoints import (
    CannotListen,
    bind_for_own_user,
    bound_name,
    check_address,
    check_host_port,
    check_listen,
    listen,
    split_host,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("host-1.example:65535", "host-1.example", 65535),
        ("[::1]:8000", "::1", 8000),
        ("[::ffff:10.0.0.1]:00080", "::ffff:10.0.0.1", 80),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert split_host(text) == (host, port)
    assert check_host_port(text) == check_listen(text) == text


NONE_OF_THEM = ["", "host", ":80", "host:", "host:65536", "host:99999", "host:123456", "host:-1", "::1:80", "a b:80"]
NONE_OF_THEM += ["[x]:80", "host:80 ", "host:80\n", "h/x:80", "[::1]", "host:\uff18\uff10"]


@pytest.mark.parametrize("text", NONE_OF_THEM)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r'expected "host:port", such as "127.0.0.1:8000" or "\[::1\]:8000"$'):
        check_host_port(text)
    if text:
        with pytest.raises(ValueError, match=r'"\[::1\]:8000", or "" for off$'):
            check_listen(text)
    else:
        assert check_listen(text) == ""


def test_a_bound_address_of_ipv6_has_brackets() -> None:
    assert (bound_name("::1", 80), bound_name("10.0.0.1", 80)) == ("[::1]:80", "10.0.0.1:80")


LONGEST = "/" + "a" * 103


@pytest.mark.parametrize("text", ["ipc:///run/jurybox/engine", f"ipc://{LONGEST}", "tcp://10.0.0.5:1", "tcp://[::1]:5"])
def test_a_servers_address_is_a_path_or_a_port(text: str) -> None:
    assert check_address(text) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ipc://engine", "expected an absolute path"),
        ("ipc:///", "expected an absolute path"),
        ("ipc:///run/..", "expected an absolute path"),
        (f"ipc://{LONGEST}b", "expected a path of at most 104 bytes"),
        (f"ipc:///{'ä' * 52}", "expected a path of at most 104 bytes"),
        ("127.0.0.1:80", 'expected "ipc:///absolute/path" or "tcp://host:port"'),
        ("tcp://10.0.0.5", 'expected "tcp://host:port", such as'),
        ("tcp://10.0.0.5:0", "expected a port of 1 to 65535"),
    ],
)
def test_a_wrong_address_of_a_server_is_refused_with_what_was_expected(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_address(text)


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


@pytest.mark.parametrize(
    ("setting", "scheme", "remedy"),
    [
        ("server.http", "http://", "set server.http to another host:port, or to '' for no HTTP"),
        ("server.grpc", "grpc://", "set server.grpc to another host:port, or to '' for no gRPC"),
        ("server.tcp", "tcp://", "set server.tcp to another host:port, or to '' for no relay"),
        ("dialects.slime.port", "http://", "set another dialects.slime.port"),
        ("robots.arm.listen", "", "set another robots.arm.listen"),
    ],
)
def test_a_taken_port_is_named_with_the_setting_to_change(taken: str, setting: str, scheme: str, remedy: str) -> None:
    with pytest.raises(CannotListen) as refused:
        listen(taken, setting)
    port = taken.partition(":")[2]
    assert str(refused.value) == (
        f"cannot listen on {scheme}{taken}: port {port} is in use by another program; {remedy}"
    )
    assert isinstance(refused.value.__cause__, OSError)


def test_an_address_of_another_host_is_named_with_the_systems_reason() -> None:
    with pytest.raises(
        CannotListen, match=r"cannot listen on http://192\.0\.2\.1:0: Cannot assign requested address; "
    ):
        listen("192.0.2.1:0", "server.http")


def test_a_port_that_was_served_a_moment_ago_is_listened_on_at_once() -> None:
    with listen("127.0.0.1:0", "server.http") as first:
        port = first.getsockname()[1]
        assert port
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = first.accept()
        served.close()  # this end closes first, so the port waits for what may still come
    client.close()
    with listen(f"127.0.0.1:{port}", "server.http") as again:
        assert again.getsockname()[1] == port
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_a_socket_of_zeromq_is_bound_to_a_port_as_it_is() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        bind_for_own_user(router, "tcp://127.0.0.1:*")
        assert router.getsockopt(zmq.LAST_ENDPOINT).startswith(b"tcp://127.0.0.1:")


def test_a_socket_of_zeromq_in_a_folder_is_its_users_alone_and_the_umask_stays(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
            bind_for_own_user(router, f"ipc://{tmp_path}/engine")
            assert stat.S_IMODE((tmp_path / "engine").stat().st_mode) == 0o600
            assert os.umask(0o022) == 0o022
            dealer.connect(f"ipc://{tmp_path}/engine")
            dealer.send(b"from the same user")
            assert router.poll(30_000)
            dealer.setsockopt(zmq.LINGER, 0)
            with pytest.raises(zmq.ZMQError):
                bind_for_own_user(router, f"ipc://{tmp_path}/absent/engine")
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


class Zmq:
    """A socket of ZeroMQ that notes its options, and the mode of the file that it is bound to."""

    def __init__(self, mode: int) -> None:
        self.users, self.mode, self.modes = set[int](), mode, list[int]()

    def setsockopt(self, option: int, value: int) -> None:
        assert option == zmq.IPC_FILTER_UID and not self.modes, "before anybody can connect"
        self.users.add(value)

    def bind(self, address: str) -> None:
        path = Path(address.removeprefix("ipc://"))
        path.touch()
        self.modes.append(stat.S_IMODE(path.stat().st_mode))
        path.chmod(self.mode)


@pytest.mark.parametrize("mode", [0o600, 0o666], ids=["as made", "extended by the folder"])
def test_a_socket_in_a_folder_is_never_open_to_others_and_takes_its_user_and_root_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    made: Any = Zmq(mode)
    bind_for_own_user(made, f"ipc://{tmp_path}/engine")
    assert made.users == {1234, 0} and made.modes == [0o600]
    assert stat.S_IMODE((tmp_path / "engine").stat().st_mode) == 0o600
