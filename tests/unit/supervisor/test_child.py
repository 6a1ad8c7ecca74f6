"""A child process that does not read, and one that cannot be started."""

from __future__ import annotations

import json
import subprocess
import time

import pytest
from tests.serving import wait_until

from jurybox.protocol.errors import SharedMemoryError
from jurybox.server.settings.config import Configuration
from jurybox.server.supervisor.children import Child, Standby, services

ORDERS = 3000  # far more than a socket holds
LARGE = 1 << 20  # characters; one such order is more than a socket holds


@pytest.mark.parametrize(("orders", "size"), [(ORDERS, 0), (15, LARGE)], ids=["many", "large"])
def test_a_child_that_does_not_read_blocks_no_other_and_gets_its_orders_later(tmp_path, orders, size):
    child = Child("late", "tests.unit.supervisor.late_reader", dict, {"LATE_READER": str(tmp_path)})
    child.start(time.monotonic())
    try:
        began = time.monotonic()
        for number in range(orders):
            child.send("order", number=number, text="x" * size)
        assert child.orders_waiting
        assert time.monotonic() - began < 60.0  # one order that waits for the child takes five seconds
        child.send("last")
        (tmp_path / "go").touch()
        heard = []

        def answered():
            child.send_waiting()
            heard.extend(child.messages())
            return heard

        wait_until(answered, 30, "the child's answer")
        assert (heard[0]["numbers"], heard[0]["ordered"]) == (orders, True)
    finally:
        child.kill()
        child.reap(time.monotonic(), settled_after=0.0)


def test_a_child_that_cannot_be_configured_is_not_started_and_due_again():
    def no_room():
        raise SharedMemoryError("/dev/shm is full")

    child = Child("engine-0", "jurybox.server.engine", no_room)
    with pytest.raises(SharedMemoryError):
        child.start(100.0)
    assert not child.alive and child.pid == 0
    assert 100.0 < child.restart_at < 105.0


class Process:
    """What `spawn` returns, without a process: it ends when it is told to."""

    def __init__(self):
        self.pid, self.status, self.closed, self.heard, self.reads = 1, None, False, [], lambda order: None

    def poll(self):
        return self.status

    def kill(self):
        self.status = -9

    def wait(self, timeout=None):
        if self.status is None:
            raise subprocess.TimeoutExpired("m", timeout)
        return self.status

    def close(self):
        self.closed = True

    def send_part(self, order):
        rest = self.reads(order)
        if rest is None:
            self.heard.append(json.loads(bytes(order)[4:])["kind"])
        return rest


@pytest.fixture
def spawned(monkeypatch):
    """The processes that were started."""
    spawned = []

    def spawn(*arguments, **others):
        spawned.append(Process())
        return spawned[-1], spawned[-1]

    monkeypatch.setattr("jurybox.server.supervisor.children.spawn", spawn)
    return spawned


def test_a_child_that_dies_again_and_again_is_started_later_each_time_until_it_has_served(spawned):
    child, waits = Child("engine-0", "m", dict), []

    def dies(*, served):
        child.start(100.0)
        if served:
            child.serves(100.0)
        spawned[-1].status = 7
        assert child.reap(100.0 + served, settled_after=30.0) == 7
        assert not child.alive and child.pid == 0 and not child.serving and spawned[-1].closed
        waits.append(child.restart_at - 100.0 - served)

    for _ in range(7):
        dies(served=0)
    assert waits == [0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 10.0] and child.failures == 7
    dies(served=30)
    assert waits[-1] == 10.0, "it had not served for longer than that"
    dies(served=31)
    assert (waits[-1], child.failures) == (0.0, 1)
    dies(served=0)
    child.excuse_last_death(200.0)
    assert (child.failures, child.restart_at) == (1, 200.0)


def test_a_start_forgets_what_was_true_of_the_process_before_it(spawned):
    child = Child("engine-0", "m", dict)
    child.start(1.0)
    child.serves(2.0)
    child.drained = True
    child.kill()
    assert child.killed_by_supervisor and child.exited
    child.start(3.0)
    assert (child.serving, child.drained, child.killed_by_supervisor, child.exited) == (False,) * 4
    assert (child.started_at, child.served_at) == (3.0, 2.0)


def test_one_standby_process_waits_and_the_next_is_started_once_it_was_taken(spawned):
    standby = Standby("m")
    assert standby.take() is None
    for now in (100.0, 100.5, 200.0):
        standby.look(now)
    assert standby.take() == (spawned[0], spawned[0]) and len(spawned) == 1 and not spawned[0].closed
    standby.look(101.0)
    assert len(spawned) == 2
    standby.close()
    assert spawned[1].status == -9 and spawned[1].closed and standby.take() is None
    standby.close()


def test_a_standby_process_that_ends_early_is_given_to_nobody_and_started_again_ten_seconds_later(spawned):
    standby = Standby("m")
    standby.look(100.0)
    spawned[0].status = 1
    standby.look(109.9)
    assert len(spawned) == 1 and spawned[0].closed
    standby.look(110.0)
    assert len(spawned) == 2
    spawned[1].status = 1
    assert standby.take() is None and spawned[1].closed
    standby.look(119.9)
    assert len(spawned) == 2


def test_a_child_takes_the_standby_process_before_it_starts_one(spawned):
    child = Child("gateway", "m", dict, standby=Standby("m"))
    child.standby.look(0.0)
    child.start(1.0)
    assert len(spawned) == 1 and child.alive
    child.start(2.0)
    assert len(spawned) == 2


def test_orders_reach_the_process_that_they_were_meant_for_and_none_after_it(spawned):
    child = Child("engine-0", "m", dict)
    child.send("early")
    child.start(1.0)
    child.send("load")
    assert spawned[0].heard == ["configure", "load"] and child.orders_waiting == 0
    spawned[0].reads = lambda order: order  # it reads nothing
    child.send("sleep")
    child.send("wake")
    assert child.orders_waiting == 2
    spawned[0].reads = lambda order: None
    child.send_waiting()
    assert spawned[0].heard[2:] == ["sleep", "wake"] and child.orders_waiting == 0
    spawned[0].reads = lambda order: order
    child.send("load")
    spawned[0].status = 1
    child.reap(2.0, settled_after=0.0)
    child.send("late")
    child.start(3.0)
    assert spawned[1].heard == ["configure"] and child.orders_waiting == 0


def test_a_process_that_can_be_told_nothing_serves_no_more(spawned):
    def gone(order):
        raise BrokenPipeError

    child = Child("engine-0", "m", dict)
    child.start(1.0)
    child.serves(2.0)
    spawned[0].reads = gone
    child.send("load")
    assert (child.serving, child.alive, child.orders_waiting) == (False, True, 0)


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_that_does_not_stop_when_it_is_asked_to_is_killed(spawned, ends):
    child = Child("engine-0", "m", dict)
    child.stop(1.0)
    child.start(1.0)
    child.serves(2.0)
    spawned[0].status = 0 if ends else None
    child.stop(1.0)
    assert spawned[0].heard[-1] == "stop" and spawned[0].status == (0 if ends else -9) and spawned[0].closed
    assert not child.serving and not child.alive


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, []),
        ({"http": "127.0.0.1:0"}, ["gateway"]),
        ({"grpc": "127.0.0.1:0"}, ["gateway"]),
        ({"tcp": "127.0.0.1:0"}, ["relay"]),
        ({"tcp": "127.0.0.1:0", "http": "127.0.0.1:0"}, ["gateway", "relay"]),
    ],
)
@pytest.mark.parametrize("standby", [True, False])
def test_services_are_those_that_the_settings_ask_for(settings, roles, standby):
    configuration = Configuration.model_validate(
        {"server": {"http": "", "grpc": "", **settings, "standby": standby}, "models": {}}
    )
    listening = {name: settings.get(name, "") for name in ("http", "grpc", "tcp")} | {"robots": {}, "dialects": {}}
    children = services(configuration, listening)
    assert [child.role for child in children] == roles
    for child in children:
        assert (child.standby is not None) == standby
        configured = child.configure()
        own = ("http", "grpc") if child.role == "gateway" else ("tcp",)
        assert {name: configured[name] for name in own} == {name: listening[name] for name in own}
