"""Each case is a process of its own: handlers and their state belong to a whole process."""

import subprocess
import sys
import textwrap

import pytest

HEAD = """
import os, signal
from jurybox.training import interrupts
interrupts.take_over(lambda: print("told"))
def ctrl_c(): os.kill(os.getpid(), signal.SIGINT)
"""


def says(body):
    script = textwrap.dedent(HEAD) + textwrap.dedent(body)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_first_ctrl_c_interrupts_and_the_second_leaves_the_clearing_up_alone():
    assert says("""
        try:
            ctrl_c()
            print("missed")
        except KeyboardInterrupt:
            ctrl_c()
            print("cleared", interrupts.exit_status())
    """) == ["told", "cleared", "130"]


def test_ctrl_c_waits_for_the_end_of_a_critical_section():
    assert says("""
        try:
            with interrupts.held():
                with interrupts.held():
                    ctrl_c()
                    print("whole")
                print("still")
            print("missed")
        except KeyboardInterrupt:
            print("after")
    """) == ["told", "whole", "still", "after"]


def test_an_interrupt_that_something_swallowed_is_raised_again_by_check():
    assert says("""
        class Swallows:
            def __del__(self):
                ctrl_c()
        import sys
        sys.unraisablehook = lambda report: None
        thing = Swallows(); del thing
        print("swallowed")
        try:
            interrupts.check()
        except KeyboardInterrupt:
            print("raised")
    """) == ["told", "swallowed", "raised"]


def test_nothing_interrupts_the_last_clearing_up():
    assert says("""
        interrupts.ignore_from_now_on()
        ctrl_c()
        interrupts.check()
        with interrupts.held():
            pass
        print("done")
    """) == ["done"]


def test_without_a_signal_there_is_no_exit_status():
    assert says("interrupts.check(); print(interrupts.exit_status())") == ["None"]


ENDS = """
import atexit, signal, sys
from jurybox.training import interrupts
class Slow:
    def __del__(self):
        print("taken apart", flush=True)
kept = Slow()
atexit.register(print, "registered before")
interrupts.take_over()
try:
    if len(sys.argv) > 1:
        signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    pass
interrupts.ignore_from_now_on(143)
atexit.register(print, "registered later")
interrupts.shorten_exit(143)
sys.exit(143)
"""


@pytest.mark.parametrize("signalled", [False, True])
def test_after_a_signal_the_exit_does_all_but_take_the_modules_apart(signalled):
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *(["x"] if signalled else [])], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 143, done.stderr
    said = ["registered later", "registered before"]
    assert done.stdout.splitlines() == (said if signalled else [*said, "taken apart"])
