# SPDX-License-Identifier: Apache-2.0
"""Training over MPI on several hosts, with two ranks on each, all started by one MPI launcher. It ends with
the bits of the same training over shared memory on one host, even if a link is cut for a second. If the cut
is permanent, every rank names the host behind it. Tensor parallelism, pipelines or both go between hosts.

    test_hosts_train.py KEY ZERO_BENCH ZERO_RUN FOLDER

KEY is ompi or mpich. FOLDER has libzero and its module for that MPI. In the environment: N_HOSTS (2);
TIMEOUT_MS (4000), the time in which a permanent cut is found; ALL, to test everything instead of one hybrid,
one mesh and one cut that SEED draws."""
import json
import os
import random
import re
import shutil
import sys
import time
import unittest

import hosts
import library
from hosts import Hosts

KEY = sys.argv.pop(1)
BENCH, RUN, FOLDER = library.take_paths(3)
N_HOSTS = int(os.environ.get('N_HOSTS', 2))
TIMEOUT_MS = int(os.environ.get('TIMEOUT_MS', 4000))
PATIENT_MS = 60000
LIMIT = 4 * hosts.LIMIT
WORLD = 2 * N_HOSTS
DRAW = random.Random(library.SEED)
HYBRIDS = ['hsdp', 'hfsdp'] if os.environ.get('ALL') else [DRAW.choice(['hsdp', 'hfsdp'])]
# What goes between hosts: the number of hosts, and the options.
MESHES = {'tp': (N_HOSTS, [f'--tp={WORLD}']), 'pp': (N_HOSTS, [f'--pp={N_HOSTS}']), 'both': (WORLD, [f'--pp={N_HOSTS}', '--tp=2']),
          'cp': (N_HOSTS, [f'--cp={WORLD}', f'--context={16 * WORLD}', '--cp-form=ring'])}
CROSSING = [*MESHES] if os.environ.get('ALL') else [DRAW.choice([*MESHES])]
CUTS = ['for a second', 'for good'] if os.environ.get('ALL') else [DRAW.choice(['for a second', 'for good'])]

LAUNCHER = {'ompi': 'mpirun.openmpi', 'mpich': 'mpiexec.hydra'}[KEY]
# The launcher's replacement for ssh. It is in /run/hosts, which all hosts see.
SHELL = f'#!/bin/sh\nexec {hosts.PYTHON} -IS {hosts.HERE}/on_host.py --shell "$@"\n'
# A rank that fails must not end the others before they can report, as it would with the launchers' default
# settings.
LAUNCH = {
    'ompi': ['--allow-run-as-root', '--bind-to', 'none', '--enable-recovery', '--mca', 'plm_rsh_agent', '/run/hosts/shell', '--mca', 'plm_rsh_no_tree_spawn', '1',
             '--mca', 'oob_tcp_if_include', 'eth0', '--mca', 'btl', 'self,vader,tcp', '--mca', 'btl_tcp_if_include', 'eth0', '--host'],
    'mpich': ['-disable-auto-cleanup', '-launcher', 'rsh', '-launcher-exec', '/run/hosts/shell', '-iface', 'eth0', '-hosts'],
}[KEY]
SETTINGS = {'UCX_TLS': 'tcp,posix,sysv,self', 'UCX_NET_DEVICES': 'eth0', 'UCX_WARN_UNUSED_ENV_VARS': 'n', 'LD_LIBRARY_PATH': FOLDER}
# Every rank writes its errors to its own file: its output does not reach the launcher over a cut link. In a
# job that is cut, a rank's shell stays, and with it the connection to MPICH's launcher. If that connection
# closes, MPICH 4.0 asks the launcher who has died, inside any call, and waits for ever over the cut link.
RANK = '"$@" 2>"/run/hosts/$0.${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"; code=$?; [ "$0" = cut ] && exec sleep 600; exit $code'
TRAIN = ['train', '--json', '--layers=3', '--prefetch=0', '--threads=1', f'--data={os.path.abspath(__file__)}', '--stage=3']
SILENT = r'host {host} \("host{host}", ranks {ranks}\) is silent: no heartbeat from rank \d+ \(\S+\) for \d+ ms'


def without_leaks():
    """Keeps sanitizers from reporting what MPI does not free, and what a failed communicator leaves to it."""
    return {'ASAN_OPTIONS': ':'.join(filter(None, [os.environ.get('ASAN_OPTIONS'), 'detect_leaks=0']))}


def rendezvous(net):
    """Returns rank 0's address, for a job that is given one."""
    return {'ZERO_RENDEZVOUS': f'tcp://host0:{library.PORT + len(net.commands)}', 'ZERO_JOB_KEY': library.KEY}


def launch(net, name, arguments, **variables):
    """Starts one job on all hosts."""
    own = {**SETTINGS, **without_leaks(), 'ZERO_BACKEND': 'mpi', **variables}
    exported = [word for variable in own for word in ('-x', variable)] if KEY == 'ompi' else []
    return net.hosts[0].start([LAUNCHER, *LAUNCH, ','.join(f'{host.name}:{WORLD // len(net.hosts)}' for host in net.hosts), '-n', WORLD, *exported, 'sh', '-c', RANK, name, BENCH, *TRAIN,
                               *arguments], **own)


def said(net, name, rank):
    try:
        with open(f'{net.run_folder}/{name}.{rank}', encoding='utf-8') as file:
            return file.read()
    except FileNotFoundError:
        return ''


def bits(text):
    found = re.search('^(?:\\[\\d+\\] )?({"event":"summary".*})$', text, re.MULTILINE)
    return json.loads(found[1])['state_sha256']


class Train(unittest.TestCase):
    def start_hosts(self, n_hosts=N_HOSTS):
        net = self.enterContext(Hosts(n_hosts))
        with open(f'{net.run_folder}/shell', 'w', encoding='ascii') as shell:
            shell.write(SHELL)
        os.chmod(shell.name, 0o755)
        return net

    def ends(self, net, name, job):
        if job.end(LIMIT).returncode:
            job.fail(f'exit code {job.returncode}; the ranks: {[said(net, name, rank) for rank in range(WORLD)]}')
        return bits(job.stdout)

    def alone(self, net, arguments):
        return bits(net.hosts[0].must([RUN, '-n', WORLD, BENCH, *TRAIN, *arguments], LIMIT, ZERO_BACKEND='shm'))

    def test_same_bits(self):
        """Each host's ranks are found and form a group. Rank 0's address is not given."""
        net = self.start_hosts()
        for hybrid in HYBRIDS:
            arguments = ['--steps=3', f'--hybrid={hybrid}', '--accum=2', '--deterministic=on']
            self.assertEqual(self.ends(net, hybrid, launch(net, hybrid, [*arguments, '--dp-replicate=auto'])), self.alone(net, [*arguments, '--dp-shard=2', f'--dp-replicate={WORLD // 2}']))

    def test_meshes_between_hosts(self):
        for crossing in CROSSING:
            n_hosts, mesh = MESHES[crossing]
            net = self.start_hosts(n_hosts)
            arguments = ['--steps=3', '--accum=4', '--heads=12', '--channels=48', '--deterministic=on', *mesh]
            self.assertEqual(self.ends(net, crossing, launch(net, crossing, arguments)), self.alone(net, arguments))

    def test_without_the_backend(self):
        """Then no rank knows where rank 0 is, and the error says what to set. (A launcher may end the others
        before they can report it too.)"""
        net = self.start_hosts()
        job = launch(net, 'auto', ['--steps=1'], ZERO_BACKEND='auto')
        end = time.monotonic() + LIMIT
        while not any('on the host device set backend to mpi (ZERO_BACKEND=mpi)' in said(net, 'auto', rank) for rank in range(WORLD)):
            if time.monotonic() > end:
                job.fail(f'not said; the ranks: {[said(net, "auto", rank) for rank in range(WORLD)]}')
            time.sleep(0.01)

    @unittest.skipUnless('for a second' in CUTS, 'not drawn')
    def test_cut_for_a_second(self):
        """The launcher may pass lines on so late that a short run has ended before the cut. Then a longer one
        is tried."""
        net = self.start_hosts()
        for steps in (30, 100, 400):
            job = launch(net, f'flat{steps}', [f'--steps={steps}'], ZERO_TIMEOUT_MS=PATIENT_MS, **rendezvous(net))
            job.expect('"step":2,', LIMIT)
            net.cut(net.hosts[1])
            time.sleep(1)
            cut_in_time = f'"step":{steps},' not in job.stdout
            net.mend()
            state = self.ends(net, f'flat{steps}', job)
            if cut_in_time:
                break
        self.assertTrue(cut_in_time)
        self.assertEqual(state, self.alone(net, [f'--steps={steps}']))

    @unittest.skipUnless('for good' in CUTS, 'not drawn')
    def test_cut_for_good(self):
        """Ranks of the host that was cut name rank 0's host, and the others name the one that was cut. The
        launcher is not waited for: with --enable-recovery Open MPI's does not end."""
        net = self.start_hosts()
        mesh = DRAW.choice([[], *(MESHES[axis][1] for axis in ('tp', 'pp', 'cp'))])
        print(*mesh)
        job = launch(net, 'cut', ['--steps=100000', '--heads=12', '--channels=48', *mesh], ZERO_TIMEOUT_MS=TIMEOUT_MS, ZERO_START_TIMEOUT_MS=PATIENT_MS, **rendezvous(net))
        job.expect('"step":2,', LIMIT)
        net.cut(net.hosts[1])
        cut, left = time.monotonic(), set(range(WORLD))
        while left:
            for rank in sorted(left):
                silent = 0 if rank // 2 == 1 else 1
                pattern = SILENT.format(host=silent, ranks=f'{2 * silent}, {2 * silent + 1}')
                found = re.search(f'^.*{pattern}.*$', said(net, 'cut', rank), re.MULTILINE)
                if found:
                    left.remove(rank)
                    print(f'{KEY}, {time.monotonic() - cut:.1f} s after the cut: {found[0]}')
            if left and time.monotonic() > cut + LIMIT:
                job.fail(f'not named by {left}; the ranks: {[said(net, "cut", rank) for rank in range(WORLD)]}')
            time.sleep(0.01)


if __name__ == '__main__':
    if not shutil.which(LAUNCHER):
        print(f'there is no {LAUNCHER}')
        sys.exit(1 if os.environ.get('CHECKS_MUST_RUN') else 77)
    print(f'SEED={library.SEED}: {", ".join([*HYBRIDS, *CUTS])}')
    hosts.main()
