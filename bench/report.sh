#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Measures libzero on this machine and writes a self-contained page, build/report.html. Its numbers are also in
# build/report.json.
#
#     sh bench/report.sh [--quick] [--out FILE] [--peers FILE]
#
# --quick: small models and few steps. --peers: rows of bench/peers as JSON lines (default: build/peers/rows.jsonl, if
# it exists).
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
from=$PWD
cd "$root"

sh .ci/install.sh
command -v gnuplot >/dev/null || {
    echo "bench/report.sh: there is no gnuplot, which draws the page's pictures: no report page" >&2
    exit 1
}

[ -f build/build.ninja ] || meson setup build -Dbuildtype=release
meson configure build -Dbuildtype=release -Dbench=enabled
meson compile -C build zero-bench zero-run

bench=$root/build/bench/zero-bench run=$root/build/zero/zero-run
peers=$root/build/peers/rows.jsonl
if [ -f "$peers" ]; then
    set -- --peers "$peers" "$@"
fi
cd "$from"
exec python3 "$root/bench/report/report_page.py" --zero-bench "$bench" --zero-run "$run" --out "$root/build/report.html" "$@"
