"""A child that opens its control pipe and never reads it, and a parent that ends as soon as it has a child.

Another child starts a program that outlives it.
"""

import os
import sys
import time

from tests.descriptors import start_helper

from jurybox.processes import attach, spawn

if __name__ == "__main__":
    if sys.argv[1] == "parent":
        process, control_pipe = spawn("tests.unit.processes.control_pipe_roles")
        control_pipe.send("configure")
        print(process.pid, flush=True)
        os._exit(0)
    if sys.argv[2:] == ["helped"]:
        pipe = attach(int(sys.argv[1]))
        pipe.send("helper", pid=start_helper())
        os._exit(0)
    time.sleep(0.5)  # the parent is dead by now
    attach(int(sys.argv[1]))
    time.sleep(60)
