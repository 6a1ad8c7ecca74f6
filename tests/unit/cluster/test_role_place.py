"""The place of a role, without Ray."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from jurybox.cluster.actors import RolePlace
from jurybox.training.runtime.launching import configuration
from jurybox.training.runtime.plan import Kind, Plan, RoleSpec
from jurybox.training.runtime.role_context import Actor
from jurybox.training.runtime.scoreboard import ControlWord
from jurybox.training.runtime.shared_resources import SharedResources


class Forking(Actor):
    """Is killed and leaves a child that holds its files open."""

    def __init__(self, context, child):
        super().__init__(context)
        self.child = child

    def step(self):
        if pid := os.fork():
            Path(self.child).write_text(str(pid))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)


def test_a_dead_role_is_noticed_while_a_child_that_it_forked_lives(tmp_path):
    child = tmp_path / "child"
    plan = Plan((RoleSpec("actor", Kind.ACTOR, f"{__name__}:Forking", {"child": str(child)}),))
    shared, place = SharedResources.create(plan), RolePlace(plan, 0)
    try:
        shared.scoreboard.orders[0][ControlWord.LIFE] = 1
        place.start(configuration(plan, 0, 1, shared.scoreboard.segment.name, None, tmp_path), None)
        until = time.monotonic() + 30.0
        while (output := place.listen(0.1)).status is None and time.monotonic() < until:
            pass
        os.kill(int(child.read_text()), 0)  # its end is not what was noticed
        assert output.status == -signal.SIGKILL
    finally:
        place.close()
        shared.close()
        if child.exists():
            os.kill(int(child.read_text()), signal.SIGKILL)
