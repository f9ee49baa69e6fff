#!/bin/bash
# Fetches all that a machine with a GPU, PyTorch and no network lacks for run.sh:
#
#   benchmarks/gpu_kit/collect.sh
#
# wheels/, which git ignores, has the project's own wheel and what lacking.txt names, for Python 3.12
# on Linux. It may be run again at any time: what is there stays, and the project's wheel is built
# anew.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
wheels=$here/wheels
greatest_kb=60000
# These have no wheels of their own. They are pure Python, so a wheel made here fits anywhere.
sources="prefetch-generator varint python-baseconv"

mkdir -p "$wheels"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
grep -oE '^[A-Za-z0-9._-]+==[^ ]+' "$root/requirements/dev.lock" >"$scratch/versions.txt"

version_of() { grep -iE "^$1==" "$scratch/versions.txt" || { echo "error: $1 is not in requirements/dev.lock" >&2; exit 1; }; }

platforms=()
for platform in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 \
    manylinux_2_17 manylinux_2_12 manylinux_2_5 manylinux2014 manylinux2010 manylinux1; do
    platforms+=(--platform "${platform}_x86_64")
done

# fetch NAME...: the wheels of these, without what they need.
fetch() {
    local wanted=()
    for name in "$@"; do wanted+=("$(version_of "$name")"); done
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
        --abi none "${platforms[@]}" --find-links "$wheels" --dest "$wheels" "${wanted[@]}"
}

# without WHEEL PATTERN KEPT: leaves out files whose names match one pattern and not the other.
without() {
    "$python" - "$@" <<'END'
import pathlib, re, sys, zipfile
wheel, pattern, kept = pathlib.Path(sys.argv[1]), *sys.argv[2:]
smaller = wheel.with_suffix(".new")
with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
    for entry in old.infolist():
        if re.search(kept, entry.filename) or not re.search(pattern, entry.filename):
            new.writestr(entry, old.read(entry))
smaller.replace(wheel)
END
}

is_source() { [[ " $sources " == *" $1 "* ]]; }

names=()
while read -r name; do
    is_source "$name" || names+=("$name")
done < <(grep -vE '^(#|$)' "$here/lacking.txt")
fetch "${names[@]}"
# Nine tenths of it are for other versions of CUDA.
without "$wheels"/bitsandbytes-*.whl libbitsandbytes_ '_(cpu|cuda130)[.]so'
for name in $sources; do
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" \
        "$(version_of "$name")"
done

rm -f "$wheels"/dipaco-*.whl
# From a copy, because a build leaves folders behind.
(cd "$root" && git ls-files -z | tar --null --files-from - --create) | tar --extract --directory "$scratch"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" "$scratch"

size_kb=$(du --summarize --apparent-size --block-size=1000 "$wheels" | cut -f1)
echo "${wheels#"$root"/}: $(ls "$wheels" | wc -l) wheels, $((size_kb / 1000)).$((size_kb % 1000 / 100)) MB"
[ "$size_kb" -le "$greatest_kb" ] || { echo "error: that is more than $((greatest_kb / 1000)) MB" >&2; exit 1; }
