"""IQN, implicit quantile networks (Dabney et al., 2018, arXiv:1806.06923), with double Q-learning.

Instead of the mean of a return the network gives its value at any quantile tau. It learns by quantile regression with
the Huber loss between samples of its own quantiles and of the target's (eq. 2 and 3 there). The rest is DQN's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jurybox.training.algorithms.base import Batch, networks, recurrent, torch
from jurybox.training.algorithms.dqn import DQN

if TYPE_CHECKING:
    from jurybox.training.algorithms.networks import QuantileValues

__all__ = ["IQN", "quantile_loss"]


class IQN(DQN):
    """DQN with the distribution of returns; the settings are DQN's. Its generator draws the quantiles."""

    hidden_after_pictures = (256,)
    acting: QuantileValues
    target: QuantileValues

    def network(self) -> QuantileValues:
        of, masked = (self.spec.action.size, self.settings.hidden), self.spec.masked
        if self.remembers:
            return recurrent.RecurrentQuantileValues(self.torsos(), *of, masked=masked)
        return networks.QuantileValues(self.encoder(), *of, masked=masked)

    def draws(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Levels of the quantiles of own returns, and of the target's, (n, quantiles) each."""
        n, device = len(batch["reward"]), batch["reward"].device
        return {
            name: torch.rand(n, networks.QUANTILES, device=device, generator=self.generator)
            for name in ("taus", "next_taus")
        }

    def loss(self, batch: Batch) -> torch.Tensor:
        """The quantile Huber loss of a batch, as a tensor with gradients; `batch` as in `update`, with the `draws`."""
        n, taus = len(batch["reward"]), batch["taus"]
        chosen = batch["action"].long()[:, None, None].expand(n, networks.QUANTILES, 1)
        own = self.acting.quantiles(batch["observation"], taus).gather(2, chosen)[:, :, 0]
        with torch.no_grad():
            best = self.acting(*self.seen(batch, "next_")).argmax(1)
            following = self.target.quantiles(batch["next_observation"], batch["next_taus"])
            following = following.gather(2, best[:, None, None].expand(n, networks.QUANTILES, 1))[:, :, 0]
            target = batch["reward"][:, None] + batch["discount"][:, None] * following
        return quantile_loss(own, taus, target)


def quantile_loss(own: torch.Tensor, taus: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The quantile Huber loss: sums over own quantiles, means over the target's and rows.

    Args:
        own, taus: (n, N): predicted values, and their quantile levels.
        target: (n, N'): samples of the target distribution.
    """
    errors = target[:, None, :] - own[:, :, None]
    huber = torch.nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")
    asymmetric = (taus[:, :, None] - (errors.detach() < 0).float()).abs()
    return (asymmetric * huber).mean(2).sum(1).mean()
