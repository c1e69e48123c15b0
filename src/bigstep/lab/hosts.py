"""A network laboratory on one machine: hosts in network namespaces, joined by a switch, on links of chosen speed.

Every host is a namespace with one interface, eth0. The switch is a bridge in a namespace of its own, so that nothing,
neither interface nor address nor route, appears outside. Names contain the ID of the process that made the
laboratory; one whose process has ended is removed when the next is made.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from bigstep.engine.scratch import scratch_folder
from bigstep.errors import ConfigError, RunError

__all__ = ["Lab", "why_no_lab"]

_PREFIX = "bigstep-lab"
_NUMBER = itertools.count()
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# 64 KiB, plus 66 bytes of headers for each of the 46 frames that these make, as shapers count them. With a smaller
# burst, a shaper splits such packets into frames, which costs 5 ms of processor time per megabyte.
_LARGEST_PACKET = 69_000


def why_no_lab() -> str | None:
    """Return why no laboratory can be made here, or None if one can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the network laboratory needs the program {tool!r} (package iproute2)"
    if os.geteuid() != 0:
        return "the network laboratory needs root, to make network namespaces"
    name = f"{_PREFIX}-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"the network laboratory cannot make network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


class Lab:
    """Hosts on shaped links; a context manager.

    Args:
        hosts: How many; each stands for a rank.
        rate: Speed of each host's link in both directions, such as "100mbit" or "1gbit".
        nodes: Groups of hosts/nodes neighbouring hosts; with more than one, `rate` is the speed inside a node.
        rate_between: Speed between nodes.
        uplink: own gives each host its own `rate_between` to other nodes; shared gives each node one for all its hosts.

    Example:
        >>> lab = Lab(hosts=8, rate="1gbit", nodes=2, rate_between="100mbit")
        >>> lab.addresses[4]
        '10.77.1.1'
    """

    def __init__(
        self,
        hosts: int,
        rate: str,
        *,
        nodes: int = 1,
        rate_between: str = "",
        uplink: Literal["own", "shared"] = "own",
    ) -> None:
        if hosts % nodes or not 0 < hosts // nodes < 250:
            raise ConfigError(f"{hosts} hosts do not fill {nodes} nodes evenly: change one of them.")
        if (nodes > 1) != bool(rate_between):
            raise ConfigError("rate_between goes with more than one node, and only there: give both or neither.")
        self.hosts, self.nodes, self.hosts_per_node = hosts, nodes, hosts // nodes
        self.rate, self.rate_between, self.uplink = rate, rate_between, uplink
        for given in filter(None, (rate, rate_between)):
            bits_per_second(given)
        self._name = f"{_PREFIX}-{os.getpid()}-{next(_NUMBER)}"
        self.addresses = [
            f"10.77.{host // self.hosts_per_node}.{host % self.hosts_per_node + 1}" for host in range(hosts)
        ]

    def __enter__(self) -> Lab:
        reason = why_no_lab()
        if reason is not None:
            raise RunError(f"No laboratory: {reason}.")
        sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything; interfaces and addresses disappear with their namespaces."""
        for name in _namespaces():
            if name.startswith(f"{self._name}-"):
                _run("ip", "netns", "del", name)

    def run(
        self, script: str | Path, *args: str, timeout: float = 120.0, environment: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Run a Python script on every host at once and return what each printed last, read as JSON.

        The environment is torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), with
        GLOO_SOCKET_IFNAME for the host's link. If a host fails or time runs out, all are killed.

        Raises:
            RunError: with the last lines of the host that failed.
        """
        with scratch_folder() as folder:
            outputs = [folder / f"{host}.out" for host in range(self.hosts)]
            processes = []
            try:
                for host, output in enumerate(outputs):
                    with output.open("w") as file, output.with_suffix(".err").open("w") as errors:
                        command = ["ip", "netns", "exec", self._host(host), sys.executable, str(script), *args]
                        processes.append(
                            subprocess.Popen(
                                command, stdout=file, stderr=errors, env=self._environment(host, environment)
                            )
                        )
                failed = _wait(processes, timeout)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            if failed is not None:
                host, reason = failed
                lines = outputs[host].with_suffix(".err").read_text().strip().splitlines()[-8:]
                raise RunError(f"Host {host} of the laboratory {reason}: " + " | ".join(lines))
            return [json.loads(output.read_text().strip().splitlines()[-1]) for output in outputs]

    def sent(self) -> list[dict[str, int]]:
        """Return what each host has sent so far: bytes, headers included, and packets."""
        return [
            json.loads(_run("ip", "-n", self._host(h), "-s", "-j", "link", "show", "eth0"))[0]["stats64"]["tx"]
            for h in range(self.hosts)
        ]

    def _host(self, host: int) -> str:
        return f"{self._name}-h{host}"

    def _environment(self, host: int, more: Mapping[str, str] | None) -> dict[str, str]:
        return {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": "29500", "RANK": str(host), "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": str(host % self.hosts_per_node), "LOCAL_WORLD_SIZE": str(self.hosts_per_node), **(more or {}),
        }  # fmt: skip

    def _build(self) -> None:
        switch = f"{self._name}-switch"
        _run("ip", "netns", "add", switch)
        shared = self.nodes > 1 and self.uplink == "shared"
        bridges = [f"br{node}" for node in range(self.nodes)] if shared else ["br0"]
        for bridge in ["core", *bridges] if shared else bridges:
            _run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", switch, "link", "set", bridge, "up")
        if shared:
            for node, bridge in enumerate(bridges):
                _run("ip", "-n", switch, "link", "add", f"up{node}", "type", "veth", "peer", "name", f"down{node}")
                for end, master in ((f"up{node}", bridge), (f"down{node}", "core")):
                    _run("ip", "-n", switch, "link", "set", end, "master", master, "up")
                    _run(*_limit(switch, end, self.rate_between))
        for host in range(self.hosts):
            self._build_host(host, switch, bridges[host // self.hosts_per_node if shared else 0])

    def _build_host(self, host: int, switch: str, bridge: str) -> None:
        space, port = self._host(host), f"p{host}"
        _run("ip", "netns", "add", space)
        _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
        _run("ip", "-n", space, "addr", "add", f"{self.addresses[host]}/16", "dev", "eth0")
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", space, "link", "set", "eth0", "up")
        commands = self._speed(host, self.rate, self.rate_between)
        if self._two_levels:
            own_node = f"10.77.{host // self.hosts_per_node}.0/24"
            for place, match in (((space, "eth0"), ("dst", own_node)), ((switch, port), ("src", own_node))):
                before, after = _two_levels(*place, match)
                commands = [before, *commands, after]
        for command in commands:
            _run(*command)

    @property
    def _two_levels(self) -> bool:
        return self.nodes > 1 and self.uplink == "own"

    def commands_for(self, rate: str, rate_between: str = "") -> list[list[list[str]]]:
        """For each host, the commands that change its link's speeds in both directions; root may run them anywhere.

        With a shared uplink only `rate` can change.
        """
        return [self._speed(host, rate, rate_between) for host in range(self.hosts)]

    def _speed(self, host: int, rate: str, rate_between: str) -> list[list[str]]:
        """The commands that set a host's link to these speeds; they may be run again with others."""
        ends = ((self._host(host), "eth0"), (f"{self._name}-switch", f"p{host}"))
        if not self._two_levels:
            return [_limit(*end, rate) for end in ends]
        classes = (("1:10", rate), ("1:20", rate_between))
        return [_limit_class(*end, number, speed) for end in ends for number, speed in classes]


def bits_per_second(rate: str) -> float:
    """A rate of `tc` as a number.

    >>> bits_per_second("100mbit")
    100000000.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ConfigError(f"A link rate is written like 100mbit, 1gbit or 500kbit, but got {rate!r}.")
    return float(match[1]) * _UNITS[match[2]]


def sweep() -> None:
    """Remove the laboratories of processes that have ended."""
    for name in _namespaces():
        match = re.match(rf"{_PREFIX}-(\d+)-", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            _run("ip", "netns", "del", name)


def burst_bytes(rate: str) -> int:
    """Bytes a shaper may let through at once: 2 ms of its rate, at least one packet of the largest (offloaded) size.

    >>> burst_bytes("100mbit"), burst_bytes("1gbit")
    (69000, 250000)
    """
    return max(_LARGEST_PACKET, int(bits_per_second(rate) / 8 * 0.002))


def _limit(space: str, device: str, rate: str) -> list[str]:
    """One rate for everything that leaves by this device; 100 ms of queue."""
    shaper = ("tbf", "rate", rate, "burst", str(burst_bytes(rate)), "latency", "100ms")
    return ["tc", "-n", space, "qdisc", "replace", "dev", device, "root", *shaper]


def _limit_class(space: str, device: str, number: str, rate: str) -> list[str]:
    """One rate for what belongs to a class of this device."""
    burst = str(burst_bytes(rate))
    shaper = ("htb", "rate", rate, "burst", burst, "cburst", burst, "quantum", "60000")
    return ["tc", "-n", space, "class", "replace", "dev", device, "parent", "1:", "classid", number, *shaper]


def _two_levels(space: str, device: str, near: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Two classes: 1:10 for what goes to (dst) or comes from (src) the host's own node, 1:20 for everything else.

    Returns:
        The command that makes room for the classes, and the one that sorts packets into them once they exist.
    """
    root = ["tc", "-n", space, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "20"]
    match = ("protocol", "ip", "u32", "match", "ip", *near, "flowid", "1:10")
    return root, ["tc", "-n", space, "filter", "add", "dev", device, "parent", "1:", *match]


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> tuple[int, str] | None:
    """Return None once all have succeeded, or the first host that has not, and what happened to it."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for host, code in enumerate(codes):
            if code:
                return host, f"ended with status {code}"
        if None not in codes:
            return None
        if time.monotonic() > end:
            return codes.index(None), f"did not end within {timeout:g} s"
        time.sleep(0.05)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RunError(f"The laboratory could not run {' '.join(command)!r}: {done.stderr.strip()}")
    return done.stdout
