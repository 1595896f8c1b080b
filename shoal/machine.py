"""Which machine this is, and at which of its addresses others reach it."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import psutil

from shoal.errors import LaunchError

BOOT = Path("/proc/sys/kernel/random/boot_id")
REMEDY = "name the network's interface, or its addresses as in 10.0.0.0/8, in cluster.interface"


def identity() -> str:
    """Equal for processes that reach each other through this machine's sockets and memory, and for no others.

    Containers of one machine have networks, or numbers of processes, of their own; then they are machines
    of their own.
    """
    if not BOOT.exists():
        return socket.gethostname()
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
    return "/".join([BOOT.read_text().strip(), *map(str, spaces)])


def address(interface: str | None, towards: str) -> str:
    """This machine's address on the network that the others are on.

    Args:
        interface: an interface's name, or a network as in 10.0.0.0/8; None = the way to the first machine.
        towards: the first machine's name or address.

    Raises:
        LaunchError: there is none, or more than one.
    """
    own = addresses()
    if interface is None:
        return _facing(towards, own)
    if interface in own:
        found = own[interface]
    else:
        try:
            network = ipaddress.ip_network(interface, strict=False)
        except ValueError:
            names = ", ".join(sorted(own))
            raise LaunchError(
                f"cluster.interface: {interface} is no network, and no interface of this machine ({names})",
                remedy=REMEDY,
            ) from None
        found = [at for each in own.values() for at in each if ipaddress.ip_address(at) in network]
    if not found:
        raise LaunchError(f"this machine has no address at {interface} (cluster.interface)", remedy=REMEDY)
    return found[0]


def interface_of(at: str) -> str | None:
    """The name of the interface that has this address."""
    return next((name for name, found in addresses().items() if at in found), None)


def addresses() -> dict[str, list[str]]:
    """This machine's IPv4 addresses, by interface."""
    found = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: ats for name, ats in found.items() if ats}


def _facing(towards: str, own: dict[str, list[str]]) -> str:
    """The address from which this machine reaches the first one; its own where it is that one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((towards, 9))
        except OSError as error:
            raise LaunchError(f"{towards} (MASTER_ADDR) cannot be reached ({error})", remedy=REMEDY) from None
        at = str(probe.getsockname()[0])
    if not ipaddress.ip_address(at).is_loopback:
        return at
    outward = [at for each in own.values() for at in each if not ipaddress.ip_address(at).is_loopback]
    if len(outward) != 1:  # this is the first machine, and its name leads to itself alone
        raise LaunchError(
            f"this machine has {len(outward)} addresses that others might reach "
            f"({', '.join(outward) or 'none'}), and its name, {towards} (MASTER_ADDR), says none of them",
            remedy=REMEDY,
        )
    return outward[0]
