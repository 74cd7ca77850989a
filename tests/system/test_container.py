"""What the container is made of, on a new Debian, without an image or an engine."""

import os
import sys
from pathlib import Path

import pytest
from support.run import ROOT, output_of, run, skip_or_fail_in_ci, works

# $1 is the folder of the new system, $2 the repository, $3 a folder of packages. pip finds them and
# downloads none. All mounts are in a namespace of their own.
SCRIPT = """
set -e
debootstrap --variant=minbase bookworm "$1"
rm "$1/etc/apt/sources.list"
cp -rL /etc/apt/sources.list.d /etc/apt/apt.conf.d "$1/etc/apt"
cp -L /etc/resolv.conf "$1/etc"
mkdir "$1/course" "$1/packages"
mount --rbind "$2" "$1/course"
mount --bind "$3" "$1/packages"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
path=/opt/course/bin:/usr/sbin:/usr/bin:/sbin:/bin
inside="env -i HOME=/tmp PATH=$path PYTHONPATH=/packages"
chroot "$1" $inside /course/.devcontainer/install.sh
chroot --userspec=1000:1000 "$1" $inside bash -c "cd /tmp && /course/scripts/run_course.sh 0 9"
chroot "$1" $inside slurmctld -V
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_on_a_new_debian_root_installs_and_a_user_runs_lessons(tmp_path):
    if "bookworm" not in Path("/etc/os-release").read_text() or sys.version_info[:2] != (3, 11):
        pytest.skip("needs Debian 12, and packages for its Python, 3.11")
    if os.geteuid() or not works("debootstrap", "--version"):
        skip_or_fail_in_ci("needs root and debootstrap")
    packages = next(Path(x) for x in sys.path if (Path(x) / "torch").is_dir())
    inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", SCRIPT, "bash"]
    folder = tmp_path / "debian"
    output = output_of(run([*inside, folder, ROOT, packages], 590, tmp_path, None))
    assert "2 of 2 lessons ok" in output
    assert output.splitlines()[-1].startswith("slurm-wlm ")
