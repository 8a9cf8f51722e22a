"""Network namespaces that stand for hosts, joined by a switch over links of a given rate.

Every host is a namespace with one interface, ``eth0``, a veth pair to a bridge that has a namespace of its own, so that
nothing of it is seen in the machine's own network. Both ends of a pair are shaped by a token bucket: what a host sends,
and what the switch sends to it. Nothing leads out.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import psutil

from topology.errors import RunError

INTERFACE = "eth0"
NETWORK = ipaddress.ip_network("10.77.0.0/24")
_PREFIX = "zosim-shaped-"
_NAMED = Path("/run/netns")
_LEAST_BURST_BYTES = 16_000
"""Ten frames: a bucket much smaller than this loses rate to the kernel's clock, a larger one lets messages through at
full speed."""

_BURST_S = 5.6e-4
"""Seconds of the link: at 1 Gbit/s a packet of 64 KiB as the kernel hands it over, which smaller buckets cut up, at a cost
that halves the rate."""

_QUEUE_BYTES = 4_000_000
"""More than a window of TCP on these links: nothing is dropped, as on a switch with deep buffers."""

_UNITS: Mapping[str, float] = MappingProxyType({"kbit": 1e3, "mbit": 1e6, "gbit": 1e9})
FRAME_EFFICIENCY = 1448 / 1514
"""Payload in a full frame over the frame as the bucket counts it: TCP with time stamps over IPv4 over Ethernet."""


def rate_bits_per_s(text: str) -> float:
    """Return a rate as ``tc`` writes it, such as ``100mbit``, in bit/s.

    Raises RunError if it is not a positive number with one of the units.

    >>> rate_bits_per_s("100mbit")
    100000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise RunError(
            f"rate {text!r} must be a number with bit, kbit, mbit or gbit", hint="such as 100mbit or 1gbit"
        )
    return float(match[1]) * _UNITS[match[2]]


def why_not() -> str:
    """Return why this machine cannot make such networks, or nothing if it can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian: apt install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces take root"
    tried = f"{_PREFIX}{os.getpid()}-tried"
    done = subprocess.run(["ip", "netns", "add", tried], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"this machine makes no network namespaces: {done.stderr.strip()}"
    try:
        for words in ("link add eth0 type veth peer name p0", "link add br0 type bridge"):
            done = subprocess.run(
                ["ip", "-n", tried, *words.split()], capture_output=True, text=True, check=False
            )
            if done.returncode:
                return f"this kernel lacks veth or bridge: {done.stderr.strip()}"
        shaped = ["tc", "-n", tried, "qdisc", "add", "dev", "eth0", "root", *_bucket(1e8)]
        done = subprocess.run(shaped, capture_output=True, text=True, check=False)
        return f"this kernel lacks the tbf queue: {done.stderr.strip()}" if done.returncode else ""
    finally:
        subprocess.run(["ip", "netns", "del", tried], capture_output=True, check=False)


class ShapedNetwork:
    """Hosts on a switch, for the length of a ``with`` block.

    `rate_bits_per_s`: of every host's link, in each direction.

    Raises RunError if this machine cannot make it; the message says why.

    Processes that still run in the hosts when the block ends are killed. What a killed run left behind is removed when
    the next network is made: the names hold the process that made them.
    """

    def __init__(self, num_hosts: int, rate_bits_per_s: float) -> None:
        if not 1 <= num_hosts <= NETWORK.num_addresses - 2:
            raise RunError(
                f"num_hosts={num_hosts} must be from 1 to {NETWORK.num_addresses - 2}",
                hint="hosts take their addresses from one network",
            )
        self.num_hosts = num_hosts
        self.rate_bits_per_s = rate_bits_per_s
        self._name = f"{_PREFIX}{os.getpid()}-"
        self._switch = f"{self._name}switch"

    def __enter__(self) -> Self:
        reason = why_not()
        if reason:
            raise RunError(
                f"this machine cannot make shaped links: {reason}",
                hint="docs/how-to/shape-links.md lists what they need",
            )
        remove_stale_files()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return str(NETWORK[host + 1])

    def within(self, host: int) -> list[str]:
        """Return the words that a command is preceded by to run on a host."""
        # A killed parent's ranks would go on computing.
        tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        return [*tied, "ip", "netns", "exec", self._host(host)]

    def _host(self, host: int) -> str:
        return f"{self._name}host{host}"

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host in range(self.num_hosts):
            name, port = self._host(host), f"port{host}"
            _ip("netns", "add", name)
            pair = f"link add {port} netns {self._switch} type veth peer name {INTERFACE} netns {name}"
            _ip(*pair.split())
            _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/{NETWORK.prefixlen}", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            for namespace, device in ((name, INTERFACE), (self._switch, port)):
                bucket = _bucket(self.rate_bits_per_s)
                _command("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)

    def _remove(self) -> None:
        for name in _namespaces():
            if name.startswith(self._name):
                _remove_namespace(name)


def remove_stale_files() -> list[str]:
    """Remove networks whose maker is gone, with the processes that run in them, and return their namespaces."""
    stale_files = [
        name for name in _namespaces() if (pid := _maker(name)) is None or not psutil.pid_exists(pid)
    ]
    for name in stale_files:
        _remove_namespace(name)
    return stale_files


def _namespaces() -> list[str]:
    return (
        sorted(path.name for path in _NAMED.iterdir() if path.name.startswith(_PREFIX))
        if _NAMED.is_dir()
        else []
    )


def _maker(name: str) -> int | None:
    number = name.removeprefix(_PREFIX).partition("-")[0]
    return int(number) if number.isdigit() else None


def _remove_namespace(name: str) -> None:
    """Kill what runs in a namespace, and remove it; its interfaces, and their other ends, go with it."""
    end = time.monotonic() + 5.0
    while pids := _running(name):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _running(name: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    return [
        pid
        for pid in map(int, listed.stdout.split())
        if pid != os.getpid() and psutil.pid_exists(pid) and not _is_dead(pid)
    ]


def _is_dead(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def _bucket(rate: float) -> Sequence[str]:
    burst = max(_LEAST_BURST_BYTES, round(rate / 8 * _BURST_S))
    return f"tbf rate {round(rate)}bit burst {burst} limit {_QUEUE_BYTES}".split()


def _ip(*words: str) -> None:
    _command("ip", *words)


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}",
            hint="docs/how-to/shape-links.md lists what shaped links need",
        )
