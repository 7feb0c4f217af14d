#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trains the same GPT-2 or Llama with libzero, PyTorch (plain, DDP, FSDP2, tensor parallelism, 1F1B), DeepSpeed and llm.c
# in turn, and compares speed, memory, time to the first forward, and losses. It creates a virtual environment
# with PyTorch in build/peers-venv, and prints its size first.
#
#     sh bench/peers/run.sh                        GPT-2 124M on this machine's CPU, f32 and bf16, three rounds:
#                                                  hours on two cores
#     sh bench/peers/run.sh --model gpt2-nano      a small model: minutes
#     sh bench/peers/run.sh --model bench/peers/llama-100M --context 256 --batch 1 --lr 6e-4 --rows plain,stage3,torch,fsdp2
#                                                  a Llama, which transformers trains in PyTorch's rows
#     sh bench/peers/run.sh --llmc DIR             with llm.c, whose source is in DIR
#     sh bench/peers/run.sh --help                 everything else
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
here=$root/bench/peers
venv=$root/build/peers-venv
python=${PYTHON:-python3}
case " $* " in
*' --help '* | *' -h '*) exec "$python" "$here/compare.py" --help ;;
esac

cd "$root"
sh .ci/install.sh packages packages-peers
[ -f build/build.ninja ] || meson setup build -Dbuildtype=release
meson configure build -Dbuildtype=release -Dbench=enabled
meson compile -C build zero-bench zero-run

wanted=$(sed -n 's/^\(torch\|transformers\)==//p' "$here/requirements.txt")
if [ "$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"), m.version("transformers"), sep="\n")' 2>/dev/null)" != "$wanted" ]; then
    needed_gb=12
    free_gb=$(($(df -Pk "$root/build" | awk 'NR == 2 { print $4 }') / 1000000))
    echo "PyTorch and transformers from PyPI go into $venv: 3 GB to fetch, 7 GB on the disk (on x86-64; it comes with CUDA's libraries), of $free_gb GB that are free"
    if [ "$free_gb" -lt "$needed_gb" ]; then
        echo "that is too little: $needed_gb GB are needed" >&2
        exit 1
    fi
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --no-cache-dir -r "$here/requirements.txt"
fi

# If this fails, DeepSpeed's rows say why.
sh "$here/install_deepspeed.sh" "$venv"

exec "$venv/bin/python" "$here/compare.py" "$@"
