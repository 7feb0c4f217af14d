# SPDX-License-Identifier: Apache-2.0
"""A rank is killed. zero-run prints its last call, the folder of --flight has every rank's flight recorder,
and zero-bench flight names the rank and the call. The rank and the moment are random."""
import glob
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import TINY, ZERO_BENCH, ZERO_RUN, bench, lines  # noqa: E402

LIMIT = int(os.environ.get('TEST_LIMIT', 100))
SEED = int(os.environ.get('SEED', time.time_ns() % 1000000))
WORLD = 3
CALL = r'zero_\w+(\(unit \d+, (forward|backward)\)|\(tensor \d+\)|\(\w+\))?( in step \d+)?'
RANK = 'echo "pid $RANK $$ $ZERO_JOB" >&2; exec "$@"'


def clean():
    return {k: v for k, v in os.environ.items() if not k.startswith('ZERO_') and k not in ('RANK', 'WORLD_SIZE')}


def killed(draw, victim, stage, *options, stopped=(), leave_in=None):
    """Returns zero-run's exit code and standard error for a training in which a rank is killed after some
    step. Stopped ranks cannot notice it. For each of them, a partial file is left in
    the folder leave_in, as from a rank killed while writing."""
    command = [ZERO_RUN, '-n', str(WORLD), '--raw', *options, 'sh', '-c', RANK, 'sh', ZERO_BENCH, 'train', '--json', *TINY,
               '--steps=1000000', f'--stage={stage}']
    at, pids, job = draw.randrange(1, 20), {}, ''
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean()) as p:
        while len(pids) < WORLD:
            for rank, pid, job in re.findall(r'^pid (\d+) (\d+) (.*)\n', p.stderr.readline()):
                pids[rank] = pid
        for line in p.stdout:
            if f'"step":{at},' in line.replace(' ', '') and victim is not None:
                time.sleep(draw.random() * 0.01)
                for r in stopped:
                    os.kill(int(pids[str(r)]), signal.SIGSTOP)
                    with open(f'{leave_in}/flight-{job}-attempt0-rank{r}.{pids[str(r)]}', 'wb') as f:
                        f.write(b'part')
                os.kill(int(pids[str(victim)]), signal.SIGKILL)
                victim = None
        return p.wait(LIMIT), p.stderr.read()


class Flight(unittest.TestCase):
    def test_a_rank_that_is_killed(self):
        draw = random.Random(SEED)
        for stage in (0, 3):
            victim = draw.randrange(WORLD)
            with self.subTest(seed=SEED, stage=stage), tempfile.TemporaryDirectory() as d:
                folder = os.path.join(d, 'new')  # it is created
                code, err = killed(draw, victim, stage, '--flight', folder)
                self.assertNotEqual(code, 0)
                # Another rank that has noticed the loss, and has unwrapped, may be reaped first.
                self.assertRegex(err, rf'zero-run: rank \d (was killed by signal 9 \(Killed\); its last call was {CALL}|exited with code 1)')
                files = glob.glob(folder + '/*')
                self.assertEqual(sorted(re.sub('.*-attempt', '', f) for f in files), [f'0-rank{r}' for r in range(WORLD)])
                found = bench('flight', '--json', *files)
                self.assertEqual(found.returncode, 0, found.stderr)
                said = lines(found.stdout)
                ranks = {s['rank']: s for s in said if 'state' in s}
                self.assertEqual(ranks[victim]['state'], 'killed')
                self.assertRegex(ranks[victim]['call'], rf'^{CALL}$')
                for role in (role for s in ranks.values() for role in s['roles'].values()):
                    self.assertEqual(role['size'], WORLD)
                    self.assertTrue(role['issued'] >= role['started'] >= role['finished'], said)
                self.assertTrue(all(s['roles']['control']['finished'] > 0 for s in ranks.values()), said)
                for r in set(range(WORLD)) - {victim}:
                    # zero-run may end a rank before it has noticed anything.
                    self.assertRegex(ranks[r]['failure'], rf'rank {victim} .*; its last call was {CALL}|^$')
                first = next(s for s in said if 'finding' in s)
                dead = {s['rank']: s for s in said if s.get('finding') == 'dead'}
                self.assertEqual((first['finding'], first['rank']), ('dead', victim))
                self.assertEqual(dead[victim]['call'], ranks[victim]['call'])
                self.assertEqual([r for r, s in ranks.items() if s['state'] == 'killed'], [victim])  # others are "ended", by zero-run
                self.assertIn('was killed by signal 9 (Killed); its last call was ' + ranks[victim]['call'], dead[victim]['text'])
                self.assertFalse([s for s in said if s.get('finding') in ('missing', 'different')], said)
                text = bench('flight', *files).stdout
                self.assertIn(f'rank {victim} was killed by signal 9 (Killed)', text)

    def test_ranks_that_zero_run_kills_are_not_among_the_dead(self):
        draw = random.Random(SEED)
        victim = draw.randrange(WORLD)
        others = sorted(set(range(WORLD)) - {victim})
        with tempfile.TemporaryDirectory() as d:
            code, err = killed(draw, victim, draw.choice((0, 3)), '--flight', d, stopped=others, leave_in=d)
            self.assertIn(f'zero-run: rank {victim} was killed by signal 9 (Killed); its last call was ', err)
            self.assertEqual(code, 128 + 9)
            files = glob.glob(d + '/*')
            self.assertEqual(sorted(re.sub('.*-attempt', '', f) for f in files), [f'0-rank{r}' for r in range(WORLD)])
            said = lines(bench('flight', '--json', *files).stdout)
            states = {s['rank']: s['state'] for s in said if 'state' in s}
            self.assertEqual(states, {victim: 'killed', **{r: 'ended' for r in others}})
            self.assertEqual([s['rank'] for s in said if s.get('finding') == 'dead'], [victim])

    def test_without_a_folder_there_are_no_files(self):
        draw = random.Random(SEED)
        with tempfile.TemporaryDirectory() as d:
            before = os.getcwd()
            os.chdir(d)
            try:
                code, err = killed(draw, draw.randrange(WORLD), 3)
            finally:
                os.chdir(before)
            self.assertNotEqual(code, 0)
            self.assertRegex(err, f'; its last call was {CALL}')  # from zero-run, or from a rank that has noticed the loss
            self.assertEqual(os.listdir(d), [])

    def test_bad_files_and_folders(self):
        with tempfile.TemporaryDirectory() as d:
            name = os.path.join(d, 'text')
            with open(name, 'w', encoding='utf-8') as f:
                f.write('no recorder' * 1000)
            r = bench('flight', name)
            self.assertEqual(r.returncode, 2)
            self.assertRegex(r.stderr, f'^zero-bench flight: {name}: [^\n]*\n$')
            r = bench('flight')
            self.assertEqual(r.returncode, 2)
            self.assertIn('which files?', r.stderr)
            for folder in (name, os.path.join(d, 'none', 'inside'), ''):
                r = subprocess.run([ZERO_RUN, '-n', '1', '--flight', folder, 'true'], capture_output=True, text=True, check=False)
                self.assertEqual(r.returncode, 2, folder)
                self.assertRegex(r.stderr, f'^zero-run: --flight is "{folder}": [^\n]*\n$')


if __name__ == '__main__':
    unittest.main()
