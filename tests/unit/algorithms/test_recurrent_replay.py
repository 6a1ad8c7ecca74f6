"""Recurrent DQN, IQN, TD3 and SAC: updates from windows of a replay, each held to its formulas, row by row."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import START, algorithm, ready
from tests.unit.algorithms.test_recurrent import UNITS, stepped
from tests.unit.algorithms.test_update_formulas import agree, follow, one_thread, soft, updated, widened  # noqa: F401
from torch.nn import functional

from jurybox.training.algorithms.recurrent import Windowed, rows_of
from jurybox.training.algorithms.registry import tried
from jurybox.training.spaces import MASK, MEMORY, ActionSpec, AgentSpec, Leaf

OBSERVATIONS, BURN_IN, STEPS, GAMMA = 3, 3, 4, 0.9
WINDOWS = {  # rows of the burn-in that are there, and steps after it, of which the last is terminated
    "whole": (3, 4, False), "begins with its episode": (0, 4, False), "begins in the burn-in": (2, 4, False),
    "terminates": (3, 2, True), "is truncated": (1, 1, False),
}  # fmt: skip


def recurrent(name: str, cell: str, *, masked: bool = False, **settings):
    """An algorithm with such a memory, ready to learn."""
    discrete = name in ("dqn", "iqn")
    action = ActionSpec(True, 4) if discrete else ActionSpec(False, 2, 0, (-1.0, -1.0), (1.0, 1.0))
    spec = AgentSpec((Leaf("observation", (OBSERVATIONS,), "float32"),), action, masked=masked)
    given = {"learning_rate": 1e-2, "gamma": GAMMA, "hidden": (6, 6), "burn_in": BURN_IN, "sequence_length": STEPS}
    if discrete:
        given |= {"train_freq": 1, "target_update_interval": 3, "max_grad_norm": 0.5}
    made = algorithm(name, spec, recurrent=cell, hidden_size=UNITS, **{**given, **settings})
    made = ready(made, 5, widened(made.seeded(made.network, 0)))
    if not discrete:
        widened(made.critics.twins, 2)
    return made


def windows_of(made, seed: int) -> dict[str, torch.Tensor]:
    """Columns as a replay gives them; what is not there, and what must not be looked at, is anything."""
    g, n, steps = torch.Generator().manual_seed(seed), len(WINDOWS), BURN_IN + STEPS
    valid, terminated = torch.zeros(n, steps, dtype=torch.uint8), torch.zeros(n, steps, dtype=torch.bool)
    for row, (before, after, over) in enumerate(WINDOWS.values()):
        valid[row, BURN_IN - before : BURN_IN + after] = 1
        terminated[row, BURN_IN + after - 1] = over
    discrete = made.spec.action.discrete
    mask = torch.rand(n, steps + 1, 4, generator=g) < 0.5
    action = torch.randint(4, (n, steps), generator=g) if discrete else 2 * torch.rand(n, steps, 2, generator=g) - 1
    if discrete:
        mask[:, :-1].scatter_(2, action[..., None], True)  # what was done was allowed
    mask[..., 0] = True
    return {
        "observation": torch.randn(n, steps + 1, OBSERVATIONS, generator=g),
        "action": action,
        "reward": 3 * torch.randn(n, steps, generator=g),
        "terminated": terminated,
        MEMORY: torch.randn(n, steps, made.remembers, generator=g),
        "valid": valid,
        **({MASK: mask} if made.spec.masked else {}),
    }


def every_row():
    for row, (before, after, over) in enumerate(WINDOWS.values()):
        yield from ((row, before, step, over and step == after - 1) for step in range(after))


def seen_by(torso, windows, first: int = 0, ahead: int = 0) -> torch.Tensor:
    """What a memory gives for each row to learn from, gate by gate, from the stored numbers on."""
    found, numbers = [], torso.memory.numbers
    for row, before, step, _ in every_row():
        begins = BURN_IN - before
        state = windows[MEMORY][row, begins, first : first + numbers]
        for at in range(begins, BURN_IN + step + ahead + 1):
            out, state = stepped(torso.memory.layer, windows["observation"][row, at], state)
            state = state.detach() if at < BURN_IN else state
        found.append(out)
    return torch.stack(found)


def flat(windows, name: str, ahead: int = 0) -> torch.Tensor:
    return torch.stack([windows[name][row, BURN_IN + step + ahead] for row, _, step, _ in every_row()])


def discounts() -> torch.Tensor:
    return torch.tensor([0.0 if over else GAMMA for *_, over in every_row()])


@pytest.mark.parametrize(
    ("cell", "masked"),
    [
        ("lstm", True),
        ("gru", False),
        *(pytest.param(*other, marks=pytest.mark.runs) for other in (("lstm", False), ("gru", True))),
    ],
)
def test_dqns_update_from_windows_is_that_of_its_formulas_row_by_row(cell, masked) -> None:
    learner = recurrent("dqn", cell, masked=masked)
    network, target = copy.deepcopy(learner.acting), widened(copy.deepcopy(learner.acting), 9)
    learner.target.load_state_dict(target.state_dict())
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    for number in range(1, 5):
        windows = windows_of(learner, number)
        if number == 3:
            target.load_state_dict(network.state_dict())
        found = updated(learner, rows_of(windows, BURN_IN, GAMMA))
        action, every = flat(windows, "action"), torch.arange(len(discounts()))
        with torch.no_grad():
            own = network.layers(seen_by(network.features, windows, ahead=1))
            if masked:
                own = own.masked_fill(~flat(windows, MASK, 1), -torch.inf)
            other = target.layers(seen_by(target.features, windows, ahead=1))
            wanted = flat(windows, "reward") + discounts() * other[every, own.argmax(1)]
        loss = functional.smooth_l1_loss(network.layers(seen_by(network.features, windows))[every, action], wanted)
        assert found == pytest.approx(float(loss.detach()), rel=1e-3)
        follow(optimiser, loss, 0.5)
    agree(learner.acting, network, 5e-5)
    agree(learner.target, target, 5e-5)


def actions_of(network, seen: torch.Tensor) -> torch.Tensor:
    return torch.tanh(network.layers(seen))


@pytest.mark.parametrize("cell", ["lstm", pytest.param("gru", marks=pytest.mark.runs)])
def test_td3s_update_from_windows_is_that_of_its_paper_row_by_row(cell) -> None:
    learner = recurrent("td3", cell, tau=0.1)
    actor, critic = copy.deepcopy((learner.acting, learner.critics))
    target_actor, target = widened(copy.deepcopy(actor), 8), widened(copy.deepcopy(critic), 9)
    learner.target_actor.load_state_dict(target_actor.state_dict())
    learner.target_critics.load_state_dict(target.state_dict())
    first = actor.features.memory.numbers  # of what is remembered for the critics
    own = [*actor.features.parameters(), *actor.layers.parameters()]
    of_actor, of_critic = torch.optim.Adam(own, 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(5)
    for number in range(1, 5):
        windows = windows_of(learner, number)
        learner.update(rows_of(windows, BURN_IN, GAMMA), START)
        action = flat(windows, "action")
        noise = torch.empty_like(action).normal_(0.0, 0.2, generator=generator).clamp(-0.5, 0.5)
        with torch.no_grad():
            chosen = actions_of(target_actor, seen_by(target_actor.features, windows, ahead=1))
            following = seen_by(target.features, windows, first, 1)
            least = target.twins(following, (chosen + noise).clamp(-1, 1)).amin(0)
            wanted = flat(windows, "reward") + discounts() * least
        values = critic.twins(seen_by(critic.features, windows, first), action)
        follow(of_critic, ((values - wanted) ** 2).mean(1).sum())
        if number % 2 == 0:
            chosen = actions_of(actor, seen_by(actor.features, windows))
            follow(of_actor, -critic.twins(seen_by(critic.features, windows, first), chosen)[0].mean())
            for one, two in ((target_actor.features, actor.features), (target_actor.layers, actor.layers)):
                soft(one, two, 0.1)
            soft(target, critic, 0.1)
    for one, two in ((learner.acting, actor), (learner.target_actor, target_actor)):
        agree(one.features, two.features, 5e-5)
        agree(one.layers, two.layers, 5e-5)
    agree(learner.critics, critic, 5e-5)
    agree(learner.target_critics, target, 5e-5)
    assert learner.acting.beside[0] is learner.critics.features, "what acts remembers for the critics as they do"


@pytest.mark.parametrize("cell", [pytest.param("lstm", marks=pytest.mark.runs), "gru"])
def test_sacs_update_from_windows_is_that_of_its_paper_row_by_row(cell) -> None:
    learner = recurrent("sac", cell, tau=0.1, ent_coef=0.3)
    actor, critic = copy.deepcopy((learner.acting, learner.critics))
    target = widened(copy.deepcopy(critic), 9)
    learner.target.load_state_dict(target.state_dict())
    first = actor.features.memory.numbers
    own = [each for name, each in actor.named_parameters() if "beside" not in name]
    of_actor, of_critic = torch.optim.Adam(own, 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(5)

    def drawn(windows, ahead):
        found = actor.trunk(seen_by(actor.features, windows, ahead=ahead))
        mean, log_std = actor.mean(found), actor.log_std(found).clamp(-20, 2)
        before = mean + log_std.exp() * torch.empty_like(mean).normal_(generator=generator)
        density = torch.distributions.Normal(mean, log_std.exp()).log_prob(before)
        return torch.tanh(before), (density - torch.log(1 - torch.tanh(before) ** 2 + 1e-9)).sum(1)

    for number in range(1, 4):
        windows = windows_of(learner, number)
        learner.update(rows_of(windows, BURN_IN, GAMMA), START)
        action, density = drawn(windows, 0)
        with torch.no_grad():
            next_action, next_density = drawn(windows, 1)
            least = target.twins(seen_by(target.features, windows, first, 1), next_action).amin(0)
            wanted = flat(windows, "reward") + discounts() * (least - 0.3 * next_density)
        values = critic.twins(seen_by(critic.features, windows, first), flat(windows, "action"))
        follow(of_critic, 0.5 * ((values - wanted) ** 2).mean(1).sum())
        least = critic.twins(seen_by(critic.features, windows, first), action).amin(0)
        follow(of_actor, (0.3 * density - least).mean())
        soft(target, critic, 0.1)
    agree(learner.own_parameters(learner.acting), own, 5e-5)
    agree(learner.critics, critic, 5e-5)
    agree(learner.target, target, 5e-5)


def test_iqns_quantiles_of_windows_are_those_of_their_rows() -> None:
    learner = recurrent("iqn", "gru")
    windows, taus = windows_of(learner, 1), torch.linspace(0.1, 0.9, 8)
    for ahead, name in enumerate(("observation", "next_observation")):
        seen = rows_of(windows, BURN_IN, GAMMA)[name]
        wanted = learner.acting.quantiles(seen_by(learner.acting.features, windows, ahead=ahead), taus)
        torch.testing.assert_close(learner.acting.quantiles(seen, taus), wanted, rtol=1e-4, atol=1e-5)
    before = copy.deepcopy(learner.acting)
    assert np.isfinite(updated(learner, rows_of(windows, BURN_IN, GAMMA)))
    with pytest.raises(AssertionError):
        agree(learner.acting, before)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("name", ["dqn", "iqn", "td3", "sac"])
def test_steps_one_by_one_are_those_of_windows(name, cell) -> None:
    """What acts, with all that it remembers, computes what is learned from, and remembers what the learner would."""
    made = recurrent(name, cell, masked=name in ("dqn", "iqn"))
    seen, memory = torch.randn(2, 6, OBSERVATIONS), torch.randn(2, made.remembers)
    given = Windowed(seen, memory, torch.ones(2, 0, dtype=torch.bool), torch.tensor([0, 1]), torch.tensor([5, 5]))
    masks = (torch.ones(2, 4, dtype=torch.bool),) if made.spec.masked else ()
    whole, state = made.acting(given, *masks), memory
    for step in range(6):
        *outputs, state = made.acting(seen[:, step], *masks, state)
    for one, two in zip(outputs, whole if isinstance(whole, tuple) else (whole,), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    if name in ("td3", "sac"):
        numbers = made.remembers // 2
        for torso, part in ((made.acting.features, state[:, :numbers]), (made.critics.features, state[:, numbers:])):
            torch.testing.assert_close(torso(given), part[:, :UNITS], rtol=1e-4, atol=1e-6)
    assert made.remembers == {"lstm": 2, "gru": 1}[cell] * UNITS * (2 if name in ("td3", "sac") else 1)
    tried(made, np.zeros((3, OBSERVATIONS), np.float32))
