#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains one GPT-2 or Llama with libzero and with others in turn, and compares speed, memory, time to the first forward, and losses.

bench/peers/run.sh calls this program. It creates the virtual environment for the rows of PyTorch and DeepSpeed. If
--rows has only our rows (plain, stage0 to stage3, tp, pp), only zero-bench is needed. Every round runs each row once, and
starts with a different one. tp and pp divide the model among all ranks, which then work on the same micro-batches: one in
a step of tp, and twice as many as ranks in a step of pp. All rows are measured in the same way:

- Speed is the time of each step that the row reports.
- Memory is the sum of the Pss of its processes, sampled from outside.
- The time to the first forward runs from the start of its processes to the report of the first step, minus that step.
"""
import argparse
import datetime
import glob
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys

import model_sizes
import peers_inputs
import peers_report
from row_process import Failed, run_row

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
ONE_RANK = ('plain', 'torch', 'llmc')
OF_TORCH = {'torch': 'plain', 'ddp': 'ddp', 'fsdp2': 'fsdp2', 'torch_tp': 'tp', 'torch_pp': 'pp', 'torch_pp_patched': 'pp-patched',
            'deepspeed1': 'zero1', 'deepspeed2': 'zero2', 'deepspeed3': 'zero3'}
DEFAULT_ROWS = [who for who in peers_report.TITLES if who not in ('stage1', 'stage2')]
OF_GPT2 = {'torch_tp', 'torch_pp', 'torch_pp_patched', 'llmc'}
SETTINGS = ('model', 'layers', 'heads', 'channels', 'vocab', 'context', 'batch', 'ranks', 'threads', 'lr', 'seed', 'data', 'device', 'compile')


def options():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    model_sizes.add_options(p)
    p.add_argument('--context', type=int, default=64, help='tokens in a row (64)')
    p.add_argument('--batch', type=int, default=4, help='rows of one rank, or of a micro-batch of tp and pp (4)')
    p.add_argument('--steps', type=int, default=20, help='of each run; losses are compared over the first 20 (20)')
    p.add_argument('--rounds', type=int, default=3, help='runs of each row, 0: only report what --add finds (3)')
    p.add_argument('--dtype', default='f32,bf16', help='f32, bf16 or both (both)')
    p.add_argument('--rows', default=','.join(DEFAULT_ROWS), help=f'some of {",".join(peers_report.TITLES)} (all but stage1 and stage2)')
    p.add_argument('--ranks', type=int, default=2, help='of the rows that have several (2)')
    p.add_argument('--threads', type=int, default=1, help='of each rank (1); rows of one rank have those of all ranks')
    p.add_argument('--lr', type=float, help='one that suits the model')
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--data', help="a file of text (this tree's sources)")
    p.add_argument('--device', choices=['host', 'cuda'], default='host')
    p.add_argument('--llmc', metavar='DIR', help="llm.c's source, for its row")
    p.add_argument('--compile', action='store_true', help="with PyTorch's compiler")
    p.add_argument('--add', action='store_true', help='keep the runs of earlier calls with the same settings, and report all')
    p.add_argument('--build', default=os.path.join(ROOT, 'build'), help='where zero-bench and zero-run are built')
    p.add_argument('--work', default=os.path.join(ROOT, 'build', 'peers'), help='for weights, logs and results')
    p.add_argument('--python', default=sys.executable, help='one that has PyTorch')
    p.add_argument('--out', help='the page (bench/results/peers-DATE.md; none where the rows are all our own)')
    p.add_argument('--note', action='append', default=[], help='a line for the page; may be repeated')
    p.add_argument('--sample-s', type=float, default=3, help='seconds between two looks at the memory, each of which takes the kernel some 10 ms for each GB (3)')
    p.add_argument('--limit-s', type=float, default=3600, help='seconds that a run may take')
    o = p.parse_args()
    o.rows, o.dtype = o.rows.split(','), o.dtype.split(',')
    wrong = [x for x in o.rows if x not in peers_report.TITLES] + [x for x in o.dtype if x not in ('f32', 'bf16')]
    if wrong:
        p.error(f'there is no {wrong[0]}: --rows are {", ".join(peers_report.TITLES)}, --dtype is f32, bf16 or f32,bf16')
    if o.steps < 3 or o.rounds < 0 or o.ranks < 1:
        p.error('--steps: at least 3; --rounds: at least 0; --ranks: at least 1')
    model_sizes.read_options(p, o)
    if o.data:
        o.data = os.path.abspath(o.data)
    if not o.out and any(who not in peers_report.OURS for who in o.rows):
        o.out = os.path.join(ROOT, 'bench', 'results', f'peers-{datetime.date.today().isoformat()}.md')
    return o


def sizes_as_options(o):
    layers, heads, channels, context, vocab = o.sizes
    if o.folder:
        return [f'--context={context}']
    return [f'--layers={layers}', f'--heads={heads}', f'--channels={channels}', f'--context={context}', f'--vocab={vocab}']


class Rows:
    """The commands of each row, and the reason if a row cannot run."""

    def __init__(self, o):
        self.o = o
        self.bench = os.path.join(o.build, 'bench', 'zero-bench')
        self.zero_run = os.path.join(o.build, 'zero', 'zero-run')
        self.text = o.data or os.path.join(o.work, 'text')
        self.weights, self.batches = {}, {}
        self.imported_gb = None  # memory of a process that only imported PyTorch
        self.torch_device = 'cuda' if o.device == 'cuda' else 'cpu'
        self.extensions_built = False
        self.versions = self.find_versions()

    def modules(self, rows):
        """The Python modules that these rows need."""
        return (['torch'] * any(who in OF_TORCH for who in rows) + ['transformers'] * bool(self.o.folder and any(who in OF_TORCH for who in rows))
                + ['deepspeed'] * any(who.startswith('deepspeed') for who in rows))

    def find_versions(self):
        """Versions of the modules that rows need: {"torch": "2.9.1", "deepspeed": "not there: why"}."""
        found = {}
        pss = "sum(int(line.split()[1]) for line in open('/proc/self/smaps_rollup') if line.startswith('Pss:'))"
        for module in self.modules(self.o.rows):
            code = f'import sys, {module}; sys.stderr.write({module}.__version__ + " " + str({pss}))'
            done = subprocess.run([self.o.python, '-c', code], env=self.environment(1), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                  check=False)
            last = (done.stderr.strip().splitlines() or ['it said nothing'])[-1]
            found[module] = last.split()[0] if done.returncode == 0 else f'not there: {last}'
            if module == 'torch' and done.returncode == 0:
                self.imported_gb = int(last.split()[1]) * 1024 / 1e9
        return found

    def refusal(self, who, dtype):
        """The reason why this row cannot run, or None."""
        o = self.o
        if o.folder and who in OF_GPT2:
            return 'it is for a GPT-2'
        if o.folder and who == 'plain' and glob.glob(os.path.join(o.folder, '*.safetensors')):
            return 'it reads no weights, which the folder has'
        if who == 'llmc':
            if not o.llmc:
                return '--llmc DIR was not given'
            if dtype != 'f32' or o.device != 'host':
                return 'its trainer for the CPU is f32'
        for module in self.modules([who]):
            if self.versions[module].startswith('not there'):
                note = os.path.join(os.path.dirname(os.path.dirname(o.python)), f'{module}-failed')
                if os.path.exists(note):
                    with open(note, encoding='utf-8') as f:
                        return f'{module} did not install: {f.read().strip()}'
                return f'{module} is {self.versions[module]}'
        return None

    def folder_option(self, folder):
        return [f'--model={folder}'] if self.o.folder else []

    def prepare(self, who, dtype):
        """Writes the weights and batches of a row that reads them from files."""
        o, n = self.o, self.micro_batches(who)
        if who in peers_report.OURS and not o.folder:
            return
        if who not in peers_report.OURS and n not in self.batches:
            self.batches[n] = os.path.join(o.work, f'batches-{n}')
            peers_inputs.write_batches(self.text, self.batches[n], o.steps, n, o.batch, o.context, o.seed)
        if dtype not in self.weights:
            self.weights[dtype] = os.path.join(o.work, f'weights-{dtype}')
            if not (o.add and os.path.isdir(self.weights[dtype])):
                peers_inputs.write_weights(self.bench, [*self.folder_option(o.folder), *sizes_as_options(o)], dtype, o.seed, self.text, self.weights[dtype])
        if who.startswith('deepspeed'):
            self.build_extensions()
        if who == 'llmc' and not os.path.exists(os.path.join(o.work, 'llmc_peer')):
            peers_inputs.write_llmc(self.weights[dtype], o.sizes, os.path.join(o.work, 'llmc-weights'))
            peers_inputs.run(['cc', '-Ofast', '-march=native', '-fopenmp', '-DOMP', '-DTESTING', '-w', '-I', o.llmc, '-include',
                              os.path.join(o.llmc, 'train_gpt2.c'), os.path.join(HERE, 'llmc_peer.c'), '-lm', '-o',
                              os.path.join(o.work, 'llmc_peer')], os.path.join(o.work, 'llmc_peer.log'))

    def build_extensions(self):
        """Starts DeepSpeed once without measuring. At its first start it compiles a part of itself for minutes.

        If this fails, the measured run fails in the same way and reports it.
        """
        if not self.extensions_built:
            self.extensions_built = True
            tiny = ['--layers=1', '--heads=1', '--channels=32', '--vocab=256', '--context=16', '--steps=3']
            command = [self.o.python, os.path.join(HERE, 'torch_train.py'), '--how=zero1', *tiny, f'--device={self.torch_device}']
            with open(os.path.join(self.o.work, 'deepspeed-first.log'), 'w', encoding='utf-8') as log:
                subprocess.run(command, env=self.deepspeed_environment(), stdout=log, stderr=log, check=False)

    def deepspeed_environment(self):
        return {**self.environment(1), 'DS_ACCELERATOR': self.torch_device, 'TORCH_EXTENSIONS_DIR': os.path.join(self.o.work, 'extensions')}

    def ranks(self, who):
        return 1 if who in ONE_RANK else self.o.ranks

    def micro_batches(self, who):
        """Those of all ranks in a step."""
        return 1 if who in peers_report.TP else 2 * self.o.ranks if who in peers_report.PP else self.ranks(who)

    def threads(self, who):
        return self.o.threads * (self.o.ranks if who in ONE_RANK and self.o.device == 'host' else 1)

    @staticmethod
    def environment(threads, **more):
        """The environment without variables of an outer launcher, and with this number of threads."""
        ours = ('ZERO_', 'OMP_', 'MKL_', 'KMP_', 'GOMP_')
        env = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}
        return {**env, 'OMP_NUM_THREADS': str(threads), **more}

    def commands(self, who, dtype):
        """[(arguments, environment)] for each process of a row."""
        o, threads = self.o, self.threads(who)
        env = self.environment(threads)
        if who == 'llmc':
            return [([os.path.join(o.work, 'llmc_peer'), os.path.join(o.work, 'llmc-weights'), self.batches[1], str(o.batch), str(o.context),
                      str(o.steps), str(o.lr)], env)]
        common = [*sizes_as_options(o), f'--dtype={dtype}', f'--batch={o.batch}', f'--steps={o.steps}', f'--lr={o.lr}']
        if who in peers_report.OURS:
            train = [self.bench, 'train', '--json', *self.folder_option(self.weights.get(dtype)), *common, f'--threads={threads}', f'--seed={o.seed}',
                     f'--data={self.text}', f'--device={o.device}']
            if who == 'plain':
                return [([*train, '--plain'], env)]
            how = {'tp': [f'--tp={o.ranks}'], 'pp': [f'--pp={o.ranks}', f'--accum={self.micro_batches(who)}']}.get(who) or [f'--stage={who[-1]}']
            return [([self.zero_run, '-n', str(o.ranks), '--raw', *train, *how], env)]
        train = [o.python, os.path.join(HERE, 'torch_train.py'), f'--how={OF_TORCH[who]}', f'--model={o.model}', *common,
                 f'--device={self.torch_device}', f'--weights={self.weights[dtype]}', f'--batches={self.batches[self.micro_batches(who)]}']
        train += [f'--micro-batches={self.micro_batches(who)}'] if who in peers_report.PP else []
        train += ['--compile'] if o.compile else []
        with socket.socket() as s:
            s.bind(('127.0.0.1', 0))
            port = s.getsockname()[1]
        if who.startswith('deepspeed'):
            env = {**self.deepspeed_environment(), 'OMP_NUM_THREADS': str(threads)}
        return [(train, {**env, 'RANK': str(r), 'LOCAL_RANK': str(r), 'WORLD_SIZE': str(self.ranks(who)), 'MASTER_ADDR': '127.0.0.1',
                         'MASTER_PORT': str(port)}) for r in range(self.ranks(who))]

    def run(self, who, dtype):
        """One run, which may have been refused or have failed."""
        o = self.o
        about = {'who': who, 'dtype': dtype, 'ranks': self.ranks(who), 'threads': self.threads(who), 'micro_batches': self.micro_batches(who)}
        why = self.refusal(who, dtype)
        if why:
            return {**about, 'failed': why}
        self.prepare(who, dtype)
        try:
            return {**about, **run_row(self.commands(who, dtype), os.path.join(o.work, f'{who}-{dtype}.log'), o.sample_s, o.limit_s)}
        except Failed as failure:
            return {**about, 'failed': str(failure)}


def earlier_runs(o, path):
    """With --add, the runs in the work folder, which must have the same settings. Otherwise none, and a clean folder."""
    settings = {k: getattr(o, k) for k in SETTINGS}
    settings_path = os.path.join(o.work, 'settings.json')
    if o.add and os.path.exists(settings_path):
        with open(settings_path, encoding='utf-8') as f:
            before = json.load(f)
        if before != settings:
            changed = ', '.join(f'--{k} was {before.get(k)}' for k in settings if before.get(k) != settings[k])
            sys.exit(f'bench/peers: --add: {changed}')
        with open(path, encoding='utf-8') as f:
            return [json.loads(line) for line in f]
    for name in ('llmc_peer', 'weights-f32', 'weights-bf16'):
        old = os.path.join(o.work, name)
        shutil.rmtree(old, ignore_errors=True) if os.path.isdir(old) else os.path.exists(old) and os.remove(old)
    open(path, 'w', encoding='utf-8').close()
    with open(settings_path, 'w', encoding='utf-8') as f:
        json.dump(settings, f)
    return []


def progress(o, run, round_):
    title = f'round {round_ + 1}, {run["dtype"]}, {peers_report.TITLES[run["who"]]}:'
    if run.get('failed'):
        return f'{title} not run: {run["failed"]}'
    tokens = peers_report.tokens_per_s(run, o.batch, o.context)
    memory = f'{peers_report.number(run["pss_bytes"] / 1e9)} GB, ' if run['pss_bytes'] else ''
    return (f'{title} {peers_report.number(tokens)} tokens/s, {memory}first forward after {peers_report.number(run["first_forward_s"])} s, '
            f'loss {peers_report.loss_text(run["losses"], 0)} to {peers_report.loss_text(run["losses"], len(run["losses"]) - 1)}')


def processor():
    with open('/proc/cpuinfo', encoding='utf-8') as f:
        lines = [line.split(':', 1) for line in f if ':' in line]
    facts = {k.strip(): v.strip() for k, v in reversed(lines)}
    kinds = ['avx2', 'avx512f', 'avx512_bf16', 'amx_bf16']
    has = [k for k in kinds if k in facts.get('flags', '').split()]
    lacks = [k for k in kinds if k not in has]
    name = facts.get('model name', platform.machine())
    return (f'{name} (family {facts.get("cpu family", "?")}, model {facts.get("model", "?")}), {len(os.sched_getaffinity(0))} cores'
            f'; {", ".join(has) or "no AVX"}' + (f'; without {", ".join(lacks)}' if has and lacks else ''))


def gpu_lines():
    """Name and driver of the GPUs, one line for each kind."""
    try:
        done = subprocess.run(['nvidia-smi', '--query-gpu=name,driver_version', '--format=csv,noheader'], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ['a GPU, of which nvidia-smi is not there to tell']
    found = done.stdout.strip().splitlines()
    return [f'{found.count(kind)} {kind.replace(", ", ", driver ")}' for kind in dict.fromkeys(found)] or ['a GPU of which nvidia-smi told nothing']


def about_lines(o, rows, versions, imported_gb):
    """Lines for the page: date, machine, versions, model, and how to read the columns."""
    commit = subprocess.run(['git', '-C', ROOT, 'describe', '--always', '--dirty'], capture_output=True, text=True, check=False).stdout.strip()
    version = subprocess.run([os.path.join(o.build, 'bench', 'zero-bench'), '--version'], capture_output=True, text=True, check=False).stdout.split()[-1:]
    interleaved = not o.add and o.rounds > 1
    peers = sorted({r['peer'] for r in rows if r.get('peer')}) or [f'{k} {v}' for k, v in versions.items()]
    layers, heads, channels, context, vocab = o.sizes
    start = '; all but zero-bench --plain read the weights from files' if o.folder else ''
    meshes = f', with tp for all ranks, with pp in each of {2 * o.ranks} micro-batches'
    meshes = meshes if any(r['who'] in peers_report.TP + peers_report.PP for r in rows) else ''
    return [f'{datetime.date.today().isoformat()}, {processor()}; Linux {".".join(platform.release().split(".")[:2])}',
            *(gpu_lines() if o.device == 'cuda' else []),
            f'libzero {"".join(version)}, this tree at {commit or "no commit"}; {"; ".join(peers) or "no peer"}; Python {platform.python_version()}',
            f'{os.path.basename(o.model)}: {layers} layers, {heads} heads, {channels} channels, {vocab} token ids{start}; rows of {context} tokens, {o.batch} for each rank and step{meshes}; AdamW, '
            f'clip 1, learning rate {o.lr:g} over 10 steps; on the {"GPU" if o.device == "cuda" else "CPU"}',
            'tokens/s: of a run the median step without the first two; then the median, lowest and highest of the rounds'
            + (', which were interleaved' if interleaved else ''),
            'CPU s/step: CPU time of all processes from the end of the first step to their end, for each of the other steps',
            'peak Pss: the largest sum over a row\'s processes, sampled from outside; memory that they share counts once'
            + (f'; a process that has imported PyTorch and done nothing takes {peers_report.number(imported_gb)} GB' if imported_gb else ''),
            f'losses apart: the largest relative difference of the first {peers_report.n_compared(rows)} losses from the reference, which is ours with the same dtype '
            'and as many micro-batches in a step. Others see other batches',
            *(['PyTorch 1F1B, patched: without its first messages, which send an int64 to a float32. They only open connections, and gloo aborts on them']
              if any(r['who'] == 'torch_pp_patched' for r in rows) else []), *o.note]


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # this ends the processes of a run, too
    o = options()
    os.makedirs(o.work, exist_ok=True)
    raw_path = os.path.join(o.work, 'runs.jsonl')
    runs = earlier_runs(o, raw_path)
    rows = Rows(o)
    if not o.data and not (o.add and os.path.exists(rows.text)):  # added rows use the same text
        peers_inputs.write_text(ROOT, rows.text)
    for round_ in range(o.rounds):
        wanted = [(who, dtype) for dtype in o.dtype for who in o.rows]
        first = round_ * len(wanted) // max(o.rounds, 1)
        for who, dtype in wanted[first:] + wanted[:first]:
            run = rows.run(who, dtype)
            runs.append(run)
            print(progress(o, run, round_), flush=True)
            with open(raw_path, 'a', encoding='utf-8') as f:
                f.write(peers_report.json_line(run))
    bars = peers_report.FOLDER_BARS if o.folder else peers_report.BARS
    table = peers_report.rows_of(runs, o.batch, o.context)
    print('\n' + peers_report.text(table, bars))
    with open(os.path.join(o.work, 'rows.jsonl'), 'w', encoding='utf-8') as f:
        f.writelines(map(peers_report.json_line, table))
    print(f'\n{f.name}: the same, a line of JSON for each row')
    if o.out:
        os.makedirs(os.path.dirname(os.path.abspath(o.out)), exist_ok=True)
        with open(o.out, 'w', encoding='utf-8') as f:
            f.write(peers_report.markdown('The same training by libzero and by others', about_lines(o, table, rows.versions, rows.imported_gb), table, bars))
        print(f'{o.out}: the same as a page')
    return 0 if any(row.get('tokens_per_s') for row in table) else 1


if __name__ == '__main__':
    sys.exit(main())
