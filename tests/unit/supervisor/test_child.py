"""A child process that does not read, and one that cannot be started."""

from __future__ import annotations

import time

import pytest
from tests.serving import wait_until

from jurybox.protocol.errors import SharedMemoryError
from jurybox.server.supervisor.children import Child

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
