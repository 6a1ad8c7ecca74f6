"""Secrets: compared in constant time, read from private files only, shown nowhere."""

import base64
import json
import stat
from dataclasses import asdict

import pytest
from pydantic import SecretStr

from jurybox.server.security import access
from jurybox.server.security.access import Access, Token, make_pair, read_pair, read_secret
from jurybox.server.settings.config import Configuration, InvalidConfig, ServerSettings, load_settings, require_servable

SECRET = "0123456789abcdef-secret"
MODEL = '[models.photo]\nfactory = "a:b"\n'


def basic(text):
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("shown", [f"Bearer {SECRET}", f"bearer {SECRET} ", basic(f"anyone:{SECRET}")])
def test_a_token_opens(shown):
    assert Token(SECRET).is_shown_by(shown)


@pytest.mark.parametrize(
    "shown",
    [None, "", "Bearer", "Bearer ", f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}", SECRET, "Basic !!", basic(SECRET),
     basic(f"{SECRET}:"), "Bearer \udcff", f"Digest {SECRET}", "Basic /w=="],
)  # fmt: skip
def test_anything_else_does_not(shown):
    assert not Token(SECRET).is_shown_by(shown)


def test_tokens_are_compared_in_constant_time(monkeypatch):
    seen = []
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: seen.append((len(a), len(b))) or a == b)
    assert Token(SECRET).is_shown_by(f"Bearer {SECRET}")
    assert not Token(SECRET).is_shown_by("Bearer short")
    assert seen == [(32, 32), (32, 32)]  # of digests: not even the length shows


def test_a_secret_file_that_others_can_read_is_refused(tmp_path):
    file = tmp_path / "token"
    file.write_text(SECRET)
    for mode in (0o644, 0o604, 0o620, 0o666):
        file.chmod(mode)
        with pytest.raises(ValueError, match="others can get at the secret.*chmod 600"):
            read_secret(file)
    for mode in (0o600, 0o400, 0o640):
        file.chmod(mode)
        assert read_secret(file) == SECRET.encode()
    with pytest.raises(ValueError, match="no such file"):
        read_secret(tmp_path / "none")


def test_keys_are_made_for_their_owner_alone_and_never_over_others(tmp_path):
    public_file, secret_file, public = make_pair(tmp_path / "server")
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert read_pair(secret_file)[0] == public.encode()
    assert "secret-key" not in public_file.read_text()
    with pytest.raises(FileExistsError, match="exists: move it away"):
        make_pair(tmp_path / "server")
    with pytest.raises(ValueError, match="no pair"):
        public_file.chmod(0o600)
        read_pair(public_file)


def test_a_token_is_shown_nowhere(tmp_path, monkeypatch):
    settings = load_settings(None, [], {"JURYBOX_TOKEN": "12345678901234567890"}).server
    assert settings.secret_token() == "12345678901234567890"  # text, though it looks like a number
    for shown in (
        repr(settings),
        str(settings.model_dump(mode="json")),
        settings.model_dump_json(),
        repr(Access.of(settings)),
    ):
        assert "12345678901234567890" not in shown
    sent = json.loads(json.dumps(asdict(Access.of(settings))))  # to the gateway, over its control pipe
    assert Access(**sent).token.is_shown_by("Bearer 12345678901234567890")


@pytest.mark.parametrize(
    "text",
    [
        "[server]\ntoken = 1234567890123456789\n",
        "[server]\ntoken = ['topsecret-topsecret']\n",
        "[server]\ntoken = 'topsecret'\n",
    ],
)
def test_a_wrong_token_is_complained_about_without_naming_it(tmp_path, text):
    file = tmp_path / "server.toml"
    file.write_text(text + MODEL)
    file.chmod(0o600)
    with pytest.raises(InvalidConfig, match=r"server\.token") as caught:
        load_settings(file, [], {})
    assert "topsecret" not in str(caught.value)
    assert "123456789" not in str(caught.value)


def test_a_token_in_a_file_for_all_to_read_is_refused(tmp_path):
    file = tmp_path / "server.toml"
    file.write_text(f"[server]\ntoken = '{SECRET}'\n{MODEL}")
    file.chmod(0o644)
    with pytest.raises(InvalidConfig, match="a file that others can read"):
        load_settings(file, [], {})
    file.chmod(0o600)
    assert load_settings(file, [], {}).server.token == SecretStr(SECRET)


def test_a_token_on_the_command_line_is_refused_unseen():
    for flag in (f"server.token={SECRET}", f'"server".token = {SECRET}'):
        with pytest.raises(InvalidConfig, match="command line is there for every user") as caught:
            load_settings(None, [flag], {})
        assert SECRET not in str(caught.value)


def test_files_are_relative_to_the_configuration(tmp_path):
    make_pair(tmp_path / "server")
    (tmp_path / "token").write_text(SECRET)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "clients").mkdir()
    file = tmp_path / "server.toml"
    file.write_text(
        f"[server]\ntoken_file = 'token'\ncurve_key = 'server.key_secret'\ncurve_clients = 'clients'\n{MODEL}"
    )
    server = load_settings(file, [], {}).server
    assert server.secret_token() == SECRET
    assert server.curve_key == str(tmp_path / "server.key_secret")


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("token_file = 'nothing'", "token_file: .*nothing: there is no such file"),
        ("tls_cert = 'a'", "tls_cert and tls_key together"),
        ("tls_cert = 'a'\ntls_key = 'b'", r"tls_cert = .*no such file(.|\n)*tls_key: .*no such file"),
        ("curve_clients = 'x'", "without curve_key"),
        ("curve_key = 'x'", "curve_key: .*no such file"),
        ("address = 'tcp://127.0.0.1:5555'\ntcp = '127.0.0.1:5556'", "address is a tcp:// one and tcp came too"),
        ("max_message_mib = 0", "max_message_mib"),
    ],
)
def test_wrong_settings_are_named(tmp_path, server, says):
    file = tmp_path / "server.toml"
    file.write_text(f"[server]\n{server}\n{MODEL}")
    with pytest.raises(InvalidConfig, match=says):
        load_settings(file, [], {})


def test_a_tcp_address_leaves_an_address_for_clients_of_the_host():
    settings = ServerSettings.model_validate({"address": "tcp://127.0.0.1:5555"})
    assert settings.tcp == "127.0.0.1:5555"
    assert settings.address.startswith("ipc://")
    assert settings.address.endswith("/tcp-5555")


@pytest.mark.parametrize(
    ("server", "lacks"),
    [
        ({"http": "0.0.0.0:80"}, "server.token_file and server.tls_cert"),
        ({"http": "0.0.0.0:80", "token": SECRET}, "needs server.tls_cert"),
        ({"grpc": "[::]:81", "tls_cert": "a", "tls_key": "b"}, "needs server.token_file"),
        ({"tcp": "10.0.0.1:5555"}, "server.curve_key and server.curve_clients"),
        ({"tcp": "10.0.0.1:5555", "curve_key": "k"}, "server.curve_clients"),
        ({"address": "tcp://10.0.0.1:5555"}, "server.curve_clients"),
    ],
)
def test_a_transport_to_others_without_its_locks_is_refused(server, lacks):
    settings = Configuration.model_validate({"server": server, "models": {"a": {"factory": "a:b"}}})
    with pytest.raises(InvalidConfig, match=lacks) as caught:
        require_servable(settings, insecure=False)
    assert SECRET not in str(caught.value)
    require_servable(settings, insecure=True)


def test_a_transport_to_others_with_its_locks_opens():
    server = {
        "http": "0.0.0.0:80",
        "grpc": "0.0.0.0:81",
        "tcp": "0.0.0.0:82",
        "token": SECRET,
        "tls_cert": "a",
        "tls_key": "b",
        "curve_key": "c",
        "curve_clients": "d",
    }
    require_servable(
        Configuration.model_validate({"server": server, "models": {"a": {"factory": "a:b"}}}), insecure=False
    )
