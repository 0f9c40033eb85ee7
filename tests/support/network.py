"""A network of two: this machine, and a namespace that engines can live in; and a hole in between."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from uuid import uuid4

import pytest

_NOBODY = "02:00:00:00:00:01"  # a card that is not there: what is sent to it is dropped, and nobody says so
_CLONE_NEWNET = 0x40000000


class Network:
    """`name`: of the namespace, which reaches this machine at `here`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_cut = False
        self._card = name[-12:]
        # One of its own, for tests that run side by side.
        part = random.SystemRandom().randrange(1 << 14)
        self.here, self._there = (f"10.231.{part >> 6}.{(part & 63) * 4 + host}" for host in (1, 2))

    def cut(self) -> None:
        """From now on every packet is dropped, both ways: no FIN, no RST, no error."""
        self.is_cut = True
        _ip("neigh", "replace", self._there, "lladdr", _NOBODY, "dev", f"{self._card}-a", "nud", "permanent")
        _ip(
            "-n",
            self.name,
            "neigh",
            "replace",
            self.here,
            "lladdr",
            _NOBODY,
            "dev",
            f"{self._card}-b",
            "nud",
            "permanent",
        )

    def heal(self) -> None:
        self.is_cut = False
        _ip("neigh", "del", self._there, "dev", f"{self._card}-a")
        _ip("-n", self.name, "neigh", "del", self.here, "dev", f"{self._card}-b")

    def make(self) -> None:
        a, b = f"{self._card}-a", f"{self._card}-b"
        _ip("netns", "add", self.name)
        _ip("link", "add", a, "type", "veth", "peer", "name", b, "netns", self.name)
        _ip("address", "add", f"{self.here}/30", "dev", a)
        _ip("link", "set", a, "up")
        _ip("-n", self.name, "address", "add", f"{self._there}/30", "dev", b)
        _ip("-n", self.name, "link", "set", b, "up")

    def remove(self) -> None:
        for words in (("link", "del", f"{self._card}-a"), ("netns", "del", self.name)):
            subprocess.run(["ip", *words], check=False, capture_output=True)


@contextmanager
def network() -> Generator[Network]:
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root, and the `ip` command (Debian: iproute2)")
    made = Network(f"gaffer-{uuid4().hex[:8]}")
    try:
        try:
            made.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
        yield made
    finally:
        made.remove()


def enter(name: str) -> None:
    """This process (of one thread so far) lives in the namespace from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
