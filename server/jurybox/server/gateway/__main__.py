"""``python -m jurybox.server.gateway FD [MODULE...]``: the gateway as a child of the supervisor."""

import sys

from jurybox.server.shadows import NamingShadows

with NamingShadows():
    from jurybox.processes import attach
    from jurybox.server.gateway.process import leave, run

if __name__ == "__main__":
    leave(run(attach(int(sys.argv[1])), sys.argv[2:]))
