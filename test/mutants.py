#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Changes sources or headers in one place at a time, as known bugs have it, and shows that a test notices.

    mutants.py LIST ROOT BUILD TEST FILE...

LIST is read as core_mutants.py reads its own. A change may name its file; it is left out if that is none of FILE.
TEST is a target of ninja in BUILD. FILE is a source of TEST or of its libraries, or a header, by its path in ROOT.
A changed source is compiled and linked by ninja's commands. If a header has changed, all FILEs that are sources
are compiled, with a folder for the header before all others. In the environment, ONLY=TEXT selects the changes
with TEXT in their name."""
import os
import shlex
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), 'sim'))
from core_mutants import mutate, read_list  # noqa: E402


class Program:
    """The test, linked with changed objects."""

    def __init__(self, root, build, test, files):
        text = subprocess.run(['ninja', '-C', build, '-t', 'commands', test], capture_output=True, text=True, check=True).stdout
        commands = [shlex.split(line) for line in text.splitlines() if not line.startswith('ninja:')]
        self.root, self.build, self.link = root, build, commands[-1]
        self.path = os.path.join(build, test + '_mutant')  # in the test's folder, from where it finds its libraries
        self.folder = self.path + '.p'
        os.makedirs(self.folder, exist_ok=True)
        self.compiles = {}
        library = f'_{test.rsplit("_", 1)[1]}.a.p/'  # of several with this source, that of the test's dtype
        for c in commands:
            source = os.path.relpath(os.path.join(build, c[-1]), root)
            if '-c' in c and source in files and (source not in self.compiles or library in c[c.index('-o') + 1]):
                self.compiles[source] = c

    def compile(self, source, changed):
        """Compiles as ninja does, but fast, without warnings and the list of headers that ninja reads. Returns the object's name in the build, and here."""
        c = self.compiles[source]
        md, output = c.index('-MD'), c.index('-o')
        here = os.path.join(self.folder, os.path.basename(source) + '.o')
        compiler = next(i for i, word in enumerate(c) if word.startswith('-'))
        path = changed if changed and changed.endswith(source) else c[-1]
        env = {**os.environ, 'CCACHE_NODIRECT': '1'}  # else ccache misses a header that appears in an earlier folder
        subprocess.run([*c[:compiler], '-I' + self.folder, *c[compiler:md], '-o', here, '-c', path, '-w', '-O1'], cwd=self.build, env=env, check=True)
        return c[output + 1], here

    def make(self, file=None, text=None):
        changed = None
        if file:
            changed = os.path.join(self.folder, file)
            os.makedirs(os.path.dirname(changed), exist_ok=True)
            with open(changed, 'w', encoding='utf-8') as f:
                f.write(text)
        objects = dict(self.compile(s, changed) for s in self.compiles if not file or file not in self.compiles or s == file)
        if changed:
            os.remove(changed)
        at = self.link.index('-o')
        words = [objects.pop(word, word) for word in self.link[at + 2:]]
        subprocess.run([*self.link[:at], '-o', self.path, *objects.values(), *words], cwd=self.build, check=True)

    def fails(self):
        env = {**os.environ, 'SEED': '1'}
        try:
            return subprocess.run([self.path], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=False).returncode != 0
        except subprocess.TimeoutExpired:
            return True


def main():
    list_path, root, build, test, *files = sys.argv[1:]
    program = Program(root, os.path.abspath(build), test, files)
    sources = {}
    for name in files:
        with open(os.path.join(root, name), encoding='utf-8') as f:
            sources[name] = f.read()
    mutants = []
    for m in read_list(list_path):
        if os.environ.get('ONLY', '') in m['name'] and m.get('file', files[0]) in files:
            mutants.append((m, *mutate({f: t for f, t in sources.items() if f == m.get('file', f)}, m)))
    program.make()
    if program.fails():
        sys.exit(f'{test} fails without any change')
    survived = 0
    for m, path, text in mutants:
        program.make(path, text)
        noticed = program.fails()
        survived += not noticed
        print(f'{m["in"]}: {m["name"]}: {"noticed" if noticed else "SURVIVED"}', flush=True)
    print(f'{len(mutants) - survived} of {len(mutants)} changes noticed')
    return 1 if survived else 0


if __name__ == '__main__':
    sys.exit(main())
