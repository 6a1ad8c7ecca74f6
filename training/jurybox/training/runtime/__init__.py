"""The actor-learner runtime: roles that run serially or as processes.

What a plan of one's own needs is exported here, and stays: docs/plans.md shows it at work. Names are imported when they
are used, so that a role's process loads no more than its role.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jurybox.protocol.weights import WeightsLayout as WeightsLayout
    from jurybox.training.interrupts import Signals as Signals
    from jurybox.training.replay import Episodes as Episodes
    from jurybox.training.replay import Field as Field
    from jurybox.training.run_folder import RunLog as RunLog
    from jurybox.training.runtime.plan import Budget as Budget
    from jurybox.training.runtime.plan import ChannelSpec as ChannelSpec
    from jurybox.training.runtime.plan import End as End
    from jurybox.training.runtime.plan import Kind as Kind
    from jurybox.training.runtime.plan import Outcome as Outcome
    from jurybox.training.runtime.plan import Pace as Pace
    from jurybox.training.runtime.plan import Plan as Plan
    from jurybox.training.runtime.plan import PlanError as PlanError
    from jurybox.training.runtime.plan import PolicyServer as PolicyServer
    from jurybox.training.runtime.plan import ReplaySpec as ReplaySpec
    from jurybox.training.runtime.plan import RoleSpec as RoleSpec
    from jurybox.training.runtime.plan import RunError as RunError
    from jurybox.training.runtime.plan import Timeouts as Timeouts
    from jurybox.training.runtime.progress import COLUMNS as COLUMNS
    from jurybox.training.runtime.role_context import Actor as Actor
    from jurybox.training.runtime.role_context import Evaluator as Evaluator
    from jurybox.training.runtime.role_context import Learner as Learner
    from jurybox.training.runtime.role_context import Made as Made
    from jurybox.training.runtime.role_context import Publishes as Publishes
    from jurybox.training.runtime.role_context import RoleContext as RoleContext
    from jurybox.training.runtime.role_context import Trainer as Trainer
    from jurybox.training.runtime.run import run as run_plan
    from jurybox.training.runtime.serving import ServedModels as ServedModels
    from jurybox.training.runtime.serving import served_models as served_models
    from jurybox.training.runtime.settings import Settings as Settings

_FROM = {
    "protocol.weights": ("WeightsLayout",),
    "training.interrupts": ("Signals",),
    "training.replay": ("Episodes", "Field"),
    "training.run_folder": ("RunLog",),
    "training.runtime.plan": (
        *("Budget", "ChannelSpec", "End", "Kind", "Outcome", "Pace", "Plan", "PlanError", "PolicyServer"),
        *("ReplaySpec", "RoleSpec", "RunError", "Timeouts"),
    ),
    "training.runtime.progress": ("COLUMNS",),
    "training.runtime.role_context": ("Actor", "Evaluator", "Learner", "Made", "Publishes", "RoleContext", "Trainer"),
    "training.runtime.serving": ("ServedModels", "served_models"),
    "training.runtime.settings": ("Settings",),
}
_MODULES = {name: (module, name) for module, names in _FROM.items() for name in names}
_MODULES["run_plan"] = "training.runtime.run", "run"  # `runtime.run` is the module

__all__ = [
    "COLUMNS",
    "Actor",
    "Budget",
    "ChannelSpec",
    "End",
    "Episodes",
    "Evaluator",
    "Field",
    "Kind",
    "Learner",
    "Made",
    "Outcome",
    "Pace",
    "Plan",
    "PlanError",
    "PolicyServer",
    "Publishes",
    "ReplaySpec",
    "RoleContext",
    "RoleSpec",
    "RunError",
    "RunLog",
    "ServedModels",
    "Settings",
    "Signals",
    "Timeouts",
    "Trainer",
    "WeightsLayout",
    "run_plan",
    "served_models",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _MODULES[name]
    return getattr(import_module(f"jurybox.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
