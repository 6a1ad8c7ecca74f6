"""What the doctor says: of one subject, how it is and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is: a server runs well, runs with limits, does not run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do (empty where nothing is)."""

    subject: str
    level: Level
    found: str
    remedy: str = ""
