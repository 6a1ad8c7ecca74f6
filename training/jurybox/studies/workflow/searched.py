"""What a search over workflows has found: its trainer makes it, checkpoints keep it, the report shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jurybox.studies.workflow.gp_ucb import Trial, WorkflowSearch
from jurybox.studies.workflow.rollouts import PlayedEpisodes, share
from jurybox.studies.workflow.settings import GateOn, Order, WorkflowTraining, describe
from jurybox.training.checkpoints import write_table

TABLE = "workflows.csv"
_COLUMNS = (
    *("trial", "workflow", "mean", "std", "bound", "score", "return_mean", "return_error", "obedience", "judged"),
    *("compliance", "fixes", "episodes", "verdict"),
)

Verdict = Literal["passed", "failed", "not judged"]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Means over fresh episodes.

    Attributes:
        returns: mean return of episodes from their start. error: its standard error. spread: deviation between them.
        fixes: per episode. fixed, complied: all fixes in them, and those that complied by the first definition.
        judged, obeyed: judged fixes, and those of them that complied, with and without a head start.
        taken_over: mean return of episodes in which the attacker had a head start. taken_over_error: its error.
        episodes: total number.
    """

    returns: float
    error: float
    spread: float
    fixes: float
    fixed: int
    complied: int
    judged: int
    obeyed: int
    taken_over: float
    taken_over_error: float
    episodes: int

    @property
    def obedience(self) -> float:
        """Return the share of the judged fixes that complied; 0 without one."""
        return share(self.obeyed, self.judged)

    @property
    def rate(self) -> float:
        """Return the share of all fixes that complied by the first definition; 0 without one."""
        return share(self.complied, self.fixed)

    def counts(self, on: GateOn) -> tuple[int, int]:
        """Return the number of the fixes that a gate is about, and of those that complied."""
        return (self.judged, self.obeyed) if on == "obedience" else (self.fixed, self.complied)


@dataclass(frozen=True, slots=True)
class OrderEvaluation:
    """Evaluation of a policy that sees the orders that begin with a type.

    Attributes:
        first: the type; None: the policy sees no order.
        evaluated: the policy sees one of these orders in each episode.
        anyway: obedience of the same policy without seeing the order.
    """

    first: int | None
    evaluated: Evaluated
    anyway: float


@dataclass(frozen=True, slots=True)
class TriedWorkflow(Trial):
    """A tried workflow: its proposal and score, its training, its evaluation."""

    episodes: int
    verdict: Verdict
    evaluated: Evaluated


class Searched:
    """What a search has found so far.

    Attributes:
        search: proposes workflows, and has the trials.
        tried: workflows that were tried, in this order. best: the one with the best score, once the search is over.
        reference: evaluation before the policy has seen an order. final: of the best workflow, at the end.
        prices: evaluations at the end without an order, and with the orders that begin with each type.
        restarts: env workers that were replaced.
    """

    def __init__(self, settings: WorkflowTraining) -> None:
        self.settings = settings
        self.search = WorkflowSearch(
            beta=settings.beta,
            length=settings.length,
            noise=settings.noise,
            revisit=settings.revisit,
            seed=settings.seed,
        )
        self.tried: list[TriedWorkflow] = []
        self.reference: Evaluated | None = None
        self.final: Evaluated | None = None
        self.best: Order | None = None
        self.prices: list[OrderEvaluation] = []
        self.restarts = 0

    def found(self) -> dict[str, Any]:
        """Return everything that `restore_found` needs: nested numbers and strings."""
        return {
            "trace": [asdict(trial) for trial in self.search.trace],
            "tried": [asdict(each) for each in self.tried],
            "evaluated": [None if each is None else asdict(each) for each in (self.reference, self.final)],
            "best": self.best,
            "prices": [asdict(each) for each in self.prices],
            "restarts": self.restarts,
        }

    def restore_found(self, state: Mapping[str, Any]) -> None:
        """Restore what `found` returned."""
        self.search.restore(state["trace"])
        self.tried = [_restore_trial(each) for each in state["tried"]]
        self.reference, self.final = (None if each is None else Evaluated(**each) for each in state["evaluated"])
        self.best = None if state["best"] is None else tuple(state["best"])
        self.prices = [
            OrderEvaluation(**{**each, "evaluated": Evaluated(**each["evaluated"])}) for each in state["prices"]
        ]
        self.restarts = state["restarts"]

    def verdict(self, counted: int, complied: int) -> Verdict:
        """Return whether the fixes that the gate is about and those that complied pass it; too few never pass."""
        if counted < self.settings.min_judged:
            return "not judged"
        return "passed" if complied >= self.settings.gate * counted else "failed"

    def verdict_on(self, found: Evaluated | PlayedEpisodes) -> Verdict:
        """Return whether these episodes pass the gate."""
        return self.verdict(*found.counts(self.settings.gate_on))

    def write_table(self, folder: Path) -> None:
        """Write workflows.csv with a row for each workflow that was tried."""
        rows = []
        for number, each in enumerate(self.tried, 1):
            found = each.evaluated
            believed = each.mean, each.std, each.bound, each.score
            values_found = (found.returns, found.error, found.obedience), (found.rate, found.fixes)
            first, second = (
                [f"{value:.4f}" for value in values] for values in ((*believed, *values_found[0]), values_found[1])
            )
            rows.append((number, describe(each.order), *first, found.judged, *second, each.episodes, each.verdict))
        write_table(folder / TABLE, _COLUMNS, rows)


def _restore_trial(parts: Mapping[str, Any]) -> TriedWorkflow:
    return TriedWorkflow(**{**parts, "order": tuple(parts["order"]), "evaluated": Evaluated(**parts["evaluated"])})
