"""Regions of shared memory: which may be registered, and that tensors are read and written at their places alone."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import numpy as np
import pytest
from tests.descriptors import open_files

from jurybox.protocol.errors import Code, Error, Refused
from jurybox.protocol.spec import TensorSpec
from jurybox.server.gateway.inference.parameters import Place
from jurybox.server.gateway.inference.shared_memory import RegionData, Regions

CONTENTS = bytes(range(64))
BYTES = np.dtype(np.uint8)


@pytest.fixture
def file():
    """Shared memory of 64 bytes, each of which is its offset."""
    made = Path("/dev/shm") / f"test-{uuid.uuid4().hex}"
    made.write_bytes(CONTENTS)
    yield made
    made.unlink(missing_ok=True)


@pytest.fixture
def regions():
    made = Regions("test-")
    yield made
    made.close()


def test_without_a_prefix_nothing_is_registered(file):
    off = Regions("")
    assert not off.allowed and Regions("test-").allowed
    with pytest.raises(Refused, match=r"shared memory is off here.*set server\.shared_memory_prefix"):
        off.register("r", file.name, 0, 64)


@pytest.mark.parametrize(
    ("offset", "size", "fits"), [(0, 64, True), (60, 4, True), (0, 1, True), (0, 65, False), (60, 5, False),
    (0, 0, False), (-1, 4, False), (64, 1, False), (2, -1, False)]
)  # fmt: skip
def test_a_region_lies_within_its_memory_and_has_bytes(file, regions, offset, size, fits):
    before = open_files()
    if fits:
        regions.register("r", f"/{file.name}", offset, size)
        (region,) = regions.status()
        assert (region.name, region.key, region.offset, region.size) == ("r", f"/{file.name}", offset, size)
        assert open_files() == before + 1
        regions.unregister("r")
    else:
        with pytest.raises(
            Refused, match=f"bytes {offset} to {offset + size} were asked for, '{file.name}' has 64"
        ) as e:
            regions.register("r", file.name, offset, size)
        assert e.value.code == Code.MALFORMED and not regions.status()
    assert open_files() == before, "what is not registered is not kept open"


@pytest.mark.parametrize(
    "key", ["", "/", "//test-a", "test-a/b", "/test-a/b", ".", "/..", "test-\ud800", "test-" + "a" * 250]
)
def test_a_key_that_names_no_shared_memory_is_refused(regions, key):
    with pytest.raises(Refused, match=r"expected a name as shm_open\(3\) takes it") as refused:
        regions.register("r", key, 0, 1)
    assert refused.value.code == Code.MALFORMED
    with pytest.raises(Refused, match=r"expected a name as shm_open\(3\) takes it"):
        Regions(".").register("r", "..", 0, 1)


def test_memory_of_others_and_the_servers_own_is_refused_whatever_the_prefix(file, regions):
    for allowed, key in ((regions, "other"), (regions, "/other-test-"), (Regions("jury"), "jurybox-x")):
        with pytest.raises(Refused, match="may not be registered: expected a name that begins with"):
            allowed.register("r", key, 0, 1)
    with pytest.raises(Refused, match="cannot be opened in /dev/shm: No such file") as refused:
        regions.register("r", "/test-" + "a" * 249, 0, 1)  # the longest name
    assert refused.value.code == Code.MALFORMED


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_plain_files_are_shared_memory(file, regions, kind):
    other = file.with_name(f"{file.name}-other")
    before = open_files()
    try:
        match kind:
            case "link":
                other.symlink_to(file)
            case "pipe":
                os.mkfifo(other)
            case "folder":
                other.mkdir()
        with pytest.raises(Refused, match="cannot be opened|is not shared memory of the server's user"):
            regions.register("r", other.name, 0, 1)
        assert open_files() == before
    finally:
        other.rmdir() if kind == "folder" else other.unlink()


def test_regions_are_listed_and_unregistered_by_name_or_all_at_once(file, regions):
    before = open_files()
    for i in range(22):
        regions.register(f"r{i:02}", file.name, i, 1)
    with pytest.raises(Refused, match="region 'r03' is registered already: unregister it first"):
        regions.register("r03", file.name, 0, 1)
    assert [region.name for region in regions.status("r03")] == ["r03"]
    assert [region.offset for region in regions.status()] == list(range(22))
    with pytest.raises(Refused) as refused:
        regions.status("x")
    first = ", ".join(f"r{i:02}" for i in range(20))
    assert str(refused.value).startswith(f"no region 'x' is registered; there are: {first}")
    assert "r20" not in str(refused.value) and refused.value.code == Code.MODEL_NOT_FOUND
    regions.unregister("x")
    regions.unregister("r03")
    assert len(regions.status()) == 21 and open_files() == before + 21
    regions.unregister()
    assert not regions.status() and open_files() == before
    regions.register("r", file.name, 0, 1)
    regions.close()
    assert not regions.status() and open_files() == before


def test_as_many_regions_as_the_limit_are_registered_and_no_more(file, regions):
    with pytest.raises(Refused, match="no region 'x' is registered; there are: none"):
        regions.status("x")
    for i in range(256):
        regions.register(f"r{i}", file.name, 0, 1)
    with pytest.raises(Refused, match="256 regions are registered: unregister those not needed") as refused:
        regions.register("more", file.name, 0, 1)
    assert refused.value.code == Code.BUSY
    regions.unregister("r7")
    regions.register("more", file.name, 0, 1)


def test_a_tensor_is_read_and_written_at_its_place_in_its_region(file, regions, monkeypatch):
    """However few bytes the system moves at once."""
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read(fd, [into[0][:5]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, of, at: write(fd, [of[0][:5]], at))
    regions.register("r", file.name, 8, 56)
    found = regions.read(Place("r", 12, 4), (3, 2), np.dtype(np.uint16), "x")
    assert (found.shape, found.dtype, found.tobytes()) == ((3, 2), np.uint16, CONTENTS[12:24])
    found[:] = 0  # it is a copy
    assert file.read_bytes() == CONTENTS
    turned = np.arange(6, dtype=np.uint16).reshape(2, 3).T
    regions.write(Place("r", 20, 28), turned, "x")  # a place may be larger than what is written
    assert file.read_bytes() == CONTENTS[:36] + np.ascontiguousarray(turned).tobytes() + CONTENTS[48:]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        (Place("r", 8, 33), "tensor 'x': bytes 33 to 41 of region 'r' were asked for, it has 40"),
        (Place("s", 8, 0), "no region 's' is registered; there are: r"),
    ],
)
def test_nothing_is_read_or_written_outside_of_a_region(file, regions, place, why):
    regions.register("r", file.name, 0, 40)
    for moved in (
        lambda: regions.read(place, (8,), BYTES, "x"),
        lambda: regions.write(place, np.zeros(8, np.uint8), "x"),
    ):
        with pytest.raises(Error) as refused:
            moved()
        assert str(refused.value) == why
    assert file.read_bytes() == CONTENTS
    regions.check(Place("r", 8, 32), 8, "x")


def test_a_place_has_exactly_the_bytes_that_are_read_and_enough_for_what_is_written(file, regions):
    regions.register("r", file.name, 0, 40)
    for size in (7, 9):
        with pytest.raises(Error, match=f"tensor 'x' has 8 bytes, {size} were given in shared memory"):
            regions.read(Place("r", size, 0), (2,), np.dtype(np.float32), "x")
    with pytest.raises(Error, match="tensor 'x' has 8 bytes, 7 of region 'r' were given"):
        regions.write(Place("r", 7, 0), np.zeros(8, np.uint8), "x")
    with pytest.raises(Error, match="were asked for, it has 40"):  # before an array of this size is made
        regions.read(Place("r", 1 << 60, 0), (1 << 60,), BYTES, "x")


def test_memory_that_was_shrunk_is_neither_read_nor_extended_again(file, regions):
    regions.register("r", file.name, 0, 64)
    os.truncate(file, 30)
    for moved in (
        lambda: regions.read(Place("r", 8, 24), (8,), BYTES, "x"),
        lambda: regions.write(Place("r", 8, 24), np.zeros(8, np.uint8), "x"),
    ):
        with pytest.raises(Error, match="region 'r' has been shrunk since it was registered: register it again"):
            moved()
    assert file.read_bytes() == CONTENTS[:30]
    regions.write(Place("r", 8, 22), np.zeros(8, np.uint8), "x")
    assert file.read_bytes() == CONTENTS[:22] + bytes(8)


def test_a_tensor_without_room_in_the_systems_memory_is_refused_for_now(file, regions, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    regions.register("r", file.name, 0, 64)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(Refused, match="'x' cannot be written to region 'r': No space left on device") as refused:
        regions.write(Place("r", 8, 0), np.zeros(8, np.uint8), "x")
    assert refused.value.code == Code.BUSY


def test_texts_are_read_with_their_lengths_and_at_most_as_many_bytes_as_they_may_have(file, regions):
    file.write_bytes(b"\2\0\0\0ab\1\0\0\0c" + bytes(53))
    regions.register("r", file.name, 0, 64)
    spec = TensorSpec("bytes", capacity=3)
    assert RegionData(regions, Place("r", 11, 0), "x").strings(2, spec) == [b"ab", b"c"]
    file.write_bytes(b"\3\0\0\0abc" * 2 + bytes(50))
    assert RegionData(regions, Place("r", 14, 0), "x").strings(2, spec) == [b"abc"] * 2
    with pytest.raises(Error, match="tensor 'x' has at most 14 bytes, 15 were given"):
        RegionData(regions, Place("r", 15, 0), "x").strings(2, spec)


def test_elements_have_the_dtype_of_their_input(file, regions):
    regions.register("r", file.name, 0, 64)
    found = RegionData(regions, Place("r", 8, 8), "x").elements((2, 1), TensorSpec("int32", (1,)))
    assert (found.dtype, found.tobytes()) == (np.int32, CONTENTS[8:16])
