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

from progress import SignOfLife

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
PYTORCH = "https://download.pytorch.org/whl/"  # its own index, with the builds for CPUs
PATIENCE = 5  # seconds for an index to answer
WIDTH = 99  # characters of a line that are shown
# What pip calls a setting, and uv an option or a variable. The options may have several values.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES = {
    "cert": ["SSL_CERT_FILE"],
    "client-cert": ["SSL_CLIENT_CERT"],
    "proxy": ["HTTPS_PROXY", "HTTP_PROXY"],
    "retries": ["UV_HTTP_RETRIES"],
    "timeout": ["UV_HTTP_TIMEOUT"],
}
# The lines of uv and pip that are shown at once. The others are, if it fails.
SHOWN = r"Resolved|Prepared|Installed|Installing| *Downloading .*\(\d{3,}[\d.]* ?Mi?B"
ASK = """
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=5)
except urllib.error.HTTPError as error:
    sys.exit(error.code not in (401, 404))  # it wants a password, or has no page here
except OSError:
    sys.exit(1)
"""


def pip_settings():
    """Return pip's settings, {name: text}: variables win over files, and those of install."""
    text = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    found = re.findall(r"^(global|install|:env:)\.([\w-]+)='(.+)'$", text, re.M)
    order = ["global", "install", ":env:"]
    found.sort(key=lambda setting: order.index(setting[0]))
    settings = {name: ast.literal_eval(f"'{value}'") for _, name, value in found}
    if "default-timeout" in settings:
        settings.setdefault("timeout", settings.pop("default-timeout"))
    return settings


def without_password(address):
    return re.sub(r"//[^/@]*@", "//", address)


def answers(address, env):
    """Return whether an index answers in time. A folder always does."""
    if not address.startswith("http"):
        return True
    command = [sys.executable, "-c", ASK, without_password(address)]
    try:
        return subprocess.run(command, env=env, timeout=PATIENCE).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def as_uv_knows_them(settings):
    """Return (options, environment) for uv that say what pip's settings say.

    What the environment says already wins. An index besides the first that doesn't answer is left
    out, since uv, unlike pip, stops there.
    """
    env = {"UV_SYSTEM_CERTS": "1", **os.environ}  # as pip does
    for setting, names in VARIABLES.items():
        for name in names:
            if setting in settings and not env.get(name) and not env.get(name.lower()):
                env[name] = settings[setting]
    options = ["--index-strategy", "unsafe-best-match"]  # the newest, from wherever, as for pip
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    for setting, option in OPTIONS.items():
        for value in settings.get(setting, "").split():
            if setting in ("extra-index-url", "find-links") and not answers(value, env):
                where = without_password(value)
                print(f"{where} does not answer: going on without it.", flush=True)
                continue
            options += [option, value]
    return options, env


def has_gpu():
    """Return whether this machine has a GPU, of NVIDIA (also in WSL) or of AMD."""
    return any(Path("/dev", name).exists() for name in ("nvidia0", "nvidiactl", "dxg", "kfd"))


def choose_build(env):
    """Choose PyTorch's build, say so, and return what tells uv.

    uv finds the build for this machine's driver, or for CPUs, on PyTorch's own index. Where that
    can't be reached, PyPI has one build, for new drivers, which runs on CPUs too.
    """
    if env.get("UV_TORCH_BACKEND"):
        return {}
    size = "with CUDA: 3 GB to download, 6 GB on disk."
    if not has_gpu() and shutil.which("srun"):
        print(f"Slurm may have GPUs on other nodes, so this takes PyPI's build of PyTorch, {size}")
        return {}
    if not answers(f"{PYTORCH}cpu/torch/", env):
        print(f"PyTorch's own index does not answer, so this takes PyPI's build, {size}")
        return {}
    if has_gpu():
        print(f"Taking PyTorch's build for this GPU's driver, {size}")
    else:
        print("Without a GPU, this takes PyTorch's build for CPUs: 1.5 GB on disk.")
    return {"UV_TORCH_BACKEND": "auto"}


def follow(command, env):
    """Run uv or pip, and show what is going on. Return whether it went well.

    If not, its last lines are shown.
    """
    others = []
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with (
        SignOfLife() as life,
        subprocess.Popen(command, env=env, errors="replace", **streams) as process,
    ):
        try:
            for line in map(str.rstrip, process.stdout):
                if re.match(SHOWN, line):
                    print(line[:WIDTH], flush=True)
                    life.said()
                else:
                    others.append(line)
        except BaseException:  # Ctrl-C, or TERM
            process.terminate()
            raise
    if process.returncode:
        if any("Retrying (" in line for line in others):
            print("Several tries to reach the index have failed.")
        told = [line for line in others if "Retrying (" not in line and "Location" not in line]
        print("\n".join(told[-10:]), flush=True)
    return process.returncode == 0


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


def could_install(arguments, env, uv, options):
    """Install with uv, if there is one, or else with pip. Return whether that went well."""
    if uv:
        command = [uv, "pip", "install", "--python", sys.executable, *options, *arguments]
        if sys.stderr.isatty():  # uv then shows bars
            done = subprocess.run(command, env=env).returncode == 0
        else:
            done = follow(command, env)
        if done:
            return True
        forget_unfinished()
        print("uv failed: the lines above say why. pip goes on, and is slower.", flush=True)
    return follow([*PIP, "install", "--no-compile", *arguments], env)  # as uv does


def install(packages, constraints, for_site, choose):
    """Install packages, {name: "name>=version"}. Return "", or where that failed.

    constraints  a file, which both understand
    for_site     a site's torch stays. uv doesn't see it, and would install another
    choose       the build of PyTorch is not chosen yet
    """
    options, env = as_uv_knows_them({} if for_site else pip_settings())
    uv = None if for_site else find_uv()
    if not uv and not for_site:
        print("There is no uv, and pip can't get it. pip goes on, and is slower.", flush=True)
    steps = [(f"into {Path(sys.prefix).name}", list(packages.values()), options, env)]
    index = os.environ.get("TORCH_INDEX")
    if index and not for_site:
        where = without_password(index)
        if not answers(index, env):
            sys.exit(f"{where} does not answer. Leave TORCH_INDEX out, or correct it.")
        both = [packages["torch"], packages["torchvision"]]  # from one index, or they do not fit
        torch_env = {**env, "PIP_INDEX_URL": index}
        steps.insert(0, (f"from TORCH_INDEX, {where}", both, ["--default-index", index], torch_env))
    elif choose and uv:
        env |= choose_build(env)
    if "pytest" in packages:  # otherwise all its workers compile all of torch, and say nothing
        options.append("--compile-bytecode")
    stays = ["--constraint", str(constraints)] if for_site else []
    for where, names, told, variables in steps:
        if not could_install([*names, *stays], variables, uv, told):
            forget_unfinished()
            return where
    return ""
