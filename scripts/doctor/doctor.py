"""Checks, as every rank of a job, whether lessons can run. Started by scripts/doctor.sh.

Rank 0 listens on MASTER_PORT, where the ranks of a lesson will meet. All ranks send it their
facts there (facts.py). It prints one line a check (checks.py) and answers
"go", for an all_reduce of 2 seconds, or "stop". Every wait has an end.
"""

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the rooms beside this one

from doctor.checks import CHECKS, check_meeting
from doctor.facts import (
    ANSWERED,
    CONNECTED,
    JOB,
    MASTER,
    NODE,
    PORT,
    RANK,
    TOKEN,
    TOLD,
    WORLD_SIZE,
    Child,
    be_the_child,
    find_facts,
    last_line,
    left,
)


def resolve(name):
    """Return the addresses of a host. Raises OSError. In a thread: it can take minutes."""
    found = []

    def look():
        try:
            answers = socket.getaddrinfo(name, PORT, type=socket.SOCK_STREAM)
            found.append([answer[4][0] for answer in answers])
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(left(CONNECTED))
    result = found[0] if found else TimeoutError("no answer")
    if isinstance(result, OSError):
        raise result
    return result


def connect():
    """Return a connection to rank 0. Raises ConnectionError that says why there is none."""
    while True:
        addresses = []
        try:
            addresses = resolve(MASTER)
            return socket.create_connection((MASTER, PORT), min(5, left(CONNECTED)))
        except OSError as error:
            if left(CONNECTED) <= 0.5:
                raise ConnectionError(why_not(addresses, error)) from None
        time.sleep(0.3)


def why_not(addresses, error):
    """Return in words why rank 0 was not reached, and what to do."""
    reason = last_line(error.strerror or error)
    if not addresses:
        todo = "Compare /etc/hosts and /etc/resolv.conf here with those of the other nodes"
        return f"the name {MASTER} cannot be resolved ({reason}). {todo}"
    text = f"{MASTER} is {addresses[0]} here, and port {PORT} there cannot be reached ({reason})"
    if addresses[0].startswith("127.") and addresses[0] != MASTER:
        return f"{text}. That is this node itself: correct its /etc/hosts"
    return f"{text}. Look at the firewall and at the interface that leads there"


def ask(child):
    """Send rank 0 the facts. Return its answer, or an empty string after saying why."""
    try:
        with connect() as connection:
            greeting = {"job": JOB, "rank": RANK, "node": NODE}
            connection.sendall(json.dumps(greeting).encode() + b"\n")
            facts = json.dumps(find_facts(child)).encode()
            connection.settimeout(left(ANSWERED))
            connection.sendall(facts + b"\n")
            answer = connection.makefile().readline().strip()
        if not answer:
            raise ConnectionError(f"what listens on {MASTER}:{PORT} is not rank 0, or has ended")
        return answer
    except OSError as error:
        print(f"rank {RANK} on {NODE}: {last_line(error)}.")
        return ""


def listen():
    """Return the socket that the ranks will find at MASTER_ADDR and MASTER_PORT."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(
            ("", PORT), family=family, dualstack_ipv6=both, backlog=WORLD_SIZE
        )
    except OSError as error:
        todo = "Choose another: export MASTER_PORT=29501"
        reason = os.strerror(error.errno)
        sys.exit(f"FAIL meeting point: port {PORT} on {NODE}: {reason}. {todo}")


def serve(listener):
    """Collect the facts, print the table, answer. Return how many checks failed."""
    greeted, nodes, everyone = {}, {}, []
    while len(greeted) < WORLD_SIZE and left(CONNECTED + 2) > 0.1:
        listener.settimeout(left(CONNECTED + 2))
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            connection, _ = listener.accept()
            connection.settimeout(1)
            stream = connection.makefile()
            hello = json.loads(stream.readline(1000))
            if hello["job"] == JOB and hello["rank"] not in greeted:  # no rank of another job
                nodes[hello["rank"]] = hello["node"]
                greeted[hello["rank"]] = connection, stream
    listener.close()  # init_process_group listens here next
    for _, (connection, stream) in sorted(greeted.items()):
        connection.settimeout(left(TOLD))
        with contextlib.suppress(OSError, ValueError):
            everyone.append(json.loads(stream.readline()))
    TOKEN.unlink(missing_ok=True)
    table = [("meeting point", *check_meeting(nodes, everyone))]
    table += [(name, *check(everyone)) for name, check in CHECKS.items()] if everyone else []
    for name, fine, problem in table:
        print(f"FAIL {name}: {problem}" if problem else f"ok   {name}: {fine}")
    failed = sum(bool(problem) for _, _, problem in table)
    for connection, _ in greeted.values():
        with contextlib.suppress(OSError):
            connection.sendall(b"stop\n" if failed else b"go\n")
    return failed


def stop(*_):
    """End at once, when a signal says so, and leave no file. The child ends by itself."""
    if RANK == 0:
        TOKEN.unlink(missing_ok=True)
    os._exit(1)


def main():
    """Be one rank; rank 0 is the meeting point as well."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    with contextlib.ExitStack() as stack:
        if RANK == 0:
            listener, result = listen(), queue.Queue()
            stack.callback(TOKEN.unlink, missing_ok=True)
            with contextlib.suppress(OSError):
                TOKEN.write_text(secrets.token_hex())
            meeting = threading.Thread(target=lambda: result.put(serve(listener)), daemon=True)
            meeting.start()
        child = Child()
        stack.callback(child.end)
        answer = ask(child)
        failed = result.get(timeout=left(ANSWERED)) if RANK == 0 else 0
        line, problem = child.go() if answer == "go" else ("", "")
    if RANK:
        if problem:
            print(f"rank {RANK} on {NODE}: all_reduce: {problem}.")
        return
    if problem:
        todo = "Ports besides MASTER_PORT must be open too; or choose another GLOO_SOCKET_IFNAME"
        print(f"FAIL all_reduce: {problem}. {todo}")
    elif line:
        print(f"ok   all_reduce: {line}")
    if line and not problem:
        print(f"=> ready: {len(CHECKS) + 2} checks ok, {WORLD_SIZE} ranks")
    else:
        print(f"=> not ready: {failed or 1} of {len(CHECKS) + 2} checks failed")


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        be_the_child()
    elif "RANK" not in os.environ:
        sys.exit("Start this with scripts/doctor.sh")
    else:
        main()
