"""Scenario 2 of CAGE Challenge 2 in the shape in which CybORG wants it, from what its hosts are known to run.

The packaged CybORG carries no scenario files. What listens where, who runs it, and which exploits it answers is
documented and was measured; process numbers and everything else that no rule looks at are made up.
"""

from __future__ import annotations

import copy
from typing import Any

from jurybox.training.environments.cage.tables import HOSTS

Record = dict[str, Any]

_LINUX = {"Architecture": "x64", "OSDistribution": "UBUNTU", "OSType": "LINUX", "OSVersion": "U18_04_3"}
_WINDOWS = {"Architecture": "x64", "OSDistribution": "WINDOWS_SVR_2008", "OSType": "WINDOWS", "OSVersion": "W6_1_7601"}
_SUBNETS = {
    "User": ["User0", "User1", "User2", "User3", "User4"],
    "Enterprise": ["Enterprise0", "Enterprise1", "Enterprise2", "Defender"],
    "Operational": ["Op_Server0", "Op_Host0", "Op_Host1", "Op_Host2"],
}
_REVEALS = {
    "Enterprise2": "Op_Server0",
    "User1": "Enterprise1",
    "User2": "Enterprise1",
    "User3": "Enterprise0",
    "User4": "Enterprise0",
}
_DECOYS = ("Apache", "Femitter", "HarakaSMPT", "Smss", "SSHD", "Svchost", "Tomcat", "Vsftpd")
_BLUE = ["Sleep", "Monitor", "Analyse", "Remove", *(f"Decoy{name}" for name in _DECOYS), "Restore"]
_RED = ["Sleep", "DiscoverRemoteSystems", "DiscoverNetworkServices", "ExploitRemoteService", "PrivilegeEscalate"]


def _process(pid: int, name: str, user: str, ports: tuple[int, ...] = (), **more: Any) -> Record:
    found: Record = {"PID": pid, "PPID": 1, "Process Name": name, "Username": user}
    if ports:
        found["Connections"] = [{"local_address": "0.0.0.0", "local_port": port} for port in ports]
    return {**found, **{key.replace("_", " "): value for key, value in more.items()}}


def _users(*names: str, weak: str | None = None) -> list[Record]:
    found: list[Record] = [{"Username": name} for name in names]
    return found + ([] if weak is None else [{"Username": weak, "Password": weak, "Bruteforceable": True}])


def _web(pid: int, name: str, user: str) -> Record:
    return _process(pid, name, user, (80, 443), Process_Type="webserver", Properties=["rfi"])


def _hosts() -> dict[str, Record]:
    linux = _users("root", "www-data", "ubuntu", "GreenAgent", weak="pi")
    windows = _users("Administrator", "GreenAgent", "SYSTEM", weak="vagrant")
    sshd, windows_sshd = _process(91, "sshd", "root", (22,)), _process(68, "sshd.exe", "sshd_server", (22,))
    mail = _process(102, "smtp", "root", (25,), Process_Type="smtp", Process_Version="haraka 2.7.0")
    ftp = _process(44, "femitter.exe", "SYSTEM", (21,), Process_Type="femitter")
    desktop = _process(32, "svchost.exe", "SYSTEM", (135,))
    plain = [sshd], linux, _LINUX
    server = (
        [
            windows_sshd,
            desktop,
            _process(40, "svchost.exe", "SYSTEM", (3389,), Process_Type="rdp"),
            _process(4, "smss.exe", "SYSTEM", (445, 139)),
            _web(34, "tomcat8.exe", "NetworkService"),
        ],
        windows,
        _WINDOWS,
    )
    image = {
        "Defender": (
            [
                sshd,
                _process(56, "systemd-resolved", "systemd+", (53, 53)),
                _process(34, "systemd-networkd", "systemd+", (68,)),
            ],
            _users("root", "ubuntu"),
            _LINUX,
        ),
        "Enterprise0": plain,
        "Enterprise1": server,
        "Enterprise2": server,
        **{f"Op_Host{index}": plain for index in range(3)},
        "Op_Server0": ([sshd, _process(43, "OTService", "root")], linux, _LINUX),
        "User0": ([windows_sshd, ftp], windows, _WINDOWS),
        "User1": ([windows_sshd, ftp], windows, _WINDOWS),
        "User2": (
            [
                _process(4, "smss.exe", "SYSTEM", (445, 139), Process_Type="smb"),
                desktop,
                _process(40, "svchost.exe", "NetworkService", (3389,), Process_Type="rdp"),
            ],
            windows,
            _WINDOWS,
        ),
        "User3": ([_process(101, "mysql", "root", (3389,)), _web(100, "apache2", "www-data"), mail], linux, _LINUX),
        "User4": (
            [sshd, _process(103, "mysql", "root", (3390,)), _web(100, "apache2", "www-data"), mail],
            linux,
            _LINUX,
        ),
    }
    return {name: _host(name, *copy.deepcopy(parts)) for name, parts in image.items()}


def _host(name: str, processes: list[Record], users: list[Record], system: Record) -> Record:
    found: Record = {"Processes": processes, "User Info": users, "System info": system, "info": {}}
    if name in _REVEALS:
        found["info"][_REVEALS[name]] = {"Interfaces": "IP Address"}
    if name != "Defender":
        found["info"][name] = {"Interfaces": "All"}
    if name == "Op_Server0":
        found["info"][name]["Services"] = ["OTService"]
        found |= {"Services": {"OTService": {"active": True, "PID": 43}}, "AvailabilityValue": "High"}
    if name.startswith(("Enterprise", "Op_Server")):
        found["ConfidentialityValue"] = "Medium"
    if name.startswith("User"):
        found["AvailabilityValue"] = "None"
    if name == "User0":
        found["ConfidentialityValue"] = "None"
    return found


def _session(host: str, name: str, kind: str, user: str, **more: Any) -> Record:
    return {"hostname": host, "name": name, "type": kind, "username": user, **more}


def _agent(actions: list[str], rewards: str, sessions: list[Record], known: list[str], **more: Any) -> Record:
    told = {host: {"Interfaces": "All", "System info": "All", "User info": "All"} for host in known}
    return {
        "AllowedSubnets": list(_SUBNETS),
        "INT": {"Hosts": told},
        "actions": actions,
        "agent_type": "SleepAgent",
        "reward_calculator_type": rewards,
        "starting_sessions": sessions,
        "wrappers": [],
        **more,
    }


def scenario() -> Record:
    """Agents, hosts and subnets of Scenario 2."""
    system = ("Enterprise1", "Enterprise2")
    client = "VelociraptorClient"
    watching = [
        _session(host, f"Velo{host}", client, "SYSTEM" if host in system else "ubuntu", parent="VeloServer")
        for host in HOSTS
    ]
    artifacts = ["NetworkConnections", "ProcessCreation"]
    watching.append(
        _session("Defender", "VeloServer", "VelociraptorServer", "ubuntu", artifacts=artifacts, num_children_sessions=2)
    )
    green = [_session(host, "GreenSession", "green_session", "GreenAgent") for host in _SUBNETS["User"]]
    foothold = _session("User0", "RedPhish", "RedAbstractSession", "SYSTEM")
    everybody: Record = {"all": {"in": "all", "out": "all"}}
    gates = {
        "User": everybody,
        "Enterprise": everybody,
        "Operational": {"User": {"in": "None", "out": "all"}, **everybody},
    }
    return {
        "Agents": {
            "Blue": _agent(_BLUE, "HybridAvailabilityConfidentiality", watching, list(HOSTS), adversary="Red"),
            "Green": _agent(["Sleep"], "None", green, list(HOSTS)),
            "Red": _agent([*_RED, "Impact"], "HybridImpactPwn", [foothold], ["User0"]),
        },
        "Hosts": _hosts(),
        "Subnets": {
            name: {"Hosts": hosts, "NACLs": gates[name], "Size": len(hosts)} for name, hosts in _SUBNETS.items()
        },
    }
