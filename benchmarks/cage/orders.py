"""Which of the 120 orders is best when each was trained, and how soon does the search find it?

    python -m benchmarks.cage.orders [--seeds 3] [--envs 100] [--mixed 100] [--own 3] [--told 100] [--episodes 300]
        [--gate-on compliance] [--gate 0.95] [--alignment-reward lin_2] [--out FILE.md]
    python -m benchmarks.cage.orders --table RUN/workflows.csv [--out FILE.md]

No masks: an order is obeyed as far as it was learned. For each seed one policy is trained by all orders mixed
(`--mixed` times an episode of each of `--envs` networks); then each of the 120 orders goes on from that policy with
`--own` times one of its own, so the policies that are compared differ. Each is scored as the search of `jurybox train
workflow` scores it, the return less what is missing below the gate, twice: in `--told` episodes, which is what a search
is told, and in others, by which its choice is judged (`--episodes`). FILE.csv holds the scores.

A search of n tries chooses the order of the highest score that it was told. Its regret is how much lower that order's
second score is than the best one of all 120. Random search draws n orders without repetition and chooses likewise:
means of 1,000 of them, and of 10 searches that break their ties by other seeds. With `--table` the scores, of both
kinds, are those of a run that tried all 120 orders.
"""

from __future__ import annotations

import argparse
import copy
import csv
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import spearmanr

from benchmarks.cage.inheritance import mixed
from benchmarks.replay.machine import description
from jurybox.studies.workflow.cage import CageVectorEnv
from jurybox.studies.workflow.gp_ucb import WorkflowSearch
from jurybox.studies.workflow.rollouts import PlayedEpisodes, play, share
from jurybox.studies.workflow.settings import ORDERS, Order, WorkflowTraining, describe, parse

_TRIES = (1, 5, 10, 20, 40, 80, 120)
_SEARCHES, _RANDOM = 10, 1000

Floats = npt.NDArray[np.float64]


class Scores:
    """The orders' scores of one seed, float64 (120,) each: told to a search, and by which its choice is judged."""

    def __init__(self, settings: WorkflowTraining, own: int, updates: int, told: int, episodes: int) -> None:
        self._settings = settings
        self._trains = mixed(settings, settings.seed, (), updates)
        self._env = CageVectorEnv(told + episodes, settings.red, autoreset_mode="Disabled")
        self._env.reset(seed=1000 + settings.seed)
        # As `jurybox train workflow` evaluates: where obedience is asked for, half of the episodes have a head start.
        late = np.random.default_rng(settings.seed).integers(1, settings.longest_head_start + 1, self._env.num_envs)
        late[::2] = 0
        self._late = late if settings.gate_on == "obedience" else np.zeros_like(late)
        began = copy.deepcopy(self._trains.learner.state_dict())
        self.told, self.judged, self.errors = np.zeros((3, len(ORDERS)))
        self.complies, self.passed = np.zeros(len(ORDERS)), np.zeros(len(ORDERS), np.bool_)
        for number, order in enumerate(ORDERS):
            self._trains.learner.load_state_dict(began)
            for _ in range(own):
                self._trains.update(order)
            played = self._play(order)
            others = played.of(slice(told, None))
            self.told[number] = self._score(played, slice(0, told))
            self.judged[number] = self._score(played, slice(told, None))
            returns = others.returns[self._late[told:] == 0]
            self.errors[number] = returns.std() / np.sqrt(len(returns))
            counted, complied = others.counts(settings.gate_on)
            self.complies[number] = share(complied, counted)
            self.passed[number] = complied >= settings.gate * counted

    def _play(self, order: Order) -> PlayedEpisodes:
        settings = self._settings
        return play(
            self._env,
            self._trains.policy,
            order,
            steps=settings.episode_length,
            head_starts=self._late,
            mask_orders=settings.order_masks,
            show_turns=settings.show_turns,
        )[1]

    def _score(self, played: PlayedEpisodes, rows: slice) -> float:
        counted, complied = played.of(rows).counts(self._settings.gate_on)
        missing = max(0.0, self._settings.gate - share(complied, counted))
        return float(played.returns[rows][self._late[rows] == 0].mean()) - self._settings.shortfall_cost * missing


def regrets(told: Floats, judged: Floats, tried: npt.NDArray[np.int64]) -> Floats:
    """Return the regret after each number of tries of `_TRIES`, float64.

    Args:
        tried: the numbers of the orders in the sequence in which they are tried, int64 (120,).
    """
    chosen = [tried[:tries][told[tried[:tries]].argmax()] for tries in _TRIES]
    found: Floats = judged.max() - judged[chosen]
    return found


def searched(told: Floats, seed: int) -> npt.NDArray[np.int64]:
    """Return the sequence in which a search tries the orders."""
    search = WorkflowSearch(seed=seed)
    for _ in ORDERS:
        proposal = search.propose()
        search.tell(proposal, float(told[ORDERS.index(proposal.order)]))
    return np.array([ORDERS.index(trial.order) for trial in search.trace])


_HEAD = ("| regret after so many tries | " + " | ".join(map(str, _TRIES)) + " |", "| --- |" + " ---: |" * len(_TRIES))


def _regret_rows(label: str, told: Floats, judged: Floats) -> list[str]:
    """Return two rows of a table: the mean regret of the search, and that of random search."""
    random = np.random.default_rng(0)
    sequences = {
        "the search": [searched(told, number) for number in range(_SEARCHES)],
        "random search": [random.permutation(len(ORDERS)) for _ in range(_RANDOM)],
    }
    found = []
    for name, tried in sequences.items():
        means = np.mean([regrets(told, judged, one) for one in tried], axis=0)
        found.append(f"| {label}{name} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
    return found


def _finish(lines: Sequence[str], out: Path | None) -> None:
    print("\n".join(lines))
    if out:
        out.write_text("\n".join([f"# {out.stem}", "", *lines, ""]), encoding="utf-8")


def _read(path: Path) -> Floats:
    """Return the scores of all orders, float64 (120,).

    Raises:
        SystemExit: the run has not tried each of them.
    """
    with path.open(encoding="utf-8") as file:
        scores = {parse(row["workflow"]): float(row["score"]) for row in csv.DictReader(file)}
    if len(scores) < len(ORDERS):
        raise SystemExit(f"{path}: expected a score of each of the {len(ORDERS)} orders, got {len(scores)}")
    return np.array([scores[order] for order in ORDERS])


def _write(path: Path, found: Sequence[Scores]) -> None:
    """Write the scores of all seeds as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = ("told", "judged", "error", "complies")
        writer.writerow(["order", *(f"{name} {seed}" for seed in range(len(found)) for name in names)])
        for number, order in enumerate(ORDERS):
            columns = [(each.told, each.judged, each.errors, each.complies) for each in found]
            values = [f"{column[number]:.3f}" for four in columns for column in four]
            writer.writerow([describe(order), *values])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--envs", type=int, default=100)
    parser.add_argument("--mixed", type=int, default=100, help="episodes of each network with all orders mixed")
    parser.add_argument("--own", type=int, default=3, help="episodes of each network with each order alone")
    parser.add_argument("--told", type=int, default=100, help="episodes of a score that a search is told")
    parser.add_argument("--episodes", type=int, default=300, help="episodes of a score by which a choice is judged")
    parser.add_argument("--gate", type=float, default=0.95)
    parser.add_argument("--gate-on", choices=["obedience", "compliance"], default="obedience")
    parser.add_argument("--alignment-reward", default="lin_2")
    parser.add_argument("--table", type=Path, help="workflows.csv of a run that tried all 120 orders")
    parser.add_argument("--out", type=Path, help="a Markdown file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table is not None:
        scores = _read(options.table)
        lines = [f"The scores of {options.table}, from {scores.min():.1f} to {scores.max():.1f}.", "", *_HEAD]
        _finish([*lines, *_regret_rows("", scores, scores)], options.out)
        return
    found, began = [], time.process_time()
    for seed in range(options.seeds):
        settings = WorkflowTraining.model_validate(
            {
                "seed": seed,
                "order_masks": False,
                "show_turns": True,
                "update_every_steps": 20,
                "ppo": {"batch_size": 5 * options.envs},
                "envs": options.envs,
                **{name: getattr(options, name) for name in ("gate", "gate_on", "alignment_reward")},
            }
        )
        found.append(Scores(settings, options.own, options.mixed, options.told, options.episodes))
        print(f"seed {seed}: {time.process_time() - began:.0f} s", flush=True)
        if options.out:
            _write(options.out.with_suffix(".csv"), found)
    lines = [f"{time.strftime('%Y-%m-%d')}, {description()}; {time.process_time() - began:.0f} s of CPU time."]
    lines += ["", "| seed | best of 120 | its score | worst | error of a return | pass the gate | least complies |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for seed, each in enumerate(found):
        best = int(each.judged.argmax())
        lines.append(
            f"| {seed} | {describe(ORDERS[best])} | {each.judged[best]:.1f} | {each.judged.min():.1f} | "
            f"{each.errors.mean():.1f} | {each.passed.sum()} | {each.complies.min():.1%} |"
        )
    ranks = [spearmanr(one.judged, other.judged).statistic for one, other in itertools.combinations(found, 2)]
    if ranks:
        lines += ["", f"Rank correlation of the 120 scores between two seeds: {min(ranks):.2f} to {max(ranks):.2f}."]
    lines += ["", *_HEAD]
    for seed, each in enumerate(found):
        lines += _regret_rows(f"seed {seed}, ", each.told, each.judged)
    _finish(lines, options.out)


if __name__ == "__main__":
    main()
