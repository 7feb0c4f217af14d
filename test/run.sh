#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds and runs all tests. It also works in a clean clone on a bare Debian 12, where it installs missing packages.
# The last line is "N passed, N failed". The exit code is 0 if all passed.
#
#     sh test/run.sh                        everything
#     sh test/run.sh --sanitize address     with AddressSanitizer and UndefinedBehaviorSanitizer
#     sh test/run.sh --sanitize thread      the tests that use threads, with ThreadSanitizer
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"

usage() {
    echo "usage: sh test/run.sh [--sanitize address|thread]" >&2
    exit 2
}

sanitize=none
while [ $# -gt 0 ]; do
    case $1 in
    --sanitize)
        [ $# -ge 2 ] || usage
        sanitize=$2
        shift 2
        ;;
    --sanitize=*)
        sanitize=${1#*=}
        shift
        ;;
    *) usage ;;
    esac
done

# Long tests try only a sample of their cases (test/README.md has the full counts). In the plain build, values in the
# environment take precedence. Instrumented programs are slow, so they try even fewer cases. ThreadSanitizer checks
# which threads run at the same time; this is the same for most failing calls.
case $sanitize in
none)
    export EVERY="${EVERY:-8}" LAYOUTS="${LAYOUTS:-3}" N_CHANGES="${N_CHANGES:-5}" N_FLIPS="${N_FLIPS:-6000}" N_KILLS="${N_KILLS:-60}"
    export N_SEEDS="${N_SEEDS:-100}" N_SUBSETS="${N_SUBSETS:-8}"
    ;;
address) export N_SEEDS=50 N_FLIPS=1000 N_SUBSETS=3 N_KILLS=15 N_MODELS=3 N_CASES=3 N_LOST=6 EVERY=30 LAYOUTS=10 ;;
thread) export N_FLIPS=500 N_SUBSETS=2 N_MODELS=3 N_CASES=3 N_LOST=6 EVERY=30 LAYOUTS=12 ;;
esac

# The options of each build, and the tests that run in it. All builds check invariants. Only the plain build runs the
# lints, second runs of a program in check mode or with another library (suite "again"), zero-bench and trainings,
# several hosts, and the simulator. A build with a sanitizer builds only what its tests need. Warnings are errors only
# in the plain build, because gcc warns about impossible sizes in instrumented code.
case $sanitize in
none)
    build=build-test
    set -- -Dtests=enabled -Dasserts=true -Dbuildtype=release -Dwerror=true -Dgpu_arch=90 # the test library_alone compiles for all GPUs
    tests=--no-rebuild
    slower=3
    ;;
address)
    build=build-asan
    set -- -Dtests=enabled -Dasserts=true -Doptimization=1 -Db_sanitize=address,undefined -Db_lundef=false -Dgpu_arch=90 \
        -Dc_args='-g1 -fno-sanitize-recover=all -fno-omit-frame-pointer'
    export CXXFLAGS='-fno-sanitize-recover=all -fno-omit-frame-pointer'
    tests='--no-suite lint --no-suite again --no-suite bench --no-suite hosts --no-suite sim'
    slower=8
    export ASAN_OPTIONS="detect_stack_use_after_return=1:strict_string_checks=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
    export UBSAN_OPTIONS="print_stacktrace=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
    ;;
thread)
    build=build-tsan
    set -- -Dtests=enabled -Dasserts=true -Doptimization=1 -Db_sanitize=thread -Db_lundef=false -Dgpu_arch=90 \
        -Dc_args='-g1 -fno-omit-frame-pointer'
    export CXXFLAGS=-fno-omit-frame-pointer
    tests='--suite threads'
    slower=15
    export TSAN_OPTIONS="second_deadlock_stack=1${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
    ;;
*) usage ;;
esac

give_up() {
    echo "test/run.sh: $1"
    echo "0 passed, 1 failed"
    exit 1
}

sh .ci/install.sh packages packages-test </dev/null || give_up "what the build needs could not be installed"
sh .ci/install.sh packages-slurm </dev/null || true # the test of srun says what is missing

# The tests set these variables themselves. Those of a job around this script would mislead them.
for name in $(env | sed -n 's/^\(ZERO_[A-Z0-9_]*\)=.*/\1/p') RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT \
    OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK PMI_SIZE SLURM_PROCID SLURM_NTASKS; do
    unset "$name"
done

# Debian 12's sanitizers put their shadow memory where newer kernels may load the program, so switch off address
# randomisation.
together=
if [ "$sanitize" != none ] && setarch "$(uname -m)" -R true 2>/dev/null; then
    together="setarch $(uname -m) -R"
fi

if [ -f "$build/build.ninja" ]; then
    meson setup --reconfigure "$build" "$@" </dev/null || give_up "meson could not configure $build"
else
    rm -rf "$build"
    meson setup "$build" "$@" </dev/null || give_up "meson could not configure $build"
fi
[ "$sanitize" != none ] || meson compile -C "$build" </dev/null || give_up "the build failed"

log=$build/meson-logs/testlog.json
rm -f "$log"
# Run twice as many tests at a time as there are cores: many tests wait for a deadline, a lost rank or a disk.
processes=$(($(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) * 2))
[ "$processes" -le 8 ] || processes=8
# Failed tests and timeouts are counted from the log below.
# shellcheck disable=SC2086 # $together and $tests are lists of words
$together meson test -C "$build" --print-errorlogs --num-processes "$processes" --timeout-multiplier "$slower" \
    $tests </dev/null || :

[ -f "$log" ] || give_up "no test ran"
exec python3 - "$log" <<'END'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as log:
    tests = [json.loads(line) for line in log if line.strip()]
passed = [t for t in tests if t["result"] in ("OK", "EXPECTEDFAIL")]
failed = [t for t in tests if t["result"] not in ("OK", "EXPECTEDFAIL", "SKIP")]
for t in tests:
    if t["result"] == "SKIP":
        print("skipped:", t["name"])
for t in failed:
    print(f"failed: {t['name']} ({t['result'].lower()})")
print(f"{len(passed)} passed, {len(failed)} failed")
sys.exit(1 if failed or not passed else 0)
END
