"""Print what the ranks of the doctor have found, a line a check. Started by doctor.sh.

Usage: table.py <LINES, those of the launcher and those that rank.py prints

The exit status is 1 if a check failed. A check gets the facts of one rank, or of all, and returns
two texts: what is fine, and what is not, with what to do.
"""

import json
import re
import sys

SHM = 32 * 2**20  # bytes of /dev/shm for each rank
LOCKABLE = 2**30  # bytes that InfiniBand cards may keep in memory; NCCL's manual: without limit
CLOCKS = 2  # seconds that the clocks of nodes may differ


def some(names):
    """Return names as text, each once, and of many only the first."""
    names = list(dict.fromkeys(map(str, names)))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def on(ranks):
    """Return "on" and the nodes of these ranks."""
    return "on " + some(rank["node"] for rank in ranks)


def grouped(ranks, key):
    """Return {value: [rank, ...]} where key(rank) is that value."""
    groups = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return groups


# Checks of all ranks together.


def numbers(version):
    """Return the first two numbers of a version, to compare it: 2.6.0+cu124 is (2, 6)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def check_version(name, ranks):
    """Check that one package is usable, new enough and the same on all nodes."""
    looked = [rank for rank in ranks if name in rank["versions"]]
    groups = grouped(looked, lambda rank: rank["versions"][name])
    oldest = ranks[0]["needed"][name]
    text = "; ".join(f"{version} {on(group)}" for version, group in groups.items())
    if not all(version[:1].isdigit() for version in groups):
        todo = "Use one environment for all nodes, with all of requirements.txt"
        return "", f"{name} {text}. {todo}. If it was only slow, try again"
    if any(numbers(version) < numbers(oldest) for version in groups):
        return "", f"{name} {text}. Version {oldest} or newer is needed"
    if len(groups) > 1:
        return "", f"{name} {text}. Use one environment for all nodes, on a disk they share"
    return f"{name} {some(groups)}", ""


def check_versions(ranks):
    """Check Python and all packages of requirements.txt."""
    found = [check_version(name, ranks) for name in ranks[0]["needed"]]
    problems = [problem for _, problem in found if problem]
    if len(problems) > 1:
        others = ", ".join(problem.split()[0] for problem in problems[1:])
        problems[0] += f". Not well either: {others}"
    return ", ".join(fine for fine, _ in found), problems[0] if problems else ""


def check_gpus(ranks):
    """Check that torch sees the GPUs of each node, as many on each, a different one for a rank."""
    blind = [rank for rank in ranks if rank["has_gpus"] and not rank["gpus"] and not rank["hidden"]]
    if any(not rank["built"] for rank in blind):
        version = some(rank["versions"]["torch"] for rank in blind)
        todo = "Install torch and torchvision for GPUs: https://pytorch.org/get-started/locally/"
        return "", f"torch {version} {on(blind)} is for CPUs only, and there are GPUs. {todo}"
    if blind:
        todo = "Ask for them (--gpus-per-node); if you did, is the driver too old? See nvidia-smi"
        return "", f"torch sees none {on(blind)}, which has some. {todo} and day2/SITES.md"
    counts, shared, own = {}, "", True
    for group in grouped(ranks, lambda rank: rank["node"]).values():
        seen = {gpu for rank in group for gpu in rank["gpus"]}
        used = [r["gpus"][r["local_rank"] % len(r["gpus"])] for r in group if r["gpus"]]
        problem = problem_of_node(group, seen, set(used))
        if problem:
            return "", problem
        own = own and len(used) == len(seen)
        counts.setdefault(len(seen), []).extend(group)
        if len(used) > len(seen):
            shared = f", shared by {len(used)} ranks through gloo: slow"
    text = "; ".join(f"{count} {on(group)}" for count, group in counts.items())
    if len(counts) > 1 and not own:  # nodes may be unequal, if no GPU is idle or shared
        return "", f"{text}. Ask for as many on each node: --gpus-per-node"
    if not any(counts):
        return "none, the ranks use the CPU", ""
    return text + (shared or ", a different one for each rank"), ""


def problem_of_node(group, seen, used):
    """Return how the ranks of one node share its GPUs badly, "" if they do not."""
    who = "ranks {} {}".format(some(rank["rank"] for rank in group), on(group))
    if len(used) < min(len(group), len(seen)):
        return f"{who} use only {some(used)}. Let each see all of its node: --gpus-per-node alone"
    if len(used) < len(group) or any(rank["backend"] != "gloo" for rank in group):
        return ""
    text = f"each of {who} has its own, but they would talk through gloo, which is slow"
    if all(len(rank["gpus"]) >= len(group) for rank in group):
        return f"{text}: this torch has nothing else for them. See day2/SITES.md"
    todo = f"export SLURM_GPUS_ON_NODE={len(group)}"
    return f"{text}, because Slurm does not say how many GPUs there are. {todo}"


# Checks of each rank: they return what is wrong and what to do, or None.


def check_cpus(rank):
    """Check that the rank has the CPUs that it asked for, and enough for its threads."""
    have, asked, threads = rank["cpus"], rank["cpus_asked"], rank["threads"]
    if have < min(asked, rank["cpus_of_node"]):
        return f"{have}, although {asked} were asked for", "See --cpu-bind and SLURM_CPU_BIND"
    together = threads * rank["local_ranks"]
    if threads > have or (threads > 1 and together > rank["cpus_of_node"]):
        text = f"{threads} threads for each rank, which has {have}"
        return text, "They take turns: unset OMP_NUM_THREADS"
    return None


def check_files(rank):
    """Check that the folder is one that all nodes share, and that lessons can write there."""
    if not rank["writes"]:
        return f"you cannot write to {rank['folder']}", "Go to a folder where you can: cd"
    if not rank["shares"]:
        todo = "Go to a folder on the file system that all nodes share: cd"
        return f"what is written to {rank['folder']} is not seen", todo
    return None


def check_data(rank):
    """Check the files of MNIST."""
    if rank["damaged"]:
        todo = "Restore it, in the folder of the course: git checkout data/MNIST"
        return f"{some(rank['damaged'])} missing or damaged", todo
    return None


def check_shm(rank):
    """Check that /dev/shm has room: data loaders and NCCL exchange data there."""
    wanted = SHM * rank["local_ranks"]
    if rank["shm"] is not None and rank["shm"] < wanted:
        text = f"less than {wanted / 2**20:,.0f} MB free"
        return text, "Remove what lies there; in a container: --shm-size=1g"
    return None


def check_lockable(rank):
    """Check that InfiniBand cards may keep enough in memory (nccl-tests#206)."""
    needed = rank["several_hosts"] and rank["infiniband"] and rank["gpus"]
    if needed and 0 <= rank["lockable"] < LOCKABLE:
        text = f"only {rank['lockable'] / 2**20:,.0f} MB, too little for InfiniBand"
        return text, "Ask your site for: ulimit -l unlimited"
    return None


# The meeting.


def check_meeting(ranks):
    """Check that all ranks reached the first one."""
    apart = [rank for rank in ranks if not rank.get("met")]
    in_use = [rank for rank in apart if "in use" in rank.get("error", "")]
    if in_use:
        return "", f"{in_use[0]['error']}. Choose another port: export MASTER_PORT=29501"
    # The first rank waits for the others. It only says that they did not come.
    todo = "Look at /etc/hosts there, at the firewall, and at the interface"
    problem = what_they_say([rank for rank in apart if rank["rank"]] or apart, todo)
    return f"{len(ranks)} ranks have met", problem


def check_all_reduce(ranks):
    """Check the all_reduce of those that have met. The ranks choose new ports for it."""
    bad = [rank for rank in ranks if rank.get("met") and "speed" not in rank]
    todo = "Open all ports between the nodes, or choose another: export GLOO_SOCKET_IFNAME"
    return ranks[0].get("speed", "not done"), what_they_say(bad, todo)


def what_they_say(ranks, todo):
    """Return what went wrong with these ranks as the first of them says it; "" if there is none."""
    if not ranks:
        return ""
    who = "rank {} {}".format(some(rank["rank"] for rank in ranks), on(ranks))
    error = ranks[0].get("error", "it said no more")
    return f"{who}: {error}. {ranks[0].get('where', '')}. {todo}"


def check_clocks(ranks):
    """Check that clocks agree: by them the launcher says which rank failed first."""
    timed = sorted((rank for rank in ranks if "clock" in rank), key=lambda rank: rank["clock"])
    apart = timed[-1]["clock"] - timed[0]["clock"] if timed else 0
    if apart > CLOCKS:
        text = f"that of {timed[-1]['node']} is {apart:,.0f} s ahead of that of {timed[0]['node']}"
        return "", f"{text}. Ask your site to set them"
    return f"within {CLOCKS} s of each other", ""


# The table.

OF_EACH = {
    "CPUs": (check_cpus, "enough for the threads of each rank"),
    "shared files": (check_files, "every node sees this folder"),
    "data": (check_data, "MNIST is there on every node"),
    "/dev/shm": (check_shm, "room enough on every node"),
    "locked memory": (check_lockable, "enough, or no InfiniBand that needs it"),
}
OF_ALL = {"versions": check_versions, "GPUs": check_gpus}
OF_MEETING = {
    "meeting point": check_meeting,
    "all_reduce": check_all_reduce,
    "clocks": check_clocks,
}
TOTAL = 1 + len(OF_EACH) + len(OF_ALL) + len(OF_MEETING)  # the first: whether all have answered


def check_each(check, ranks):
    """Return what is wrong with some ranks, and on which nodes; "" if nothing is."""
    groups = grouped(ranks, check)
    groups.pop(None, None)
    return "; ".join(f"{text} {on(group)}. {todo}" for (text, todo), group in groups.items())


def check_answers(nodes, ranks):
    """Check that all ranks have answered; nodes has the node of each."""
    absent = [rank for rank in range(len(nodes)) if rank not in {x["rank"] for x in ranks}]
    if absent:
        where = some(nodes[rank] for rank in absent)
        return "", f"rank {some(absent)} on {where} gave none. See what is said above, or try again"
    return f"of {len(ranks)} ranks", ""


def read_lines(lines):
    """Return the node of each rank, as the launcher says it first, and the facts of all ranks.

    All other lines are passed on.
    """
    nodes, facts = [], {}
    for line in lines:
        if line.startswith('{"rank": '):
            found = json.loads(line)
            known = facts.setdefault(found["rank"], found)
            known.update(found)
            known.get("versions", {}).update(found.get("others", {}))
            continue
        print(line, end="", flush=True)
        said = re.match(r"nodes: (.*), ranks on each: (.*), in all: (\d+)$", line)
        if said:
            nodes = expand_nodes(*said.groups())
    return nodes, [facts[rank] for rank in sorted(facts)]


def expand_nodes(names, counts, total):
    """Return the node of each rank of the launcher's first line: node1 node2, 3 2, 5."""
    counts = [int(count) for count in counts.split()]
    names = names.split()
    if "imitated" in names:
        names = [f"imitated node {node}" for node in range(int(total) // counts[0])]
    if len(counts) == 1:
        counts *= len(names)
    return [name for name, count in zip(names, counts) for _ in range(count)]


def make_table(nodes, ranks):
    """Return the checks as [(name, what is fine, what is not), ...]."""
    table = [("answers", *check_answers(nodes, ranks))]
    if not ranks:
        return table
    for name, (check, fine) in OF_EACH.items():
        table.append((name, fine, check_each(check, ranks)))
    for name, check in OF_ALL.items():
        table.append((name, *check(ranks)))
    usable = not check_versions(ranks)[1]
    for name, check in OF_MEETING.items():
        if usable:  # what cannot be imported cannot meet, and what has not met has no clock
            table.append((name, *check(ranks)))
            usable = not table[-1][2]
    return table


def main():
    """Read, print the table, and return the exit status."""
    nodes, ranks = read_lines(sys.stdin)
    if not nodes:
        return 1  # nothing was started: the launcher has said why
    table = make_table(nodes, ranks)
    for name, fine, problem in table:
        print(f"FAIL {name}: {problem}" if problem else f"ok   {name}: {fine}")
    failed = sum(bool(problem) for _, _, problem in table)
    if failed:
        print(f"=> not ready: {failed} of {TOTAL} checks failed")
        return 1
    print(f"=> ready: {TOTAL} checks ok, {len(ranks)} ranks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
