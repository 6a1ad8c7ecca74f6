"""Two hosts on this machine: network namespaces, and a link between them that delays or drops packets.

Each has a TUN device whose descriptor this process holds: packets of one arrive here, wait, and are written to the
other. Needs no kernel module for delays (netem) and no root, but user namespaces and /dev/net/tun.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection
from select import select

from jurybox.protocol.descriptors import receive_descriptors

A, B = "10.77.0.1", "10.77.0.2"
# As large as a packet may be: network cards take segments of 64 KiB from the kernel and give such back, too.
MTU = 65000
_QUEUE = 4096  # packets on their way, in each direction; more are dropped

# In a network of its own: makes the device, gives its descriptor away, and keeps the network until its socket closes.
_HOLDER = """\
import array, fcntl, os, socket, struct, subprocess, sys
mine, other, mtu, told = sys.argv[1:]
told = socket.socket(fileno=int(told))
tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"tun0", 0x0001 | 0x1000))  # TUNSETIFF: IFF_TUN, IFF_NO_PI
for line in ("link set lo up", f"addr add {mine} peer {other} dev tun0", f"link set tun0 mtu {mtu} up"):
    subprocess.run(["ip", *line.split()], check=True)
told.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [tun]))])
told.recv(1)
"""


class TwoHosts:
    """Hosts at `A` and `B`; use it in a ``with``.

    Args:
        delay: seconds of a packet in each direction; a round trip takes twice that.
        cores: that the link itself may use; None: all.

    Attributes:
        cut: while it is set, packets are lost.
        packets: number of those that were delivered.
    """

    def __init__(self, delay: float, cores: Collection[int] | None = None) -> None:
        self.delay = delay
        self._cores = cores
        self.cut = threading.Event()
        self.packets = 0
        self._stop = threading.Event()
        self._holders: list[tuple[subprocess.Popen[bytes], socket.socket]] = []
        self._tuns: list[int] = []

    def __enter__(self) -> TwoHosts:
        try:
            for mine, other in ((A, B), (B, A)):
                self._hold(mine, other)
        except BaseException:
            self._end()
            raise
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._end()

    def inside(self, host: str, command: list[str]) -> list[str]:
        """A command line that runs another one on a host."""
        pid = self._holders[(A, B).index(host)][0].pid
        return ["nsenter", "--user", "--net", "--preserve-credentials", "-t", str(pid), "--", *command]

    def _hold(self, mine: str, other: str) -> None:
        here, there = socket.socketpair()
        with there:
            command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", _HOLDER, mine, other]
            process = subprocess.Popen([*command, str(MTU), str(there.fileno())], pass_fds=[there.fileno()])
        self._holders.append((process, here))
        here.settimeout(20.0)
        _, made = receive_descriptors(here, 1, 1)
        if not made:
            raise RuntimeError(
                f"the host {mine} could not be made (its message is above): expected user namespaces "
                "(sysctl user.max_user_namespaces), /dev/net/tun and the command ip"
            )
        self._tuns += made

    def _carry(self) -> None:
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)  # of this thread
        ways: dict[int, deque[tuple[float, bytes]]] = {tun: deque() for tun in self._tuns}  # by direction
        other = dict(zip(self._tuns, self._tuns[::-1], strict=True))
        while not self._stop.is_set():
            due = min((way[0][0] for way in ways.values() if way), default=time.monotonic() + 0.1)
            readable, _, _ = select(self._tuns, [], [], max(0.0, min(0.1, due - time.monotonic())))
            now = time.monotonic()
            for tun in readable:
                packet = os.read(tun, 65536)
                if not self.cut.is_set() and len(ways[other[tun]]) < _QUEUE:
                    ways[other[tun]].append((now + self.delay, packet))
            for tun, way in ways.items():
                while way and way[0][0] <= now:
                    os.write(tun, way.popleft()[1])
                    self.packets += 1

    def _end(self) -> None:
        for process, told in self._holders:
            told.close()
            process.wait(10.0)
        for tun in self._tuns:
            os.close(tun)


_ECHO = """\
import socket, sys
with socket.create_server((sys.argv[1], 7007)) as server:
    peer = server.accept()[0]
    while data := peer.recv(1):
        peer.send(data)
"""
_ASK = """\
import socket, sys, time
for _ in range(50):
    try:
        peer = socket.create_connection((sys.argv[1], 7007), 5)
        break
    except OSError:
        time.sleep(0.1)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(200):
    began = time.perf_counter()
    peer.send(b"x"); peer.recv(1)
    print(time.perf_counter() - began)
"""


def round_trip(hosts: TwoHosts) -> float:
    """Median seconds of a byte and its echo over TCP, between the two hosts."""
    with subprocess.Popen(hosts.inside(A, [sys.executable, "-c", _ECHO, A])):
        asked = hosts.inside(B, [sys.executable, "-c", _ASK, A])
        said = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=60).stdout
    times = sorted(map(float, said.split()))
    return times[len(times) // 2]


def main() -> None:
    """``python -m benchmarks.cluster.namespaces``: the time of the link itself."""
    for delay in (0.0, 0.005):
        with TwoHosts(delay) as hosts:
            print(f"{1000 * delay:g} ms each way: a round trip of {1000 * round_trip(hosts):.2f} ms")


if __name__ == "__main__":
    main()
