"""Which files of the start folder are named as standing in the way of modules, and which are left alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType

import pytest

from jurybox.server.shadows import NamingShadows, shadowing

Imported = Callable[..., Path]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Imported:
    """Put a file into the start folder, as a module that was imported from there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, *, package: bool = False, folder: Path = tmp_path) -> Path:
        file = folder / name / "__init__.py" if package else folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        module = ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
        return file

    return put


@pytest.mark.parametrize("package", [False, True])
@pytest.mark.parametrize(
    ("name", "whose"),
    [("colorsys", "Python's"), ("triton", "an installed"), ("numpy", "an installed")],
    ids=["of Python", "that torch looks for", "installed"],
)
def test_a_file_that_was_imported_in_place_of_another_module_is_named(
    imported: Imported, name: str, whose: str, package: bool
) -> None:
    file = imported(name, package=package)
    assert shadowing() == [
        f"{file} stands in the way of {whose} module {name!r}, which other code imports: rename it, or start the "
        "server in another folder"
    ]


def test_all_such_files_are_named_in_the_order_of_their_names_and_a_users_own_modules_are_not(
    imported: Imported, tmp_path: Path
) -> None:
    imported("my_own_models")
    wave, colorsys = imported("wave"), imported("colorsys")
    for name in ("sched.py", "code"):  # not imported
        (tmp_path / name).write_text("")
    assert [sentence.partition(" stands ")[0] for sentence in shadowing()] == [str(colorsys), str(wave)]


def test_a_module_from_another_folder_is_not_named_although_there_is_a_file_of_its_name(
    imported: Imported, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    imported("colorsys", folder=elsewhere)
    (tmp_path / "colorsys.py").write_text("")
    assert shadowing() == []


def test_the_current_folder_is_no_place_where_another_module_of_that_name_is_found(
    imported: Imported, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported("my_own_models")
    monkeypatch.syspath_prepend("")
    assert shadowing() == []


def test_a_start_folder_that_is_gone_has_no_files_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getcwd", lambda: str(tmp_path / "gone"))
    assert shadowing() == []


def failing(file: Path, text: str) -> TracebackType | None:
    """The traceback of code in a file."""
    try:
        exec(compile(text, str(file), "exec"), {})
    except RuntimeError as error:
        return error.__traceback__
    return None


def test_a_file_whose_import_has_failed_is_named_by_the_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It's in no list of modules any more."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sched.py"
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    (sentence,) = shadowing(failing(file, "raise RuntimeError('no module for others')"))
    assert sentence.startswith(f"{file} stands in the way of Python's module 'sched'")
    assert shadowing() == []


def test_the_end_of_imports_prints_what_stands_in_the_way_and_raises_what_was_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "sched", raising=False)
    with NamingShadows() as naming:
        assert isinstance(naming, NamingShadows)
    assert capsys.readouterr().err == ""
    with pytest.raises(RuntimeError, match="no module for others"), NamingShadows():
        exec(compile("raise RuntimeError('no module for others')", str(tmp_path / "sched.py"), "exec"), {})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{tmp_path}/sched.py stands in the way of ")
