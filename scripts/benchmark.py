"""Measure the course side by side with what one would use instead.

Usage: scripts/benchmark.py                          all cases, about 20 minutes
       scripts/benchmark.py --only data all_reduce   these
       scripts/benchmark.py --list                   what there is, and what is aimed at
       scripts/benchmark.py --show                   the table of what runs/benchmark/ holds

A case measures all its figures in turn, again and again until its time is over. A figure is the
median of that, with the lowest and the highest. A ratio is taken in each round, of figures measured
one after the other; its median counts. The last table is Markdown, for a README.

The exit status is 0 if all was measured, whether targets hold or not; 1 if something went wrong, 2
for a wrong argument, 130 after Ctrl-C. What was measured lands in runs/benchmark/: a JSON file and
a plot for each case. scripts/run_course.sh shows the plots in its report.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

from benchmark.results import OUTPUT, busy_cores, measure, print_case, print_summary, target, write
from course.machine import facts
from launcher.processes import exit_with


def main():
    """Measure the cases asked for, one after the other; then print the table of all."""
    from benchmark.cases import CASES  # here, because this imports torch
    from benchmark.commands import CannotMeasureError, LeftOutError

    names = [case.name for case in CASES]
    known = ", ".join(names)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CASE", help=known)
    parser.add_argument("--list", action="store_true", help="show the cases and measure nothing")
    parser.add_argument("--show", action="store_true", help="show what has been measured so far")
    parser.add_argument("--seconds", type=float, default=60, help="that a case may take (60)")
    parser.add_argument("--tiny", action="store_true", help="one round of next to nothing: a test")
    args = parser.parse_args()
    for name in args.only or ():
        if name not in names:
            parser.error(f"There is no case {name!r}. There are {known}.")
    if not args.seconds > 0:
        parser.error(f"seconds must be greater than 0, not {args.seconds:g}")
    cases = [case for case in CASES if case.name in (args.only or names)]
    if args.list:
        for case in cases:
            print(f"{case.name:>10}  {case.title}")
            for ratio in case.ratios:
                print(f"{'':>10}     {ratio.what}: {target(ratio) or 'no target'}")
        return 0

    if args.show:
        results = [json.loads(path.read_text()) for path in OUTPUT.glob("*.json")]
        if not results:
            sys.exit(f"There is nothing in {OUTPUT} yet.")
        print_summary(sorted(results, key=lambda result: result["began"]))
        return 0

    import h5py

    command = shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]])
    results, failed = [], False
    if (busy := busy_cores()) and busy > 0.25:
        print(f"This machine is in use: {busy:.1f} of {os.cpu_count()} cores. Read with care.")
    for number, case in enumerate(cases, 1):
        print(f"\n[{number}/{len(cases)}] {case.name}: {case.title}", flush=True)
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                result = measure(case, Path(folder), args.seconds, args.tiny)
            about = facts(command, result["began"])
            results.append(result | {"machine": about | {"h5py": h5py.__version__}})
            print_case(result)
            write(results[-1])
        except LeftOutError as error:
            print(f"   left out: {error}")
        except CannotMeasureError as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            failed = True
        except OSError as error:
            sys.exit(f"{error.filename or OUTPUT}: {error.strerror}")
    if results:
        print_summary(results)
        print(f"\nwritten: {OUTPUT}")
    return 1 if failed else 0


if __name__ == "__main__":
    exit_with(main)
