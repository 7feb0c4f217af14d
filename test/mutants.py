#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Changes context parallelism in one place at a time, as published bugs have it, and shows that the test notices.

    context_mutants.py LIST ROOT BUILD TEST

LIST (context_mutants.txt) is read as core_mutants.py reads its own. TEST is a target of ninja in BUILD, such as
test/bench/test_gpt2_context_f32. It is linked by ninja's command, after the changed source, which is compiled by
ninja's command too. In the environment, ONLY=TEXT selects the changes with TEXT in their name."""
import os
import shlex
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'sim'))
from core_mutants import mutate, read_list  # noqa: E402


def commands_of(build, test):
    """Returns ninja's command for each source of the model, and its last one, which links."""
    text = subprocess.run(['ninja', '-C', build, '-t', 'commands', test], capture_output=True, text=True, check=True).stdout
    commands = [shlex.split(line) for line in text.splitlines() if not line.startswith('ninja:')]
    library = 'libmodel_' + test.rsplit('_', 1)[1]
    return {os.path.basename(c[-1]): c for c in commands if '-c' in c and any(library in word for word in c)}, commands[-1]


def with_output(command, path):
    at = command.index('-o')
    return command[:at + 1] + [path] + command[at + 2:]


def make(path, text, program, compiles, link, build):
    """Compiles as ninja does, without warnings and the list of headers that ninja reads, and links the test."""
    source, mutant = os.path.join(program + '.p', os.path.basename(path)), os.path.join(program + '.p', 'mutant.o')
    with open(source, 'w', encoding='utf-8') as f:
        f.write(text)
    command = compiles[os.path.basename(path)]
    at = command.index('-MD')
    command = with_output(command[:at] + command[at + 5:], mutant)
    subprocess.run([*command[:-1], source, '-w'], cwd=build, check=True)
    at = link.index('-o')
    subprocess.run([*with_output(link, program)[:at + 2], mutant, *link[at + 2:]], cwd=build, check=True)


def fails(program):
    env = {**os.environ, 'SEED': '1'}
    try:
        return subprocess.run([program], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=False).returncode != 0
    except subprocess.TimeoutExpired:
        return True


def main():
    list_path, root, build, test = sys.argv[1:5]
    build = os.path.abspath(build)
    folder = os.path.join(root, 'bench', 'model')
    sources = {}
    for name in ('context.c', 'open.c', 'tokens.c'):
        with open(os.path.join(folder, name), encoding='utf-8') as f:
            sources[os.path.join(folder, name)] = f.read()
    mutants = [(m, *mutate(sources, m)) for m in read_list(list_path) if os.environ.get('ONLY', '') in m['name']]
    compiles, link = commands_of(build, test)
    program = os.path.join(build, test + '_mutant')  # in the test's folder, from where it finds its libraries
    os.makedirs(program + '.p', exist_ok=True)
    for path, text in sources.items():
        make(path, text, program, compiles, link, build)
        if fails(program):
            sys.exit(f'{path}: {test} fails without any change')
    survived = 0
    for m, path, text in mutants:
        make(path, text, program, compiles, link, build)
        noticed = fails(program)
        survived += not noticed
        print(f'{m["in"]}: {m["name"]}: {"noticed" if noticed else "SURVIVED"}', flush=True)
    print(f'{len(mutants) - survived} of {len(mutants)} changes noticed')
    return 1 if survived else 0


if __name__ == '__main__':
    sys.exit(main())
