#!/usr/bin/env bash
# Wheels for a GPU machine without a network, collected into .wheels/, which git ignores.
#
#   benchmarks/gpu/collect_wheels.sh          for Python 3.12
#   benchmarks/gpu/collect_wheels.sh 3.11 3.12
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# -gt 0 ] || set -- 3.12
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux1; do
    platforms+=(--platform "${name}_x86_64")
done
mkdir -p "$root/.wheels"
for version in "$@"; do
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
        "${platforms[@]}" -d "$root/.wheels" -c "$root/constraints.txt" -r "$root/benchmarks/gpu/requirements.txt"
done
du -sh "$root/.wheels"
