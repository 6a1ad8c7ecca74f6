"""How channels of gRPC are opened: with which credentials and options, by which version of gRPC, and in a fork."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from jurybox.client import Refused
from jurybox.client.remote import grpc_channel
from jurybox.client.remote.grpc_channel import CORE, open_channel, unary


class Made:
    """A channel, and how it was made."""

    def __init__(self, *how: Any) -> None:
        self.how = how


@pytest.mark.parametrize(
    ("address", "proxied"),
    [("grpc://127.0.0.1:1", False), ("grpc://[::1]:1", False), ("grpc://there:1", True), ("grpcs://there:1", True)],
)
def test_a_channel_is_encrypted_if_its_address_says_so_and_uses_no_proxy_to_this_host(
    monkeypatch: pytest.MonkeyPatch, address: str, proxied: bool
) -> None:
    monkeypatch.setattr(
        grpc_channel,
        "grpc",
        SimpleNamespace(
            insecure_channel=lambda where, options: Made("insecure", where, None, options),
            secure_channel=lambda where, credentials, options: Made("secure", where, credentials, options),
            ssl_channel_credentials=lambda authority: ("trusts", authority),
        ),
    )
    kind, where, credentials, options = open_channel(address, b"PEM").how
    assert where == address.partition("://")[2]
    assert (kind, credentials) == (
        ("secure", ("trusts", b"PEM")) if address.startswith("grpcs") else ("insecure", None)
    )
    given = dict(options)
    assert given.get("grpc.enable_http_proxy") == (None if proxied else 0) and given["grpc.enable_retries"] == 1
    assert given["grpc.max_receive_message_length"] == given["grpc.max_send_message_length"] == 1 << 30


@pytest.mark.parametrize("old", [False, True])
def test_a_method_is_found_also_by_a_grpc_that_registers_none(old: bool) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def unary_unary(path: str, **how: Any) -> str:
        asked.append((path, how))
        if old and how:
            raise TypeError("unexpected keyword argument '_registered_method'")
        return "a method"

    channel: Any = SimpleNamespace(unary_unary=unary_unary)
    assert unary(channel, "/a/B") == "a method"
    assert asked == [("/a/B", {"_registered_method": True})] + [("/a/B", {})] * old


def test_only_a_child_of_a_process_that_has_used_grpc_is_refused_and_keeps_the_parents_channels() -> None:
    core = type(CORE)()
    core.check()
    core._after_fork_in_child()
    core.check()
    channel: Any = Made()
    assert core.using(channel) is channel
    core.check()
    core._after_fork_in_child()
    with pytest.raises(Refused, match="gRPC cannot be used in a process forked from one that has used it"):
        core.check()
    kept = weakref.ref(channel)
    del channel
    gc.collect()
    assert kept() is not None
