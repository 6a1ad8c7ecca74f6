"""The wall clock jumps: no waiting, no lease and no deadline may go by it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
WALL = re.compile(
    r"\btime\.time(_ns)?\(|\bdatetime\.now\(|\butcnow\(|\bCLOCK_REALTIME\b|\bsystem_clock\b|\bgettimeofday\b"
)
# Where the wall clock is shown to people, or compared with a file's time; no wait, lease or deadline depends on it.
TELLS = {
    "server/jurybox/server/supervisor/supervisor.py": 1,  # when the server was started
    "server/jurybox/server/inproc.py": 1,  # the same
    "server/jurybox/server/watch/runs.py": 1,  # how old a training's newest row is
    "server/jurybox/server/watch/sample.py": 1,  # when a snapshot was taken
    "server/jurybox/server/supervisor/weights_saver.py": 1,  # when weights were saved
    "server/jurybox/server/status.py": 1,  # up since
    "server/jurybox/server/logs.py": 1,  # when a line was written
    "server/jurybox/server/gateway/dialects/chat.py": 1,  # `created` of an answer
    "client/jurybox/client/tracing.py": 1,  # when a span began, which traces want so
}


def test_nothing_is_decided_by_the_wall_clock():
    files = [file for folder in ("protos", "client", "server", "native") for file in (ROOT / folder).rglob("*.[pch]*")]
    uses = {str(file.relative_to(ROOT)): len(WALL.findall(file.read_text())) for file in files if _is_ours(file)}
    assert {file: count for file, count in uses.items() if count} == TELLS


def _is_ours(file: Path) -> bool:
    return file.suffix in (".py", ".hpp", ".cpp") and "_pb2" not in file.name
