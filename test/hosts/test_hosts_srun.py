# SPDX-License-Identifier: Apache-2.0
"""Ranks started by Slurm's srun behave like zero-run's: zero/examples/minimal.c prints the same, and a
training run ends in the same bits. On two hosts they find each other by Slurm's list of nodes.

    test_hosts_srun.py PROGRAM ZERO_BENCH ZERO_RUN

Each host runs a slurmd, and host0 the slurmctld. They use auth/none, so there is no munged. They run as an
unprivileged user and start ranks as the same user, since most users do not exist in a user namespace."""
import json
import os
import pwd
import re
import shutil
import sys
import time
import unittest

import hosts
import library
from hosts import Hosts

PROGRAM, ZERO_BENCH, ZERO_RUN = library.take_paths(3)
LIMIT = 2 * hosts.LIMIT
TOOLS = ('srun', 'sinfo', 'slurmctld', 'slurmd')
TRAIN = [ZERO_BENCH, 'train', '--json', '--steps=3', '--layers=2', '--threads=1', '--stage=3']
USER = pwd.getpwnam('daemon')
AS_USER = ['unshare', '--user', f'--map-user={USER.pw_uid}', f'--map-group={USER.pw_gid}']

# /run/hosts is shared by all hosts, and /run/tmp belongs to each host.
CONF = '/run/hosts/slurm.conf'
SLURM_CONF = """
ClusterName=hosts
SlurmctldHost=host0
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation=/run/tmp
SlurmdSpoolDir=/run/tmp
SlurmctldPidFile=/run/tmp/slurmctld.pid
SlurmdPidFile=/run/tmp/slurmd.pid
SlurmdLogFile=/run/hosts/slurmd.%h.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
KillWait=1
# as many processors as there are ranks, whatever the machine has
SlurmdParameters=config_overrides
NodeName=host[0-{last}] CPUs=8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""
# slurmd requires one, though nothing here uses it. This one exists on every machine.
CGROUP_CONF = 'CgroupPlugin=cgroup/v1\n'


class Slurm:
    """One cluster of all hosts."""

    def __init__(self, net):
        self.net = net
        for name, text in (('slurm.conf', SLURM_CONF.format(user=USER.pw_name, last=len(net.hosts) - 1)), ('cgroup.conf', CGROUP_CONF)):
            with open(f'{net.run_folder}/{name}', 'w', encoding='ascii') as file:
                file.write(text)
        self.daemons = [self.daemon(net.hosts[0], 'slurmctld')] + [self.daemon(host, 'slurmd') for host in net.hosts]
        end = time.monotonic() + LIMIT
        while (states := self.run(['sinfo', '-h', '-o', '%T']).stdout) != 'idle\n':
            if time.monotonic() > end or any(daemon.returncode is not None for daemon in self.daemons):
                self.fail(f'nodes are {states or "not known"!r}')
            time.sleep(0.1)

    def daemon(self, host, name):
        program = shutil.which(name, path=hosts.PATH)  # the whole path, since it starts itself again
        return host.start([*AS_USER, program, '-D'], SLURM_CONF=CONF)

    def run(self, command, **variables):
        return self.net.hosts[0].run([*AS_USER, *command], LIMIT, SLURM_CONF=CONF, **variables)

    def srun(self, n, command, *options, **variables):
        """Runs a job to its end. Returns its ranks' output without Slurm's own lines."""
        job = self.run(['srun', '--quiet', '--input=none', f'--ntasks={n}', *options, *command], **variables)
        errors = ''.join(line for line in job.stderr.splitlines(True) if not re.match(r'(srun|slurmstepd)[-:]', line))
        return job, errors

    def fail(self, what):
        said = [f'--- {daemon.name}, code {daemon.returncode}\n{daemon.stdout}{daemon.stderr}' for daemon in self.daemons]
        for name in sorted(os.listdir(self.net.run_folder)):
            if name.endswith('.log'):
                with open(f'{self.net.run_folder}/{name}', encoding='utf-8', errors='replace') as file:
                    said.append(f'--- {name}\n{file.read()}')
        raise AssertionError('\n'.join([what, *said]))

    def must(self, n, command, *options, **variables):
        """Returns what the ranks print on standard output and error, for a job that succeeds."""
        job, errors = self.srun(n, command, *options, **variables)
        if job.returncode:
            self.fail(f'{job.name}: exit code {job.returncode}\n{job.stdout}{job.stderr}')
        return job.stdout, errors


def bits(text):
    return json.loads(re.search('^{"event":"summary".*}$', text, re.MULTILINE)[0])['state_sha256']


class Srun(unittest.TestCase):
    def by_zero_run(self, n, command):
        return self.net.hosts[0].must([ZERO_RUN, '-n', n, '--raw', *command], LIMIT)

    def start(self, n_hosts):
        self.net = self.enterContext(Hosts(n_hosts))
        return Slurm(self.net)

    def test_one_host(self):
        slurm = self.start(1)
        for n, options in ((2, []), (4, []), (2, ['--mpi=pmi2'])):
            with self.subTest(n=n, options=options):
                told = slurm.must(n, [PROGRAM], *options, ZERO_JOB_KEY=library.KEY)
                self.assertEqual(told, (self.by_zero_run(n, [PROGRAM]), ''))
                self.assertIn('step 200 loss', told[0])
        for n, arguments in ((3, []), (4, ['--hybrid=hfsdp', '--dp-replicate=2', '--accum=2'])):
            with self.subTest(n=n, arguments=arguments):
                out, errors = slurm.must(n, [*TRAIN, *arguments], ZERO_LOG='stderr')
                self.assertEqual(bits(out), bits(self.by_zero_run(n, [*TRAIN, *arguments])))
                self.assertIn(f"rank {n - 1} of {n}, found in: Slurm (SLURM_NTASKS is {n}); where ranks meet, in: the launcher's only host", errors)
                self.assertEqual(errors.count('this job has no key'), 1)
        with self.subTest('one of an allocation of one'):
            job, errors = slurm.srun(1, [PROGRAM])
            self.assertEqual(job.returncode, 0)
            self.assertIn('rank 0 of world 1, found in: alone', errors)

    def test_left_over(self):
        """srun has passed on variables of another launcher. No task trains alone."""
        slurm = self.start(1)
        plain = dict(RANK=0, WORLD_SIZE=1)
        for more in (plain, {**plain, 'LOCAL_WORLD_SIZE': 1}, dict(OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=1)):
            with self.subTest(more):
                job, errors = slurm.srun(2, [PROGRAM], **more)
                self.assertNotEqual(job.returncode, 0)
                self.assertEqual(len(re.findall('^zero_.*two launchers contradict each other: .* and SLURM_NTASKS is 2', errors, re.MULTILINE)), 2, job.stderr)
        with self.subTest('zero-run in a task'):
            out, errors = slurm.must(2, [ZERO_RUN, '-n', 2, '--raw', PROGRAM], **plain)
            self.assertEqual((out.count('step 200 loss'), errors), (2, ''))
        with self.subTest('a batch script'):
            script = 'test "$SLURM_PROCID $SLURM_NTASKS ${SLURM_STEP_ID-none}" = "0 2 none" && srun sh -c \'test "$SLURM_STEP_ID $SLURM_TASK_PID" = "0 $$"\''
            job = slurm.run(['sbatch', '--quiet', '--wait', '--ntasks=2', '--chdir=/', '--output=/dev/null', f'--wrap={script}'])
            self.assertEqual((job.returncode, job.stderr), (0, ''))

    def test_a_rank_that_fails(self):
        """The other ranks end by themselves with its message, and srun has its exit code."""
        slurm = self.start(1)
        job, errors = slurm.srun(3, ['sh', '-c', 'test $SLURM_PROCID = 1 && export ZERO_STAGE=2; exec "$0"', PROGRAM])
        self.assertEqual(job.returncode, 1, job.stderr)
        self.assertEqual(len(re.findall('^zero_wrap: .*stage is 2 on rank 1 and 3 on rank 0', errors, re.MULTILINE)), 3, job.stderr)

    def test_two_hosts(self):
        """Rank 0's address is not given: it is on the first node."""
        slurm = self.start(2)
        job, errors = slurm.srun(4, [PROGRAM], '--nodes=2', ZERO_JOB_KEY=library.KEY, ZERO_LOG='stderr')
        self.assertEqual(job.returncode, 1, job.stderr)
        self.assertEqual(errors.count('found in: Slurm (SLURM_NTASKS is 4); where ranks meet, in: SLURM_STEP_NODELIST'), 4, job.stderr)
        said = library.APART % 2 + ' (host 0 has 2 ranks (0, 1), host 1 has 2 (2, 3)); several hosts need backend '
        self.assertEqual(len(re.findall(f'^zero_wrap: .*{re.escape(said)}', errors, re.MULTILINE)), 4, job.stderr)


if __name__ == '__main__':
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=hosts.PATH)]
    if missing:
        print(f'there is no {missing[0]}')
        sys.exit(1 if os.environ.get('CHECKS_MUST_RUN') else 77)
    hosts.main()
