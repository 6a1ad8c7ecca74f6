"""The longest name and the largest request that are passed on, and the first ones that are not."""

from __future__ import annotations

import importlib.metadata

import pytest

from jurybox.protocol import wire
from jurybox.protocol.errors import Code, ModelNotFound, Refused
from jurybox.protocol.wire import MAX_CONTROL, MAX_NAME, PREFIX, PROTOCOL_VERSION, prefix_error


def test_a_models_name_has_up_to_128_characters_of_any_language() -> None:
    for name in ("", "m", "a" * MAX_NAME, "ü" * MAX_NAME):
        wire.require_name(name)
    with pytest.raises(ModelNotFound, match=r"at most 128 characters, one of 129 came: 'a{40}'\.\.\.$"):
        wire.require_name("a" * (MAX_NAME + 1))
    with pytest.raises(ModelNotFound, match="no text which UTF-8 can carry"):
        wire.require_name("m\ud800")


def test_a_control_request_has_up_to_a_mebibyte() -> None:
    wire.require_control_size(bytes(MAX_CONTROL))
    with pytest.raises(Refused, match=f"at most {MAX_CONTROL} bytes, {MAX_CONTROL + 1} came") as large:
        wire.require_control_size(bytes(MAX_CONTROL + 1))
    assert large.value.code == Code.TOO_LARGE


def test_a_tree_that_was_never_installed_is_named_as_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert wire.build_version.__wrapped__() == "0+source"


def test_a_peer_of_another_version_is_told_both_and_a_single_letter_is_no_version() -> None:
    other = prefix_error(b"J" + bytes([PROTOCOL_VERSION + 1]))
    assert other is not None
    assert f"version {PROTOCOL_VERSION + 1} came, {PROTOCOL_VERSION} is spoken here" in other
    assert prefix_error(PREFIX) is None
    assert prefix_error(b"J") == f"1 bytes came that begin with b'J': expected a Jurybox message ({PREFIX!r} first)"
    told = prefix_error(b"K" + PREFIX[1:] + b"1234567890")
    assert told is not None and told.startswith(f"12 bytes came that begin with {b'K' + PREFIX[1:] + b'123456'!r}: ")
