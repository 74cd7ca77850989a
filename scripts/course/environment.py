"""Say which packages of requirements files the Python that runs this lacks.

Usage: environment.py FILE...   a line for each that is missing or too old, as pip wants it
       environment.py --torch   a sentence if its torch and torchvision do not fit

The exit status is 0 if there is nothing to say. Nothing is imported that does not come with Python:
torch would take seconds, and the launcher asks on every node.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

# The lines that these files may have, such as: torch>=2.6, or: viztracer; python_version < "3.15"
LINE = re.compile(r'([\w.-]+)(?:>=([\d.]+))?(?:; python_version (<|>=) "([\d.]+)")?')
ROOT = Path(__file__).resolve().parents[2]


def numbers(text):
    """Return the numbers that a version begins with, as a tuple: 2.6.0+cu124 is (2, 6, 0)."""
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", text)[0].split("."))


def read_requirements(*files):
    """Return what this Python needs, {distribution: oldest version that will do, or ""}.

    Raises ValueError with a sentence for a line that is not understood.
    """
    needed = {}
    for file in files:
        for number, line in enumerate(Path(file).read_text().splitlines(), 1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            match = LINE.fullmatch(text)
            if not match:
                raise ValueError(f"{file}, line {number}: {text!r} is not understood.")
            name, oldest, comparison, python = match.groups()
            if python:
                older = sys.version_info[:2] < numbers(python)
                if older != (comparison == "<"):
                    continue
            needed[name] = oldest or ""
    return needed


def installed(name):
    """Return the version of a distribution, "" if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def missing(*files):
    """Return what is missing or too old of some requirements files, as ["torch>=2.6", ...]."""
    found = []
    for name, oldest in read_requirements(*files).items():
        have = installed(name)
        if not have or (oldest and numbers(have) < numbers(oldest)):
            found.append(f"{name}>={oldest}" if oldest else name)
    return found


def what_does_not_fit():
    """Return why the torch and torchvision that are installed cannot be used, "" if they can."""
    torch, vision = installed("torch"), installed("torchvision")
    if not torch:
        return ""
    oldest = read_requirements(ROOT / "requirements.txt")["torch"]
    if numbers(torch) < numbers(oldest):
        todo = "Load a newer module, or leave it: deactivate"
        return f"torch {oldest} or newer is needed; this environment has {torch}. {todo}"
    for text in requires("torchvision") if vision else ():
        # As in: Requires-Dist: torch (==2.6.0), or: torch>=2.14.0
        match = re.match(r"torch ?\(?(==|>=)([\d.]+)", text)
        if not match:
            continue
        exact = match[1] == "=="
        have, needed = numbers(torch), numbers(match[2])
        if have < needed or (exact and have != needed):
            needed = match[2] if exact else f"{match[2]} or newer"
            return (
                f"torchvision {vision} is made for torch {needed}; this environment has {torch}. "
                "Install both again, together."
            )
    return ""


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--torch"]:
            text = what_does_not_fit()
        else:
            text = "\n".join(missing(*sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
    if text:
        print(text)
        sys.exit(1)
