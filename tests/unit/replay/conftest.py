from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from jurybox.training.replay import Field, Replay

_number = count()


@pytest.fixture
def make() -> Iterator[Callable[..., Replay]]:
    """Replays with names of their own, removed at the end."""
    made: list[Replay] = []

    def create(capacity: int = 100, fields: dict[str, Field] | None = None, **options: Any) -> Replay:
        name = f"test-{os.getpid()}-{next(_number)}"
        options.setdefault("seed", 1)
        made.append(Replay.create(name, capacity, fields or {"x": Field((3,)), "n": Field((), "int64")}, **options))
        return made[-1]

    yield create
    for replay in made:
        replay.unlink()
        replay.close()
