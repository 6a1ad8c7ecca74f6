"""The driver's calls by ctypes: arguments by value and by reference, contexts, errors; a library checks them."""

import json
import os
import shutil
import subprocess
import sys

import pytest

STUB = r"""
#include <stdint.h>
#include <string.h>
#include <stdlib.h>
typedef struct { char bytes[64]; } Handle;
static int depth; static size_t size; static uint64_t memory;
static void *const context = (void *)0x11112222333344, *const event = (void *)0xabcdef0123;
static void *const stream = (void *)0x5555555555;
int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGet(int *device, int number) { *device = number; return number < 1 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = context; return device != 0; }
int cuCtxPushCurrent_v2(void *pushed) { ++depth; return pushed != context; }
int cuCtxPopCurrent_v2(void **popped) { --depth; *popped = context; return 0; }
int cuMemAlloc_v2(uint64_t *out, size_t n) { size = n; *out = memory = (uint64_t)malloc(n); return depth != 1; }
int cuMemFree_v2(uint64_t p) { return p != memory || depth != 1; }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *n, uint64_t p) {
    *base = memory; *n = size; return p - memory >= size;
}
int cuIpcGetMemHandle(Handle *h, uint64_t p) { memset(h, 7, 64); memcpy(h, &p, 8); return depth != 1; }
int cuIpcOpenMemHandle_v2(uint64_t *p, Handle h, unsigned flags) {
    for (int i = 8; i < 64; ++i) if (h.bytes[i] != 7) return 400;
    memcpy(p, &h, 8); return flags != 1 || depth != 1;
}
int cuIpcCloseMemHandle(uint64_t p) { return p != memory; }
int cuEventCreate(void **out, unsigned flags) { *out = event; return flags != 6; }
int cuIpcGetEventHandle(Handle *h, void *e) { memset(h, 9, 64); return e != event; }
int cuIpcOpenEventHandle(void **out, Handle h) { *out = event; return h.bytes[0] == 9 && h.bytes[63] == 9 ? 0 : 400; }
int cuEventRecord(void *e, void *s) { return e != event || s != stream; }
int cuStreamWaitEvent(void *s, void *e, unsigned flags) { return e != event || s != stream || flags; }
int cuEventDestroy_v2(void *e) { return e != event; }
int cuMemcpyDtoDAsync_v2(uint64_t d, uint64_t s, size_t n, void *st) {
    return d != memory + 64 || s != memory || n != 32 || st != stream;
}
int cuStreamSynchronize(void *s) { return s != stream; }
int cuGetErrorString(int error, const char **text) {
    *text = error == 400 ? "invalid resource handle" : "other"; return 0;
}
"""
ASK = """
import json, numpy
from jurybox.protocol.device_memory import driver
from jurybox.protocol.errors import Refused
told, stream = {}, 0x5555555555
device = driver(0)
memory, event = device.allocate(1000), device.event()
told["bytes"] = device.extent(memory + 5)[1]
handle = device.export(memory)
told["same"] = device.open(handle) == memory
other = device.open_event(device.export_event(event))
device.record(event, stream); device.wait(other, stream); device.copy(memory + 64, memory, 32, stream)
device.synchronize(stream)
for what, call in (("foreign", lambda: device.open(bytes(64))), ("short", lambda: device.open(b"x")),
                   ("absent", lambda: driver(1)), ("outside", lambda: device.extent(memory + (2 << 20)))):
    try:
        call()
    except Refused as error:
        told[what] = str(error)
told["array"] = device.array(memory, (3, 4), numpy.dtype("float32")).__cuda_array_interface__["typestr"]
device.destroy_event(other); device.close(memory); device.free(memory)
print(json.dumps(told))
"""


def test_the_driver_is_called_as_it_wants_to_be(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    (tmp_path / "stub.c").write_text(STUB)
    command = [compiler, "-shared", "-fPIC", "-w", "-o", tmp_path / "libcuda.so.1", tmp_path / "stub.c"]
    subprocess.run(command, check=True, timeout=60)
    env = {name: value for name, value in os.environ.items() if name != "_JURYBOX_FAKE_DEVICE"}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**env, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "bytes": 2 << 20,  # a block of its own: the driver shares whole ones
        "same": True,
        "foreign": "cuIpcOpenMemHandle_v2 gave 400 (invalid resource handle)",
        "short": "1 bytes came as a handle of device memory, it has 64",
        "absent": "cuDeviceGet gave 101 (other)",
        "outside": "cuMemGetAddressRange_v2 gave 1 (other)",
        "array": "<f4",
    }
