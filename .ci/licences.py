"""Check the licences of all packages that an install of Jurybox brings along; needs no network.

    .venv/bin/python .ci/licences.py          # exit status 1 if one is not on the list
    .venv/bin/python .ci/licences.py --all    # also print every package with its licence

It checks the packages that every extra of pyproject.toml requires, by what pip-licenses reads from their metadata, but
for NOT_SHIPPED: tools that only develop Jurybox may have any licence. A package that is not installed here cannot be
checked; its extra is named.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOT_SHIPPED = {"dev", "browser"}

# Permissive, and MPL-2.0 for files used as they are. Metadata names them by SPDX's words or by PyPI's classifiers.
ALLOWED = {
    "0BSD", "MIT-0", "Apache Software License", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "3-Clause BSD License",
    "BSD License", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "ISC License (ISCL)", "MIT",
    "MIT License", "MIT-CMU", "Mozilla Public License 2.0 (MPL 2.0)", "MPL-2.0", "PSF-2.0",
    "Python Software Foundation License", "Zlib", "zlib",
    # torch's CUDA libraries, which the user gets from NVIDIA through PyPI.
    "LicenseRef-NVIDIA-Proprietary", "NVIDIA Proprietary Software",
}  # fmt: skip


def extras() -> dict[str, set[str]]:
    """Names of all packages that each extra of Jurybox requires itself, but for NOT_SHIPPED."""
    every = {canonicalize_name(name) for name in distribution("jurybox").metadata.get_all("Provides-Extra") or ()}
    found: dict[str, set[str]] = {name: set() for name in every - NOT_SHIPPED}
    for text in distribution("jurybox").requires or ():
        requirement = Requirement(text)
        for name, packages in found.items():
            if requirement.marker is not None and requirement.marker.evaluate({"extra": name}):
                packages.add(canonicalize_name(requirement.name))
    return found


def required(name: str, extras: set[str]) -> set[str]:
    """Names of the packages that are installed because of a package with some of its extras, itself included."""
    found: dict[str, set[str]] = {}
    waiting = [(name, extras | {""})]
    while waiting:
        package, wanted = waiting.pop()
        key = canonicalize_name(package)
        new = wanted - found.get(key, set())
        if not new:
            continue
        try:
            requirements = distribution(package).requires or ()
        except PackageNotFoundError:
            continue  # of an extra that is not installed
        found.setdefault(key, set()).update(new)
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in new):
                waiting.append((requirement.name, requirement.extras | {""}))
    return set(found)


def licences(packages: set[str]) -> dict[str, str]:
    """Each package's licence, from its metadata."""
    command = [sys.executable, "-m", "piplicenses", "--from=mixed", "--with-system", "--format=json", "--packages"]
    told = subprocess.run([*command, *sorted(packages)], stdout=subprocess.PIPE, text=True, check=True)
    return {each["Name"]: each["License"] for each in json.loads(told.stdout)}


def refused(licence: str) -> list[str]:
    """The parts of a licence that are not on the list; also those of alternatives."""
    parts = [part.strip() for part in re.split(r";|\bAND\b|\bOR\b", licence)]
    names = [part if part.count("(") == part.count(")") else part.strip("()") for part in parts]
    return [name for name in names if name not in ALLOWED]


def main() -> int:
    by_extra = extras()
    packages = required("jurybox", set(by_extra))
    found = licences(packages)
    missing = packages - {canonicalize_name(name) for name in found}
    wrong = {name: parts for name, licence in found.items() if (parts := refused(licence))}
    if "--all" in sys.argv[1:]:
        for name, licence in sorted(found.items(), key=lambda each: each[0].lower()):
            sys.stdout.write(f"{name}: {licence}\n")
    for name, parts in wrong.items():
        sys.stderr.write(
            f"{name}: {' and '.join(parts)} is not among the licences that .ci/licences.py allows: do without the "
            "package, or add the licence there where it goes with Apache-2.0\n"
        )
    for name in missing:
        sys.stderr.write(f"{name}: pip-licenses says nothing about it\n")
    for extra, names in sorted(by_extra.items()):
        if absent := sorted(names - packages):
            sys.stdout.write(f"extra {extra}: {', '.join(absent)} is not installed here and was not checked\n")
    sys.stdout.write(f"{len(found)} packages looked at, {len(wrong) + len(missing)} not in order\n")
    return 1 if wrong or missing else 0


if __name__ == "__main__":
    sys.exit(main())
