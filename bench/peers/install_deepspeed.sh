#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs DeepSpeed into the virtual environment of bench/peers/run.sh, or says there (deepspeed-failed) why it cannot, until its requirements change.
#
#     sh bench/peers/install_deepspeed.sh VENV
set -eu

venv=$1
wanted=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)/requirements-deepspeed.txt

if "$venv/bin/python" -c 'import importlib.metadata as m; m.version("deepspeed")' 2>/dev/null ||
    [ -n "$(find "$venv/deepspeed-failed" -newer "$wanted" 2>/dev/null)" ]; then
    exit 0
fi

# It is built from source against the PyTorch that is there, so without the isolation in which pip has what builds it: that comes first.
install() {
    grep -v -e '^deepspeed==' -e '^#' "$wanted" >"$venv/builds-deepspeed.txt"
    "$venv/bin/pip" install --no-cache-dir -r "$venv/builds-deepspeed.txt" &&
        DS_BUILD_OPS=0 "$venv/bin/pip" install --no-cache-dir --no-build-isolation -r "$wanted"
}

# Of what was printed the last error, but for those by which pip says that there was one.
why_not() {
    grep -i 'error: ' "$1" | grep -v -e 'error: subprocess-exited' -e 'error: metadata-generation' | sed 's/^ *//' | tail -n 1 | grep . || tail -n 1 "$1"
}

echo "trying to install DeepSpeed"
if install >"$venv/deepspeed.log" 2>&1; then
    rm -f "$venv/deepspeed-failed"
else
    why_not "$venv/deepspeed.log" >"$venv/deepspeed-failed"
    echo "it does not install here ($venv/deepspeed.log): $(cat "$venv/deepspeed-failed")"
fi
