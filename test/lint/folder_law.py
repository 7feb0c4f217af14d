#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rule of the tree: a floor includes only floors below it.

    folder_law.py ROOT         checks the tree, prints FILE:LINE: what is wrong, exits 1 if anything is
    folder_law.py --self-test  checks the checker on trees that break each rule
"""
import os
import re
import sys
import tempfile

TYPES = "zero/types.h"  # every floor may include it
FLOORS = ("kernels", "comm", "shard", "zero", "bench", "test")

# Folders or single files that files of each floor may include. comm may also include what kernels/device.h
# includes. There are six exceptions, all outside the library: comm/sim/sim.h uses the simulated device;
# zero-bench verify shows the schedule's proof, and zero-bench scale its time; zero-bench comm measures
# communicators alone; zero-bench flight reads flight recorders; zero-bench memory finds free memory as the
# library does.
ALLOWED = {
    "kernels": {"kernels/", TYPES},
    "comm": {"comm/", TYPES, "kernels/alloc.h", "kernels/device.h", "kernels/asserts.h",
             "kernels/first_failure.h", "kernels/host/host_memory.h", "kernels/huge_pages.h", "kernels/limits.h",
             "kernels/phase.h", "kernels/standard_fds.h", "kernels/thread.h"},
    "shard": {"kernels/", "comm/", "shard/", TYPES},
    "zero": {"kernels/", "comm/", "shard/", "zero/"},
    "bench": {"bench/", "zero/zero.h", TYPES, "kernels/gemm/gemm.h", "kernels/alloc.h", "kernels/device.h",
              "kernels/error.h", "kernels/agreement.h"},
    "test": {"kernels/", "comm/", "shard/", "zero/", "bench/", "test/"},
}
# Folders of its own floor that a folder may include. Its own folder and the floor's own files are always
# allowed. So a backend includes no other backend, and a device no other device. FLOOR/* stands for every
# folder of the floor without a row.
SISTERS = {
    "kernels": {"kernels/host/"},
    "kernels/cuda": {"kernels/host/"},
    "kernels/gemm": {"kernels/cuda/"},
    "kernels/sim": {"kernels/check/"},
    "comm": {"comm/meet/"},
    "comm/*": {"comm/meet/"},
    "shard/engine": {"shard/pipeline/"},
    "shard/engine/check": {"shard/pipeline/", "shard/engine/"},
    "shard/verify": {"shard/engine/"},
    "zero": {"zero/checkpoint/"},
    "bench": {"bench/report/"},
    "bench/*": {"bench/gpt2/", "bench/llama/", "bench/model/", "bench/report/", "bench/schedule/", "bench/tokenizer/", "bench/train/"},
    "bench/train": {"bench/gpt2/", "bench/llama/", "bench/model/", "bench/kernels/", "bench/report/", "bench/schedule/",
                    "bench/tokenizer/"},
}
EXCEPTIONS = {
    "comm/sim/sim.h": {"kernels/sim/sim_device.h"},
    "bench/schedule/verify_cmd.c": {"shard/verify/verify.h"},
    "bench/schedule/pipeline_cmd.c": {"shard/pipeline/pipeline.h"},
    "bench/schedule/pipeline_stages.c": {"shard/pipeline/pipeline.h"},
    "bench/scale/run.c": {"shard/verify/verify.h"},
    "bench/comm/ranks.h": {"comm/backend.h", "comm/meet/rendezvous.h", "comm/mesh.h", "comm/mpi/mpi_own.h", "kernels/thread.h"},
    "bench/flight/merge.h": {"comm/flight_view.h"},
    "bench/comm/ranks.c": {"comm/first_error.h", "kernels/host/host_memory.h"},
    "bench/memory/fit.c": {"kernels/host/host_memory.h"},
}
# Shows how a program is wrapped, so it uses of libzero what a program can.
WORKED_EXAMPLE = "bench/train/train.c"
# Headers that say what something consists of, for its own folder and for whoever proves it.
INSIDES = {
    "shard/engine/internal.h": ("shard/engine/", "shard/verify/", "test/"),
}
PROGRAMS = ("bench/", "test/", "zero/examples/")
INSIDE = re.compile(r"\b(zr|ZR)_\w+|->ops\b")
SOURCE = (".c", ".h", ".inc", ".cc", ".cpp", ".cu", ".cuh")
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^">]+)[">]')
# Headers that are installed together include each other by bare name. Public headers include nothing else of
# the project, and no header of a library that it uses.
PUBLIC = {"zero/zero.h", "zero/types.h", "zero/zero_config.h", "zero/zero_info.h", "zero/export.h"}
PUBLIC_INCLUDES = {"export.h", "types.h", "zero_config.h", "zero_info.h", "stddef.h", "stdint.h"}
# Third-party headers belong to the floor that wraps them. A model of bench/ may have its own GPU kernels, in
# .cu.
FOREIGN = {
    re.compile(r"(oneapi/dnnl/|dnnl).*"): {"kernels", "test"},
    re.compile(r"cuda.*|cublas.*"): {"kernels", "test"},
    re.compile(r"nccl.*|mpi\.h"): {"comm", "test"},
    re.compile(r"uv\.h|uv/.*"): {"comm", "shard", "zero", "bench", "test"},
}
# MPI headers differ. So the library includes one only here, and tests only where they are a program with MPI.
MPI_HEADER = "mpi.h"
SEES_MPI = ("comm/mpi/mpi_shim.c", "test/")


def is_build_folder(path):
    return os.path.isdir(os.path.join(path, "meson-info")) or os.path.isdir(os.path.join(path, "meson-private"))


def files_of(root):
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(d for d in subfolders
                               if d != ".git" and not is_build_folder(os.path.join(folder, d)))
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), root)


def includes(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            match = INCLUDE.match(line)
            if match:
                yield number, match[1] == '"', match[2]


def closure(root, path):
    """Returns path and every header of the project that it includes."""
    seen, todo = set(), [path]
    while todo:
        at = todo.pop()
        if at in seen or not os.path.exists(os.path.join(root, at)):
            continue
        seen.add(at)
        todo += [target for _, ours, target in includes(root, at) if ours]
    return seen


def allowed(target, rules):
    return any(target == rule or rule.endswith("/") and target.startswith(rule) for rule in rules)


def is_sister(path, target):
    """Returns whether target is in another folder of path's floor that SISTERS does not allow."""
    folder, other = os.path.dirname(path), os.path.dirname(target)
    floor = path.split("/")[0]
    if floor == "test" or other.split("/")[0] != floor or other in (folder, floor):
        return False
    sisters = SISTERS.get(folder) or SISTERS.get(os.path.dirname(folder) + "/*", ())
    return not any((other + "/").startswith(sister) for sister in sisters)


def check_includes(root, path):
    floor = path.split("/")[0]
    rules = ALLOWED[floor] | EXCEPTIONS.get(path, set())
    if floor == "comm":
        rules |= closure(root, "kernels/device.h")
    for number, ours, target in includes(root, path):
        at = f"{path}:{number}"
        if path in PUBLIC:
            of_public = {"stddef.h", "stdint.h"} if path == TYPES else PUBLIC_INCLUDES
            if target not in of_public:
                yield f"{at}: a public header includes {target}; allowed: {', '.join(sorted(of_public))}"
            continue
        if ours:
            if not os.path.exists(os.path.join(root, target)):
                yield f'{at}: "{target}" is not a path from the root of the tree'
            elif not allowed(target, rules):
                yield f"{at}: {floor}/ may not include {target}; allowed: {', '.join(sorted(ALLOWED[floor]))}"
            elif target in INSIDES and not path.startswith(INSIDES[target]):
                yield f"{at}: {target} is for {', '.join(INSIDES[target])} (INSIDES)"
            elif is_sister(path, target):
                yield f"{at}: {os.path.dirname(path)}/ may not include {target} of another folder of its floor (SISTERS)"
            continue
        if target in PUBLIC and not path.startswith(PROGRAMS):
            yield f'{at}: <{target}> is for programs; write "{target}"'
        if target == MPI_HEADER and floor in ("comm", "test") and not path.startswith(SEES_MPI):
            yield f"{at}: <{target}> is for {', '.join(SEES_MPI)}; others call MPI by comm/mpi/mpi_shim.h"
        for pattern, floors in FOREIGN.items():
            model_kernels = path.startswith("bench/") and path.endswith(".cu") and target == "cuda_runtime.h"
            if pattern.fullmatch(target) and floor not in floors and not model_kernels:
                yield f"{at}: <{target}> belongs in {' or '.join(sorted(floors))}/"


def check_example(root, path):
    with open(os.path.join(root, path), encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            for match in INSIDE.finditer(line):
                yield f"{path}:{number}: {match[0]} is libzero's inside; this is what a program of a user's looks like"


def check(root):
    for path in files_of(root):
        parts = path.split("/")
        for part in parts:
            if re.fullmatch(r"(utils?|common)(\.\w+)?", part):
                yield f"{path}:1: nothing is called {part} here"
        if parts[0] not in FLOORS:
            continue
        if path.endswith(SOURCE):
            yield from check_includes(root, path)
        if path == WORKED_EXAMPLE:
            yield from check_example(root, path)


def self_test():
    good = {
        "kernels/device.h": '#include "kernels/error.h"\n#include <stdint.h>\n',
        "kernels/error.h": '#include "zero/types.h"\n',
        "kernels/gemm/gemm.h": '#include "kernels/device.h"\n',
        "comm/comm.h": '#include "kernels/device.h"\n#include "kernels/error.h"\n',
        "shard/core.c": '#include "comm/comm.h"\n',
        "zero/zero.h": '#include "export.h"\n#include "zero_config.h"\n',
        "zero/zero_config.h": "#include <stdint.h>\n",
        "zero/export.h": "",
        "zero/types.h": "#include <stddef.h>\n",
        "zero/wrap.c": '#include "shard/core.h"\n#include "zero/zero.h"\n',
        "shard/core.h": "",
        "comm/meet/link.h": "",
        "comm/shm/shm.h": '#include "comm/comm.h"\n#include "comm/meet/link.h"\n',
        "comm/shm/shm.c": '#include "comm/shm/shm.h"\n',
        "comm/mpi/mpi_shim.c": "#include <mpi.h>\n",
        "bench/train/train.c": '#include "zero/zero.h"\n#include "kernels/gemm/gemm.h"\n',
        "bench/layers.cu": "#include <cuda_runtime.h>\n",
        "bench/README.md": "", "shard/README.md": "",
        "build/meson-info/x": "", "build/common.c": "",
    }
    bad = [
        ("comm reaches past device.h", {"comm/a.c": '\n#include "kernels/gemm/gemm.h"\n'}, "comm/a.c:2:"),
        ("kernels looks up", {"kernels/a.c": '#include "comm/comm.h"\n'}, "kernels/a.c:1:"),
        ("a backend knows another", {"comm/nccl/nccl.c": '#include "comm/shm/shm.h"\n'}, "comm/nccl/nccl.c:1:"),
        ("a folder of comm reaches past device.h", {"comm/shm/a.c": '#include "kernels/gemm/gemm.h"\n'}, "comm/shm/a.c:1:"),
        ("the engine names a watcher", {"shard/engine/a.c": '#include "shard/engine/check/a.h"\n', "shard/engine/check/a.h": ""}, "shard/engine/a.c:1:"),
        ("zero looks into the engine", {"zero/a.c": '#include "shard/engine/internal.h"\n', "shard/engine/internal.h": ""}, "zero/a.c:1:"),
        ("shard looks up", {"shard/a.c": '#include "zero/zero.h"\n'}, "shard/a.c:1:"),
        ("zero looks up", {"zero/a.c": '#include "bench/train/train.h"\n', "bench/train/train.h": ""}, "zero/a.c:1:"),
        ("bench reaches inside", {"bench/a.c": '  #  include "shard/core.h"\n'}, "bench/a.c:1:"),
        ("another file takes an exception", {"bench/a.c": '#include "shard/verify/verify.h"\n', "shard/verify/verify.h": ""}, "bench/a.c:1:"),
        ("not from the root", {"shard/a.c": '#include "core.h"\n'}, "shard/a.c:1:"),
        ("public header drags in libuv", {"zero/zero.h": "#include <uv.h>\n"}, "zero/zero.h:1:"),
        ("the shared types include another header", {"zero/types.h": '#include "export.h"\n'}, "zero/types.h:1:"),
        ("oneDNN outside kernels", {"shard/a.c": "#include <dnnl.h>\n"}, "shard/a.c:1:"),
        ("CUDA in a bench's C", {"bench/a.c": "#include <cuda_runtime.h>\n"}, "bench/a.c:1:"),
        ("cuBLAS in a bench's kernels", {"bench/a.cu": "#include <cublasLt.h>\n"}, "bench/a.cu:1:"),
        ("MPI past its table", {"comm/mpi/mpi_wait.c": "#include <mpi.h>\n"}, "comm/mpi/mpi_wait.c:1:"),
        ("MPI in zero", {"zero/a.c": "#include <mpi.h>\n"}, "zero/a.c:1:"),
        ("libuv in kernels", {"kernels/a.c": "\n\n#include <uv.h>\n"}, "kernels/a.c:3:"),
        ("the worked example calls what is inside", {"bench/train/train.c": "int f(void)\n{ return zr_fail(ZERO_ERR_ARG); }\n"}, "bench/train/train.c:2:"),
        ("a common file", {"zero/common.h": ""}, "zero/common.h:1:"),
        ("a folder of utils", {"bench/utils/a.c": ""}, "bench/utils/a.c:1:"),
    ]

    def tree(files):
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
                with open(os.path.join(root, path), "w", encoding="utf-8") as f:
                    f.write(text)
            return list(check(root))

    failures = []
    if tree(good):
        failures.append(f"a lawful tree is refused: {tree(good)}")
    for what, files, where in bad:
        found = tree({**good, **files})
        if len(found) != 1 or not found[0].startswith(where):
            failures.append(f"{what}: found {found}, expected one fault at {where}")
    return failures


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    faults = self_test() if sys.argv[1] == "--self-test" else list(check(sys.argv[1]))
    print("\n".join(faults) or "no fault")
    sys.exit(1 if faults else 0)
