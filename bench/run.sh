#!/bin/sh
# From a clean clone on a bare Debian 12 to a GPT that learns: installs what is missing, builds, trains gpt2-nano with
# parameters, gradients and optimizer state sharded over four ranks (stage 3) on real text, and ends with the memory that
# each stage takes.
#
#     sh bench/run.sh               a minute of training
#     sh bench/run.sh SECONDS       longer or shorter
set -eu

seconds=${1:-60}
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"

sh .ci/install.sh

[ -f build/build.ninja ] || meson setup build -Dbuildtype=release
meson configure build -Dbuildtype=release
meson compile -C build zero-bench zero-run

echo
echo "training gpt2-nano at stage 3 on 4 ranks for $seconds seconds"
echo
build/zero/zero-run -n 4 --raw build/bench/zero-bench train --model gpt2-nano --stage 3 --seconds "$seconds"

echo
build/bench/zero-bench memory --ranks 4 --plot build/memory.svg
