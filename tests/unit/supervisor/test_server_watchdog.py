"""Processes that hang, and those that were only stopped together with all others."""

from __future__ import annotations

import numpy as np
import pytest

from jurybox.server.supervisor.children import Child, Watchdog

SILENCE, TIMEOUT = 10.0, 100.0


class Scene:
    """An engine and a relay that serve, looked at every quarter of a second."""

    def __init__(self) -> None:
        self.engines = np.zeros(1, [("heartbeat", "<i8")])
        self.engine, self.relay = _Running("engine-0"), _Running("relay")
        self.now = 1000.0
        self.watchdog = Watchdog(self, SILENCE, TIMEOUT, self.now)
        self.beat()

    def beat(self, *, engine: bool = True, relay: bool = True) -> None:
        if engine:
            self.engines["heartbeat"] = int(self.now * 1e9)
        if relay:
            self.relay.heard_at = self.now

    def look(self) -> list[str]:
        return [f"{child.role} {why}" for child, why in self.watchdog.hanging([self.engine], [self.relay], self.now)]

    def live(self, seconds: float, **who: bool) -> list[str]:
        """Let time pass; return the last findings."""
        found = []
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            self.beat(**who)
            found = self.look()
        return found


class _Running(Child):
    alive = True

    def __init__(self, role: str) -> None:
        super().__init__(role, "", dict)
        self.serving = True


@pytest.fixture
def scene():
    return Scene()


def test_processes_with_heartbeats_do_not_count_as_hanging(scene):
    assert scene.live(500) == []


def test_a_silent_engine_hangs_and_so_does_a_silent_edge(scene):
    assert scene.live(SILENCE - 1, engine=False) == []
    assert scene.live(2, engine=False) == [f"engine-0 no sign of life for {SILENCE + 1:.1f} s"]
    scene.beat()
    assert scene.live(SILENCE + 1, relay=False)[0].startswith("relay no sign of life")


def test_a_child_that_never_serves_counts_as_hanging(scene):
    scene.engine.serving, scene.engine.started_at = False, scene.now
    assert scene.live(TIMEOUT - 1, engine=False) == []
    assert scene.live(2, engine=False) == [f"engine-0 does not serve {TIMEOUT + 1:.1f} s after its start"]


def test_a_pause_of_all_processes_is_no_hang(scene):
    scene.now += 3600
    assert scene.look() == [], "it has just come back, as all others have"
    assert scene.live(SILENCE - 1, engine=False, relay=False) == []
    assert len(scene.live(2, engine=False, relay=False)) == 2, "those who did not come back hang"


def test_a_heartbeat_from_the_future_or_the_past_is_not_believed(scene):
    scene.live(20)
    scene.engines["heartbeat"] = int((scene.now + 3600) * 1e9)
    assert scene.live(SILENCE - 0.5, engine=False) == []
    scene.engines["heartbeat"] = 0
    assert scene.live(0.5, engine=False) == []
    assert scene.live(0.25, engine=False) == [f"engine-0 no sign of life for {SILENCE + 0.25:.1f} s"]
