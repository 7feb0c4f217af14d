#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The demonstration, from a clean clone on a bare Debian 12. It installs missing packages, builds, and trains
# gpt2-nano for a minute. Parameters, gradients and optimizer state are sharded over four ranks (stage 3). The text
# is the C headers of this machine. Then it runs a few steps of gpt2-124M at every stage and measures the memory of
# each. If there is too little memory, it uses a smaller model. The last lines are text by the trained gpt2-nano.
#
#     sh bench/run.sh               a minute of training
#     sh bench/run.sh SECONDS       longer or shorter
#
# With gnuplot, it also draws build/loss.svg and build/memory.svg.
set -eu

seconds=${1:-60}
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"

sh .ci/install.sh

[ -f build/build.ninja ] || meson setup build -Dbuildtype=release
meson configure build -Dbuildtype=release -Dbench=enabled
meson compile -C build zero-bench zero-run

loss='' memory=''
if command -v gnuplot >/dev/null; then
    loss='--plot build/loss.svg' memory='--plot build/memory.svg'
else
    echo
    echo "There is no gnuplot: no pictures."
fi

echo
echo "training gpt2-nano at stage 3 on 4 ranks for $seconds seconds; its text is the C headers of this machine, below /usr/include"
echo
# shellcheck disable=SC2086 # an option and its value, or nothing
build/zero/zero-run -n 4 --raw build/bench/zero-bench train --model gpt2-nano --stage 3 --export build/gpt2-nano --seconds "$seconds" $loss

echo
echo "measuring gpt2-124M at every stage on 4 ranks, and not wrapped, which takes a few minutes"
echo
# shellcheck disable=SC2086
build/bench/zero-bench memory --ranks 4 --model gpt2-124M --dtype bf16 --context 64 --batch 1 --steps 2 --fit free --plain $memory

cat <<'END'

Where to go next:
  sh bench/report.sh             all measurements of this machine on one page, build/report.html
  build/bench/zero-bench plan    the memory of any model on any number of ranks: --params 7.5e9 --world 64
  README.md                      a whole program, and how to install the library
  zero/guide.md                  how to wrap your own model, in five steps
END

echo
echo "what the model has learned in $seconds seconds, by zero-bench sample, whose --help tells more:"
echo
build/zero/zero-run -n 4 --raw build/bench/zero-bench sample --stage 3 --import build/gpt2-nano --prompt '#define ' --tokens 400 --temperature 0.6
