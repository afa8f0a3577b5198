#!/usr/bin/env bash
# All measurements that need a GPU, in one offline command of at most 8 minutes: one JSON file, one table, one plot.
#
#   benchmarks/gpu/run.sh                     on the first CUDA device
#   benchmarks/gpu/run.sh --device cpu        dry run of the same parts with tiny states
#   PYTHON=python3.12 benchmarks/gpu/run.sh   with another interpreter; it needs torch
#
# Packages that this interpreter lacks are installed from .wheels/ into a temporary folder, without a network;
# benchmarks/gpu/collect_wheels.sh fills .wheels/ beforehand.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-}
if [ -z "$python" ]; then
    python=python3
    [ -x "$root/.venv/bin/python" ] && python="$root/.venv/bin/python"
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G "$root/.wheels/*.whl" > /dev/null; then
    "$python" -m pip install -q --no-index --find-links "$root/.wheels" --no-deps --no-compile --target "$site" \
        -r "$root/benchmarks/gpu/requirements.txt" ||
        echo "run.sh: .wheels/ does not fit $("$python" --version): continuing without it" >&2
fi
export PYTHONPATH="$root/src:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
cd "$root"
"$python" benchmarks/gpu/run.py "$@"
