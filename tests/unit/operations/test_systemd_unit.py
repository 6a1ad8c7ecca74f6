"""The systemd unit says what the server does: its times, exit statuses, settings and restrictions."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from jurybox.server.commands.app import _CONFIG
from jurybox.server.settings.config import load_settings
from jurybox.server.supervisor.service_manager import ServiceManager

UNIT = Path(__file__).parents[3] / "deploy" / "jurybox.service"


@pytest.fixture(scope="module")
def service() -> dict[str, list[str]]:
    """The section [Service]: the values of every key."""
    found: dict[str, list[str]] = {}
    section = re.search(r"^\[Service\]\n(.*?)^\[", UNIT.read_text(), re.DOTALL | re.MULTILINE)[1]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


def test_systemd_can_read_it() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(UNIT.read_text())
    assert parser.sections() == ["Unit", "Service", "Install"]


def test_its_times_leave_the_server_the_time_that_it_takes(service) -> None:
    settings = load_settings(None, (), {}).server
    assert int(service["TimeoutStartSec"][0]) > settings.start_timeout
    assert int(service["TimeoutStopSec"][0]) > settings.drain_timeout + 10
    assert service["RestartPreventExitStatus"] == [str(_CONFIG)]


def test_its_variables_are_settings_and_clients_find_the_address(service) -> None:
    environ = dict(pair.split("=", 1) for pair in service["Environment"])
    server = load_settings(None, (), environ).server
    assert server.address.startswith(f"ipc:///run/{service['RuntimeDirectory'][0]}/")
    assert server.log_format == "json"


def test_the_unit_neither_separates_the_server_from_its_clients_nor_restricts_torch(service) -> None:
    assert not {"PrivateIPC", "PrivateUsers", "RemoveIPC", "MemoryDenyWriteExecute", "DynamicUser"} & service.keys()
    assert (service["Type"], service["KillMode"], service["OOMPolicy"]) == (["notify"], ["mixed"], ["continue"])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_and_little_exposed(tmp_path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/jurybox/bin/jurybox", shutil.which("true") or "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (0, "")
    exposed = ["systemd-analyze", "security", "--offline=true", "--threshold=25", unit]  # 2.5 of 10
    assert subprocess.run(exposed, capture_output=True).returncode == 0


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(os.fspath(tmp_path / "notify"))
        listener.setblocking(False)
        yield listener


def heard(manager) -> list[str]:
    found = []
    while True:
        try:
            found.append(manager.recv(4096).decode())
        except BlockingIOError:
            return found


def test_it_gets_readiness_the_stop_and_three_signs_of_life_per_watchdog_interval(manager) -> None:
    now = [100.0]
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "30000000"}
    service = ServiceManager(pytest.fail, environ, lambda: now[0])
    service.ready("serving photo")
    for _ in range(120):
        service.alive()
        now[0] += 0.25
    service.stopping()
    assert heard(manager) == ["READY=1\nSTATUS=serving photo", *["WATCHDOG=1"] * 3, "STOPPING=1\nSTATUS=draining"]


def test_an_abstract_name_does_as_well() -> None:
    name = f"jurybox-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.setblocking(False)
        ServiceManager(pytest.fail, {"NOTIFY_SOCKET": f"@{name}"}).stopping()
        assert heard(listener) == ["STOPPING=1\nSTATUS=draining"]


def test_without_a_manager_nothing_is_sent_and_one_that_is_gone_is_a_warning(tmp_path) -> None:
    ServiceManager(pytest.fail, {}).ready("serving")
    warnings = []
    service = ServiceManager(
        lambda event, **fields: warnings.append((event, fields)), {"NOTIFY_SOCKET": f"{tmp_path}/x"}
    )
    service.ready("serving")
    ((event, fields),) = warnings
    assert event == "the service manager does not listen" and fields["address"] == f"{tmp_path}/x"
