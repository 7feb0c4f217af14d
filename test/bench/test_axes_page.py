# SPDX-License-Identifier: Apache-2.0
"""Tests zero/axes.md: each figure of its tables is what the command next to it prints.

    test_axes_page.py ZERO_BENCH ZERO_RUN            runs all commands and compares
    test_axes_page.py ZERO_BENCH ZERO_RUN --write    writes the figures of this build into the page
"""
import os
import re
import sys
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import ROOT, bench, lines  # noqa: E402

PAGE = os.path.join(ROOT, 'zero', 'axes.md')
ROW = re.compile(r'^\| `(--[^`]*)` \|(.*)\|$')
COMMAND = re.compile(r'^    zero-bench (.*) ROW$')


def size(n):
    """Formats bytes like the commands: three digits, decimal units."""
    for unit, name in [(1e12, 'TB'), (1e9, 'GB'), (1e6, 'MB')]:
        if n >= unit:
            x = n / unit
            return f'{x:.2f} {name}' if x < 9.995 else f'{x:.1f} {name}' if x < 99.95 else f'{x:.0f} {name}'
    raise ValueError(n)


def cells_of_scale(row):
    tokens = row['tokens_per_s_per_gpu'] * row['world'] * row['step_ms'] / 1e3
    fits = '' if row['fits'] else ': more than there is'
    return [f"{row['step_ms'] / 1e3:.2f} s", f"{row['tokens_per_s_per_gpu']:.0f}", f"{row['mfu'] * 100:.0f}%", f"{row['exposed_ms'] / row['step_ms'] * 100:.0f}%",
            f"{row['bubble'] * 100:.0f}%", size(row['all_bytes']) + fits, f'{tokens / 1e6:.2f}']


def cells_of_plan(rows):
    return [size(r.get('all_bytes', r['bytes']['total'] + r['activation_bytes'])) for r in rows]


def cells_of(args):
    done = bench(args[0], '--json', *args[1:])
    if done.returncode:
        raise ValueError(f'{args}: {done.stderr}')
    rows = lines(done.stdout)
    return cells_of_scale(rows[0]) if args[0] == 'scale' else cells_of_plan(rows)


def read():
    with open(PAGE, encoding='utf-8') as page:
        return page.read().splitlines()


def rows_of(page):
    """Returns (number of the line, its options, the whole command's words, its cells)."""
    base = None
    for i, line in enumerate(page):
        said, row = COMMAND.search(line), ROW.match(line)
        base = said[1].split() if said else base
        if row:
            yield i, row[1], base + row[1].split(), [c.strip() for c in row[2].split('|')]


class Page(unittest.TestCase):
    def test_every_figure_is_the_commands(self):
        rows = list(rows_of(read()))
        self.assertGreaterEqual({args[0] for _, _, args, _ in rows}, {'plan', 'scale'})
        for _, _, args, cells in rows:
            self.assertEqual(cells, cells_of(args), ' '.join(args))

    def test_what_is_said_of_pipelines(self):
        """Except at stage 0, the first pipeline stage needs the most memory. Also checks what GPUs receive on
        slow links."""
        for _, _, args, _ in rows_of(read()):
            if args[0] == 'plan' and '--pp' in args:
                self.assertEqual([r['pp_rank'] for r in lines(bench(args[0], '--json', *args[1:]).stdout)[1:]], [0, 0, 0], ' '.join(args))
        slow = {row: args for _, row, args, _ in rows_of(read()) if 'a100-80' in args}
        for row, gb, moved in [('--pp 8 --stage 1 --micro-batches 32', 625, 1), ('--accum 4', 1651, 0)]:
            args = slow['--model llama-3-70B --worlds 512 ' + row]
            got, = lines(bench(args[0], '--json', *args[1:]).stdout)
            self.assertEqual((round(got['received_bytes'] / 1e9), round(got['pp_bytes'] / 1e9)), (gb, moved), row)

    def test_sizes(self):
        self.assertEqual([size(n) for n in (1234567, 12.345e9, 99.96e9, 999e9, 2.5e12)], ['1.23 MB', '12.3 GB', '100 GB', '999 GB', '2.50 TB'])


def write():
    page = read()
    for i, options, args, _ in rows_of(page):
        page[i] = f'| `{options}` | ' + ' | '.join(cells_of(args)) + ' |'
    with open(PAGE, 'w', encoding='utf-8') as out:
        out.write('\n'.join(page) + '\n')


if __name__ == '__main__':
    write() if sys.argv[1:] == ['--write'] else unittest.main()
