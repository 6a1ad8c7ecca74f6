"""Do our PPO, DQN, TD3 and SAC learn as Stable-Baselines3's, and how soon? Same settings, same number of env steps.

python -m benchmarks.learning                                  # every task, three seeds, ours and SB3's; an hour
python -m benchmarks.learning --tasks pendulum-sac --seeds 5   # one task; existing results are not run again
python -m benchmarks.learning --sides jurybox compiled --first 100       # compiled updates, with seeds from 100 on
python -m benchmarks.learning --rates --sides jurybox compiled sb3 sbx --python sbx=/path/bin/python
python -m benchmarks.learning --rates --tasks pong-ppo --sides jurybox sb3 cleanrl samplefactory --python ...
python -m benchmarks.learning --table [--rates]                # the table of existing results
python -m benchmarks.learning.updates                          # updates alone, what they spend, how exact they are

Each run is a process of its own with one thread on one core. It is evaluated ten times, by the same 20 episodes without
exploration; the results are the last evaluation, and the mean of all ten (how soon it learned). Results go to
results/learning.csv, the tables to results/learning.md. With --rates the sides take turns, and what is told is env
steps a second, and seconds until an evaluation reached the task's score, both without the evaluations' own time: of the
processor, so that other load changes them little, compilers included, and of the wall; and the rate of the later half,
when all is compiled. They go to results/rates.csv and rates.md. `--steps` makes these runs shorter, and then no score
is told. The sides `processes` and `served` are a worker, a learner and an evaluator, of the latter with a server for
the policy, on all cores: of these the wall's time is told, their start and their evaluations in it.

A side of another library runs in its own Python, which `--python` names: it needs the library, and no package of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept_runs import keep, known
from benchmarks.learning.others import LIBRARIES
from benchmarks.learning.tasks import CURVES, EPISODES, EVALUATIONS, TASKS, Clock, Task

_RESULTS = Path(__file__).parent / "results"
_RUNS, _RATES = _RESULTS / "learning.csv", _RESULTS / "rates.csv"
_RATES_EPISODES = 5  # of each evaluation there
_CLOCKS = ("CPU", "wall")
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_OURS: dict[str, dict[str, Any]] = {
    "jurybox": {"compile": "never"},
    "compiled": {"compile": "always"},
    "processes": {"workers": 1},
    "served": {"workers": 1, "policy": "served"},
}
"""Our own sides, and their settings: those with workers are processes, the others are serial."""
_SIDES = (*_OURS, *LIBRARIES)


def ours(task: Task, seed: int, side: str, episodes: int) -> dict[str, Any]:
    """A training of one of our sides; returns what `Clock.told` does."""
    import jurybox.training.roles.learner  # noqa: F401 (imports are no training, on any side)
    from jurybox.training.roles.evaluation import EnvEvaluator
    from jurybox.training.trainings.gym import GymTraining, train

    noise = {} if task.action_noise is None else {"action_noise": task.action_noise}
    settings = GymTraining.checked(
        {
            "env": task.env,
            "algorithm": task.algorithm,
            "steps": task.steps,
            "envs": task.envs,
            "seed": seed,
            "evaluate_every": task.steps // task.evaluations,
            "evaluation_episodes": episodes,
            **_OURS[side],
            **task.settings,
            **noise,
        }
    )
    if "workers" in _OURS[side]:
        return _in_processes(task, settings)
    evaluate = EnvEvaluator.evaluate

    def timed(evaluator: EnvEvaluator) -> Mapping[str, float]:
        with clock.evaluation():
            found = {"return": 0.0} if task.score is None else evaluate(evaluator)
        clock.evaluations.append(found["return"])
        return found

    clock = Clock()
    EnvEvaluator.evaluate = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(settings, Path(folder) / "run", serial=True)
    finally:
        EnvEvaluator.evaluate = evaluate  # type: ignore[method-assign]
    return clock.told(task)


def _in_processes(task: Task, settings: Any) -> dict[str, Any]:
    """The same of processes, whose processor time is not told: evaluations are played beside the training."""
    from jurybox.training.trainings.gym import train

    clock, reached = Clock(), [(0, 0.0)]

    class Watch:
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            if "eval_return" in values:
                clock.at.append(clock.seconds)
                clock.evaluations.append(values["eval_return"])
            else:
                reached.append((step, clock.seconds[1]))

        def finish(self, summary: Mapping[str, Any], files: Sequence[Path]) -> None: ...

    with tempfile.TemporaryDirectory() as folder:
        train(settings, Path(folder) / "run", trackers=lambda: (Watch(),))
    half = float(np.interp(settings.steps / 2, [step for step, _ in reached], [wall for _, wall in reached]))
    told = clock.told(task)
    return {**told, "at": [(None, wall) for _, wall in told["at"]], "halves": [(None, half), (None, reached[-1][1])]}


def one(name: str, side: str, seed: int, core: int, episodes: int, steps: int) -> None:
    """A run of our own, in this process; prints what `Clock.told` returns."""
    os.sched_setaffinity(0, {core})
    found = ours(TASKS[name].short(steps), seed, side, episodes)
    print(json.dumps({**found, "versions": {"torch": metadata.version("torch")}}))


def said(
    name: str, side: str, seed: int, core: int, pythons: Mapping[str, str], episodes: int = EPISODES, steps: int = 0
) -> dict[str, Any]:
    """What a run in a process of its own prints.

    Raises:
        RuntimeError: it failed.
    """
    python, numbers = pythons.get(side, sys.executable), [str(seed), str(core), str(episodes), str(steps)]
    if side in _OURS:
        command = [python, "-m", "benchmarks.learning", "--one", name, side, *numbers]
    else:
        command = [python, "-m", "benchmarks.learning.others", side, name, *numbers]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **_ONE_THREAD}, check=False)
    if ended.returncode:
        raise RuntimeError(f"{name} {side} seed {seed} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def run(names: Sequence[str], sides: Sequence[str], seeds: range, jobs: int, pythons: Mapping[str, str]) -> None:
    """Every run that is not there yet."""
    done = {(row["task"], row["side"], int(row["seed"])) for row in known(_RUNS)}
    wanted = [(name, side, seed) for seed in seeds for name in names for side in sides]
    cores = sorted(os.sched_getaffinity(0))

    def carry_out(what: tuple[str, str, int]) -> None:
        name, side, seed = what
        try:
            found = said(name, side, seed, cores[wanted.index(what) % len(cores)], pythons)
        except RuntimeError as error:
            print(error, flush=True)
            return
        told = {f"evaluation_{number}": f"{value:.3f}" for number, value in enumerate(found["evaluations"], 1)}
        cpu = found["at"][-1][0]
        keep(_RUNS, {"task": name, "side": side, "seed": seed, "cpu_seconds": f"{cpu:.1f}", **told})
        print(f"{name} {side} seed {seed}: {found['evaluations'][-1]:.1f}, {cpu:.0f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(carry_out, [each for each in wanted if each not in done]))


def rates(names: Sequence[str], sides: Sequence[str], seeds: range, pythons: Mapping[str, str], steps: int = 0) -> None:
    """Rates of all sides, which take turns."""
    done = {(row["task"], row["side"], int(row["seed"])) for row in known(_RATES)}
    core = max(os.sched_getaffinity(0))
    for seed in seeds:
        for name in names:
            for side in sides:
                if (name, side, seed) in done:
                    continue
                found = said(name, side, seed, core, pythons, _RATES_EPISODES, steps)
                score = TASKS[name].short(steps).score
                pairs = zip(found["at"], found["evaluations"], strict=True)
                reached = [at for at, value in pairs if score is not None and value >= score]
                half, whole = found["halves"]
                row = {"task": name, "side": side, "seed": seed, "steps": found["steps"]}
                for number, clock in enumerate(_CLOCKS):
                    told = whole[number] is not None
                    row[f"{clock}_seconds"] = f"{whole[number]:.2f}" if told else ""
                    row[f"{clock}_later_half"] = f"{whole[number] - half[number]:.2f}" if told else ""
                    row[f"{clock}_to_score"] = f"{reached[0][number]:.2f}" if told and reached else ""
                row["versions"] = " ".join(f"{package} {version}" for package, version in found["versions"].items())
                keep(_RATES, {**row, "day": date.today()})
                print(f"{name} {side} seed {seed}: {found['steps'] / whole[1]:,.0f} steps a second", flush=True)


def rates_table() -> str:
    """Env steps a second and seconds to the score of every side, by both clocks, with the rates over SB3's."""
    rows = known(_RATES)
    clocks = "env steps / {0} s (of SB3's) | later half | {0} s to the score"
    titles = " | ".join(clocks.format(clock) for clock in _CLOCKS)
    lines = [f"| task | env steps | side | runs | {titles} | CPU ms an update, later half, all else in it | day |"]
    lines.append("|---" * 12 + "|")
    for name, steps in sorted({(row["task"], int(row["steps"])) for row in rows}):
        of = {side: [row for row in rows if _is(row, name, side) and int(row["steps"]) == steps] for side in _SIDES}
        for side, found in of.items():
            if not found:
                continue
            cells = [name, f"{steps:,}", side, str(len(found))]
            for clock in _CLOCKS:
                for what, made in (("seconds", steps), ("later_half", steps / 2)):
                    spent, theirs = (_median(each, f"{clock}_{what}") for each in (found, of["sb3"]))
                    over = f" ({theirs / spent:.2f})" if spent and theirs else ""
                    cells.append(f"{made / spent:,.0f}{over}" if spent else "")
                reached = sum(1 for row in found if row[f"{clock}_to_score"])
                cells.append(f"{_median(found, f'{clock}_to_score'):.1f}" if reached else "-" if cells[-1] else "")
                if 0 < reached < len(found):
                    cells[-1] += f" ({reached} of {len(found)} reached it)"
            later = _median(found, "CPU_later_half")
            cells.append(f"{2000 * later / (steps * TASKS[name].updates):.2f}" if later else "")
            cells.append(" ".join(sorted({row["day"] for row in found})))
            lines.append("| " + " | ".join(cells) + " |")
    versions = sorted({row["versions"] for row in rows})
    return "\n".join([*lines, "", f"{'; '.join(versions)}. Medians."])


def _median(rows: Sequence[Mapping[str, str]], what: str) -> float | None:
    found = [float(row[what]) for row in rows if row[what]]
    return float(np.median(found)) if found else None


def _is(row: Mapping[str, str], name: str, side: str) -> bool:
    return row["task"] == name and row["side"] == side


def table(side: str, other: str) -> str:
    """Means over the seeds that both sides have, and of the differences by seed, with 95 % intervals (Student's t)."""
    from scipy import stats

    names = {"jurybox": "ours", "compiled": "compiled", "sb3": "SB3's", "sbx": "SBX's"}
    a, b = names[side], names[other]
    lines = [
        f"| task | env steps | seeds | last: {a} | {b} | {a} - {b} | all: {a} | {b} | {a} - {b} "
        f"| CPU s a run: {a} | {b} |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = known(_RUNS)

    def told(values: np.ndarray[Any, Any]) -> str:
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
        return f"{values.mean():.1f} ± {half:.1f}"

    def difference(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> str:
        # With the same seed both sides are evaluated by the same episodes, whose possible returns differ.
        pairs = first - second
        half = stats.t.ppf(0.975, len(pairs) - 1) * pairs.std(ddof=1) / len(pairs) ** 0.5
        return f"{pairs.mean():+.1f} ± {half:.1f}"

    for name, task in TASKS.items():
        found = [{int(row["seed"]): row for row in rows if _is(row, name, each)} for each in (side, other)]
        seeds = sorted(found[0].keys() & found[1].keys())
        if len(seeds) < 2:
            continue
        sides = []
        for of in found:
            curves = [[float(of[seed][f"evaluation_{n}"]) for n in range(1, EVALUATIONS + 1)] for seed in seeds]
            sides.append((np.array(curves), np.array([float(of[seed]["cpu_seconds"]) for seed in seeds])))
        (own, own_cpu), (their, their_cpu) = sides
        cells = [name, f"{task.steps:,}", str(len(seeds))]
        for first, second in ((own[:, -1], their[:, -1]), (own.mean(1), their.mean(1))):
            cells += [told(first), told(second), difference(first, second)]
        lines.append("| " + " | ".join([*cells, f"{own_cpu.mean():.0f}", f"{their_cpu.mean():.0f}"]) + " |")
    return "\n".join(lines)


def tables() -> str:
    """Ours beside Stable-Baselines3's, and compiled updates beside those that are not."""
    versions = ", ".join(f"{each} {metadata.version(each)}" for each in ("stable_baselines3", "torch", "gymnasium"))
    pairs = (("jurybox", "sb3"), ("compiled", "jurybox"))
    return "\n\n".join([*(table(*pair) for pair in pairs), f"{date.today()}, {versions}; ±: 95 %."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="all; without --rates those that learn something")
    parser.add_argument("--sides", nargs="+", choices=_SIDES, default=["jurybox", "sb3"])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--rates", action="store_true", help="steps a second and time to the score")
    parser.add_argument("--steps", type=int, default=0, help="env steps of a run for --rates; 0: the task's")
    parser.add_argument("--table", action="store_true", help="of what is there; run nothing")
    parser.add_argument("--python", nargs="+", default=[], metavar="SIDE=PATH", help="interpreters of other libraries")
    parser.add_argument(
        "--one", nargs=6, metavar=("TASK", "SIDE", "SEED", "CORE", "EPISODES", "STEPS"), help=argparse.SUPPRESS
    )
    given = parser.parse_args()
    if given.one:
        one(*given.one[:2], *map(int, given.one[2:]))
        return
    _RESULTS.mkdir(exist_ok=True)
    pythons, seeds = dict(each.split("=", 1) for each in given.python), range(given.first, given.first + given.seeds)
    if not given.table:
        if given.rates:
            rates(given.tasks or list(TASKS), given.sides, seeds, pythons, given.steps)
        else:
            run(given.tasks or CURVES, given.sides, seeds, given.jobs, pythons)
    for made, name, wanted in ((tables, "learning.md", not given.rates), (rates_table, "rates.md", given.rates)):
        if wanted:
            text = made()
            (_RESULTS / name).write_text(text + "\n")
            print(text)


if __name__ == "__main__":
    main()
