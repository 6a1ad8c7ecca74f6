"""Which workflow to try next: Gaussian-process upper confidence bounds over the 120 orders.

Srinivas et al. 2010, "Gaussian process optimization in the bandit setting". The design document asks for a Gaussian of
the normalised Kendall distance d (length 0.5, noise 0.1). Over these 120 orders exp(-d^2 / (2 length^2)) is no kernel:
its matrix has eigenvalues down to -0.7. With the square root of d in place of d it is one (Jiao & Vert 2015): the root
is the Euclidean distance of the vectors that encode, for each pair of types, which comes first (`vectors`), so the
kernel is their radial basis function. Both agree at d = 0 and d = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jurybox.studies.workflow.settings import ORDERS, Order, vectors

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Proposal:
    """An order with the predicted mean and deviation of its score, and the bound, when it was chosen."""

    order: Order
    mean: float
    std: float
    bound: float


@dataclass(frozen=True, slots=True)
class Trial(Proposal):
    """A proposal and its score."""

    score: float


class WorkflowSearch:
    """Proposes orders, learns from their scores, and keeps the trials.

    Args:
        beta: number of deviations between the mean and the bound.
        length, noise: of the kernel; noise is the variance of a score in units of the scores' own variance.
        revisit: whether an order may be proposed again before all orders were proposed.
        seed: for breaking ties, which includes the first proposal.
    """

    def __init__(
        self, *, beta: float = 2.0, length: float = 0.5, noise: float = 0.1, revisit: bool = False, seed: int = 0
    ) -> None:
        from sklearn.gaussian_process.kernels import RBF, WhiteKernel  # only for a search: SciPy takes a second

        self.beta = beta
        self.revisit = revisit
        self.trace: list[Trial] = []
        self._kernel = RBF(length, "fixed") + WhiteKernel(noise, "fixed")
        self._noise = noise
        self._places = np.random.default_rng(seed).permutation(len(ORDERS))

    def propose(self) -> Proposal:
        """Return the order with the highest bound."""
        mean, std = self.belief()
        bound = mean + self.beta * std
        tried = {trial.order for trial in self.trace}
        open_ = np.array([self.revisit or order not in tried for order in ORDERS])
        if not open_.any():
            open_[:] = True
        # Break ties by a random permutation that was drawn once.
        best = np.lexsort((self._places, -np.where(open_, np.round(bound, 12), -np.inf)))[0]
        return Proposal(ORDERS[best], float(mean[best]), float(std[best]), float(bound[best]))

    def tell(self, proposal: Proposal, score: float) -> Trial:
        """Record the score of a proposal."""
        self.trace.append(Trial(**asdict(proposal), score=float(score)))
        return self.trace[-1]

    def belief(self) -> tuple[Floats, Floats]:
        """Return mean and deviation of the score of each of the 120 orders (without noise), float64 (120,) each."""
        from sklearn.gaussian_process import GaussianProcessRegressor

        if not self.trace:
            return np.zeros(len(ORDERS)), np.ones(len(ORDERS))
        scores = np.array([trial.score for trial in self.trace])
        scale = scores.std() or max(abs(scores[0]) * 0.1, 1e-9)
        process = GaussianProcessRegressor(self._kernel, optimizer=None)
        process.fit(vectors([trial.order for trial in self.trace]), (scores - scores.mean()) / scale)
        mean, std = process.predict(vectors(ORDERS), return_std=True)
        certain = np.sqrt(np.maximum(std**2 - self._noise, 0.0))
        return mean * scale + scores.mean(), certain * scale

    def restore(self, trials: Sequence[dict[str, Any]]) -> None:
        """Restore trials, each given as a dict."""
        self.trace = [Trial(**{**each, "order": tuple(each["order"])}) for each in trials]
