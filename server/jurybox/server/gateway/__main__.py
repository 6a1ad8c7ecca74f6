"""``python -m jurybox.server.gateway FD``: the gateway as a child of the supervisor."""

import sys

from jurybox.server.gateway.process import leave, run
from jurybox.server.lifeline import attach

if __name__ == "__main__":
    leave(run(attach(int(sys.argv[1]))))
