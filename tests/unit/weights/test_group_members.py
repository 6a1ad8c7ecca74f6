"""Members of a group: computed in one forward whatever came before, and named while they are computed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.models import VECTOR  # noqa: E402
from tests.unit.weights.test_group import FORWARDS, Grouped, assert_its_own, rows  # noqa: E402

from jurybox.protocol.weights import WeightsChannel  # noqa: E402
from jurybox.server.groups.group import Grouped as Group  # noqa: E402
from jurybox.server.groups.weights_updater import GroupWeightsUpdater, _ChannelReader  # noqa: E402
from jurybox.server.models import ServedModel  # noqa: E402


def test_a_batch_that_is_larger_than_all_before_it_is_one_forward_too() -> None:
    with contextlib.closing(Grouped(3)) as grouped:
        for counts in ((1, 1, 1), (3, 3, 3), (2, 2, 2), (4, 4, 4), (4, 1, 1)):
            asked = {i: rows(n, i) for i, n in enumerate(counts)}
            FORWARDS.clear()
            replies = grouped.ask(asked)
            assert [max(counts)] == FORWARDS
            for i, x in asked.items():
                assert_its_own(replies[i], grouped.own[i], x)


def test_the_scoreboard_names_the_member_that_is_computed_and_nobody_afterwards() -> None:
    with contextlib.closing(Grouped(3)) as grouped:
        engine, seen = grouped.server.engine, []
        record, served = engine.scoreboard.engines, engine.slots[0].served
        run = served.run

        def noted(*given: Any) -> Any:
            seen.append(int(record["computing"][0]))
            return run(*given)

        served.run = noted
        for i in (2, 0, 1):
            grouped.ask({i: rows(1)})
            assert not engine.turn() and record["computing"][0] == 0
        assert seen == [3, 1, 2]


class Waited:
    """A thread, and for how long it is waited for."""

    def __init__(self, *, alive: bool) -> None:
        self.alive, self.waits = alive, list[float]()

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float) -> None:
        if not self.alive:
            raise RuntimeError("cannot join thread before it is started")
        self.waits.append(timeout)


@pytest.mark.parametrize("alive", [False, True])
def test_a_group_waits_a_second_for_the_ends_of_its_threads_if_they_have_begun(
    make: Callable[..., WeightsChannel], alive: bool
) -> None:
    spec = ServedModel(torch.nn.Tanh(), VECTOR, {"action": VECTOR["observation"]}).spec("m")
    updater = GroupWeightsUpdater(Group("g", spec, torch.device("cpu"), None), lambda action: action())
    reader = _ChannelReader(make({"by": torch.zeros(2)}), threading.Event(), threading.Event())
    updater._readers = {0: reader}
    threads = Waited(alive=alive), Waited(alive=alive)
    of_the_group: Any = updater
    of_the_channel: Any = reader
    of_the_group._thread, of_the_channel._thread = threads
    updater.stop()
    updater.join()
    assert [thread.waits for thread in threads] == [[1.0] * alive] * 2
