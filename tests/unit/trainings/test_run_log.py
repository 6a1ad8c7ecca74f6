import json
import os

import pytest

from jurybox.training.checkpoints import write_atomically
from jurybox.training.run_folder import RunLog, RunLogError, Summary, clear, read_metrics

SUMMARY = Summary(100, 20, 25, 3.5, 1.0, 0.5, 7, "0.1.0")


def log_of(folder, **options):
    return RunLog(folder, ["loss", "return_mean"], **options)


def test_a_run_leaves_metrics_summary_and_tensorboard_files(tmp_path):
    with log_of(tmp_path / "run") as log:
        log.scalars(10, {"loss": 1.5, "return_mean": 0.1})
        log.scalars(20, {"loss": 1.0})
        log.summarise(SUMMARY)
        log.extend_summary(verdict="yes")
    found = json.loads((tmp_path / "run/summary.json").read_text())
    keys = "env_steps learner_steps episodes seconds return_mean return_std seed version verdict"
    assert list(found) == keys.split()
    assert found["env_steps"] == 100 and found["verdict"] == "yes"
    rows = read_metrics(tmp_path / "run/metrics.csv")
    assert rows == [{"env_steps": 10, "loss": 1.5, "return_mean": 0.1}, {"env_steps": 20, "loss": 1.0}]
    assert list((tmp_path / "run/tensorboard").glob("events*"))


def test_rows_are_on_disk_during_the_run(tmp_path):
    with log_of(tmp_path) as log:
        log.scalars(10, {"loss": 1.5})
        assert len(read_metrics(tmp_path / "metrics.csv")) == 1


def test_a_new_run_does_not_overwrite_another(tmp_path):
    log_of(tmp_path).close()
    with pytest.raises(RunLogError, match="--resume"):
        log_of(tmp_path)


def test_a_resumed_run_keeps_records_before_its_checkpoint_and_drops_later_ones(tmp_path):
    with log_of(tmp_path) as log:
        for step in (10, 20, 30):
            log.scalars(step, {"loss": step})
    with log_of(tmp_path, resume_at=20) as log:
        log.scalars(30, {"loss": 99})
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.csv")] == [10, 20, 99]


def test_a_log_with_other_columns_is_not_gone_on_with(tmp_path):
    log_of(tmp_path).close()
    with pytest.raises(RunLogError, match="other"):
        RunLog(tmp_path, ["other"], resume_at=0)


def test_trackers_hear_every_number_and_the_end(tmp_path):
    heard = []

    class Tracker:
        def scalars(self, step, values):
            heard.append((step, dict(values)))

        def finish(self, summary, files):
            heard.append((summary["env_steps"], [file.name for file in files]))

    with log_of(tmp_path) as log:
        log.add_trackers([Tracker()])
        log.scalars(10, {"loss": 1.0, "elsewhere": 2.0})
        log.summarise(SUMMARY)
        log.finish([tmp_path / "report.html"])
    assert heard == [(10, {"loss": 1.0, "elsewhere": 2.0}), (100, ["report.html"])]


def test_clearing_removes_only_a_runs_files(tmp_path):
    with log_of(tmp_path) as log:
        log.summarise(SUMMARY)
    (tmp_path / "thesis.txt").write_text("mine")
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_write_leaves_the_old_content_and_no_scraps(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_written_file_has_the_users_permissions_and_the_umask_is_not_touched(tmp_path, monkeypatch):
    before = os.umask(0o027)
    try:
        monkeypatch.setattr("os.umask", lambda _: pytest.fail("it is that of all threads"))
        write_atomically(tmp_path / "file", "text")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
