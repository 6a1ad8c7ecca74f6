"""A process returns memory to the system after clients made it hold much: bytes, or connections that do nothing."""

from __future__ import annotations

import pytest

from jurybox import native
from jurybox.server.security.limits import HTTP, RECEIVED, Watch, budget_of


class Idle:
    def __init__(self, budget):
        self.account = native.Account(budget, HTTP)

    def end_silent(self, now):
        pass


@pytest.mark.parametrize("what", ["bytes", "connections"])
def test_freed_memory_returns_to_the_system_once_after_much_was_held(what):
    budget = budget_of(64 << 20)
    held, returned = [Idle(budget)], []
    watch = Watch(budget, [lambda: held])
    watch._trim = returned.append
    watch.check(0.0)
    if what == "bytes":
        held[0].account.owe(RECEIVED, 100 << 20)
    else:
        held += [Idle(budget) for _ in range(4096)]
    watch.check(1.0)
    assert not returned  # it is in use
    held[0].account.give(RECEIVED, held[0].account.held(RECEIVED))
    del held[1:]
    watch.check(2.0)
    watch.check(3.0)
    assert returned == [0]
