#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fuzzes the parsers with libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer:
#
#     sh test/fuzz/run.sh [SECONDS-EACH]
#
# Installs clang and its runtime if they are missing. The last line is "N passed, N failed". Inputs that fail are kept
# in build-fuzz/.
set -eu

cd "$(dirname -- "$0")/../.."
seconds=${1:-60}
sh .ci/install.sh packages packages-fuzz </dev/null || true # another clang may be installed
clang=$(command -v clang || command -v clang-14 || true)
if [ -z "$clang" ]; then
    echo "no clang here"
    echo "0 passed, 1 failed"
    exit 1
fi
rm -rf build-fuzz/passed
mkdir -p build-fuzz/passed
flags="-std=gnu11 -g -O1 -D_GNU_SOURCE -DBENCH_HAVE_PCRE2 -DBENCH_HAVE_UTF8PROC -I. -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all"
parsers="zero/checkpoint/safetensors.c zero/checkpoint/manifest.c zero/checkpoint/checksums.c zero/checkpoint/files.c"
common="kernels/error.c kernels/alloc.c kernels/limits.c kernels/standard_fds.c"
names='' running=''

# fuzz NAME SOURCE...: runs a fuzz target in the background, two at a time. Their output is printed at the end.
fuzz() {
    names="$names $1"
    try "$@" >"build-fuzz/$1.log" 2>&1 &
    running="$running $!"
    # shellcheck disable=SC2086 # a list of words
    set -- $running
    if [ $# -ge 2 ]; then
        wait "$1" || true
        shift
        running="$*"
    fi
}

try() {
    name=$1
    shift
    mkdir -p "build-fuzz/found-$name"
    # shellcheck disable=SC2086 # lists of words
    if "$clang" $flags -o "build-fuzz/$name" "test/fuzz/fuzz_$name.c" "$@" $common -ljansson -lpcre2-8 -lutf8proc -lisal -lnettle -lxxhash -luv -lm -lpthread &&
        "build-fuzz/$name" -max_total_time="$seconds" -max_len=4096 -timeout=10 -print_final_stats=1 -verbosity=0 \
            -artifact_prefix="build-fuzz/$name-" "build-fuzz/found-$name" "test/fuzz/seeds/$name"; then
        : >"build-fuzz/passed/$name"
    fi
}

# shellcheck disable=SC2086
fuzz safetensors $parsers
# shellcheck disable=SC2086
fuzz manifest $parsers
fuzz config zero/config.c zero/config_keys.c zero/errors.c shard/layout.c shard/placement.c shard/tp_cut.c kernels/log.c kernels/optimizers.c
fuzz frames comm/meet/link.c comm/meet/handshake.c comm/meet/net_address.c comm/fork.c kernels/thread.c kernels/log.c
fuzz flight comm/flight_view.c comm/flight.c comm/post.c comm/segment.c comm/comm.c comm/shared_memory.c comm/meet/call_log.c \
    kernels/first_failure.c kernels/clock.c
fuzz hostlist comm/meet/meeting_point.c comm/meet/net_address.c comm/meet/handshake.c comm/meet/launcher.c comm/process_stat.c \
    kernels/thread.c
fuzz tokenizer bench/tokenizer/*.c
fuzz meeting_file comm/meet/meeting_file.c comm/meet/handshake.c comm/meet/net_address.c kernels/thread.c
wait
passed=0 failed=0
for name in $names; do
    echo "-- $name"
    cat "build-fuzz/$name.log"
    if [ -e "build-fuzz/passed/$name" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "failed: $name"
    fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
