"""The command line on an interpreter that only clients support."""

from __future__ import annotations

import pytest

from jurybox.server import cli


def test_an_interpreter_without_servers_is_told_so_before_anything_is_imported(monkeypatch, capsys):
    monkeypatch.setattr(cli.sys, "version_info", (3, 10, 14))
    monkeypatch.setitem(cli.sys.modules, "jurybox.server.commands.app", None)  # importing it would raise
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("jurybox: this is Python 3.10, which only clients support; ") and said.endswith("newer.\n")
