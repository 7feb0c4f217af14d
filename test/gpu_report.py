# SPDX-License-Identifier: Apache-2.0
"""Runs what test/gpu.sh has built, in sections of at most SECTION_S seconds. A section prints a row for each
step and at its end what it proved. All rows are written as JSON."""
import argparse
import concurrent.futures
import datetime
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SECTIONS = ('kernels', 'train', 'mesh', 'peers')
SECTION_S = 240
SANITIZER_S = 400  # more for the section of the kernels with --sanitize
# NCCL refuses several ranks of a host on one GPU. With a host's name for each rank it accepts them, and they meet
# over loopback.
ONE_GPU = {'NCCL_SOCKET_IFNAME': 'lo', 'NCCL_NET': 'Socket', 'NCCL_IB_DISABLE': '1', 'NCCL_MNNVL_ENABLE': '0',
           'NCCL_NET_PLUGIN': 'none', 'NCCL_MAX_CTAS': '2'}


class Skipped(Exception):
    pass


class Failed(Exception):
    pass


class Refused(Failed):
    """NCCL says that it does not take these ranks."""


class Limit:
    """When the current section ends."""
    until = float('inf')

    @classmethod
    def left(cls):
        return cls.until - time.monotonic()


# Dense bf16 TFLOP/s from NVIDIA's data sheets, to compute the share that is used.
PEAK_TFLOPS = {'A100': 312, 'H100': 989.4, 'H200': 989.4}


def last_line(text):
    """Returns the last line of a command's output. The launcher's own lines only say that a rank has ended."""
    lines = text.strip().splitlines()
    return ([x for x in lines if not x.startswith('zero-run:')] or lines or ['(it said nothing)'])[-1][:200]


def run(command, timeout, env=None):
    """Returns a command's standard output, or raises Failed. Raises Skipped if the section has less than the
    command's time limit left. So a command that starts and is not done in time has failed."""
    if Limit.left() < timeout:
        raise Skipped('the time of this section was over')
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False,
                              env={**os.environ, **(env or {})})
    except subprocess.TimeoutExpired as late:
        raise Failed(f'not done after {timeout} s') from late
    if done.returncode:
        refused = re.search(r'Duplicate GPU|invalid usage', done.stderr)
        raise (Refused if refused else Failed)(f'exit code {done.returncode}: {last_line(done.stderr or done.stdout)}')
    return done.stdout


def events(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith('{')]


class Gpu:
    def __init__(self, build, about, out):
        self.build, self.about, self.out = build, about, out
        self.lock = threading.Lock()
        self.peak = [f'--peak-tflops={peak}' for known, peak in PEAK_TFLOPS.items() if known in about['gpu']]
        self.bench = os.path.join(build, 'bench', 'zero-bench')
        self.zero_run = os.path.join(build, 'zero', 'zero-run')
        self.rows, self.section = [], None
        self.refused = False  # whether NCCL refuses ranks that share a GPU

    def run_section(self, name, steps, limit):
        """Runs the steps of a section, and prints what those that passed have proved. limit: in seconds."""
        began = time.monotonic()
        self.section, Limit.until = name, began + limit
        print(f'== {name}', flush=True)
        steps(self)
        rows = [row for row in self.rows if row['section'] == name]
        print(f'== {name}: {time.monotonic() - began:.0f} s; proved:')
        for row in rows:
            if row['status'] == 'ok' and row['proves']:
                print(f"   {row['proves']}")
        for row in rows:
            if row['status'] != 'ok':
                print(f"   not proved: {row['what']} ({row['status']})")

    def rows_together(self, rows):
        """Runs rows that measure no time, several at once."""
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
            for done in [pool.submit(self.row, *row) for row in rows]:
                done.result()

    def row(self, what, proves, fn, *args):
        """Makes one line of the table: fn returns a dictionary of figures. proves: a sentence, or None for a
        measurement."""
        row = {'section': self.section, 'what': what, 'proves': proves}
        try:
            row.update(status='ok', **fn(*args))
        except Skipped as why:
            row.update(status='skipped', why=str(why))
        except Exception as why:  # whatever it is, the rows after it run
            row.update(status='failed', why=f'{type(why).__name__}: {why}')
        self.rows.append(row)
        self.write()
        figures = ', '.join(f'{k} {v}' for k, v in row.items() if k not in ('section', 'what', 'proves', 'status'))
        print(f"{row['status']:8} {what:44} {figures}", flush=True)
        return row

    def write(self):
        """Writes the results so far, so that a run which is stopped keeps them."""
        with self.lock, open(self.out, 'w', encoding='utf-8') as f:
            json.dump({**self.about, 'rows': self.rows}, f, indent=1)
            f.write('\n')

    # --- tests ---

    def tests(self, suite):
        log = os.path.join(self.build, 'meson-logs', 'testlog.json')
        if os.path.exists(log):
            os.remove(log)
        try:
            # Meson's own time limits assume that a test has the machine for itself. These share it, and have
            # the section's time together.
            subprocess.run(['meson', 'test', '-C', self.build, '--no-rebuild', '--suite', suite, '--timeout-multiplier', '0',
                            '--num-processes', str(max(1, min(8, (os.cpu_count() or 1) // 2)))],
                           cwd=ROOT, capture_output=True, timeout=max(1, Limit.left()), check=False, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as late:
            raise Failed('not done when the time of this section was over') from late
        if not os.path.exists(log):
            raise Failed('meson ran nothing')
        with open(log, encoding='utf-8') as f:
            results = [json.loads(line) for line in f if line.strip()]
        bad = [t['name'] for t in results if t['result'] not in ('OK', 'SKIP')]
        if bad:
            raise Failed('failed: ' + ', '.join(bad))
        passed = [t for t in results if t['result'] == 'OK']
        if not passed:
            raise Skipped('no test of this suite ran')
        return {'passed': len(passed), 'skipped_tests': len(results) - len(passed)}

    def sanitizer(self, tool, program):
        out = run(['compute-sanitizer', '--tool', tool, '--report-api-errors', 'no', '--error-exitcode', '9', os.path.join(self.build, *program)], SANITIZER_S)
        return {'says': last_line(re.sub(r'=+ *', '', out))}

    # --- training ---

    def train(self, *args, ranks=1, share=False, timeout=60, env=None):
        """Trains, with a GPU for each rank. With share, or if the GPUs are fewer, all ranks use GPU 0, and each
        poses as a host. Returns the steps and the summary."""
        command = [self.bench, 'train', '--json', '--device', 'cuda', *map(str, args)]
        if share or ranks > self.about['gpus']:
            if self.refused:
                raise Skipped('NCCL refuses several ranks on one GPU')
            command = ['sh', '-c', 'NCCL_HOSTID=rank$RANK exec "$0" "$@"', *command, '--gpu=0']
            env = {**ONE_GPU, **(env or {})}
        if ranks > 1:
            command = [self.zero_run, '-n', str(ranks), '--raw', *command]
        *steps, summary = events(run(command, timeout, env))
        if any(step['loss'] is None for step in steps):
            pp = next((int(arg[5:]) for arg in command if arg.startswith('--pp=')), 1)
            raise Failed(f"rank {ranks - ranks // pp}'s loss is not a number")  # the first rank of the last pipeline stage reports
        return steps, summary

    def parity(self, dtype):
        """Every stage, prefetch and budget ends in the same state, and so does the program without libzero."""
        hashes = {}
        common = ['--model=gpt2-nano', '--steps=20', f'--dtype={dtype}']
        for stage in range(4):
            for more in ([], ['--prefetch=0'], ['--accum=2']):
                _, summary = self.train(*common, f'--stage={stage}', *more)
                hashes.setdefault('accum 2' if more == ['--accum=2'] else 'accum 1', set()).add(summary['state_sha256'])
                if summary['bytes'] != summary['planned_bytes']:
                    raise Failed(f'stage {stage}: allocated and planned bytes differ')
        plain, summary = self.train(*common, '--plain')
        hashes['accum 1'].add(summary['state_sha256'])
        if any(len(h) != 1 for h in hashes.values()):
            raise Failed(f'states differ: {hashes}')
        return {'state_sha256': hashes['accum 1'].pop()[:16], 'loss': plain[-1]['loss']}

    def one_state(self, ranks, hows, env):
        """Trains in several ways, which must end in the same state."""
        hashes = set()
        for how in hows:
            _, summary = self.train('--model=gpt2-nano', '--steps=4', '--deterministic=on', *how, ranks=ranks, env=env)
            hashes.add(summary['state_sha256'])
        if len(hashes) != 1:
            raise Failed(f'states differ: {hashes}')
        return {'state_sha256': hashes.pop()[:16]}

    def several_ranks(self, ranks, more, env):
        return self.one_state(ranks, [[f'--stage={stage}', *more] for stage in range(4)], env)

    def groups(self, ranks, more, env):
        """HSDP and HFSDP, in groups of 2, end in the state of stage 3 without groups."""
        replicate = f'--dp-replicate={ranks // 2}'
        return self.one_state(ranks, [['--stage=3', *more, *hybrid] for hybrid in ([], [replicate], [replicate, '--hybrid=hfsdp'])], env)

    def sharing(self):
        """Tries 2 ranks on GPU 0: as ranks of one host, and as a host each. Raises Skipped if NCCL refuses
        both."""
        tiny = ['--model=gpt2-nano', '--steps=1']
        try:
            run([self.zero_run, '-n', '2', '--raw', self.bench, 'train', '--json', '--device', 'cuda', '--gpu=0', *tiny], 60)
            of_one_host = 'accepted'
        except Refused as why:
            of_one_host = f'refused: {why}'
        try:
            self.train(*tiny, ranks=2, share=True)
        except Refused as why:
            self.refused = True
            raise Skipped(f'NCCL refuses several ranks on one GPU, even as a host each: {why}') from why
        return {'ranks of one host': of_one_host, 'a host each': 'accepted'}

    def on_mesh(self, pp, dp, tp, *more):
        """Trains on a mesh, deterministically unless `more` says otherwise. Ranks that share a GPU train the
        smallest model that all meshes of their number can divide, and only two steps. Returns the state's hash
        and the losses."""
        n = pp * dp * tp
        layers, micro, steps, timeout = (8, 8, 3, 60) if n <= self.about['gpus'] else (n, n, 2, 90)
        steps, summary = self.train(f'--layers={layers}', '--heads=8', '--channels=32', '--context=16', '--batch=1', f'--steps={steps}',
                                    f'--accum={micro // dp}', f'--pp={pp}', f'--tp={tp}', '--deterministic=on', *more, ranks=n, timeout=timeout)
        if summary['bytes'] != summary['planned_bytes']:
            raise Failed(f'{pp} x {dp} x {tp}: allocated and planned bytes differ')
        return summary['state_sha256'], [step['loss'] for step in steps]

    def meshes(self, n):
        """All meshes of n ranks, pp x dp x tp: those with the same tp end in the same state, whatever the
        stage and the schedule."""
        meshes = [(n // dp // tp, dp, tp) for tp in (1, 2, 4, 8) for dp in (1, 2, 4, 8) if n % (dp * tp) == 0]
        states, losses = {}, {}
        for i, (pp, dp, tp) in enumerate(meshes):
            how = [f'--stage={i % 4}', *([['--schedule=1f1b', '--schedule=gpipe', '--schedule=zero-bubble'][i % 3]] if pp > 1 else []),
                   *(['--sequence-parallel'] if tp > 1 and pp == 1 and dp == 1 else [])]
            try:
                state, told = self.on_mesh(pp, dp, tp, *how)
            except Skipped as why:
                raise Skipped(f'{i} of {len(meshes)} meshes passed; then: {why}' if i else str(why)) from why
            losses[pp, dp, tp] = told[-1]
            kind = (tp, '--sequence-parallel' in how)
            if states.setdefault(kind, state) != state:
                raise Failed(f'{pp} x {dp} x {tp}: another state than that of other meshes with tp {tp}')
        middle = statistics.median(losses.values())
        far = [mesh for mesh, loss in losses.items() if abs(loss - middle) > 1e-4 * middle]
        if far:
            raise Failed(f'losses differ: {losses}')
        return {'meshes': len(meshes), 'states': ' '.join(f'tp {tp}: {x[:8]}' for (tp, _), x in states.items()), 'loss': middle}

    def mesh_bf16(self, n):
        """A mesh with pipeline stages ends in the state of tensor and data parallelism alone, in bf16. Heads of 16
        channels or more have the attention kernel."""
        heads = ['--dtype=bf16', '--channels=128']
        pipeline, loss = self.on_mesh(2, n // 4, 2, *heads, '--stage=1')
        flat, _ = self.on_mesh(1, n // 2, 2, *heads, '--stage=3')
        if pipeline != flat:
            raise Failed(f'states differ: {pipeline} and {flat}')
        return {'state_sha256': flat[:16], 'loss': loss[-1]}

    def mesh_not_deterministic(self, n):
        """NCCL's sums, in an order that NCCL chooses, change the loss of no step by more than rounding."""
        (_, fixed), (_, free) = [self.on_mesh(2, n // 4, 2, '--stage=2', f'--deterministic={x}') for x in ('on', 'off')]
        far = max(abs(a - b) / abs(a) for a, b in zip(fixed, free, strict=True))
        if far > 1e-5:
            raise Failed(f'losses differ by {far}: {fixed}, {free}')
        return {'loss': free[-1], 'relative difference': far}

    def mesh_speed(self, n, *axes):
        _, summary = self.train('--model=gpt2-124M', '--dtype=bf16', '--context=1024', '--batch=8', '--steps=10', *axes, ranks=n)
        return {'ms_median': summary['ms_median'], 'tokens_per_s': summary['tokens_per_s'], 'planned_bytes': summary['bytes']['total'],
                'peak_device_bytes': summary['peak_device_bytes']}

    def speed(self, model, batch, steps, stage3_ratio):
        """Compares stage 3 with --plain, alternately; uses medians."""
        ms = {'--plain': [], '--stage=3': []}
        tokens = memory = mfu = peak = None
        for _ in range(stage3_ratio):
            for how, times in ms.items():
                _, summary = self.train(f'--model={model}', '--dtype=bf16', f'--batch={batch}', f'--steps={steps}', '--context=1024',
                                        how, *self.peak, timeout=80)
                times.append(summary['ms_median'])
                if how == '--stage=3':
                    tokens, mfu, memory = batch * 1024, summary.get('mfu'), summary['bytes']['total']
                    peak = summary['peak_device_bytes']
        plain, wrapped = statistics.median(ms['--plain']), statistics.median(ms['--stage=3'])
        return {'ms_plain': plain, 'ms_stage_3': wrapped, 'ratio': round(wrapped / plain, 4), 'mfu': mfu,
                'tokens_per_s': round(tokens / wrapped * 1000), 'planned_bytes': memory, 'peak_device_bytes': peak}

    def json_of(self, command, timeout=60):
        *_, answer = events(run(command, timeout))
        answer.pop('event', None)
        return answer

    def peer(self, *command):
        """Runs a program of bench/peers."""
        if not self.about['torch']:
            raise Skipped(f'{sys.executable} has no PyTorch (PYTHON=... names another)')
        return self.json_of([sys.executable, *command], 90)


def count_gpus(listed):
    """Returns how many of the listed GPUs a program sees. CUDA_VISIBLE_DEVICES names them, up to the first entry
    that is empty or -1."""
    visible = os.environ.get('CUDA_VISIBLE_DEVICES')
    if visible is None:
        return listed
    names = [name.strip() for name in visible.split(',')]
    return len(list(itertools.takewhile(lambda name: name not in ('', '-1'), names)))


def machine():
    ask = 'name,driver_version,memory.total,compute_cap'
    answers = run(['nvidia-smi', f'--query-gpu={ask}', '--format=csv,noheader'], 30).strip().splitlines()
    name, driver, memory, capability = [x.strip() for x in answers[0].split(',')]
    versions = {'nvcc': ['nvcc', '--version'], 'torch': [sys.executable, '-c', 'import torch; print(torch.__version__)']}
    found = {}
    for what, command in versions.items():
        try:
            found[what] = last_line(run(command, 60))
        except (Failed, FileNotFoundError):
            found[what] = None
    return {'gpus': count_gpus(len(answers)), 'gpu': name, 'driver': driver, 'memory': memory, 'compute_capability': capability, **found,
            'date': datetime.date.today().isoformat()}


def kernels(gpu, o):
    together = [('tests on the GPU', "kernels, products and the model's layers agree with their references", gpu.tests, 'gpu')]
    if o.sanitize:
        together += [(f"{tool}: the device's conformance suite", f'{tool} finds no fault in the conformance suite', gpu.sanitizer, tool,
                      ['test', 'kernels', 'test_gpu_device']) for tool in ('memcheck', 'racecheck')]
    gpu.rows_together(together)
    gpu.row('AdamW against a copy; GEMM 8192^3 and attention, bf16', None, gpu.json_of, [gpu.bench, 'kernels', '--device=cuda', '--json'])


def train(gpu, _):
    gpu.rows_together([(f'stages 0 to 3, {dtype}: one state', f'every stage trains to the state of the program without libzero, in {dtype}',
                        gpu.parity, dtype) for dtype in ('f32', 'bf16')])
    for model, batch, steps, rounds in MODELS:
        gpu.row(f'{model}, batch {batch} x 1024, bf16', None, gpu.speed, model, batch, steps, rounds)


def mesh(gpu, _):
    n_gpus = gpu.about['gpus']

    def where(n):
        return 'a GPU for each' if n <= n_gpus else 'on one GPU'

    gpu.row('2 ranks on one GPU, as NCCL sees them', 'NCCL accepts ranks that share a GPU if each poses as a host', gpu.sharing)
    most = 8 if n_gpus >= 8 else 4
    rows = [(f'{n} ranks, {where(n)}', f'stages 0 to 3 end in one state on {n} ranks', gpu.several_ranks, n, [], {}) for n in (2, 3)]
    rows += [(f'2 ranks, {where(2)}, bf16, without PAT', 'stages 0 to 3 end in one state in bf16, without the PAT algorithm', gpu.several_ranks, 2,
              ['--dtype=bf16'], {'NCCL_PAT_ENABLE': '0'}),
             (f'{most} ranks, {where(most)}, in groups of 2', 'HSDP and HFSDP end in the state of stage 3 without groups', gpu.groups, most, [], {})]
    if most <= n_gpus:
        rows += [(f'{most} ranks, {where(most)}, bf16, checked', f'stages 0 to 3 end in one state on {most} ranks in bf16, with ZERO_CHECK=1',
                  gpu.several_ranks, most, ['--dtype=bf16'], {'ZERO_CHECK': '1'}),
                 (f'{most} ranks, {where(most)}, in groups of 2, bf16, checked', 'HSDP and HFSDP do so in bf16, too, with ZERO_CHECK=1', gpu.groups, most,
                  ['--dtype=bf16'], {'ZERO_CHECK': '1'})]
    gpu.rows_together(rows)
    rows = [[(f'all meshes of {n} ranks, {where(n)}', f'all meshes of {n} ranks with the same tp end in the same bits, at stages and schedules that vary',
              gpu.meshes, n)] for n in (2, 4, 8)]
    rows[1:1] = [[(f'a mesh of {most} ranks, {where(most)}, bf16', 'pipeline stages do not change the bits in bf16 with the attention kernel', gpu.mesh_bf16,
                   most),
                  (f'a mesh of {most} ranks, {where(most)}, not deterministic', "NCCL's sums change a mesh's losses by at most 1e-5",
                   gpu.mesh_not_deterministic, most)]]
    for together in rows if n_gpus < 8 else [sum(rows, [])]:
        gpu.rows_together(together)
    for axes in [['--stage=3'], ['--tp=2'], ['--pp=2', '--accum=4']] if n_gpus % 2 == 0 else []:
        gpu.row(f"gpt2-124M on {n_gpus} GPUs, {' '.join(axes)}", None, gpu.mesh_speed, n_gpus, *axes)


def peers(gpu, _):
    gpu.row('GEMM 8192^3 and attention, bf16, PyTorch', None, gpu.peer, 'bench/peers/kernels_peer.py')
    for model, batch, steps, _ in MODELS:
        gpu.row(f'{model}, batch {batch} x 1024, bf16, PyTorch FSDP2', None, gpu.peer, 'bench/peers/torch_train.py', '--how=fsdp2', '--device=cuda',
                '--dtype=bf16', '--compile', f'--model={model}', f'--batch={batch}', f'--steps={steps}', *gpu.peak)
        gpu.row(f'{model}, the same by libzero', None, gpu.speed, model, batch, steps, 1)


# name, rows of a batch, steps, rounds
MODELS = (('gpt2-124M', 32, 20, 3), ('gpt2-1.5B', 8, 16, 1))


def main():
    options = argparse.ArgumentParser()
    options.add_argument('--build', required=True)
    options.add_argument('--out', required=True)
    options.add_argument('--sanitize', action='store_true')
    options.add_argument('--only', action='append', choices=SECTIONS)
    o = options.parse_args()
    about = machine()
    if not about['gpus']:
        print('no GPU: CUDA_VISIBLE_DEVICES hides all', file=sys.stderr)
        return 2
    gpu = Gpu(o.build, about, o.out)
    print(', '.join(f'{k} {v}' for k, v in about.items()), flush=True)
    for name in o.only or SECTIONS:
        limit = SECTION_S + (SANITIZER_S if o.sanitize and name == 'kernels' else 0)
        gpu.run_section(name, lambda g, steps=globals()[name]: steps(g, o), limit)
    count = {s: sum(r['status'] == s for r in gpu.rows) for s in ('ok', 'failed', 'skipped')}
    print(', '.join(f'{n} {s}' for s, n in count.items()), f'({o.out})')
    return 1 if count['failed'] else 0


if __name__ == '__main__':
    sys.exit(main())
