"""Who keeps published weights on disk: a thread of the supervisor, one for all models.

It reads channels as any actor does, so neither learner nor engine knows of it, and it waits for disks where the
supervisor's loop must not. The supervisor alone fills a channel from disk, before any engine follows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from jurybox.client.publisher import Publisher
from jurybox.protocol.errors import Error, Timeout, said
from jurybox.server.supervisor.models import HeldModel
from jurybox.server.weights_files import WeightsFiles

_LOOK = 0.1  # seconds between two looks at the channels; a publication saved is at most that much behind
_LAST = 2.0  # seconds a publisher in the middle of a snapshot gets at the end


class Keeper:
    """Saves what is published on the channels of the models whose settings ask for it.

    Args:
        report: called with (event, fields) for what should be logged.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report
        self._files: dict[int, WeightsFiles] = {}  # by model
        self._held: dict[int, HeldModel] = {}
        self._failing: dict[int, str] = {}
        self._turn = threading.Lock()  # held while a file is written: whoever takes a folder away waits for that
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, held: HeldModel) -> int | None:
        """Keep a model's publications from now on, as its settings say; fill its channel where that is empty.

        Returns the version it was filled with; None where it was not.

        Raises:
            Error: the folder is another server's, its files are of another layout, or all damaged.
            OSError: it cannot be had.
        """
        settings, channel = held.asked, held.channel
        folder = Path(settings.save_dir) / held.name if settings.save_dir else None
        files = self._files.get(held.index)
        if files is not None and (files.channel is not channel or files.folder != folder):
            self.drop(held)
            files = None
        if channel is None or folder is None:
            return None
        restored = None
        if files is None:
            files = WeightsFiles(channel, folder, every=settings.save_every, keep=settings.save_keep)
            try:
                if channel.newest == 0:
                    with Publisher(channel) as publisher:
                        restored = files.restore(publisher)
            except BaseException:
                files.close()
                raise
        with self._turn:
            files.every, files.keep = settings.save_every, settings.save_keep
            self._files[held.index], self._held[held.index] = files, held
            held.saved = files.last_version
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
            self._thread.start()
        return restored

    def drop(self, held: HeldModel) -> None:
        """Save the newest of a model that goes away, and let go of its folder. Harmless where it has none."""
        with self._turn:
            self._failing.pop(held.index, None)
            files = self._files.pop(held.index, None)
            if files is not None:
                self._finish(held.name, files)

    def close(self) -> None:
        """Save what was published since the last save, and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for model, files in self._files.items():
            self._finish(self._held[model].name, files)
        self._files.clear()

    def _finish(self, name: str, files: WeightsFiles) -> None:
        try:
            if files.channel.newest > files.last_version:
                files.save(_LAST)
        except (Error, OSError) as error:
            self._report("weights not saved", model=name, folder=str(files.folder), error=str(error))
        finally:
            files.close()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK):
            for model in list(self._files):
                if self._stop.is_set():
                    return
                with self._turn:
                    if files := self._files.get(model):
                        try:
                            self._save(model, files)
                        except Exception as error:  # noqa: BLE001  one model's files must not end the others' saving
                            self._failed_to_save(model, files, said(error))

    def _save(self, model: int, files: WeightsFiles) -> None:
        """Save if due; a failure is reported once until it changes, and tried again."""
        try:
            if (version := files.save_if_due()) is not None:
                self._held[model].saved = version
                self._failing.pop(model, None)
        except Timeout:
            pass  # a publisher in the middle of a snapshot, or far ahead: the next look finds a whole one
        except (Error, OSError) as error:
            self._failed_to_save(model, files, str(error))

    def _failed_to_save(self, model: int, files: WeightsFiles, why: str) -> None:
        if self._failing.get(model) != why:
            self._failing[model] = why
            self._report("weights not saved", model=self._held[model].name, folder=str(files.folder), error=why)
