#!/usr/bin/env bash
# Makes the virtual environment and installs this project with its development tools.
# PYTHON: interpreter (3.10-3.12). VENV: folder. TORCH: requirement to install; choose_torch.py says which without it.
# An index given through PIP_INDEX_URL / PIP_EXTRA_INDEX_URL / pip.conf is respected.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
  3.10 | 3.11 | 3.12) ;;
  *) echo "Python $version found as '$python'; 3.10 to 3.12 is needed. Name one: make setup PYTHON=python3.12" >&2; exit 2 ;;
esac
step() { echo "[$SECONDS s] $*"; }
if [ ! -x "$venv/bin/python" ]; then
  step "making $venv with Python $version"
  # A torch that the interpreter already has is used as it is, if the kernels' Triton-language goes with it. What an
  # activated environment has is not seen from another one, whose packages would be half of the system's then.
  if [ -z "${TORCH:-}" ] && "$python" -c 'import sys; sys.exit(sys.prefix != sys.base_prefix)' &&
    "$python" scripts/choose_torch.py own; then
    "$python" -m venv --system-site-packages "$venv"
  else
    "$python" -m venv "$venv"
  fi
fi
pip=("$venv/bin/python" -m pip)
"${pip[@]}" install --quiet --upgrade pip
step "choosing a torch that fits"
torch=${TORCH:-}
if [ -z "$torch" ] && ! "$venv/bin/python" scripts/choose_torch.py own; then
  torch=$("$venv/bin/python" scripts/choose_torch.py "${pip[@]}")
fi
# One command, so that pip looks for versions of everything at once and no torch replaces another.
step "installing ${torch:-your torch} and some 90 packages: one to five minutes; the large ones:"
# Of what pip says, the files of a megabyte and more as they come, and that it is unpacking them.
# Python compiles the modules that are imported when they are; most never are.
"${pip[@]}" install --no-compile --progress-bar off ${torch:+"$torch"} -e '.[dev]' | sed -unE \
  -e 's,^ *(Downloading|Using cached) ([^ ]*/)?([^/ ]+) \(([0-9.]+ MB)\),  \3 (\4),p' \
  -e 's,^Installing collected packages.*,  unpacking; a minute or two,p'
# pip puts no command here of a tool that it sees among the system's packages, and make calls it here.
absent=()
for tool in pytest ruff mypy import-linter/lint-imports; do
  [ -x "$venv/bin/${tool#*/}" ] || absent+=("${tool%/*}")
done
[ ${#absent[@]} -eq 0 ] || "${pip[@]}" install --quiet --ignore-installed "${absent[@]}"
step "Ready: $venv (Python $version, torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)')). Next: make test"
