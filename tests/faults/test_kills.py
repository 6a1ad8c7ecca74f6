"""Processes killed at random under load and invalid input: no wrong answer, no leak, and health is always true.

`make chaos` kills a thousand, in rounds with a server each; its progress is kept in CHAOS_FOLDER (build/chaos), so that
it can be interrupted and continued. CHAOS_KILLS and CHAOS_SECONDS bound it, and it ends with a table.

Rounds of two kinds alternate. In a storm, a process is killed every tenth of a second, also one that is starting: this
shows what many deaths at once break. In a calm round, all clients are answered again before the next kill: this shows
for how long one death is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.faults.asker import CALL, Asker
from tests.faults.conftest import MODELS, leaving_nothing
from tests.faults.kills_roles import EVERY, GONE, NO, RECORD, TIMEOUT, WRONG, YES
from tests.serving import START, RunningServer, children_of, launch, wait_until

from jurybox.client import Error

ALL = {
    **MODELS,
    "policy": {"factory": "tests.models:affine", "publish": "double_buffer", "rows": 64},
    "shout": {"factory": "tests.open_models:shout", "max_batch": 16, "rows": 64},
    "sum": {"factory": "tests.open_models:running_sum", "max_batch": 16, "rows": 64},
}
WEIGHTS = {  # how often each is the one
    "engine-0": 18,
    "engine-1": 18,
    "gateway": 15,
    "relay": 12,
    "client": 14,
    "publisher": 10,
    "vandal": 9,
    "supervisor": 4,
}
READY = 3.0  # seconds from a kill to the next answer of all
NEW_SERVER = 60.0  # the same for a supervisor's, as long as a client waits: no standby process is left
NEAR = 0.11  # seconds: two of the probe's intervals; a change of health is seen by both within them
OTHERS = 0.75  # of the cores; if other programs use more, a time says nothing about the server
STORM, CALM = (160, 0.05), (40, 1.0)  # kills of a round, and the share after which all is waited for
PROVEN = 1.2  # seconds of service after which a death counts as caused by the kill alone
FOLDER = Path(os.environ.get("CHAOS_FOLDER", "build/chaos"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Scene:
    """A server that is restarted whenever its supervisor is killed, and its clients."""

    def __init__(self, folder: Path, stack: ExitStack, transports: Sequence[str], **settings: object) -> None:
        self.folder, self.stack = folder, stack
        self.ports = [str(free_port()) for _ in range(3)]
        open_to = dict(zip(("tcp", "http", "grpc"), (f"127.0.0.1:{port}" for port in self.ports), strict=True))
        self.settings = {"replicas": 2, **open_to, **settings}
        self.children = 2 + int(self.settings["replicas"]) + (3 if self.settings.get("standby") else 0)
        self.server = self.serve()
        self.wait_for_it()
        self.kills: list[tuple[float, str]] = []
        self.others: list[float] = []  # for each kill, the share of the cores that others had until all were answered
        self.spent_before = spent()
        self.ever: set[int] = set()  # every process of any server
        self.journals: dict[str, Path] = {}
        self.ours: dict[str, subprocess.Popen[str]] = {}
        local, (tcp, web, grpc) = self.server.address, self.ports
        where = {
            "shm": (local, "shm"),
            "zmq": (local, "zmq"),
            "tcp": (f"tcp://127.0.0.1:{tcp}", "auto"),
            "grpc": (f"grpc://127.0.0.1:{grpc}", "auto"),
            "web": (f"http://127.0.0.1:{web}", "web"),
        }
        self.askers = [self.asker(transport, *where[transport]) for transport in transports]
        self.probed = folder / "probe"
        self.join("probe", "probe", self.ports[1], str(self.probed))
        self.journals["policy"] = folder / "policy"
        self.join("follower", "follow", self.server.address, str(self.journals["policy"]))
        self.vandalised = folder / "vandalised"
        self.seen: dict[int, float] = {}  # pid -> since when it serves
        self.victims: dict[str, int] = {}
        self.journals["client"] = folder / "client"
        self.join("nursery", "nursery")
        for role in ("publisher", "vandal", "client"):
            self.replace(role)
        for asker in self.askers:
            asker.ready()
        self.settle()
        self.files = {role: files_of(pid) for role, pid in self.server.pids().items()}

    def serve(self) -> RunningServer:
        server = launch(self.folder, ALL, **self.settings)
        self.stack.callback(end, server.process)
        return server

    def wait_for_it(self) -> None:
        server = self.server
        wait_until(lambda: " serving" in server.text() or server.process.poll() is not None, START, "a server")
        assert server.process.poll() is None, server.text()

    def asker(self, name: str, address: str, transport: str) -> Asker:
        self.journals[name] = self.folder / name
        asker = Asker(address, transport, self.journals[name])
        self.stack.callback(end, asker.process)
        return asker

    def join(self, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.faults.kills_roles", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ours[name] = process
        self.stack.callback(end, process)

    def replace(self, role: str) -> None:
        rest = {
            "client": [random.choice(["shm", "zmq"]), str(self.journals["client"])],
            "publisher": [],
            "vandal": [*self.ports, str(self.vandalised)],
        }[role]
        nursery = self.ours["nursery"]
        assert nursery.stdin is not None and nursery.stdout is not None
        nursery.stdin.write(" ".join([role, self.server.address, *rest]) + "\n")
        nursery.stdin.flush()
        self.victims[role] = int(nursery.stdout.readline())

    def serving(self) -> dict[str, int]:
        """Processes of the server that have been there for a while, by role."""
        pids = self.server.pids()
        ready: set[int | None] = set()
        with contextlib.suppress(Error), self.server.connect(timeout=2.0) as client:
            ready |= {engine["pid"] for engine in client.status()["engines"] if engine["state"] == "serving"}
        with socket.socket() as web, socket.socket() as tcp:
            ready |= {pids.get("gateway")} if web.connect_ex(("127.0.0.1", int(self.ports[1]))) == 0 else set()
            ready |= {pids.get("relay")} if tcp.connect_ex(("127.0.0.1", int(self.ports[0]))) == 0 else set()
        now = time.monotonic()
        self.seen = {pid: self.seen.get(pid, now) for pid in ready if pid}
        return {role: pid for role, pid in pids.items() if now - self.seen.get(pid, now) > PROVEN}

    def kill(self, role: str) -> bool:
        """Kill a process, and restart it if no other process does; return False if it does not serve yet."""
        assert self.server.process.poll() is None, self.server.text()[-2000:]
        self.ever |= {self.server.process.pid, *children_of(self.server.process.pid)}
        if role == "supervisor":
            pid = self.server.process.pid if " serving" in self.server.text() else None
        else:
            pid = self.victims.get(role) or self.serving().get(role)
        if pid is None:
            return False
        self.spent_before = spent()
        self.kills.append((time.monotonic(), role))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # a client may end by itself after a whole time-out without a server
            self.kills.pop()
        if role in self.victims:
            self.replace(role)
        elif role == "supervisor":
            self.server.process.wait(30)
            self.server = self.serve()
        return True

    def probes(self) -> np.ndarray:
        return journal(self.probed, RECORD.size // 8)

    def calls(self) -> dict[str, np.ndarray]:
        return {name: journal(path, CALL.size // 8) for name, path in self.journals.items()}

    def rest(self) -> None:
        """Wait until the standby processes exist again and have imported their modules."""
        spent: dict[int, float] = {}

        def waiting() -> bool:
            nonlocal spent
            before, spent = spent, seconds_of(children_of(self.server.process.pid))
            time.sleep(0.3)
            pids = self.server.pids()
            new = spent.keys() - {pids.get(role) for role in WEIGHTS}
            return len(spent) == self.children and all(spent[pid] == before.get(pid) for pid in new)

        wait_until(waiting, 100, "processes on standby")

    def settle(self) -> None:
        """Wait until all clients are answered again and no engine is missing."""
        began = time.monotonic()

        def answered() -> bool:
            calls = {name: calls for name, calls in self.calls().items() if name != "client"}
            return all((calls[calls[:, 0] > began, 2] > 0).any() for calls in calls.values()) and bool(
                len(self.probes()) > 4 and (self.probes()[-5:, [2, 4]] > 0).all() and self.probes()[-5, 0] > began
            )

        wait_until(answered, 200, "answers to all")

    def end(self) -> dict[str, Any]:
        """End all processes; return what is left."""
        left: dict[str, object] = {}
        self.ever |= {self.server.process.pid, *children_of(self.server.process.pid)}
        told = [asker.end() for asker in self.askers]
        for process in self.ours.values():
            process.communicate(timeout=100)
        for pid in self.victims.values():
            wait_until(lambda: not running(pid), 60, "the end of a victim")  # noqa: B023
        with self.server.connect() as client:
            held = len(ALL) + 1  # lanes of the gateway and the relay, at most
            wait_until(lambda: client.status()["lanes"]["in_use"] <= held, 30, "lanes given back")
        for role, pid in self.server.pids().items():
            try:
                wait_until(lambda: files_of(pid) <= self.files[role] + 8, 10)  # noqa: B023
            except AssertionError:
                left[f"descriptors of {role}"] = files_of(pid) - self.files[role]
        status = self.server.stop(timeout=60)
        if status != 0:
            left["exit status"] = status
        try:
            wait_until(lambda: not any(map(running, self.ever)), 15, "the end of all processes")
        except AssertionError:
            left["processes"] = sum(map(running, self.ever))
        if sockets := [path.name for path in self.folder.glob("engine*") if path.suffix != ".lock"]:
            left["sockets"] = sockets
        left_errors = Counter(error.split(":")[0] for each in told for error in each.errors)
        return {"left": left, "errors": left_errors, "examples": sorted({e[:200] for t in told for e in t.errors})[:8]}


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def files_of(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def seconds_of(pids: Sequence[int]) -> dict[int, float]:
    """Seconds of a core that each of these processes has used; without those that are dead."""
    spent = {}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                spent[pid] = (int(rest[10]) + int(rest[11])) / os.sysconf("SC_CLK_TCK")
    return spent


def spent() -> tuple[float, dict[int, float]]:
    """Seconds of cores that the whole machine has used, and each process of this test."""
    busy = psutil.cpu_times()
    pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    return sum(busy) - busy.idle - busy.iowait, {**seconds_of(pids), 0: time.monotonic()}


def of_others(before: tuple[float, dict[int, float]], after: tuple[float, dict[int, float]]) -> float:
    """The share of the cores that processes beside this test had between two looks."""
    began, ended = before[1].pop(0), after[1].pop(0)
    ours = sum(seconds - before[1].get(pid, 0.0) for pid, seconds in after[1].items())
    cores = len(os.sched_getaffinity(0))
    return max(0.0, (after[0] - before[0] - ours) / ((ended - began) * cores))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def journal(path: Path, columns: int) -> np.ndarray:
    """Its whole records so far; a writer that was killed may have left a part of one."""
    content = path.read_bytes() if path.exists() else b""
    return np.frombuffer(content[: len(content) // (8 * columns) * 8 * columns]).reshape(-1, columns)


def disagreements(probes: np.ndarray) -> list[list[float]]:
    """Return the moments at which requests and health disagreed by more than NEAR seconds.

    On a busy machine their answers arrive at different moments, and a change may lie between them: so NEAR grows by as
    much as the later of two answers exceeded its time-out. A broken connection shows that no process serves at the
    moment when it broke, not when it was made; the other request was perhaps answered just before. With many in flight
    the probe sends fewer requests, so the first pair after the break always counts as near. An answer is also near to
    one of the other kind that arrived within NEAR of it, whenever both were sent. If the gateway ended with both, their
    answers are unknown.
    """
    asked, works, well = probes[:, 0], probes[:, 2] > 0, probes[:, 4] > 0
    told_works, told_well = probes[:, 1], probes[:, 3]
    late = np.maximum(0, np.maximum(probes[:, 1], probes[:, 3]) - asked - TIMEOUT)
    broke = np.flatnonzero((probes[:, [2, 4]] == GONE).any(axis=1))
    late[broke] = np.maximum(probes[broke, 1], probes[broke, 3]) - asked[broke]
    found = []
    for row in np.flatnonzero(works != well):
        near = np.abs(asked - asked[row]) <= NEAR + late[row]
        if row in broke:
            near[np.flatnonzero(asked > max(probes[row, 1], probes[row, 3]))[:1]] = True
        of_requests = near | (np.abs(told_works - told_well[row]) <= NEAR)
        of_health = near | (np.abs(told_well - told_works[row]) <= NEAR)
        lost = (probes[near][:, [2, 4]] == GONE).all(axis=1).any()
        if not lost and (well[row] not in works[of_requests] or works[row] not in well[of_health]):
            found.append([float(value) for value in probes[row]])
    return found


def test_a_moment_at_which_health_and_requests_disagree_is_found():
    def pairs(works: Sequence[float], well: Sequence[float]) -> np.ndarray:
        """One pair every EVERY seconds, answered 10 ms later."""
        asked = 100 + EVERY * np.arange(len(works))
        return np.stack([asked, asked + 0.01, np.array(works), asked + 0.01, np.array(well)], axis=1)

    up, down = [YES] * 10, [NO] * 10
    assert not disagreements(pairs(up + down + up, up + down + up))
    assert not disagreements(pairs(up + down + up, [*up, YES, *down[1:], *up]))  # one arrives a little later
    assert len(disagreements(pairs(up + down + up, up + up + up))) == 10
    assert len(disagreements(pairs(up + up + up, up + down + up))) == 10
    assert len(disagreements(pairs([*up, NO, *up], up + up + [YES]))) == 1  # a request failed, and health was true
    late = pairs(up[:4] + down[:5] + [NO], up[:4] + down[:5] + [YES])
    late[3, 1] = late[9, 3]  # health was requested long after the request, and both were answered at once
    assert not disagreements(late)
    broken = pairs([*down, YES, NO, NO, *down], [*down, NO, NO, NO, *down])
    assert len(disagreements(broken)) == 1
    broken[11:13, [2, 4]] = GONE  # the next health check would have reported it, and its connection broke
    assert not disagreements(broken)
    dropped = pairs(up + up, up + up)
    dropped[10, 2] = GONE  # one request's alone
    assert len(disagreements(dropped)) == 1


def reasons_near(file: Path, moments: Sequence[float]) -> list[str]:
    """Why requests failed and what health reported within three seconds of these moments; one line each."""
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return [line for line in lines if any(abs(float(line.partition(" ")[0]) - at) < 3 for at in moments)]


def recoveries(kills: list[tuple[float, str]], answers: dict[str, np.ndarray]) -> list[tuple[str, float, bool, str]]:
    """For each kill, return the longest time until a request sent after it was answered, in seconds.

    Also whether no other process was starting meanwhile, so that the time is due to this kill, and which client waited.
    """
    ends = []
    for at, _ in kills:
        first = {name: times[times[:, 0] >= at, 1][:1] for name, times in answers.items()}
        ends.append(max((float(each[0]), name) for name, each in first.items() if len(each)))
    taken = []
    for n, (at, role) in enumerate(kills):
        busy = any(end > at for end, _ in ends[:n]) or (n + 1 < len(kills) and kills[n + 1][0] < ends[n][0])
        taken.append((role, ends[n][0] - at, not busy, ends[n][1]))
    return taken


def one_round(
    folder: Path,
    roles: list[str],
    seed: int,
    *,
    pause: float,
    calm: float,
    until: float,
    transports: Sequence[str] = ("shm", "zmq", "tcp", "grpc", "web"),
    **settings: object,
) -> dict:
    """Kill these one after another; return the observations.

    Args:
        pause: seconds between two kills, on average.
        calm: the share of kills after which all clients must be answered before the next kill.
        until: when to end early, in seconds of CLOCK_MONOTONIC.
        transports: of the permanent clients.
    """
    rng = random.Random(seed)
    with leaving_nothing(), ExitStack() as stack:
        scene = Scene(folder, stack, transports, **settings)
        began = time.monotonic()
        until = max(until, began + 5)
        for role in roles:
            while not scene.kill(role) and time.monotonic() < until:
                time.sleep(0.1)
                role = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0] if calm < 1 else role  # noqa: PLW2901
            if rng.random() < calm:
                scene.settle()
            if calm == 1.0:
                scene.others += [of_others(scene.spent_before, spent())] * (len(scene.kills) - len(scene.others))
                scene.rest()
            time.sleep(rng.uniform(0, 2 * pause))
            if time.monotonic() > until:
                break
        silent = ""
        try:
            scene.settle()
        except AssertionError as error:
            silent = str(error)
        seconds = time.monotonic() - began
        ended = scene.end()
        if silent:
            ended["left"]["without answers"] = silent
        logs = "".join(path.read_text() for path in folder.glob("*.log"))
    calls, probes = scene.calls(), scene.probes()
    probes = probes[np.argsort(probes[:, 0])]
    deeds = Counter(scene.vandalised.read_text().splitlines()) if scene.vandalised.exists() else Counter()
    answers = {name: calls[name][calls[name][:, 2] > 0] for name in (*transports, "policy")}
    answers["http"] = probes[probes[:, 2] > 0]
    reasons = scene.probed.with_suffix(".reasons")
    away = [at for at, role in scene.kills if role == "supervisor"]
    lost = {
        name: {
            "near the death of a supervisor": int(sum(any(b - 1 <= at <= e + 20 for at in away) for b, e, _ in errors)),
            "else": [[float(b), float(e)] for b, e, _ in errors if not any(b - 1 <= at <= e + 20 for at in away)],
        }
        for name, errors in ((name, each[each[:, 2] == 0]) for name, each in calls.items())
    }
    return {
        "kills": Counter(role for _, role in scene.kills),
        "at": scene.kills,
        "calm": calm == 1.0,
        "seconds": seconds,
        "recoveries": [
            (*each, share) for each, share in zip_longest(recoveries(scene.kills, answers), scene.others, fillvalue=0.0)
        ],
        "answers": {name: int((each[:, 2] > 0).sum()) for name, each in calls.items()},
        "wrong": {name: int((each[:, 2] == WRONG).sum()) for name, each in calls.items()}
        | {"probe": int((probes[:, 2] == WRONG).sum())},
        "wrong_ones": {path.stem: path.read_text().splitlines()[:20] for path in folder.glob("*.wrong")},
        "lost": lost,
        "probes": len(probes),
        "late": int((np.maximum(probes[:, 1], probes[:, 3]) - probes[:, 0] > TIMEOUT + 0.5).sum()),
        "unwell": int((probes[:, 4] <= 0).sum()),
        "disagreements": (disagreed := disagreements(probes)),
        "probes_around": [probes[np.abs(probes[:, 0] - at) < 1].tolist() for at, *_ in disagreed[:3]],
        "reasons": reasons_near(reasons, [row[0] for row in disagreed]),
        "deeds": deeds,
        "quarantined": logs.count("model in quarantine"),
        "faults": sum(logs.count(text) for text in ("a part of the loop failed", "Exception in ASGI", "a call failed")),
        **ended,
    }


def table(rounds: list[dict]) -> str:
    """A readable summary of all rounds."""
    taken: dict[str, list[float]] = {}
    for done in rounds:
        for role, seconds, _, _, others in done["recoveries"]:
            kind = role.partition("-")[0] + (", while other programs had the cores" if others > OTHERS else "")
            taken.setdefault(kind if done["calm"] else "in a storm", []).append(seconds)
    lines = [
        "| killed | times | median s to the next answer of all | worst | over 3 s |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for role, all_of_them in sorted(taken.items(), key=lambda each: (each[0].partition(",")[::-1], each[0])):
        late = sum(seconds > READY for seconds in all_of_them)
        median, worst = statistics.median(all_of_them), max(all_of_them)
        lines.append(f"| {role} | {len(all_of_them)} | {median:.2f} | {worst:.2f} | {late} |")

    def total(key: str) -> int:
        return sum(sum(done[key].values()) for done in rounds)

    lost = [each for done in rounds for each in done["lost"].values()]
    rows = {
        "kills": total("kills"),
        "minutes": round(sum(done["seconds"] for done in rounds) / 60, 1),
        "answers": total("answers"),
        "wrong answers": total("wrong"),
        "requests lost when a supervisor died": sum(each["near the death of a supervisor"] for each in lost),
        "requests lost else": sum(len(each["else"]) for each in lost),
        "wrong inputs": sum(count for done in rounds for deed, count in done["deeds"].items() if deed[0] != "!"),
        "wrong inputs not refused": sum(n for done in rounds for deed, n in done["deeds"].items() if deed[0] == "!"),
        "questions to /health and to a model": sum(done["probes"] for done in rounds),
        "of which /health said no": sum(done["unwell"] for done in rounds),
        "of which were answered half a second or more after their time-out": sum(done["late"] for done in rounds),
        "disagreements between both": sum(len(done["disagreements"]) for done in rounds),
        "models in quarantine": sum(done["quarantined"] for done in rounds),
        "faults in the logs": sum(done["faults"] for done in rounds),
        "left behind": "; ".join(json.dumps(done["left"]) for done in rounds if done["left"]) or "nothing",
    }
    lines += ["", "| | |", "| --- | ---: |", *(f"| {what} | {value} |" for what, value in rows.items())]
    return "\n".join(lines)


def told(done: dict) -> str:
    """Where health and a request disagreed, with the kills and the health; in seconds since the first kill."""
    zero = done["at"][0][0]
    lines = [f"{at - zero:.2f} killed {role}" for at, role in done["at"]]
    for at, ended, works, told_at, well in done["disagreements"]:
        lines.append(
            f"{at - zero:.2f} a request {'was answered' if works > 0 else 'failed'} at {ended - zero:.2f}, "
            f"health said {'ok' if well > 0 else 'no'} at {told_at - zero:.2f}"
        )
    for line in done["reasons"]:
        at, _, reason = line.partition(" ")
        lines.append(f"{float(at) - zero:.2f} {reason[:300]}")
    return "\n".join(sorted(lines, key=lambda line: float(line.partition(" ")[0])))


def judge(done: dict) -> None:
    if done["calm"]:
        bounds = {"supervisor": NEW_SERVER}
        late = [each for each in done["recoveries"] if each[1] > bounds.get(each[0], READY) and each[4] <= OTHERS]
        assert not late, late
    assert not any(done["wrong"].values()), (done["wrong"], done["wrong_ones"])
    assert not [each for each in done["lost"].values() if each["else"]], (done["lost"], done["examples"])
    assert not [deed for deed in done["deeds"] if deed[0] == "!"], done["deeds"]
    assert done["quarantined"] == done["faults"] == 0
    assert not done["left"]
    assert not done["disagreements"], told(done)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_any_process_may_be_killed_under_load_and_no_other_is_affected(tmp_path):
    """On a machine so busy that it takes long, fewer are killed."""
    roles = ["client", "engine-0", "publisher", "vandal", "gateway", "relay"]
    until = time.monotonic() + 12
    done = one_round(tmp_path, roles, 1, pause=0.1, calm=0.5, until=until, transports=("shm", "tcp"), replicas=1)
    print(table([done]))
    judge(done)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_thousand_may_be_killed_under_load_and_no_other_is_affected(tmp_path):
    kills, until = int(os.environ.get("CHAOS_KILLS", "1000")), float(os.environ.get("CHAOS_SECONDS", "3600"))
    until += time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    record = FOLDER / "rounds.jsonl"
    rounds = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []

    def killed(kinds: tuple[bool, ...] = (False, True)) -> int:
        return sum(sum(done["kills"].values()) for done in rounds if done["calm"] in kinds)

    while (left := kills - killed()) > 0 and time.monotonic() < until:
        seed = len(rounds)
        rng = random.Random(seed)
        count, calm = CALM if 5 * killed((True,)) < killed() else STORM
        roles = rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=min(left, count))
        done = one_round(tmp_path / str(seed), roles, seed, pause=0.1, calm=calm, until=until, standby=True)
        with record.open("a") as file:
            file.write(json.dumps(done) + "\n")
        rounds.append(json.loads(json.dumps(done)))
        print(table(rounds), flush=True)
    (FOLDER / "table.md").write_text(table(rounds) + "\n")
    for done in rounds:
        judge(done)
