"""The command line: its output, exit status, and imports."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner
from zmq import ZMQError

import jurybox.client
from jurybox.protocol.errors import ProtocolMismatch, ServerGone
from jurybox.protocol.revision import install_command
from jurybox.protocol.wire import PROTOCOL_VERSION, build_version
from jurybox.server.cli import main
from jurybox.server.commands import app as commands
from jurybox.server.commands.app import app
from jurybox.server.commands.show import Phrases, TextTable, duration
from jurybox.server.doctor import checks
from jurybox.server.doctor.host import Finding, Level

MODEL = '[models.photo]\nfactory = "nets:photo"\n'


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, list(arguments))


def in_a_process(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


@pytest.fixture
def served(monkeypatch) -> list[tuple[Any, bool]]:
    """What would have been served; the status it ends with is in `result`."""
    calls: list[tuple[Any, bool]] = []
    module = ModuleType("jurybox.server.supervisor.run")

    def run(settings: Any, *, dry_run: bool) -> int:
        calls.append((settings, dry_run))
        return 4

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jurybox.server.supervisor.run", module)
    return calls


def test_serve_hands_its_settings_on_and_ends_as_the_supervisor_did(run, served, tmp_path):
    (tmp_path / "server.toml").write_text(MODEL)
    arguments = ["--set", "models.photo.max_batch=8", "--set", "server.http=", "--log-format", "json", "--dry-run"]
    result = run("serve", str(tmp_path / "server.toml"), *arguments)
    assert result.exit_code == 4, result.output
    settings, dry_run = served[0]
    assert (settings.models["photo"].max_batch, settings.server.http, settings.server.log_format) == (8, "", "json")
    assert dry_run


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("", [], "no model is configured"),
        (
            MODEL + "max_bach = 1\n",
            [],
            "server.toml:3: models.photo.max_bach: no such setting; did you mean 'max_batch'",
        ),
        (MODEL, ["--set", "server.http=0.0.0.0:80"], "--insecure"),
        (MODEL, ["--set", "server.address=tcp://10.0.0.5:5555"], "--insecure"),
        (MODEL, ["--set", "server.replicas=0"], "--set server.replicas=0: server.replicas = 0: expected"),
    ],
)
def test_a_wrong_configuration_is_exit_status_2_and_nothing_is_served(run, served, tmp_path, text, arguments, said):
    (tmp_path / "server.toml").write_text(text)
    result = run("serve", str(tmp_path / "server.toml"), *arguments)
    assert (result.exit_code, served) == (2, [])
    assert said in result.stderr


def test_insecure_lets_others_in(run, served, tmp_path):
    (tmp_path / "server.toml").write_text(MODEL)
    assert run("serve", str(tmp_path / "server.toml"), "--insecure", "--set", "server.http=0.0.0.0:80").exit_code == 4


def test_without_torch_serve_says_what_to_install_and_starts_nothing(run, served, monkeypatch, tmp_path):
    (tmp_path / "server.toml").write_text(MODEL)
    find = commands.importlib.util.find_spec
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    result = run("serve", str(tmp_path / "server.toml"))
    assert (result.exit_code, served) == (2, [])
    assert "torch is not installed" in result.stderr
    assert install_command("server") in result.stderr


@pytest.mark.parametrize("arguments", [["serve", "--log-format", "xml"], ["serv"], ["status", "--jason"]])
def test_wrong_usage_is_exit_status_2(run, arguments):
    assert run(*arguments).exit_code == 2


def test_a_wrong_variable_stops_a_real_serve(tmp_path):
    (tmp_path / "server.toml").write_text(MODEL)
    done = subprocess.run(
        [sys.executable, "-m", "jurybox.server.cli", "serve", str(tmp_path / "server.toml")],
        capture_output=True, text=True, env={**os.environ, "JURYBOX_HTPP": "x"}, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "environment variable JURYBOX_HTPP: no such setting; did you mean 'JURYBOX_HTTP'" in done.stderr


@pytest.fixture
def server(monkeypatch, document) -> list[tuple[str, float]]:
    """A server with the status `document`; yields the addresses of connections."""
    calls: list[tuple[str, float]] = []

    class Connection:
        def __enter__(self) -> Connection:
            return self

        def __exit__(self, *_: object) -> None:
            calls.append(("closed", 0))

        def status(self) -> dict[str, Any]:
            return document

    def connect(address: str, timeout: float) -> Connection:
        calls.append((address, timeout))
        return Connection()

    monkeypatch.setattr(jurybox.client, "connect", connect)
    return calls


def test_status_shows_the_main_values(run, server, document):
    document["models"][0].update(name="policy/[red]agent", reason="out of memory")
    result = run("status", "--address", "ipc:///x/engine")
    assert (result.exit_code, server) == (0, [("ipc:///x/engine", 2.0), ("closed", 0)])
    for part in (
        "serving",
        "up 90 s",
        "128.0 MiB",
        "policy/[red]agent",
        "1000",
        "40.0",
        "100 us / 300 ms",
        "3 expired",
        "1 of 4",
        "2.5",
    ):
        assert part in result.output
    assert "policy/[red]agent: out of memory" in result.output
    assert result.output.count("policy/[red]agent") >= 3  # in the tables too: its name is no markup


def test_status_has_the_sessions_of_models_with_state(run, server, document):
    assert "sessions" not in run("status").output
    document["models"][0].update(sessions=7, session_state={"hidden": {"dtype": "float32", "shape": [4]}})
    assert ["photo", "7", "303"] in [line.split() for line in run("status").output.splitlines()]


def test_status_breaks_no_word_at_80_columns(run, server, document, monkeypatch):
    document["models"][0].update(requests=1_234_567_890, rows=12_345_678_901)
    monkeypatch.setattr("jurybox.server.commands.show.output", lambda: Console(width=80, highlight=False))
    output = run("status").output
    assert max(map(len, output.splitlines())) <= 80
    words = set(output.split())
    assert {"heartbeat", "requests", "waiting", "lanes", "errors", "queue", "forward", "request", "version"} <= words
    assert {"1234567890", "12345678901", "expected"} <= words


def test_status_names_every_door_of_the_gateway(run, server, document):
    assert "at ipc:///x/engine, http://127.0.0.1:8000, grpc://127.0.0.1:8001: serving, up 90 s" in run("status").output
    document["server"].update(grpc="", robots={"arm": "127.0.0.1:9000"}, dialects={"openai": "127.0.0.1:8002"})
    said = "http://127.0.0.1:8000, robots.arm at 127.0.0.1:9000, http://127.0.0.1:8002: serving"
    assert said in run("status").output and "grpc://" not in run("status").output


def test_status_tells_hung_engines_audits_every_error_and_the_lag_of_weights(run, server, document):
    def lines() -> list[list[str]]:
        return [line.split() for line in run("status").output.splitlines()]

    assert ["0", "serving", "42", "0", "100", "ms", "0", "us"] in lines()
    document["engines"][0].update(hung=True, heartbeat_age=None, restarts=3)
    document["models"][0].update(audit=True, failed=1, expired=2, refused=3, not_held=4, mean_batch=None)
    document["models"][0]["weights"].update(max_lag=0)
    assert ["0", "hung", "42", "3", "-", "0", "us"] in lines()
    errors = ["1", "failed,", "2", "expired,", "3", "refused,", "4", "not", "held"]
    assert ["photo", "(audit)", "ready", "1000", "4000", "-", "0", "2", *errors] in lines()
    assert ["photo", "5", "1", "2.5", "100", "us", "/", "300", "ms"] in lines()
    document["models"][0]["weights"].update(newest=0)
    document["models"][0].update(failed=0, expired=0, refused=0, not_held=0)
    assert not [line for line in lines() if line[:1] == ["weights"]]
    assert ["photo", "(audit)", "ready", "1000", "4000", "-", "0", "2", "-"] in lines()
    document["engines"].clear()
    assert not [line for line in lines() if line[:1] == ["engine"]]


@pytest.mark.parametrize(("command", "said"), [("sleep", "photo sleeps\n"), ("wake", "photo is awake\n")])
def test_a_model_sleeps_and_wakes(run, monkeypatch, command, said):
    calls: list[Any] = []

    class Moving:
        def __enter__(self) -> Moving:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda model, timeout: calls.append((name, model, timeout))

    monkeypatch.setattr(jurybox.client, "connect", lambda address, timeout: Moving())
    result = run(command, "photo")
    assert (result.exit_code, result.stdout, calls) == (0, said, [(command, "photo", 120.0)])


def test_an_address_that_zeromq_does_not_take_is_exit_status_2(run, monkeypatch):
    def connect(address: str, timeout: float) -> None:
        raise ZMQError(22, "Invalid argument")

    monkeypatch.setattr(jurybox.client, "connect", connect)
    result = run("status", "--address", "ipc://")
    assert result.exit_code == 2 and "'ipc://' is no address (Invalid argument): expected such as" in result.stderr


def printed(what: Any, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(what)
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize(("width", "lines"), [(11, ["aaaa   bbbb", "cc"]), (10, ["aaaa", "bbbb   cc"]), (3, None)])
def test_phrases_are_side_by_side_as_far_as_they_fit(width, lines):
    found = printed(Phrases(["aaaa", "bbbb", "cc"]), width)
    assert found == lines if lines else found[0] == "aaa"


@pytest.mark.parametrize(("width", "heads"), [(16, "name one two"), (15, "name two"), (11, "name two"), (10, "name")])
def test_a_table_leaves_out_its_spare_columns_one_after_another(width, heads):
    table = TextTable("name", ">one", "two", spare=("one", "two"))
    table.add("photo", "1", "2\n3333")
    assert printed(table, width)[0].split() == heads.split()


def test_numbers_are_right_aligned_and_long_names_folded():
    table = TextTable("model", ">rows")
    table.add("policy/agent", "12345")
    table.add("[red]a", "1")
    assert printed(table, 30) == ["model          rows", "policy/agent  12345", "[red]a            1"]
    assert printed(table, 13) == ["model    rows", "policy  12345", "/agent", "[red]a      1"]


def test_models_shows_specs_and_weights(run, server):
    output = run("models").output
    for part in ("photo", "ready", "image uint8[384, 384, 3]", "score float32[]", "303", "cafe v5"):
        assert part in output


def test_health_is_ready_or_exit_status_1_with_the_reasons(run, server, document):
    for model in document["models"]:
        model.update(state="ready", reason="")
    result = run("health")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "ready\n", "")
    document["models"][0].update(state="failed", reason="no such file")
    result = run("health")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"model '{document['models'][0]['name']}' is failed: no such file" in result.stderr


def test_json_is_the_document(run, server, document):
    assert json.loads(run("status", "--json").output) == document
    assert json.loads(run("models", "--json").output) == document["models"]


@pytest.mark.parametrize("error", [ServerGone("no answer from ipc:///x"), ProtocolMismatch("version 9 came")])
@pytest.mark.parametrize("command", ["status", "models", "health"])
def test_a_missing_server_is_a_message_and_exit_status_1(run, monkeypatch, command, error):
    def connect(address: str, timeout: float) -> None:
        raise error

    monkeypatch.setattr(jurybox.client, "connect", connect)
    result = run(command)
    assert (result.exit_code, result.stderr) == (1, f"jurybox: {error}\n")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nonsense", "expected ipc:///path, tcp://host:port"),
        ("tcp://127.0.0.1", "expected ipc:///path, tcp://host:port"),
        ("http://127.0.0.1:8000", '"grpc://127.0.0.1:8001"'),
        ("localhost:8000", '"grpc://127.0.0.1:8001"'),
    ],
)
def test_an_address_that_is_none_is_exit_status_2(run, address, said):
    result = run("status", "--address", address)
    assert result.exit_code == 2
    assert f"{address!r} is no address" in result.stderr and said in result.stderr
    assert result.stderr.count("is no address") == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.0, "0 us"), (2e-6, "2.0 us"), (0.0005, "500 us"), (0.0025, "2.5 ms"), (0.3, "300 ms"),
     (90.0, "90 s"), (600.0, "10 min"), (7200.0, "2.0 h"), (1e-3, "1.0 ms"), (9.94e-3, "9.9 ms"), (0.01, "10 ms"),
     (1.0, "1.0 s"), (119.0, "119 s"), (120.0, "2.0 min"), (7199.0, "120 min"), (86400.0, "24.0 h")],
)  # fmt: skip
def test_durations_are_in_the_unit_that_suits_them(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("level", "status"), [(Level.OK, 0), (Level.WARN, 0), (Level.FAIL, 1)])
def test_doctor_ends_with_1_where_a_server_could_not_run(run, monkeypatch, level, status):
    fixed: list[bool] = []

    def examine(*, fix: bool, config: object) -> list[Finding]:
        fixed.append(fix)
        return [Finding("memory", Level.OK, "much"), Finding("locks", level, "[none]", "buy some")]

    monkeypatch.setattr(checks, "examine", examine)
    result = run("doctor", "--fix")
    assert (result.exit_code, fixed) == (status, [True])
    assert f"{level.upper():<5}locks: [none]" in result.output
    assert "buy some" in result.output
    report = json.loads(run("doctor", "--json").output)
    assert report["ok"] == (status == 0)
    assert report["findings"][1] == {"subject": "locks", "level": level, "found": "[none]", "remedy": "buy some"}


def test_doctor_ends_with_1_and_says_why_where_the_settings_are_no_toml(run, tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text("[server\n")
    result = run("doctor", str(settings))
    assert result.exit_code == 1 and result.stderr.startswith(f"jurybox doctor: {settings}: ")
    assert isinstance(result.exception, SystemExit)


def test_a_server_that_is_interrupted_before_it_served_says_so(run, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_served", interrupted)
    (settings := tmp_path / "server.toml").write_text(MODEL)
    result = run("serve", str(settings))
    assert (result.exit_code, result.stderr) == (130, "jurybox serve: interrupted before it served\n")


def test_version_names_build_and_protocol(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.startswith(f"jurybox {build_version()} (protocol {PROTOCOL_VERSION}")


def test_no_command_shows_the_help(run):
    result = run()
    assert result.exit_code == 2
    assert all(name in result.output for name in ("serve", "status", "models", "doctor"))


def test_help_costs_neither_torch_nor_the_server():
    code = (
        "import sys, typer.testing\nfrom jurybox.server.commands.app import app\n"
        "result = typer.testing.CliRunner().invoke(app, ['--help'])\n"
        "heavy = ['torch', 'zmq', 'fastapi', 'stable_baselines3', 'gymnasium', 'jurybox.server.settings.config']\n"
        "print(result.exit_code, [name for name in heavy if name in sys.modules])"
    )
    assert in_a_process(code).stdout == "0 []\n"


def test_without_the_server_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None\nfrom jurybox.server.cli import main; main()"
    done = in_a_process(code)
    assert done.returncode == 2
    assert done.stderr.startswith("jurybox: typer is not installed")
    assert install_command("server") in done.stderr


@pytest.mark.parametrize(
    ("package", "remedy"),
    [("jurybox", install_command("training")), ("others", "pip install 'others'"), (None, "pip install 'its package'")],
)
def test_a_command_that_lacks_a_package_says_what_to_install(capsys, package, remedy):
    dist = package and SimpleNamespace(name=package)
    point = EntryPoint("train", "missing_of_ours:main", commands.GROUP)
    with pytest.raises(typer.Exit) as ended:
        commands.PluginCommand(point._for(dist)).load()
    said = capsys.readouterr().err.strip()
    assert (ended.value.exit_code, said) == (
        2,
        f"jurybox train: missing_of_ours is not installed. Install it with: {remedy}",
    )


def test_a_broken_install_of_our_own_is_not_taken_for_a_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jurybox.server.commands.app", None)
    with pytest.raises(ModuleNotFoundError):
        main()


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Installs a module with commands, and gives an application that has them."""

    def install(source: str, target: str, name: str = "train") -> typer.Typer:
        (tmp_path / "edges_plugin.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "edges_plugin", raising=False)
        points = [EntryPoint(name, f"edges_plugin:{target}", commands.GROUP)]
        monkeypatch.setattr(commands, "entry_points", lambda group: points if group == commands.GROUP else [])
        return app

    yield install
    sys.modules.pop("edges_plugin", None)


GROUP = '''"""Train a policy against a server.

More."""
import typer
train = typer.Typer()
@train.command()
def photo(steps: int = 1): typer.echo(f"trained {steps}")
'''


def test_a_group_of_commands_is_found_by_its_entry_point(plugin):
    app = plugin(GROUP, "train")
    result = CliRunner().invoke(app, ["train", "photo", "--steps", "7"])
    assert (result.exit_code, result.output) == (0, "trained 7\n")
    assert "photo" in CliRunner().invoke(app, ["train", "--help"]).output


def test_a_function_is_a_command(plugin):
    app = plugin("import typer\ndef peek(n: int = 1): typer.echo(f'peek {n}')\n", "peek", name="peek")
    assert CliRunner().invoke(app, ["peek", "--n", "3"]).output == "peek 3\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (GROUP, "Train a policy against a server."),
        (GROUP.replace("Typer()", "Typer(help='Learn.', no_args_is_help=True)"), "Learn."),
        ('"""Many commands."""\ndef train():\n    """Learn alone.\n\n    More."""\n', "Learn alone."),
        ("import no_such_package_anywhere\ntrain = 1\n", "From edges_plugin."),
        ("no python {", "From edges_plugin."),
    ],
)
def test_help_lists_a_plugin_without_importing_it(plugin, source, said):
    result = CliRunner().invoke(plugin(source, "train"), ["--help"])
    assert result.exit_code == 0
    assert said in result.output
    assert "edges_plugin" not in sys.modules


def test_a_misspelt_plugin_is_suggested(plugin):
    result = CliRunner().invoke(plugin(GROUP, "train"), ["trian"])
    assert result.exit_code == 2
    assert "'train'" in result.output


def test_the_error_of_a_plugin_without_its_packages_says_what_to_install(plugin):
    app = plugin("import no_such_package_anywhere\ntrain = None\n", "train")
    result = CliRunner().invoke(app, ["train"])
    assert result.exit_code == 2
    assert "jurybox train: no_such_package_anywhere is not installed. Install it with: pip install" in result.stderr


def test_no_plugin_takes_the_place_of_our_own_commands(plugin, tmp_path):
    app = plugin(GROUP, "train", name="doctor")
    assert "Check whether a server can run" in CliRunner().invoke(app, ["doctor", "--help"]).output
    assert "edges_plugin" not in sys.modules


def test_keys_are_made_and_never_replaced(run, tmp_path):
    made = run("keys", str(tmp_path / "server"))
    assert made.exit_code == 0
    assert "secret, keep it" in made.output
    secret = (tmp_path / "server.key_secret").read_text()
    assert secret.split('secret-key = "')[1][:40] not in made.output
    again = run("keys", str(tmp_path / "server"))
    assert again.exit_code == 1
    assert "exists: move it away" in again.output
    assert (tmp_path / "server.key_secret").read_text() == secret
