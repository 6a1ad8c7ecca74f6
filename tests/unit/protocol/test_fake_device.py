"""Files in place of device memory behave as CUDA does, so what is tested with them holds for a device."""

from __future__ import annotations

import os

import numpy as np
import pytest

from jurybox.protocol import device_memory
from jurybox.protocol.device_memory import HANDLE, FakeDriver
from jurybox.protocol.errors import Refused, Timeout

FLOATS = np.dtype(np.float32)


@pytest.fixture
def ends(tmp_path, monkeypatch):
    """The drivers of two processes, and the handle of the first one's memory or event in the second."""
    first, second = FakeDriver(str(tmp_path)), FakeDriver(str(tmp_path))

    def given(handle, *, event=False):
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 78)
            return second.open_event(handle) if event else second.open(handle)

    monkeypatch.setattr(os, "getpid", lambda: 77)
    return first, second, given


def test_memory_of_another_process_is_the_same_until_both_have_closed_it(ends):
    first, second, given = ends
    memory = first.allocate(64)
    there = given(first.export(memory))
    first.array(memory, (2, 3), FLOATS)[...] = 7
    assert (second.array(there + 4, (5,), FLOATS) == 7).all()
    assert first.extent(memory + 63) == (memory, 64)
    second.copy(there + 32, there, 8, 0)
    assert first.array(memory + 32, (3,), FLOATS).tolist() == [7, 7, 0]
    first.free(memory)
    assert (second.array(there, (2,), FLOATS) == 7).all(), "it is open there"
    second.close(there)
    for use in (lambda: second.array(there, (2,), FLOATS), lambda: second.close(there), lambda: first.free(memory)):
        with pytest.raises(Refused, match="no device memory of this process"):
            use()


def test_a_handle_opens_what_it_stands_for_in_another_process_while_it_is_there(ends):
    first, second, given = ends
    memory, event = first.allocate(64), first.event()
    handles = first.export(memory), first.export_event(event)
    assert [len(handle) for handle in handles] == [HANDLE] * 2
    with pytest.raises(Refused, match="cannot open what it exported itself"):
        second.open(handles[0])
    for wrong, why in (
        (handles[1], "knows no such handle"),
        (handles[0][:-1], f"{HANDLE - 1} bytes came as a handle"),
        (handles[0][:8] + b"../../etc/passwd" + handles[0][24:], "knows no such handle"),
    ):
        with pytest.raises(Refused, match=why):
            given(wrong)
    with pytest.raises(Refused, match="knows no such handle"):
        given(handles[0], event=True)
    first.free(memory)
    with pytest.raises(Refused, match="the memory of that handle is gone"):
        given(handles[0])


def test_a_stream_waits_for_what_was_recorded_and_only_on_stream_1_that_is_not_complete_at_once(ends, monkeypatch):
    first, second, given = ends
    event = first.event()
    there = given(first.export_event(event), event=True)
    monkeypatch.setattr(device_memory, "_WAIT", 0.0)
    second.wait(there, 0)  # nothing was recorded
    first.record(event, 0)
    second.wait(there, 0)
    for _ in range(2):
        first.record(event, 1)
        with pytest.raises(Timeout, match="an event of a client did not happen"):
            second.wait(there, 0)
    first.complete(event)
    second.wait(there, 0)
    second.destroy_event(there)
    first.destroy_event(event)
    with pytest.raises(Refused):
        first.wait(event, 0)
