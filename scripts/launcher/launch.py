"""Start ranks, see how they end, and end those that are left.

scripts/multinode_setup_and_run.sh calls it, with the Python that also runs the ranks:

    launch.py local NxM [OPTION]... -- FILE [ARGUMENT]...   imitate N nodes with M ranks each
    launch.py task [OPTION]... -- FILE [ARGUMENT]...        be one task of a Slurm step
    launch.py plan [OPTION]... -- COMMAND...                inside an allocation: what srun is to do
    launch.py errors PID                                    pass on the stderr of PID's srun
    launch.py probe FIRST ADDRESS INTERFACE                 say what this node has
    launch.py gpus                                          print which GPUs there are here

In a Slurm step one of them runs beside each rank, so it imports little: the standard library only.
"""

import argparse
import contextlib
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the rooms beside this one

from launcher.errors import CANNOT, Verdict, as_a_shell, ending, kill_srun, pass_on, say
from launcher.gpus import has_gpus, name_gpus
from launcher.processes import Group, end_on_signals
from launcher.slurm import choose_ranks, count_gpus, expand, options_of

GRACE = 5  # seconds from SIGTERM to SIGKILL. Whoever started the launcher waits longer
LAST_WORDS = 1.5  # seconds in which the others end by themselves, as a rule, and may say something
STOPPED = 130  # the exit status after Ctrl-C and SIGTERM
# What a torchrun must not find: it sets these itself. Nodes may have unequal numbers of ranks, so
# the ranks must not be told that all nodes are alike, which is the last.
NOT_FOR_TORCHRUN = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
NOT_FOR_TORCHRUN += ["MASTER_ADDR", "MASTER_PORT", "TORCH_ELASTIC_WORKER_IDENTICAL"]
WATCHERS = {  # what prints once a second how busy the GPUs are, by the tool of their maker
    "nvidia-smi": [
        "--query-gpu=timestamp,index,utilization.gpu,memory.used",
        "--format=csv",
        "--loop=1",
    ],
    "rocm-smi": ["--showuse", "--showmemuse", "--csv"],  # once: a shell repeats it
    "xpu-smi": ["dump", "--device", "-1", "--metrics", "0,18"],  # how busy, memory used
}


# A rank.


def command_of(args, variables, address):
    """Return the command of a rank, and its environment.

    With --torchrun the "rank" is the torchrun of a node.

    variables   RANK, LOCAL_RANK, MASTER_ADDR and so on, {name: text}
    address     how the others reach this node
    """
    environment = os.environ | variables
    if not args.torchrun:
        return [sys.executable, "-u", *args.command], environment
    for name in NOT_FOR_TORCHRUN:
        environment.pop(name, None)
    # Or restarted ranks look for the old ones' addresses.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Seconds for a rank to end, then by force.
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"
    port = variables["MASTER_PORT"]
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes", variables["WORLD_SIZE"]]
    command += ["--nproc-per-node", variables["RANKS_PER_NODE"]]
    command += ["--max-restarts", str(args.max_restarts or 0)]
    command += ["--redirects", "2" if args.max_restarts else "0", "--log-dir", "runs/torchrun"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", port]
    command += ["--rdzv-endpoint", f"{variables['MASTER_ADDR']}:{port}"]
    command += ["--rdzv-conf", f"is_host={int(variables['RANK'] == '0')}"]
    return [*command, "--local-addr", address, *args.command], environment


@contextlib.contextmanager
def watched(names):
    """While the statement runs, write how busy this machine is to logs/, in files of these names.

    They are those of the nodes here: one, or the imitated ones.
    """
    watchers = []
    try:
        for name in names:
            watchers += start_watchers(Path("logs"), name.replace(" ", "-"))
        yield
    finally:
        for watcher in watchers:
            watcher.terminate()


def start_watchers(folder, name):
    """Start what writes to cpu-NAME.out and gpu-NAME.out in a folder. Return the Popen objects."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        sys.exit(f"--monitor writes to {folder}/, which cannot be made here: {error.strerror}.")
    commands = [("cpu", ["vmstat", "-n", "-t", "-S", "M", "1"])]
    for tool, options in WATCHERS.items():
        command = [tool, *options]
        if tool == "rocm-smi":
            command = ["sh", "-c", 'while sleep 1; do "$@"; done', "sh", *command]
        if shutil.which(tool):
            commands.append(("gpu", command))
    watchers = []
    for kind, command in commands:
        with (folder / f"{kind}-{name}.out").open("a") as file:
            try:
                watchers.append(subprocess.Popen(command, stdout=file, stderr=file))
            except OSError as error:
                file.write(f"{command[0]}: {error.strerror}\n")
    return watchers


def threads(cpus, ranks):
    """Return how many threads a rank should use: its CPUs, but at most its share of the machine's.

    It is a text, for the environment.
    """
    return str(max(1, min(cpus, os.cpu_count() // ranks)))


def free_port(first):
    """Return a port that is free on this machine, at or after this one."""
    for port in range(first, 65536):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", port))  # nobody can connect: it does not listen
            return port
    sys.exit(f"No port from {first} on is free on {socket.gethostname()}.")


# Imitated nodes.


def be_local(args):
    """Imitate nodes on this machine; return the exit status."""
    nodes, _, each = args.nodes.partition("x")
    nodes, each = int(nodes), int(each or 1)
    port = os.environ.get("MASTER_PORT") or str(free_port(random.randrange(20000, 30000)))
    masks, on = share_gpus(find_gpus(), nodes, each)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    defaults = {"OMP_NUM_THREADS": threads(cpus, nodes * each)}
    interface = "lo0" if sys.platform == "darwin" else "lo"
    defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    common = {name: os.environ.get(name) or default for name, default in defaults.items()}
    print(f"nodes: {nodes} imitated on {socket.gethostname()}, ", end="")
    print(f"ranks on each: {each}, in all: {nodes * each}")
    print(f"meeting point: 127.0.0.1:{port}, interface {common['GLOO_SOCKET_IFNAME']}")
    print(f"each rank: {common['OMP_NUM_THREADS']} threads of {args.python}, on {on}", flush=True)
    if args.dry_run:
        return 0
    tasks = 1 if args.torchrun else each  # on each node
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANKS_PER_NODE": str(each)}
    common |= {"WORLD_SIZE": str(nodes * tasks), "LOCAL_WORLD_SIZE": str(tasks)}
    ranks = []
    for rank in range(nodes * tasks):
        node = rank // tasks
        variables = common | masks[node] | {"RANK": str(rank), "LOCAL_RANK": str(rank % tasks)}
        who = "torchrun" if args.torchrun else f"rank {rank}"
        name = f"{who} on imitated node {node}"
        ranks.append((name, *command_of(args, variables, "127.0.0.1")))
    names = [f"local-{port}-imitated node {node}" for node in range(nodes)]
    with watched(names if args.monitor else []):
        return run_group(ranks)


def find_gpus():
    """Return the variable that chooses GPUs on this machine, and the GPUs that are chosen.

    They are called as the variable calls them: ["CUDA_VISIBLE_DEVICES", "2", "3"]. Where there are
    none the list is empty, and nobody has to wait for torch.
    """
    if not has_gpus() and not Path("/dev/dri").exists():  # which Intel's may have alone
        return []
    # In a process of its own: torch is large. If it cannot be imported, the ranks will say so, too.
    command = [sys.executable, __file__, "gpus"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.split()


def print_gpus():
    """Print what find_gpus returns."""
    import torch

    name, gpus = name_gpus(torch)
    print(name, *gpus)


def share_gpus(found, nodes, each):
    """Divide the GPUs of find_gpus among nodes with so many ranks each.

    Return the variables of each node, and in words what the ranks run on.
    """
    if not found:
        return [{}] * nodes, "the CPU"
    name, *gpus = found
    if len(gpus) >= nodes * each:
        parts = [gpus[node * each : (node + 1) * each] for node in range(nodes)]
        return [{name: ",".join(part)} for part in parts], f"{len(gpus)} GPUs"
    if nodes > 1 and each <= len(gpus):  # each node would believe that it has enough
        hidden = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
        hidden["ONEAPI_DEVICE_SELECTOR"] = "opencl:cpu"
        return [hidden] * nodes, "the CPU, because there are fewer GPUs than ranks"
    return [{}] * nodes, f"{len(gpus)} GPUs"


def run_group(ranks):
    """Run ranks on this machine; when one fails, end the others. Return the exit status.

    ranks   for each its name, command and environment
    """
    end_on_signals()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a script may run this with &
            signal.signal(number, stop)
    verdict, ended, ends = Verdict(), queue.SimpleQueue(), {}
    ours, theirs = os.pipe()
    reader = threading.Thread(target=pass_on, args=(verdict, ours), daemon=True)
    reader.start()
    with Group(GRACE) as group:
        try:
            for name, command, environment in ranks:
                process = group.start(command, env=environment, stderr=theirs)
                # A thread waits for each of them, so their ends come in the right order.
                wait = threading.Thread(target=note_end, args=(process, name, ended), daemon=True)
                wait.start()
            os.close(theirs)
            status = 0
            while len(ends) < len(ranks) and not status:
                name, status = ended.get()
                ends[name] = status
            if status:
                verdict.failed(time.time(), f"{name} ended with {ending(status)}")
                time.sleep(LAST_WORDS)
                while not ended.empty():
                    name, ends_with = ended.get()
                    ends[name] = ends_with
                # They are stopped, or busy with something else. If it is CANNOT, none has failed.
                still = [name for name, *_ in ranks if name not in ends and status != CANNOT]
                for name in still:
                    say(f"Still running: {name}.\n")
            else:
                for process in group.settle():
                    say(f"Left behind by a rank, ended now: process {process}\n")
        finally:
            group.end()
            reader.join(1)  # no longer: a process that nobody can find may hold the pipe
    return verdict.conclude() or as_a_shell(status)


def stop(number, frame):
    """Leave, as after Ctrl-C: the ranks are ended on the way out."""
    sys.exit(STOPPED)


def note_end(process, name, ended):
    """Wait for a rank, and put its name and exit status into a queue."""
    ended.put((name, process.wait()))


# Slurm.


def be_task(args):
    """Be one task of a Slurm step: run the rank, and tell if it fails. Return its exit status."""
    environ, node = os.environ, int(os.environ["SLURM_NODEID"])
    gpus = count_gpus(environ)
    tasks = expand(environ["SLURM_STEP_TASKS_PER_NODE"])[node]
    cpus = int(environ.get("SLURM_CPUS_PER_TASK") or int(environ["SLURM_CPUS_ON_NODE"]) // tasks)
    ranks = tasks
    if args.torchrun:
        if tasks != 1:
            words = "a step has one task a node, which starts the ranks: srun --ntasks-per-node=1"
            sys.exit(f"With --torchrun {words}")
        asked = expand(environ.get("RANKS_PER_NODE") or str(gpus or 1))
        ranks = asked[node] if node < len(asked) else asked[0]
    variables = {
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_WORLD_SIZE": str(tasks),
        "MASTER_ADDR": environ["MASTER_ADDR"],
        "MASTER_PORT": environ.get("MASTER_PORT") or port_of_step(environ),
        "RANKS_PER_NODE": str(ranks),
        "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS") or threads(cpus * tasks // ranks, ranks),
    }
    if gpus and not args.torchrun:  # Slurm may show each task its own GPU only
        variables["GPUS_ON_NODE"] = str(gpus)
    name = environ["SLURMD_NODENAME"]
    log = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}-{name}"
    command, environment = command_of(args, variables, args.address)
    # At Ctrl-C the rank may say something. This process would only add a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with watched([log] if args.monitor and variables["LOCAL_RANK"] == "0" else []):
        status, told = run_and_pass_sigterm_on(command, environment)
    if status and not told:
        who = "torchrun" if args.torchrun else f"rank {variables['RANK']}"
        say(f"launcher: {time.time():.6f} {who} on {name} ended with {ending(status)}\n")
        time.sleep(0.5)  # srun ends a job with the first of its tasks, and may drop what was said
    return as_a_shell(status)


def run_and_pass_sigterm_on(command, environment):
    """Run a command; return its exit status, and whether SIGTERM has come for it.

    Where Slurm tracks processes with control groups, it signals only those that it has started
    itself, such as this one. And the rank may have something to save.
    """
    running, told = [], []

    def pass_sigterm_on(number, frame):
        told.append(number)
        for process in running:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_sigterm_on)
    running.append(subprocess.Popen(command, env=environment))
    if told:  # before it was started
        running[0].send_signal(signal.SIGTERM)
    return running[0].wait(), bool(told)


def port_of_step(environ):
    """Return the port of this step, which follows from its number. Rank 0 looks if it is free."""
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    port = 20000 + (job * 97 + step * 7) % 10000
    if environ["SLURM_PROCID"] == "0" and free_port(port) != port:
        in_use = f"Port {port} on {environ['MASTER_ADDR']} is in use."
        sys.exit(f"{in_use} Choose another one: export MASTER_PORT=29501")
    return str(port)


def print_probe(args):
    """On a node: print its number, for how many ranks it has GPUs, a free port, and what was given.

    Given are its address and its interface; the latter is empty where none was found.
    """
    ranks, port = count_gpus(os.environ) or 1, free_port(args.first)
    print("probe:", os.environ["SLURM_NODEID"], ranks, port, args.address, args.interface)


def print_plan(args):
    """Print what is to be started inside an allocation. Behind each part stands a NUL character.

    The parts: what is said to the user, MASTER_ADDR, MASTER_PORT, RANKS_PER_NODE, and all arguments
    of srun.
    """
    nodes = args.nodes.split()
    # What print_probe has said. The first is the first node's, and may be the only one.
    probes = [line.split() for line in args.probes.splitlines()]
    _, _, port, address, interface = (*probes[0], "-")[:5]
    gpus = [int(probe[1]) for probe in probes]
    if len(gpus) == 1:
        gpus *= len(nodes)
    ranks = choose_ranks(len(nodes), gpus, args.overlap, os.environ)
    cpus, options = options_of(nodes, ranks, args.torchrun, os.environ)
    if args.overlap:
        options.append("--overlap")
    alike = len(set(ranks)) == 1
    each = " ".join(str(count) for count in (ranks[:1] if alike else ranks))
    address = os.environ.get("MASTER_ADDR") or address
    port = os.environ.get("MASTER_PORT") or port
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface
    by = "torchrun" if args.torchrun else "srun"
    said = [
        f"nodes: {args.nodes}, ranks on each: {each}, in all: {sum(ranks)}",
        f"meeting point: {address}:{port}, interface {interface}",
        f"each rank: {cpus} CPUs, {args.python}, started by {by}",
    ]
    print("\n".join(said), address, port, each, *options, *args.command, sep="\0", end="\0")


def pass_errors_on(args):
    """Pass on what srun says on stderr, which is stdin here; return CANNOT or 0."""
    verdict = Verdict()
    pass_on(verdict, sys.stdin.fileno(), lambda: kill_srun(args.pid))
    return verdict.conclude()


def parse_args(words):
    """Return the arguments as argparse has them. What stands behind the first -- is the command."""
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description="See the first lines of this file.")
    parsers = parser.add_subparsers(dest="what", required=True)
    local, task, planned = (parsers.add_parser(name) for name in ("local", "task", "plan"))
    for each in (local, task, planned):
        each.add_argument("--torchrun", action="store_true")
        each.add_argument("--max-restarts", type=int, help="with this, --torchrun is implied")
        each.add_argument("--monitor", action="store_true")
    for each in (local, planned):
        each.add_argument("--python", default=sys.executable, help="its name for the user")
    local.add_argument("nodes")
    local.add_argument("--dry-run", action="store_true")
    task.add_argument("--address", help="how the others reach this node")
    planned.add_argument("--nodes", help="their names, with spaces between them")
    planned.add_argument("--probes", help="what the nodes have answered, a line each")
    planned.add_argument("--overlap", action="store_true", help="in a shell of srun")
    parsers.add_parser("errors").add_argument("pid", type=int)
    parsers.add_parser("gpus")
    probe = parsers.add_parser("probe")
    probe.add_argument("first", type=int, help="a free port is looked for from here on")
    probe.add_argument("address", help="how the others reach this node")
    probe.add_argument("interface", help="through which this node reaches them, or nothing")
    args = parser.parse_args(words[:end])
    args.command = words[end + 1 :]
    if getattr(args, "max_restarts", None) is not None:
        args.torchrun = True
    return args


def main():
    args = parse_args(sys.argv[1:])
    if args.what == "local":
        return be_local(args)
    if args.what == "task":
        return be_task(args)
    if args.what == "errors":
        return pass_errors_on(args)
    if args.what == "plan":
        return print_plan(args)
    if args.what == "probe":
        return print_probe(args)
    return print_gpus()


if __name__ == "__main__":
    sys.exit(main())
