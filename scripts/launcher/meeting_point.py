"""Where the ranks meet: an address of the first node, a free port there, the interface to it."""

import contextlib
import fcntl
import os
import random
import re
import socket
import struct
import subprocess
import sys

FAST = ["hsn0", "ib0"]  # Slingshot and InfiniBand
# Linux's numbers for the questions about an interface, see netdevice(7).
SIOCGIFFLAGS, SIOCGIFADDR, IFF_UP = 0x8913, 0x8915, 1


def free_port(first=None):
    """Return a port that is free on this machine, at or after this one (any from 20000 on)."""
    first = first or random.randrange(20000, 30000)
    for port in range(first, 65536):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", port))  # nobody can connect: it does not listen
            return port
    sys.exit(f"No port from {first} on is free on {socket.gethostname()}.")


def address_and_interface(node, leads_to=None):
    """Return how the others reach this node of Slurm, and the interface that it uses.

    leads_to   to which host the interface leads: this node if it is the first one

    What the user has set stays. The interface is "" where none is found.
    """
    known = interfaces()
    name = address_of(node)
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_to(leads_to or name, known)
    return own_address(name, known.get(interface, "")), interface


def variables_of(interface):
    """Return the variables that name an interface to gloo and NCCL; what the user has set stays."""
    if not interface:
        return {}
    # NCCL takes the beginning of a name, here of all cards of the fast network; gloo a whole name.
    cards = os.environ.get("NCCL_SOCKET_IFNAME") or re.sub("^hsn0$", "hsn", interface)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or interface
    return {"GLOO_SOCKET_IFNAME": chosen, "NCCL_SOCKET_IFNAME": cards}


def interfaces():
    """Return this machine's interfaces that are up, with their IPv4 addresses, {name: address}."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        for _, name in socket.if_nameindex():
            request = struct.pack("40s", name.encode())
            with contextlib.suppress(OSError):  # it has no such address
                address = fcntl.ioctl(asks, SIOCGIFADDR, request)[20:24]
                flags = fcntl.ioctl(asks, SIOCGIFFLAGS, request)[16]
                if flags & IFF_UP:
                    found[name] = socket.inet_ntoa(address)
    return found


def interface_to(host, known):
    """Return the interface through which this machine reaches a host, or "".

    known   as interfaces() returns them
    """
    if host.startswith("127."):  # all nodes are on this machine
        return "lo"
    source = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks, contextlib.suppress(OSError):
        asks.connect((host, 9))  # nothing is sent
        source = asks.getsockname()[0]
    # A machine may know its own name as 127.0.1.1, where no other can reach it.
    outward = [name for name in known if not known[name].startswith("127.")]
    fast = [name for name in FAST if name in known]
    leading = [name for name in outward if known[name] == source]
    return [*fast, *leading, *outward, ""][0]


def own_address(name, address):
    """Return a node's name if it leads to this address, of the interface that it uses.

    Otherwise the address: the name leads into a slower network, or to 127.0.1.1, the node itself.
    """
    if not address or address.startswith("127.") or address in addresses_of(name):
        return name
    return address


def address_of(node):
    """Return how others reach one of Slurm's nodes: its name, or the address that Slurm knows."""
    if addresses_of(node):
        return node
    ask = ["scontrol", "show", "node", node]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # not in a container
        shown = subprocess.check_output(ask, stderr=subprocess.DEVNULL).decode()
        return re.search(r"NodeAddr=(\S+)", shown).group(1)
    return node


def addresses_of(name):
    """Return the IPv4 addresses of a name, [] where nobody knows it."""
    with contextlib.suppress(OSError):
        return [found[4][0] for found in socket.getaddrinfo(name, None, socket.AF_INET)]
    return []
