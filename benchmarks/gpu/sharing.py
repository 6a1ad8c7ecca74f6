"""A shared device: rows and weights passed in its memory, sleeping models, and compiled ones.

Without a GPU device memory is files (jurybox.protocol.device_memory): the same code runs, and its figures mean nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.crowd import ClientFailed, Crowd
from benchmarks.gpu.measure import Found, Setup
from benchmarks.gpu.models import heavy_state
from benchmarks.gpu.served import _HEAVY, _MIB, _NO_DIFFERENCE, _device_memory, _samples, _server

_SIDES = (96, 384, 1024)  # pixels of a square image


@contextlib.contextmanager
def _device_files(at: Setup) -> Iterator[None]:
    """Without a GPU: files in place of its memory, for this process and its children."""
    from jurybox.protocol.device_memory import FAKE

    if at.gpu:
        yield
        return
    folder = at.folder / "device-memory"
    folder.mkdir(exist_ok=True)
    os.environ[FAKE] = str(folder)
    try:
        yield
    finally:
        del os.environ[FAKE]


def _filled(array: Any, values: np.ndarray[Any, Any], at: Setup) -> Any:
    """Write rows to device memory; return a function that reads it as an array on the host."""
    if not at.gpu:
        array[:] = values
        return array
    import torch

    tensor = torch.as_tensor(array, device=at.device)
    tensor.copy_(torch.from_numpy(values))
    return tensor


def _host(array: Any, at: Setup) -> np.ndarray[Any, Any]:
    if not at.gpu:
        return np.array(array)
    import torch

    return np.asarray(torch.as_tensor(array, device=at.device).cpu().numpy())


def _median_us(ask: Callable[[], None], seconds: float) -> tuple[float, int]:
    took = []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(took) < 5:
        began = time.perf_counter_ns()
        ask()
        took.append((time.perf_counter_ns() - began) / 1e3)
    return float(np.median(took)), len(took)


def payload(at: Setup, found: Found) -> None:
    """One image a request through host memory and through device memory, of three sizes; the same answers."""
    sides = _SIDES[:2] if at.quick else _SIDES
    models = {
        f"image{side}": {"factory": "benchmarks.gpu.models:picture", "args": {"side": side}, "max_batch": 8, "rows": 32}
        for side in sides
    }
    with _device_files(at), _server(at, models) as running, running.connect() as client:
        rng = np.random.default_rng(0)
        for side in sides:
            images = rng.integers(0, 256, (1, side, side, 3), np.uint8)
            model = client.model(f"image{side}", rows=2)
            expected = np.asarray(model.infer(images))
            with model.rows(1) as rows:
                rows.inputs["image"][:] = images
                host, _ = _median_us(rows.infer, at.window)
            with client.device_rows(f"image{side}", 1) as rows:
                _filled(rows.inputs["image"], images, at)
                device, asked = _median_us(rows.infer, at.window)
                if not np.allclose(got := _host(rows.outputs["score"], at), expected, atol=5e-3):
                    raise ClientFailed(f"{side} pixels: {got} came through device memory, {expected} from the host")
            found.figures |= {f"host_p50_us_{side}": host, f"device_p50_us_{side}": device, f"asked_{side}": asked}
            for label, value in (("host", host), ("device", device)):
                found.curves.setdefault("payload: p50, us", {}).setdefault(label, []).append((side, value))
    least, most = (found.figures[f"device_p50_us_{side}"] for side in (sides[0], sides[-1]))
    found.figures["device_largest_over_smallest_us"] = most - least  # the forward's own growth is in it


def device_weights(at: Setup, found: Found) -> None:
    """Publications that stay on the device, beside those through the host: until used, and never torn."""
    for label, megabytes in (("100mb", 1.0 if at.quick else 100.0), ("1200mb", 2.0 if at.quick else 1200.0)):
        for way in ("host", "device"):
            found.figures |= {f"{label}_{way}_{key}": value for key, value in _published(at, megabytes, way).items()}


def _published(at: Setup, megabytes: float, way: str) -> dict[str, float]:
    import torch

    from jurybox.protocol.weights import publisher as module

    model: dict[str, object] = {
        "factory": _HEAVY, "args": {"megabytes": megabytes, "every": 1}, "publish": "double_buffer", "max_batch": 16,
    }  # fmt: skip
    device = torch.device(at.device)
    state = {name: torch.zeros(shape, device=device) for name, shape in heavy_state(megabytes).items()}
    took: list[float] = []
    adopted: list[float] = []
    on_device = module._on_device
    with _device_files(at), _server(at, {"heavy": model}) as running, running.connect() as client:
        if not at.gpu:
            module._on_device = lambda tensor: True
        try:
            learner = client.publisher("heavy", device=0) if way == "device" else client.publisher("heavy")
            asked = client.model("heavy", rows=2)
            for _ in range(2 if at.quick else 5):
                for tensor in state.values():
                    tensor.fill_(learner.version + 1)
                if at.gpu:
                    torch.cuda.synchronize()
                began = time.monotonic()
                version = learner.publish(state)
                took.append((time.monotonic() - began) * 1e3)
                while (reply := asked.infer_reply(np.zeros((1, 4), np.float32))).version < version:
                    pass
                adopted.append((time.monotonic() - began) * 1e3)
                if not reply.outputs["low"][0] == reply.outputs["high"][0] == reply.version:
                    raise ClientFailed(f"torn: version {reply.version} was answered with {reply.outputs}")
            with Crowd("versions", running.address, ["heavy"], _NO_DIFFERENCE, 2) as crowd:

                def hammer() -> None:
                    until = time.monotonic() + at.window
                    while time.monotonic() < until:
                        for tensor in state.values():
                            tensor.fill_(learner.version + 1)
                        learner.publish(state)

                window = crowd.window(2, at.window, during=hammer)
        finally:
            module._on_device = on_device
    seen = len(np.unique(window.version))
    return {
        "publish_ms": float(np.median(took)),
        "adopted_ms": float(np.median(adopted)),
        "torn_reads": 0.0,  # a client that met one has failed above
        "versions_seen": seen,
    }


def asleep(at: Setup, found: Found) -> None:
    """Weights to host memory and back, of 100 MB and of 1.2 GB: the time, and the freed device memory."""
    for label, megabytes in (("100mb", 1.0 if at.quick else 100.0), ("1200mb", 2.0 if at.quick else 1200.0)):
        model: dict[str, object] = {"factory": _HEAVY, "args": {"megabytes": megabytes}, "publish": "double_buffer"}
        to_host, to_device, freed = [], [], []
        with _server(at, {"heavy": model}) as running, running.connect() as client:
            asked, row = client.model("heavy", rows=2), np.zeros((1, 4), np.float32)
            before = asked.infer(row)
            for _ in range(1 if at.quick else 3):
                free = _device_memory()[0] if at.gpu else 0.0
                began = time.monotonic()
                client.sleep("heavy", timeout=60.0)
                to_host.append((time.monotonic() - began) * 1e3)
                freed.append((_device_memory()[0] - free) / _MIB if at.gpu else 0.0)
                began = time.monotonic()
                client.wake("heavy", timeout=60.0)
                to_device.append((time.monotonic() - began) * 1e3)
                after = asked.infer(row)
                if any((before[name] != after[name]).any() for name in before):
                    raise ClientFailed(f"{before} was answered before the sleep, {after} after it")
            pauses = []
            for _ in range(3 if at.quick else 20):
                began = time.monotonic()
                with client.pause():
                    pauses.append((time.monotonic() - began) * 1e3)
                asked.infer(row)
        found.figures |= {
            f"{label}_sleep_ms": float(np.median(to_host)),
            f"{label}_wake_ms": float(np.median(to_device)),
            f"{label}_freed_mib": min(freed),
            f"{label}_pause_ms": float(np.median(pauses)),
        }
    found.notes.append("sleep and wake as a client sees them, which looks every 50 ms")


def compiled(at: Setup, found: Found) -> None:
    """The small network as it is, by torch.compile, and ahead by AOTInductor: warm-up, and a crowd's requests."""
    import torch
    from safetensors.torch import save_file
    from tests.gpu import models as networks

    samples, clients, most = _samples("vector", at.quick), 2 if at.quick else 16, 2 if at.quick else 16
    served = networks.vector()
    module = served.module.eval().to(at.device)
    file, weights = str(at.folder / "vector.pt2"), str(at.folder / "vector.safetensors")
    batch = torch.export.Dim("batch", min=1, max=64)
    began = time.monotonic()
    with torch.no_grad():
        example = (torch.zeros(2, 52, device=at.device),)
        program = torch.export.export(module, example, dynamic_shapes={"observation": {0: batch}})
        keep = {"always_keep_tensor_constants": True}
        torch._inductor.aoti_compile_and_package(program, package_path=file, inductor_configs=keep)
    found.figures["ahead_compile_s"] = time.monotonic() - began
    save_file({name: tensor.cpu().contiguous() for name, tensor in module.state_dict().items()}, weights)
    common: dict[str, object] = {"max_batch": most, "rows": 8 * clients, "lane_rows": 2}
    shapes = {"observation": {"dtype": "float32", "shape": [52]}}
    outputs = {"logits": {"dtype": "float32", "shape": [145]}, "value": {"dtype": "float32"}}
    ahead = {"exported": file, "aot": True, "weights": weights, "inputs": shapes, "outputs": outputs}
    factory = {"factory": "tests.gpu.models:vector"}
    ways: dict[str, dict[str, object]] = {
        "plain": {**common, **factory, "cuda_graphs": False},
        "compiled": {**common, **factory, "compile": True, "cuda_graphs": False},
        "ahead": {**common, **ahead, "cuda_graphs": False},
    }
    # On a GPU torch.compile of the small network takes more than the start of other servers may.
    with _server(at, ways, start=180.0) as running, running.connect() as client:
        told = {model["name"]: model for model in client.status()["models"]}
        if bad := {name: model["reason"] for name, model in told.items() if model["state"] != "ready"}:
            raise ClientFailed(f"not served: {bad}")
        for name in ways:
            found.figures[f"{name}_warm_up_s"] = told[name]["warm_up"]["seconds"]
            with Crowd("served", running.address, [name], samples, clients) as crowd:
                crowd.window(clients, min(0.5, at.window))
                figures = crowd.window(clients, at.window).figures()
            found.figures |= {f"{name}_{key}": value for key, value in figures.items()}
        found.figures["compiled_graphs"] = told["compiled"]["warm_up"]["graphs"]
