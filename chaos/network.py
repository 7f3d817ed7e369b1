"""A Ray cluster whose nodes have a network of their own: one namespace each, on a bridge.

Needs Linux, root, and iproute2 and iptables. What a link does is done by rules inside the node's
namespace, so that each direction can be cut by itself; nobody is told, as with a real cable. The
head, the driver and the controller stay in this namespace, at the bridge's address.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.fault_kinds import Network
from elastic_ft.hosts.ray.cluster import LocalCluster

CLONE_NEWNET = 0x40000000  # from linux/sched.h
NAMESPACES = Path("/run/netns")
INTERFACES = Path("/sys/class/net")
SUBNETS = [f"10.213.{number}" for number in range(1, 255)]
FIRST_HOST, LAST_HOST = 11, 250
COMMAND_TIMEOUT_S = 20.0
STARTS_MAX = 3  # of one node
DEVICE = "eth0"  # inside each namespace


def network_lacks() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)} (iproute2, iptables)"
    probe = f"eftp{os.getpid()}"
    try:
        run("ip", "netns", "add", probe)
        run("ip", "netns", "delete", probe)
    except OSError as error:
        return f"network namespaces can't be made here: {error}"
    return ""


def run(*command: str) -> str:
    """Returns the output. Raises OSError with the tool's words."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class Namespace:
    """Attributes:
    address: its IP.
    starter: a thread inside it; a process that it starts lives there, and dies with it.
    """

    name: str
    address: str
    starter: ThreadPoolExecutor


class Bridge:
    """A bridge and its namespaces. ``address``: of this side."""

    def __init__(self) -> None:
        self._name = bridge_of(os.getpid())
        taken = run("ip", "-o", "address")
        subnet = next(subnet for subnet in SUBNETS if f" {subnet}." not in taken)
        self._subnet, self.address = subnet, f"{subnet}.1"
        self._namespaces: list[Namespace] = []
        run("ip", "link", "add", self._name, "type", "bridge")
        try:
            run("ip", "address", "add", f"{self.address}/24", "dev", self._name)
            run("ip", "link", "set", self._name, "up")
        except OSError:
            self.close()
            raise

    def add(self) -> Namespace:
        number = FIRST_HOST + len(self._namespaces)
        assert number <= LAST_HOST
        name, address = f"{self._name}n{number}", f"{self._subnet}.{number}"
        outside = f"{self._name}v{number}"
        run("ip", "netns", "add", name)
        starter = ThreadPoolExecutor(1, "namespace", initializer=enter, initargs=(name,))
        made = Namespace(name, address, starter)
        self._namespaces.append(made)
        run("ip", "link", "add", outside, "type", "veth", "peer", "name", DEVICE, "netns", name)
        run("ip", "link", "set", outside, "master", self._name, "up")
        inside = ("ip", "-n", name)
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "address", "add", f"{address}/24", "dev", DEVICE)
        run(*inside, "link", "set", DEVICE, "up")
        run(*inside, "route", "add", "default", "via", self.address)
        dns = ("OUTPUT", "-p", "udp", "--dport", "53", "-j", "REJECT")
        iptables(name, "-A", dns)  # there is none: said at once, not after 10 s
        return made

    def close(self) -> None:
        """Idempotent. With a namespace goes its end of the link, and so the link."""
        errors = []
        for made in self._namespaces:
            made.starter.shutdown()
            errors += attempt("ip", "netns", "delete", made.name)
        self._namespaces = []
        errors += attempt("ip", "link", "delete", self._name)
        if errors:
            raise OSError("; ".join(errors))


def bridge_of(pid: int) -> str:
    return f"eft{pid}"  # names of interfaces have at most 15 characters


def sweep(pid: int) -> None:
    """Removes what a process left that was killed before it could."""
    name = bridge_of(pid)
    left = NAMESPACES.glob(f"{name}n*") if NAMESPACES.is_dir() else ()
    for namespace in left:
        run("ip", "netns", "delete", namespace.name)
    for link in (*INTERFACES.glob(f"{name}v*"), INTERFACES / name):
        # The kernel takes a namespace's links down some time after it: who is gone is no error.
        wrong = attempt("ip", "link", "delete", link.name) if link.exists() else []
        if wrong and link.exists():
            raise OSError(wrong[0])


def attempt(*command: str) -> list[str]:
    """Returns what went wrong."""
    try:
        run(*command)
    except OSError as error:
        return [str(error)]
    return []


def enter(name: str) -> None:
    """Puts the calling thread into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (NAMESPACES / name).open("rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into {name}")


class NetworkCluster(LocalCluster):
    """A LocalCluster whose links can be broken."""

    def __init__(self, nodes: int, cpus_per_node: float = 1) -> None:
        self._bridge = Bridge()
        self._links: dict[str, Namespace] = {}  # by Ray's node id
        self._open = True
        try:
            # What is forked from a template would be in the template's network.
            super().__init__(nodes, cpus_per_node, templates=False)
        except BaseException:
            self.close()
            raise

    def connect(self, *, quiet: bool = True, **kwargs: Any) -> None:
        super().connect(quiet=quiet, **{"_node_ip_address": self._bridge.address, **kwargs})

    def close(self) -> None:
        super().close()
        if self._open:
            self._open = False
            self._bridge.close()

    def break_link(self, node: str, fault: Network) -> Callable[[], None]:
        """Returns what heals it."""
        name = self._links[node].name
        rules = rules_of(fault)
        for rule in rules:
            iptables(name, "-A", rule)

        def heal() -> None:
            for rule in rules:
                iptables(name, "-D", rule)

        return heal

    def _start(self, *, head: bool, starter: Any = None, **params: Any) -> Any:
        if head:
            return super()._start(head=True, node_ip_address=self._bridge.address, **params)
        for left in reversed(range(STARTS_MAX)):
            made = self._bridge.add()
            try:
                node = super()._start(
                    head=False, starter=made.starter, node_ip_address=made.address, **params
                )
            except Exception:  # Ray gives a node 30 s to start; a busy machine may need more
                made.starter.shutdown()  # and with the thread goes what it started
                if not left:
                    raise
            else:
                self._links[node.node_id] = made
                return node
        raise AssertionError("not reached")


def iptables(namespace: str, action: str, rule: tuple[str, ...]) -> None:
    chain, *rest = rule
    run("ip", "netns", "exec", namespace, "iptables", "-w", action, chain, *rest)


def rules_of(fault: Network) -> list[tuple[str, ...]]:
    """Of traffic with other nodes: a node's own addresses go over lo."""
    out, into = ("OUTPUT", "-o", DEVICE), ("INPUT", "-i", DEVICE)
    if fault.network == "loss":
        chance = ("-m", "statistic", "--mode", "random", "--probability", f"{fault.share:g}")
        return [(*way, *chance, "-j", "DROP") for way in (out, into)]
    if fault.network == "reset":
        answer = ("-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset")
        return [(*way, *answer) for way in (out, into)]
    ways = {"out": [out], "in": [into], "both": [out, into]}[fault.way]
    return [(*way, "-j", "DROP") for way in ways]
