"""Compiled updates are the updates: the same numbers but for the order of sums, and the same state in checkpoints."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.algorithms.acting import START, algorithm, spec_of
from tests.unit.algorithms.test_recorded_losses import DISCRETE, batch, rollout

from jurybox.training.algorithms import compiling
from jurybox.training.algorithms.base import take
from jurybox.training.algorithms.compiling import Adam, CompiledStep, PlainAdam, compiler_missing
from jurybox.training.algorithms.networks import Features

needs_compiler = pytest.mark.skipif(compiler_missing() is not None, reason=str(compiler_missing()))


@pytest.fixture(autouse=True)
def one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # not the user's
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(name: str, compiles: bool, **settings):
    spec = spec_of(4, (), False, name in DISCRETE, 3 if name in DISCRETE else 2)
    learner = algorithm(name, spec, **{"hidden": (8, 8), "batch_size": 16, **settings})
    learner.compiles = compiles
    learner.setup(0, "cpu")
    return learner


def numbers(learner) -> list[torch.Tensor]:
    """All that it has learned, its optimisers' numbers among it."""
    state = learner.state_dict()
    return [each for part in state.values() for each in torch.utils._pytree.tree_leaves(part) if torch.is_tensor(each)]


def test_a_traced_step_of_adam_is_torchs_and_so_is_its_state() -> None:
    start = [torch.randn(3, 4), torch.randn(4)]
    mine, theirs, untraced = ([each.clone().requires_grad_() for each in start] for _ in range(3))
    of_mine, of_theirs, of_untraced = Adam(mine, 0.01), torch.optim.Adam(theirs, 0.01, fused=True), Adam(untraced, 0.01)
    for _ in range(5):
        gradients = [torch.randn_like(each) for each in start]
        of_mine.traced_step(gradients)
        take(of_theirs, theirs, gradients)
        take(of_untraced, untraced, gradients)
    for a, b, c in zip(mine, theirs, untraced, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(b, c)
    again = Adam([each.detach().clone().requires_grad_() for each in theirs], 0.01)
    again.load_state_dict(of_theirs.state_dict())
    for a, b in zip(again.state_dict()["state"].values(), of_untraced.state_dict()["state"].values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_compiles_nothing_imports_none_of_torchs_compiler(monkeypatch) -> None:
    """It takes seconds of a core, and a hundred megabytes, in every learner."""
    for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
        decorated = inspect.unwrap(getattr(torch.optim.Optimizer, name))
        monkeypatch.delattr(decorated, "__dynamo_disable", raising=False)  # that it was imported for
    monkeypatch.setattr("torch.manual_seed", inspect.unwrap(torch.manual_seed))  # which an import decorates
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # so that one fails
    with pytest.raises(ImportError):
        torch.optim.Adam([torch.zeros(1)])
    weights = torch.ones(3, requires_grad=True)
    plain = PlainAdam([weights], lr=0.1)
    plain.zero_grad()
    weights.sum().backward()
    plain.step()
    plain.load_state_dict(plain.state_dict())
    torch.testing.assert_close(weights.detach(), torch.full((3,), 0.9))
    for name in ("sac", "ppo"):
        learner, other = made(name, False), made(name, False)
        rows = (rollout if learner.on_policy else batch)(np.random.default_rng(0), name in DISCRETE)
        learner.update(rows, START)
        other.load_state_dict(learner.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(numbers(learner), numbers(other), strict=True))
    other.optimiser.zero_grad()
    assert all(each.grad is None for each in other.acting.parameters())


CASES: list[tuple[str, dict]] = [
    ("sac", {}), ("td3", {}), ("dqn", {}), ("iqn", {}),
    ("ppo", {"n_epochs": 2}), ("ppo", {"n_epochs": 2, "target_kl": 0.05, "batch_size": 12}),
]  # fmt: skip
# Two from a replay, hockey's among them, and one of rollouts; SAC is compiled below.
QUICK = [CASES[1], CASES[2], CASES[5]]


@pytest.mark.parametrize(
    ("name", "settings", "with_compiler"),
    [
        *(pytest.param(*case, False, marks=[pytest.mark.runs] * (case not in QUICK)) for case in CASES),
        pytest.param("sac", {}, True, marks=[needs_compiler, pytest.mark.runs]),
    ],
)
def test_a_compiled_learner_learns_what_one_that_is_not_does(name, settings, with_compiler, monkeypatch) -> None:
    if not with_compiler:  # the traced graph itself, in a tenth of the time
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, given: graph)
    compiled = made(name, True, learning_rate="lin_0.003_0.001", **settings)
    plain = made(name, False, learning_rate=0.003, **settings)
    rng = np.random.default_rng(1)
    for number in range(4):
        rows = rollout(rng, name in DISCRETE) if plain.on_policy else batch(rng, name in DISCRETE)
        if number == 2:  # what has been compiled goes on with a state that came from elsewhere
            plain.update(rows, START)
            compiled.load_state_dict(plain.state_dict())
        found, expected = compiled.update(rows, START), plain.update(rows, START)
        assert found.metrics.keys() == expected.metrics.keys()
        for metric, value in expected.metrics.items():
            assert float(found.metrics[metric]) == pytest.approx(float(value), rel=1e-3, abs=1e-4), metric
        if expected.priorities is not None:
            torch.testing.assert_close(found.priorities, expected.priorities, rtol=1e-3, atol=1e-4)
    assert compiled.compiles, "it has not fallen back"
    assert compiled._compiled, "it has compiled"
    for a, b in zip(numbers(compiled), numbers(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


class _Double:
    """While it is entered, networks compute in float64."""

    def __enter__(self) -> None:
        self._before = Features.raw_numbers
        Features.raw_numbers = lambda features, rows: rows.double()
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: object) -> None:
        Features.raw_numbers = self._before
        torch.set_default_dtype(torch.float32)


def _stepped(learner, name: str, number: int, rows: dict[str, torch.Tensor]) -> None:
    """Make an update whose random numbers are given, since those that it draws differ with the dtype."""
    steps = {"sac": "_learn_and_follow", "td3": "_learn" if number % 2 else "_learn_all", "dqn": "_learn"}
    learner.run(getattr(learner, steps[name]), rows)


@pytest.mark.parametrize("name", ["sac", pytest.param("td3", marks=pytest.mark.runs), "dqn"])
def test_a_compiled_update_is_as_exact_as_one_that_is_not(name, monkeypatch) -> None:
    """How far both are from the same updates in float64, after twenty of them, over how far these have moved."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, given: graph)
    compiled, plain = (made(name, compiles, learning_rate=0.003) for compiles in (True, False))
    with _Double():
        exact = made(name, False, learning_rate=0.003)
        for part, module in exact.parts().items():
            if isinstance(module, torch.nn.Module):
                module.load_state_dict(plain.parts()[part].state_dict())
    first = [each.detach().clone() for each in exact.acting.parameters()]
    rng = np.random.default_rng(1)
    for number in range(20):
        rows = batch(rng, name in DISCRETE)
        noise = {key: torch.from_numpy(rng.normal(size=(16, 2)).astype(np.float32)) for key in ("noise", "next_noise")}
        rows |= {} if name == "dqn" else noise
        for learner in (compiled, plain):
            _stepped(learner, name, number, rows)
        with _Double():
            doubled = {key: each.double() if each.is_floating_point() else each for key, each in rows.items()}
            _stepped(exact, name, number, doubled)

    def distance(learner) -> float:
        pairs = zip(learner.acting.parameters(), exact.acting.parameters(), first, strict=True)
        off, moved = zip(*(((a - b).square().sum(), (b - c).square().sum()) for a, b, c in pairs), strict=True)
        return float((sum(off) / sum(moved)).sqrt().detach())

    assert compiled._compiled, "it has compiled"
    assert 0 < distance(plain) < 1e-3, "float32 is not float64"
    assert distance(compiled) < 4 * distance(plain)


def test_without_a_compiler_it_learns_the_same_and_says_why(monkeypatch, caplog) -> None:
    def refuse(self, names, tensors):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(CompiledStep, "_compiled", refuse)
    compiled, plain, rng = made("sac", True), made("sac", False), np.random.default_rng(0)
    with caplog.at_level(logging.WARNING, "jurybox.learner"):
        for number in range(2):
            rows = batch(rng, False)
            compiled.update(rows, START)
            plain.update(rows, START)
    assert [each for each in caplog.messages if "no compiler here" in each and "without compiling" in each]
    assert len(caplog.messages) == 1
    assert all(torch.equal(a, b) for a, b in zip(numbers(compiled), numbers(plain), strict=True))


def test_a_missing_compiler_is_named(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "'no-such-compiler'" in str(compiler_missing())


def test_a_trace_changes_nothing() -> None:
    learner = made("td3", False)
    learner.updates = 1
    learner.update(batch(np.random.default_rng(1), False), START)  # so that nothing is zero, and targets are behind
    before = [each.clone() for each in numbers(learner)]
    rows = batch(np.random.default_rng(0), False)
    rows["noise"] = torch.zeros_like(rows["action"])
    names = list(rows)
    compiling._traced(
        lambda *values: list(learner._learn_all(dict(zip(names, values, strict=True))).values()), list(rows.values())
    )
    assert all(torch.equal(a, b) for a, b in zip(before, numbers(learner), strict=True))


def test_a_trace_carries_out_no_change_by_a_number() -> None:
    weight, many = torch.ones(3, requires_grad=True), [torch.ones(2), torch.ones(2)]

    def halve(given: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            weight.mul_(0.5)
            torch._foreach_mul_(many, 0.5)
            torch._foreach_lerp_(many, [torch.zeros(2)] * 2, 0.5)
        return [given + weight, many[0].clone()]

    traced = compiling._traced(halve, [torch.ones(3)])
    assert weight.tolist() == [1.0, 1.0, 1.0]
    assert [each.tolist() for each in many] == [[1.0, 1.0]] * 2
    with torch.no_grad():
        found = traced(torch.ones(3))
    assert found[0].tolist() == [1.5, 1.5, 1.5]
    assert found[1].tolist() == [0.25, 0.25]


@pytest.fixture
def their_own_folder(tmp_path, monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # as torch's first import sets it
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jurybox" / "compiled"


def _compiled_sum() -> list[float]:
    step = CompiledStep(lambda given: {"sum": given["a"] + 3 * given["a"].exp()})
    return step({"a": torch.zeros(4)})["sum"].tolist()


def test_a_compiler_gets_the_users_own_folder_and_what_lets_it_keep_graphs(their_own_folder, monkeypatch) -> None:
    from torch._guards import TracingContext

    seen = []

    def compile_fx(graph, given):
        seen.append((os.environ["TORCHINDUCTOR_CACHE_DIR"], TracingContext.get().fake_mode.shape_env))
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    assert _compiled_sum() == [3.0] * 4
    ((folder, shapes),) = seen
    assert folder == str(their_own_folder) and shapes is not None
    assert their_own_folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    assert _compiled_sum() == [3.0] * 4
    assert seen[1][0] == "/chosen"


@needs_compiler
@pytest.mark.runs
def test_a_graph_that_was_compiled_before_is_found_again_in_the_users_own_folder(their_own_folder) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    for _ in range(2):
        assert _compiled_sum() == [3.0] * 4
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert list(their_own_folder.iterdir())


SLOW_COMPILER = """#!/bin/sh
case "$*" in *--version*|*-dumpversion*|*-print-*) exec g++ "$@";; esac
echo $$ >> "$JURYBOX_TEST_STARTED"
sleep 600
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Let torch have a compiler that never ends; gives the file with the process ids of its calls."""
    from torch._inductor import config

    script, started = tmp_path / "slow++", tmp_path / "started"
    script.write_text(SLOW_COMPILER)
    script.chmod(0o755)
    monkeypatch.setenv("JURYBOX_TEST_STARTED", str(started))
    with config.patch({"cpp.cxx": (None, str(script))}):
        yield started


@pytest.mark.runs
@needs_compiler
def test_a_stop_ends_a_compiler_and_the_step_is_made_without_it(started) -> None:
    learner, plain = made("dqn", True), made("dqn", False)
    learner.stops = started.exists
    given = batch(np.random.default_rng(0), True)
    for each in (learner, plain):
        each.update(given, START)
    assert learner.compiles, "the next one may compile"
    assert all(torch.equal(a, b) for a, b in zip(numbers(learner), numbers(plain), strict=True))
    assert not any(Path(f"/proc/{pid}").exists() for pid in started.read_text().split())


@needs_compiler
def test_a_step_of_a_run_that_stops_compiles_nothing(started) -> None:
    learner = made("dqn", True)
    learner.stops = lambda: True
    learner.update(batch(np.random.default_rng(0), True), START)
    assert learner.compiles and not started.exists()
