"""The demo: a server of its own, a short photo training against it, a report, and nothing left behind."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from jurybox.training import run_folder as runlog
from jurybox.training.environments.photo import PhotoConfig
from jurybox.training.recipes.photo import PhotoTraining
from jurybox.training.recipes.photo_run import run
from jurybox.training.recipes.progress import Watcher
from jurybox.training.report.verdict import Verdict
from jurybox.training.runtime.local_server import LocalServer

JUROR = "jurybox.server.jurors:panel"
STEPS = 5120
DAMAGES = 24
# So short a training needs many small updates; the usual 4000 steps would leave it one.
_ROLLOUT = 256
WORKERS = 8


def settings(
    seed: int,
    *,
    steps: int = STEPS,
    seconds: float | None = None,
    workers: int = WORKERS,
    address: str | None = None,
) -> PhotoTraining:
    """The demo's settings: the training's, with a rollout of 256 steps instead of 4000."""
    return PhotoTraining(
        environment=PhotoConfig(address=address, seed=seed),
        steps=steps,
        seconds=seconds,
        workers=workers,
        rollout=_ROLLOUT,
        checkpoint_every=4 * _ROLLOUT,
    )


def demo(
    folder: Path,
    watcher: Watcher,
    resources: ExitStack,
    *,
    seed: int,
    steps: int = STEPS,
    seconds: float | None = None,
    damages: int = DAMAGES,
    workers: int = WORKERS,
    juror: str = JUROR,
) -> Verdict:
    """Run the demo.

    Args:
        folder: for the report and what else a training leaves; what an earlier demo left there is removed.
        resources: whoever calls this closes it, whatever happens: the server is stopped then at the latest.
        steps, seconds: how long to train; the first of the two to be reached ends it.
        damages: seeds of degradation in the evaluation.
        workers: env workers.
        juror: a factory, ``"package.module:function"``.

    Raises:
        ServerNotStarted: with the end of the server's log.
        KeyboardInterrupt: interrupted; `resources` still has to be closed.
    """
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    runlog.clear(folder)
    rows = 2 * workers + 16  # few: the demo should also run where shared memory is small
    models: dict[str, dict[str, str | int]] = {
        "photo": {"factory": juror, "max_batch": 16, "rows": rows, "lane_rows": 1}
    }
    server = LocalServer(models, folder / "server.log")
    resources.callback(server.stop)
    watcher.say("starting a server on this machine's CPU")
    server.start()
    server.wait()
    started = time.monotonic() - began
    watcher.say(f"the server is ready after {started:.0f} s; while it runs: http://{server.http}/")
    verdict = run(
        settings(seed, steps=steps, seconds=seconds, workers=workers, address=server.address),
        folder,
        watcher,
        command=f"jurybox demo photo --out {folder} --seed {seed} --steps {steps}",
        damages=damages,
        before={"server start": started},
    )
    server.stop()
    return verdict
