"""Secrets: compared in constant time, read from private files only, shown nowhere."""

import base64
import json
import stat
from dataclasses import asdict

import pytest
from pydantic import SecretStr

from jurybox.server.security import access
from jurybox.server.security.access import (
    Access,
    ClientConnection,
    SecuritySettings,
    Token,
    make_pair,
    public_keys,
    read_pair,
    read_secret,
)
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


@pytest.mark.parametrize(
    ("prefix", "why"),
    [
        ("", None),
        ("robots_1.-", None),
        ("x" * 100, None),
        ("jury", "the server's own memory"),
        ("jurybox-", "the server's own memory"),
        ("jurybox-mine", "the server's own memory"),
        ("x" * 101, "expected a prefix"),
        ("a/b", "expected a prefix"),
        ("\u00e9", "expected a prefix"),
        ("a\n", "expected a prefix"),
    ],
)
def test_a_prefix_of_clients_memory_is_never_one_of_the_servers_own(prefix, why):
    if why is None:
        assert SecuritySettings(shared_memory_prefix=prefix).shared_memory_prefix == prefix
    else:
        with pytest.raises(ValueError, match=why):
            SecuritySettings(shared_memory_prefix=prefix)


def test_a_secret_has_a_limit_and_a_token_a_least_length(tmp_path):
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_bytes(b"x" * (1 << 20))
    assert len(read_secret(file)) == 1 << 20
    file.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="is larger than 1 MiB"):
        read_secret(file)
    file.write_text("0123456789abcdef\n")
    assert SecuritySettings(token_file=str(file)).secret_token() == "0123456789abcdef"
    for wrong in ("0123456789abcde", "0123456789 abcdef", "0123456789\tabcdef"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="at least 16 printable ASCII characters"):
            SecuritySettings(token_file=str(file)).secret_token()
    file.write_bytes(b"0123456789abcdef\xff")
    with pytest.raises(ValueError, match="contains non-ASCII characters"):
        SecuritySettings(token_file=str(file)).secret_token()


def test_settings_that_contradict_each_other_are_refused():
    for wrong, why in (
        ({"token": SECRET, "token_file": "x"}, "both set"),
        ({"tls_cert": "x"}, "tls_cert and tls_key together"),
        ({"tls_key": "x"}, "tls_cert and tls_key together"),
        ({"curve_clients": "x"}, "without curve_key"),
        ({"max_message_mib": 0}, "greater than or equal to 1"),
        ({"max_message_mib": 1025}, "less than or equal to 1024"),
    ):
        with pytest.raises(ValueError, match=why):
            SecuritySettings(**wrong)


@pytest.mark.parametrize(
    ("given", "guarded"),
    [
        ({}, False),
        ({"token": SECRET}, True),
        ({"token_file": "x"}, True),
        ({"tls_cert": "x", "tls_key": "y"}, True),
        ({"curve_key": "x"}, False),
    ],
)
def test_a_token_or_tls_guards_the_gateway(given, guarded):
    assert SecuritySettings(**given).guarded == guarded


def test_ports_that_others_reach_lack_what_is_not_set():
    ports = {
        "server.http": "0.0.0.0:80",
        "server.grpc": "127.0.0.1:81",
        "server.tcp": "[::1]:82",
        "robots.arm.listen": "",
    }
    assert SecuritySettings().lacking(ports) == [
        'server.http = "0.0.0.0:80" needs server.token_file and server.tls_cert'
    ]
    assert SecuritySettings(token=SECRET).lacking(ports) == ['server.http = "0.0.0.0:80" needs server.tls_cert']
    assert SecuritySettings(token=SECRET, tls_cert="x", tls_key="y").lacking(ports) == []


def test_the_gateway_gets_its_part_of_the_settings_and_the_limits_in_bytes(tmp_path):
    (tmp_path / "key").touch(0o600)
    (tmp_path / "key").write_bytes(b"the key")
    (tmp_path / "cert").write_bytes(b"the chain")
    files = {"tls_cert": str(tmp_path / "cert"), "tls_key": str(tmp_path / "key")}
    settings = SecuritySettings(
        token=SECRET, max_message_mib=3, shared_memory_prefix="r", cuda_shared_memory=True, **files
    )
    made = Access.of(settings)
    assert made == Access(SECRET, files["tls_cert"], files["tls_key"], 3 << 20, "r", cuda_shared_memory=True)
    assert made.tls() == (b"the key", b"the chain")
    assert made.token.is_shown_by(f"Bearer {SECRET}")
    assert (Access().tls(), Access().token) == (None, None)
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ValueError, match="others can get at the secret"):
        made.tls()


@pytest.mark.parametrize(
    ("peer", "near"),
    [
        (None, True),
        ("", True),
        ("/run/socket", True),
        (("127.0.0.1", 5), True),
        (("::1", 5, 0, 0), True),
        (("::ffff:127.0.0.1", 5, 0, 0), True),
        (("192.0.2.1", 5), False),
        (("::ffff:192.0.2.1", 5, 0, 0), False),
        (("no address", 5), False),
    ],
)
def test_a_client_of_this_host_is_near(peer, near):
    made = ClientConnection(peer)
    assert (made.near, made.answered, made.quick) == (near, 0.0, False)


def test_keys_of_clients_are_the_public_ones_of_a_folder(tmp_path):
    for name in ("b", "a"):
        make_pair(tmp_path / name)
    assert public_keys(tmp_path) == [tmp_path / "a.key", tmp_path / "b.key"]
    (tmp_path / "a.key").chmod(0o600)
    with pytest.raises(ValueError, match="holds no pair of keys"):
        read_pair(tmp_path / "a.key")
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600 for name in ("a.key_secret", "b.key_secret"))
    assert stat.S_IMODE((tmp_path / "b.key").stat().st_mode) & 0o600 == 0o600
