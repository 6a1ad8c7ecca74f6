from __future__ import annotations

import pytest
from tests.unit.engine.worlds import World


@pytest.fixture
def world():
    worlds = []

    def make(think, kind=World, **cost):
        worlds.append(kind(think, **cost))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()
