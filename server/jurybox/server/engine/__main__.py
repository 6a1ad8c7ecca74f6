"""python -m jurybox.server.engine FD: started by the supervisor."""

import atexit
import os
import sys

from jurybox.processes import attach
from jurybox.server.engine.process import run

if __name__ == "__main__":
    status = run(attach(int(sys.argv[1])))
    # What a model registered or printed counts. The rest, to take torch and all it imported apart, would only take time
    # from the others.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
