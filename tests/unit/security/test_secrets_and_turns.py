"""Secrets that are none, and the time that a connection has to read its answers."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from types import SimpleNamespace

import pytest

from jurybox import native
from jurybox.protocol.errors import Code, Refused
from jurybox.server.security import limits
from jurybox.server.security.access import Access, SecuritySettings, Token, make_pair, read_pair, read_secret, too_open
from jurybox.server.security.limits import (
    ANSWERS,
    HTTP,
    OF_REQUEST,
    RECEIVED,
    UNREAD,
    Charge,
    Watch,
    hold_text,
    no_room,
    room_for_answer,
    unread,
)

MIB = 1 << 20


@pytest.mark.parametrize("token", ["0123456789abcde", "0123456789abcde\xe9", "\uff41" * 16, "0123456789abcde\x7f"])
def test_a_token_of_the_environment_has_ascii_alone_as_headers_have(token: str) -> None:
    with pytest.raises(ValueError, match="at least 16 printable ASCII characters without spaces"):
        SecuritySettings(token=token).secret_token()
    assert SecuritySettings(token="0123456789abcdef").secret_token() == "0123456789abcdef"
    assert SecuritySettings().secret_token() is None


def test_a_port_without_a_certificate_or_without_its_key_has_no_tls(tmp_path: Path) -> None:
    (tmp_path / "pem").touch(0o600)
    file = str(tmp_path / "pem")
    assert Access(tls_key=file).tls() is None and Access(tls_cert=file).tls() is None
    assert Access(tls_cert=file, tls_key=file).tls() == (b"", b"")


@pytest.mark.parametrize(
    ("mode", "refused"), [(0o600, False), (0o640, False), (0o660, True), (0o604, True), (0o602, True), (0o601, True)]
)
def test_the_group_may_read_a_secret_and_nobody_else(tmp_path: Path, mode: int, refused: bool) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"0123456789abcdef")
    file.chmod(mode)
    why = too_open(file)
    assert (why is not None) == refused
    if why is not None:
        assert why == f"{file} has mode {mode:04o}, others can get at the secret in it: chmod 600 it"
        with pytest.raises(ValueError, match="others can get at the secret"):
            read_secret(file)
    else:
        assert read_secret(file) == b"0123456789abcdef"
    assert too_open(tmp_path / "absent") is None


def test_every_broken_secret_is_named_by_its_setting(tmp_path: Path) -> None:
    for name in ("short", "open", "none"):
        (tmp_path / name).write_text("too short")
        (tmp_path / name).chmod(0o644 if name == "open" else 0o600)
    files = {name: str(tmp_path / name) for name in ("short", "open", "none", "absent")}
    settings = SecuritySettings(
        token_file=files["short"],
        tls_cert=files["absent"],
        tls_key=files["open"],
        curve_key=files["none"],
        curve_clients=files["none"],
    )
    found = [line.partition(":")[0].partition(" =")[0] for line in settings.broken_secrets()]
    names = ["token_file", "tls_cert", "tls_key", "curve_key", "curve_clients"]
    assert found == [f"server.{name}" for name in names]
    make_pair(tmp_path / "pair")
    made = {name: str(tmp_path / "pair.key_secret") for name in ("tls_cert", "tls_key", "curve_key")}
    assert SecuritySettings(token="0123456789abcdef", curve_clients=str(tmp_path), **made).broken_secrets() == []
    assert SecuritySettings(token="short").broken_secrets()[0].startswith("server.token: a token is at least")


def test_a_pair_of_keys_is_read_as_it_was_made(tmp_path: Path) -> None:
    public_file, secret_file, public = make_pair(tmp_path / "server")
    found = read_pair(secret_file)
    assert found[0].decode() == public and len(found[1]) == 40 and found[1].decode() not in public_file.read_text()
    assert (secret_file.stat().st_mode & 0o777, public_file.stat().st_mode & 0o133) == (0o600, 0)


def test_a_message_for_which_there_is_no_room_is_refused_for_now_with_the_most_that_there_may_be() -> None:
    refused = no_room(1000)
    assert refused.code == Code.BUSY and "of at most 1000 bytes: ask again later" in str(refused)


@pytest.fixture
def budget() -> native.Budget:
    return native.Budget((MIB, MIB, 9), (MIB, MIB, 9))


class Connection:
    def __init__(self, budget: native.Budget) -> None:
        self.account, self.aborted = native.Account(budget, HTTP), 0

    def end_silent(self, now: float) -> None: ...

    def abort(self) -> None:
        self.aborted += 1


def test_a_connection_has_its_whole_time_again_once_there_was_room(budget: native.Budget) -> None:
    one = Connection(budget)
    watch = Watch(budget, [lambda: [one]])
    one.account.owe(ANSWERS, MIB)
    watch.check(0.0)
    one.account.give(ANSWERS, MIB)
    watch.check(5.0)
    one.account.owe(ANSWERS, MIB)
    watch.check(UNREAD + 1)
    watch.check(2 * UNREAD)
    assert not one.aborted
    watch.check(2 * UNREAD + 1)
    assert one.aborted == 1


def test_a_connection_has_its_whole_time_again_once_all_was_being_computed(budget: native.Budget) -> None:
    one = Connection(budget)
    watch = Watch(budget, [lambda: [one]])
    token = OF_REQUEST.set(Charge(budget, one.account))
    try:
        one.account.owe(ANSWERS, 7 * MIB // 8)
        watch.check(0.0)
        one.account.give(ANSWERS, 7 * MIB // 8)
        with room_for_answer(7 * MIB // 8):
            watch.check(5.0)
        one.account.owe(ANSWERS, 7 * MIB // 8)
        watch.check(UNREAD + 1)
        assert not one.aborted
    finally:
        OF_REQUEST.reset(token)


def test_what_nobody_can_have_read_is_owed_by_nobody_and_what_follows_it_is(budget: native.Budget) -> None:
    account = native.Account(budget, HTTP)
    token = OF_REQUEST.set(Charge(budget, account))
    try:
        assert unread(account) == 0
        account.owe(ANSWERS, 100)
        with room_for_answer(50):
            with room_for_answer(30):
                assert (unread(account), account.held(ANSWERS)) == (100, 180)
            assert (unread(account), account.held(ANSWERS)) == (100, 150)
        assert (unread(account), account.held(ANSWERS)) == (100, 100)
        account.give(ANSWERS, 100)
    finally:
        OF_REQUEST.reset(token)


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_text_may_take_all_that_one_connection_may_hold(more: int, fits: bool) -> None:
    budget = native.Budget((MIB, MIB, 9), (4 * MIB, 4 * MIB, 9))
    charge = Charge(budget, native.Account(budget, HTTP))
    charge.take(MIB // 2)
    token = OF_REQUEST.set(charge)
    try:
        if fits:
            hold_text(b"x" * (MIB // 4 + more))
            assert charge.size == MIB
        else:
            with pytest.raises(Refused, match=f"a request may take at most {MIB} in all") as refused:
                hold_text(b"x" * (MIB // 4 + more))
            assert refused.value.code == Code.TOO_LARGE and charge.size == MIB // 2
    finally:
        OF_REQUEST.reset(token)
        charge.give()


def test_connections_are_looked_at_every_second(budget: native.Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 4:
            raise asyncio.CancelledError

    slept, checked = list[float](), list[float]()
    monkeypatch.setattr(limits, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 7.0))
    watch = Watch(budget, [])
    monkeypatch.setattr(watch, "check", checked.append)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch.run())
    assert slept == [1.0] * 4 and checked == [7.0] * 3


def test_memory_is_given_back_by_what_is_held_and_how_many_are_connected(budget: native.Budget) -> None:
    one, looked = Connection(budget), list[tuple[int, int]]()
    watch = Watch(budget, [lambda: [one], list, lambda: [Connection(budget)]])
    watch._freed = SimpleNamespace(look=lambda held, connections: looked.append((held, connections)))  # type: ignore[assignment]
    one.account.owe(ANSWERS, 1000)
    one.account.owe(RECEIVED, 200)
    watch.check(0.0)
    assert looked == [(1200, 2)]


def test_answers_of_connections_that_are_gone_end_nobody(budget: native.Budget) -> None:
    left = native.Account(budget, HTTP)
    left.owe(ANSWERS, MIB)
    Watch(budget, [list]).check(0.0)
    assert left.held(ANSWERS) == MIB


def test_a_secret_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    file = tmp_path / "token"
    file.touch(0o600)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=f"^{file} cannot be read: Permission denied$"):
        read_secret(file)


def test_a_token_in_a_file_opens_to_others_as_one_in_the_settings() -> None:
    ports = {"server.http": "0.0.0.0:80"}
    for given in ({"token": "0123456789abcdef"}, {"token_file": "x"}):
        assert SecuritySettings(**given).lacking(ports) == ['server.http = "0.0.0.0:80" needs server.tls_cert']


def test_a_gateway_holds_as_much_as_its_largest_message_allows() -> None:
    found, expected = Access(max_message=3 * MIB).budget(), limits.budget_of(3 * MIB)
    assert (found.each, found.in_all) == (expected.each, expected.in_all)


def test_a_token_is_shown_whole_or_not_at_all() -> None:
    token = Token("0123456789abcdef")
    assert repr(token) == "Token(...)"
    shown = base64.b64encode(b"user:0123456789abcdef").decode()
    assert token.is_shown_by(f"Basic {shown}") and token.is_shown_by("bearer 0123456789abcdef")
    for wrong in (f"Basic {shown[:5]}!{shown[5:]}", f"Basic {shown[:-1]}", f"Digest {shown}", shown, "Bearer", None):
        assert not token.is_shown_by(wrong)


def test_another_connection_that_owes_most_has_its_own_time_and_one_that_was_ended_its_whole_time(
    budget: native.Budget,
) -> None:
    first, second = Connection(budget), Connection(budget)
    watch = Watch(budget, [lambda: [first], lambda: [second]])
    first.account.owe(ANSWERS, MIB // 2)
    second.account.owe(ANSWERS, MIB // 4)
    watch.check(0.0)
    second.account.owe(ANSWERS, MIB // 4 + 1000)
    watch.check(UNREAD)
    watch.check(2 * UNREAD - 1)
    assert (first.aborted, second.aborted) == (0, 0)
    watch.check(2 * UNREAD)
    watch.check(2 * UNREAD + 1)
    assert (first.aborted, second.aborted) == (0, 1), "it is told once, and has time to end"
    watch.check(3 * UNREAD + 1)
    assert second.aborted == 2
