"""Start Python in an environment that has all of requirements.txt. Needs the standard library only.

Usage: PYTHON environment.py [--tests] [--torch VERSION] -- ARGUMENTS_OF_PYTHON

1. If PYTHON's environment has everything, it's used as it is.
2. Otherwise .venv is made beside the README. If PYTHON has torch (a site module, conda), .venv sees
   its packages, and torch and torchvision stay at the site's versions. If not, installer.py chooses
   PyTorch's build for this machine or, if TORCH_INDEX is set, takes torch from that index.
With --torch, .venv-torch-VERSION has that torch, whatever the site has.

The first line of .venv/made-from is the Python it was made from, which the launcher compares. The
other lines are the site's packages that stay, such as torch==2.6.0.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import installer
from catalog import ROOT, is_older, read_requirements

# The constraints of an installation. The file is there while it goes on, or if it was interrupted.
UNFINISHED = "unfinished.txt"


def version_of(name):
    """Return the version of a distribution, "" if it is not installed. Do not import torch."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def make(venv, made_from):
    """Make an environment. If a site's torch stays, it sees the packages of the active one."""
    kept = " and ".join(made_from[1:])
    print(f"Making {venv.name}.{kept and f' It keeps the active {kept}.'}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", venv]
    if not importlib.util.find_spec("ensurepip") and shutil.which("uv"):
        command.append("--without-pip")  # Debian without python3-venv
    if not installer.follow(command, os.environ):
        todo = "Activate an environment that has them, or copy the course to a folder of your own."
        why = f"{venv} cannot be made: the line above says why"
        sys.exit(f"Packages of requirements.txt are missing, and {why}. {todo}")
    if kept:
        seen = [folder for folder in sys.path if folder.endswith("-packages")]
        [packages] = venv.glob("lib/python3*/site-packages")
        (packages / "active-environment.pth").write_text("\n".join([*seen, ""]))
    (venv / "made-from").write_text("\n".join([*made_from, ""]))


def install(needed, lacking, kept):
    """Install what is needed, {name: ">=version"}, beside a site's packages that stay."""
    venv = Path(sys.prefix).name
    print(f"Installing what {venv} lacks: {', '.join(lacking)}.", flush=True)
    constraints = Path(sys.prefix, UNFINISHED)
    constraints.write_text("\n".join([*kept, ""]))
    # Without what the site has: for pip, its torch 2.6.0a0+site is older than torch>=2.6.
    there = [line.partition("==")[0] for line in kept]
    wanted = {name: name + oldest for name, oldest in needed.items() if name not in there}
    trouble = installer.install(wanted, constraints, bool(kept), "torch" in lacking)
    constraints.unlink()
    if trouble:
        why = "the lines above say why, and day1/TROUBLESHOOTING.md what helps"
        sys.exit(f"The packages could not be installed {trouble}: {why}.")


def choose_environment(venv, needed, own_torch):
    """Return if this environment has what is needed; otherwise start again in one that does."""
    file = venv / "made-from"  # not in one that is half made, or not ours
    made_from = file.read_text().splitlines() if file.exists() else []
    inside = venv.exists() and venv.samefile(sys.prefix)
    unfinished = inside and (venv / UNFINISHED).exists()
    if unfinished:
        installer.forget_unfinished()
    there = {name: version_of(name) for name in needed}
    lacking = [x for x in needed if not there[x] or is_older(there[x], needed[x])]
    if unfinished:
        lacking = lacking or ["what others need"]
    kept = []
    if there["torch"] and not own_torch:
        kept = [f"{name}=={there[name]}" for name in ("torch", "torchvision") if there[name]]
    if kept and not inside and "torch" in lacking:
        todo = "Load a newer module, or leave this environment: deactivate"
        oldest = needed["torch"].strip(">=")
        here = f"this environment has {there['torch']}"
        sys.exit(f"torch {oldest} or newer is needed; {here}. {todo}")
    if not lacking and (inside or not own_torch):
        return
    if inside:
        install(needed, lacking, made_from[1:])
        return
    wanted = [f"{sys.prefix} {sys.version}", *kept]
    if made_from and made_from != wanted:
        text = f"{venv} was made for an environment that is not active now: {', '.join(made_from)}"
        todo = f"Activate that environment first, for example with module load, or delete {venv}."
        sys.exit(f"{text}. {todo}")
    if not made_from:
        make(venv, wanted)
    python = str(venv / "bin" / "python")  # which then installs the rest
    os.execv(python, [python, *sys.argv])


def main():
    separator = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--torch")
    options = parser.parse_args(sys.argv[1:separator])
    venv = ROOT / ".venv"
    needed = read_requirements("requirements.txt")
    if options.tests:
        needed |= read_requirements("tests/requirements.txt")
    if options.torch:
        venv = ROOT / f".venv-torch-{options.torch}"
        needed["torch"] = f"=={options.torch}"
    choose_environment(venv, needed, own_torch=options.torch)
    os.execv(sys.executable, [sys.executable, *sys.argv[separator + 1 :]])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from here.", file=sys.stderr)
        sys.exit(130)
