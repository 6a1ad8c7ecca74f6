"""Streams, marks and the memory of a device, with fakes of torch's calls."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jurybox.server.engine import device as device_module
from jurybox.server.engine.device import (
    Mark,
    PageLock,
    Stream,
    bound_device_memory,
    current_mark,
    device_error,
    forget_frames,
    show_device_memory,
    staging,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def events(monkeypatch):
    """What torch was called for, in order."""
    happened = []

    class Event:
        done = False

        def record(self, stream):
            happened.append(("record", stream.name))

        def query(self):
            return self.done

        def synchronize(self):
            happened.append(("synchronize",))

    class Queue:
        def __init__(self, device):
            self.name = f"stream of {device}"

        def wait_event(self, event):
            happened.append((self.name, "waits", event))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Queue)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(name=f"current of {device}"))
    return happened


def test_a_mark_is_the_end_of_what_was_queued_on_its_stream(events):
    mark = Stream(GPU).mark()
    assert events == [("record", "stream of cuda:0")]
    assert mark.done() is False
    mark.event.done = True
    assert mark.done() is True and len(events) == 1
    mark.wait()
    assert events[1:] == [("synchronize",)]
    here = current_mark(GPU)
    assert here.event is not None and events[2:] == [("record", "current of cuda:0")]


def test_a_stream_goes_on_after_a_mark_of_another_and_waits_for_nothing_without_one(events):
    stream, other = Stream(GPU), Stream(GPU)
    mark = other.mark()
    events.clear()
    stream.after(mark)
    assert events == [("stream of cuda:0", "waits", mark.event)]
    stream.after(Mark(None))
    Stream(CPU).after(mark)
    assert len(events) == 1


def test_on_a_cpu_everything_is_done_when_its_call_returns(events):
    for mark in (Stream(CPU).mark(), current_mark(CPU)):
        mark.wait()
        assert mark.event is None and mark.done()
    with Stream(CPU).running():
        pass
    assert not events


def test_a_gpu_that_fails_every_call_is_told_by_its_error(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    assert device_error(CPU) is None and not asked
    assert device_error(GPU) is None and asked == [GPU]
    error = RuntimeError("device-side assert triggered")

    def fails(device):
        raise error

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert device_error(GPU) is error and device_error(CPU) is None


def test_an_error_whose_frames_are_forgotten_keeps_its_words_alone():
    try:
        try:
            raise KeyError("first")
        except KeyError as first:
            raise ValueError("second") from first
    except ValueError as caught:
        error = caught
    forget_frames(error)
    assert error.__traceback__ is error.__context__ is error.__cause__ is None and str(error) == "second"


@pytest.mark.parametrize(
    ("mib", "fraction", "share"),
    [(0, 1.0, None), (0, 0.5, 0.5), (2048, 1.0, 0.25), (2048, 0.5, 0.25), (4096, 0.1, 0.1), (1, 1.0, 2**20 / 2**33)],
)
def test_the_smaller_of_two_limits_of_a_devices_memory_applies(monkeypatch, mib, fraction, share):
    shares = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=8 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: shares.append(given))
    bound_device_memory(GPU, mib, fraction)
    assert shares == ([] if share is None else [(share, GPU)])
    bound_device_memory(CPU, mib, fraction)
    assert len(shares) <= 1


class Stopped(Exception):
    """Ends an endless loop."""


def test_the_memory_that_torch_has_reserved_is_shown_every_second_by_a_thread_that_keeps_no_process_alive(monkeypatch):
    record, sleeps, reserved, threads = np.zeros(1, [("device_bytes", np.uint64)]), [], [100, 300], []

    class Thread:
        def __init__(self, *, target, daemon, **more):
            self.target, self.daemon = target, daemon

        def start(self):
            threads.append(self)

    def sleep(seconds):
        sleeps.append((seconds, int(record["device_bytes"][0])))
        if not reserved:
            raise Stopped

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved.pop(0))
    monkeypatch.setattr(device_module, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(device_module, "threading", SimpleNamespace(Thread=Thread))
    show_device_memory(CPU, record)
    assert not threads
    show_device_memory(GPU, record)
    (thread,) = threads
    assert thread.daemon and not sleeps
    with pytest.raises(Stopped):
        thread.target()
    assert sleeps == [(1.0, 100), (1.0, 300)]


def test_memory_is_unlocked_once_where_it_was_locked(monkeypatch):
    memory, status, calls = np.zeros(64, np.uint8), 0, []
    runtime = SimpleNamespace(cudaHostUnregister=lambda address: calls.append(("unlock", address)))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def lock(module, address, size, device):
        calls.append(("lock", address, size, device))
        return status

    monkeypatch.setattr(device_module, "page_lock", lock)
    held = PageLock(memory, GPU)
    assert held.held and held.reason == ""
    held.release()
    held.release()
    assert not held.held
    assert calls == [("lock", memory.ctypes.data, 64, GPU), ("unlock", memory.ctypes.data)]
    status = 712
    refused = PageLock(memory, GPU)
    refused.release()
    assert not refused.held and refused.reason == "cudaHostRegister returned 712, already registered"
    status = 2
    assert PageLock(memory, GPU).reason == "cudaHostRegister returned 2"
    assert PageLock(memory, CPU).reason == "cpu has no memory of its own" and len(calls) == 4


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_staging_memory_is_locked_for_a_gpu_alone(monkeypatch, device):
    made = []
    monkeypatch.setattr(torch, "zeros", lambda shape, *, dtype, pin_memory: made.append((shape, dtype, pin_memory)))
    staging(3, (2, 4), np.dtype(np.float32), device)
    assert made == [((3, 2, 4), torch.float32, device is GPU)]
