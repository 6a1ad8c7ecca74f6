"""Checks across the tables of a configuration: models by number, interpreters, panels, dialects, robots and ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from jurybox.protocol.errors import Refused
from jurybox.protocol.scoreboard import MAX_MODELS
from jurybox.server.settings import config, server_settings
from jurybox.server.settings.config import Configuration, InvalidConfig, load_settings, require_servable
from jurybox.server.settings.model_settings import EngineSettings

MODEL = {"factory": "a:b"}
TOKEN = "0123456789abcdef"


def configured(**tables: Any) -> Configuration:
    return Configuration.model_validate({"models": {"m": MODEL}, **tables})


def refused(**tables: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        configured(**tables)
    return "\n".join(error["msg"] for error in caught.value.errors())


# ---- models by number


def test_numbered_models_are_as_many_as_count_says_and_share_nothing() -> None:
    models = configured(models={"a*b": {**MODEL, "count": 3}, "c*": {**MODEL, "count": 1}, "m": MODEL}).models
    assert list(models) == ["a0b", "a1b", "a2b", "c0", "m"] and models["a0b"] == models["m"]
    assert len(configured(models={"a*": {**MODEL, "count": MAX_MODELS}}).models) == MAX_MODELS


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ({"a*": {**MODEL, "count": 0}}, "count = 0 of 'a*', expected 1 to 128"),
        ({"a*": {**MODEL, "count": True}}, "count = True of 'a*', expected 1 to 128"),
        ({"a*": {**MODEL, "count": "2"}}, "count = '2' of 'a*', expected 1 to 128"),
        ({"a*": {**MODEL, "count": 129}}, "count = 129 of 'a*', expected 1 to 128"),
        ({"a**": {**MODEL, "count": 2}}, "expected count with a star in the name and the other way round, got 'a**'"),
        ({"a*": MODEL}, "got 'a*'"),
        ({"a": {**MODEL, "count": 2}}, "got 'a'"),
        ({"a*": 3}, "got 'a*'"),
        ({"a*": {**MODEL, "count": 2}, "a1": MODEL}, "'a1' is named twice, by itself and by 'a*'"),
        ({"a1*": {**MODEL, "count": 2}, "a*": {**MODEL, "count": 11}}, "'a10' is named twice, by itself and by 'a*'"),
        ({f"m{n}": MODEL for n in range(MAX_MODELS + 1)}, "at most 128"),
    ],
)
def test_models_that_cannot_be_numbered_are_refused(models: dict[str, Any], said: str) -> None:
    assert said in refused(models=models)


# ---- interpreters


def test_models_of_a_group_have_one_interpreter_and_others_their_own() -> None:
    models = {"a": {**MODEL, "python": "/p"}, "b": MODEL, "c": {**MODEL, "group": "g"}, "d": {**MODEL, "group": "g"}}
    assert configured(models=models).pythons() == ["/p"]
    models["d"] = {**models["d"], "python": "/p"}
    assert refused(models=models) == (
        "models 'c' and 'd' of group 'g' have python = None and '/p': one engine computes a group, expected the same"
    )


def test_every_interpreter_has_an_engine_on_each_device_with_its_share_of_the_memory() -> None:
    models = {
        "a": {**MODEL, "python": "/p"},
        "b": {**MODEL, "python": "/q", "gpu_memory_fraction": 0.25},
        "c": {**MODEL, "python": "/q"},
        "d": MODEL,
    }
    server = {"devices": ["cpu", "cuda:1"], "replicas": 2, "gpu_memory_fraction": 0.5}
    assert configured(models=models, server=server).engines() == [
        *(EngineSettings(device, "", 0.5) for device in ("cpu", "cpu", "cuda:1", "cuda:1")),
        *(EngineSettings(device, "/p", 0.5) for device in ("cpu", "cuda:1")),
        *(EngineSettings(device, "/q", 0.25) for device in ("cpu", "cuda:1")),
    ]
    models["c"] = {**models["c"], "gpu_memory_fraction": 0.3}
    assert "models of python = '/q' have gpu_memory_fraction = [0.25, 0.3]" in refused(models=models)


@pytest.mark.parametrize(("interpreters", "fits"), [(2, True), (3, False)])
def test_a_server_has_at_most_64_engines_with_those_of_interpreters(interpreters: int, fits: bool) -> None:
    models = {f"m{n}": {**MODEL, "python": f"/p{n}"} for n in range(interpreters)}
    settings = configured(models=models, server={"devices": ["cpu"], "replicas": 62})
    if fits:
        assert len(settings.engines()) == 64
    else:
        with pytest.raises(
            Refused, match="62 engines, and those of 3 other interpreters, make 65, expected at most 64"
        ):
            settings.engines()


# ---- panels


@pytest.mark.parametrize(
    ("name", "members", "said"),
    [
        ("m", {"m": 1.0}, "[panels.m]: a model has that name, too"),
        ("p", {"score": {"weight": 1.0, "model": "m"}}, "[panels.p] has a member 'score', which is the total's name"),
        ("p", {"x": 1.0}, "[panels.p] has the member 'x', which is no configured model"),
        ("p", {"m": {"weight": 1.0, "model": "x"}}, "[panels.p] has the member 'x', which is no configured model"),
    ],
)
def test_a_wrong_panel_is_named(name: str, members: dict[str, Any], said: str) -> None:
    assert said in refused(panels={name: {"members": members}})


def test_panels_and_dialects_are_told_to_the_gateway_in_plain_values() -> None:
    members = {"m": 2.0, "again": {"weight": 0.5, "model": "m", "output": "style"}}
    settings = configured(
        panels={"p": {"members": members}},
        dialects={"slime": {"model": "p"}, "own": {"speaks": "slime", "model": "m", "port": 4000}},
        robots={"arm": {"model": "m", "listen": "127.0.0.1:4001"}},
        server={"http": "127.0.0.1:80", "grpc": "", "tcp": "127.0.0.1:81"},
    )
    plain = settings.plain_panels()["p"]
    assert {name: (one["weight"], one["model"], one["output"]) for name, one in plain.items()} == {
        "m": (2.0, "m", None),
        "again": (0.5, "m", "style"),
    }
    dialects = settings.plain_dialects()
    assert {name: (one["model"], one["members"]) for name, one in dialects.items()} == {
        "slime": ("p", {"m": 2.0, "again": 0.5}),
        "own": ("m", {}),
    }
    assert settings.doors() == {
        "http": "127.0.0.1:80",
        "grpc": "",
        "tcp": "127.0.0.1:81",
        "robots": {"arm": "127.0.0.1:4001"},
        "dialects": {"own": "127.0.0.1:4000"},
    }
    assert settings.models["m"].holders.dialects == ["slime", "slime", "own"]
    assert settings.models["m"].holders.robots == {"arm": settings.robots["arm"].clients}
    assert settings.folder == ""


# ---- dialects


def test_a_dialect_needs_http_or_a_port_of_its_own() -> None:
    off = {"http": "", "grpc": ""}
    assert "is spoken over HTTP" in refused(server=off, dialects={"slime": {"model": "m"}})
    assert configured(server=off, dialects={"slime": {"model": "m", "port": 4000}}).doors()["dialects"]


@pytest.mark.parametrize(
    ("server", "dialect", "named"),
    [
        ({"http": "0.0.0.0:80"}, {}, "server.http"),
        ({"http": "0.0.0.0:80"}, {"pickles_from_elsewhere": True}, ""),
        ({"http": "127.0.0.1:80"}, {}, ""),
        ({"http": "127.0.0.1:80"}, {"port": 5, "host": "10.0.0.1"}, "dialects.flow_grpo.host"),
        ({"http": ""}, {"port": 5, "host": "::1"}, ""),
    ],
)
def test_pickles_from_other_hosts_are_taken_on_purpose_alone(
    server: dict[str, Any], dialect: dict[str, Any], named: str
) -> None:
    tables = {"server": server, "dialects": {"flow_grpo": {"model": "m", **dialect}}}
    if named:
        assert f"[dialects.flow_grpo] takes pickles, and {named} = " in refused(**tables)
    else:
        configured(**tables)
    configured(server={"http": "0.0.0.0:80"}, dialects={"slime": {"model": "m"}})


# ---- robots and ports


@pytest.mark.parametrize("guard", [{"token": TOKEN}, {"tls_cert": "c", "tls_key": "k"}])
def test_robots_without_a_token_beside_a_guarded_server_are_let_in_on_purpose_alone(guard: dict[str, str]) -> None:
    robot = {"model": "m", "listen": "127.0.0.1:5", "speaks": "lerobot"}
    assert "robots.arm: clients of 'lerobot' have neither token nor TLS" in refused(server=guard, robots={"arm": robot})
    configured(server=guard, robots={"arm": {**robot, "unprotected": True}})
    configured(robots={"arm": robot})
    configured(server=guard, robots={"arm": {**robot, "speaks": "openpi"}})


def test_a_port_is_listened_on_once_and_a_free_one_by_any_number() -> None:
    robots = {name: {"model": "m", "listen": "127.0.0.1:0"} for name in ("a", "b")}
    configured(robots=robots, server={"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "tcp": "127.0.0.1:0"})
    for server in ({"tcp": "127.0.0.1:7"}, {"grpc": "127.0.0.1:7"}, {"http": "127.0.0.1:7"}):
        robots["b"]["listen"] = "127.0.0.1:7"
        assert "'127.0.0.1:7' is listened on twice" in refused(robots=robots, server=server)


def test_ports_that_others_reach_are_named_with_what_they_lack() -> None:
    robots = {
        "plain": {"model": "m", "listen": "0.0.0.0:1", "speaks": "gr00t"},
        "near": {"model": "m", "listen": "127.0.0.1:2", "speaks": "gr00t"},
        "meant": {"model": "m", "listen": "0.0.0.0:3", "speaks": "gr00t", "unprotected": True},
        "secured": {"model": "m", "listen": "0.0.0.0:4", "speaks": "openpi"},
    }
    dialects = {"slime": {"model": "m", "port": 5, "host": "0.0.0.0"}}
    found = configured(robots=robots, dialects=dialects, server={"http": "0.0.0.0:6"}).open_transports()
    both = "needs server.token_file and server.tls_cert"
    assert found == [
        f'server.http = "0.0.0.0:6" {both}',
        f'robots.secured.listen = "0.0.0.0:4" {both}',
        f'dialects.slime.host = "0.0.0.0:5" {both}',
        'robots.plain.listen = "0.0.0.0:1": its clients have no TLS; use a tunnel to loopback, or set unprotected = '
        "true",
    ]


# ---- what is served


@pytest.mark.parametrize("setting", ["factories", "remote_factories"])
def test_a_server_without_models_serves_if_clients_may_load_some(setting: str) -> None:
    require_servable(Configuration.model_validate({"server": {setting: ["a:b"]}}), insecure=False)


@pytest.mark.parametrize(
    ("devices", "cuda", "there", "said"),
    [
        (["cuda:0"], False, 0, "the torch that is installed here has no CUDA"),
        (["cuda:0", "cuda:2"], True, 2, "cuda:2 is not here, cuda:0, cuda:1 are there"),
        (["cuda"], True, 0, "cuda is not here, no CUDA device is visible"),
        (["cuda", "cpu"], True, 1, ""),
        (["cpu"], False, 0, ""),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], cuda: bool, there: int, said: str
) -> None:
    monkeypatch.setattr(server_settings, "torch_has_cuda", lambda: cuda)
    monkeypatch.setattr(server_settings, "visible_cuda_devices", lambda: there)
    settings = configured(server={"devices": devices})
    if not said:
        require_servable(settings, insecure=False)
        return
    with pytest.raises(InvalidConfig) as caught:
        require_servable(settings, insecure=True)
    assert said in str(caught.value)


def test_the_folder_of_a_configuration_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.toml").write_text('[models.m]\nfactory = "a:b"\n')
    monkeypatch.chdir(tmp_path)
    assert load_settings(Path("server.toml"), (), {}).folder == str(tmp_path.resolve())
    assert load_settings(None, (), {}).folder == ""


def test_a_token_is_looked_for_in_the_file_that_names_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('[models.m]\nfactory = "a:b"\n')
    path.chmod(0o644)
    assert load_settings(path, (), {"JURYBOX_TOKEN": TOKEN}).server.secret_token() == TOKEN
    path.write_text(f'[server]\ntoken = "{TOKEN}"\n')
    assert load_settings(path, (), {"JURYBOX_TOKEN": TOKEN[::-1]}).server.secret_token() == TOKEN[::-1]
    with pytest.raises(InvalidConfig, match=r"^server\.token is in a file that others can read: .* mode 0644"):
        load_settings(path, (), {})


def test_files_that_are_not_there_and_broken_secrets_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('[server]\ntoken_file = "t"\n[models.m]\nfactory = "a:b"\nweights = "w"\n')
    with pytest.raises(InvalidConfig) as caught:
        load_settings(path, (), {"JURYBOX_HTPP": "x"})
    variable, weights, token = str(caught.value).splitlines()
    assert variable.startswith("environment variable JURYBOX_HTPP: ")
    assert weights == f"{path}:5: models.m.weights = '{tmp_path}/w': there is no such file"
    assert token == f"server.token_file: {tmp_path}/t: there is no such file"


def test_variables_are_those_of_this_process_if_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.os, "environ", {"JURYBOX_REPLICAS": "3"})
    assert load_settings(None).server.replicas == 3
    assert load_settings(None, (), {}).server.replicas == 1
