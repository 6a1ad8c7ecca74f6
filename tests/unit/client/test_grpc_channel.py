"""Channels of gRPC: who uses which, when they are closed, what every call carries, and what becomes of failures."""

from __future__ import annotations

import grpc
import pytest

from jurybox.client.remote import grpc_channel
from jurybox.client.remote.grpc_channel import (
    CODE,
    Channels,
    authority_of,
    failure,
    host_and_port,
    raised,
    through_proxy,
    token_metadata,
)
from jurybox.client.remote.infer_calls import Failed
from jurybox.protocol import open_inference_pb2 as pb
from jurybox.protocol.errors import Busy, Code, Refused, ServerGone


class Channel:
    """A channel whose calls do what `act` says, and return its answer."""

    def __init__(self):
        self.closed, self.calls, self.paths, self.act = 0, [], [], lambda: b""

    def unary_unary(self, path, **more):
        self.paths.append(path)

        def call(message, **options):
            self.calls.append((path, message, options))
            return self.act()

        return call

    def close(self):
        self.closed += 1


@pytest.fixture
def opened(monkeypatch):
    made = []

    def open_channel(address, tls_ca):
        made.append(Channel())
        made[-1].given = address, tls_ca
        return made[-1]

    monkeypatch.setattr(grpc_channel, "open_channel", open_channel)
    return made


@pytest.fixture
def channels(opened):
    return Channels("grpc://there:1", (("a", "b"),), "ca.pem")


def test_a_call_carries_the_metadata_and_its_time_and_finds_its_method_once(opened, channels):
    opened[0].act = lambda: pb.ServerLiveResponse(live=True).SerializeToString()
    for wait in (False, True):
        assert channels.call("ServerLive", pb.ServerLiveRequest(), 3.0, wait_for_ready=wait).live
    path = "/inference.GRPCInferenceService/ServerLive"
    options = {"timeout": 3.0, "metadata": (("a", "b"),)}
    assert opened[0].calls == [(path, b"", options | {"wait_for_ready": wait}) for wait in (None, True)]
    assert opened[0].paths == [path] and len(opened) == 1 and opened[0].given == ("grpc://there:1", "ca.pem")
    channels.call("Get", pb.ServerLiveRequest(), 3.0)
    assert opened[0].paths[1] == "/jurybox.protocol.ServerStatus/Get"


def test_a_call_within_another_has_a_channel_of_its_own_and_both_are_used_again(opened, channels):
    opened[0].act = lambda: channels.ask("/b", b"", 1.0)
    assert channels.ask("/a", b"", 1.0) == b"" and [channel.paths for channel in opened] == [["/a"], ["/b"]]
    opened[0].act = opened[1].act
    for _ in range(3):
        channels.ask("/a", b"", 1.0)
    assert len(opened) == 2 and not opened[0].closed and not opened[1].closed


def fail(error):
    def act():
        raise error

    return act


def test_a_channel_is_used_again_after_a_call_that_failed_and_closed_after_one_that_was_interrupted(opened, channels):
    opened[0].act = fail(Failed(grpc.StatusCode.UNAVAILABLE, "gone"))
    for _ in range(2):
        with pytest.raises(grpc.RpcError):
            channels.ask("/a", b"", 1.0)
    assert len(opened) == 1
    opened[0].act = fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        channels.ask("/a", b"", 1.0)
    assert opened[0].closed
    assert channels.ask("/a", b"", 1.0) == b"" and len(opened) == 2 and not opened[1].closed


def test_channels_are_closed_with_their_connection_and_those_of_calls_under_way_at_their_end(opened, channels):
    lasting = channels.lasting()

    def close():
        channels.close()
        assert channels.closed and lasting.closed and not opened[0].closed
        return b""

    opened[0].act = close
    channels.ask("/a", b"", 1.0)
    assert opened[0].closed == 1
    for ask in (lambda: channels.ask("/a", b"", 1.0), channels.lasting, channels.open):
        with pytest.raises(Refused, match="this connection was closed: connect again"):
            ask()
    assert len(opened) == 2


def test_a_channel_for_streams_that_opens_while_its_connection_closes_is_closed(opened, channels, monkeypatch):
    def late(*_):
        channels.close()
        opened.append(Channel())
        return opened[-1]

    monkeypatch.setattr(grpc_channel, "open_channel", late)
    with pytest.raises(Refused, match="this connection was closed"):
        channels.lasting()
    assert opened[-1].closed


# ---- what a connection is made with


@pytest.mark.parametrize(
    ("address", "token", "sent"),
    [
        ("grpc://127.0.0.1:1", None, "of-env"),
        ("grpcs://example.com:1", None, "of-env"),
        ("grpc://example.com:1", None, None),  # never over a network unencrypted
        ("grpc://example.com:1", "given", "given"),
        ("grpc://127.0.0.1:1", "", None),
    ],
)
def test_a_token_of_the_environment_is_sent_to_this_host_or_encrypted(monkeypatch, address, token, sent):
    monkeypatch.setenv("JURYBOX_TOKEN", "of-env")
    assert token_metadata(address, token) == ((("authorization", f"Bearer {sent}"),) if sent else ())
    monkeypatch.delenv("JURYBOX_TOKEN")
    assert bool(token_metadata(address, token)) == (token == "given")


def test_an_authority_is_a_file_or_its_bytes_or_that_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("JURYBOX_TLS_CA", raising=False)
    (file := tmp_path / "ca.pem").write_bytes(b"ca")
    assert authority_of(None) is None and authority_of(b"given") == b"given" and authority_of(str(file)) == b"ca"
    with pytest.raises(Refused, match="^tls_ca='.*none.pem' cannot be read: No such file"):
        authority_of(str(tmp_path / "none.pem"))
    monkeypatch.setenv("JURYBOX_TLS_CA", str(file))
    assert authority_of(None) == b"ca"
    monkeypatch.setenv("JURYBOX_TLS_CA", str(tmp_path))
    with pytest.raises(Refused, match="^JURYBOX_TLS_CA='.*' cannot be read: Is a directory; expected a PEM file"):
        authority_of(None)


def test_a_host_has_no_brackets():
    assert host_and_port("grpc://[::1]:80") == ("::1", "80") and host_and_port("grpcs://a.b:8001") == ("a.b", "8001")


@pytest.mark.parametrize(
    ("variables", "address", "named"),
    [
        ({}, "grpc://a.example.com:1", None),
        ({"http_proxy": "http://u:p@proxy:3"}, "grpc://a.example.com:1", "http_proxy"),
        ({"https_proxy": "proxy:3", "http_proxy": "other:1"}, "grpc://a.example.com:1", "https_proxy"),
        ({"http_proxy": "proxy:3"}, "grpc://127.0.0.1:1", None),
        ({"http_proxy": "proxy:3", "no_proxy": "b.org, example.com"}, "grpc://a.example.com:1", None),
        ({"http_proxy": "proxy:3", "no_proxy": ",b.org,"}, "grpc://a.example.com:1", "http_proxy"),
        ({"http_proxy": "proxy:3", "no_grpc_proxy": "x", "no_proxy": "example.com"}, "grpc://a.example.com:1",
         "http_proxy"),
    ],
)  # fmt: skip
def test_an_error_names_the_proxy_that_grpc_uses(monkeypatch, variables, address, named):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = through_proxy(address)
    assert said == ("" if named is None else (
        f"; {named} sends this connection to the proxy proxy:3: if it is not meant for it, set "
        "no_proxy=a.example.com"
    ))  # fmt: skip


# ---- failures


@pytest.mark.parametrize(
    ("status", "details", "code", "expected", "message"),
    [
        ("UNAVAILABLE", "no route", None, Code.SERVER_GONE, "no route"),
        ("CANCELLED", "", None, Code.SERVER_GONE, "CANCELLED"),
        ("INVALID_ARGUMENT", "odd", None, Code.MALFORMED, "odd"),
        ("UNIMPLEMENTED", "odd", None, Code.PROTOCOL_MISMATCH, "odd"),
        ("DEADLINE_EXCEEDED", "late", None, Code.TIMEOUT, "late"),
        ("NOT_FOUND", "no", None, Code.MODEL_NOT_FOUND, "no"),
        ("DATA_LOSS", "lost", None, Code.SERVER_GONE, "lost"),
        ("RESOURCE_EXHAUSTED", "big", None, Code.TOO_LARGE,
         "big: send fewer rows at once, or increase the server's max_message_mib"),
        ("RESOURCE_EXHAUSTED", "big", int(Code.TOO_LARGE), Code.TOO_LARGE, "big"),
        ("RESOURCE_EXHAUSTED", "full", int(Code.BUSY), Code.BUSY, "full"),
        ("UNAVAILABLE", "no", "odd", Code.SERVER_GONE, "no"),
    ],
)  # fmt: skip
def test_a_failure_has_the_code_of_the_server_or_that_of_its_status(status, details, code, expected, message):
    trailing = () if code is None else ((CODE, str(code)),)
    assert failure(Failed(getattr(grpc.StatusCode, status), details, trailing)) == (expected, message)


def test_an_error_names_the_address_where_that_helps(monkeypatch):
    monkeypatch.setenv("http_proxy", "proxy:3")
    monkeypatch.delenv("https_proxy", raising=False)
    for name in ("grpc_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    def error(status, code=None):
        trailing = () if code is None else ((CODE, str(int(code))),)
        return raised(Failed(getattr(grpc.StatusCode, status), "said", trailing), "grpc://a.example.com:1")

    gone = error("UNAVAILABLE")
    assert isinstance(gone, ServerGone) and str(gone).startswith("grpc://a.example.com:1: said; http_proxy sends")
    assert str(error("UNAUTHENTICATED")) == "grpc://a.example.com:1: said"
    busy = error("RESOURCE_EXHAUSTED", Code.BUSY)
    assert isinstance(busy, Busy) and str(busy) == "said"
