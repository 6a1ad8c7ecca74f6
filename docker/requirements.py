"""Print the requirements of an install from pyproject.toml, with some extras but without jurybox itself.

python docker/requirements.py server otel > requirements.txt
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

# Beside this file in an image that is being built, a folder up in the repository.
FILES = [Path(__file__).parent / "pyproject.toml", Path(__file__).parents[1] / "pyproject.toml"]


def requirements(extras: list[str]) -> list[str]:
    """Of the plain install and of the extras, those that they name of jurybox itself included."""
    project = tomllib.loads(next(file for file in FILES if file.is_file()).read_text())["project"]
    found: dict[str, None] = dict.fromkeys(project["dependencies"])
    todo, done = list(extras), set()
    while todo:
        extra = todo.pop(0)
        if extra in done:
            continue
        done.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            if own := re.fullmatch(r"jurybox\[([\w, -]+)\]", requirement):
                todo += [name.strip() for name in own[1].split(",")]
            else:
                found[requirement] = None
    return list(found)


if __name__ == "__main__":
    sys.stdout.write("\n".join(requirements(sys.argv[1:])) + "\n")
