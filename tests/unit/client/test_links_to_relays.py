"""A connection to a tcp:// server from its first greeting: who it says it is, and what becomes of unwanted leases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.clocks import Clock, given
from tests.unit.client.test_tcp_link import Channel

from jurybox.client import ServerGone, link
from jurybox.client.remote import tcp_link
from jurybox.client.remote.keys import Keys
from jurybox.client.remote.tcp_link import TcpLink
from jurybox.protocol.control_pb2 import Lease

KEYS = Keys(b"s", b"p", b"q")
ADDRESS = "tcp://there:1"


class Opened(Channel):
    """A control channel, and how it was opened."""

    def __init__(self, context: Any, address: str, open_socket: Callable[[], Any], *, far: Callable[[Lease], None]):
        super().__init__()
        self.context, self.address, self.open_socket, self.far = context, address, open_socket, far
        self.answers = dict(answers)
        channels.append(self)


channels: list[Opened] = []
answers: dict[str, list[Any]] = {}


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    channels.clear()
    answers.clear()
    monkeypatch.setattr(tcp_link, "Control", Opened)
    monkeypatch.setattr(tcp_link, "open_socket", lambda *how: how)
    given(Clock(), monkeypatch, tcp_link, link)
    yield
    channels.clear()
    answers.clear()


@pytest.mark.parametrize("keys", [None, KEYS])
def test_a_link_greets_its_relay_and_all_its_sockets_have_one_identity_that_nobody_guesses(keys: Keys | None) -> None:
    first, second = TcpLink(ADDRESS, keys, 9.0), TcpLink(ADDRESS, keys, 9.0)
    one, other = channels
    assert one.kinds == ["hello"] and one.timeouts == [3.0] and one.address == ADDRESS
    context, address, given_keys, identity = one.open_socket()
    assert (context, address, given_keys) == (one.context, ADDRESS, keys) and context is first._context
    assert identity[:1] == b"R" and len(identity) == 16
    assert one.open_socket()[3] == identity != other.open_socket()[3]
    for each in (first, second):
        each.close()


@pytest.mark.parametrize("keys", [None, KEYS])
def test_a_relay_that_does_not_answer_is_gone_and_the_error_names_the_keys(keys: Keys | None) -> None:
    answers["hello"] = [ServerGone("no answer")]
    asked = "with these keys" if keys else "without keys: if the server has some, give its public one"
    with pytest.raises(
        ServerGone, match=rf"no answer from {ADDRESS} within 0\.0 s: .* It was asked {asked} \(server_key"
    ):
        TcpLink(ADDRESS, keys, 0.0)
    assert channels[0].timeouts == pytest.approx([0.1])


def test_a_lease_that_no_call_waits_for_is_given_back_with_the_next_call() -> None:
    made = TcpLink(ADDRESS, None, 9.0)
    (channel,) = channels
    channel.far(Lease(lane=3, lease=73))
    assert not channel.released
    made.models(9.0)
    assert channel.released == [(3, 73)]
    made.close()


def test_a_forked_child_is_another_client_and_gives_back_no_lease_of_its_parent() -> None:
    made = TcpLink(ADDRESS, None, 9.0)
    wires = made._wires
    (parents,) = channels
    parents.far(Lease(lane=3, lease=73))
    made._after_fork_in_child()
    made.models(9.0)
    childs = channels[1]
    assert not childs.released and not parents.released and childs.kinds == ["hello"]
    assert childs.open_socket()[3] != parents.open_socket()[3]
    parents.far(Lease(lane=4, lease=74))
    made.models(9.0)
    assert not childs.released
    childs.far(Lease(lane=5, lease=75))
    made.models(9.0)
    assert childs.released == [(5, 75)]
    made.close()
    assert wires is not None
    wires.close()
