"""What the log says of a load or a move that failed, and who is charged with a device that is lost in a load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.serving import wait_until
from tests.unit.engine.test_model_loader_steps import Loads, Plus, raising

from jurybox.protocol.device_memory import FAKE
from jurybox.server.engine import model_code, model_loader
from jurybox.server.engine.compiled import Compiled
from jurybox.server.engine.device import DeviceLost, DeviceServed
from jurybox.server.engine.model_loader import held


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    """A loader whose thread may have ended."""
    found = Loads()
    monkeypatch.setattr(model_code, "_from_factory", lambda name, settings, named: found.made[settings.factory]())
    yield found
    for served, *_ in found.core.installed.values():
        served.close()
    found.undo.close()
    found.core.scoreboard.close()


def thread_of(loads: Loads) -> threading.Thread:
    (thread,) = (
        one for one in threading.enumerate() if getattr(getattr(one, "_target", None), "__self__", None) is loads.loader
    )
    return thread


# ---- a device that is lost in a load


def wait_for_the_loop(loads: Loads, monkeypatch: pytest.MonkeyPatch, model: int) -> None:
    """Load a model that breaks the device, until the loop is told."""
    told = threading.Event()
    later = loads.later.append

    def noted(action: Callable[[], None]) -> None:
        later(action)
        told.set()

    loads.loader._later = noted
    monkeypatch.setattr(model_loader, "device_error", lambda device: RuntimeError("an illegal memory access"))
    loads.begin(raising(ValueError("broken")), model=model, load=2)
    assert told.wait(30)


def test_a_device_that_is_lost_in_a_load_ends_the_loop_and_is_charged_to_that_model(
    begun: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_the_loop(begun, monkeypatch, 3)
    with pytest.raises(DeviceLost, match=r"^cpu fails every call since a model was loaded: ValueError: broken") as lost:
        begun.loop()
    assert lost.value.shown == 4
    # Without "ends", the supervisor knows in which load the engine ended; its reason comes with the engine's end.
    assert [message["kind"] for message in begun.told] == ["begins"]


def test_the_log_has_both_errors_of_a_load_that_lost_its_device(begun: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_the_loop(begun, monkeypatch, 3)
    ((event, fields),) = begun.reported
    assert (event, fields["model"]) == ("load failed", 3)
    assert "ValueError: broken" in fields["error"] and "an illegal memory access" in fields["device"]
    assert "Traceback" in fields["exception"] and "raise error" in fields["exception"]


def test_nothing_is_loaded_any_more_on_a_device_that_is_lost(begun: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    thread = thread_of(begun)
    wait_for_the_loop(begun, monkeypatch, 3)
    thread.join(30)
    assert not thread.is_alive()


# ---- loads and moves that fail


def test_the_loader_goes_on_after_a_load_that_failed(begun: Loads) -> None:
    begun.begin(raising(SystemExit(3)))
    begun.idle()
    begun.serve(Plus(), model=1)
    assert [message["model"] for message in begun.of("failed")] == [0] and begun.of("ready")[0]["model"] == 1
    assert [message["kind"] for message in begun.told[-3:]] == ["begins", "ends", "ready"]


def test_a_supervisor_that_is_gone_ends_no_load(begun: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends this one; until then nothing is written to the log of each message that it does not get."""
    tell, gone = begun.loader._tell, [True]

    def telling(kind: str, **fields: Any) -> None:
        if gone:
            raise BrokenPipeError("the supervisor is gone")
        tell(kind, **fields)

    monkeypatch.setattr(begun.loader, "_tell", telling)
    begun.begin(Plus())
    begun.idle()
    assert not begun.told and not begun.reported
    gone.clear()
    begun.serve(Plus(), model=1)
    assert begun.of("ready")[0]["model"] == 1


@pytest.mark.parametrize("which", ["sleep", "wake"])
def test_the_log_has_the_error_and_the_traceback_of_a_move_that_failed(
    begun: Loads, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    begun.serve(Plus(), model=2)
    if which == "wake":
        begun.loader.sleep(2, 1, "it sleeps")
        begun.idle()
    monkeypatch.setattr(begun.served(2), which, raising(MemoryError("no room")))
    monkeypatch.setattr(begun.served(2), "sleep" if which == "wake" else "wake", lambda: 0)
    begun.loader.wake(2, 1) if which == "wake" else begun.loader.sleep(2, 1, "it sleeps")
    begun.idle()
    ((event, fields),) = begun.reported
    assert (event, fields["model"], fields["error"]) == (f"{which} failed", 2, "MemoryError: no room")
    assert "Traceback" in fields["exception"] and "no room" in fields["exception"]


def test_a_model_that_can_be_moved_neither_way_counts_as_asleep_with_both_reasons(
    begun: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun.serve(Plus(), model=2)
    for which, reason in (("sleep", "not to the host"), ("wake", "nor back")):
        monkeypatch.setattr(begun.served(2), which, raising(MemoryError(reason)))
    begun.loader.sleep(2, 1, "it sleeps")
    begun.idle()
    begun.loop()
    assert begun.reason("awake") == "MemoryError: not to the host; then MemoryError: nor back"
    assert not begun.of("asleep") and 2 in begun.core.resting_models


def test_a_model_sleeps_though_others_share_their_weights(begun: Loads) -> None:
    shared = Plus()
    for model, module in ((0, Plus()), (1, shared), (2, shared)):
        begun.serve(module, model=model)
    begun.loader.sleep(0, 1, "it sleeps")
    begun.idle()
    assert begun.reason("asleep") == "" and 0 in begun.core.resting_models


# ---- what is served


def test_a_model_that_is_served_alone_leaves_its_group_as_no_load_of_its_own(begun: Loads) -> None:
    left: list[int] = []
    groups: Any = SimpleNamespace(leave=left.append)
    begun.loader._groups = groups
    begun.serve(Plus(), model=2, load=7)
    begun.idle()
    assert left == [2] and begun.told[-1]["kind"] == "ready"


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"group": "g"}], ids=["usual", "shapes", "group"])
def test_on_a_device_batches_of_given_shapes_and_of_groups_take_no_device_buffers(
    begun: Loads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any]
) -> None:
    monkeypatch.setenv(FAKE, str(tmp_path))
    members: list[Any] = []
    groups: Any = SimpleNamespace(leave=int, join=lambda group, member, *_: members.append(member))
    begun.loader._groups = groups
    begun.begin(Plus(), **settings)
    begun.idle()
    begun.place()
    served = members[0].served if members else begun.served()
    assert isinstance(served, DeviceServed) == (not settings)
    served.close()


class Compiles(Compiled):
    """A compiled module as far as the loader knows it: it notes the batches from which it would compile graphs."""

    def __init__(self, module: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self._orig_mod, self._sealed = module, False
        self.seen: list[tuple[int, bool]] = []

    @property
    def graphs(self) -> int:  # type: ignore[override]
        return len({rows for rows, _ in self.seen})

    def forward(self, x: torch.Tensor) -> Any:
        self.seen.append((len(x), self._sealed))
        return self._orig_mod(x)


def test_a_compiled_model_compiles_for_its_batch_sizes_before_it_serves_and_nothing_after(begun: Loads) -> None:
    module = Compiles(Plus())
    begun.serve(module)
    assert {rows for rows, _ in module.seen} == {1, 2, 4} and not any(sealed for _, sealed in module.seen)
    assert module._sealed and list(begun.served().shapes) == [1, 2, 4] and not begun.served().agreeing
    assert begun.of("ready")[0]["warm_up"]["graphs"] == 3


def test_a_compiled_model_of_fixed_shapes_still_answers_alike_in_all_of_them(begun: Loads) -> None:
    begun.serve(Compiles(Plus()), deterministic=True)
    assert list(begun.served().shapes) == [1, 2, 4] and begun.served().agreeing


# ---- the loop held for a load


def test_a_block_runs_while_the_loop_is_held_with_no_batch_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[[], None]] = []
    waiting: list[threading.Thread] = []
    come, order = threading.Event(), []

    class Noting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.append(threading.current_thread())
            return super().wait(timeout)

    def later(action: Callable[[], None]) -> None:
        asked.append(action)
        come.set()

    def loop() -> None:
        assert come.wait(30)
        asked[0]()
        order.append("the loop goes on")

    monkeypatch.setattr(model_loader, "_HELD", 60.0)
    monkeypatch.setattr(model_loader, "threading", SimpleNamespace(Event=Noting))
    thread = threading.Thread(target=loop)
    thread.start()
    with held(later, lambda: order.append("batches are answered")):
        order.append("the block begins")
        wait_until(lambda: thread in waiting or not thread.is_alive())
        order.append("the block ends")
    thread.join(30)
    assert order == ["batches are answered", "the block begins", "the block ends", "the loop goes on"]


def test_a_loop_that_comes_after_the_block_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "_HELD", 0.01)
    asked: list[Callable[[], None]] = []
    finished: list[int] = []
    with held(asked.append, lambda: finished.append(1)):
        pass
    monkeypatch.setattr(model_loader, "_HELD", 3600.0)
    asked[0]()
    assert not finished


def test_a_block_that_raises_lets_the_loop_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "_HELD", 30.0)
    threads: list[threading.Thread] = []

    def later(action: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=action, daemon=True))
        threads[0].start()

    with pytest.raises(ValueError, match="broken"), held(later, int):
        raise ValueError("broken")
    threads[0].join(25)
    assert not threads[0].is_alive()


def test_a_loop_is_held_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "_HELD", 0.01)
    with held(lambda action: action(), int):
        pass


def test_the_thread_of_the_loader_does_not_keep_the_engine_from_ending(begun: Loads) -> None:
    assert thread_of(begun).daemon


def test_a_model_that_is_ready_says_how_its_batches_were_warmed_up(begun: Loads) -> None:
    begun.serve(Plus(), dtype="bfloat16", cache_mib=2, deterministic=True)
    served: Any = begun.served()
    assert served.module.bias.dtype == torch.bfloat16 and served.cache is not None
    assert list(served.shapes) == [1, 2, 4] and begun.of("ready")[0]["warm_up"]["shapes"] == [1, 2, 4]
    assert begun.of("ready")[0]["warm_up"]["seconds"] > 0
