"""Training that is killed and started again by zero-run ends in the state of a run that nobody disturbed.

The whole of a rank is killed, from outside, once some steps have been taken; at which moment is left to chance. Attempt 0 has no end
of its own, so it is still there however late the kill comes."""
import json
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
from bench_program import TINY, ZERO_BENCH, ZERO_RUN, train  # noqa: E402

LIMIT = int(os.environ.get('TEST_LIMIT', 200))
STEPS = 24
SEED = int(os.environ.get('SEED', time.time_ns() % 1000000))

# echo tells which process group a rank is. Attempt 0 waits at its end for the kill.
RANK = 'echo "pid $RANK $$" >&2; "$@" || exit; test $ZERO_ATTEMPT != 0 || exec sleep 1000'


def clean():
    return {k: v for k, v in os.environ.items() if not k.startswith('ZERO_') and k not in ('RANK', 'WORLD_SIZE')}


def train_killed(world, victim, at, *args):
    """zero-run's exit code and standard error, and the last line of a training of which a rank is killed after step `at` of attempt 0."""
    command = [ZERO_RUN, '-n', str(world), '--raw', '--restarts', '2', 'sh', '-c', RANK, 'sh', ZERO_BENCH, 'train', '--json', *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean()) as p:
        pids, line = {}, ''
        while len(pids) < world:
            pids.update(re.findall(r'^pid (\d+) (\d+)\n', p.stderr.readline()))
        for line in p.stdout:
            if f'"step":{at},' in line.replace(' ', '') and victim is not None:
                os.killpg(int(pids[str(victim)]), signal.SIGKILL)
                victim = None
        return p.wait(LIMIT), p.stderr.read(), line


class Restarts(unittest.TestCase):
    def test_the_same_state(self):
        draw = random.Random(SEED)
        for stage in (1, 3):
            with self.subTest(seed=SEED, stage=stage), tempfile.TemporaryDirectory() as d:
                at, victim = draw.randrange(1, STEPS), draw.randrange(4)
                args = [*TINY[:-1], os.path.abspath(__file__), f'--steps={STEPS}', f'--stage={stage}']
                _, summary = train(4, *args)
                code, err, last = train_killed(4, victim, at, *args, '--save', d, '--save-every=5', '--keep=2', '--load=latest')
                self.assertEqual(code, 0, err)
                # Which of them is said to have ended first is open: a rank's shell may be reaped after another rank that has missed it.
                self.assertRegex(err, r'zero-run: rank \d (was killed by signal 9|exited with code)')
                self.assertIn('restart 1 of 2: 4 ranks', err)
                self.assertEqual(json.loads(last)['state_sha256'], summary['state_sha256'])


if __name__ == '__main__':
    print('SEED', SEED)
    unittest.main(verbosity=1)
