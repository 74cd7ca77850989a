"""Print what the ranks of the doctor have found, one line for each check. Started by doctor.sh.

Usage: table.py <LINES, which the launcher and probe.py print

The exit status is 1 if a check failed. probe.py says what each rank tells of each check.
"""

import json
import re
import sys

# A check that needs another one: what can't be imported sees no GPUs and can't meet.
AFTER = {"GPUs": "torch", "backend": "torch", "rendezvous": "torch", "all_reduce": "rendezvous"}


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


def check(name, ranks):
    """Return what is fine in a check, and what is wrong and what to do, as all ranks found it."""
    found = [rank for rank in ranks if name in rank["checks"]]
    bad = [rank for rank in found if rank["checks"][name][1]]
    if name == "rendezvous":  # rank 0 waits for the others: it only knows that they never arrived
        bad = [rank for rank in bad if rank["rank"]] or bad
    if bad:
        groups = grouped(bad, lambda rank: rank["checks"][name][1])
        return "", "; ".join(f"{on_nodes(group)}: {what}" for what, group in groups.items())
    values = grouped(found, lambda rank: rank["checks"][name][0])
    value, _, todo = found[0]["checks"][name]
    if todo and len(values) > 1:
        each = "; ".join(f"{value} {on_nodes(group)}" for value, group in values.items())
        return "", f"{each}. {todo}"
    return value, ""


def read_lines(lines):
    """Return how many ranks there are, as the launcher says it first, and what each has found.

    All other lines are passed on.
    """
    total, ranks = 0, {}
    for line in lines:
        if line.startswith('{"rank": '):
            found = json.loads(line)
            known = ranks.setdefault(found["rank"], found)
            known["checks"] |= found["checks"]
            continue
        print(line, end="", flush=True)
        said = re.match(r"nodes: .*, in all: (\d+)$", line)
        if said:
            total = int(said[1])
    return total, [ranks[rank] for rank in sorted(ranks)]


def make_table(total, ranks):
    """Return the checks as [(name, what is fine, what is not), ...]."""
    absent = sorted(set(range(total)) - {rank["rank"] for rank in ranks})
    came = f"answers came only from {join_names(rank['node'] for rank in ranks) or 'no node'}"
    problem = (
        f"rank {join_names(absent)} did not answer; {came}. Read the lines above, or try again"
    )
    table = [("answers", f"from {total} ranks", problem if absent else "")]
    passed = set()
    for name in dict.fromkeys(name for rank in ranks for name in rank["checks"]):
        if AFTER.get(name) in {None, *passed}:
            fine, problem = check(name, ranks)
            table.append((name, fine, problem))
            if not problem:
                passed.add(name)
    return table


def main():
    total, ranks = read_lines(sys.stdin)
    if not total:
        return 1  # nothing was started: the launcher has said why
    table = make_table(total, ranks)
    for name, fine, problem in table:
        print(f"FAIL {name}: {problem}" if problem else f"ok   {name}: {fine}")
    failed = sum(bool(problem) for _, _, problem in table)
    if failed:
        print(f"=> not ready: {failed} of {len(table)} checks failed")
    else:
        print(f"=> ready: {len(table)} checks ok, {len(ranks)} ranks")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
