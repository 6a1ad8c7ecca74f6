"""Run the tests that failed in the last run of pytest once more, alone: `.ci/once_more.py [options of pytest]`.

What fails beside the others and passes alone is unsteady: it is named, and is to be mended first. The exit status is 1
if more than three tests failed, or if one fails again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 3
ROOT = Path(__file__).resolve().parents[1]


def once_more(python: str, cache: Path, *options: str) -> bool:
    """Run them by an interpreter and with the cache of that run; return whether all pass now."""
    kept = cache / "v" / "cache" / "lastfailed"
    failed = list(json.loads(kept.read_text())) if kept.exists() else []
    sys.stdout.write("\n".join([f"-- {len(failed)} tests failed:", *failed, ""]))
    sys.stdout.flush()
    if not 0 < len(failed) <= MOST:
        return False
    command = [python, "-m", "pytest", "-o", f"cache_dir={cache}", "--last-failed", "--last-failed-no-failures", "none"]
    passed = subprocess.run([*command, *options], cwd=ROOT, check=False).returncode == 0
    sys.stdout.write("-- unsteady: those passed alone\n" if passed else "-- they fail alone, too\n")
    sys.stdout.flush()
    return passed


if __name__ == "__main__":
    sys.exit(not once_more(sys.executable, ROOT / ".pytest_cache", *sys.argv[1:]))
