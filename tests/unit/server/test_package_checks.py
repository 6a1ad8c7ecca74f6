"""The doctor on versions that do not fit together, and the pip line that mends them."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from jurybox.server.doctor.host import Level
from jurybox.server.doctor.packages import Installed, check_conflicts, installed


def packages(**requires: tuple[str, list[str]]) -> dict[str, Installed]:
    """As they would be installed: name=(version, requirements)."""
    ours = {"jurybox": ("0.1.0", ["protobuf>=4.25", "numpy>=1.26", "fastapi>=0.115; extra == 'server'"])}
    rest = {"protobuf": ("7.35.1", []), "numpy": ("2.4.0", []), "fastapi": ("0.120", ["starlette>=0.40"])}
    others = {"starlette": ("0.45", [])}
    return {
        name: Installed.read(name, version, wants)
        for name, (version, wants) in {**ours, **rest, **others, **requires}.items()
    }


def test_consistent_settings_are_accepted() -> None:
    assert check_conflicts(packages()).level is Level.OK


def test_a_neighbour_that_wants_an_older_protobuf_is_named_with_the_pip_line() -> None:
    finding = check_conflicts(packages(tritonclient=("2.73", ["protobuf<7.0,>=6.30; extra == 'grpc'", "protobuf<7"])))
    assert finding.level is Level.WARN
    assert finding.found == "tritonclient 2.73 asks for protobuf<7, 7.35.1 is installed"
    assert finding.remedy == "pip install 'protobuf<7,>=4.25'"


def test_a_version_too_old_for_jurybox_itself_fails() -> None:
    finding = check_conflicts(packages(numpy=("1.24.4", []), gym=("0.26", ["numpy<2"])))
    assert finding.level is Level.FAIL
    assert "jurybox 0.1.0 asks for numpy>=1.26, 1.24.4 is installed" in finding.found
    assert finding.remedy == "pip install 'numpy<2,>=1.26'"


def test_a_servers_package_that_is_missing_fails() -> None:
    here = packages()
    del here["fastapi"]
    finding = check_conflicts(here)
    assert (finding.level, finding.remedy) == (Level.FAIL, "pip install 'fastapi>=0.115'")


def test_an_indirect_requirement_counts_and_those_of_others_do_not() -> None:
    finding = check_conflicts(packages(starlette=("0.30", [])))
    assert "fastapi 0.120 asks for starlette>=0.40, 0.30 is installed" in finding.found
    others = {"pandas": ("2.0", ["dateutil>=3"]), "dateutil": ("2.8", [])}
    assert check_conflicts(packages(**others)).level is Level.OK
    mixed = {"pandas": ("2.0", ["dateutil>=3", "protobuf<7"]), "dateutil": ("2.8", [])}
    assert check_conflicts(packages(**mixed)).found == "pandas 2.0 asks for protobuf<7, 7.35.1 is installed"


def test_wishes_that_no_version_can_fulfil_get_another_remedy() -> None:
    finding = check_conflicts(packages(old=("1.0", ["protobuf<4"]), fastapi=("0.120", ["protobuf>=5"])))
    assert "no version suits all: protobuf for fastapi and jurybox and old" in finding.remedy
    assert "pip install --upgrade fastapi jurybox old" in finding.remedy


def test_what_pip_can_mend_comes_before_what_no_version_mends() -> None:
    finding = check_conflicts(packages(old=("1.0", ["protobuf<4"]), older=("1.0", ["numpy<2.1"])))
    assert finding.remedy.startswith(
        "pip install 'numpy<2.1,>=1.26'; no version suits all: protobuf for jurybox and old:"
    )
    alone = check_conflicts(packages(old=("1.0", ["protobuf<4"])))
    assert alone.remedy.startswith(
        "no version suits all: protobuf for jurybox and old: pip install --upgrade jurybox old"
    )


@pytest.mark.parametrize(("n", "rest"), [(4, ""), (5, "; and 1 more (pip check)")])
def test_of_many_conflicts_some_are_named_and_the_others_counted(n: int, rest: str) -> None:
    found = check_conflicts(packages(**{f"asker{i}": ("1.0", [f"numpy<2.{i}"]) for i in range(n)})).found
    assert found == "; ".join(f"asker{i} 1.0 asks for numpy<2.{i}, 2.4.0 is installed" for i in range(4)) + rest


def test_metadata_that_cannot_be_read_is_left_alone() -> None:
    broken = {"odd": ("not a version", ["what is this???"]), "asker": ("1", ["odd>=2"])}
    assert check_conflicts(packages(**broken)).level is Level.OK


@pytest.mark.runs  # pip looks for seconds
def test_it_finds_the_same_packages_as_pip() -> None:
    """On whatever is installed where this runs; pip looks at everything, the doctor at what Jurybox needs."""
    told = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    if told.returncode == 0:
        assert check_conflicts(installed()).level is Level.OK
    assert {"jurybox", "numpy", "protobuf"} <= set(installed())


def test_of_a_package_that_is_there_twice_the_first_counts_and_a_broken_one_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = [("Some.Package", "2", ["numpy"]), ("some-package", "1", None), (None, "3", None), ("other", "4", None)]
    made = [SimpleNamespace(metadata={"Name": name}, version=version, requires=asks) for name, version, asks in there]
    made.append(SimpleNamespace(metadata=None, version="5", requires=None))
    monkeypatch.setattr("jurybox.server.doctor.packages.distributions", lambda: made)
    assert {name: (one.name, one.version) for name, one in installed().items()} == {
        "some-package": ("Some.Package", "2"),
        "other": ("other", "4"),
    }


def test_what_cannot_be_compared_is_no_conflict_and_may_be_asked_for() -> None:
    assert check_conflicts(packages(protobuf=("not a version", []))).level is Level.OK
    assert check_conflicts(packages(old=("1.0", ["protobuf===odd"]))).remedy == "pip install 'protobuf===odd,>=4.25'"
