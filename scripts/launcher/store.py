"""The store in which ranks on one machine meet, as a process of its own.

Usage: python store.py N: at the listening socket with this number, until stdin is closed.

A rank would open it on all addresses of the machine, where everybody on its network could join.
"""

import socket
import sys

import torch.distributed as dist

listener = socket.socket(fileno=int(sys.argv[1]))
host, port = listener.getsockname()
fd = listener.detach()
store = dist.TCPStore(host, port, is_master=True, use_libuv=False, master_listen_fd=fd)
sys.stdin.read()
