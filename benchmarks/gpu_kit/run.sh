#!/bin/bash
# Trains the three arms of size.py on a machine with a GPU and no network, in under ten minutes:
#
#   benchmarks/gpu_kit/run.sh [--seconds N] [--out FOLDER]
#
# python3 (or PYTHON) must see a PyTorch for the card; prepare.sh has put the rest into brought/.
# Without a GPU, with a tiny run and a hundredth of the tokens:
#
#   python benchmarks/gpu_kit/size.py RUN_DIR --out FOLDER --rehearse
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
site=/tmp/gpu-kit-site
"$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
    --upgrade --target "$site" "$here"/brought/wheels/*.whl
export PYTHONPATH=$site:$here/../.. PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
exec "$python" "$here/size.py" "$here/brought/run" --out "$here/out" "$@"
