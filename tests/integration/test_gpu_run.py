"""`make gpu` rehearsed on the CPU: its files, its output, and that it detects faults."""

import json
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from benchmarks.gpu import crowd, page, prepare
from benchmarks.gpu.crowd import ClientFailed, Sample, Window
from benchmarks.gpu.measure import MEASUREMENTS

ROOT = Path(__file__).resolve().parents[2]
FILES = {"report.html", "results.json", "environment.json", "log.txt"}


def run(folder, *arguments, steps="", timeout=120):
    """Run the command, with other steps if given: a (name, part, bound) each."""
    change = f"m.STEPS = tuple(m.Step(*each) for each in {steps})" if steps else ""
    code = f"import sys; from benchmarks.gpu import __main__ as m; {change}\nsys.exit(m.main(sys.argv[1:]))"
    places = ["--out", folder / "out", "--work", folder / "work", "--wheels", folder / "wheels"]
    return subprocess.run(
        [sys.executable, "-c", code, "--device", "cpu", "--quick", *map(str, [*arguments, *places])],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@pytest.mark.runs
def test_a_step_that_fails_or_hangs_stops_no_other_and_is_reported(tmp_path):
    steps = (("nonsense", 1, 60.0), ("loop", 1, 0.3), ("floor", 1, 90.0))
    done = run(tmp_path, "--window", 0.02, steps=steps)
    assert done.returncode == 1, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    results = json.loads((tmp_path / "out/results.json").read_text())
    found = results["measurements"]
    assert {name: document["ok"] for name, document in found.items()} == {
        "nonsense": False,
        "loop": False,
        "floor": True,
    }
    assert found["floor"]["figures"]["memory_gbs"] > 0 and not results["not_run"]
    lines = done.stdout.strip().splitlines()[-11:]
    assert lines[0].startswith("CPU (a rehearsal")
    assert lines[2] == "measured: 1 of 3"
    assert "nonsense (" in lines[3] and "loop (" in lines[3] and "floor (" not in lines[3]
    assert all(line.endswith("not measured") for line in lines[4:])
    assert "nonsense" in (tmp_path / "out/report.html").read_text()
    assert json.loads((tmp_path / "out/environment.json").read_text())["torch"]


def test_steps_without_time_left_are_named(tmp_path, monkeypatch):
    from benchmarks.gpu import __main__ as main

    facts = {"cuda_available": False, "device": "", "torch": "", "native": "", "commit": "c0ffee"}
    earlier = results(device="cpu", torn={"torn_reads": 0.0}, floor={"memory_gbs": 1.0})
    earlier["environment"] = {**facts, "measured_on": "cpu"}
    (tmp_path / "results.json").write_text(json.dumps(earlier))
    monkeypatch.setattr(main, "prepare", lambda folder, wheels: prepare.Prepared({}, {}))
    monkeypatch.setattr(main, "machine", lambda environment: dict(facts))
    monkeypatch.setattr(main.Run, "write", lambda self, ready: None)
    options = main._options(["--part", "1", "--seconds", "1", "--out", str(tmp_path)])
    with (tmp_path / "log.txt").open("w") as log:
        run = main.Run(options, log)
        assert not run([main.Step("floor", 1, 60.0)])
    # The other part's result stays, this one's earlier result does not.
    assert page.summary(run.results)[2] == "measured: 1 of 2; not run: floor (no time left)"


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path):
    done = run(tmp_path, "--window", 0.3, "--patience", 4, timeout=1700)
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert set(results["measurements"]) == set(MEASUREMENTS) and results["tests"]["ok"]
    assert results["measurements"]["memory"]["figures"]["halved"] > 0
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 16 * 2**20


@pytest.mark.slow
def test_the_native_part_compiles_with_a_compiler_and_nanobind_alone(tmp_path):
    prepare.compile_native(tmp_path, tmp_path / "objects")
    code = "import native; print(native.__file__, len(dir(native)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "jurybox", capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path)), done.stderr


# ---- verdicts


def results(device="cuda:0", quick=False, **figures):
    kept = {
        name: {"name": name, "ok": True, "error": "", "device": device, "quick": quick, "seconds": 1.0,
               "figures": values, "curves": {}, "notes": [], "power": {}}
        for name, values in figures.items()
    }  # fmt: skip
    return {"environment": {"device": "a GPU"}, "tests": None, "measurements": kept, "not_run": {}}


def verdicts(found):
    return {judged.target.says: judged.verdict for judged in page.judge(found)}


def test_targets_are_held_missed_or_not_measured():
    found = verdicts(
        results(
            loop={"vector_forward_us": 30.0, "image_model_rows_per_s": 50_000.0},
            floor={"image_rows_per_s_by_pcie": 100_000.0},
            vector={"graphs_p50_us_1": 65.0, "graphs_over_zmq_16": 2.5},
            image={"most_requests_per_s": 46_000.0},
        )
    )
    assert list(found.values()) == ["held", "missed by 0.5x", "held", *["not measured"] * 4]


@pytest.mark.parametrize("how", [{"device": "cpu"}, {"quick": True}])
def test_a_rehearsal_meets_no_target(how):
    found = verdicts(results(torn={"torn_reads": 0.0}, **how))
    assert found["torn reads of weights on the device"].startswith("not judged")


def test_a_torn_answer_fails_its_client():
    # The second was computed with weights of two versions.
    answers = [(np.float32(0), np.float32(0)), (np.float32(0), np.float32(1))]
    sample = Sample(np.zeros(4, np.float32), (np.float32(0), np.float32(0)), 0.0)
    with pytest.raises(ClientFailed, match="version 7"):
        crowd._window(lambda row: (answers.pop(0), 7), [sample], 0, 0, 1 << 62)


def test_an_answer_that_is_not_a_number_fails_its_client():
    sample = Sample(np.zeros(4, np.float32), (np.float32(0),), 1.0)
    with pytest.raises(ClientFailed):
        crowd._window(lambda row: ((np.float32("nan"),), 0), [sample], 0, 0, 1 << 62)


def test_a_pause_is_measured_at_the_change_of_versions():
    from benchmarks.gpu.served import pauses

    ms = 1_000_000
    times = np.array([*range(0, 100, 1), *range(105, 200, 1)]) * ms  # no answers for 6 ms instead of 1
    versions = np.where(times < 100 * ms, 3, 4)
    seen = Window(
        0.2, times.astype(np.uint64), times.astype(np.uint64), versions.astype(np.uint64), np.zeros(len(times), int)
    )
    quiet = Window(0.1, *(column[:100] for column in seen[1:]))
    found = pauses(quiet, seen, [(4, 90 * ms, 2.0)])
    assert found["switch_ms"] == found["pause_ms"] == 5.0
    assert (found["adopted_ms"], found["publish_ms"], found["seen"]) == (15.0, 2.0, 1)
    with pytest.raises(ClientFailed, match="none was answered with"):
        pauses(quiet, seen, [(9, 90 * ms, 2.0)])


# ---- carried wheels


def test_wheels_of_another_python_or_processor_are_left_out(tmp_path):
    minor = sys.version_info.minor
    machine = platform.machine()
    assert prepare.fits("a-1-py3-none-any.whl") and prepare.fits("a-1-py2.py3-none-any.whl")
    assert prepare.fits(f"a-1-cp38-abi3-manylinux_2_28_{machine}.whl")
    assert not prepare.fits(f"a-1-cp3{minor + 1}-cp3{minor + 1}-linux_{machine}.whl")
    assert not prepare.fits(f"a-1-cp3{minor + 1}-abi3-linux_{machine}.whl")
    assert not prepare.fits("a-1-py3-none-linux_sparc.whl")
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("../outside.py", "")
    with pytest.raises(prepare.NotPrepared, match="outside its folder"):
        prepare.unpack(tmp_path, tmp_path / "site")


def test_carried_packages_are_pinned():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.prepare", "NAMES"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = done.stdout.split()
    assert len(names) == len(prepare.CARRIED) and all("==" in name for name in names)
