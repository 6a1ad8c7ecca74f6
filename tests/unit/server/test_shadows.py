"""A file of the start folder in place of a module: the first line of a process that fails for it names the file."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("child", "name"),
    [("engine", "random"), ("engine", "json"), ("engine", "zmq"), ("gateway", "random"), ("relay", "zmq")],
)
def test_a_file_in_place_of_a_module_that_the_process_imports_is_named_first(tmp_path, child, name):
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is no module for others')\n")
    done = subprocess.run(
        [sys.executable, "-m", f"jurybox.server.{child}", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode
    if "this is no module" in done.stderr:  # nothing is said of a file that it does not import
        first = done.stderr.splitlines()[0]
        assert first.startswith(f"{tmp_path}/{name}.py stands in the way of "), done.stderr
        assert f"module '{name}'" in first and "rename it" in first
    else:
        assert "stands in the way" not in done.stderr


def test_of_the_files_there_only_those_are_named_that_were_imported_in_place_of_others(tmp_path):
    for name in ("test", "my_models", "code", "wave"):
        (tmp_path / f"{name}.py").write_text("VALUE = 1\n")
    (tmp_path / "colorsys").mkdir()
    (tmp_path / "colorsys" / "__init__.py").write_text("VALUE = 1\n")
    imports = "import my_models, wave, colorsys; from jurybox.server.shadows import shadowing"
    script = f"{imports}; print(*shadowing(), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    named = [sentence.partition(" stands in the way of ")[0] for sentence in done.stdout.splitlines()]
    assert named == [f"{tmp_path}/colorsys/__init__.py", f"{tmp_path}/wave.py"], done.stderr
