"""Print what the ranks of the doctor have found, one line for each check. Started by doctor.sh.

Usage: table.py <LINES, which the launcher and probe.py print

The exit status is 1 if a check failed. A check gets the facts of all ranks and returns two texts:
what is fine, and what is wrong and what to do. Some checks are made by each rank for itself.
"""

import json
import re
import sys


def join_names(names):
    """Return names as text, each once; of many, only the first ones."""
    names = list(dict.fromkeys(map(str, names)))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def on_nodes(ranks):
    return "on " + join_names(rank["node"] for rank in ranks)


def grouped(ranks, key):
    """Return {value: [rank, ...]} where key(rank) is that value."""
    groups = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return groups


def named(groups):
    """Return each value of grouped(), and on which nodes it is."""
    return "; ".join(f"{value} {on_nodes(group)}" for value, group in groups.items())


def check_each(name, ranks):
    """Return what the ranks have found themselves in a check."""
    fine, _ = ranks[0]["checks"][name]
    groups = grouped(ranks, lambda rank: rank["checks"][name][1])
    groups.pop("", None)
    return fine, "; ".join(f"{on_nodes(group)}: {problem}" for problem, group in groups.items())


def check_versions(ranks):
    """Check that Python and each package of requirements.txt is usable and the same everywhere."""
    fine = []
    for name in ranks[0]["versions"]:
        found = [rank for rank in ranks if name in rank["versions"]]
        groups = grouped(found, lambda rank, name=name: rank["versions"][name])
        if len(groups) > 1 or not next(iter(groups))[:1].isdigit():
            todo = "Use one environment for all nodes, on a disk they share, with all of"
            return "", f"{name} {named(groups)}. {todo} requirements.txt"
        fine.append(f"{name} {join_names(groups)}")
    return ", ".join(fine), ""


def check_gpus(ranks):
    """Check that torch sees the GPUs of each node, and that each rank can have a different one."""
    blind = [rank for rank in ranks if rank["has_gpus"] and not rank["gpus"]]
    if any(not rank["built"] for rank in blind):
        version = join_names(rank["versions"]["torch"] for rank in blind)
        todo = "Install torch and torchvision for GPUs: https://pytorch.org/get-started/locally/"
        return "", f"torch {version} {on_nodes(blind)} is for CPUs only, but there are GPUs. {todo}"
    if blind:
        todo = "Ask for them: --gpus-per-node. If you did, is the driver too old? See nvidia-smi"
        return "", f"torch sees no GPU {on_nodes(blind)}, which has some. {todo} and day2/SITES.md"
    nodes = grouped(ranks, lambda rank: rank["node"]).values()
    counts = []
    for group in nodes:
        gpus = {gpu for rank in group for gpu in rank["gpus"]}
        used = {r["gpus"][r["local_rank"] % len(r["gpus"])] for r in group if r["gpus"]}
        if len(used) < min(len(group), len(gpus)):
            who = f"ranks {join_names(rank['rank'] for rank in group)} {on_nodes(group)}"
            todo = "Let each see them all: --gpus-per-node alone"
            return "", f"{who} use only {join_names(used)}. {todo}"
        counts.append(str(len(gpus)))
    backends = grouped(ranks, lambda rank: rank["backend"])
    if len(backends) > 1:
        text = f"ranks would use different backends: {named(backends)}"
        return "", f"{text}. Ask for as many on each node"
    if not any(rank["gpus"] for rank in ranks):
        return "none, the ranks use the CPU", ""
    how = "gloo connects ranks, slowly" if "gloo" in backends else "a different one for each rank"
    return f"{', '.join(counts)} on the nodes, {how}", ""


def check_rendezvous(ranks):
    """Check that all ranks reached the first one."""
    apart = [rank for rank in ranks if not rank.get("met")]
    # The first rank waits for the others, so it can only say that they never arrived.
    todo = "Look at /etc/hosts there, the firewall, the interface, and MASTER_PORT"
    problem = what_they_say([rank for rank in apart if rank["rank"]] or apart, todo)
    return f"{len(ranks)} ranks have met", problem


def check_all_reduce(ranks):
    """Check the all_reduce of those that have met. The ranks choose new ports for it."""
    bad = [rank for rank in ranks if rank.get("met") and "speed" not in rank]
    todo = "Open all ports between the nodes, or choose a network: export GLOO_SOCKET_IFNAME"
    return ranks[0].get("speed", "not done"), what_they_say(bad, todo)


def what_they_say(ranks, todo):
    """Return what went wrong with these ranks as the first of them says it; "" if there is none."""
    if not ranks:
        return ""
    who = f"rank {join_names(rank['rank'] for rank in ranks)} {on_nodes(ranks)}"
    error = ranks[0].get("error", "it said nothing more")
    return f"{who}: {error}. {ranks[0].get('where', '')}. {todo}"


def read_lines(lines):
    """Return how many ranks there are, as the launcher says it first, and what each has found.

    All other lines are passed on.
    """
    total, facts = 0, {}
    for line in lines:
        if line.startswith('{"rank": '):
            found = json.loads(line)
            facts.setdefault(found["rank"], found).update(found)
            continue
        print(line, end="", flush=True)
        said = re.match(r"nodes: .*, in all: (\d+)$", line)
        if said:
            total = int(said[1])
    return total, [facts[rank] for rank in sorted(facts)]


def make_table(total, ranks):
    """Return the checks as [(name, what is fine, what is not), ...]."""
    absent = sorted(set(range(total)) - {rank["rank"] for rank in ranks})
    came = f"answers came only from {join_names(rank['node'] for rank in ranks) or 'no node'}"
    problem = (
        f"rank {join_names(absent)} did not answer; {came}. Read the lines above, or try again"
    )
    table = [("answers", f"from {total} ranks", problem if absent else "")]
    if not ranks:
        return table
    table += [(name, *check_each(name, ranks)) for name in ranks[0]["checks"]]
    table.append(("GPUs", *check_gpus(ranks)))
    table.append(("versions", *check_versions(ranks)))
    # What cannot be imported cannot meet, and then there is no all_reduce.
    if not table[-1][2]:
        table.append(("rendezvous", *check_rendezvous(ranks)))
    if not table[-1][2]:
        table.append(("all_reduce", *check_all_reduce(ranks)))
    return table


def main():
    total, ranks = read_lines(sys.stdin)
    if not total:
        return 1  # nothing was started: the launcher has said why
    table = make_table(total, ranks)
    for name, fine, problem in table:
        print(f"FAIL {name}: {problem}" if problem else f"ok   {name}: {fine}")
    busy = [rank for rank in ranks if rank["busy"]]
    if busy:
        what = "more than half of the cores were busy in the last minute"
        print(f"note CPUs: {on_nodes(busy)} {what}. Lessons run, but what they measure will vary")
    asked = {rank["node"] for rank in ranks if len(rank["versions"]) > 2}  # Python and torch
    slow = [rank for rank in ranks if rank["node"] not in asked]
    if slow:
        print(f"note versions: {on_nodes(slow)} there was no time to import the other packages")
    failed = sum(bool(problem) for _, _, problem in table)
    if failed:
        print(f"=> not ready: {failed} of {len(table)} checks failed")
    else:
        print(f"=> ready: {len(table)} checks ok, {len(ranks)} ranks")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
