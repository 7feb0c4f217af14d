#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Changes the schedule core in one place at a time, and shows that some test notices each change.

    core_mutants.py LIST ROOT CC WORK SOURCE... -- LIBRARY... -- TEST.a...

WORK is a folder for compiled files. LIST (core_mutants.txt) names for each change a function, which is in one
of the sources. That source is compiled with the change and linked before the libraries with each test, an
archive that has a main.

A change is noticed if a test fails, or takes longer than twenty times its time without the change plus half a
minute. Every change must be noticed, and without a change all tests must pass. A change that no test notices
is either needless code or a gap in the tests.

In the environment, ONLY=TEXT selects the changes with TEXT in their name. N_CHANGES=N draws N of them by
SEED, which is printed."""
import concurrent.futures
import os
import random
import re
import subprocess
import sys
import time

FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-O1", "-w"]


def read_list(path):
    mutants = []
    for block in re.split(r"\n\s*\n", open(path, encoding="utf-8").read()):
        fields = dict(re.findall(r"^(\w+): ?(.*)$", block, flags=re.MULTILINE))
        if fields:
            mutants.append(fields)
    return mutants


def mutate(sources, m):
    """Returns the path of the source {path: text} that has the change, and its changed text."""
    pattern = re.compile(r"^[A-Za-z_][^\n;]*\b" + m["in"] + r"\([^;{]*\)\n\{.*?^\}", re.MULTILINE | re.DOTALL)
    found = [(path, body) for path, text in sources.items() for body in pattern.finditer(text)]
    if len(found) != 1:
        sys.exit(f'"{m["name"]}": the function {m["in"]} stands in {[path for path, _ in found]}')
    path, body = found[0]
    if body[0].count(m["old"]) != 1:
        sys.exit(f'"{m["name"]}": "{m["old"]}" stands in {m["in"]} {body[0].count(m["old"])} times')
    new = m.get("new") or ";"
    return path, sources[path][:body.start()] + body[0].replace(m["old"], new) + sources[path][body.end():]


def compile_source(path, text, root, cc, folder):
    source = os.path.join(folder, os.path.basename(path))
    with open(source, "w", encoding="utf-8") as f:
        f.write(text)
    subprocess.run(cc + FLAGS + ["-c", "-I", root, source, "-o", os.path.join(folder, "mutant.o")], check=True)


def link(folder, cc, test, libraries):
    program = os.path.join(folder, "test")
    mutant = os.path.join(folder, "mutant.o")
    wraps = ["-Wl,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=posix_memalign,--wrap=free"] if "plan" in os.path.basename(test) else []
    subprocess.run(cc + ([mutant] if os.path.exists(mutant) else []) + ["-o", program] + wraps + ["-Wl,--start-group", test] + libraries +
                   ["-Wl,--end-group", "-lcmocka", "-luv", "-lxxhash", "-lpthread", "-lm", "-ldl"], check=True)
    return program


def noticed_by(folder, cc, tests, libraries, limits):
    """Returns the first test that fails or exceeds its limit in seconds. A test without a limit gets one from
    its time."""
    env = {**os.environ, "SEED": "1", "MALLOC_PERTURB_": "0"}  # the same models in every run
    for t in tests:
        program = link(folder, cc, t, libraries)
        name = re.sub(r"^lib|\.a$", "", os.path.basename(t))
        start = time.monotonic()
        try:
            r = subprocess.run([program], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=limits.get(t))
        except subprocess.TimeoutExpired:
            return name + " (does not end)"
        if r.returncode:
            return name
        limits.setdefault(t, 30 + 20 * (time.monotonic() - start))
    return None


def main():
    list_path, root, cc, work = sys.argv[1:5]
    cc = cc.split()
    rest = sys.argv[5:]
    split = rest.index("--")
    sources = {path: open(path, encoding="utf-8").read() for path in rest[:split]}
    rest = rest[split + 1:]
    split = rest.index("--")
    libraries, tests = rest[:split], rest[split + 1:]
    mutants = [(m, *mutate(sources, m)) for m in read_list(list_path)]
    whole = os.path.join(work, "whole")
    os.makedirs(whole, exist_ok=True)
    limits = {}
    by = noticed_by(whole, cc, tests, libraries, limits)
    if by:
        sys.exit(f"{by} fails without any change")
    only = os.environ.get("ONLY", "")
    seed = int(os.environ.get("SEED") or time.time_ns() % 10**9)
    chosen = [k for k, (m, _, _) in enumerate(mutants) if only in m["name"]]
    if os.environ.get("N_CHANGES"):
        print(f"SEED={seed}", flush=True)
        chosen = sorted(random.Random(seed).sample(chosen, min(len(chosen), int(os.environ["N_CHANGES"]))))

    def one(k):
        m, path, text = mutants[k]
        folder = os.path.join(work, str(k))
        os.makedirs(folder, exist_ok=True)
        compile_source(path, text, root, cc, folder)
        return m, noticed_by(folder, cc, tests, libraries, limits)

    survived = n = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for m, by in pool.map(one, chosen):
            n += 1
            survived += by is None
            print(f'{m["in"]}: {m["name"]}: {by or "SURVIVED"}', flush=True)
    print(f"{n - survived} of {n} changes of the core noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
