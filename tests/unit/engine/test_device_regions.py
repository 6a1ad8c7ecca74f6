"""Rows bound to clients' device memory: what is opened, how long it stays open, and which tickets may use it."""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest
import torch
from tests.records import records

from jurybox.protocol.device_memory import FakeDriver
from jurybox.protocol.errors import Refused
from jurybox.server.engine.device_regions import DeviceRegions, RowsNotBound


@pytest.fixture
def client(tmp_path, monkeypatch):
    """The driver of another process, and its pid while it exports."""
    driver = FakeDriver(str(tmp_path))
    mine = os.getpid()

    class Client:
        def memory(self, size=256):
            monkeypatch.setattr(os, "getpid", lambda: mine + 1)
            pointer = driver.allocate(size)
            handle = driver.export(pointer)
            monkeypatch.setattr(os, "getpid", lambda: mine)
            return pointer, handle.hex()

        def floats(self, pointer, count, at=0):
            return driver.array(pointer + at, (count,), np.dtype(np.float32))

    return Client()


@pytest.fixture
def regions(tmp_path):
    regions = DeviceRegions(torch.device("cpu"))
    regions.driver = FakeDriver(str(tmp_path))
    opened = []
    opens, closes = regions.driver.open, regions.driver.close
    regions.driver.open = lambda handle: opened.append(pointer := opens(handle)) or pointer
    regions.driver.close = lambda pointer: opened.remove(pointer) or closes(pointer)
    regions.opened = opened
    yield regions
    regions.close()
    assert not opened


def order(handle, *, lease=5, first=0, rows=2, at=0, into=None, to=128):
    outputs = [["y", "float32", [], into or handle, to]]
    return {
        "lease": lease, "first": first, "rows": rows, "event": "",
        "inputs": [["x", "float32", [2], handle, at]], "outputs": outputs,
    }  # fmt: skip


tickets = partial(records, ("lease", "first", "rows"))


def test_bound_rows_are_the_clients_memory(regions, client):
    pointer, handle = client.memory()
    assert not regions and regions.of(tickets((5, 0, 1))) is None
    client.floats(pointer, 4)[:] = [1, 2, 3, 4]
    regions.bind(order(handle, first=3))
    (one,) = regions.of(tickets((5, 4, 1)))
    assert one.part(one.inputs, "x", 4, 1).tolist() == [[3, 4]]
    one.part(one.outputs, "y", 3, 2)[:] = torch.tensor([7.0, 8.0])
    assert client.floats(pointer, 2, 128).tolist() == [7, 8]
    assert regions.of(tickets((6, 4, 1))) is None
    assert regions.of(tickets((6, 4, 1), (5, 3, 2))) == [None, one]


@pytest.mark.parametrize("rows", [(2, 1), (3, 3), (4, 2), (5, 1)])
def test_rows_that_are_not_bound_are_refused_where_others_of_their_lease_are(regions, client, rows):
    regions.bind(order(client.memory()[1], first=3))
    with pytest.raises(RowsNotBound, match=f"rows {rows[0]} to {sum(rows)} are not bound"):
        regions.of(tickets((5, *rows)))


def test_memory_stays_open_until_the_last_binding_that_uses_it_is_released(regions, client):
    _, handle = client.memory()
    regions.bind(order(handle, first=0))
    regions.bind(order(handle, first=2))
    regions.bind(order(handle, first=4, lease=6))
    assert len(regions.opened) == 2, "once for a lease"
    regions.unbind(5, 0)
    assert len(regions.opened) == 2 and len(regions.of(tickets((5, 2, 2)))) == 1
    with pytest.raises(RowsNotBound):
        regions.of(tickets((5, 0, 1)))
    regions.unbind(5, 9)  # there is none
    regions.unbind(5, 2)
    assert len(regions.opened) == 1 and regions.of(tickets((5, 0, 1))) is None and regions
    regions.forget(6)
    assert not regions.opened and not regions


def test_rows_that_are_bound_again_use_the_new_memory(regions, client):
    (_, old), (pointer, new) = client.memory(), client.memory()
    regions.bind(order(old))
    regions.bind(order(new))
    assert len(regions.opened) == 1
    client.floats(pointer, 4)[:] = 9
    (bound,) = regions.of(tickets((5, 0, 2)))
    assert bound.inputs["x"].tolist() == [[9, 9]] * 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"at": -4}, "takes 16 bytes from byte -4 of a region that has 256, aligned to 4"),
        ({"at": 2}, "aligned to 4"),
        ({"at": 244}, "takes 16 bytes from byte 244"),
        ({"to": 252}, "takes 8 bytes from byte 252"),
        ({"into": "00" * 64}, "cannot be used"),
    ],
)
def test_memory_that_cannot_be_used_stays_bound_and_its_tickets_are_refused(regions, client, wrong, why):
    _, handle = client.memory()
    with pytest.raises(Refused, match=why):
        regions.bind(order(handle, **wrong))
    assert not regions.opened
    with pytest.raises(RowsNotBound, match=r"device memory of rows 0 and on cannot be used"):
        regions.of(tickets((5, 0, 1)))
    regions.bind(order(handle, at=240, to=0))  # to the last byte
    assert regions.of(tickets((5, 0, 1)))
