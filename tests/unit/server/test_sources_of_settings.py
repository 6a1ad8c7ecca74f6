"""Where a setting comes from: keys and values of files, variables and flags, and the place that a message names."""

from __future__ import annotations

from pathlib import Path

import pytest

from jurybox.protocol.errors import Refused
from jurybox.server.settings.config import InvalidConfig, load_settings, model_settings_from_json
from jurybox.server.settings.sources import Sources, parse_key, parse_value, shown

PHOTO = '[models.photo]\nfactory = "nets:photo"\n'
TOKEN = "0123456789abcdef"


def wrong(path: Path | None, *sets: str, **environ: str) -> list[str]:
    with pytest.raises(InvalidConfig) as caught:
        load_settings(path, sets, environ)
    return str(caught.value).splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.toml"
    path.write_text(PHOTO)
    return path


# ---- keys and values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("[1, 2]", [1, 2]),
        ("{a = 1}", {"a": 1}),
        ("text", "text"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
        ("1\n[table]", "1\n[table]"),
        ("'quoted'", "quoted"),
    ],
)
def test_a_value_is_one_value_of_toml_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("a", ("a",)),
        (" a . b ", ("a", "b")),
        ("a.\"b.c\".'d e'", ("a", "b.c", "d e")),
        ('a."".b', ("a", "", "b")),
        ("models.policy/agent0.rows", ("models", "policy/agent0", "rows")),
    ],
)
def test_a_key_has_parts_between_dots(text: str, key: tuple[str, ...]) -> None:
    assert parse_key(text) == key


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a..b", 'a."b', 'a"b', "a b=", 'a.b c.d"e'])
def test_what_is_no_key_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no dotted key, expected such as models\.photo\.max_batch"):
        parse_key(text)


def test_a_key_is_shown_as_a_file_has_it() -> None:
    assert shown(("models", "a-b_1", "policy/agent", "")) == 'models.a-b_1."policy/agent".""'


# ---- places


def test_a_value_is_in_its_own_place_or_in_that_of_the_table_around_it() -> None:
    sources = Sources()
    assert sources.place(("server", "http")) == "configuration"
    sources.put(("server", "args"), {"a": 1, "b": 2}, "the first")
    sources.put(("server", "args", "a"), 3, "the second")
    assert sources.place(("server", "args", "a")) == "the second"
    assert sources.place(("server", "args", "b", "c")) == "the first"
    assert sources.place(("server",)) == "the first" and sources.place(("models",)) == "configuration"
    sources.put(("server", "args"), {}, "the third")
    assert sources.place(("server", "args", "a")) == "the third", "what it replaced has no place any more"
    assert sources.tree == {"server": {"args": {}}}
    with pytest.raises(InvalidConfig, match=r"^the last: server\.args\.a is 7 at the fourth, expected a table$"):
        sources.put(("server", "args", "a"), 7, "the fourth")
        sources.put(("server", "args", "a", "b"), 8, "the last")


def test_the_line_of_a_file_is_that_of_the_statement_or_of_its_table(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('# first\n[server]\nreplicas = 2\n\n[models.a]\nfactory = """\nx:y"""\nargs.b = 1\n')
    sources = Sources()
    sources.add_file(path, ())
    keys = ("server", "server.replicas", "server.absent", "models.a", "models.a.factory", "models.a.args.b")
    lines = {key: int(sources.place(tuple(key.split("."))).removeprefix(f"{path}:")) for key in keys}
    assert lines == {
        "server": 2,
        "server.replicas": 3,
        "server.absent": 2,
        "models.a": 5,
        "models.a.factory": 6,
        "models.a.args.b": 8,
    }
    assert sources.place(("robots",)) == str(path)


def test_paths_of_a_file_are_relative_to_its_folder_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    path = tmp_path / "server.toml"
    path.write_text(
        "[server]\ntoken_file = 't'\nhttp = 'h'\n[models.a]\nweights = 'w'\nexported = '~/x'\nsave_dir = '/abs'\n"
        "python = 3\nfactory = 'f'\n[models.b]\n"
    )
    sources = Sources()
    sources.add_file(path, ("weights", "exported", "save_dir", "python"), ("token_file",))
    assert sources.tree["server"] == {"token_file": str(tmp_path / "t"), "http": "h"}
    assert sources.tree["models"]["a"] == {
        "weights": str(tmp_path / "w"),
        "exported": "/home/someone/x",
        "save_dir": "/abs",
        "python": 3,
        "factory": "f",
    }


@pytest.mark.parametrize("text", ["models = 3\n", "server = 3\n", "[models]\na = 3\n"])
def test_a_table_that_is_none_is_named_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "server.toml").write_text(text)
    (line,) = wrong(tmp_path / "server.toml")
    assert f"server.toml:{text.count(chr(10))}: " in line and "= 3: expected a table" in line


# ---- messages


def test_a_long_value_is_cut_and_a_short_one_is_not(file: Path) -> None:
    for length, told in ((78, repr("x" * 78)), (79, repr("x" * 79)[:80] + "...")):
        (line,) = wrong(file, f"server.http={'x' * length}")
        assert f"server.http = {told}: expected" in line


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("server.log_level=WARN", "did you mean 'warning'?"),
        ("server.log_level=x", "expected 'debug', 'info', 'warning' or 'error'"),
        ("server.host=h", '; expected http = "host:port", grpc = "host:port" or tcp = "host:port"'),
        ("models.photo.host=h", "models.photo.host: no such setting"),
        ("server.Replicas=3", "no such setting; did you mean 'replicas'?"),
        ("models.photo.replicas=3", "no such setting; it is a setting of [server]"),
        ("server.standby=1", "server.standby = 1: expected true or false"),
        ("models.photo=3", "expected server.KEY=VALUE or models.NAME.KEY=VALUE"),
        ("server=3", "expected server.KEY=VALUE or models.NAME.KEY=VALUE"),
        ("robots.arm=3", "expected robots.NAME.KEY=VALUE"),
        ("panels.members=3", "expected panels.NAME.KEY=VALUE"),
    ],
)
def test_a_wrong_flag_gets_the_hint_that_suits_it(file: Path, flag: str, said: str) -> None:
    (line,) = wrong(file, flag)
    assert line.startswith(f"--set {flag}: ") and said in line
    assert ("host" in flag and "server" in flag) == ('expected http = "host:port"' in line)


def test_the_value_of_a_flag_may_have_lines_and_equals_signs(file: Path) -> None:
    settings = load_settings(file, ["models.photo.args.text=a=b\nc", 'models.photo.args."x=y"=1'], {})
    assert settings.models["photo"].args == {"text": "a=b\nc", "x=y": 1}


def test_a_model_is_defined_by_flags_with_its_factory_or_its_program(tmp_path: Path) -> None:
    (tmp_path / "p.pt2").touch()
    inputs = 'models.b.inputs={x = {dtype = "float32"}}'
    settings = load_settings(None, ["models.a.factory=a:b", f"models.b.exported={tmp_path}/p.pt2", inputs], {})
    assert list(settings.models) == ["a", "b"]
    assert wrong(None, "models.a.rows=3") == ["--set models.a.rows=3: no model 'a' is configured"]


# ---- variables


def test_a_variable_is_empty_for_off_or_for_the_default(file: Path) -> None:
    path = file.with_name("more.toml")
    path.write_text(f"[server]\naddress = 'ipc:///run/x'\ntoken = '{TOKEN}'\nhttp = '127.0.0.1:1'\n{PHOTO}")
    path.chmod(0o600)
    server = load_settings(path, (), {"JURYBOX_ADDRESS": "", "JURYBOX_TOKEN": "", "JURYBOX_HTTP": ""}).server
    assert (server.address, server.secret_token(), server.http) == ("ipc:///run/x", TOKEN, "")


def test_a_token_of_a_variable_is_text_whatever_it_looks_like() -> None:
    for token in ("1234567890123456", '"0123456789abcdef"', "[0123456789,1234]"):
        assert load_settings(None, (), {"JURYBOX_TOKEN": token}).server.secret_token() == token


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("JURYBOX_SERVER_HTTP", "did you mean 'JURYBOX_HTTP'?"),
        ("JURYBOX_SERVERHTTP", "did you mean 'JURYBOX_HTTP'?"),
        ("JURYBOX_SHM_DIRS", "did you mean 'JURYBOX_SHM_DIR' or "),
        ("JURYBOX_MODELS__", "no model '' is configured"),
        ("JURYBOX_MODELS__PHOTO", "no model 'photo' is configured"),
        ("JURYBOX_MODELS__PHOTO__ARGS__", "expected JURYBOX_MODELS__NAME__KEY"),
    ],
)
def test_a_wrong_variable_gets_the_hint_that_suits_it(file: Path, variable: str, said: str) -> None:
    (line,) = wrong(file, **{variable: "1"})
    assert line.startswith(f"environment variable {variable}: ") and said in line


@pytest.mark.parametrize(
    "variable",
    ["JURYBOX_GATEWAY_SERVICE_HOST", "JURYBOX_SERVICE_PORT", "JURYBOX_SERVICE_PORT_HTTP", "JURYBOX_PORT_80_UDP",
     "JURYBOX_GATEWAY_PORT_80_TCP_PROTO", "JURYBOX_PORT_80_SCTP_ADDR", "NOT_JURYBOX_HTPP", "JURYBOX"],
)  # fmt: skip
def test_what_kubernetes_sets_for_a_service_is_no_setting(file: Path, variable: str) -> None:
    load_settings(file, (), {variable: "x"})


@pytest.mark.parametrize("variable", ["JURYBOX_PORT_80", "JURYBOX_PORT_80_ICMP", "JURYBOX_SERVICE_HOSTS"])
def test_what_only_looks_like_it_is_an_error(file: Path, variable: str) -> None:
    assert len(wrong(file, **{variable: "x"})) == 1


def test_the_longest_model_that_a_variable_may_mean_is_meant(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("".join(f'[models.{name}]\nfactory = "a:b"\n' for name in ("a", "a__b", "c-d")))
    environ = {"JURYBOX_MODELS__A__B__ROWS": "3", "JURYBOX_MODELS__C_D__ARGS__HIDDEN__SIZE": "5"}
    models = load_settings(path, (), environ).models
    assert (models["a__b"].rows, models["a"].rows, models["c-d"].args) == (3, 0, {"hidden": {"size": 5}})


def test_a_model_is_defined_by_variables_with_its_factory_or_its_program(tmp_path: Path) -> None:
    (tmp_path / "p.pt2").touch()
    environ = {
        "JURYBOX_MODELS__A__FACTORY": "a:b",
        "JURYBOX_MODELS__A__ROWS": "3",
        "JURYBOX_MODELS__B__EXPORTED": str(tmp_path / "p.pt2"),
        "JURYBOX_MODELS__B__INPUTS": '{x = {dtype = "float32"}}',
        "JURYBOX_MODELS__C__MAX_BATCH": "5",
    }
    models = load_settings(None, ["models.c.factory=a:b"], environ).models
    assert (models["a"].rows, sorted(models), models["c"].max_batch) == (3, ["a", "b", "c"], 5)


# ---- what a client sends


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a*", '{"factory": "a:b"}', "stands for several models: load them one by one"),
        ("a", '{"factory": "a:b", "count": 2}', "stands for several models: load them one by one"),
        ("a", "[", "settings of model 'a' are not JSON: "),
        ("a", '{"factory": "a:b", "rows": -1}', "load request: models.a.rows = -1: expected greater"),
    ],
)
def test_settings_of_a_client_are_named_by_its_request(name: str, text: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        model_settings_from_json(name, text)
    assert said in str(refused.value)
