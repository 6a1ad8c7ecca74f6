"""Bytes that are sent between the machines of `jurybox train marl`: ``python -m benchmarks.cluster.sizes``."""

from __future__ import annotations

import pickle

from jurybox.cluster.host import RoleCounters
from jurybox.training.replay.layout import Layout
from jurybox.training.runtime.scoreboard import RunScoreboard
from jurybox.training.runtime.shared_resources import SharedResources
from jurybox.training.trainings.marl import MarlTraining, plan


def counters(scoreboard: RunScoreboard, roles: int, *, orders: bool) -> int:
    """Bytes of the first so many roles' counters, as they are sent."""
    return len(pickle.dumps(RoleCounters.of(scoreboard, range(roles), orders=orders), protocol=5))


def main() -> None:
    asked = plan(MarlTraining(algorithm="dqn"))
    replay = asked.replays[0]
    print(f"a row: {Layout(replay.capacity, dict(replay.fields), episodes=replay.episodes).slot.size}")
    print(f"a publication: {asked.channels[0].layout.nbytes}")
    with SharedResources.create(asked, 100) as shared:
        for name, orders in (("up", False), ("down", True)):
            two, one = (counters(shared.scoreboard, n, orders=orders) for n in (2, 1))
            print(f"counters {name}: {two - one} a role and {one - (two - one)}")


if __name__ == "__main__":
    main()
