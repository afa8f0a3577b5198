#!/usr/bin/env bash
# Wheels for a GPU machine without a network, collected into .wheels/, which git ignores.
#
#   benchmarks/gpu/collect_wheels.sh          for Python 3.12
#   benchmarks/gpu/collect_wheels.sh 3.11
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
version=${1:-3.12}
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_12 manylinux1; do
    platforms+=(--platform "${name}_x86_64")
done
mkdir -p "$root/.wheels"
# Everything but torch: what Holdfast imports, what its tests import, and the peers of the comparison.
for package in xxhash rich PyYAML typing_extensions psutil pytest pytest-xdist hypothesis torch_checkpointing; do
    pin=$(grep -iE "^$package==" "$root/constraints.txt" | head -n 1 | sed 's/;.*//')
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
        "${platforms[@]}" -d "$root/.wheels" "${pin:-$package}"
done
du -sh "$root/.wheels"
