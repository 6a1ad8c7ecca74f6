"""What an engine asks of a load that runs beside its loop: whether the default dtype is the engine's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from jurybox.server.engine import loads as module
from jurybox.server.engine.loads import LOADS, Disturbed, Loads


@pytest.fixture
def loads() -> Iterator[Loads]:
    """The loads of an engine that has loaded nothing so far."""
    yield Loads()
    torch.set_default_dtype(torch.float32)


def nothing(names: list[str]) -> None:
    pass


def in_a_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_without_a_load_no_forward_is_disturbed_and_every_batch_may_begin(loads: Loads) -> None:
    assert not loads.running and not loads.disturbed(loads.changes, torch.float32) and not loads.hold()
    assert not loads.restore(loads.changes, torch.float32)
    assert LOADS.changes % 2 == 0 and not LOADS.disturbed(LOADS.changes, torch.float32)


def test_batches_wait_before_the_first_load_too_if_the_default_dtype_is_another(loads: Loads) -> None:
    torch.set_default_dtype(torch.float64)
    assert loads.hold() is True


@pytest.mark.parametrize("raises", [False, True])
def test_a_load_runs_until_the_factory_returns_or_raises(loads: Loads, raises: bool) -> None:
    seen = []

    def factory() -> None:
        with loads.code(nothing):
            seen.append(loads.running)
            if raises:
                raise ValueError("broken")

    if raises:
        with pytest.raises(ValueError, match="broken"):
            factory()
    else:
        factory()
    assert seen == [True] and not loads.running


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_every_change_of_the_default_dtype_by_a_factory_counts_twice_however_it_is_made(loads: Loads) -> None:
    before = loads.changes
    with loads.code(nothing):
        torch.set_default_dtype(torch.float64)
        assert loads.changes == before + 2
        torch.set_default_tensor_type(torch.FloatTensor)
        assert loads.changes == before + 4
        with pytest.raises(TypeError):
            torch.set_default_dtype("float32")  # type: ignore[arg-type]
        assert loads.changes == before + 6 and torch.get_default_dtype() == torch.float32
    assert loads.changes == before + 6
    torch.set_default_dtype(torch.float64)
    assert loads.changes == before + 6, "what is no factory's does not count"


def test_changes_by_threads_that_are_not_the_factorys_do_not_count(loads: Loads) -> None:
    with loads.code(nothing):
        before = loads.changes
        in_a_thread(lambda: torch.set_default_dtype(torch.float32))
        assert loads.changes == before


def test_while_the_factory_sets_the_default_dtype_every_forward_counts_as_disturbed(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, seen = torch._C._set_default_dtype, []

    def slow(dtype: torch.dtype) -> None:
        seen.append((loads.changes % 2, loads.disturbed(loads.changes, torch.float32)))
        native(dtype)

    monkeypatch.setattr(torch._C, "_set_default_dtype", slow)
    with loads.code(nothing):
        torch.set_default_dtype(torch.float32)
        assert not loads.disturbed(loads.changes, torch.float32)
    assert seen == [(1, True)]


def test_a_forward_is_disturbed_if_it_began_in_the_dtype_of_a_factory_or_the_count_went_on(loads: Loads) -> None:
    changes = loads.changes
    assert not loads.disturbed(changes, torch.float64), "nobody loads: it is the engine's own"
    with loads.code(nothing):
        assert not loads.disturbed(changes, torch.float32)
        assert loads.disturbed(changes, torch.float64)
        torch.set_default_dtype(torch.float32)
        assert loads.disturbed(changes, torch.float32)
    assert loads.disturbed(changes, torch.float32)


def test_what_a_forward_has_set_is_set_back_and_what_a_factory_has_set_is_not(loads: Loads) -> None:
    torch.set_default_dtype(torch.float64)
    assert loads.restore(loads.changes, torch.float32) is True and torch.get_default_dtype() == torch.float32
    assert loads.restore(loads.changes, torch.float32) is False
    with loads.code(nothing):
        changes = loads.changes
        torch.set_default_dtype(torch.float64)
        with pytest.raises(Disturbed):
            loads.restore(changes, torch.float32)
        assert torch.get_default_dtype() == torch.float64


def test_batches_wait_while_a_factory_has_changed_the_default_dtype_and_no_longer(loads: Loads) -> None:
    with loads.code(nothing):
        assert not loads.hold()
        torch.set_default_dtype(torch.float64)
        assert loads.hold() is True and loads.hold() is True
        assert torch.get_default_dtype() == torch.float64, "the factory still needs it"
        torch.set_default_dtype(torch.float32)
        assert not loads.hold()


def test_a_load_is_late_once_requests_have_waited_long_and_the_next_one_is_not(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STEP", 0.001)
    monkeypatch.setattr(module, "_PATIENCE", 0.002)
    with pytest.raises(TimeoutError, match=r"changed for more than 0\.002 s while requests of other models"):
        with loads.code(nothing):
            torch.set_default_dtype(torch.float64)
            waits = 0
            while loads.hold():
                waits += 1
            assert 1 <= waits <= 3 and torch.get_default_dtype() == torch.float32
    monkeypatch.setattr(module, "_PATIENCE", 60.0)
    with loads.code(nothing):
        torch.set_default_dtype(torch.float64)
        assert loads.hold(), "its patience begins anew"


def test_a_factory_that_changes_the_dtype_and_lets_no_request_wait_is_not_late(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    changed: list[str] = []
    with loads.code(changed.extend):
        torch.set_default_dtype(torch.float64)
    assert changed == ["torch's default dtype"] and torch.get_default_dtype() == torch.float32


def test_in_an_engine_that_serves_in_another_default_dtype_that_one_is_kept(loads: Loads) -> None:
    torch.set_default_dtype(torch.float64)
    with loads.code(nothing):
        assert not loads.hold() and not loads.disturbed(loads.changes, torch.float64)
        assert loads.disturbed(loads.changes, torch.float32)
        torch.set_default_dtype(torch.float32)
        assert loads.hold()
    assert torch.get_default_dtype() == torch.float64


@pytest.mark.parametrize("raises", [False, True])
def test_torchs_own_setters_are_back_after_a_load(loads: Loads, raises: bool) -> None:
    before = torch._C._set_default_dtype, torch._C._set_default_tensor_type
    try:
        with loads.code(nothing):
            assert torch._C._set_default_dtype is not before[0]
            if raises:
                raise ValueError("broken")
    except ValueError:
        pass
    assert (torch._C._set_default_dtype, torch._C._set_default_tensor_type) == before
