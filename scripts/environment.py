"""Start Python in an environment that has all of requirements.txt. Needs the standard library only.

Usage: PYTHON environment.py [--tests] [--torch VERSION] -- ARGUMENTS_OF_PYTHON
       PYTHON environment.py --which      only print which Python has the lessons' packages

1. If PYTHON's environment has everything, it's used as it is.
2. Otherwise .venv is made beside the README. If PYTHON has torch (a site module, conda), .venv sees
   its packages, and torch and torchvision stay at the site's versions. If not, installer.py chooses
   PyTorch's build for this machine or, if TORCH_INDEX is set, takes torch from that index.
With --torch, .venv-torch-VERSION has that torch, whatever the site has.
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
# Written last into a new environment: the folders of a site's packages that it sees, if any.
SITE = "lib/python3*/site-packages/active-environment.pth"


def version_of(name):
    """Return the version of a distribution, "" if it is not installed. Do not import torch."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def site_of(venv):
    """Return the folders of a site's packages that venv sees. None: half made, or not ours."""
    file = next(venv.glob(SITE), None)
    return file and file.read_text().splitlines()


def sees_active_torch(site):
    """Return whether torch, as this environment has it, is in one of a site's folders."""
    torch = importlib.util.find_spec("torch")
    return bool(torch and torch.origin and str(Path(torch.origin).parents[1]) in (site or []))


def make(venv, kept):
    """Make an environment. If a site's torch is kept, it sees the packages of the active one."""
    stays = " and ".join(kept)
    print(f"Making {venv.name}.{stays and f' It keeps the active {stays}.'}", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", venv]
    if not importlib.util.find_spec("ensurepip") and shutil.which("uv"):
        command.append("--without-pip")  # Debian without python3-venv
    if not installer.follow(command, os.environ):
        todo = "Activate an environment that has them, or copy the course to a folder of your own."
        why = f"{venv} cannot be made: the line above says why"
        sys.exit(f"Packages of requirements.txt are missing, and {why}. {todo}")
    site = [folder for folder in sys.path if kept and folder.endswith("-packages")]
    [packages] = venv.glob("lib/python3*/site-packages")
    (packages / Path(SITE).name).write_text("\n".join([*site, ""]))


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
    site = site_of(venv)
    inside = venv.exists() and venv.samefile(sys.prefix)
    unfinished = inside and (venv / UNFINISHED).exists()
    if unfinished:
        installer.forget_unfinished()
    there = {name: version_of(name) for name in needed}
    lacking = [x for x in needed if not there[x] or is_older(there[x], needed[x])]
    if unfinished:
        lacking = lacking or ["what others need"]
    kept = []
    if there["torch"] and not own_torch and (site or not inside):
        kept = [f"{name}=={there[name]}" for name in ("torch", "torchvision") if there[name]]
    if kept and "torch" in lacking:
        todo = "Load a newer module, or leave this environment: deactivate"
        oldest = needed["torch"].strip(">=")
        here = f"this environment has {there['torch']}"
        sys.exit(f"torch {oldest} or newer is needed; {here}. {todo}")
    if not lacking and (inside or not own_torch):
        return
    if inside:
        install(needed, lacking, kept)
        return
    fits = sees_active_torch(site) if kept else not site
    if site is None:
        make(venv, kept)
    elif not fits:
        text = f"{venv} was made for an environment that is not active now: "
        text += ", ".join(site) or "one without torch"
        todo = f"Activate that environment first, for example with module load, or delete {venv}."
        sys.exit(f"{text}. {todo}")
    python = str(venv / "bin" / "python")  # which then installs the rest
    os.execv(python, [python, *sys.argv])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--torch")
    parser.add_argument("--which", action="store_true")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    venv = ROOT / ".venv"
    if options.which:
        own = version_of("torch") and not sees_active_torch(site_of(venv))
        print(sys.executable if own else venv / "bin" / "python")
        return
    needed = read_requirements("requirements.txt")
    if options.tests:
        needed |= read_requirements("tests/requirements.txt")
    if options.torch:
        venv = ROOT / f".venv-torch-{options.torch}"
        needed["torch"] = f"=={options.torch}"
    choose_environment(venv, needed, own_torch=options.torch)
    os.execv(sys.executable, [sys.executable, *options.arguments])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        main()
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from here.", file=sys.stderr)
        sys.exit(130)
