"""A short soak: it serves its load, finds no fault and writes its observations."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_soak_with_a_killed_engine_has_no_wrong_answer_and_writes_its_report(tmp_path):
    command = [sys.executable, "-m", "benchmarks.soak", "--seconds", "45", "--kill-every", "20", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert "wrong answers" not in done.stdout and "left in shared memory" not in done.stdout, done.stdout
    assert "| supervisor | descriptors |" in done.stdout, done.stdout + done.stderr
    assert {file.suffix for file in tmp_path.iterdir()} >= {".csv", ".md", ".svg"}
