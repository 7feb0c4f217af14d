#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs DeepSpeed into the virtual environment of bench/peers/run.sh. If that fails, the file deepspeed-failed
# there says why, and the installation is not tried again until the requirements change.
#
#     sh bench/peers/install_deepspeed.sh VENV
set -eu

venv=$1
wanted=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)/requirements-deepspeed.txt

if "$venv/bin/python" -c 'import importlib.metadata as m; m.version("deepspeed")' 2>/dev/null ||
    [ -n "$(find "$venv/deepspeed-failed" -newer "$wanted" 2>/dev/null)" ]; then
    exit 0
fi

# DeepSpeed is built from source against the installed PyTorch, so without pip's build isolation. Without it,
# pip does not install the packages that build DeepSpeed, so they are installed first.
install() {
    grep -v -e '^deepspeed==' -e '^#' "$wanted" >"$venv/builds-deepspeed.txt"
    "$venv/bin/pip" install --no-cache-dir -r "$venv/builds-deepspeed.txt" &&
        DS_BUILD_OPS=0 "$venv/bin/pip" install --no-cache-dir --no-build-isolation -r "$wanted"
}

# Prints the last error in the log, except pip's own summaries of errors.
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
