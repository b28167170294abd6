#!/usr/bin/env bash
# Puts perf_analyzer into the virtual environment: VENV (default .venv) /bin/perf_analyzer.
# PyPI's own perf-analyzer needs glibc 2.38; the binary inside the tritonclient 2.51.0 wheel runs on older systems, with
# two libraries that the embedded server's wheel brings along.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(cd "${VENV:-.venv}" && pwd)
home=$venv/lib/perf_analyzer
[ -x "$venv/bin/perf_analyzer" ] && "$venv/bin/perf_analyzer" --version >/dev/null 2>&1 && exit 0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$venv/bin/python" -m pip download --quiet --no-deps --dest "$work" tritonclient==2.51.0
"$venv/bin/python" -m zipfile -e "$work"/tritonclient-2.51.0-*.whl "$work/wheel"
# Each file is moved into its place, the last of them last: another process may do or use the same.
mkdir -p "$home"
cp "$work/wheel/tritonclient-2.51.0.data/data/bin/perf_analyzer" "$home/perf_analyzer.$$"
chmod +x "$home/perf_analyzer.$$"
mv -f "$home/perf_analyzer.$$" "$home/perf_analyzer"

libs=$("$venv/bin/python" -c 'import pathlib, sysconfig; print(pathlib.Path(sysconfig.get_path("purelib"), "nvidia_pytriton.libs"))')
ln -sf "$libs"/libb64-*.so.0d "$home/libb64.so.0d"
ln -sf "$libs"/libcudart-*.so.12* "$home/libcudart.so.12"
cat > "$home/wrapper.$$" <<WRAPPER
#!/bin/sh
LD_LIBRARY_PATH=$home:\$LD_LIBRARY_PATH exec $home/perf_analyzer "\$@"
WRAPPER
chmod +x "$home/wrapper.$$"
mv -f "$home/wrapper.$$" "$venv/bin/perf_analyzer"
"$venv/bin/perf_analyzer" --version
