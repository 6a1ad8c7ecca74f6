"""Checks of installed packages: whether their versions satisfy each other's requirements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from jurybox.server.doctor.host import Finding, Level, ok

OURS = "jurybox"
_MOST = 4  # conflicts that one finding names


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed package: the name in its metadata, its version and its requirements."""

    name: str
    version: str
    requires: tuple[Requirement, ...] = ()

    @classmethod
    def read(cls, name: str, version: str, requires: Iterable[str]) -> Installed:
        """Read a package's metadata; invalid requirements are ignored, as pip does."""
        read = []
        for text in requires:
            try:
                read.append(Requirement(text))
            except InvalidRequirement:
                continue
        return cls(name, version, tuple(read))


@dataclass(frozen=True, slots=True)
class Conflict:
    """An unsatisfied requirement.

    `asker` requires versions `wanted` of `package`, but `found` is installed (None: none).
    """

    asker: Installed
    package: str
    wanted: SpecifierSet
    found: str | None

    def __str__(self) -> str:
        has = f"{self.found} is installed" if self.found is not None else "it is not installed"
        return f"{self.asker.name} {self.asker.version} asks for {self.package}{self.wanted}, {has}"


def installed() -> dict[str, Installed]:
    """Return all importable distributions by canonical name; of two copies, the one that is imported."""
    found: dict[str, Installed] = {}
    for each in distributions():
        name = _name_of(each)
        if name and canonicalize_name(name) not in found:
            found[canonicalize_name(name)] = Installed.read(name, each.version, each.requires or ())
    return found


def conflicts(packages: Mapping[str, Installed]) -> list[Conflict]:
    """Return the unsatisfied requirements that involve Jurybox or its direct and indirect dependencies.

    Args:
        packages: as returned by `installed`.
    """
    ours = _closure(packages)
    found = []
    for name, asker in packages.items():
        for requirement in _wishes(name, asker):
            wanted = canonicalize_name(requirement.name)
            if wanted not in ours and name not in ours:
                continue  # neither package is one that Jurybox needs
            here = packages.get(wanted)
            if here is None and name not in ours:
                continue
            if here is None or not _admits(requirement.specifier, here.version):
                found.append(Conflict(asker, requirement.name, requirement.specifier, here.version if here else None))
    return sorted(found, key=lambda conflict: (canonicalize_name(conflict.asker.name) != OURS, str(conflict)))


def mending(conflicts: Iterable[Conflict], packages: Mapping[str, Installed]) -> str:
    """Return the pip command that resolves the conflicts; if no version does, another remedy."""
    lines, hopeless = [], []
    for package in dict.fromkeys(canonicalize_name(conflict.package) for conflict in conflicts):
        askers = [
            (asker.name, requirement.specifier)
            for name, asker in packages.items()
            for requirement in _wishes(name, asker)
            if canonicalize_name(requirement.name) == package
        ]
        together = SpecifierSet(",".join(str(specifier) for _, specifier in askers if str(specifier)))
        if _can_be(together):
            lines.append(f"'{package}{together}'")
        else:
            hopeless.append(f"{package} for {' and '.join(sorted({name for name, asked in askers if str(asked)}))}")
    advice = f"pip install {' '.join(lines)}" if lines else ""
    if hopeless:
        names = sorted({name for text in hopeless for name in text.partition(" for ")[2].split(" and ")})
        more = (
            f"no version suits all: {'; '.join(hopeless)}: pip install --upgrade {' '.join(names)}, or give Jurybox's "
            "server an environment of its own (clients set no upper bounds)"
        )
        advice = f"{advice}; {more}" if advice else more
    return advice


def check_conflicts(packages: Mapping[str, Installed]) -> Finding:
    """Check that the versions of Jurybox's dependencies satisfy all requirements."""
    found = conflicts(packages)
    if not found:
        return ok("versions", "all requirements of Jurybox and its dependencies are satisfied")
    rest = f"; and {len(found) - _MOST} more (pip check)" if len(found) > _MOST else ""
    level = Level.FAIL if canonicalize_name(found[0].asker.name) == OURS else Level.WARN
    return Finding("versions", level, "; ".join(map(str, found[:_MOST])) + rest, mending(found, packages))


def unsatisfied() -> dict[str, str]:
    """Return which installed versions do not fit, and the remedy, as fields of a log event; {} if all fit."""
    packages = installed()
    finding = check_conflicts(packages)
    return {} if finding.level is Level.OK else {"versions": finding.found, "remedy": finding.remedy}


def _wishes(name: str, asker: Installed) -> Iterator[Requirement]:
    """Yield the requirements of a package; for Jurybox, including those of its extra 'server'."""
    extras = ("", "server") if name == OURS else ("",)
    for requirement in asker.requires:
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def _closure(packages: Mapping[str, Installed]) -> set[str]:
    """Return the names of Jurybox and of its direct and indirect dependencies."""
    found: set[str] = set()
    waiting = [OURS]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name in packages:
            waiting += [canonicalize_name(requirement.name) for requirement in _wishes(name, packages[name])]
    return found


def _admits(wanted: SpecifierSet, version: str) -> bool:
    try:
        return wanted.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True  # unknown: report no conflict


def _can_be(wanted: SpecifierSet) -> bool:
    """Return whether some version satisfies all specifiers. Tries the versions in their bounds and close to them."""
    candidates = [Version("0")]
    for specifier in wanted:
        try:
            bound = Version(re.sub(r"\.\*$", "", specifier.version))
        except (InvalidVersion, InvalidSpecifier):
            return True
        release = bound.release
        candidates += [bound, Version(".".join(map(str, (*release, 1)))), Version(f"{release[0] + 1}")]
        for place, number in enumerate(release):
            if number:  # a little below: 6.999 for <7
                candidates.append(Version(".".join(map(str, (*release[:place], number - 1, 999)))))
    return any(wanted.contains(candidate, prereleases=True) for candidate in candidates)


def _name_of(each: Distribution) -> str | None:
    name: str | None = each.metadata["Name"] if each.metadata is not None else None  # None for a broken install
    return name
