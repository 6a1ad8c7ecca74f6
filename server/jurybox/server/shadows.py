"""Files in the start folder that stand in the way of modules of the same name, such as a user's random.py.

A child process finds the factories of its start folder, and so finds files there before Python's own modules. This
module imports nothing that such a file could replace.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from types import TracebackType

_OPTIONAL = {"triton"}  # modules that torch imports if it finds them


def shadowing(traceback: TracebackType | None = None) -> list[str]:
    """Return a sentence for each module that was imported from the start folder in place of another one.

    Args:
        traceback: of an import that failed; a module in it counts as imported.
    """
    folder = os.getcwd()  # noqa: PTH109  pathlib imports modules that a file might replace
    rest = [path for path in sys.path if path not in ("", folder)]
    try:
        entries = os.listdir(folder)  # noqa: PTH208
    except OSError:  # nor has Python found anything there
        entries = []
    # By what is there, which is little: a look at each of thousands of modules takes longer.
    files = {
        name: str(file)
        for name in sorted({entry.partition(".")[0] for entry in entries})
        if (file := getattr(sys.modules.get(name), "__file__", None))
    }
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        files.setdefault(os.path.splitext(os.path.basename(file))[0], file)  # noqa: PTH119, PTH122
        traceback = traceback.tb_next
    sentences = []
    for name, file in files.items():
        if file not in (os.path.join(folder, f"{name}.py"), os.path.join(folder, name, "__init__.py")):  # noqa: PTH118
            continue
        if name in sys.stdlib_module_names:
            whose = "Python's"
        elif name in _OPTIONAL or PathFinder.find_spec(name, rest) is not None:
            whose = "an installed"
        else:
            continue
        sentences.append(
            f"{file} stands in the way of {whose} module {name!r}, which other code imports: rename it, or start the "
            "server in another folder"
        )
    return sentences


class NamingShadows:
    """A context manager for imports: prints the sentences of `shadowing`, before the traceback if there is one."""

    def __enter__(self) -> NamingShadows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sentence in shadowing(traceback):
            sys.stderr.write(f"{sentence}\n")
