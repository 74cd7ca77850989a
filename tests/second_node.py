"""Lesson 18 on slow links: what it predicts for a second and a third node, and what is measured.

Usage: python tests/second_node.py

A local Slurm cluster of 3 nodes with one rank each, links of 50, 200 and 1000 Mbit/s, three batch
sizes. It prints the table of the lesson's page. Root and Slurm are needed. It takes 20 minutes;
nothing else should run on the machine. The exit status is 1 if less than 80% of the predictions
are within 25%, or if one that promised more than 10% was wrong about faster or slower.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from clusters import bring_up
from helpers import LAUNCHER
from launcher import processes

LINKS = ("50mbit", "200mbit", "1gbit")
BATCH_SIZES = (32, 128, 512)


def main():
    """Run the lesson in each setting; return the exit status."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    near, cells, right = 0, 0, True
    cluster = bring_up(3, f"/run/local-slurm-second-node-{os.getpid()}")
    print("| nodes | link, Mbit/s | batch size | predicted | measured | apart |")
    print("|---|---|---|---|---|---|")
    try:
        for nodes in (2, 3):
            for link in LINKS:
                assert cluster.call("link", link).returncode == 0
                for batch_size in BATCH_SIZES:
                    command = ("salloc", "--quiet", "--nodes", nodes, LAUNCHER, "18")
                    options = ("--batch-size", batch_size)
                    with tempfile.TemporaryDirectory() as folder:
                        done = cluster.run(*command, *options, cwd=folder, timeout=300)
                    assert done.returncode == 0, done.stdout + done.stderr
                    found = re.search(r"([\d.]+) times predicted, ([\d.]+) measured", done.stdout)
                    predicted, measured = map(float, found.groups())
                    apart = max(predicted / measured, measured / predicted) - 1
                    cells += 1
                    near += apart <= 0.25
                    if abs(predicted - 1) > 0.1:
                        right &= (predicted > 1) == (measured > 1)
                    rate = link.replace("1gbit", "1000mbit").removesuffix("mbit")
                    row = f"| {nodes} | {rate} | {batch_size} | {predicted:.3g} | {measured:.3g} |"
                    print(f"{row} {apart:.0%} |", flush=True)
    finally:
        cluster.call("down")
    verdicts = "right" if right else "WRONG"
    print(
        f"\n=> {near} of {cells} within 25%; faster or slower: {verdicts} wherever it promised 10%"
    )
    return 0 if right and near >= 0.8 * cells else 1


if __name__ == "__main__":
    processes.end_on_signals()
    sys.exit(main())
