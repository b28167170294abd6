#!/usr/bin/env bash
# Makes the virtual environment and installs this project with its development tools.
# PYTHON: interpreter (3.10-3.12). VENV: folder. TORCH: requirement used when that interpreter has no torch yet.
# An index given through PIP_INDEX_URL / PIP_EXTRA_INDEX_URL / pip.conf is respected.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}
torch=${TORCH-torch==2.13.0}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
  3.1[0-9]) ;;
  *) echo "Python $version found as '$python'; 3.10 or newer is needed. Name one: make setup PYTHON=python3.12" >&2; exit 2 ;;
esac
if [ ! -x "$venv/bin/python" ]; then
  # A torch that the interpreter already has (a CUDA build, say) is used as it is.
  if "$python" -c 'import torch' 2>/dev/null; then
    "$python" -m venv --system-site-packages "$venv"
  else
    "$python" -m venv "$venv"
  fi
fi
"$venv/bin/python" -m pip install --quiet --upgrade pip
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  "$venv/bin/python" -m pip install --quiet ${torch:-torch} 'numpy<2'
fi
"$venv/bin/python" -m pip install --quiet -e '.[dev]'
echo "Ready: $venv (Python $version). Next: make test"
