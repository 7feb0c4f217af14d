#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# On a machine with one or more NVIDIA GPUs: builds with CUDA and runs what needs a GPU, in sections. Each takes at most
# four minutes after the build, and prints a table and what it proved; the table also goes as JSON to FILE. The exit code is
# 0 if nothing failed; what a machine lacks is skipped, with the reason.
#
#     sh test/gpu.sh [--only kernels|train|mesh|peers]... [--sanitize] [--packages DIR] [--out FILE]
#
# kernels: the tests on the GPU, and how fast kernels are. train: stages against the program without libzero, and their
# speed. mesh: data, tensor and pipeline parallelism on 2, 4 and 8 ranks, with a GPU for each, or on one GPU. peers: the same
# models by PyTorch.
#
# --sanitize: also under compute-sanitizer (memcheck, racecheck), which takes several times as long.
# --packages DIR: Debian packages (.deb) to unpack for this build alone, where nothing can be installed. Besides CUDA, NCCL,
# Meson and a compiler it takes what .ci/packages lists under "the library" and "zero-bench", libcmocka-dev, and what these
# depend on: of the running libraries, too.
# The Python that has PyTorch, for the comparison: PYTHON=..., else python3.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
build='build-gpu'
out=
packages=
sanitize=
only=
while [ $# -gt 0 ]; do
    case $1 in
    --sanitize) sanitize=--sanitize ;;
    --packages) packages=$2 && shift ;;
    --out) out=$2 && shift ;;
    --only)
        case ${2-} in
        kernels | train | mesh | peers) only="$only --only $2" ;;
        *)
            echo "test/gpu.sh: --only takes kernels, train, mesh or peers" >&2
            exit 2
            ;;
        esac
        shift
        ;;
    *)
        echo "usage: sh test/gpu.sh [--only kernels|train|mesh|peers]... [--sanitize] [--packages DIR] [--out FILE]" >&2
        exit 2
        ;;
    esac
    shift
done

# The GPU's own machine code only: other targets take time and are not run here.
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null) || arch=
arch=$(echo "$arch" | head -n 1 | tr -d '. ')
case $arch in
'' | *[!0-9]*)
    echo "test/gpu.sh: no GPU: nvidia-smi is missing or tells of none, so there is nothing to test" >&2
    exit 2
    ;;
esac
mkdir -p "$build"

if [ -n "$packages" ]; then
    into=$root/$build/packages
    for package in "$packages"/*.deb; do
        dpkg -x "$package" "$into"
    done
    triplet=$(gcc -print-multiarch 2>/dev/null || true)
    triplet=${triplet:-x86_64-linux-gnu}
    lib=$into/usr/lib/$triplet
    PATH=$into/usr/bin:$PATH
    export PATH CPATH="$into/usr/include:$into/usr/include/$triplet${CPATH:+:$CPATH}"
    export LIBRARY_PATH="$lib${LIBRARY_PATH:+:$LIBRARY_PATH}" LD_LIBRARY_PATH="$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export PKG_CONFIG_SYSROOT_DIR="$into" PKG_CONFIG_LIBDIR="$lib/pkgconfig:$into/usr/share/pkgconfig"
else
    sh .ci/install.sh packages packages-test </dev/null
fi

# NCCL as PyTorch brings it, header and library, where the system has none.
python=${PYTHON:-python3}
nccl=$("$python" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null || true)
if [ -n "$nccl" ]; then
    export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$nccl/lib"
    export C_INCLUDE_PATH="${C_INCLUDE_PATH:+$C_INCLUDE_PATH:}$nccl/include"
fi

if [ -f "$build/build.ninja" ]; then
    meson setup --reconfigure "$build" -Dcuda=enabled -Dgpu_arch="$arch" </dev/null
else
    meson setup "$build" -Dbuildtype=release -Dcuda=enabled -Dgpu_arch="$arch" </dev/null
fi
meson compile -C "$build" </dev/null

# gpu.json, or gpu-mesh.json with --only mesh
name=gpu$(echo "$only" | sed 's/ --only /-/g')
# shellcheck disable=SC2086 # a list of words
exec "$python" test/gpu_report.py --build "$build" --out "${out:-$build/$name.json}" $sanitize $only
