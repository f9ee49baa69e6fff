#!/bin/bash
# Measures all there is to measure on a GPU, on a machine without a network, in under ten minutes:
#
#   benchmarks/gpu_kit/run.sh [--rehearse] [--seconds N] [--out FOLDER] [PART...]
#
# PYTHON (python3) must see a PyTorch for the card; collect.sh has fetched the rest beforehand. The
# most valuable parts come first. Each has a time limit and a JSON of its own, which is whole at any
# time. --rehearse runs everything with a tiny model on the CPU. Without names all parts run:
#
#   paper_path     b: tokens a second and MFU beside other people's loops, and a profile
#   unit_tests     a: tests with a device, exact digests
#   four_peers     d: a swarm on the one card against four bare loops
#   out_of_memory  g: memory that runs out
#   less_memory    c: fp16, AdamW in 8 bits, blocks computed twice
#   adapters       e: adapters over frozen bases of 1 B and 7 B, beside PEFT
#   serving        f: one stream and eight
#   owner          h: what an owner sees and sets
#   public_model   i: four peers specialise a public model, if brought/ has it
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
environment=${GPU_KIT_ENVIRONMENT:-/tmp/gpu-kit-environment}
all="paper_path unit_tests four_peers out_of_memory adapters less_memory serving owner public_model"
declare -A limit_s=([paper_path]=200 [unit_tests]=90 [four_peers]=210 [out_of_memory]=60
    [adapters]=240 [less_memory]=120 [serving]=90 [owner]=150 [public_model]=240)
seconds=570 out=$here/out rehearse=()
parts=()
while [ $# -gt 0 ]; do
    case $1 in
    # A machine on which it is rehearsed may be slow and busy.
    --rehearse) rehearse=(--rehearse) seconds=3600 ;;
    --seconds) seconds=$2 && shift ;;
    --out) out=$2 && shift ;;
    *) [[ " $all " == *" $1 "* ]] || { echo "error: there is no part '$1'; there are: $all" >&2; exit 3; }
        parts+=("$1") ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || read -ra parts <<<"$all"
end_s=$((SECONDS + seconds))

# An environment of our own, in which the machine's PyTorch is seen behind what is installed here.
# One that was made for the same wheels is used again.
install() {
    local stamp
    stamp=$(ls -l --time-style=full-iso "$here"/wheels/*.whl | sha256sum)
    [ "$(cat "$environment/stamp" 2>/dev/null)" = "$stamp" ] && return
    rm -rf "$environment"
    "$python" -m venv --without-pip "$environment" || return
    local beside
    beside=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])') || return
    echo "import site; site.addsitedir('$beside')" \
        >"$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine.pth"
    "$python" -m pip --python "$environment/bin/python" install --quiet --disable-pip-version-check \
        --no-index --no-deps --no-compile --ignore-installed \
        "$here"/wheels/*.whl || return
    echo "$stamp" >"$environment/stamp"
}

mkdir -p "$out"
install || { echo "error: the environment could not be made; was collect.sh run?" >&2; exit 4; }
cd "$root/benchmarks" || exit
# The threads of a part's own processes are for itself to choose.
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$environment/bin/python" -m gpu_kit.same_code || exit 4
echo "installed after $SECONDS s"

failed=()
for part in "${parts[@]}"; do
    left=$((end_s - SECONDS))
    [ $left -gt 10 ] || { echo "$part: left out, the time is over" && failed+=("$part") && continue; }
    limit=$((${#rehearse[@]} ? 900 : limit_s[$part]))
    most=$((left < limit ? left : limit))
    echo "$part (at most $most s):"
    timeout --kill-after=15 "$most" "$environment/bin/python" -m "gpu_kit.$part" \
        --json "$out/$part.json" "${rehearse[@]}" || { echo "  ended with $?"; failed+=("$part"); }
done
"$environment/bin/python" -m gpu_kit.table "$out" >"$out/table.md"
echo "$SECONDS s in all; figures are in $out, as a table in $out/table.md"
[ ${#failed[@]} -eq 0 ] || { echo "not whole: ${failed[*]}"; exit 1; }
