"""How a rank is started, or with --torchrun the torchrun of a node, which starts its ranks."""

import os
import sys

# What a torchrun must not find: it sets these itself. Nodes may have unequal numbers of ranks, so
# the ranks must not be told that all nodes are alike, which is the last.
NOT_FOR_TORCHRUN = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
NOT_FOR_TORCHRUN += ["MASTER_ADDR", "MASTER_PORT", "TORCH_ELASTIC_WORKER_IDENTICAL"]


def command_of(options, variables, address):
    """Return the command of a rank, or of a node's torchrun, and its environment.

    options     those of launch.py
    variables   RANK, LOCAL_RANK, MASTER_ADDR and so on, {name: text}
    address     how the others reach this node
    """
    environment = {**os.environ, **variables}
    if not options.torchrun:
        return [sys.executable, "-u", *options.command], environment
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
    command += ["--max-restarts", str(options.max_restarts or 0)]
    command += ["--redirects", "2" if options.max_restarts else "0", "--log-dir", "runs/torchrun"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", port]
    command += ["--rdzv-endpoint", f"{variables['MASTER_ADDR']}:{port}"]
    command += ["--rdzv-conf", f"is_host={int(variables['RANK'] == '0')}"]
    return [*command, "--local-addr", address, *options.command], environment


def threads(cpus, ranks):
    """Return how many threads a rank should use: its CPUs, but at most its share of the machine's.

    It is a text, for the environment. What the user has set stays.
    """
    share = max(1, min(cpus, os.cpu_count() // ranks))
    return os.environ.get("OMP_NUM_THREADS") or str(share)
