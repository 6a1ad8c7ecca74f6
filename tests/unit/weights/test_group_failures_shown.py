"""Which member an engine shows that it computes when a batch of several has failed: by it one is known that crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.unit.weights.test_group import Grouped, make, rows  # noqa: F401  make is a fixture


def test_each_part_of_a_failed_batch_of_a_group_is_shown_under_its_own_member(make: Callable[..., Grouped]) -> None:  # noqa: F811
    grouped = make(3)
    engine = grouped.server.engine
    served: Any = engine.slots[0].served
    run, seen = served.run, list[tuple[int, list[int]]]()

    def fails_together(tickets: Any, *given: Any) -> Any:
        models = tickets["model"].tolist()
        seen.append((int(engine.scoreboard.engines["computing"][0]), models))
        if len(models) > 1:
            raise ValueError("too many at once")
        return run(tickets, *given)

    served.run = fails_together
    assert len(grouped.ask({i: rows(1, i) for i in (1, 0, 2)})) == 3
    assert seen[0] == (2, [1, 0, 2]) and sorted(seen[1:]) == [(1, [0]), (2, [1]), (3, [2])]
    assert not grouped.server._turn() and engine.scoreboard.engines["computing"][0] == 0
