"""Registrations of shared memory keep little, however many a client sends and whatever they name."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path

import pytest
from tests.descriptors import open_files

from jurybox.protocol.device_memory import HANDLE
from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway.inference.cuda_memory import CudaRegions
from jurybox.server.gateway.inference.shared_memory import Regions


@pytest.fixture(params=["posix", "cuda"])
def register(request):
    """A function that registers a region of this name, and the registry."""
    if request.param == "cuda":
        registry = CudaRegions(allowed=True, frontend=None)
        yield (lambda name: registry.register(name, bytes(HANDLE), 0, 1)), registry
        return
    key = f"test-{uuid.uuid4().hex}"
    file = Path("/dev/shm") / key
    file.write_bytes(b"x")
    registry = Regions("test-")
    try:
        yield (lambda name: registry.register(name, key, 0, 1)), registry
    finally:
        registry.close()
        file.unlink()


def test_a_flood_of_registrations_keeps_no_more_than_short_names_of_a_few_regions(register):
    registered, registry = register
    for name in ("", "x" * 256, "x" * (1 << 20)):
        with pytest.raises(Refused, match="1 to 255 characters") as refused:
            registered(name)
        assert refused.value.code == Code.MALFORMED and len(str(refused.value)) < 200
    for i in range(300):
        try:
            registered(f"{i:03}" + "x" * 252)
        except Refused as error:
            assert i >= 256 and error.code == Code.BUSY
    assert sum(sys.getsizeof(region.name) for region in registry.status()) < 256 * 512
    with pytest.raises(Refused) as refused:
        registry.status("y" * (1 << 20))
    assert len(str(refused.value)) < 10_000


def test_memory_of_another_user_or_with_a_second_name_is_not_registered_and_not_kept_open(monkeypatch):
    before = open_files()
    registry, key = Regions("test-"), f"test-{uuid.uuid4().hex}"
    file, second = Path("/dev/shm") / key, Path("/dev/shm") / f"{key}-second"
    file.write_bytes(b"x")
    try:
        with monkeypatch.context() as other:
            user = os.getuid()
            other.setattr(os, "getuid", lambda: user + 1)
            with pytest.raises(Refused, match="is not shared memory of the server's user"):
                registry.register("r", key, 0, 1)
        second.hardlink_to(file)
        with pytest.raises(Refused, match="with this name only"):
            registry.register("r", key, 0, 1)
        second.unlink()
        assert open_files() == before
        registry.register("r", key, 0, 1)
    finally:
        registry.close()
        file.unlink()
        second.unlink(missing_ok=True)
