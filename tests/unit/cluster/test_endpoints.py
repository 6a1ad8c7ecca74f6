"""The folder of endpoints, and the run's folders: what processes without Ray know of engines and files elsewhere."""

from __future__ import annotations

import contextlib
import ssl
import stat
import time
from dataclasses import replace

import pytest
from tests.unit.studies.hockey.hockey_runs import settings

from jurybox.client import Refused, ServerGone
from jurybox.cluster import endpoints
from jurybox.cluster.host import Folders
from jurybox.studies.hockey.train import plan, train
from jurybox.training.runtime.plan import ConfigError


@pytest.fixture
def endpoint() -> endpoints.Endpoint:
    return endpoints.Endpoint(
        "hockey", "1", endpoints.this_machine(), "ipc:///tmp/nobody", "grpcs://10.0.0.1:1", "secret", "PEM"
    )


def answers(holds, seconds: float = 10.0) -> bool:
    """Return whether the condition holds within so many seconds."""
    until = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < until:
        time.sleep(0.05)
    return bool(held)


def test_the_newest_entry_of_the_registry_counts_and_only_its_owner_reads_it(tmp_path, endpoint):
    assert endpoints.find(tmp_path, "hockey") is None
    endpoints.show(tmp_path, 1, endpoint)
    endpoints.show(tmp_path, 2, replace(endpoint, life="2"))
    endpoints.show(tmp_path, 1, replace(endpoint, name="other"))
    assert endpoints.find(tmp_path, "hockey") == replace(endpoint, life="2")
    assert {stat.S_IMODE(page.stat().st_mode) for page in tmp_path.iterdir()} == {0o600}
    endpoints.clear(tmp_path, "hockey")
    assert endpoints.find(tmp_path, "hockey") is None and endpoints.find(tmp_path, "other") is not None


def test_clients_with_shared_memory_use_it_and_others_the_network(tmp_path, monkeypatch, endpoint):
    assert endpoint.is_local and endpoint.address == "ipc:///tmp/nobody"
    monkeypatch.setenv("JURYBOX_SHM_DIR", str(tmp_path))
    assert not endpoint.is_local and endpoint.address == "grpcs://10.0.0.1:1"


def test_an_endpoint_does_not_show_its_token(endpoint):
    assert "secret" not in repr(endpoint) and "PEM" not in repr(endpoint)


def test_the_error_for_a_missing_engine_says_what_was_tried(endpoint):
    with pytest.raises(ServerGone, match="'hockey' was not found within 0.2 s.*its address has not been published"):
        endpoints.reach("hockey", lambda: None, timeout=0.2)
    asked = []
    with pytest.raises(ServerGone, match="it was last at ipc:///tmp/nobody"):
        endpoints.reach("hockey", lambda: endpoint, timeout=0.2, alive=lambda: asked.append(1))
    assert asked, "who waits gives signs of life"


def test_served_hockey_in_a_cluster_has_a_registry_and_its_past_selves_are_carried(tmp_path):
    planned = plan(settings(policy="served"), tmp_path, engine="hockey")
    assert planned.folders == {"pool": str(tmp_path / "pool"), endpoints.REGISTRY: str(tmp_path / "engines")}
    actor = planned.roles[0]
    assert actor.settings["clients"]["engine"] == "hockey" and planned.server is None, "the learner knows of none"
    assert endpoints.REGISTRY not in plan(settings(), tmp_path).folders


class Launches:
    """The part of a launcher that `train` uses before it begins."""

    def serve(self, spec, log):
        raise AssertionError("too late")


def test_an_engine_that_ends_with_a_run_cannot_serve_a_longer_one(tmp_path):
    with pytest.raises(ConfigError, match="on_failure='end', or policy='local'"):
        train(settings(policy="served", on_failure="serial"), tmp_path, launcher=Launches())


def test_a_name_that_would_leave_the_registry_is_refused(tmp_path):
    with pytest.raises(Refused, match="no name for an engine"):
        endpoints.find(tmp_path, "../hockey")


def test_files_of_a_folder_are_reported_once_in_order(tmp_path):
    folders = Folders({"pool": str(tmp_path / "pool")})
    assert folders.after(0) == ()
    folders.keep("pool", "2", b"two")
    assert folders.after(0) == (("pool", "2"),)
    # At once, within a tick of the file system's clock.
    folders.keep("pool", "1", b"one")
    (tmp_path / "pool" / ".half").write_bytes(b"not whole")
    assert folders.after(1) == (("pool", "1"),) and folders.after(2) == ()
    folders.keep("pool", "1", b"another")
    assert folders.read("pool", "1") == b"one", "written once"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_client_that_trusts_the_certificate_reaches_that_address_and_no_other(tmp_path, host):
    token, authority, settings = endpoints.locks(tmp_path, host)
    assert len(token) == 64 and (tmp_path / "token").read_text() == token
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("token", "tls.key")} == {0o600}
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(settings["tls_cert"], settings["tls_key"])
    client = ssl.create_default_context(cadata=authority)
    assert shake_hands(client, server, host)
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        shake_hands(client, server, "127.0.0.2")
    stranger = ssl.create_default_context(cadata=endpoints.locks(tmp_path, host)[1])
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(stranger, server, host)


def shake_hands(client, server, host):
    """A TLS handshake in memory; whether both sides finish it."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=host)
    two = server.wrap_bio(to_server, to_client, server_side=True)
    done = set()
    for side in [one, two] * 4:
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
            done.add(side)
    return len(done) == 2
