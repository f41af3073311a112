"""The network interface over which this machine reaches another one."""

from __future__ import annotations

import os
import socket
import struct
from fcntl import ioctl

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
IFNAMSIZ = 16
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def address_towards(host: str) -> str:
    """Returns the local IPv4 address from which packets to `host` are sent. Sends no packet itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Returns the name of the interface with a local IPv4 address, or None where that is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[: IFNAMSIZ - 1]))
            except OSError:  # it has no IPv4 address, or the system is not Linux
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def select_gloo_interface(host: str) -> None:
    """Makes Gloo listen on the interface towards `host`, unless the user has selected one.

    Gloo's default is the address of the machine's host name. That is often a loopback address, which other machines
    cannot reach.
    """
    interface = None if GLOO_INTERFACE in os.environ else interface_of(address_towards(host))
    if interface is not None:
        os.environ[GLOO_INTERFACE] = interface
