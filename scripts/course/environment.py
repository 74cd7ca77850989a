"""Say what the active Python is, and what it lacks. environment.sh runs it with that Python.

Usage: environment.py FILE...   the requirements files

Prints a line each: its prefix and version; its torch and torchvision, as torch==2.6.0; what is
missing or too old; and on the other lines the folders of its packages. Exits with a message where
Python is too old, or torch is, or does not fit. torch is not imported: that would take seconds.
"""

import os
import re
import sys
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036, it may be any Python that is active
    todo = "Name a newer one: PYTHON=python3.12"
    sys.exit(f"Python 3.11 or newer is needed; this one is {sys.version.split()[0]}. {todo}")

from importlib.metadata import PackageNotFoundError, requires, version

# torch>=2.6, or: viztracer; python_version < "3.15"
LINE = re.compile(r'([\w.-]+)(?:>=([\d.]+))?(?:; python_version < "3\.(\d+)")?')


def numbers(text):
    """Return the numbers that a version begins with, as a tuple: 2.6.0+cu124 is (2, 6, 0)."""
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", text)[0].split("."))


def installed(name):
    """Return the version of a distribution, "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def lacks(name, oldest):
    """Return whether a distribution is missing or too old. 2.6.0a0+site is not older than 2.6."""
    found = installed(name)
    return not found or numbers(found) < numbers(oldest)


def read_requirements(files):
    """Return what this Python needs, {distribution: oldest version that will do}."""
    needed = {}
    for file in files:
        for line in Path(file).read_text().splitlines():
            match = LINE.fullmatch(line.partition("#")[0].strip())
            if match and not (match[3] and sys.version_info >= (3, int(match[3]))):
                needed[match[1]] = match[2] or "0"
    return needed


def what_does_not_fit(oldest):
    """Return why the torch that is installed cannot be used, "" if it can or there is none."""
    torch, vision = installed("torch"), installed("torchvision")
    if torch and lacks("torch", oldest):
        todo = "Load a newer module, or leave it: deactivate"
        return f"torch {oldest} or newer is needed; this environment has {torch}. {todo}"
    for text in requires("torchvision") if torch and vision else ():
        # As in: Requires-Dist: torch (==2.6.0), or: torch>=2.14.0
        match = re.match(r"torch ?\(?(==|>=)([\d.]+)", text)
        other = match and match[1] == "==" and numbers(torch) != numbers(match[2])
        if match and (other or lacks("torch", match[2])):
            fits = match[2] if other else f"{match[2]} or newer"
            text = f"torchvision {vision} is made for torch {fits}; this environment has {torch}"
            return f"{text}. Install both again, together."
    return ""


if __name__ == "__main__":
    needed = read_requirements(sys.argv[1:])
    problem = what_does_not_fit(needed["torch"])
    if problem:
        sys.exit(problem)
    kept = ("torch", "torchvision") if installed("torch") else ()
    found = [name for name in kept if installed(name)]
    print(sys.prefix, sys.version)
    print(*(f"{name}=={installed(name)}" for name in found))
    print(*(name for name, oldest in needed.items() if lacks(name, oldest)), sep=", ")
    of_a_module = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # seen while that is loaded
    for folder in sys.path:
        if folder.endswith(("/site-packages", "/dist-packages")) and folder not in of_a_module:
            print(folder)
