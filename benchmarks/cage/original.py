"""Our simulator beside CybORG itself, step by step: the same defender, random numbers and attacker.

    git clone https://github.com/cage-challenge/cage-challenge-2 && git -C cage-challenge-2 checkout 26ce1c12
    python -m venv /tmp/cyborg && /tmp/cyborg/bin/pip install paramiko pyyaml gym prettytable docutils
    python -m benchmarks.cage.original --cyborg cage-challenge-2/CybORG \
        --packages /tmp/cyborg/lib/python3.11/site-packages [--episodes 60]

The packages are what CybORG's Requirements.txt names; its scenario is that of the challenge, Scenario2.yaml. CybORG
plays an episode; the draws of its attacker (target, exploit, detection) are passed to ours as random numbers, and after
every step observation, reward and true state must agree. An episode ends at the first step that differs; such steps are
counted by kind. --record writes the episodes for tests/unit/studies/cage, which replays them without CybORG.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.studies.workflow.cage import CyborgEnv
from jurybox.studies.workflow.cage import tables as t
from jurybox.studies.workflow.cage.network import Networks, RedName, Verb

STEPS = 100
_VERBS = {
    "DiscoverRemoteSystems": Verb.SWEEP,
    "DiscoverNetworkServices": Verb.SCAN,
    "ExploitRemoteService": Verb.EXPLOIT,
    "PrivilegeEscalate": Verb.ESCALATE,
    "Impact": Verb.IMPACT,
}
_EXPLOITS = dict(
    zip(
        (
            *("FTPDirectoryTraversal", "HarakaRCE", "SQLInjection", "HTTPSRFI", "HTTPRFI"),
            *("EternalBlue", "BlueKeep", "SSHBruteForce"),
        ),
        range(8),
        strict=True,
    )
)
_TRIED = 200  # values of the attacker's chance; it chooses among 13 hosts at most


class Original:
    """CybORG with one attacker, and its last action."""

    def __init__(self, red: RedName) -> None:
        self._env = CyborgEnv(red, episode_length=STEPS)
        self._network, self._wrapped = self._env.cyborg
        exploiting = importlib.import_module("CybORG.Shared.Actions.ConcreteActions.ExploitAction")
        exploiting.random = self._roll  # type: ignore[attr-defined]
        self._rolled: list[float] = []

    def reset(self) -> None:
        self._wrapped.reset()

    def step(self, action: int) -> tuple[npt.NDArray[Any], float]:
        self._rolled.clear()
        observation, reward, *_ = self._wrapped.step(action)
        return observation, float(reward)

    def truth(self) -> npt.NDArray[np.int8]:
        state, found = self._network.environment_controller.state, np.zeros(t.N_HOSTS, np.int8)
        for index, host in enumerate(t.HOSTS):
            for number in state.hosts[host].sessions.get("Red", ()):
                level = 2 if state.sessions["Red"][number].username in ("root", "SYSTEM") else 1
                found[index] = max(found[index], level)
        return found

    def attacked(self) -> tuple[Verb, int, int | None]:
        """Red's verb, its target, and the exploit if one ran."""
        state, action = self._network.environment_controller.state, self._wrapped.get_last_action("Red")
        verb = _VERBS[type(action).__name__]
        if verb == Verb.SWEEP:
            return verb, t.Subnet[state.subnets[action.subnet].name.upper()], None
        host = state.ip_addresses[action.ip_address] if verb in (Verb.SCAN, Verb.EXPLOIT) else action.hostname
        ran = getattr(action, "sub_action", None) if verb == Verb.EXPLOIT else None
        return verb, t.INDEX[host], None if ran is None else _EXPLOITS[type(ran).__name__]

    def missed(self) -> bool:
        """Whether a reverse shell of this step was not detected."""
        return any(value >= t.P_DETECTED for value in self._rolled)

    def _roll(self) -> float:
        self._rolled.append(random.random())
        return self._rolled[-1]


class Luck:
    """Recorded random numbers in place of NumPy's generator."""

    def __init__(self) -> None:
        self.next: npt.NDArray[np.float64] = np.zeros(0)

    def random(self, shape: Any) -> npt.NDArray[np.float64]:
        return self.next.reshape(shape)


def defend(kind: str, truth: npt.NDArray[np.int8], draw: np.random.Generator) -> int:
    """An action of a defender that fixes compromised hosts, adds decoys, or draws from all actions."""
    hosts = [h for h in range(t.N_HOSTS) if h != t.USER0 and (kind == "decoys" or truth[h])]
    luck = draw.random()
    if kind == "sleep":
        return 0
    if kind == "random" or luck > 0.8 or not hosts:
        return int(draw.integers(t.N_ACTIONS))
    host = int(draw.choice(hosts))
    if kind == "decoys" and luck < 0.7:
        return t.action(t.Blue(int(draw.integers(t.Blue.APACHE, t.Blue.RESTORE))), host)
    return t.action(t.Blue(int(draw.choice([t.Blue.REMOVE, t.Blue.RESTORE, t.Blue.ANALYSE]))), host)


def luck_of(networks: Networks, original: Original) -> npt.NDArray[np.float64] | str:
    """The numbers (4,) with which our simulator repeats the step of the original, or why there are none."""
    verb, target, exploit = original.attacked()
    found = np.array([0.0, 0.0, 0.0, 0.99 if original.missed() else 0.0])
    if exploit is not None:
        ports = int(networks.ports[0, target])
        options = t.EXPLOIT_ORDER[ports][: t.EXPLOIT_COUNT[ports]].tolist()
        if exploit not in options:
            return f"{t.EXPLOITS[exploit]} of {t.HOSTS[target]} is open to them, not to us"
        if place := options.index(exploit):
            found[1:3] = 0.9, (place - 0.5) / (len(options) - 1)
    for chance in (np.arange(_TRIED) + 0.5) / _TRIED:
        again = copy.deepcopy(networks.red)
        state = networks.known, networks.scanned, networks.subnets
        ours = again.choose(networks._success, *state, np.array([chance]))
        if (ours[0][0], ours[1][0]) == (verb, target):
            found[0] = chance
            return found
    return f"red: they {verb.name} {target}, we {Verb(ours[0][0]).name} {ours[1][0]}"


def compare(red: RedName, kind: str, episodes: int, seed: int, kept: list[dict[str, Any]]) -> None:
    draw, original = np.random.default_rng(seed), Original(red)
    random.seed(seed)
    differed: collections.Counter[str] = collections.Counter()
    steps = 0
    for _ in range(episodes):
        original.reset()
        luck, rows, why = Luck(), [], ""
        networks = Networks(1, red, quirk=True)
        networks.random = luck  # type: ignore[assignment]
        entry = 0.0
        for step in range(STEPS):
            action = defend(kind, original.truth(), draw)
            observation, reward = original.step(action)
            if red == "B_line" and step == 1:
                entry = (original.attacked()[1] - t.USER0 - 0.5) / 4
                networks.red.reset(np.ones(1, np.bool_), np.array([entry]))
                networks.red.stage[:] = 0  # type: ignore[attr-defined]
            numbers = luck_of(networks, original)
            if isinstance(numbers, str):
                why = numbers
                break
            luck.next = numbers
            ours = float(networks.step(np.array([action]))[0])
            truth = original.truth()
            pairs = {
                "observation": (networks.belief.reshape(-1), observation),
                "reward": (np.round(ours, 1), np.round(reward, 1)),
                "truth": (networks.true_state()[0], truth),
            }
            rows.append((action, numbers, observation, reward, truth))
            steps += 1
            if wrong := [name for name, (mine, theirs) in pairs.items() if np.any(mine != theirs)]:
                why = f"{', '.join(wrong)} after {t.ACTION_NAMES[action]} and {original.attacked()}"
                break
        if why:
            differed[why] += 1
        else:
            kept.append({"red": red, "entry": entry, "rows": rows})
    whole = episodes - differed.total()
    print(f"| {red} | {kind} | {episodes} | {whole} | {steps:,} |", flush=True)
    for why, count in differed.most_common(20):
        print(f"  {count} {why}", file=sys.stderr)


def record(kept: list[dict[str, Any]], path: Path) -> None:
    columns = list(zip(*[list(zip(*each["rows"], strict=True)) for each in kept], strict=True))
    actions, luck, observations, rewards, truth = columns
    np.savez_compressed(
        path,
        red=np.array([each["red"] for each in kept]),
        entry=np.array([each["entry"] for each in kept]),
        actions=np.array(actions, np.uint8),
        luck=np.array(luck, np.float32),
        observations=np.packbits(np.array(observations, np.uint8), axis=-1),
        rewards=np.round(np.array(rewards) * 10).astype(np.int16),
        truth=np.array(truth, np.int8),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cyborg", help="the folder CybORG of the challenge's repository, if it is not installed")
    parser.add_argument("--packages", help="a folder with what CybORG wants, looked at last")
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    sys.path += [each for each in (options.cyborg, options.packages) if each]
    kept: list[dict[str, Any]] = []
    print(f"| attacker | defender | episodes | the same to the end | steps compared |\n|{'---|' * 5}")
    reds: tuple[RedName, ...] = ("B_line", "Meander")
    for red in reds:
        for kind in ("sleep", "random", "fixes", "decoys"):
            compare(red, kind, options.episodes, options.seed, kept)
    if options.record:
        record(kept, options.record)


if __name__ == "__main__":
    main()
