"""Single-picture requests of 32 callers, per dialect, against decoding and one batched forward in one process.

``python -m benchmarks.rewards [--seconds N] [--rounds N]`` takes five minutes, and ends with the goals and the results.
A picture is a JPEG of 512 x 512 and about 60 KB, the juror a convolutional network of about 10 ms. Contenders take
turns in short windows, so that other load affects all of them; every row is printed. The callers share the machine with
the server, the ceiling has none. Beside the rate is the CPU time of a server's processes per picture, which depends
less on the load.

The ceiling and the servers of all dialects compute in half of the cores, as an engine does by default. Two rows more
show one dialect with engines of every core: in one engine's threads, and in an engine for each.

Peers are a FastAPI script without batching, and (where flask and gunicorn are installed) the server that image trainers
ship: Flask behind gunicorn with one synchronous worker for the one device.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import psutil
import torch
from PIL import Image

from benchmarks.rewards.jurors import SIDE, Convolutions
from jurybox.client import connect

CALLERS = 32
CEILING, ALONE = 0.90, 1.5  # share of the ceiling at least; ms added to a lone picture at most


def jpeg() -> bytes:
    """About 60 KB."""
    dice = np.random.default_rng(0)
    coarse = Image.fromarray(dice.integers(0, 256, (88, 88, 3), np.uint8)).resize(
        (SIDE, SIDE), Image.Resampling.BICUBIC
    )
    noisy = np.clip(np.asarray(coarse).astype(np.int16) + dice.integers(-3, 4, (SIDE, SIDE, 3)), 0, 255)
    sink = io.BytesIO()
    Image.fromarray(noisy.astype(np.uint8)).save(sink, "JPEG", quality=75)
    return sink.getvalue()


def bodies(data: bytes) -> dict[str, tuple[str, bytes]]:
    """Path and body of one request, by dialect."""
    text = base64.b64encode(data).decode()
    turn = {"text": "a", "image_b64": text}
    unirl = {"requests": [{"history": [turn], "required_rewards": ["conv"]}]}
    told = json.dumps({"prompts": ["a"], "reward_fn": {"conv": 1.0}, "media_type": "image"}).encode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{text}"}},
        {"type": "text", "text": "a"},
    ]
    judged = {"model": "conv", "messages": [{"role": "user", "content": parts}]}
    raw = io.BytesIO()
    np.save(raw, decoded(data)[None])  # it sends pixels, so nothing is decoded
    return {
        "flow_grpo": ("/dialects/flow_grpo", pickle.dumps({"images": [data]}, 4)),
        "verl_omni": ("/dialects/verl_omni", pickle.dumps({"images": [data], "prompts": ["a"], "metadata": {}}, 4)),
        "unirl": ("/dialects/unirl/score", json.dumps(unirl).encode()),
        "flow_factory": ("/dialects/flow_factory/compute", json.dumps({"prompt": ["a"], "image": [text]}).encode()),
        "reward_model": ("/dialects/reward_model/v1/chat/completions", json.dumps(judged).encode()),
        "cosmos": ("/dialects/cosmos/enqueue", told + b"\n" + raw.getvalue()),
    }


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def processor_ms(pid: int) -> float:
    """Of a process and its children, so far."""
    whole = psutil.Process(pid)
    times = [one.cpu_times() for one in (whole, *whole.children(recursive=True))]
    return 1e3 * sum(one.user + one.system for one in times)


def ceiling(data: bytes, seconds: float, batch: int = CALLERS) -> tuple[float, float]:
    """Pictures a second, and processors' ms for each, of one process.

    It decodes in threads and computes batches, the next one being decoded meanwhile.
    """
    model = Convolutions().eval()

    def gathered() -> torch.Tensor:
        return torch.from_numpy(np.stack(list(pool.map(decoded, [data] * batch))))

    with (
        ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool,
        ThreadPoolExecutor(1) as ahead,
        torch.inference_mode(),
    ):
        model(gathered())
        done, began, worked = 0, time.perf_counter(), time.process_time()
        coming = ahead.submit(gathered)
        while time.perf_counter() - began < seconds:
            images = coming.result()
            coming = ahead.submit(gathered)
            model(images)
            done += batch
        rate = done / (time.perf_counter() - began)
        coming.result()  # decoded and not computed: it counts for neither
        worked = 1e3 * (time.process_time() - worked) / (done + batch / 2)
    return rate, worked


def alone(data: bytes, n: int) -> float:
    """Milliseconds of decoding and one forward, one picture after the other; the median."""
    model = Convolutions().eval()
    times = []
    with torch.inference_mode():
        for _ in range(n):
            began = time.perf_counter()
            float(model(torch.from_numpy(decoded(data).copy())[None]))
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def ask(connection: HTTPConnection, path: str, body: bytes) -> None:
    connection.request("POST", path, body)
    answer = connection.getresponse()
    told = answer.read()
    if path.endswith("/enqueue"):  # and another request for the score
        form = urlencode({"uuid": json.loads(told)["uuid"], "type": "conv"}).encode()
        connection.request("POST", path.replace("/enqueue", "/pull"), form)
        answer = connection.getresponse()
        told = answer.read()
    if answer.status != 200 or b"error" in told[:40]:
        raise RuntimeError(f"{answer.status} {told[:200]!r}")


def rate(server: tuple[str, int], path: str, body: bytes, seconds: float) -> tuple[float, float]:
    """Requests a second of CALLERS callers, each on a connection of its own, and the server's ms for each."""
    where, pid = server
    done = [0] * CALLERS
    failures: list[BaseException] = []
    start = threading.Barrier(CALLERS + 1)
    until = [0.0]

    def caller(i: int) -> None:
        connection = HTTPConnection(where, timeout=60)
        try:
            ask(connection, path, body)
            start.wait(120)
            while time.perf_counter() < until[0]:
                ask(connection, path, body)
                done[i] += 1
        except BaseException as error:  # noqa: BLE001  reported below
            failures.append(error)
            start.abort()
        finally:
            connection.close()

    threads = [threading.Thread(target=caller, args=(i,), daemon=True) for i in range(CALLERS)]
    for thread in threads:
        thread.start()
    until[0] = time.perf_counter() + 3600
    with contextlib.suppress(threading.BrokenBarrierError):
        start.wait(120)
    began, worked = time.perf_counter(), processor_ms(pid)
    until[0] = began + seconds
    for thread in threads:
        thread.join(seconds + 90)
    if failures:
        raise failures[0]
    took = time.perf_counter() - began
    return sum(done) / took, (processor_ms(pid) - worked) / max(1, sum(done))


def lone(server: tuple[str, int], path: str, body: bytes, n: int) -> float:
    """Milliseconds of one request after the other; the median."""
    connection = HTTPConnection(server[0], timeout=60)
    times = []
    for _ in range(n):
        began = time.perf_counter()
        ask(connection, path, body)
        times.append(1e3 * (time.perf_counter() - began))
    connection.close()
    return statistics.median(times)


@contextlib.contextmanager
def jurybox(threads: int, replicas: int = 1) -> Iterator[tuple[str, int]]:
    """Start a server with the juror and all dialects for pictures; return its address and process.

    Args:
        threads: of each engine.
        replicas: engines.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine"
        lines = ["[server]", f'address = "{address}"', 'http = "127.0.0.1:0"', 'grpc = ""', 'devices = ["cpu"]']
        lines += [f"threads = {threads}", f"replicas = {replicas}"]
        lines += [
            "[models.conv]",
            'factory = "benchmarks.rewards.jurors:convolutions"',
            "max_batch = 32",
            "rows = 320",
            "lane_rows = 32",
        ]
        for name in ("flow_grpo", "verl_omni", "unirl", "flow_factory", "reward_model", "cosmos"):
            lines += [f"[dialects.{name}]", 'model = "conv"']
            lines += ["score_range = [-1e9, 1e9]"] if name == "reward_model" else []
        file = Path(folder) / "server.toml"
        file.write_text("\n".join(lines) + "\n")
        with ended([sys.executable, "-m", "jurybox.server.cli", "serve", str(file)]) as pid:
            with connect(address, timeout=100) as client:
                client.model("conv", rows=1, timeout=100).close()
                while (where := client.status()["server"]["http"]).endswith(":0"):
                    time.sleep(0.05)
            yield where, pid


@contextlib.contextmanager
def script(module: str) -> Iterator[tuple[str, int]]:
    """Start a peer, "script" or "pickled"; return its address and process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    threads = str(torch.get_num_threads())
    if module == "script":
        command = [sys.executable, "-m", "benchmarks.rewards.script", str(port), threads]
    else:
        os.environ["JURYBOX_BENCHMARK_THREADS"] = threads
        serve = ["-w", "1", "-t", "300", "-b", f"127.0.0.1:{port}", "benchmarks.rewards.pickled:app"]
        command = [sys.executable, "-m", "gunicorn", *serve]
    with ended(command) as pid:
        connection = HTTPConnection(f"127.0.0.1:{port}", timeout=60)
        until = time.monotonic() + 100
        while True:
            try:
                connection.request("GET", "/nothing")
                connection.getresponse().read()
                break
            except OSError:
                connection.close()
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        connection.close()
        yield f"127.0.0.1:{port}", pid


@contextlib.contextmanager
def ended(command: list[str]) -> Iterator[int]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rewards")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lone", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    data = jpeg()
    print(f"JPEG of {len(data) / 1000:.0f} KB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with contextlib.ExitStack() as stack:
        cores, threads = os.cpu_count() or 1, torch.get_num_threads()
        where, plain = (stack.enter_context(one) for one in (jurybox(threads), script("script")))
        asked = {name: (where, *one) for name, one in bodies(data).items()}
        # Engines of every core, as the script has them, which computes in as many threads as pictures come.
        for name, other in (
            (f"flow_grpo, {cores} threads", jurybox(cores)),
            (f"flow_grpo, {cores} engines", jurybox(1, cores)),
        ):
            asked[name] = (stack.enter_context(other), *bodies(data)["flow_grpo"])
        asked["FastAPI script"] = (plain, "/", data)
        if find_spec("flask") and find_spec("gunicorn"):
            body = pickle.dumps({"images": [data], "prompts": ["a"], "metadata": {}}, 4)
            asked["Flask, pickles, gunicorn"] = (stack.enter_context(script("pickled")), "/", body)
        else:
            print("flask and gunicorn are not installed: the server that trainers ship is left out", flush=True)
        contenders: dict[str, Callable[[], tuple[float, float]]] = {"ceiling": lambda: ceiling(data, arguments.seconds)}
        for name, (server, path, body) in asked.items():
            contenders[name] = partial(rate, server, path, body, arguments.seconds)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        waits: dict[str, list[float]] = {name: [] for name in ("decode + forward", *asked)}
        for number in range(arguments.rounds):
            for name, contender in contenders.items():
                found[name].append(contender())
                one_rate, worked = found[name][-1]
                print(f"round {number} {name}: {one_rate:.1f} pictures a second, {worked:.1f} ms each", flush=True)
            waits["decode + forward"].append(alone(data, arguments.lone))
            for name, one in asked.items():
                waits[name].append(lone(*one, arguments.lone))
            print(f"round {number} ms: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in waits.items()), flush=True)
    print(f"load at the end {os.getloadavg()[0]:.1f}\n")
    print("| | pictures/s, each round | of the ceiling | processors' ms for a picture | alone, ms | added, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, rates in found.items():
        shares = [r / c for (r, _), (c, _) in zip(rates, found["ceiling"], strict=True)]
        own = waits["decode + forward" if name == "ceiling" else name]
        added = [a - b for a, b in zip(own, waits["decode + forward"], strict=True)]
        cells = (
            ", ".join(f"{r:.1f}" for r, _ in rates),
            ", ".join(f"{100 * share:.0f} %" for share in shares),
            ", ".join(f"{worked:.1f}" for _, worked in rates),
            ", ".join(f"{value:.1f}" for value in own),
            ", ".join(f"{value:.1f}" for value in added),
        )
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\nof each dialect, the median round:")
    for name in bodies(data):
        share = statistics.median(r / c for (r, _), (c, _) in zip(found[name], found["ceiling"], strict=True))
        added = statistics.median(a - b for a, b in zip(waits[name], waits["decode + forward"], strict=True))
        marks = ["reached" if good else "MISSED" for good in (share >= CEILING, added <= ALONE)]
        if added < 0:  # impossible: other programs had the cores during that measurement
            marks[1] = "NOT MEASURED, others load this machine"
        print(f"{name}: {100 * share:.0f} % of the ceiling (asked: {100 * CEILING:.0f} %, {marks[0]})", end=", ")
        print(f"{added:.2f} ms added to a lone picture (asked: {ALONE} ms, {marks[1]})")


if __name__ == "__main__":
    main()
