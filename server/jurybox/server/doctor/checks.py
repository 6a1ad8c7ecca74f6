"""The checks of `jurybox doctor`: a list of findings, each with a remedy.

A check is a function from measured values to a finding, so that each can be tested on any host. `examine` measures the
values on this host.
"""

from __future__ import annotations

import importlib
import os
import resource
import secrets
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from jurybox.protocol.address import default_address, ipc_path
from jurybox.protocol.errors import Error
from jurybox.protocol.revision import install_command
from jurybox.protocol.segment import OWNER_LOCK, Segment, dead, directory, is_locked, segment_name, sweep, try_lock
from jurybox.protocol.wire import PROTOCOL_VERSION, build_version
from jurybox.server.doctor import host
from jurybox.server.doctor.host import Finding, fail, ok, warn
from jurybox.server.memory import available_memory
from jurybox.server.supervisor.segment_server import SegmentServer

_MIB = 1 << 20
_ARENA = 128 * _MIB  # the largest size of a model's arena by default
_COMFORT = 512 * _MIB
_FILES_OF_A_CLIENT = 2  # its connection to the supervisor, and one to an engine
_FILES_OF_A_SERVER = 128
_PACKAGES = ("numpy", "pyzmq", "protobuf", "torch", "safetensors", "fastapi", "uvicorn", "pydantic")


def examine(*, fix: bool = False, config: Path | None = None) -> list[Finding]:
    """Run all checks on this host.

    Args:
        fix: remove the shared memory and sockets of dead processes.
        config: a server's configuration, whose limits are checked; None: the defaults.
    """
    room, inodes = host.room(directory())
    checks: tuple[Callable[[], Finding], ...] = (
        lambda: check_python(sys.version_info[:3], sys.platform),
        lambda: check_packages(_installed()),
        _check_conflicts,
        check_native,
        lambda: check_http2(*_nghttp2()),
        lambda: host.check_kernel(os.uname().release),
        lambda: check_memory(*available_memory()),
        lambda: check_clients(_max_message_mib(config, os.environ), available_memory()[0]),
        lambda: check_room(*room, directory()),
        lambda: host.check_inodes(*inodes, directory()),
        check_segment,
        check_sealed,
        check_locks,
        lambda: check_stale(stale_segments(), sweep if fix else None),
        lambda: host.check_sockets(host.dead_sockets(default_address()), fix=fix),
        lambda: check_files(resource.getrlimit(resource.RLIMIT_NOFILE)),
        lambda: check_cores(available_cores(), os.environ),
        lambda: host.check_clock(host.clock_source()),
        check_torch,
        lambda: host.check_gpu_sharing(os.environ, host.mps_folder(os.environ), host.mig_instances()),
        lambda: check_runtime_folder(default_address()),
        lambda: check_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_gpu=Path("/dev/nvidiactl").exists()),
    )
    return [check() for check in checks]


def check_python(found: tuple[int, int, int], platform: str) -> Finding:
    """Check for Python 3.11 or newer on Linux."""
    text = f"Python {'.'.join(map(str, found))} on {platform}"
    if platform != "linux":
        return fail("python", text, "a server needs Linux: run it there, or in a container")
    if found < (3, 11, 0):
        return fail("python", text, "install Python 3.11 or newer")
    return ok("python", text)


def check_packages(installed: Mapping[str, str | None]) -> Finding:
    """Check that a server's dependencies are installed; `installed` has their versions, or None if missing."""
    missing = [name for name, found in installed.items() if found is None]
    text = ", ".join(f"{name} {found}" for name, found in installed.items() if found is not None)
    text = f"jurybox {build_version()} (protocol {PROTOCOL_VERSION}), {text}"
    if missing:
        return fail("packages", f"{', '.join(missing)} not installed; {text}", install_command("server"))
    return ok("packages", text)


def _check_conflicts() -> Finding:
    try:
        from jurybox.server.doctor import packages
    except ModuleNotFoundError as error:
        return warn("versions", f"not checked: {error.name} is not installed", install_command("server"))
    return packages.check_conflicts(packages.installed())


def check_native() -> Finding:
    """Check that the native module can be imported."""
    try:
        module = importlib.import_module("jurybox.native")
    except ImportError as error:
        return fail("native core", str(error), "install a wheel for this platform, or a C++17 compiler and reinstall")
    return ok("native core", str(module.__file__))


def check_http2(version: str, missing: str) -> Finding:
    """Check what implements HTTP/2 for gRPC: the system's libnghttp2, or grpcio.

    Args:
        version: the version of libnghttp2; empty if it cannot be used.
        missing: the reason why it cannot be used; empty if it can.
    """
    if version:
        return ok("gRPC", f"HTTP/2 by libnghttp2 {version}")
    text = f"HTTP/2 by grpcio, which takes several times the CPU time per request: {missing}"
    return warn("gRPC", text, "apt install libnghttp2-14, or dnf install libnghttp2")


def _nghttp2() -> tuple[str, str]:
    try:
        from jurybox import native
    except ImportError:
        return "", "the native core cannot be imported"
    return native.nghttp2()


def check_memory(free: int, where: str) -> Finding:
    """Check the memory that a server's arenas and weights may use."""
    text = f"{free / _MIB:.0f} MiB left of {where}"
    remedy = "stop what takes memory, or give it more (docker run --memory); or set a smaller 'rows' for each model"
    if free < _ARENA:
        return fail("memory", f"{text}; one model's arena takes up to {_ARENA // _MIB}", remedy)
    if free < _COMFORT:
        return warn("memory", f"{text}; enough for {free // _ARENA} models' arenas", remedy)
    return ok("memory", text)


def _max_message_mib(config: Path | None, environ: Mapping[str, str]) -> str:
    """Return the setting: from the environment, else from the configuration; "" for its default."""
    if (given := environ.get("JURYBOX_MAX_MESSAGE_MIB", "")) or config is None:
        return given
    try:
        return str(tomllib.loads(config.read_text())["server"]["max_message_mib"])
    except KeyError:
        return ""


def check_clients(max_message_mib: str, free: int) -> Finding:
    """Check what gateway and relay may hold for their clients at most.

    Args:
        max_message_mib: the setting; "" for its default.
    """
    try:
        from jurybox.server.security.access import SecuritySettings
        from jurybox.server.security.limits import most_held
    except ImportError as error:  # the checks of packages and of the native core say so, too
        return warn("clients", f"not known: {error}", "see above")
    default: int = SecuritySettings.model_fields["max_message_mib"].default
    mib = int(max_message_mib) if max_message_mib.isdigit() else default
    most = most_held(mib << 20)
    text = f"at most {most / _MIB:.0f} MiB each in gateway and relay with max_message_mib = {mib}"
    text += "; with curve_key the relay takes 64 MiB more"
    if most > free:
        remedy = f"set server.max_message_mib to {max(1, mib * free // most)} or less, if strangers can connect"
        return warn("clients", f"{text}; {free / _MIB:.0f} MiB are left", remedy)
    return ok("clients", text)


def check_room(total: int, free: int, folder: Path) -> Finding:
    """Check the free bytes of the shared-memory file system, which trainings and replays use, but servers do not."""
    text = f"{folder}: {free / _MIB:.0f} of {total / _MIB:.0f} MiB free"
    remedy = (
        "in a container: docker run --shm-size=1g (compose: shm_size: 1g); elsewhere: mount -o remount,size=2g "
        f"{folder}, or point JURYBOX_SHM_DIR at a larger tmpfs"
    )
    if free < _MIB:
        return fail("shared memory", text, remedy)
    if free < _ARENA:
        return warn("shared memory", f"{text}; a training's weights and replay may need more", remedy)
    return ok("shared memory", text)


def check_segment() -> Finding:
    """Check that a segment can be created: an unnamed file (O_TMPFILE), allocated, then linked."""
    try:
        with Segment.create(segment_name(f"doctor{secrets.token_hex(4)}", "probe"), 4096):
            pass
    except (Error, OSError) as error:
        return fail(
            "segments",
            f"{directory()}: {error}",
            "expected a writable tmpfs with O_TMPFILE and a mounted /proc; point JURYBOX_SHM_DIR at one",
        )
    return ok("segments", f"can be created in {directory()}")


def check_sealed() -> Finding:
    """Check that memory of sealed size can be created and passed over a socket (Linux 3.17)."""
    owner = f"doctor{secrets.token_hex(4)}"
    try:
        with SegmentServer(owner) as server, server.create(segment_name(owner, "probe"), 4096) as segment:
            Segment.attach(segment.name).close()
    except (Error, OSError) as error:
        return fail(
            "sealed memory",
            str(error),
            "a server needs memfd_create with seals (Linux 3.17), and a socket in the folder of shared memory",
        )
    return ok("sealed memory", "can be created and passed over a socket")


def check_locks() -> Finding:
    """Check that the kernel has open-file-description locks that exclude each other (Linux 3.15)."""
    kernel = os.uname().release
    try:
        with tempfile.NamedTemporaryFile(dir=directory(), prefix=".jurybox-locks-") as file:
            other = os.open(file.name, os.O_RDWR | os.O_CLOEXEC)
            try:
                works = try_lock(file.fileno(), OWNER_LOCK) and is_locked(other, OWNER_LOCK)
            finally:
                os.close(other)
        text = f"kernel {kernel}" if works else f"kernel {kernel}: a lock did not keep another out"
    except OSError as error:
        works, text = False, f"kernel {kernel}: {error}"
    if not works:
        return fail("locks", text, f"leases need fcntl's F_OFD_SETLK in {directory()}: use a tmpfs")
    return ok("locks", f"{text} has open-file-description locks")


def stale_segments() -> list[str]:
    """Return the names of this user's segments whose owners are dead."""
    return [path.name for path in sorted(directory().glob(f"jurybox-{os.getuid()}-*")) if dead(path)]


def check_stale(stale: list[str], remove: Callable[[], list[str]] | None) -> Finding:
    """Check for shared memory of dead owners; call `remove`, if given, to remove it."""
    if not stale:
        return ok("stale segments", "none")
    if remove is None:
        some = ", ".join(stale[:3]) + (", ..." if len(stale) > 3 else "")
        return warn("stale segments", f"{len(stale)}: {some}", "jurybox doctor --fix removes them, as a start does")
    return ok("stale segments", f"{len(remove())} removed")


def check_files(limits: tuple[int, int]) -> Finding:
    """Check the limit of open files (soft, hard). A server raises its own to the hard limit; each client takes some."""
    soft, hard = (limit if limit != resource.RLIM_INFINITY else sys.maxsize for limit in limits)
    clients = max(0, (hard - _FILES_OF_A_SERVER) // _FILES_OF_A_CLIENT)
    text = f"a server may have {hard}, enough for {clients} clients; other processes {soft}"
    if hard == sys.maxsize:
        text = "no limit of open files"
    remedy = "raise the hard limit (limits.conf; systemd: LimitNOFILE=65536; docker: --ulimit nofile=65536)"
    if hard < 256:
        return fail("open files", text, remedy)
    if hard < 4096:
        return warn("open files", text, remedy)
    return ok("open files", text)


def check_cores(cores: float, environ: Mapping[str, str]) -> Finding:
    """Check the available cores, and that no thread setting exceeds them."""
    text = f"{cores:g} cores"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if environ.get(name, "").isdecimal() and int(environ[name]) > cores:
            return warn("cores", f"{text}, {name}={environ[name]}", f"unset {name}: threads beyond the cores only wait")
    if cores < 2:
        return warn("cores", text, "clients and engine share one core: the scheduler determines latencies")
    return ok("cores", f"{text}; an engine on the CPU takes {max(1, int(cores) // 2)} threads by default")


def check_torch() -> Finding:
    """Check that torch can be imported, and can use the host's GPUs."""
    nodes = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return fail("torch", str(error), f"{install_command('server')}; clients do without it")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        return ok("torch", f"torch {torch.__version__}, {len(names)} CUDA devices: {', '.join(names)}")
    if nodes:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        return warn(
            "torch",
            f"torch {torch.__version__} ({built}) cannot use a GPU, although there are {', '.join(nodes)}; "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}",
            "install torch for the driver's CUDA version (pytorch.org), or update the driver",
        )
    return ok("torch", f"torch {torch.__version__}, no GPU: engines run on the CPU")


def check_runtime_folder(address: str) -> Finding:
    """Check that the folder of the default address belongs to this user, or can be created."""
    path = ipc_path(address)
    if path is None:
        return ok("runtime folder", f"none needed for {address}")
    folder = path.parent
    if not folder.exists():
        parent = next(above for above in folder.parents if above.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return ok("runtime folder", f"{folder} will be created")
        return fail("runtime folder", f"{folder} cannot be created in {parent}", "set JURYBOX_ADDRESS=ipc://...")
    found = folder.stat()
    text = f"{folder}, mode {found.st_mode & 0o7777:o}, user {found.st_uid}"
    if found.st_uid not in (os.getuid(), 0) or not os.access(folder, os.W_OK | os.X_OK):
        return fail(
            "runtime folder",
            text,
            f"it must be writable and belong to user {os.getuid()}: set JURYBOX_ADDRESS=ipc://... to another",
        )
    if found.st_mode & 0o077:
        return fail("runtime folder", text, f"others may enter it, so a server does not start: chmod 700 {folder}")
    return ok("runtime folder", text)


def check_memlock(limit: int, *, has_gpu: bool) -> Finding:
    """Check the limit of locked memory, against which the page-locking of arenas for a GPU may count."""
    text = (
        "no limit of locked memory"
        if limit in (resource.RLIM_INFINITY, -1)
        else f"{limit / _MIB:.0f} MiB of locked memory"
    )
    if has_gpu and 0 <= limit < _ARENA:
        return warn("locked memory", text, "ulimit -l unlimited (docker: --ulimit memlock=-1), else copies are slower")
    return ok("locked memory", text)


def available_cores(group: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the number of cores by CPU affinity and by the control group's quota (cpu.max of cgroup v2)."""
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, float(quota) / float(period))


def _installed() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
