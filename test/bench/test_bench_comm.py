# SPDX-License-Identifier: Apache-2.0
"""zero-bench comm: its table and JSON, what it refuses, that it finds wrong values, and its report of a lost
rank."""
import mmap
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import ZERO_BENCH, ZERO_RUN, bench, lines, run  # noqa: E402

ROW_KEYS = ['event', 'op', 'backend', 'path', 'bytes', 'slice', 'ms', 'ms_min', 'rounds_ms', 'algbw', 'busbw', 'limit', 'of_limit', 'wrong']
LIMITS = {'all_gather': 'copy limit', 'reduce_scatter': 'add limit'}
PATIENCE_S = 60  # limit of loops that wait for another process


def comm(world, *args):
    command = [ZERO_BENCH, 'comm', *map(str, args)]
    return run([ZERO_RUN, '-n', str(world), '--raw', *command] if world > 1 else command)


def measured(world, *args):
    """Returns the first line and the rows."""
    done = comm(world, '--json', *args)
    assert (done.returncode, done.stderr) == (0, ''), f'{world} ranks, {args}: {done}'
    head, *rows = lines(done.stdout)
    return head, rows


class Ranks:
    """zero-bench comm on two ranks, started here so that their process ids are known."""

    def __init__(self, *args):
        self.port = socket.socket()  # bound, and not listened on
        self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port.bind(('127.0.0.1', 0))
        where = {'ZERO_WORLD_SIZE': '2', 'ZERO_RENDEZVOUS': f'tcp://127.0.0.1:{self.port.getsockname()[1]}'}
        env = {k: v for k, v in os.environ.items() if not k.startswith('ZERO_') and k not in ('RANK', 'WORLD_SIZE')}
        self.ranks = [subprocess.Popen([ZERO_BENCH, 'comm', *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       text=True, env={**env, **where, 'ZERO_RANK': str(rank)}) for rank in range(2)]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for rank in self.ranks:
            rank.kill()
            rank.communicate()
        self.port.close()

    def arena_of(self, rank):
        """Maps the memory of the rank's collectives, which exists once rank 0 has printed its first line."""
        folder = f'/proc/{self.ranks[rank].pid}/fd'
        arenas = [fd for fd in os.listdir(folder) if re.search(r'memfd:zero-\w+-arena', os.readlink(f'{folder}/{fd}'))]
        assert len(arenas) == 1, arenas
        fd = os.open(f'{folder}/{arenas[0]}', os.O_RDWR)
        try:
            return mmap.mmap(fd, 0)
        finally:
            os.close(fd)

    def end(self):
        return [(rank.communicate(timeout=PATIENCE_S), rank.returncode) for rank in self.ranks]


class Rows(unittest.TestCase):
    def check_row(self, head, row, limits):
        n, rounds = head['group'], row['rounds_ms']
        self.assertEqual(list(row), ROW_KEYS)
        self.assertEqual(len(rounds), head['rounds'])
        self.assertAlmostEqual(row['ms'], statistics.median(rounds), 9)
        self.assertEqual(row['ms_min'], min(rounds))
        self.assertEqual((row['bytes'], row['slice'] % 128), (row['slice'] * n, 0))
        part = (2 if row['op'] == 'agree' else 1) * (n - 1) / n
        self.assertAlmostEqual(row['algbw'] * row['ms'] / (row['bytes'] * 1e-6), 1, 6)
        self.assertAlmostEqual(row['busbw'], row['algbw'] * part, 6)
        limit = limits.get((row['op'], row['bytes']))
        if row['backend'] == LIMITS.get(row['op']):
            self.assertEqual((row['limit'], row['of_limit'], row['wrong'], row['path']), (None, None, None, None))
        elif limit:
            self.assertAlmostEqual(row['of_limit'], statistics.median(a / b for a, b in zip(limit['rounds_ms'], rounds)), 9)
            self.assertEqual((row['limit'], row['wrong']), (limit['busbw'], 0))
        else:
            self.assertEqual((row['limit'], row['of_limit'], row['wrong']), (None, None, 0))

    def check(self, world, n, want, *args):
        """want: the backends. All rows are there, once for each size, and right."""
        head, rows = measured(world, '--rounds=3', '--bytes=1Ki:200Ki', *args)
        self.assertEqual((head['event'], head['ranks'], head['hosts'], head['group'], head['rounds']), ('comm', world, 1, n, 3))
        left_out = '' if world == 1 else 'mpi: '
        self.assertRegex(head['left_out'], f'^({left_out})')
        limits = {(row['op'], row['bytes']): row for row in rows if row['path'] is None}
        for row in rows:
            self.check_row(head, row, limits)
        slices = [max(s // n // 128 * 128, 128) for s in (1024, 4096, 16384, 65536)]
        told = []
        for slice in sorted(set(slices)):
            told += [('all_gather', LIMITS['all_gather'], slice)] if n > 1 else []
            told += [('all_gather', b, slice) for b in want]
            told += [('reduce_scatter', b, slice) for b in [LIMITS['reduce_scatter'], *want]]
            told += [('agree', b, slice) for b in want]
        self.assertEqual([(row['op'], row['backend'], row['slice']) for row in rows], told)

    def test_worlds(self):
        self.check(1, 1, ['self', 'shm', 'mpi'])
        for world in [2, 3, 5]:
            self.check(world, world, ['shm'])
        self.check(1, 1, ['self'], '--backend=self')
        self.check(3, 3, ['shm'], '--dtype=bf16')

    def test_groups(self):
        self.check(4, 2, ['shm'], '--group=2')
        self.check(6, 3, ['shm'], '--across=2', '--dtype=bf16')
        self.check(2, 1, ['shm'], '--group=1')

    def test_large(self):
        """A size that is copied, filled and compared in several pieces, the last of them shorter."""
        _, rows = measured(3, '--rounds=1', '--op=all_gather,reduce_scatter', '--bytes=30000000')
        self.assertEqual([(r['backend'], r['slice'], r['wrong']) for r in rows],
                         [('copy limit', 10000000, None), ('shm', 10000000, 0), ('add limit', 10000000, None), ('shm', 10000000, 0)])

    def test_sizes(self):
        for given, slices in [('3000', [1408]), ('1:300', [128]), ('1Ki:5Ki', [512, 2048]), ('1Ki:100Ki', [512, 2048, 8192, 32768])]:
            _, rows = measured(2, '--rounds=1', '--op=agree', f'--bytes={given}')
            self.assertEqual([row['slice'] for row in rows], slices, given)
        _, rows = measured(2, '--rounds=1', '--op=agree', '--bytes=1Ki:64Ki', '--factor=8')
        self.assertEqual([row['bytes'] for row in rows], [1024, 8192, 65536])
        self.assertEqual(measured(2, '--rounds=1', '--op=agree', '--bytes=65Ki:1Mi')[1], [])  # more than a step has

    def test_table(self):
        done = comm(2, '--rounds=2', '--bytes=4Ki:16Ki')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        head = [line for line in done.stdout.splitlines() if line.startswith('#')]
        rows = [line for line in done.stdout.splitlines() if not line.startswith('#')]
        self.assertEqual(head[0], "# 2 ranks, 1 host, groups of 2; f32; medians of 2 rounds, the slowest rank's time")
        self.assertEqual(head[-1].split(), '# op backend bytes slice time us algbw busbw limit of limit wrong'.split())
        number, ratio = r'\d+\.\d', r'\d+\.\d\d'
        for line, (op, backend, size) in zip(rows, [(op, backend, size) for size in (4096, 16384) for op, backend in [
                ('all_gather', 'copy limit'), ('all_gather', 'shm'), ('reduce_scatter', 'add limit'), ('reduce_scatter', 'shm'),
                ('agree', 'shm')]], strict=True):
            last = r'- +- +-' if 'limit' in backend else r'- +- +0' if op == 'agree' else rf'{ratio} +\d+% +0'
            self.assertRegex(line, rf'^{op} +{backend} +{size} +{size // 2} +{number} +{ratio} +{ratio} +{last}$')

    def test_plot(self):
        """Each curve is drawn and has a name."""
        with tempfile.TemporaryDirectory() as folder:
            for kind, magic in [('svg', b'<?xml'), ('png', b'\x89PNG')]:
                path = os.path.join(folder, f'it\'s a "plot".{kind}')
                done = comm(2, '--rounds=1', '--bytes=4Ki:64Ki', '--plot', path)
                self.assertEqual((done.returncode, done.stderr), (0, ''))
                with open(path, 'rb') as f:
                    picture = f.read()
                self.assertTrue(picture.startswith(magic))
                for curve in ['all_gather, copy limit', 'all_gather, shm', 'reduce_scatter, add limit', 'reduce_scatter, shm', 'agree, shm',
                              '2 ranks, groups of 2, f32'] if kind == 'svg' else []:
                    self.assertIn(curve, picture.decode())
            where = dict(os.environ, PATH=folder)  # a folder without gnuplot
            done = run([ZERO_RUN, '-n', '2', '--raw', os.path.abspath(ZERO_BENCH), 'comm', '--rounds=1', '--bytes=4Ki', '--plot', path], env=where)
            self.assertEqual((done.returncode, done.stderr.splitlines()[0]),
                             (1, 'zero-bench comm: --plot needs gnuplot: No such file or directory'), done)


class Wrong(unittest.TestCase):
    def test_found(self):
        """A rank's data is overwritten while it is measured. Every rank that gathers it notices, and no other
        element is reported."""
        size, spoilt = 8192, 300
        with Ranks('--backend=shm', '--op=all_gather', f'--bytes={size}', '--rounds=1000', '--json') as ranks:
            head = lines(ranks.ranks[0].stdout.readline())[0]
            self.assertEqual(head['event'], 'comm')
            with ranks.arena_of(1) as arena:
                until = time.monotonic() + PATIENCE_S
                while ranks.ranks[0].poll() is None and time.monotonic() < until:
                    arena[size // 2:size // 2 + 4 * spoilt] = b'\xff' * (4 * spoilt)  # the first of rank 1's slice
                    time.sleep(0.001)
            ((told, why), code), ((other, other_why), other_code) = ranks.end()
        rows = {row['backend']: row['wrong'] for row in lines(told)}
        self.assertIn(rows['shm'], range(2 * spoilt, 4 * spoilt + 1))  # found by both ranks: after the rounds, and perhaps before them
        self.assertEqual((code, why), (1, f'zero-bench comm: {rows["shm"]} elements were wrong\n'))
        self.assertEqual((other, other_why, other_code), ('', '', 0))  # only one rank prints


class Lost(unittest.TestCase):
    def test_named(self):
        with Ranks('--bytes=64Ki', '--rounds=100000') as ranks:
            self.assertTrue(ranks.ranks[0].stdout.readline().startswith('# 2 ranks'))
            ranks.ranks[1].send_signal(signal.SIGKILL)
            ((_, why), code), _ = ranks.end()
        self.assertEqual(code, 1, why)
        self.assertRegex(why, r'\Azero-bench comm: [^\n]*rank 1[^\n]*\n\Z')


class Refused(unittest.TestCase):
    def refused(self, args, told):
        done = bench('comm', *args)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (2, '', f'zero-bench comm: {told}\n'))

    def test_options(self):
        for args, told in [
                (['--backend=tcp'], "--backend: 'tcp' is not self, shm, nccl or mpi"),
                (['--backend=shm,'], "--backend: '' is not self, shm, nccl or mpi"),
                (['--op=all_reduce'], "--op: 'all_reduce' is not all_gather, reduce_scatter or agree"),
                (['--bytes=1Ki:x'], "--bytes: 'x' is not a number of bytes of at least 1 (k, M, G, T or Ki, Mi, Gi, Ti may follow)"),
                (['--bytes=0'], "--bytes: '0' is not a number of bytes of at least 1 (k, M, G, T or Ki, Mi, Gi, Ti may follow)"),
                (['--bytes=4Ki:1Ki'], '--bytes: from 4096 to 1024 is not from less to more, up to 1Ti'),
                (['--bytes=2Ti'], '--bytes: from 2199023255552 to 2199023255552 is not from less to more, up to 1Ti'),
                (['--factor=1'], "--factor: '1' is not a whole number from 2 to 1048576"),
                (['--group=2', '--across=2'], '--across: does not go with --group'),
                (['--plot=a.pdf'], "--plot: 'a.pdf' does not end in .svg or .png"),
                (['--rounds=0'], "--rounds: '0' is not a whole number from 1 to 100000"),
                (['--dtype=f16'], "--dtype: 'f16' is not f32 or bf16")]:
            self.refused(args, told)

    def test_alone(self):
        for args, told in [
                (['--plot=a.svg'], '--plot: one rank gathers nothing: zero-run -n 2 zero-bench comm'),
                (['--group=2'], 'groups of 2 ranks in a world of 1: a number that divides the world is allowed'),
                (['--across=1'], 'groups of 1 ranks in a world of 1: there is nothing between them'),
                (['--backend=nccl'], '--backend: nccl is for device cuda, and device is host')]:
            self.refused(args, told)

    def test_memory(self):
        done = bench('comm', '--bytes=1Ti')
        self.assertEqual((done.returncode, done.stdout), (1, ''))
        self.assertRegex(done.stderr, r'\Azero-bench comm: \d.*B are wanted by each rank, and .* are free .*: give smaller sizes with --bytes\n\Z')

    def ranks_refused(self, told, world, *command):
        done = run([ZERO_RUN, '-n', str(world), '--raw', *command])
        self.assertEqual((done.returncode, done.stdout), (2, ''), done)
        self.assertIn(f'zero-bench comm: {told}\n', done.stderr)

    def test_ranks(self):
        self.ranks_refused('--backend: self is for one rank, and there are 2', 2, ZERO_BENCH, 'comm', '--backend=self')
        self.ranks_refused('groups of 3 ranks in a world of 4: a number that divides the world is allowed', 4, ZERO_BENCH, 'comm', '--group=3')
        self.ranks_refused('rank 1 was given other options than rank 0', 2, 'sh', '-c', f'exec {ZERO_BENCH} comm --rounds=$((RANK + 1))')


if __name__ == '__main__':
    unittest.main()
