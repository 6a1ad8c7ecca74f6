"""Hockey collectors and their policy server on two hosts with a slow network between them, in comparison with one host.

``python -m benchmarks.cluster.two_hosts [--delay 0.005] [--workers 4] [--envs 8 64 256] [--seconds 5] [--rounds 3]``

The hosts are network namespaces of this machine (`namespaces`) with their own shared memory. On one host, collectors
use shared memory; from the other one, the gRPC endpoint with its token and certificate. Half of the cores are for the
server (with its gateway and the link itself), the other half for the collectors, on either host: two machines would
each have their own, and collectors on the server's host must not have fewer. It measures env steps per second of all
collectors, after a second of warm-up.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from benchmarks.cluster.namespaces import A, B, TwoHosts, round_trip
from jurybox.cluster import endpoints
from jurybox.protocol.segment import directory
from jurybox.studies.hockey.settings import CHANNEL, POOL, HockeyTraining

RESULTS = Path(__file__).parent / "results"
ENGINE = "hockey"
_ODDS = {"anchor:weak": 0.375, "anchor:strong": 0.375, "pool:1": 0.125, "pool:2": 0.125}  # as a league's with a pool
_WARM = 1.0


def half_of_cores(half: int) -> list[int]:
    """One half of the cores: 0 the server's and the link's, 1 the collectors'."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        return cores
    return cores[: len(cores) // 2] if half == 0 else cores[len(cores) // 2 :]


def serve(registry: Path, settings: HockeyTraining) -> None:
    """A server with a policy and two past selves, until standard input ends; the policy is published twice a second."""
    os.sched_setaffinity(0, half_of_cores(0))
    from jurybox.cluster.endpoints import locks
    from jurybox.studies.hockey.algorithm import network_of
    from jurybox.studies.hockey.served import MODEL, POOL_MODEL, PastSelves, models
    from jurybox.studies.hockey.train import sizes_of
    from jurybox.training.algorithms.registry import make
    from jurybox.training.runtime.local_server import LocalServer

    sizes = sizes_of(settings)
    policy = make(**network_of(settings, sizes)).network()
    state = {name: tensor.numpy() for name, tensor in policy.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        token, authority, locked = locks(Path(folder), A)
        made = models(settings, sizes)
        server = LocalServer(made, registry / "server.log", http=False, server={"grpc": f"{A}:0", **locked})
        try:
            server.start()
            server.wait()
            with server.connect() as client, PastSelves(server.address, POOL_MODEL, sizes[0]) as past:
                where = f"grpcs://{client.status()['server']['grpc']}"
                newest = client.publisher(MODEL)
                newest.publish(policy)
                for name in ("pool:1", "pool:2"):
                    past.keep(name, state)
                endpoints.show(
                    registry,
                    1,
                    endpoints.Endpoint(ENGINE, "1", endpoints.this_machine(), server.address, where, token, authority),
                )
                os.set_blocking(0, False)
                while sys.stdin.buffer.raw.read(1) is None:  # type: ignore[attr-defined]
                    newest.publish(policy)
                    time.sleep(0.5)
        finally:
            server.stop()


def collect(registry: Path, settings: HockeyTraining, number: int, seconds: float) -> float:
    """Steps a second of one collector, from the moment of the shared clock that it is told once it is ready."""
    os.sched_setaffinity(0, half_of_cores(1))
    from jurybox.studies.hockey.algorithm import network_of
    from jurybox.studies.hockey.train import plan, sizes_of
    from jurybox.training.algorithms.registry import make
    from jurybox.training.runtime.plan import load
    from jurybox.training.runtime.role_context import RoleContext
    from jurybox.training.runtime.shared_resources import SharedResources

    folders = {POOL: str(registry), endpoints.REGISTRY: str(registry)}
    planned = replace(plan(settings, registry, engine=ENGINE), folders=folders)
    with SharedResources.create(planned) as shared, shared.publisher(CHANNEL) as publisher:
        policy = make(**network_of(settings, sizes_of(settings))).network()
        publisher.publish(policy, extra={"updates": 0, "curriculum": {"odds": _ODDS}})
        context = RoleContext(planned, number, shared, lambda message: None)
        role = planned.roles[number]
        actor = load(role.make)(context, **role.settings)
        try:
            for _, _, weights in context.followed:
                weights.refresh()
            print("ready", flush=True)
            at = float(sys.stdin.readline())
            while time.monotonic() < at + _WARM:
                actor.step()
            began, steps = time.monotonic(), 0
            while (now := time.monotonic()) < at + _WARM + seconds:
                steps += actor.step()
            return steps / (now - began)
        finally:
            actor.close()


@contextmanager
def served(hosts: TwoHosts, registry: Path, settings: HockeyTraining) -> Iterator[None]:
    """The server on the first host, serving."""
    command = hosts.inside(A, _this("--serve", str(registry), settings))
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=_environment(registry, A)) as process:
        try:
            until = time.monotonic() + 120
            while endpoints.find(registry, ENGINE) is None:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the server did not come up; what it said is above")
                time.sleep(0.1)
            yield
        finally:
            process.communicate(timeout=60)


def rate(hosts: TwoHosts, registry: Path, settings: HockeyTraining, where: str, seconds: float) -> float:
    """Steps per second of all collectors, on the host `where`."""
    processes = [
        subprocess.Popen(
            hosts.inside(where, _this("--collect", str(registry), settings, number, seconds)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(registry, where),
        )
        for number in range(settings.workers)
    ]
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("a collector ended before it began; what it said is above")
    at = time.monotonic() + 0.1
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{at}\n")
        process.stdin.flush()
    return sum(float(process.communicate(timeout=seconds + 90)[0]) for process in processes)


def _this(role: str, registry: str, settings: HockeyTraining, *more: float) -> list[str]:
    sizes = ["--workers", str(settings.workers), "--envs", str(settings.envs_per_worker)]
    return [sys.executable, "-m", "benchmarks.cluster.two_hosts", role, registry, *sizes, "--more", *map(str, more)]


def _environment(registry: Path, host: str) -> dict[str, str]:
    memory = registry / host
    memory.mkdir(exist_ok=True)
    return {**os.environ, "JURYBOX_SHM_DIR": str(memory), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def measure(given: argparse.Namespace) -> list[str]:
    lines, loads, cores = [], [os.getloadavg()[0]], len(os.sched_getaffinity(0))
    with TwoHosts(given.delay, half_of_cores(0)) as hosts:
        trip = round_trip(hosts)
        for envs in given.envs:
            settings = HockeyTraining(workers=given.workers, envs=given.workers * envs)
            found: dict[str, list[float]] = {"one": [], "two": [], "two, no delay": []}
            with tempfile.TemporaryDirectory(dir=directory(), prefix="two-hosts-") as folder:
                registry = Path(folder)
                with served(hosts, registry, settings):
                    for _ in range(given.rounds):
                        for name, where, delay in (("one", A, 0.0), ("two", B, given.delay), ("two, no delay", B, 0.0)):
                            hosts.delay = delay
                            found[name].append(rate(hosts, registry, settings, where, given.seconds))
                            loads.append(os.getloadavg()[0])
                            print(envs, name, f"{found[name][-1]:.0f} steps/s, load {loads[-1]:.1f}", flush=True)
            middle = {name: statistics.median(values) for name, values in found.items()}
            each = "; ".join(", ".join(f"{value:.0f}" for value in found[name]) for name in ("one", "two"))
            lines.append(
                f"| {envs} | {middle['one']:.0f} | {middle['two, no delay']:.0f} | {middle['two']:.0f} "
                f"| {middle['two'] / middle['one']:.0%} | {middle['two'] / middle['two, no delay']:.0%} | {each} |"
            )
    head = [
        f"`python -m benchmarks.cluster.two_hosts --delay {given.delay} --workers {given.workers} --envs "
        f"{' '.join(map(str, given.envs))} --seconds {given.seconds:g} --rounds {given.rounds}`, {date.today()}, "
        f"{cores} cores, {platform.machine()}, Python {platform.python_version()}; load average "
        f"{min(loads):.0f} to {max(loads):.0f}, this benchmark included",
        "",
        f"{1000 * given.delay:g} ms in each direction; a byte and its echo took {1000 * trip:.1f} ms. {given.workers} "
        f"collectors on {cores - cores // 2} of the cores, server and link on the others; env steps a second of all "
        "collectors together, medians.",
        "",
        "| games of a collector | one host, shared memory | two hosts, no delay | two hosts | of one host "
        "| of no delay | each round: one host; two |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return [*head, *lines]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.005)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--envs", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "two_hosts.md")
    parser.add_argument("--serve", type=Path)
    parser.add_argument("--collect", type=Path)
    parser.add_argument("--more", type=float, nargs="*", default=[])
    given = parser.parse_args()
    if given.serve or given.collect:
        np.random.seed(0)
        settings = HockeyTraining(workers=given.workers, envs=given.workers * given.envs[0], policy="served")
        if given.serve:
            serve(given.serve, settings)
        else:
            number, seconds = given.more
            print(collect(given.collect, settings, int(number), seconds))
        return
    lines = measure(given)
    print("\n".join(lines))
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
