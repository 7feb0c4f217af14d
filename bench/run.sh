#!/bin/sh
# From a clean clone on a bare Debian 12 to a GPT that learns, and to what sharding saves: installs what is missing, builds, trains
# gpt2-nano with parameters, gradients and optimizer state sharded over four ranks (stage 3) on real text, and then runs
# gpt2-124M, or as much of it as there is memory for, a few steps at every stage, to measure what each takes.
#
#     sh bench/run.sh               a minute of training
#     sh bench/run.sh SECONDS       longer or shorter
#
# Leaves build/loss.svg and build/memory.svg, as pictures.
set -eu

seconds=${1:-60}
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"

sh .ci/install.sh

[ -f build/build.ninja ] || meson setup build -Dbuildtype=release
meson configure build -Dbuildtype=release -Dbench=enabled
meson compile -C build zero-bench zero-run

echo
echo "training gpt2-nano at stage 3 on 4 ranks for $seconds seconds"
echo
build/zero/zero-run -n 4 --raw build/bench/zero-bench train --model gpt2-nano --stage 3 --seconds "$seconds" --plot build/loss.svg

echo
echo "measuring gpt2-124M at every stage on 4 ranks, and not wrapped, which takes a few minutes"
echo
build/bench/zero-bench memory --ranks 4 --model gpt2-124M --dtype bf16 --context 64 --batch 1 --steps 2 --fit free --plain --plot build/memory.svg
