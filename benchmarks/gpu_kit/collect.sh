#!/bin/bash
# Fetches all that a machine with a GPU, PyTorch and no network lacks for run.sh:
#
#   benchmarks/gpu_kit/collect.sh
#
# wheels/ has the project's own wheel and what lacking.txt names, for Python 3.12 on Linux.
# wheels-8bit/ has bitsandbytes, which is as large as all else together. Git ignores both. It may be
# run again at any time: what is there stays, and the project's wheel is built anew.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
wheels=$here/wheels extra=$here/wheels-8bit
greatest_kb=60000
# These have no wheels of their own. They are pure Python, so a wheel made here fits anywhere.
sources="prefetch-generator varint python-baseconv"

mkdir -p "$wheels" "$extra"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
grep -oE '^[A-Za-z0-9._-]+==[^ ]+' "$root/requirements/dev.lock" >"$scratch/versions.txt"

version_of() { grep -iE "^$1==" "$scratch/versions.txt" || { echo "error: $1 is not in requirements/dev.lock" >&2; exit 1; }; }

platforms=()
for platform in manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_24 \
    manylinux_2_17 manylinux_2_12 manylinux_2_5 manylinux2014 manylinux2010 manylinux1; do
    platforms+=(--platform "${platform}_x86_64")
done

# fetch FOLDER NAME...: the wheels of these, without what they need.
fetch() {
    local folder=$1 wanted=()
    shift
    for name in "$@"; do wanted+=("$(version_of "$name")"); done
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
        --abi none "${platforms[@]}" --find-links "$wheels" --dest "$folder" "${wanted[@]}"
}

is_source() { [[ " $sources " == *" $1 "* ]]; }

names=()
while read -r name; do
    is_source "$name" || names+=("$name")
done < <(grep -vE '^(#|$)' "$here/lacking.txt")
fetch "$wheels" "${names[@]}"
for name in $sources; do
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" \
        "$(version_of "$name")"
done
fetch "$extra" bitsandbytes

rm -f "$wheels"/dipaco-*.whl
# From a copy, because a build leaves folders behind.
(cd "$root" && git ls-files -z | tar --null --files-from - --create) | tar --extract --directory "$scratch"
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" "$scratch"

for folder in "$wheels" "$extra"; do
    size_kb=$(du --summarize --apparent-size --block-size=1000 "$folder" | cut -f1)
    echo "${folder#"$root"/}: $(ls "$folder" | wc -l) wheels, $((size_kb / 1000)).$((size_kb % 1000 / 100)) MB"
    [ "$size_kb" -le "$greatest_kb" ] || { echo "error: that is more than $((greatest_kb / 1000)) MB" >&2; exit 1; }
done
