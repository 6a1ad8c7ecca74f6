"""Requests of one sample by 32 callers, per dialect, against decoding and one batched forward in one process.

``python -m benchmarks.rewards [--of pictures|texts|films] [--seconds N] [--rounds N]`` takes five minutes, and ends
with the goals and the results. A picture is a JPEG of 512 x 512 and about 60 KB, a text has 1,500 bytes, a film 8
frames of 128 x 128 in a .npy; the jurors are convolutional networks of 5 to 10 ms. Each form in which a trainer may ask
has a row. Contenders take turns in short windows, so that other load affects all of them; every row is printed. The
callers share the machine with the server, the ceiling has none. Beside the rate is the CPU time of a server's processes
per sample, which depends less on the load.

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
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import numpy as np
import psutil
import torch
from PIL import Image

from benchmarks.rewards.jurors import FRAMES, SIDE, SMALL, Convolutions, Films, Letters
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
    row = {"image": {"b64": text}}
    raw = io.BytesIO()
    np.save(raw, decoded(data)[None])  # it sends pixels, so nothing is decoded
    return {
        "flow_grpo": ("/dialects/flow_grpo", pickle.dumps({"images": [data]}, 4)),
        "verl_omni": ("/dialects/verl_omni", pickle.dumps({"images": [data], "prompts": ["a"], "metadata": {}}, 4)),
        "unirl": ("/dialects/unirl/score", json.dumps(unirl).encode()),
        "flow_factory": ("/dialects/flow_factory/compute", json.dumps({"prompt": ["a"], "image": [text]}).encode()),
        "reward_model": ("/dialects/reward_model/v1/chat/completions", json.dumps(judged).encode()),
        "reward_model, KServe": (
            "/dialects/reward_model/v1/models/conv:predict",
            json.dumps({"instances": [row]}).encode(),
        ),
        "cosmos": ("/dialects/cosmos/enqueue", told + b"\n" + raw.getvalue()),
    }


def text_bodies(data: bytes) -> dict[str, tuple[str, bytes]]:
    """The same of a text."""
    text = data.decode()
    said = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    chat = [{"role": "user", "content": text}]
    asked: dict[str, tuple[str, Any]] = {
        "openrlhf": ("openrlhf", {"query": [text], "prompts": [""], "labels": [None]}),
        "slime": ("slime", {"prompt": "", "response": text, "label": None}),
        "reward_model, classify": ("reward_model/classify", {"input": text}),
        "reward_model, SGLang's classify": ("reward_model/classify", {"text": [text]}),
        "reward_model, pooling": ("reward_model/pooling", {"input": [text]}),
        "reward_model, embeddings": ("reward_model/v1/embeddings", {"input": text}),
        "reward_model, TEI's predict": ("reward_model/predict", {"inputs": text}),
        "reward_model, KServe": ("reward_model/v1/models/juror:predict", {"instances": [text]}),
        "reward_model, LLaMA-Factory": ("reward_model/v1/score/evaluation", {"messages": [text]}),
        "reward_model, chat": ("reward_model/v1/chat/completions", {"model": "juror", "messages": chat}),
        "reward_model, score": ("pairs/score", {"text_1": "", "text_2": text}),
        "reward_model, rerank": ("pairs/rerank", {"query": "", "documents": [text]}),
        "nemo_gym": ("nemo_gym/verify", {"responses_create_params": {"input": ""}, "response": {"output": [said]}}),
    }
    return {name: (f"/dialects/{path}", json.dumps(body).encode()) for name, (path, body) in asked.items()}


def film_bodies(data: bytes) -> dict[str, tuple[str, bytes]]:
    """The same of a film, a .npy."""
    key = "sample_0_trajectory_frames"
    sample = {"sample_type": "progress", "trajectory": {"frames": {"__numpy_file__": key}, "task": "a"}}
    head = b'--bound\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    body = head % (b"sample_0", json.dumps(sample).encode()) + head % (key.encode(), data) + b"--bound--\r\n"
    return {"robometer": ("/dialects/robometer/evaluate_batch_npy", body)}


def film() -> bytes:
    sink = io.BytesIO()
    np.save(sink, np.random.default_rng(0).integers(0, 256, (FRAMES, SMALL, SMALL, 3), np.uint8))
    return sink.getvalue()


class Kind(NamedTuple):
    """What is scored.

    Attributes:
        data: one sample, as it is sent.
        bodies: path and body of one request by dialect.
        juror: makes the network, and `factory` the served model.
        rows: reads samples as the network takes them.
        dialects: the lines of the configuration.
    """

    data: bytes
    bodies: Callable[[bytes], dict[str, tuple[str, bytes]]]
    juror: Callable[[], torch.nn.Module]
    factory: str
    rows: Callable[[Iterable[bytes]], Any]
    dialects: str


def pixels(samples: Iterable[bytes]) -> torch.Tensor:
    return torch.from_numpy(np.stack([decoded(one) for one in samples]))


def kind_of(name: str) -> Kind:
    """Return what `--of` names."""
    if name == "texts":
        lines = "".join(f'[dialects.{one}]\nmodel = "juror"\n' for one in ("openrlhf", "nemo_gym"))
        lines += '[dialects.slime]\nmodel = "juror"\ninputs = {text = "response"}\n'
        lines += '[dialects.reward_model]\nmodel = "juror"\nscore_range = [-1e9, 1e9]\n'
        lines += '[dialects.pairs]\nspeaks = "reward_model"\nmodel = "juror"\ninputs = {text = "document"}\n'
        text = ("a number of words " * 84)[:1500].encode()
        return Kind(text, text_bodies, lambda: Letters().eval(), "letters", list, lines)
    if name == "films":
        frames = lambda samples: torch.from_numpy(np.stack([np.load(io.BytesIO(one)) for one in samples]))  # noqa: E731
        lines = '[dialects.robometer]\nmodel = "juror"\nscore_range = [-1e9, 1e9]\n'
        return Kind(film(), film_bodies, lambda: Films().eval(), "films", frames, lines)
    names = ("flow_grpo", "verl_omni", "unirl", "flow_factory", "cosmos")
    lines = "".join(f'[dialects.{one}]\nmodel = "juror"\nreward = "conv"\n' for one in names)
    lines += '[dialects.reward_model]\nmodel = "juror"\nreward = "conv"\nscore_range = [-1e9, 1e9]\n'
    return Kind(jpeg(), bodies, lambda: Convolutions().eval(), "convolutions", pixels, lines)


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def processor_ms(pid: int) -> float:
    """Of a process and its children, so far."""
    whole = psutil.Process(pid)
    times = [one.cpu_times() for one in (whole, *whole.children(recursive=True))]
    return 1e3 * sum(one.user + one.system for one in times)


def ceiling(kind: Kind, seconds: float, batch: int = CALLERS) -> tuple[float, float]:
    """Samples a second, and processors' ms for each, of one process.

    It decodes in threads and computes batches, the next one being decoded meanwhile.
    """
    model = kind.juror()

    def gathered() -> Any:
        parts = list(pool.map(lambda one: kind.rows([one]), [kind.data] * batch))
        return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else [row for part in parts for row in part]

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


def alone(kind: Kind, n: int) -> float:
    """Milliseconds of decoding and one forward, one sample after the other; the median."""
    model = kind.juror()
    times = []
    with torch.inference_mode():
        for _ in range(n):
            began = time.perf_counter()
            float(model(kind.rows([kind.data])))
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def ask(connection: HTTPConnection, path: str, body: bytes) -> None:
    connection.request("POST", path, body)
    answer = connection.getresponse()
    told = answer.read()
    if path.endswith("/enqueue"):  # and another request for the score
        form = urlencode({"uuid": json.loads(told)["uuid"], "type": "conv"}).encode()
        told = b"not available yet"
        while b"not available yet" in told:
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
def jurybox(kind: Kind, threads: int, replicas: int = 1) -> Iterator[tuple[str, int]]:
    """Start a server with the juror and its dialects; return its address and process.

    Args:
        threads: of each engine.
        replicas: engines.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/engine"
        lines = ["[server]", f'address = "{address}"', 'http = "127.0.0.1:0"', 'grpc = ""', 'devices = ["cpu"]']
        lines += [f"threads = {threads}", f"replicas = {replicas}"]
        lines += [
            "[models.juror]",
            f'factory = "benchmarks.rewards.jurors:{kind.factory}"',
            "max_batch = 32",
            "rows = 320",
            "lane_rows = 32",
        ]
        file = Path(folder) / "server.toml"
        file.write_text("\n".join(lines) + "\n" + kind.dialects)
        with ended([sys.executable, "-m", "jurybox.server.cli", "serve", str(file)]) as pid:
            with connect(address, timeout=100) as client:
                client.model("juror", rows=1, timeout=100).close()
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
    parser.add_argument("--of", default="pictures", choices=("pictures", "texts", "films"))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lone", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    kind = kind_of(arguments.of)
    data, pictures = kind.data, arguments.of == "pictures"
    size, load = f"{len(data) / 1000:.1f} KB each", f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{arguments.of} of {size}, {load}", flush=True)
    with contextlib.ExitStack() as stack:
        cores, threads = os.cpu_count() or 1, torch.get_num_threads()
        where = stack.enter_context(jurybox(kind, threads))
        asked = {name: (where, *one) for name, one in kind.bodies(data).items()}
        if pictures:
            # Engines of every core, as the script has them, which computes in as many threads as pictures come.
            for name, other in (
                (f"flow_grpo, {cores} threads", jurybox(kind, cores)),
                (f"flow_grpo, {cores} engines", jurybox(kind, 1, cores)),
            ):
                asked[name] = (stack.enter_context(other), *bodies(data)["flow_grpo"])
            asked["FastAPI script"] = (stack.enter_context(script("script")), "/", data)
        if pictures and find_spec("flask") and find_spec("gunicorn"):
            body = pickle.dumps({"images": [data], "prompts": ["a"], "metadata": {}}, 4)
            asked["Flask, pickles, gunicorn"] = (stack.enter_context(script("pickled")), "/", body)
        elif pictures:
            print("flask and gunicorn are not installed: the server that trainers ship is left out", flush=True)
        contenders: dict[str, Callable[[], tuple[float, float]]] = {"ceiling": lambda: ceiling(kind, arguments.seconds)}
        for name, (server, path, body) in asked.items():
            contenders[name] = partial(rate, server, path, body, arguments.seconds)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        waits: dict[str, list[float]] = {name: [] for name in ("decode + forward", *asked)}
        for number in range(arguments.rounds):
            for name, contender in contenders.items():
                found[name].append(contender())
                one_rate, worked = found[name][-1]
                print(f"round {number} {name}: {one_rate:.1f} a second, {worked:.1f} ms each", flush=True)
            waits["decode + forward"].append(alone(kind, arguments.lone))
            for name, one in asked.items():
                waits[name].append(lone(*one, arguments.lone))
            print(f"round {number} ms: " + ", ".join(f"{k} {v[-1]:.2f}" for k, v in waits.items()), flush=True)
    print(f"load at the end {os.getloadavg()[0]:.1f}\n")
    print(f"| | {arguments.of}/s, each round | of the ceiling | processors' ms for one | alone, ms | added, ms |")
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
    for name in kind.bodies(data):
        share = statistics.median(r / c for (r, _), (c, _) in zip(found[name], found["ceiling"], strict=True))
        added = statistics.median(a - b for a, b in zip(waits[name], waits["decode + forward"], strict=True))
        marks = ["reached" if good else "MISSED" for good in (share >= CEILING, added <= ALONE)]
        if added < 0:  # impossible: other programs had the cores during that measurement
            marks[1] = "NOT MEASURED, others load this machine"
        print(f"{name}: {100 * share:.0f} % of the ceiling (asked: {100 * CEILING:.0f} %, {marks[0]})", end=", ")
        print(f"{added:.2f} ms added to a lone one (asked: {ALONE} ms, {marks[1]})")


if __name__ == "__main__":
    main()
