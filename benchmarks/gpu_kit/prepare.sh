#!/bin/bash
# Prepares what a machine with a GPU, Python 3.12, PyTorch and no network needs for run.sh:
#
#   benchmarks/gpu_kit/prepare.sh TEXTS
#
# TEXTS has train-*.jsonl.gz and validation.jsonl.gz. Into brought/, which git ignores, come the run
# of RUN.toml without its base, and the wheels that such a machine lacks. All of it has about 45 MB.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
bin=${BIN:-$root/.venv/bin}
brought=$here/brought
lacking="annotated-types base58 cffi cryptography pycparser pydantic pydantic-core sentencepiece
    typing-extensions typing-inspection zstandard"

mkdir -p "$brought/wheels"
ln -sfn "$(cd "$1" && pwd)" "$brought/texts"
wanted=()
for name in $lacking; do
    wanted+=("$(grep -oiE "^$name==[^ ]+" "$root/requirements/dev.lock")")
done
platforms=()
for version in 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do
    platforms+=(--platform "manylinux_${version}_x86_64")
done
"$bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$brought/wheels" "${wanted[@]}"

[ -d "$brought/run" ] || "$bin/dipaco-bootstrap" prepare "$here/RUN.toml" --out "$brought/run"
"$bin/python" - "$brought/run" <<'END'
import sys
from pathlib import Path

from dipaco.routing.run_folder import RunFolder

run = RunFolder(Path(sys.argv[1]))
if run.blobs.has(run.plan().blobs.base):
    run.blobs.path(run.plan().blobs.base).unlink()
END
du --summarize --human-readable --dereference-args --exclude texts "$brought"
