"""A process returns memory to the system after clients made it hold much: bytes, or connections that do nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from jurybox import native
from jurybox.server import memory
from jurybox.server.memory import FreedMemory
from jurybox.server.relay import process as relay_process
from jurybox.server.security import limits
from jurybox.server.security.limits import ANSWERS, HTTP, RECEIVED, Watch, budget_of

MIB = 1 << 20


class Process(FreedMemory):
    """One whose memory is what the test says."""

    def __init__(self):
        self.private, self.kept, self.returned = 80 * MIB, 0, []
        super().__init__()
        self._trim = self.trim

    def trim(self, pad):
        self.returned.append((pad, self.kept))
        self.private, self.kept = self.private - self.kept, 0

    def take(self, size):
        """Take memory, first what was freed before."""
        again = min(self.kept, size)
        self.kept, self.private = self.kept - again, self.private + size - again

    def free(self, size):
        self.kept += size

    def _private(self):
        return self.private


def look(process, held=0, connections=0, times=5):
    for _ in range(times):
        process.look(held, connections)


@pytest.fixture
def process():
    return Process()


def test_freed_memory_returns_to_the_system_once_after_many_bytes_were_held(process):
    process.take(100 * MIB)
    look(process, held=100 * MIB)
    assert not process.returned  # it is in use
    process.free(100 * MIB)
    process.look(0, 0)
    assert not process.returned  # others may send as much at once
    look(process)
    assert process.returned == [(0, 100 * MIB)]


def test_memory_that_was_taken_and_freed_between_two_looks_returns(process):
    look(process)
    process.take(60 * MIB)
    process.free(60 * MIB)
    look(process)
    assert process.returned == [(0, 60 * MIB)]


def test_memory_of_connections_returns_when_they_end_although_it_could_not_before(process):
    process.take(64 * MIB)
    look(process, connections=2048)
    assert process.returned == [(0, 0)]  # they hold no bytes of requests, and none of theirs was free
    process.free(64 * MIB)
    look(process)
    assert process.returned == [(0, 0), (0, 64 * MIB)]


def test_memory_that_is_in_use_is_not_looked_for_again_and_again(process):
    process.take(50 * MIB)
    look(process, times=100)
    assert process.returned == [(0, 0)]
    process.take(5 * MIB)
    look(process, times=100)
    assert process.returned == [(0, 0)]


def test_memory_is_not_returned_while_an_eighth_of_the_most_is_held(process):
    process.take(100 * MIB)
    look(process, held=100 * MIB)
    process.free(86 * MIB)
    look(process, held=14 * MIB)
    assert not process.returned
    process.free(2 * MIB)
    look(process, held=12 * MIB)
    assert process.returned == [(0, 88 * MIB)]


def test_a_process_that_works_keeps_what_it_frees(process):
    for _ in range(20):
        process.take(60 * MIB)
        process.look(60 * MIB, 1)
        process.free(60 * MIB)
        process.look(0, 1)
    assert not process.returned


def test_connections_that_refer_to_themselves_are_freed_when_the_process_has_grown(process, monkeypatch):
    collected = []
    monkeypatch.setattr(memory.gc, "collect", lambda: collected.append(process.private))
    look(process, times=100)
    assert not collected
    process.take(60 * MIB)
    look(process, times=100)
    assert collected == [140 * MIB]  # once: it has grown no more
    process.private -= 30 * MIB
    process.look(0, 0)
    process.take(10 * MIB)
    look(process)
    assert collected == [140 * MIB, 120 * MIB]


def test_memory_of_connections_returns_when_they_end(process):
    """200 connections with 50 requests each that wait: 6 MiB by their number, five times that in truth."""
    for _ in range(2):
        process.take(30 * MIB)
        look(process, connections=200)
        process.free(30 * MIB)
        look(process, connections=1)
        assert process.returned[-1] == (0, 30 * MIB)


class Seen:
    """What a process says that it holds."""

    def __init__(self):
        self.looks = []

    def look(self, held, connections):
        self.looks.append((held, connections))


def test_the_gateway_looks_with_what_its_clients_hold(monkeypatch):
    monkeypatch.setattr(limits, "FreedMemory", seen := Seen)
    budget = budget_of(64 * MIB)
    account = native.Account(budget, HTTP)
    account.owe(RECEIVED, 3)
    account.owe(ANSWERS, 4)
    watch = Watch(budget, [lambda: [SimpleNamespace(account=account, end_silent=lambda _: None)]])
    watch.check(0.0)
    assert isinstance(watch._freed, seen) and watch._freed.looks == [(7, 1)]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({"connections": 2, "received": {"bytes": 3}, "answers": {"bytes": 4}}, (7, 2)),
        ({"answers": {"bytes": 4}}, (4, 0)),  # libzmq counts neither requests nor connections
    ],
)
def test_the_relay_looks_with_what_its_clients_hold(monkeypatch, held, expected):
    seen = Seen()
    monkeypatch.setattr(relay_process, "FreedMemory", lambda: seen)
    monkeypatch.setattr(relay_process, "_RECLAIM", 0.0)

    async def run():
        stop = asyncio.Event()
        relay = SimpleNamespace(look_after=lambda: None, reclaim=stop.set)
        await asyncio.wait_for(relay_process._until(stop, relay, SimpleNamespace(held=lambda: held), None), 20)

    asyncio.run(run())
    assert seen.looks == [expected]
