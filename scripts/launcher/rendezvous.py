"""Where the ranks meet: an address of the first node, a free port there, the interface to it."""

import contextlib
import fcntl
import os
import random
import re
import socket
import struct

FAST = ["hsn0", "ib0"]  # Slingshot and InfiniBand
SIOCGIFADDR = 0x8915  # Linux's number for "which address has this interface?", see netdevice(7)


def reserve_port() -> socket.socket:
    """Return a socket that keeps a free port for rank 0, until the socket is closed.

    The port is in a range from which no program gets one unasked.
    """
    while True:
        reserved = socket.socket()
        try:
            reserved.bind(("", random.randrange(20000, 30000)))  # it does not listen
        except OSError:
            reserved.close()
            continue
        # Only now: rank 0 sets this option, too, and may listen there. If a different launcher
        # comes to the same number, its bind fails.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return reserved


def address_and_interface(node: str, leads_to: str | None = None) -> tuple[str, str]:
    """Return how the others reach this node of Slurm, and the interface that it uses.

    leads_to   to which host the interface leads: this node if it is the first one

    What the user has set stays. The interface is "" if none is found.
    """
    known = interfaces()
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_to(leads_to or node, known)
    address = known.get(interface)
    if not address or address in addresses_of(node):
        return node, interface
    # The name leads to a slower network or to 127.0.1.1, the node itself, or nobody knows it.
    return address, interface


def interface_variables(interface: str) -> dict[str, str]:
    """Return the variables that name an interface to gloo and NCCL; what the user has set stays."""
    if not interface:
        return {}
    # NCCL takes the beginning of a name, here of all cards of the fast network; gloo a whole name.
    cards = os.environ.get("NCCL_SOCKET_IFNAME") or re.sub("^hsn0$", "hsn", interface)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or interface
    return {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": cards}


def interfaces() -> dict[str, str]:
    """Return this machine's interfaces with their IPv4 addresses, {name: address}."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            request = struct.pack("40s", name.encode())
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(asks, SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def interface_to(host: str, known: dict[str, str]) -> str:
    """Return which of the known interfaces leads from this machine to a host, or ""."""
    source = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks, contextlib.suppress(OSError):
        asks.connect((host, 9))  # nothing is sent
        source = asks.getsockname()[0]
    # A machine may know its own name as 127.0.1.1, where no other machine can reach it.
    outward = [name for name in known if not known[name].startswith("127.")]
    fast = [name for name in FAST if name in known]
    leading = [name for name in outward if known[name] == source]
    return [*fast, *leading, *outward, *known, ""][0]


def addresses_of(name: str) -> list[str]:
    """Return the IPv4 addresses of a name, [] if nobody knows it."""
    with contextlib.suppress(OSError):
        return [found[4][0] for found in socket.getaddrinfo(name, None, socket.AF_INET)]
    return []
