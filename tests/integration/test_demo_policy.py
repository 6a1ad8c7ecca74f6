"""`jurybox demo policy`: one command shows a served policy that Python and curl get the same actions from."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading

import pytest
from tests.serving import wait_until

COMMAND = [sys.executable, "-m", "jurybox.training.cli", "demo", "policy"]


@pytest.mark.runs
def test_it_plays_well_and_both_ways_give_the_same_action(tmp_path):
    done = subprocess.run([*COMMAND, "--end", "--out", tmp_path / "o"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "a return of 500 of 500" in done.stdout and "/v2/models/cartpole/infer" in done.stdout
    assert re.search(r"the action is [01] \((left|right)\), as over Python", done.stdout)
    assert len(done.stdout.splitlines()) < 20, "one screen"


@pytest.mark.runs
def test_in_a_terminal_it_serves_on_until_ctrl_c(tmp_path):
    running = subprocess.Popen([*COMMAND, "--stay", "--out", tmp_path / "o"], stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(running.stdout), daemon=True)
    reader.start()
    try:
        wait_until(lambda: any("Ctrl-C ends it" in line for line in lines), 100, "the end of the show")
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 130
    finally:
        running.kill()
        running.wait()
        reader.join(20)
