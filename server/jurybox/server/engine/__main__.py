"""Entry point `python -m jurybox.server.engine FD`, which the supervisor starts."""

import atexit
import os
import sys

from jurybox.server.shadows import NamingShadows

with NamingShadows():
    from jurybox.processes import attach
    from jurybox.server.engine.process import run

if __name__ == "__main__":
    status = run(attach(int(sys.argv[1])))
    # Run the exit handlers and flush what models printed, but skip the interpreter's finalization: tearing down torch
    # and its imports would only take CPU time from the other processes.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
