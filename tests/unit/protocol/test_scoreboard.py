"""The scoreboard's layout, and that its owner's part of it is written again where another process has written."""

from __future__ import annotations

import numpy as np
import pytest
from tests.descriptors import open_files

from jurybox.protocol import scoreboard as module
from jurybox.protocol.errors import ProtocolMismatch
from jurybox.protocol.scoreboard import COUNTERS, ENGINE, LANE, EngineState, Scoreboard, state_of
from jurybox.protocol.segment import Segment, segment_name

STARTED = 1.7e9


NAME = segment_name("t", "scoreboard")

pytestmark = pytest.mark.usefixtures("empty_shared_memory")


@pytest.fixture
def board(empty_shared_memory):
    board = Scoreboard.create(NAME, 3, STARTED)
    yield board
    board.close()


def test_processes_of_one_layout_find_the_same_words():
    """Change MEMORY_VERSION with any of these."""
    assert module.MEMORY_VERSION == 5
    assert (module.MAX_ENGINES, module.MAX_MODELS, module.MAX_LANES) == (64, 128, 2048)
    assert (module.LANE_LOCK, module.PAUSE_LOCK) == (1 << 59, (1 << 59) - 1)
    assert module.PRIORITIES == (1, 2, 3)
    assert (ENGINE.itemsize, LANE.itemsize, COUNTERS.itemsize) == (64, 32, 1592)
    assert (module._ENGINES_AT, module._LANES_AT, module._COUNTERS_AT) == (4096, 8192, 73728)
    assert module._size(1) == 73728 + 204800
    assert module._size(3) == 73728 + 614400


@pytest.mark.parametrize(
    ("written", "state"),
    [(0, EngineState.ABSENT), (2, EngineState.SERVING), (4, EngineState.STOPPED), (5, EngineState.ABSENT),
     (1 << 31, EngineState.ABSENT)],
)  # fmt: skip
def test_a_state_that_no_engine_has_counts_as_absent(written, state):
    assert state_of(np.uint32(written)) is state


def test_who_attaches_sees_what_is_written_and_an_observer_may_not_write(board):
    board.counters["rows"][2, 127] = 7
    board.lanes["lease"][2047] = 8
    there, observer = Scoreboard.attach(NAME), Scoreboard.attach(NAME, writable=False)
    assert there.counters.shape == (3, 128) and there.engines.shape == (3,)
    assert (there.counters["rows"][2, 127], there.lanes["lease"][2047]) == (7, 8)
    there.engines["pid"][1] = 9
    assert observer.engines["pid"].tolist() == [0, 9, 0]
    with pytest.raises(ValueError, match="read-only"):
        observer.engines["pid"][1] = 10
    assert board.started == STARTED
    board.own_lanes["lease"][2047] = 8
    assert not board.restore(), "an engine's pid is its own part"
    for other in (there, observer):
        other.close()


def test_an_engines_record_is_eight_words(board):
    words = board.engine_words(1)
    assert len(words) == 8
    words[0], words[3] = 5, int(EngineState.SERVING) | 4321 << 32
    assert board.engines["incarnation"].tolist() == [0, 5, 0]
    assert (board.engines["state"][1], board.engines["pid"][1]) == (EngineState.SERVING, 4321)
    words.release()


def test_lives_of_engines_are_counted_and_their_rings_numbered(board):
    board.begin_life(1, 77)
    assert board.engines["rings"].tolist() == [0, 77, 0]
    board.engines["incarnation"][1], board.engines["state"][1] = 5, EngineState.SERVING
    board.engines["incarnation"][0], board.engines["state"][0] = 6, EngineState.SERVING  # it has ended, or never began
    assert not board.restore()
    assert board.engines["incarnation"].tolist() == [0, 5, 0]
    assert board.engines["state"].tolist() == [0, 2, 0]
    board.end_life(1)
    board.end_life(1)
    board.restore()
    assert board.engines["restarts"].tolist() == [0, 2, 0]
    assert board.engines["incarnation"].tolist() == [0, 0, 0]
    assert board.engines["state"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("field", ["header", "restarts", "rings", "lane", "lease"])
def test_what_the_supervisor_wrote_is_written_again(board, field):
    board.begin_life(1, 77)
    board.own_lanes[3] = board.lanes[3] = (11, 1, 32, 8, 4321, 2, 0, 2)
    assert not board.restore()
    if field == "header":
        board.header["started"] = 0
    elif field == "lane":
        board.lanes["rows"][3] = 9999
    elif field == "lease":
        board.lanes["lease"][4] = 12
    else:
        board.engines[field][2] = 99
    assert board.restore()
    assert board.header["started"][0] == STARTED
    assert board.lanes[3].tolist() == (11, 1, 32, 8, 4321, 2, 0, 2)
    assert board.lanes["lease"][4] == 0
    assert (board.engines["restarts"].tolist(), board.engines["rings"].tolist()) == ([0, 0, 0], [0, 77, 0])
    assert not board.restore()


@pytest.mark.parametrize("spoil", ["magic", "layout", "none", "too many", "another number", "small"])
def test_memory_of_another_layout_is_refused_and_closed(spoil):
    with Segment.create(NAME, 4096 if spoil == "small" else module._size(3)) as segment:
        given = {"none": 0, "too many": 65, "another number": 2}.get(spoil, 3)
        layout = 4 if spoil == "layout" else 5
        magic = b"jurybot\0" if spoil == "magic" else b"jurybox\0"
        segment.array(module._HEADER, (1,))[0] = (magic, layout, given, STARTED)
        before = open_files()
        with pytest.raises(ProtocolMismatch, match="is no scoreboard of layout 5"):
            Scoreboard.attach(NAME)
        assert open_files() == before


def test_a_scoreboard_lives_as_long_as_its_owner(board):
    there = Scoreboard.attach(NAME)
    assert there.server_lives()
    board.close()
    assert not there.server_lives()
    there.close()
