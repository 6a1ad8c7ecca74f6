"""The console script `jurybox`."""

from __future__ import annotations

import sys

_USAGE, _INTERRUPTED = 2, 130


def main() -> None:
    """Run the command line and end the process with an exit status of docs/operations.md."""
    try:
        _run()
    except KeyboardInterrupt:  # in an import; commands handle it themselves
        sys.stderr.write("jurybox: interrupted\n")
        sys.exit(_INTERRUPTED)


def _run() -> None:
    if sys.version_info < (3, 11):
        sys.stderr.write(
            f"jurybox: this is Python {sys.version_info[0]}.{sys.version_info[1]}, which only clients support; the "
            "command line, servers and trainings need Python 3.11 or newer.\n"
        )
        sys.exit(_USAGE)
    try:
        from jurybox.server.commands.app import app
    except ModuleNotFoundError as error:
        from jurybox.protocol.revision import install_command

        if (error.name or "").split(".")[0] == "jurybox":
            raise
        sys.stderr.write(
            f"jurybox: {error.name} is not installed: the command line comes with the server.\n"
            f"Install it with: {install_command('server')}\n"
        )
        sys.exit(_USAGE)
    app(prog_name="jurybox")


if __name__ == "__main__":
    main()
