"""How long a rollout is in each environment, so that the learner sees the same amount whatever their number."""

from __future__ import annotations

from jurybox.training.runtime.plan import ConfigError

ROLLOUT = 4000


def steps_per_environment(environments: int, rollout: int = ROLLOUT) -> int:
    """Steps of each environment between two updates: `rollout` steps in all, as nearly as whole steps allow.

    A batch that grew with the number of workers would make every other setting mean something else on a larger
    machine; this keeps a run on 2 workers comparable with one on 64.

    Args:
        environments: how many step side by side.
        rollout: steps of all of them together between two updates.

    Raises:
        ConfigError: a number below 1, or more environments than steps.
    """
    if environments < 1 or rollout < 1:
        raise ConfigError(f"expected at least one environment and one step, got {environments} and {rollout}")
    if environments > rollout:
        raise ConfigError(
            f"{environments} environments cannot share a rollout of {rollout} steps: use fewer workers, or a longer "
            "rollout"
        )
    return max(1, round(rollout / environments))
