# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of one row, reads their reports of steps, and samples their memory. Standard library only."""
import json
import os
import re
import resource
import signal
import subprocess
import threading
import time


class Failed(Exception):
    pass


def children_of_all():
    """Maps each process of the system to its children."""
    found = {}
    for name in os.listdir('/proc'):
        if name.isdigit():
            try:
                with open(f'/proc/{name}/stat', encoding='utf-8', errors='replace') as f:
                    parent = int(f.read().rsplit(')', 1)[1].split()[1])
            except (OSError, IndexError):
                continue  # the process has ended
            found.setdefault(parent, []).append(int(name))
    return found


def tree_of(roots):
    """These processes and all that they started."""
    children, left, found = children_of_all(), list(roots), []
    while left:
        pid = left.pop()
        found.append(pid)
        left += children.get(pid, [])
    return found


def pss_bytes(pids):
    """The sum of the processes' proportional set sizes. Shared memory counts once, and ended processes count nothing."""
    total = 0
    for pid in pids:
        try:
            with open(f'/proc/{pid}/smaps_rollup', encoding='utf-8') as f:
                total += sum(int(line.split()[1]) * 1024 for line in f if line.startswith('Pss:'))
        except OSError:
            pass
    return total


def cpu_s(pids):
    """The CPU seconds of these processes, and of those that they have waited for."""
    ticks = 0
    for pid in pids:
        try:
            with open(f'/proc/{pid}/stat', encoding='utf-8', errors='replace') as f:
                ticks += sum(map(int, f.read().rsplit(')', 1)[1].split()[11:15]))
        except OSError:
            pass
    return ticks / os.sysconf('SC_CLK_TCK')


def cpu_s_of_children():
    """The CPU seconds of all processes that this one has started and waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Watch:
    """Samples the memory of processes until stopped. If one fails or the time is up, it ends all of them."""

    def __init__(self, processes, every_s, limit_s):
        self.processes, self.every_s, self.end = processes, every_s, time.monotonic() + limit_s
        self.peak, self.timed_out = 0, False
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def sample(self):
        now = pss_bytes(tree_of([p.pid for p in self.processes if p.poll() is None]))
        with self.lock:
            self.peak = max(self.peak, now)

    def run(self):
        while not self.stop.wait(self.every_s):
            self.sample()
            self.timed_out = time.monotonic() > self.end
            if self.timed_out or any(p.poll() for p in self.processes):
                end_all(self.processes)
                return

    def close(self):
        self.stop.set()
        self.thread.join()


def end_all(processes):
    for p in processes:
        if p.poll() is None:
            p.terminate()
    for p in processes:
        try:
            p.wait(10)
        except subprocess.TimeoutExpired:
            p.kill()


def last_words(path):
    """The last line of a log, without zero-run's own line after a rank has said why it exits."""
    with open(path, encoding='utf-8', errors='replace') as f:
        lines = [line.strip() for line in f if line.strip()]
    told = [line for line in lines if not re.match(r'zero-run: rank \d+ exited with code', line)] or lines
    return told[-1] if told else 'it said nothing'


def read_lines(process, started, watch):
    """Returns the step events, each with its time of arrival, the summary or {}, and the CPU seconds until the first step was done."""
    steps, summary, first_cpu_s = [], {}, 0
    for line in process.stdout:
        arrived = time.monotonic() - started
        if not line.startswith('{'):
            continue  # llm.c first prints its model
        event = json.loads(line)
        if event.get('event') == 'summary':
            summary = event
        elif event.get('event') == 'step':
            steps.append((event, arrived))
            if len(steps) == 1:
                first_cpu_s = cpu_s(tree_of([p.pid for p in watch.processes]))
                watch.sample()
    return steps, summary, first_cpu_s


def cause_order(code):
    """Sorts exit codes by how likely they are the cause. A process that aborts makes its peers fail and be ended here."""
    if code in (-signal.SIGTERM, -signal.SIGKILL):
        return 2
    return 0 if code < 0 else 1


def run_row(commands, log, every_s=0.5, limit_s=3600):
    """Runs processes, each an (arguments, environment), at the same time; the first reports the steps.

    Returns the measured keys of a run (see peers_report.py), or raises Failed. Standard error goes to log.0, log.1 and so on.
    """
    processes, logs = [], [f'{log}.{i}' for i in range(len(commands))]
    started, cpu_before_s = time.monotonic(), cpu_s_of_children()
    watch = None
    try:
        for i, (command, env) in enumerate(commands):
            with open(logs[i], 'w', encoding='utf-8') as err:
                out = subprocess.PIPE if i == 0 else subprocess.DEVNULL
                # zero-run starts each rank in a session. Linux divides the CPU between sessions, so others get one, too.
                processes.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True, start_new_session=True))
        watch = Watch(processes, every_s, limit_s)
        steps, summary, first_cpu_s = read_lines(processes[0], started, watch)
        codes = [p.wait() for p in processes]
    finally:
        if watch:
            watch.close()
        end_all(processes)
        if processes:
            processes[0].stdout.close()
    if watch.timed_out:
        raise Failed(f'not done after {limit_s:g} s')
    bad = [i for i, code in enumerate(codes) if code]
    if bad:
        first = min(bad, key=lambda i: cause_order(codes[i]))
        raise Failed(f'exit code {codes[first]}: {last_words(logs[first])}')
    if not steps:
        raise Failed('it told of no step')
    (first, arrived), ms = steps[0], [event['ms'] for event, _ in steps]
    cpu_after_s = max(0, cpu_s_of_children() - cpu_before_s - first_cpu_s)  # of two clocks, one of which counts ticks
    return {'ms': ms, 'losses': [event['loss'] for event, _ in steps], 'first_step_s': arrived,
            'first_forward_s': arrived - first['ms'] * 1e-3, 'pss_bytes': watch.peak or None,
            'cpu_s_per_step': cpu_after_s / (len(steps) - 1) if len(steps) > 1 else None, 'peer': summary.get('peer'),
            'device_bytes': summary.get('peak_device_bytes') or None, 'own_tokens_per_s': summary.get('tokens_per_s')}
