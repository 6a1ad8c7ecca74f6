"""An unmodified tritonclient with inputs and outputs in shared memory."""

from __future__ import annotations

import errno
import os
from functools import partial

import numpy as np
import pytest
from tests.tritons import ANSWER, ROWS, observation, plain
from tritonclient.utils import InferenceServerException, shared_memory

from jurybox.protocol.errors import Code, Refused
from jurybox.server.gateway.inference.parameters import Place
from jurybox.server.gateway.inference.shared_memory import Regions


@pytest.fixture
def region():
    made = []

    def make(name, size):
        made.append(shared_memory.create_shared_memory_region(name, f"/oip_test_{name}", size))
        return made[-1]

    yield make
    for handle in made:
        shared_memory.destroy_shared_memory_region(handle)


def test_inputs_and_outputs_in_shared_memory(kind, region):
    module, client = kind
    given, got = region("given", 2 * ROWS.nbytes), region("got", 2 * ROWS.nbytes)
    shared_memory.set_shared_memory_region(given, [np.zeros_like(ROWS), ROWS])
    client.register_system_shared_memory("given", "/oip_test_given", 2 * ROWS.nbytes)
    client.register_system_shared_memory("got", "/oip_test_got", ROWS.nbytes, offset=ROWS.nbytes)
    try:
        regions = plain(client.get_system_shared_memory_status())
        regions = regions["regions"].values() if isinstance(regions, dict) else regions
        assert {(one["name"], one["key"], int(one.get("offset", 0)), int(one["byte_size"])) for one in regions} == {
            ("given", "/oip_test_given", 0, 2 * ROWS.nbytes), ("got", "/oip_test_got", ROWS.nbytes, ROWS.nbytes),
        }  # fmt: skip
        tensor = module.InferInput("observation", [3, 4], "FP32")
        tensor.set_shared_memory("given", ROWS.nbytes, offset=ROWS.nbytes)
        output = module.InferRequestedOutput("action")
        output.set_shared_memory("got", ROWS.nbytes)
        client.infer("affine", [tensor], outputs=[output])
        read = partial(shared_memory.get_contents_as_numpy, got, np.float32, [3, 4])
        np.testing.assert_array_equal(read(offset=ROWS.nbytes), ANSWER)
        np.testing.assert_array_equal(read(), np.zeros_like(ROWS))  # nothing is written outside the region

        # Input in shared memory, output in the answer.
        np.testing.assert_array_equal(client.infer("affine", [tensor]).as_numpy("action"), ANSWER)
        output.set_shared_memory("got", ROWS.nbytes, offset=4)
        with pytest.raises(InferenceServerException, match="of region 'got' were asked for, it has"):
            client.infer("affine", [tensor], outputs=[output])
    finally:
        client.unregister_system_shared_memory("given")
        client.unregister_system_shared_memory()
    assert not plain(client.get_system_shared_memory_status())
    with pytest.raises(InferenceServerException, match="no region 'given' is registered"):
        client.infer("affine", [tensor])


@pytest.mark.parametrize(
    ("key", "offset", "size", "reason"),
    [
        ("/oip_test_small", 0, 1 << 40, "has 64"),
        ("/oip_test_small", 60, 8, "has 64"),
        ("/oip_test_small", 2**63 - 1, 8, "has 64"),
        ("/oip_test_small", 0, 0, "has 64"),
        ("/oip_test_absent", 0, 8, "cannot be opened"),
        ("/../etc/passwd", 0, 8, "expected a name as shm_open"),
        ("..", 0, 8, "expected a name as shm_open"),
        ("/jurybox-0-abcd-scoreboard-0", 0, 8, "begins with 'oip_test_'"),
        ("/somebodys_own", 0, 8, "begins with 'oip_test_'"),
    ],
)
def test_memory_that_is_not_there_cannot_be_registered(kind, region, key, offset, size, reason):
    _, client = kind
    region("small", 64)
    with pytest.raises(InferenceServerException, match=reason):
        client.register_system_shared_memory("wrong", key, size, offset)
    assert not plain(client.get_system_shared_memory_status())


def test_a_region_that_was_shrunk_is_an_error_and_the_server_goes_on(kind, region):
    module, client = kind
    region("shrunk", 4096)
    client.register_system_shared_memory("shrunk", "/oip_test_shrunk", 4096)
    try:
        os.truncate("/dev/shm/oip_test_shrunk", 8)
        tensor = module.InferInput("observation", [3, 4], "FP32")
        tensor.set_shared_memory("shrunk", ROWS.nbytes)
        with pytest.raises(InferenceServerException, match="shrunk since it was registered"):
            client.infer("affine", [tensor])
        output = module.InferRequestedOutput("action")
        output.set_shared_memory("shrunk", ROWS.nbytes)
        with pytest.raises(InferenceServerException, match="shrunk since it was registered"):
            client.infer("affine", [observation(module)], outputs=[output])
    finally:
        client.unregister_system_shared_memory("shrunk")
        os.truncate("/dev/shm/oip_test_shrunk", 4096)
    assert client.is_server_ready()


def test_a_tensor_that_the_kernel_reads_and_writes_in_parts_is_complete(region, monkeypatch):
    """One call takes at most 2 GiB, and less if the memory is full."""
    made = region("parts", ROWS.nbytes)
    regions, place = Regions("oip_test_"), Place("parts", ROWS.nbytes, 0)
    regions.register("parts", "/oip_test_parts", 0, ROWS.nbytes)
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:7]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, [buffers[0][:7]], at))
    regions.write(place, ROWS, "action")
    np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(made, np.float32, [3, 4]), ROWS)
    np.testing.assert_array_equal(regions.read(place, (3, 4), np.dtype(np.float32), "observation"), ROWS)

    def full(fd, buffers, at):
        if at >= 14:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(fd, [buffers[0][:7]], at)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(Refused, match="'action' cannot be written to region 'parts': No space left") as refused:
        regions.write(place, ROWS, "action")
    assert refused.value.code == Code.BUSY
    regions.close()


def test_cuda_shared_memory_is_off_by_default(kind):
    _, client = kind
    assert not plain(client.get_cuda_shared_memory_status())
    with pytest.raises(InferenceServerException, match="CUDA shared memory is off here.*cuda_shared_memory = true"):
        client.register_cuda_shared_memory("x", b"aGFuZGxl", 0, 64)
