"""What the tickets of a batch are answered, counted and logged as, if a model refuses or fails some of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jurybox import native
from jurybox.protocol.errors import Code, ModelFailed, VersionNotHeld
from jurybox.protocol.scoreboard import COUNTERS
from jurybox.protocol.wire import TICKET
from jurybox.server.engine.batches import Batches, ModelCounters, Slot
from jurybox.server.engine.device_regions import RowsNotBound
from jurybox.server.engine.loads import Disturbed
from jurybox.server.engine.queues import Queue
from jurybox.server.engine.served import BatchOutcome

NEWEST = 5


class Model:
    """Returns or raises what it is told to, for one batch after another."""

    spec = SimpleNamespace(name="m")
    forward_timeout = 0.0
    version = NEWEST

    def __init__(self, *outcomes):
        self.outcomes, self.asked, self.freed = list(outcomes), [], 0

    def run(self, tickets, rows, version):
        self.asked.append((tickets["sequence"].tolist(), rows, version))
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def free_memory(self):
        self.freed += 1


class World:
    def __init__(self, *outcomes, rows=16):
        self.now, self.answers, self.reports = 0, [], []
        self.model = Model(*outcomes)
        self.shown = np.zeros(1, COUNTERS)
        self.slot = Slot(self.model, Queue(rows), ModelCounters(self.shown))
        self.batches = Batches(
            lambda tickets, code, version, message: self.answers.append(
                (tickets["sequence"].tolist(), code, version, message)
            ),
            native.ArrivalTracker(8),
            lambda: self.now,
            lambda event, **fields: self.reports.append((event, fields)),
        )

    def runs(self, *rows, version=0):
        """A batch of tickets 0, 1, ... with so many rows."""
        records = np.zeros(len(rows), TICKET)
        records["sequence"], records["rows"], records["version"] = np.arange(len(rows)), rows, version
        self.batches.run(self.slot, records, int(records["rows"].sum()), version)

    def recovers(self):
        while self.slot in self.batches.recovery.parts:
            self.batches.recover(self.slot)

    def counted(self, *names):
        return [int(self.shown[name][0]) for name in names]


def test_each_ticket_of_a_batch_gets_its_own_answer():
    first, second = ValueError("first"), ValueError("second")
    outcome = BatchOutcome(
        refused={
            1: (Code.ROW_FAILED, "a bad row"),
            2: (Code.REFUSED, "a bad state"),
            8: (Code.ROW_FAILED, "another"),
        },
        errors=[([0, 1], first), ([0, 4], second), ([0, 1, 4], ValueError("too late"))],
        again={1, 5, 6, 7},
    )
    world = World(outcome)
    world.runs(1, 2, 3, 4, 5, 6, 7, 8, 9)
    failed = "model 'm' raised ValueError: "
    assert world.answers == [
        ([0], Code.MODEL_FAILED, NEWEST, failed + "first"),
        ([4], Code.MODEL_FAILED, NEWEST, failed + "second"),
        ([1], Code.ROW_FAILED, NEWEST, "a bad row"),
        ([2], Code.REFUSED, NEWEST, "a bad state"),
        ([8], Code.ROW_FAILED, NEWEST, "another"),
        ([3], Code.OK, NEWEST, ""),
    ]
    assert world.counted("requests", "rows", "batches", "failed", "refused") == [1, 4, 1, 4, 1]
    world.recovers()
    assert world.model.asked[1:] == [([5], 6, 0), ([6, 7], 15, 0)]
    assert world.answers[6:] == [([5], Code.OK, NEWEST, ""), ([6, 7], Code.OK, NEWEST, "")]
    assert world.counted("requests", "rows", "batches", "failed", "refused") == [4, 25, 3, 4, 1]


@pytest.mark.parametrize(("asked", "used"), [(0, NEWEST), (3, 3)])
def test_a_batch_is_computed_and_answered_with_the_version_that_it_asks_for_also_in_parts(asked, used):
    world = World(BatchOutcome(refused={0: (Code.ROW_FAILED, "no")}, again={2}), ValueError("once"), ValueError("no"))
    world.runs(1, 1, 1, version=asked)
    world.recovers()
    world.runs(1, 1, version=asked)
    world.recovers()
    assert [version for *_, version in world.model.asked] == [asked] * 5
    assert [(numbers, code, version) for numbers, code, version, _ in world.answers] == [
        ([0], Code.ROW_FAILED, used),
        ([1], Code.OK, used),
        ([2], Code.MODEL_FAILED, NEWEST),
        ([0], Code.OK, used),
        ([1], Code.OK, used),
    ]


def test_a_batch_that_does_not_fit_is_logged_and_its_model_frees_memory_before_the_halves():
    world = World(torch.OutOfMemoryError("full"), torch.OutOfMemoryError("full"))
    world.runs(1, 2, 3, 4)
    assert world.reports == [("out of memory, batches halved", {"model": "m", "max_batch": 5})]
    assert world.model.freed == 1 and world.answers == [] and world.slot.queue.max_batch == 5
    world.recovers()
    assert [fields["max_batch"] for _, fields in world.reports] == [5, 2], "a ticket always fits"
    assert world.model.asked == [([0, 1, 2, 3], 10, 0), ([0, 1], 3, 0), ([0], 1, 0), ([1], 2, 0), ([2, 3], 7, 0)]


def test_a_failed_batch_is_divided_into_the_parts_that_can_fail_independently_first():
    world = World(ValueError("no"))
    world.slot.parts = lambda tickets: [part.copy() for part in (tickets[:3], tickets[3:]) if len(part)]
    world.runs(1, 1, 1, 1)
    world.recovers()
    assert [numbers for numbers, *_ in world.model.asked] == [[0, 1, 2, 3], [0, 1, 2], [3]]


def test_a_batch_that_a_load_has_disturbed_is_computed_again_as_it_is_and_nobody_notices():
    world = World(Disturbed())
    world.runs(1, 1, version=3)
    assert world.answers == []
    world.recovers()
    assert world.model.asked == [([0, 1], 2, 3)] * 2
    assert world.answers == [([0, 1], Code.OK, 3, "")] and world.reports == [] and world.counted("failed") == [0]


def test_a_single_ticket_that_does_not_fit_fails_and_leaves_the_batches_as_large_as_they_were():
    world = World(torch.OutOfMemoryError("full"))
    world.runs(16)
    assert [(numbers, code) for numbers, code, *_ in world.answers] == [([0], Code.MODEL_FAILED)]
    assert world.slot.queue.max_batch == 16 and world.model.freed == 0


@pytest.mark.parametrize(
    ("error", "code", "counter", "event"),
    [
        (VersionNotHeld("it is gone"), Code.VERSION_NOT_HELD, "not_held", "weights version not held"),
        (RowsNotBound("not bound"), Code.REFUSED, "refused", None),
    ],
)
def test_what_a_batch_asks_for_in_vain_is_answered_and_counted_as_no_failure_of_the_model(error, code, counter, event):
    world = World(error, error)
    rows = (1,) if event is None else (1, 2)
    world.runs(*rows, version=3)
    numbers = list(range(len(rows)))
    assert world.answers == [(numbers, code, NEWEST, str(error))]
    assert world.counted(counter, "failed", "requests") == [len(rows), 0, 0]
    assert world.reports == ([] if event is None else [(event, {"model": "m", "error": str(error), "tickets": 2})])


def test_a_failure_is_logged_with_its_tickets_and_a_traceback_at_most_every_ten_seconds_of_each_model():
    world = World(*[ValueError("no")] * 20)

    def traces(*seconds):
        world.reports.clear()
        for at in seconds:
            world.now = at * 1_000_000_000
            world.runs(1)
        assert {event for event, _ in world.reports} == {"model failed"}
        return ["exception" in fields for _, fields in world.reports]

    assert traces(1, 2, 10) == [True, False, False]
    assert world.reports[0][1] == {
        "model": "m",
        "error": "model 'm' raised ValueError: no",
        "tickets": 1,
        "exception": world.reports[0][1]["exception"],
    }
    assert "Traceback" in world.reports[0][1]["exception"]
    assert traces(11, 12, 20, 21) == [True, False, False, True]
    world.model.spec = SimpleNamespace(name="other")
    assert traces(22, 23) == [True, False]


def test_what_a_model_says_of_its_outputs_is_the_answer_as_it_stands():
    world = World(ModelFailed("it returned too few rows"))
    world.runs(1)
    assert world.answers == [([0], Code.MODEL_FAILED, NEWEST, "it returned too few rows")]
    assert world.counted("failed") == [1]


def test_a_model_that_reads_no_device_memory_refuses_rows_that_are_bound_to_some_and_computes_others():
    bound = []
    world = World()
    world.batches.regions = SimpleNamespace(of=lambda tickets: bound or None)
    world.runs(1)
    bound.append("memory of a client's")
    world.runs(1)
    message = "this model reads no device memory any more: it was loaded anew. Take rows again"
    assert world.answers == [([0], Code.OK, NEWEST, ""), ([0], RowsNotBound.code, NEWEST, message)]
    assert len(world.model.asked) == 1 and world.counted("refused", "failed") == [1, 0]
