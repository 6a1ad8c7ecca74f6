import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# A shell's background job ignores Ctrl-C, and so would every process that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Servers are on this host, which a proxy could not reach.
os.environ.update(dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost,::1"))

# Or each of the processes that tests start would compile our sources anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Beside other workers of the same run a second thread finds no core of its own, and only waits for one. Before torch.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Collecting imports everything and makes objects that stay: the collector would look at them again and again.
    gc.disable()

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from jurybox.protocol.segment import directory
from tests import preloaded, serving

# The same examples in every run, and no deadline: on a busy machine any of them may take long.
# `pytest --hypothesis-profile thorough` looks further.
settings.register_profile("suite", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile("suite")

# Most servers of tests are forked with their imports done. FRESH_SERVERS=1: all are started as a user's.
preloaded.wanted = not os.environ.get("FRESH_SERVERS")


@pytest.fixture(scope="session", autouse=True)
def the_nursery_ends():
    """When the last server has ended."""
    yield
    preloaded.end()


@pytest.fixture(scope="session", autouse=True)
def shared_memory_of_our_own(the_nursery_ends):
    """A folder in shared memory for this run alone: all files left in it are ours, and only they are removed."""
    if "MATRIX_SERVER" in os.environ:  # of another run, as is the folder
        yield str(directory())
        return
    folder = tempfile.mkdtemp(prefix="jurybox-tests-", dir=directory())
    before = os.environ.get("JURYBOX_SHM_DIR")
    os.environ["JURYBOX_SHM_DIR"] = folder
    yield folder
    if before is None:
        del os.environ["JURYBOX_SHM_DIR"]
    else:
        os.environ["JURYBOX_SHM_DIR"] = before
    shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def stable_baselines_logs():
    """A folder for Stable-Baselines3's logs, which would otherwise leave one for each of its runs."""
    with tempfile.TemporaryDirectory(prefix="jurybox-sb3-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SB3_LOGDIR", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_drawing_of_a_title():
    """Hundreds of small trainings draw the same curves, which takes as long as they do: the first stays."""
    if (charts := sys.modules.get("jurybox.training.report.charts")) is None:  # no test of this run is of a training
        yield
        return
    anew, drawn = charts._drawing, {}

    @functools.wraps(anew)
    def drawing(draw, *place):
        if place not in drawn:
            drawn[place] = anew(draw, *place)
        return drawn[place]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_drawing", drawing)
        yield


@pytest.fixture(scope="session", autouse=True)
def authorities_are_read_once():
    """Each client of httpx would read the certificates of all the world anew, for 30 ms, also to ask a server here."""
    if "httpx" not in sys.modules:
        yield
        return
    from httpx._transports import default

    anew = default.create_ssl_context
    usual = anew()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            default, "create_ssl_context", lambda verify=True, **more: anew(usual if verify is True else verify, **more)
        )
        yield


@pytest.fixture(scope="module")
def every_drawing():
    """For tests of what drawings show."""
    charts = sys.modules["jurybox.training.report.charts"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_drawing", getattr(charts._drawing, "__wrapped__", charts._drawing))
        yield


@pytest.fixture(scope="module", autouse=True)
def what_is_there_stays():
    """The collector looks no more at what the files before have imported: tests collect again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def empty_shared_memory(shared_memory_of_our_own):
    """A folder in shared memory for one test: processes that another test killed may leave files in the run's."""
    folder = tempfile.mkdtemp(prefix="t-", dir=shared_memory_of_our_own)
    before, os.environ["JURYBOX_SHM_DIR"] = os.environ["JURYBOX_SHM_DIR"], folder
    yield folder
    os.environ["JURYBOX_SHM_DIR"] = before
    shutil.rmtree(folder)


# Files that take most of a minute, and the first of those that share a server.
_LONGEST = (
    "tests/integration/test_client_handles.py",
    "tests/integration/test_replicas.py",
    "tests/integration/test_remote_weights.py",
    "tests/integration/test_pages.py",
    "tests/faults/test_start.py",
    "tests/faults/test_stops.py",
    "tests/integration/test_photo_training.py",
    "tests/integration/robots/test_robot_server.py",
    "tests/integration/security/test_gateway_attacks.py",
    "tests/integration/test_bench_command.py",
    "tests/faults/test_bad_models.py",
    "tests/faults/test_failed_reloads.py",
    "tests/unit/studies/workflow/test_trainer.py",
    "tests/faults/test_matrix_of_calls.py",
    "tests/integration/test_ends.py",
    "tests/unit/vector/test_process_env.py",
    "tests/unit/studies/hockey/test_hockey_training.py",
    "tests/unit/runtime/test_processes.py",
)


def _last(item):
    """Whether a test is among those that run last."""
    return item.nodeid.startswith("tests/unit/") and not item.nodeid.startswith(_LONGEST)


def pytest_collection_modifyitems(items):
    """The longest files first and the short ones last: workers that divide a run by files then end together."""
    items.sort(key=lambda item: (not item.nodeid.startswith(_LONGEST), _last(item)))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """End the servers of many files before the last tests, all of units: idle, each takes 1 or 2 % of a core."""
    if nextitem is not None and _last(nextitem) and not _last(item):
        serving.before_last_tests.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Restore handlers: a command run in this process sets SIGINT for good, and later processes would inherit it."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        return (yield)
    finally:
        for number, handler in before:
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


# Files whose tests share a server, or parsed sources: one worker takes them all, and only it starts or parses them.
_SHARING = {
    "tests/integration/test_": (
        "client",
        "client_handles",
        "forked_clients",
        "memory_elsewhere",
        "models_of_clients",
        "traces",
    ),
    "tests/integration/gateway/test_": (
        "grpc_transport",
        "http_bodies",
        "open_rows_gateway",
        "tritonclient",
        "tritonclient_memory",
    ),
    "tests/fuzz/test_": ("grpc", "http", "zeromq"),
    "tests/faults/test_": ("bad_bytes", "killed_client", "rude_clients"),
    "tests/unit/": ("operations/test_modules", "operations/test_troubleshooting_page", "security/test_no_pickle"),
}
_SERVER_OF = {f"{server}{file}.py": server for server, files in _SHARING.items() for file in files}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Divide a run by files, as `--dist loadfile` does, but for files that share a server."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return _SERVER_OF.get(file, file)

    return ByServer(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session):
    """Compile a share of the test files: in a clean clone each worker would compile them all, at the same time."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    files = sorted(path for name in ("conftest", "test_*") for path in Path(__file__).parent.rglob(f"{name}.py"))
    with suppress(AttributeError, TypeError, ValueError):  # another pytest, whose inner functions differ
        for path in files[int(worker["workerid"][2:]) :: worker["workercount"]]:
            cached = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
            if not cached.exists():
                digest, code = rewrite._rewrite_test(path, session.config)
                cached.parent.mkdir(exist_ok=True)
                rewrite._write_pyc(session.config.stash[rewrite.assertstate_key], code, digest, cached)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    preloaded.collected()
    gc.freeze()
    gc.enable()
