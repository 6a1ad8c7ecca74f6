"""``python -m jurybox.server.relay FD``: the relay as a child of the supervisor."""

import os
import sys

from jurybox.server.shadows import NamingShadows

with NamingShadows():
    from jurybox.processes import attach
    from jurybox.server.relay.process import run

if __name__ == "__main__":
    os._exit(run(attach(int(sys.argv[1]))))
