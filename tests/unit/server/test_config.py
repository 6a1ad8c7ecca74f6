"""Settings: which source wins, what a wrong one is called, and what the automatic ones become."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jurybox.protocol.errors import Refused
from jurybox.server.settings import server_settings
from jurybox.server.settings.config import (
    Configuration,
    InvalidConfig,
    ModelSettings,
    ServerSettings,
    load_settings,
    model_settings_from_json,
    require_servable,
)
from jurybox.server.settings.sources import parse_key, parse_value

PHOTO = '[models.photo]\nfactory = "nets:photo"\n'
AGENT = '[models."policy/agent0"]\nfactory = "nets:agent"\n'


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "server.toml"
        path.write_text(text)
        return path

    return write


def wrong(path: Path | None, sets: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> str:
    with pytest.raises(InvalidConfig) as caught:
        load_settings(path, sets, environ or {})
    return str(caught.value)


def test_defaults_serve_on_loopback_over_ipc(monkeypatch):
    monkeypatch.delenv("JURYBOX_ADDRESS", raising=False)
    settings = load_settings(None, (), {})
    assert settings.server.address.startswith("ipc://")
    assert (settings.server.http, settings.server.grpc) == ("127.0.0.1:8000", "127.0.0.1:8001")
    assert settings.models == {}


def test_command_line_beats_environment_beats_file_beats_default(write):
    path = write('[server]\nreplicas = 2\nthreads = 2\nhttp = "127.0.0.1:1"\n')
    environ = {"JURYBOX_REPLICAS": "3", "JURYBOX_THREADS": "3"}
    server = load_settings(path, ["server.replicas=4"], environ).server
    assert (server.replicas, server.threads, server.http, server.max_restarts) == (4, 3, "127.0.0.1:1", 5)


def test_a_models_setting_has_a_variable_for_any_model_name(write):
    path = write(PHOTO + AGENT)
    environ = {
        "JURYBOX_MODELS__PHOTO__MAX_BATCH": "8",
        "JURYBOX_MODELS__POLICY_AGENT0__MAX_BATCH": "16",
        "JURYBOX_MODELS__POLICY_AGENT0__ARGS__HIDDEN": "512",
        "JURYBOX_MODELS__PHOTO__CHANNELS_LAST": "true",
    }
    models = load_settings(path, (), environ).models
    assert (models["photo"].max_batch, models["photo"].channels_last) == (8, True)
    assert (models["policy/agent0"].max_batch, models["policy/agent0"].args) == (16, {"hidden": 512})


def test_a_model_can_come_from_variables_or_flags_alone():
    environ = {"JURYBOX_MODELS__TOY__FACTORY": "nets:toy", "JURYBOX_MODELS__PHOTO__ROWS": "256"}
    models = load_settings(None, ['models."photo".factory=nets:photo'], environ).models
    assert models["toy"].factory == "nets:toy"
    assert (models["photo"].factory, models["photo"].rows) == ("nets:photo", 256)


@pytest.mark.parametrize("key", ['models."policy/agent0".max_batch', "models.policy/agent0.max_batch"])
def test_a_name_with_a_slash_can_be_set_with_quotes_or_after_the_shell_took_them(write, key):
    assert load_settings(write(AGENT), [f"{key}=8"], {}).models["policy/agent0"].max_batch == 8


def test_a_dotted_name_is_quoted():
    assert parse_key('models."siglip.v2".rows') == ("models", "siglip.v2", "rows")
    for bad in ("models..rows", "models.", ".rows", 'models."photo'):
        with pytest.raises(ValueError, match="no dotted key"):
            parse_key(bad)


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("0.5", 0.5), ("true", True), ('["cpu"]', ["cpu"]), ('"x"', "x"), ("{a = 1}", {"a": 1}),
     ("info", "info"), ("127.0.0.1:8000", "127.0.0.1:8000"), ("", ""), ("1\nx = 2", "1\nx = 2")],
)  # fmt: skip
def test_values_are_parsed_as_toml_or_kept_as_text(text, value):
    assert parse_value(text) == value


def test_a_table_that_is_set_replaces_the_files(write):
    path = write(PHOTO + "args = {a = 1}\n")
    assert load_settings(path, ["models.photo.args={b = 2}"], {}).models["photo"].args == {"b": 2}
    assert load_settings(path, ["models.photo.args.b=2"], {}).models["photo"].args == {"a": 1, "b": 2}


def test_an_empty_address_variable_means_the_default_as_it_does_to_clients(write):
    path = write('[server]\naddress = "ipc:///run/x/engine"\n')
    assert load_settings(path, (), {"JURYBOX_ADDRESS": ""}).server.address == "ipc:///run/x/engine"
    assert load_settings(path, (), {"JURYBOX_HTTP": ""}).server.http == ""


def test_files_of_models_are_found_beside_the_file_that_names_them(write, tmp_path, monkeypatch):
    (tmp_path / "net.pt2").touch()
    (tmp_path / "net.safetensors").touch()
    path = write('[models.a]\nexported = "net.pt2"\nweights = "net.safetensors"\n')
    monkeypatch.chdir("/")
    model = load_settings(path, (), {}).models["a"]
    assert (model.exported, model.weights) == (str(tmp_path / "net.pt2"), str(tmp_path / "net.safetensors"))


def test_a_star_matches_numbered_models(write, tmp_path):
    star = '[models."policy/agent*"]\nfactory = "nets:agent"\npublish = "double_buffer"\ncount = 3\nsave_dir = "kept"\n'
    models = load_settings(write(star + PHOTO), ['models."policy/agent*".max_batch=8'], {}).models
    assert list(models) == ["policy/agent0", "policy/agent1", "policy/agent2", "photo"]
    assert (models["policy/agent2"].max_batch, models["policy/agent2"].save_dir) == (8, str(tmp_path / "kept"))
    assert load_settings(write(star), ['models."policy/agent*".count=12'], {}).models.keys() > {"policy/agent11"}


def test_variables_of_others_are_left_alone():
    environ = {
        "JURYBOX_SHM_DIR": "/dev/shm",
        "JURYBOX_REVISION": "abc",
        "JURYBOX_SERVICE_HOST": "10.0.0.1",  # what Kubernetes sets for a service of that name
        "JURYBOX_PORT_8000_TCP_ADDR": "10.0.0.1",
        "JURYBOX_PORT": "tcp://10.0.0.1:8000",
        "PATH": "/bin",
    }
    assert load_settings(None, (), environ).server.replicas == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\n\nhtpp = 'x'\n", ":3: server.htpp: no such setting; did you mean 'http'?"),
        ("[server]\nreplicas = 100\n", ":2: server.replicas = 100: expected less than or equal to 64"),
        ("[server]\nreplicas = '1'\n", ":2: server.replicas = '1': expected an integer"),
        ("[server]\nhttp = 8000\n", ":2: server.http = 8000: expected a string"),
        ("[server]\nhttp = 'localhost'\n", """:2: server.http = 'localhost': expected "host:port","""),
        ("[server]\naddress = 'ipc://engine'\n", ":2: server.address = 'ipc://engine': expected an absolute path"),
        ("[server]\naddress = 'udp://x:1'\n", 'expected "ipc:///absolute/path" or "tcp://host:port"'),
        ("[server]\naddress = 'tcp://x:0'\n", "expected a port of 1 to 65535"),
        ("[server]\naddress = 'tcp://x'\n", 'expected "tcp://host:port", such as "tcp://10.0.0.5:5555"'),
        (f"[server]\naddress = 'ipc:///{'a' * 110}'\n", "at most 104 bytes"),
        ("[server]\nlog_level = 'INFO'\n", ":2: server.log_level = 'INFO': expected 'debug', 'info', 'warning' or "),
        ("[server]\nlog_level = 'INFO'\n", "did you mean 'info'?"),
        ("[server]\ndevices = ['gpu']\n", """:2: server.devices = ['gpu']: 'gpu' is no device, expected "auto","""),
        ("[server]\ndevices = ['cpu', 'cpu']\n", "named twice: for several engines on one device raise 'replicas'"),
        ("[server]\nstart_timeout = nan\n", ":2: server.start_timeout = nan: expected"),
        ("[server]\nhttp = 'localhost:1'\ngrpc = 'localhost:1'\n", "expected two ports"),
        ("[server]\ndevices = ['cpu', 'cuda']\nreplicas = 64\n", "makes 128 engines, expected at most 64"),
        ("[sever]\n", ":1: sever: no such setting; did you mean 'server'?"),
        ("# a server\nmodels = 3\n", ":2: models = 3: expected a table"),
        (PHOTO + "max_bach = 8\n", ":3: models.photo.max_bach: no such setting; did you mean 'max_batch'"),
        (PHOTO + "http = 'x'\n", ":3: models.photo.http: no such setting; it is a setting of [server]"),
        ("[server]\nmax_batch = 8\n", ":2: server.max_batch: no such setting; it is a setting of [models.NAME]"),
        ("[model.photo]\nfactory = 'a:b'\n", ":1: model: no such setting; did you mean 'models'?"),
        ("http = 'x'\n", ":1: http: no such setting; it is a setting of [server]"),
        ("timeout = 1\n", ":1: timeout: no such setting; there are: dialects, models, panels, robots, server"),
        ("[server]\nport = 8000\n", """:2: server.port: no such setting; expected http = "host:port","""),
        (PHOTO + "input = {}\n", ":3: models.photo.input: no such setting; did you mean 'inputs'?"),
        (PHOTO + "[dialects.trl]\nmodel = 'photo'\n", ":3: [dialects.trl] speaks 'trl', expected speaks = one of"),
        (PHOTO + "\n[dialects.slime]\nmodel = 'foto'\n", ":4: [dialects.slime] is bound to model 'foto', which is not"),
        (PHOTO + "[panels.photo]\nmembers = {photo = 1.0}\n", ":3: [panels.photo]: a model has that name, too"),
        (PHOTO + "[robots.arm]\nmodel = 'x'\nlisten = 'a:1'\n", ":3: robots.arm.model = 'x' is not configured"),
        (PHOTO + "rows = 1\n[robots.arm]\nmodel = 'photo'\nlisten = 'a:1'\n", ":1: models.photo.rows = 1, expected at"),
        (PHOTO + "[robots.arm]\nmodel = 'photo'\nlisten = '127.0.0.1:8000'\n", "toml: '127.0.0.1:8000' is listened on"),
        *(
            (
                PHOTO + f"[robots.arm]\nmodel = 'photo'\nlisten = '127.0.0.1:1'\nspeaks = 'gr00t'\nmetadata = {each}\n",
                f"metadata.{kind}: expected tables video, state, action, language with ",
            )
            for kind, each in (("sound", "{sound = {}}"), ("state", "{state = 3}"), ("state", "{state = {keys = []}}"))
        ),
        (PHOTO + "channels_last = 1\n", ":3: models.photo.channels_last = 1: expected true or false"),
        (PHOTO + "min_batch = 8\nmax_batch = 4\n", ":1: models.photo: min_batch = 8, expected at most max_batch = 4"),
        (PHOTO + "min_batch = 8\n", "min_batch = 8 is never waited for, expected max_wait_us above 0 with it"),
        (PHOTO + "rows = 8\nlane_rows = 9\n", "lane_rows = 9, expected at most rows = 8"),
        (PHOTO + "args = {day = 2020-01-01}\n", ":3: models.photo.args.day = datetime.date(2020, 1, 1): expected a st"),
        (PHOTO + "exported = 'x.pt2'\n", ":1: models.photo: expected either factory"),
        (PHOTO + "inputs = {x = {dtype = 'float32'}}\n", "a factory says its own"),
        ("[models.photo]\nrows = 8\n", ":1: models.photo: expected either factory = "),
        ("[models.photo]\nfactory = 'nets.photo'\n", """:2: models.photo.factory = 'nets.photo': expected "mod"""),
        ("[models.a]\nexported = 'x.pt2'\nargs = {a = 1}\n", "an exported model takes none"),
        ("[models.a]\nexported = 'x.pt2'\ninputs = {x = {dtype = 'float31'}}\n", "dtype = 'float31': expected one of"),
        ("[models.a]\nexported = 'x.pt2'\ninputs = {x = {dtype = 'int8', shap = [1]}}\n", "did you mean 'shape'?"),
        ("[models.a]\nexported = 'x.pt2'\ninputs = {x = {dtype = 'int8', shape = [0]}}\n", "has a size below 1"),
        (PHOTO + "max_lag = 3\n", ":1: models.photo: max_lag is for models that take publications, expected publish"),
        (PHOTO + "save_dir = 'x'\n", "save_dir is for models that take publications, expected publish with it"),
        (PHOTO + "group = 'g'\ncompile = true\n", "compile is for models that are served by themselves, expected none"),
        ("[models.'a*']\nfactory = 'a:b'\n", "expected count with a star in the name and the other way round, got 'a"),
        ("[models.'a*']\nfactory = 'a:b'\ncount = 2\n[models.a1]\nfactory = 'a:b'\n", "'a1' is named twice, by its"),
        (PHOTO + "count = 3\n", "expected count with a star in the name and the other way round, got 'photo'"),
        ("[models.'a*']\nfactory = 'a:b'\ncount = 129\n", "count = 129 of 'a*', expected 1 to 128"),
        ("[models.'a*']\nfactory = 'a:b'\ncount = 2\nrows = -1\n", "models.a1.rows = -1: expected"),
        ("[models.'a/versions/1']\nfactory = 'a:b'\n", "over HTTP that names a version of another model"),
        ("[models.'../up']\nfactory = 'a:b'\n", ''':1: models."../up": expected a name of letters'''),
        ("[models.a]\nexported = 'absent.pt2'\n", "absent.pt2': there is no such file"),
        ("[models.a\n", ":1: not TOML"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_its_line_and_what_was_expected(write, text, message):
    path = write(text)
    said = wrong(path)
    assert message in said
    assert said.startswith(str(path))


def test_a_model_may_be_called_like_a_setting(write):
    assert "did you mean 'max_batch'" in wrong(write("[models.weights]\nfactory = 'a:b'\nmax_bach = 1\n"))


def test_lines_are_found_behind_values_that_span_several(write):
    text = '[server]\ndevices = [\n  "cpu",\n]\n# threads = 1\nlog_level = """\\\n  info"""\n\nthreads = -1\n'
    assert wrong(write(text)).startswith(f"{write(text)}:9: server.threads = -1")
    assert wrong(write(text.replace('"cpu"', '"gpu"').replace("-1", "1"))).startswith(f"{write('')}:2: server.devices")


def test_every_wrong_setting_is_named_at_once(write):
    said = wrong(write("[server]\nreplicas = 0\n" + PHOTO + "rows = -1\n"), ["models.photo.max_batch=0"])
    assert [line.split(" ")[0].rpartition(":")[0][-1] for line in said.splitlines()[:1]] == ["2"]
    assert len(said.splitlines()) == 3
    assert "--set models.photo.max_batch=0: models.photo.max_batch = 0: expected greater than or equal to 1" in said


def test_wrong_flags_and_variables_hide_neither_each_other_nor_the_file(write):
    sets = ["model.photo.rows=3", "htpp=3", "models.photo.max_batch.x=1", "server.replicas=2"]
    environ = {"JURYBOX_HTPP": "x", "JURYBOX_MODELS__FOTO__ROWS": "1"}
    said = wrong(write(PHOTO + "max_bach = 3\nmax_batch = 4\n"), sets, environ).splitlines()
    for begin in [*(f"--set {text}: " for text in sets[:3]), *(f"environment variable {name}: " for name in environ)]:
        assert sum(line.startswith(begin) for line in said) == 1, begin
    assert sum("server.toml:3: models.photo.max_bach" in line for line in said) == 1
    assert len(said) == 6
    assert wrong(write(PHOTO), ["htpp=3"], {"JURYBOX_HTPP": "x"}).count("\n") == 1


def test_every_table_can_be_set_on_the_command_line(write):
    text = PHOTO + '[dialects.slime]\nmodel = "photo"\n[panels.jury]\nmembers = {photo = 1.0}\n'
    sets = ["dialects.slime.model=jury", "panels.jury.members.photo=0.5", "robots.arm.model=photo"]
    settings = load_settings(write(text), [*sets, "robots.arm.listen=127.0.0.1:0"], {})
    assert settings.dialects["slime"].model == "jury"
    assert settings.panels["jury"].members["photo"].weight == 0.5
    assert settings.robots["arm"].model == "photo"


def test_a_wrong_value_is_blamed_on_the_source_that_won(write):
    path = write("[server]\nreplicas = 0\n")
    environ = {"JURYBOX_REPLICAS": "none"}
    assert wrong(path, (), environ).startswith("environment variable JURYBOX_REPLICAS: server.replicas = 'none'")
    assert wrong(path, ["server.replicas=-1"], environ).startswith("--set server.replicas=-1: server.replicas = -1")


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("JURYBOX_HTPP", "did you mean 'JURYBOX_HTTP'"),
        ("JURYBOX_SERVER__HTTP", "did you mean 'JURYBOX_HTTP'"),
        ("JURYBOX_MODELS_PHOTO_ROWS", "a model's setting is JURYBOX_MODELS__NAME__KEY"),
        ("JURYBOX_MODELS__FOTO__ROWS", "no model 'foto' is configured; did you mean 'photo'?"),
        ("JURYBOX_MODELS__PHOTO__ROWZ", "a model has no setting 'rowz'; did you mean 'rows'"),
        ("JURYBOX_MODELS__PHOTO__", "expected JURYBOX_MODELS__NAME__KEY"),
        ("JURYBOX_MODELS__A_B__ROWS", "could be any of the models 'a-b', 'a_b'"),
    ],
)
def test_a_misspelt_variable_is_an_error_and_not_ignored(write, variable, message):
    path = write(PHOTO + '[models.a-b]\nfactory = "a:b"\n[models.a_b]\nfactory = "a:b"\n')
    said = wrong(path, (), {variable: "1"})
    assert said.startswith(f"environment variable {variable}: ")
    assert message in said


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("server.http", "expected KEY=VALUE"),
        ("http=x", "no such table 'http'; did you mean 'server.http'?"),
        ("model.photo.rows=1", "no such table 'model'; did you mean 'models'?"),
        ("models.photo=1", "expected server.KEY=VALUE or models.NAME.KEY=VALUE"),
        ("models.photo.max_batch.x=1", "models.photo.max_batch is 4 at"),
        ("models.foto.max_batch=1", "no model 'foto' is configured; did you mean 'photo'?"),
        ("htpp=3", "no such table 'htpp'; did you mean 'server.http'?"),
        ("max_batch=3", "no such table 'max_batch'; did you mean 'models.NAME.max_batch'?"),
        ("dialects.slime=1", "expected dialects.NAME.KEY=VALUE"),
        ("server.'http=1", "expected KEY=VALUE"),
        ("server..http=1", "server..http=1: "),
    ],
)
def test_a_wrong_flag_is_named(write, flag, message):
    said = wrong(write(PHOTO + "max_batch = 4\n"), [flag])
    assert said.startswith(f"--set {flag}: ")
    assert message in said


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert "no.toml: cannot be read: No such file" in wrong(tmp_path / "no.toml")
    assert "cannot be read: Is a directory" in wrong(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in wrong(tmp_path / "binary.toml")


def test_serving_nothing_is_refused_with_an_example():
    with pytest.raises(InvalidConfig, match=r'no model is configured(.|\n)*\[models.photo\]\nfactory = "'):
        require_servable(Configuration(), insecure=False)


@pytest.mark.parametrize(
    "server",
    [{"http": "0.0.0.0:8000"}, {"http": "[::]:8000"}, {"grpc": "myhost:8001"}, {"tcp": "10.0.0.5:5555"}],
)
def test_other_hosts_are_allowed_only_with_insecure(server):
    settings = Configuration.model_validate({"server": server, "models": {"a": {"factory": "a:b"}}})
    with pytest.raises(InvalidConfig, match=r"--insecure") as caught:
        require_servable(settings, insecure=False)
    assert next(iter(server.values())) in str(caught.value)
    require_servable(settings, insecure=True)


@pytest.mark.parametrize("http", ["127.0.0.1:0", "127.1.2.3:80", "[::1]:8000", "localhost:8000", ""])
def test_loopback_needs_no_flag(http):
    settings = Configuration.model_validate({"server": {"http": http}, "models": {"a": {"factory": "a:b"}}})
    require_servable(settings, insecure=False)


def model(**settings: object) -> ModelSettings:
    return ModelSettings.model_validate({"factory": "a:b", **settings})


def test_an_arena_has_as_many_rows_as_fit_in_128_mib_within_bounds():
    assert model().resolve_rows(128 << 10) == 1024
    assert model().resolve_rows(64) == 4096  # small rows: enough is enough
    assert model(max_batch=64).resolve_rows(384 * 384 * 3) == 303
    assert model(max_batch=64).resolve_rows(1 << 30) == 128  # large ones: two batches at least
    assert model(max_batch=4096).resolve_rows(64) == 8192
    assert model(rows=7).resolve_rows(64) == 7


def test_a_lane_has_few_enough_rows_for_a_crowd_to_find_room():
    assert model().resolve_lane_rows(384 * 384 * 3) == 2
    assert model().resolve_lane_rows(64) == 32
    assert model().resolve_lane_rows(1 << 30) == 1
    assert model(rows=2).resolve_lane_rows(64) == 1  # never more than there are
    assert model(lane_rows=500).resolve_lane_rows(64) == 500


def test_every_device_gets_its_replicas(monkeypatch):
    assert ServerSettings(devices=["cuda:0", "cpu"], replicas=2).engine_devices() == ["cuda:0", "cuda:0", "cpu", "cpu"]
    monkeypatch.setattr(server_settings, "visible_cuda_devices", lambda: 2)
    assert ServerSettings().engine_devices() == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(server_settings, "visible_cuda_devices", lambda: 0)
    assert ServerSettings().engine_devices() == ["cpu"]


def test_more_engines_than_a_server_has_are_refused(monkeypatch):
    monkeypatch.setattr(server_settings, "visible_cuda_devices", lambda: 8)
    with pytest.raises(Refused, match=r"replicas = 16 on 8 devices makes 128 engines"):
        ServerSettings(replicas=16).engine_devices()


def test_engines_share_half_the_cores(monkeypatch):
    monkeypatch.setattr(server_settings.os, "sched_getaffinity", lambda _: set(range(16)))
    assert ServerSettings(devices=["cpu"]).engine_threads() == 8
    assert ServerSettings(devices=["cpu"], replicas=3).engine_threads() == 2
    assert ServerSettings(devices=["cpu"], replicas=64).engine_threads() == 1
    assert ServerSettings(devices=["cpu"], replicas=64, threads=3).engine_threads() == 3


@pytest.mark.parametrize("text", ["cpu", '["cpu"]', "cuda:0,cuda:1"])
def test_devices_may_be_one_string(text):
    devices = load_settings(None, [f"server.devices={text}"], {}).server.devices
    assert devices in (["cpu"], ["cuda:0", "cuda:1"])


def test_settings_survive_their_way_to_an_engine_as_json():
    settings = model(args={"hidden": 512, "sizes": [1, 2.5, None]}, weights="/w.safetensors", publish="snapshot")
    assert ModelSettings.model_validate(json.loads(json.dumps(settings.model_dump(mode="json")))) == settings


def test_settings_of_a_load_request_are_checked_like_the_files():
    assert model_settings_from_json("a", '{"factory": "a:b", "max_batch": 8}').max_batch == 8
    for name, text, message in (
        ("a", "{", "not JSON"),
        ("a", "3", "expected a table"),
        ("a", '{"factory": "a:b", "max_bach": 8}', "did you mean 'max_batch'"),
        ("../a", '{"factory": "a:b"}', "expected a name"),
    ):
        with pytest.raises(Refused, match=message):
            model_settings_from_json(name, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[dialects.x]\nmodel = "photo"\n', r"\[dialects.x\] speaks 'x', expected speaks = one of flow_grpo, "),
        ('[dialects.slime]\nmodel = "phot"\n', "bound to model 'phot', which is not configured"),
        ('[server]\nhttp = ""\n[dialects.slime]\nmodel = "photo"\n', "spoken over HTTP"),
        ('[server]\nhttp = "0.0.0.0:1"\n[dialects.flow_grpo]\nmodel = "photo"\n', "takes pickles, .* is open to other"),
        ('[dialects.slime]\nmodel = "photo"\nresize = [3]\n', r"expected \[height, width\]"),
        *(
            (f'[dialects.slime]\nmodel = "photo"\nscore_range = {each}\n', r"expected \[lowest, highest\]")
            for each in ("[1.0]", "[1.0, 1.0]", "[2.0, 1.0]")
        ),
        ('[dialects.slime]\nmodel = "photo"\nmodell = "x"\n', "no such setting; did you mean 'model'"),
        ('[dialects."a/b"]\nmodel = "photo"\n', "expected a name of letters"),
        ("[dialects.slime]\n", "dialects.slime.model: is missing"),
        ('[dialects.slime]\nmodel = "photo"\nport = 70000\n', "dialects.slime.port"),
        ('[dialects.slime]\nmodel = "photo"\nport = 8000\n', "'127.0.0.1:8000' is listened on twice"),
        ('[dialects.flow_grpo]\nmodel = "photo"\nport = 1\nhost = "0.0.0.0"\n', "dialects.flow_grpo.host = .* is open"),
        ("dialects = 3\n", "expected a table"),
    ],
)
def test_a_wrong_dialect_is_an_error_that_says_what_was_expected(write, text, message):
    import re

    before, server, rest = text.partition("[dialects") if not text.startswith("dialects") else (text, "", "")
    assert re.search(message, wrong(write(before + PHOTO + server + rest)))


def test_a_dialect_that_takes_pickles_may_be_opened_on_purpose(write):
    opened = (
        '[server]\nhttp = "0.0.0.0:1"\n'
        + PHOTO
        + '[dialects.flow_grpo]\nmodel = "photo"\npickles_from_elsewhere = true\n'
    )
    assert load_settings(write(opened), (), {}).dialects["flow_grpo"].pickles_from_elsewhere


@pytest.mark.parametrize(
    ("setting", "speaks"),
    [("like = 'sglang'", "slime"), ("score_range = [0, 1]", "openrlhf"), ("decimals = 2", "nemo_gym"),
     ("pickles_from_elsewhere = true", "reward_model")],
)  # fmt: skip
def test_a_setting_that_a_dialect_does_not_use_is_refused(write, setting, speaks):
    with pytest.raises(InvalidConfig, match=f"speaks '{speaks}', which does not use {setting.split()[0]}"):
        load_settings(write(f'[models.m]\nfactory = "a:b"\n[dialects.{speaks}]\nmodel = "m"\n{setting}\n'), (), {})


def test_a_dialects_port_that_others_reach_needs_a_token_and_tls(write):
    settings = load_settings(write(PHOTO + '[dialects.slime]\nmodel = "photo"\nport = 1\nhost = "0.0.0.0"\n'), (), {})
    with pytest.raises(
        InvalidConfig, match=r'dialects.slime.host = "0.0.0.0:1" needs server.token_file and server.tls'
    ):
        require_servable(settings, insecure=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[panels.a]\nmembers = {phot = 1}\n", "has the member 'phot', which is no configured model"),
        ("[panels.photo]\nmembers = {photo = 1}\n", "a model has that name, too"),
        ("[panels.a]\nmembers = {score = {weight = 1, model = 'photo'}}\n", "is the total's name"),
        ("[panels.a]\nmembers = {}\n", "panels.a.members"),
        ("[panels.a]\nmembers = {photo = nan}\n", "panels.a.members.photo"),
        ("[panels.a]\nmembers = {photo = true}\n", "panels.a.members.photo"),
        ("[panels.a]\nmembers = {photo = {weigth = 1}}\n", "panels.a.members.photo"),
    ],
)
def test_a_wrong_panel_is_an_error_that_says_what_was_expected(write, text, message):
    assert message in wrong(write(PHOTO + text))


def test_a_panel_may_be_bound_to_a_dialect(write):
    text = PHOTO + "[panels.a]\nmembers = {photo = 2}\n[dialects.slime]\nmodel = 'a'\n"
    settings = load_settings(write(text), (), {})
    assert settings.plain_panels() == {"a": {"photo": {"weight": 2.0, "model": "photo", "output": None}}}
    assert settings.plain_dialects()["slime"]["members"] == {"photo": 2.0}


ROBOT = PHOTO + '\n[robots.arm]\nmodel = "{model}"\nlisten = "{listen}"\n'


def test_a_port_for_robots_has_its_own_model_and_address(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text(ROBOT.format(model="photo", listen="127.0.0.1:8002"))
    assert load_settings(path, ["robots.arm.clients=3"], {}).robots["arm"].clients == 3
    for model, listen, wrong in (
        ("foto", "127.0.0.1:8002", "robots.arm.model = 'foto' is not configured; there are: photo"),
        ("photo", "127.0.0.1:8000", "'127.0.0.1:8000' is listened on twice"),
        ("photo", "8002", 'expected "host:port"'),
        ("photo", "", 'expected "host:port"'),
    ):
        path.write_text(ROBOT.format(model=model, listen=listen))
        with pytest.raises(InvalidConfig, match=re.escape(wrong)):
            load_settings(path, (), {})


def test_a_robots_port_that_others_reach_needs_a_token_and_tls(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text(ROBOT.format(model="photo", listen="0.0.0.0:8002"))
    settings = load_settings(path, (), {})
    needs = 'robots.arm.listen = "0.0.0.0:8002" needs server.token_file and server.tls_cert'
    with pytest.raises(InvalidConfig, match=re.escape(needs)):
        require_servable(settings, insecure=False)
    require_servable(settings, insecure=True)


SHARED = """
[models.photo]
factory = "a:b"
max_batch = 8
rows = {rows}
lane_rows = 32
[panels.taste]
members = {{photo = 1, again = {{weight = 2, model = "photo"}}}}
[dialects.slime]
model = "photo"
[dialects.unirl]
model = "taste"
[robots.arm]
model = "photo"
listen = "127.0.0.1:8002"
clients = 5
"""


def test_a_model_with_too_few_rows_for_all_lanes_is_an_error_with_the_number_to_set(write):
    """Three lanes of 32, the robots' 5, the gateway's two batches of 8."""
    message = wrong(write(SHARED.format(rows=116)))
    assert "models.photo.rows = 116, expected at least 117" in message
    assert "dialects.slime, dialects.unirl, dialects.unirl, robots.arm keep a lane" in message
    assert load_settings(write(SHARED.format(rows=117)), (), {}).models["photo"].resolve_rows(1) == 117


def test_a_configured_model_that_is_loaded_with_settings_has_rows_for_all_lanes_too(write):
    configured = load_settings(write(SHARED.format(rows=117)), (), {}).models["photo"]
    given = {"factory": "a:b", "max_batch": 8, "lane_rows": 32}
    loaded = model_settings_from_json("photo", json.dumps(given), configured)
    assert loaded.resolve_rows(1 << 30) == 117
    assert model_settings_from_json("another", json.dumps(given)).resolve_rows(1 << 30) == 32
    with pytest.raises(Refused, match=r"models.photo.rows = 116, expected at least 117: .* keep a lane"):
        model_settings_from_json("photo", json.dumps({**given, "rows": 116}), configured)


def test_the_default_rows_of_a_model_with_state_are_enough_for_every_client_of_its_robots(write):
    text = PHOTO + '[robots.arm]\nmodel = "photo"\nlisten = "127.0.0.1:8002"\nclients = 500\n'
    settings = load_settings(write(text), (), {}).models["photo"]
    rows = settings.resolve_rows(1 << 30, state=True)
    assert rows - rows // 2 == 500  # the gateway's lane has at most half
    assert settings.resolve_rows(1 << 30) == 128  # without state, robots share rows


def test_the_default_rows_are_enough_for_all_lanes(write):
    text = PHOTO + "".join(f'[dialects.d{n}]\nspeaks = "slime"\nmodel = "photo"\n' for n in range(100))
    settings = load_settings(write(text), (), {}).models["photo"]
    # One of each dialect's, and half for the gateway.
    assert settings.resolve_rows(1 << 30) == 199 and settings.resolve_lane_rows(1 << 30) == 1
