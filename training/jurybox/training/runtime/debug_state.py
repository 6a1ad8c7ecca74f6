"""The shared state of a run that is going on, as text: counters, versions, replays, who waits on whom."""

from __future__ import annotations

import json
import time
from pathlib import Path

from jurybox.protocol.errors import ProtocolMismatch, SharedMemoryError
from jurybox.protocol.weights import WeightsChannel
from jurybox.training.replay import Replay
from jurybox.training.runtime.board import AT_REST, Board, Order, State, Told, Word
from jurybox.training.runtime.errors import NotRunning

# Says which shared memory a run uses, for as long as it runs.
RUNNING = "running.json"


def going_on(folder: Path) -> int | None:
    """The process whose run is going on in `folder`; None where there is none, or it was killed."""
    try:
        said = json.loads((folder / RUNNING).read_text(encoding="utf-8"))
        board = Board.attach(said["board"], keep_alive=False)
    except (OSError, ValueError, KeyError, ProtocolMismatch):
        return None
    try:
        return int(said["pid"]) if board.segment.owner_lives() else None
    finally:
        board.close()


def debug_state(folder: Path) -> str:
    """What the run in `folder` shares at this moment.

    Raises:
        NotRunning: there is none, or it ended just now.
    """
    mark = folder / RUNNING
    try:
        board = Board.attach(json.loads(mark.read_text(encoding="utf-8"))["board"], keep_alive=False)
    except (OSError, ValueError, SharedMemoryError) as error:
        raise NotRunning(
            f"no run is going on in {folder} ({type(error).__name__}): expected {mark} and its shared memory; give the "
            "folder that a run was started with"
        ) from error
    try:
        owner = "runs" if board.segment.owner_lives() else "is gone; the next start frees this memory"
        return "\n".join(
            [
                f"run {board.segment.name}, whose owner {owner}",
                f"epoch {board.epochs:,}  environment steps {board.env_steps:,}  "
                f"learner steps {board.learner_steps:,}  episodes {board.episodes:,}",
                "",
                *_roles(board),
                "",
                *_channels(board),
                *_replays(board),
            ]
        )
    finally:
        board.close()


def _roles(board: Board) -> list[str]:
    now, lines = time.monotonic_ns(), []
    for number, (name, kind) in enumerate(board.named.roles):
        words, orders = board.words[number], board.orders[number]
        subject, which = board.waits_for(number)
        total = max(1, words[Word.BUSY] + words[Word.WAITED])
        waits = "works"
        if subject not in AT_REST or words[Word.WAITS_FOR]:
            of = f" {board.named.channels[which][0]}" if subject.name == "WEIGHTS" else ""
            waits = f"waits for {subject.name.lower()}{of} since {(now - words[Word.WAITS_SINCE]) / 1e9:.1f} s"
        lines.append(
            f"{name:<14} {kind.name.lower():<9} {State(words[Word.STATE]).name.lower():<8} "
            f"told to {Order(orders[Told.ORDER]).name.lower():<5} pid {words[Word.PID]:<7} life {words[Word.LIFE]} "
            f"steps {words[Word.ENV_STEPS] + words[Word.LEARNER_STEPS]:,}  version {words[Word.VERSION]}  "
            f"lag {words[Word.LAG]}  busy {words[Word.BUSY] / total:.0%}  "
            f"heartbeat {(now - words[Word.HEARTBEAT]) / 1e9:.1f} s ago  restarts {orders[Told.RESTARTS]}  {waits}"
        )
    return lines


def _channels(board: Board) -> list[str]:
    lines = []
    for name, segment in board.named.channels:
        with WeightsChannel.attach(segment) as channel:
            claim = channel.claim()
            age = f", {channel.age_seconds(claim):.1f} s old, in slot {claim.slot}" if claim.version else ""
            lines.append(
                f"weights {name:<14} {channel.mode}, {channel.layout.nbytes:,} bytes, version {channel.newest}{age}"
            )
    return lines


def _replays(board: Board) -> list[str]:
    lines = []
    for name, attached in board.named.replays:
        replay = Replay.attach(attached)
        try:
            counted = replay.counters
            lines.append(
                f"replay  {name:<14} {len(replay):,} of {replay.capacity:,} rows, {counted.added:,} added, "
                f"{counted.sampled:,} sampled, {counted.overwritten:,} overwritten, {replay.nbytes:,} bytes"
            )
        finally:
            replay.close()
    return lines
