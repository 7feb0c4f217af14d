#!/bin/sh
# The same GPT-2 trained by libzero, PyTorch (plain, DDP, FSDP2), DeepSpeed and llm.c, in turns: speed, memory, time to the first forward, and
# losses beside each other. Makes a virtual environment with PyTorch in build/peers-venv, and says first how large that is.
#
#     sh bench/peers/run.sh                        GPT-2 124M on this machine's CPU, f32 and bf16, three rounds: takes hours on two cores
#     sh bench/peers/run.sh --model gpt2-nano      a small one: minutes
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
sh .ci/install.sh
sh .ci/install.sh packages-peers
[ -f build/build.ninja ] || meson setup build -Dbuildtype=release
meson configure build -Dbuildtype=release -Dbench=enabled
meson compile -C build zero-bench zero-run

wanted=$(sed -n 's/^torch==//p' "$here/requirements.txt")
if [ "$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null)" != "$wanted" ]; then
    needed_gb=12
    free_gb=$(($(df -Pk "$root/build" | awk 'NR == 2 { print $4 }') / 1000000))
    echo "PyTorch $wanted from PyPI goes into $venv: 3 GB to fetch, 7 GB on the disk (on x86-64; it comes with CUDA's libraries), of $free_gb GB that are free"
    if [ "$free_gb" -lt "$needed_gb" ]; then
        echo "that is too little: $needed_gb GB are needed" >&2
        exit 1
    fi
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --no-cache-dir -r "$here/requirements.txt"
fi

# It builds from source, against the PyTorch that is there. Where it cannot, its rows say why.
if ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("deepspeed")' 2>/dev/null && [ ! -f "$venv/deepspeed-failed" ]; then
    echo "trying to install DeepSpeed"
    if ! DS_BUILD_OPS=0 "$venv/bin/pip" install --no-cache-dir --no-build-isolation -r "$here/requirements-deepspeed.txt" >"$venv/deepspeed.log" 2>&1; then
        { grep -i 'error' "$venv/deepspeed.log" || tail -n 1 "$venv/deepspeed.log"; } | tail -n 1 >"$venv/deepspeed-failed"
        echo "it does not install here ($venv/deepspeed.log): $(cat "$venv/deepspeed-failed")"
    fi
fi

exec "$venv/bin/python" "$here/compare.py" "$@"
