#!/usr/bin/env bash
# What the course needs on a new Debian or Ubuntu: Python with the packages in /opt/course, and Slurm
# for local_slurm.sh. The Dockerfile beside it calls this. Needs root and a network.
#
# Environment:
#   TORCH_INDEX   where torch and torchvision come from; PyPI, whose builds are for CUDA, if not set
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends ca-certificates git python3 python3-venv \
  slurm-wlm munge iproute2 procps
python3 -m venv /opt/course
pip=(/opt/course/bin/pip install --quiet --disable-pip-version-check --no-cache-dir)
"${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch torchvision
"${pip[@]}" --requirement requirements.txt
