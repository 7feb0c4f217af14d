#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Changes the schedule core in one place at a time, and shows that some test notices.

    core_mutants.py LIST ROOT CC WORK SOURCE... -- LIBRARY... -- TEST.a...    WORK: a folder for what is compiled

A change of LIST (core_mutants.txt) names a function, which stands in one of the sources. Each test is an archive with a main of its
own; it is linked with the libraries and, before them, that source compiled anew with the change. A change is noticed when a test fails,
or does not end (in twenty times what it takes without a change, and half a minute). All must be noticed, and without a change all
tests must pass. One that is not noticed is either needless code or a hole in the tests.
In the environment: ONLY=TEXT: changes with TEXT in their name; N_CHANGES=N: N of them, drawn by SEED, which is printed."""
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
    """Which of the sources {path: text} the change is in, and its text with the change."""
    pattern = re.compile(r"^[a-z][^\n;]*\b" + m["in"] + r"\([^;{]*\)\n\{.*?^\}", re.MULTILINE | re.DOTALL)
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
    """The first test that fails or goes beyond its limit in seconds; where it has none, its time sets one."""
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
