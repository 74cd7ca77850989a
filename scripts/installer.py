"""Install packages into this environment, with uv, or with pip. Needs the standard library only.

uv is several times faster, so it's told what pip's settings say: where packages are, and how to get
there. pip does what uv can't. Either way, one sees what is going on.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from processes import Job
from progress import SignOfLife

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
PYTORCH = "https://download.pytorch.org/whl/cpu/torch/"
WIDTH = 99  # characters of a line that are shown
# pip's settings, and the variables that tell uv the same.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
# The lines of uv and pip that are shown at once. The others are, if it fails.
SHOWN = r"Resolved|Prepared|Installed|Installing| *Downloading .*\(\d{3,}[\d.]* ?Mi?B"


def pip_settings():
    """Return pip's settings, {name: text}: variables win over files, and those of install."""
    text = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    found = re.findall(r"^(global|install|:env:)\.([\w-]+)='(.+)'$", text, re.M)
    order = ["global", "install", ":env:"]
    found.sort(key=lambda setting: order.index(setting[0]))
    return {name: ast.literal_eval(f"'{value}'") for _, name, value in found}


def uv_environment(settings):
    """Return the environment for uv that says what pip's settings say; what it has already wins."""
    env = {"UV_SYSTEM_CERTS": "1", "UV_INDEX_STRATEGY": "unsafe-best-match"}  # as pip does
    env |= os.environ
    for setting, name in VARIABLES.items():
        if setting in settings:
            several = "," if setting == "find-links" else " "
            env.setdefault(name, several.join(settings[setting].split()))
    return env


def has_gpu():
    """Return whether this machine has a GPU, of NVIDIA (also in WSL) or of AMD."""
    return any(Path("/dev", name).exists() for name in ("nvidia0", "nvidiactl", "dxg", "kfd"))


def answers(address, env):
    """Return whether an index answers within five seconds, through uv's proxy if there is one."""
    ask = "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=5)"
    if "ALL_PROXY" in env:
        env = {"https_proxy": env["ALL_PROXY"], **env}
    command = [sys.executable, "-c", ask, address]
    try:
        return not subprocess.run(command, env=env, capture_output=True, timeout=8).returncode
    except subprocess.TimeoutExpired:
        return False


def builds(env):
    """Return PyTorch's builds to try, the best first: {in words: variables for uv}.

    uv finds the build for this machine's driver, or for CPUs, on PyTorch's own index. Where that
    can't be reached, PyPI has one build, for new drivers, which runs on CPUs too.
    """
    size = "with CUDA: 3 GB to download, 6 GB on disk"
    pypi = {f"PyPI's build of PyTorch, {size}": {}}
    if shutil.which("srun") and not has_gpu():  # there may be GPUs on other nodes
        return pypi
    if not answers(PYTORCH, env):
        return {f"PyPI's build, because PyTorch's own index does not answer, {size}": {}}
    build = f"for this GPU's driver, {size}" if has_gpu() else "for CPUs: 1.5 GB on disk"
    return {f"PyTorch's build {build}": {"UV_TORCH_BACKEND": "auto"}, **pypi}


def follow(command, env):
    """Run uv or pip, and show what is going on. Return whether it went well.

    If not, its last lines are shown.
    """
    others = []
    with SignOfLife() as life, Job(command, env=env, stderr=subprocess.STDOUT) as job:
        for line in map(str.rstrip, job.lines()):
            if re.match(SHOWN, line):
                print(line[:WIDTH], flush=True)
                life.said()
            else:
                others.append(line)
    if job.status:
        if any("Retrying (" in line for line in others):
            print("Several tries to reach the index have failed.")
        told = [line for line in others if "Retrying (" not in line and "Location" not in line]
        print("\n".join(told[-10:]), flush=True)
    return job.status == 0


def find_uv():
    """Return uv, the one in PATH or one that pip brings along, or None."""
    path = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])
    if not shutil.which("uv", path=path):
        follow([*PIP, "install", "--retries", "1", "--timeout", "10", "uv"], os.environ)
    return shutil.which("uv", path=path)


def forget_unfinished():
    """Have a package that was only begun count as missing: INSTALLER is written last."""
    for info in Path(sysconfig.get_path("purelib")).glob("*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(info)


def could_install(packages, options, env, uv, tries):
    """Install with uv, if there is one, or else with pip. Return whether that went well."""
    for words, more in tries.items() if uv else []:
        print(words, end="", flush=True)
        command = [uv, "pip", "install", "--python", sys.executable, *options, *packages]
        if sys.stderr.isatty():  # uv then shows bars
            done = subprocess.run(command, env=env | more).returncode == 0
        else:
            done = follow(command, env | more)
        if done:
            return True
        forget_unfinished()
        print("uv failed: the lines above say why.", flush=True)
    print("pip goes on, and is slower.", flush=True)
    return follow([*PIP, "install", "--no-compile", *packages], env)  # as uv does


def install(packages, constraints, for_site, choose):
    """Install packages, {name: "name>=version"}. Return "", or where that failed.

    constraints  a file, which pip understands
    for_site     a site's torch stays. uv doesn't see it, and would install another
    choose       the build of PyTorch is not chosen yet
    """
    where = f"into {Path(sys.prefix).name}"
    names = [*packages.values()]
    if for_site:
        done = could_install([*names, "--constraint", str(constraints)], [], os.environ, None, {})
        return "" if done else where
    settings = pip_settings()
    options = ["--no-index"] if "no-index" in settings else []
    if "pytest" in packages:  # otherwise all its workers compile all of torch, and say nothing
        options.append("--compile-bytecode")
    env, uv, tries = uv_environment(settings), find_uv(), {"": {}}
    index = os.environ.get("TORCH_INDEX")
    if index:
        both = [packages["torch"], packages["torchvision"]]  # from one index, or they do not fit
        only = {"UV_DEFAULT_INDEX": index, "UV_INDEX": "", "PIP_INDEX_URL": index}
        if not could_install(both, [], env | only, uv, tries):
            return "from TORCH_INDEX"
    elif choose and not env.get("UV_TORCH_BACKEND"):
        tries = {f"Taking {words}.\n": more for words, more in builds(env).items()}
    return "" if could_install(names, options, env, uv, tries) else where
