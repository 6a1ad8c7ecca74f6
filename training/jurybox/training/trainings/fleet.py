"""A fleet: several runs from one command, one for each seed and each variation of the settings, and their comparison.

They run one after the other, or side by side in processes of their own. Side by side, their served policies are models
of one server, which computes policies of one architecture as one stacked forward (`serving.grouped`).
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jurybox.processes import ControlPipe, spawn
from jurybox.training import interrupts
from jurybox.training.run_folder import is_begun
from jurybox.training.runtime.launching import status_of
from jurybox.training.runtime.settings import Settings, merged
from jurybox.training.trainings import comparison
from jurybox.training.trainings import training as single
from jurybox.training.trainings.members import FleetMember
from jurybox.training.trainings.training import RunFailed, check_folder, command_line, named

if TYPE_CHECKING:
    from rich.console import Console

_MODULE = "jurybox.training.trainings.member_process"
_POLL_SECONDS, _LINE_SECONDS = 0.1, 10.0
_STOP_SECONDS = 120.0  # for the checkpoints of all, which they may write at the same time
_OWN_POLICIES = ["jurybox.training.algorithms.served:*"]  # of algorithms of the user's own


def carried_out(
    training: str,
    members: Sequence[FleetMember],
    config: Path | None,
    changed: Mapping[str, Any],
    folder: Path,
    console: Console,
    folders: list[Path],
    *,
    at_once: int,
    resume: bool = False,
    **options: Any,
) -> str:
    """Run all members, compare them, and return what is printed at the end.

    Args:
        training: "module:attribute" of the `Training`.
        config: TOML file with settings.
        changed: settings that override it, nested.
        folder: the fleet's.
        folders: takes the folders of members that were begun.
        at_once: how many run side by side; 1: in this process.
        resume: members that were begun go on; the others begin.
        options: arguments of `training.carried_out`.

    Raises:
        ConfigError: the settings of a member are inconsistent.
        RunFailed: a member failed. Others that ran beside it went on, and those that ended are compared.
    """
    check_folder(folder)
    found = named(training)
    file = tomllib.loads(config.read_text(encoding="utf-8")) if config else {}
    values = {member: member.applied(merged(file, changed)) for member in members}
    chosen = {member: found.settings.read(None, given) for member, given in values.items()}  # before any begins

    def options_of(member: FleetMember) -> dict[str, Any]:
        run = folder / member.name
        folders.append(run)
        return {**options, "resume": resume and is_begun(run)}

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    results, failed = [], dict[FleetMember, str]()
    if at_once > 1:
        folder.mkdir(parents=True, exist_ok=True)
        first = next(iter(chosen.values()))
        common = next((each for each in chosen.values() if getattr(each, "policy", "") == "served"), first)
        failed = run_together(values, training, common, folder, at_once, say, options_of)
    else:
        for member, settings in chosen.items():
            say(f"{member.name}, in {folder / member.name}")
            results.append(single.carried_out(found, settings, folder / member.name, console, **options_of(member)))
            interrupts.check()
    ended = [member for member in members if member not in failed]
    if ended:
        results.append(comparison.write(folder, ended, command_line()))
    results += [f"{member.name}: {why}" for member, why in failed.items()]
    if failed:
        raise RunFailed("\n".join(results))
    return "\n\n".join(results)


def run_together(
    members: Mapping[FleetMember, Mapping[str, Any]],
    training: str,
    settings: Settings,
    folder: Path,
    at_once: int,
    say: Callable[[str], None],
    options_of: Callable[[FleetMember], Mapping[str, Any]],
) -> dict[FleetMember, str]:
    """Run the members in processes of their own, at most `at_once` at a time; what each prints is in its log.

    Args:
        members: with the settings of each, as nested values.
        training: "module:attribute" of the `Training`.
        settings: those that are common to all.
        folder: the fleet's.
        say: takes lines about the progress.
        options_of: the arguments of `training.carried_out` for a member, as values of JSON.

    Returns:
        Why members failed, which the others do not end with.
    """
    failed: dict[FleetMember, str] = {}
    waiting, running = deque(members.items()), dict[FleetMember, tuple[subprocess.Popen[bytes], ControlPipe]]()
    with _server_of(settings, folder) as common:
        try:
            said = time.monotonic()
            while waiting or running:
                interrupts.check()
                while waiting and len(running) < at_once:
                    member, values = waiting.popleft()
                    given = dict(values)
                    if values.get("policy") == "served":
                        given.pop("server_http", None)
                        given |= common
                    say(f"{member.name} begins ({_log_of(folder, member)})")
                    running[member] = _started(training, given, folder, member, options_of(member))
                for member, (process, pipe) in list(running.items()):
                    if (status := process.poll()) is not None:
                        pipe.close()
                        del running[member]
                        if status:
                            failed[member] = f"it ended with status {status}: {_last_line(_log_of(folder, member))}"
                        say(f"{member.name}: {failed.get(member, 'done')}")
                if time.monotonic() - said > _LINE_SECONDS:
                    said = time.monotonic()
                    steps = sum(_steps_in(folder / member.name) for member in members)
                    say(f"{len(running)} running, {len(waiting)} waiting, {steps:,} env steps of all")
                time.sleep(_POLL_SECONDS)
        finally:
            _stop(running)
    return failed


def _started(
    training: str, values: Mapping[str, Any], folder: Path, member: FleetMember, options: Mapping[str, Any]
) -> tuple[subprocess.Popen[bytes], ControlPipe]:
    log = _log_of(folder, member)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file, interrupts.held():
        process, pipe = spawn(_MODULE, output=file.fileno())
        order = {"training": training, "values": values, "folder": str(folder / member.name), "path": sys.path}
        pipe.send("configure", **order, options={"command": command_line(), **options})
    return process, pipe


def _stop(running: Mapping[FleetMember, tuple[subprocess.Popen[bytes], ControlPipe]]) -> None:
    """Stop members in order, which write checkpoints; then by force."""
    for process, _ in running.values():
        process.send_signal(signal.SIGTERM)
    until = time.monotonic() + _STOP_SECONDS
    for process, pipe in running.values():
        status_of(process, max(0.0, until - time.monotonic()))
        pipe.close()


def _log_of(folder: Path, member: FleetMember) -> Path:
    return folder / f"{member.name}.log"


def _steps_in(run: Path) -> int:
    """Return the env steps of the newest row of metrics; 0: there is none yet."""
    metrics = run / "metrics.csv"
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    rows = text.split("\n")[1:-1]  # the last may be unfinished
    return int(float(rows[-1].partition(",")[0])) if rows else 0


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.exists() else []
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "it has said nothing")


@contextmanager
def _server_of(settings: Settings, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the settings of all members that let them share one server: the one they name, or a private one."""
    if getattr(settings, "policy", "local") != "served":
        yield {}
        return
    group = {"server_group": getattr(settings, "server_group", None) or f"fleet-{secrets.token_hex(4)}"}
    if (address := getattr(settings, "server", None)) is not None:
        yield {"server": address, **group}
        return
    from jurybox.training.runtime.serving import served_models

    http = bool(getattr(settings, "server_http", False))
    with served_models({}, log=folder / "server.log", http=http, factories=_OWN_POLICIES) as served:
        yield {"server": served.address, **group}
