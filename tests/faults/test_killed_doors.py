"""Engines and gateway killed under all dialects and all robots at once: no score and no action is made up.

`make door-kills` kills a thousand times (DOOR_KILLS, DOOR_SECONDS at most). The short variants are
test_killed_dialects.py and test_robot_kills.py.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field

import pytest
from tests.faults import test_killed_dialects as dialects
from tests.faults.test_killed_dialects import CALL, CLIENTS, ENGINES, REST, Killer, Told, check, clients
from tests.integration.robots import test_gr00t
from tests.integration.robots import test_robot_kills as robots
from tests.integration.robots.test_robot_kills import SPEAKS, TEXT
from tests.serving import RunningServer, serving, wait_until

PAUSE, MOST_PAUSE = 0.1, 0.8  # seconds between two connections: each takes the time that restarts need
MISSES = 20  # errors in a row after which a robot connects again: its gateway may not know it any more


@dataclass
class Acted:
    """What robots of one door saw."""

    right: int = 0
    errors: int = 0  # in the door's own form
    cut: int = 0  # connections that ended
    wrong: list[object] = field(default_factory=list)


def act(server: RunningServer, speaks: str, acted: Acted, rush: threading.Event, over: threading.Event) -> None:
    """Send observations until `over`, on another connection after each that ended; with pauses unless in a `rush`."""
    number, dice, pause = 0, random.Random(speaks), PAUSE
    while not over.is_set():
        try:
            with server.connect() as near:
                address = near.status()["server"]["robots"][speaks]
            with robots.CLIENTS[speaks](address) as ask:
                misses = 0
                while not over.is_set() and misses < MISSES:
                    rush.wait(dice.uniform(0.0, REST))
                    number = number % 250 + 1
                    said = ask(number)
                    misses = misses + 1 if said is None else 0
                    if said is None:
                        acted.errors += 1
                        time.sleep(0.05)
                    elif said == [number, TEXT]:
                        acted.right += 1
                        pause = PAUSE
                    else:
                        acted.wrong.append((number, said))
        except AssertionError as error:  # an answer in no form of the door's
            acted.wrong.append(f"{number}: {error!r}")
        except Exception:  # noqa: BLE001  the gateway was killed, which its clients notice in many ways
            acted.cut += 1
        over.wait(pause)
        pause = min(1.5 * pause, MOST_PAUSE)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_door_invents_a_score_or_an_action_in_a_thousand_kills(tmp_path, monkeypatch):
    monkeypatch.setattr(test_gr00t, "PATIENCE_MS", 10_000)  # a request may be lost with the gateway
    kills, seconds = int(os.environ.get("DOOR_KILLS", "1000")), float(os.environ.get("DOOR_SECONDS", "6000"))
    models = {**dialects.MODELS, **robots.MODELS}
    told, over = Told(), threading.Event()
    acted = {speaks: Acted() for speaks in SPEAKS}
    with serving(
        tmp_path, models, dialects=dialects.DIALECTS, http="127.0.0.1:0", more=robots.DOORS, standby=True,
        replicas=ENGINES, threads=1, max_restarts=10_000,
    ) as server:  # fmt: skip
        threads = [
            threading.Thread(target=act, args=(server, *one, told.rush, over), daemon=True) for one in acted.items()
        ]
        for thread in threads:
            thread.start()
        try:
            with clients(server.listening("http"), CLIENTS, told, rest=REST):
                wait_until(lambda: len(told.answered) == len(dialects.ASK), CALL, "an answer in every dialect")
                wait_until(lambda: all(one.right for one in acted.values()), CALL, "an action through every door")
                done = Killer(server, told).kill(kills, seconds)
                before = {speaks: one.right for speaks, one in acted.items()}
                wait_until(lambda: all(one.right > before[key] for key, one in acted.items()), CALL, "actions again")
        finally:
            over.set()
            for thread in threads:
                thread.join(CALL)
    print(f"\nkilled {dict(done)}, answered {dict(told.answered)}, refused {dict(told.refused)}, cut off {told.cut}")
    print({speaks: (one.right, one.errors, one.cut) for speaks, one in acted.items()})
    assert not any(thread.is_alive() for thread in threads), "a robot hangs"
    assert not {speaks: one.wrong[:3] for speaks, one in acted.items() if one.wrong}
    check(told)
