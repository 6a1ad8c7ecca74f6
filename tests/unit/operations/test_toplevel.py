"""`import jurybox` has what a newcomer tries first, and imports nothing that is not asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import jurybox
from jurybox.client import connect
from jurybox.protocol.wire import build_version

if getattr(jurybox, "__file__", None) is None:
    pytest.skip("this installation is from before `jurybox` was a package: install again", allow_module_level=True)


def test_it_has_the_version_and_the_client():
    assert jurybox.__version__ == build_version() and jurybox.connect is connect
    assert dir(jurybox) == ["__version__", "connect"]
    with pytest.raises(AttributeError, match="no attribute 'conect': it has connect and __version__"):
        jurybox.conect  # noqa: B018


def test_importing_it_imports_nothing_else():
    line = "import sys, jurybox; print(sorted(name for name in sys.modules if name.startswith(('jurybox', 'numpy'))))"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['jurybox']"
