#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports weights from a checkpoint and imports them again. The files have the format of safetensors and
GPT-2's names, and another topology that begins with them has the same weights.

    test_checkpoint_export.py ZERO_BENCH ZERO_RUN
"""
import glob
import json
import os
import re
import struct
import subprocess
import sys
import tempfile

BENCH, RUN = sys.argv[1:3]
LAYERS, C, T, V = 3, 24, 16, 256
MODEL = ["--layers", str(LAYERS), "--heads", "2", "--channels", str(C), "--context", str(T)]
SHAPES = {"ln_1.weight": [C], "ln_1.bias": [C], "attn.c_attn.weight": [C, 3 * C], "attn.c_attn.bias": [3 * C],
          "attn.c_proj.weight": [C, C], "attn.c_proj.bias": [C], "ln_2.weight": [C], "ln_2.bias": [C],
          "mlp.c_fc.weight": [C, 4 * C], "mlp.c_fc.bias": [4 * C], "mlp.c_proj.weight": [4 * C, C], "mlp.c_proj.bias": [C]}


def run(*command, code=0):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != code:
        print(f"{command}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        sys.exit(1)
    return done.stdout + done.stderr


def read(path):
    """Returns name -> (dtype, shape, bytes)."""
    with open(path, "rb") as f:
        data = f.read()
    n = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + n])
    about = header.pop("__metadata__", {})
    assert not about or about["format"] == "pt" and re.fullmatch("[0-9a-f]{16}", about["libzero_export"]), about
    return {name: (e["dtype"], e["shape"], data[8 + n + e["data_offsets"][0]:8 + n + e["data_offsets"][1]])
            for name, e in header.items()}


def weights(folder):
    if os.path.exists(os.path.join(folder, "model.safetensors")):
        assert os.listdir(folder) == ["model.safetensors"]
        return read(os.path.join(folder, "model.safetensors"))
    with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as f:
        index = json.load(f)
    found = {}
    for path in sorted(glob.glob(os.path.join(folder, "model-*-of-*.safetensors"))):
        here = read(path)
        assert all(index["weight_map"][name] == os.path.basename(path) for name in here), path
        found |= here
    assert set(found) == set(index["weight_map"])
    assert sum(len(w[2]) for w in found.values()) == index["metadata"]["total_size"]
    return found


def shards(folder):
    """Returns tensor/kind -> bytes, combined from all ranks' files, without the program's data."""
    parts = {}
    for path in glob.glob(os.path.join(folder, "*", "shard-*.safetensors")):
        for name, (_, _, data) in read(path).items():
            if name.count("/") < 2:
                continue
            tensor, kind, first = name.rsplit("/", 2)
            parts.setdefault(f"{tensor}/{kind}", {})[int(first)] = data
    return {name: b"".join(data for _, data in sorted(ranges.items())) for name, ranges in parts.items()}


def transposed(data, rows, columns):
    out = bytearray(len(data))
    for r in range(rows):
        for c in range(columns):
            out[4 * (c * rows + r):4 * (c * rows + r) + 4] = data[4 * (r * columns + c):4 * (r * columns + c) + 4]
    return bytes(out)


def main():
    with tempfile.TemporaryDirectory() as root:
        text, saved, out, again, out2 = (os.path.join(root, n) for n in ("text", "saved", "out", "again", "out2"))
        with open(text, "w", encoding="utf-8") as f:
            f.write("In the beginning was the word. " * 40)
        train = [BENCH, "train", *MODEL, "--data", text, "--batch", "1", "--json"]
        run(RUN, "-n", "3", *train, "--stage", "3", "--steps", "3", "--save", saved)
        run(RUN, "-n", "2", BENCH, "export", *MODEL, "--load", saved, "--out", out, "--max-file", "40000")
        got, state = weights(out), shards(saved)
        want = {"wte.weight": [V, C], "wpe.weight": [T, C], "ln_f.weight": [C], "ln_f.bias": [C]}
        want |= {f"h.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
        assert {name: w[1] for name, w in got.items()} == want
        assert len(glob.glob(os.path.join(out, "model-*"))) > 2 and {w[0] for w in got.values()} == {"F32"}
        assert got["wte.weight"][2] == state["wte/master"]
        per = 4 * 3 * C * C
        for layer in range(LAYERS):
            assert got[f"h.{layer}.attn.c_attn.weight"][2] == transposed(
                state["qkvw/master"][layer * per:(layer + 1) * per], 3 * C, C)
            assert got[f"h.{layer}.mlp.c_proj.bias"][2] == state["fcprojb/master"][layer * 4 * C:(layer + 1) * 4 * C]

        # Import them in another layout, and take a step of length 0.
        run(RUN, "-n", "2", *train, "--stage", "2", "--steps", "1", "--lr", "0", "--import", out, "--save", again)
        run(BENCH, "export", *MODEL, "--load", again, "--out", out2)
        assert weights(out2) == got

        # A tensor that does not fit is refused by name.
        wrong = [w if w != str(C) else str(2 * C) for w in MODEL]
        told = run(BENCH, "train", *wrong, "--data", text, "--batch", "1", "--steps", "1", "--import", out, code=2)
        assert "wte.weight has shape [256, 24]" in told and "[256, 48]" in told, told
        told = run(BENCH, "export", *wrong, "--load", saved, "--out", out2, code=2)
        assert "tensor wte has shape [256, 24] there and [256, 48] in this model" in told, told
        gone = sorted(glob.glob(os.path.join(out, "model-*")))[1]
        os.remove(gone)
        told = run(BENCH, "train", *MODEL, "--data", text, "--batch", "1", "--steps", "1", "--import", out, code=1)
        assert os.path.basename(gone) in told and "no such file" in told, told
    print("exported, imported, compared")


main()
