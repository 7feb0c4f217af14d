# SPDX-License-Identifier: Apache-2.0
"""Runs what test/gpu.sh has built, step by step, each with its own time-out. Prints a table and writes it as
JSON."""
import argparse
import concurrent.futures
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import threading

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Several ranks on one GPU: NCCL must take each for a separate host, and they meet over loopback.
ONE_GPU = {'NCCL_SOCKET_IFNAME': 'lo', 'NCCL_NET': 'Socket', 'NCCL_IB_DISABLE': '1', 'NCCL_MNNVL_ENABLE': '0',
           'NCCL_NET_PLUGIN': 'none', 'NCCL_MAX_CTAS': '2'}


class Skipped(Exception):
    pass


class Failed(Exception):
    pass


# Dense bf16 TFLOP/s from NVIDIA's data sheets, to compute the share that is used.
PEAK_TFLOPS = {'A100': 312, 'H100': 989.4, 'H200': 989.4}


def last_line(text):
    """Returns the last line of a command's output. The launcher's own lines only say that a rank has ended."""
    lines = text.strip().splitlines()
    return ([x for x in lines if not x.startswith('zero-run:')] or lines or ['(it said nothing)'])[-1][:200]


def run(command, timeout, env=None, may_refuse=False):
    """Returns a command's standard output. If it is refused, raises Failed, or Skipped where a refusal is
    allowed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, check=False,
                              env={**os.environ, **(env or {})})
    except subprocess.TimeoutExpired as late:
        raise (Skipped if may_refuse else Failed)(f'not done after {timeout} s') from late
    if done.returncode:
        raise (Skipped if may_refuse else Failed)(f'exit code {done.returncode}: {last_line(done.stderr or done.stdout)}')
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
        self.rows = []

    def rows_together(self, rows):
        """Runs rows that measure no time, several at once."""
        with concurrent.futures.ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
            for done in [pool.submit(self.row, *row) for row in rows]:
                done.result()

    def row(self, what, fn, *args):
        """Makes one line of the table: fn returns a dictionary of figures."""
        row = {'what': what}
        try:
            row.update(status='ok', **fn(*args))
        except Skipped as why:
            row.update(status='skipped', why=str(why))
        except (Failed, LookupError, ValueError, OSError) as why:
            row.update(status='failed', why=f'{type(why).__name__}: {why}')
        self.rows.append(row)
        self.write()
        figures = ', '.join(f'{k} {v}' for k, v in row.items() if k not in ('what', 'status'))
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
            # 400 s together.
            subprocess.run(['meson', 'test', '-C', self.build, '--no-rebuild', '--suite', suite, '--timeout-multiplier', '0',
                            '--num-processes', str(max(1, min(8, (os.cpu_count() or 1) // 2)))],
                           cwd=ROOT, capture_output=True, timeout=400, check=False, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as late:
            raise Failed('not done after 400 s') from late
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
        out = run(['compute-sanitizer', '--tool', tool, '--report-api-errors', 'no', '--error-exitcode', '9', os.path.join(self.build, *program)], 400)
        return {'says': last_line(re.sub(r'=+ *', '', out))}

    # --- training ---

    def train(self, *args, ranks=1, timeout=120, env=None, may_refuse=False):
        command = [self.bench, 'train', '--json', '--device', 'cuda', *map(str, args)]
        if ranks > 1:
            apart = 'NCCL_HOSTID=rank$RANK exec "$0" "$@"'
            command = [self.zero_run, '-n', str(ranks), '--raw', 'sh', '-c', apart, *command]
            env = {**ONE_GPU, **(env or {})}
        *steps, summary = events(run(command, timeout, env, may_refuse))
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

    def several_ranks(self, ranks, more, env):
        hashes = set()
        for stage in range(4):
            _, summary = self.train('--model=gpt2-nano', '--steps=4', '--gpu=0', f'--stage={stage}', '--deterministic=on', *more,
                                    ranks=ranks, timeout=90, env=env, may_refuse=True)
            hashes.add(summary['state_sha256'])
        if len(hashes) != 1:
            raise Failed(f'states differ: {hashes}')
        return {'state_sha256': hashes.pop()[:16]}

    def groups(self, ranks, group):
        """HSDP and HFSDP end in the state of stage 3 without groups."""
        hashes = set()
        for hybrid in ([], [f'--dp-replicate={ranks // group}'], ['--hybrid=hfsdp', f'--dp-replicate={ranks // group}']):
            _, summary = self.train('--model=gpt2-nano', '--steps=4', '--gpu=0', '--stage=3', '--deterministic=on', *hybrid, ranks=ranks, env={}, may_refuse=True)
            hashes.add(summary['state_sha256'])
        if len(hashes) != 1:
            raise Failed(f'states differ: {hashes}')
        return {'state_sha256': hashes.pop()[:16]}

    def several_gpus(self, gpus, ranks, more, env):
        """Runs one rank per GPU."""
        if gpus < ranks:
            raise Skipped(f'{ranks} GPUs are needed, here {"is" if gpus == 1 else "are"} {gpus}')
        hashes = set()
        for stage in range(4):
            command = [self.zero_run, '-n', str(ranks), '--raw', self.bench, 'train', '--json', '--device', 'cuda',
                       '--model=gpt2-nano', '--steps=4', f'--stage={stage}', '--deterministic=on', *more]
            *_, summary = events(run(command, 120, env))
            hashes.add(summary['state_sha256'])
        if len(hashes) != 1:
            raise Failed(f'states differ: {hashes}')
        return {'state_sha256': hashes.pop()[:16]}

    def speed(self, model, batch, steps, stage3_ratio):
        """Compares stage 3 with --plain, alternately; uses medians."""
        ms = {'--plain': [], '--stage=3': []}
        tokens = memory = mfu = peak = None
        for _ in range(stage3_ratio):
            for how, times in ms.items():
                _, summary = self.train(f'--model={model}', '--dtype=bf16', f'--batch={batch}', f'--steps={steps}', '--context=1024',
                                        how, *self.peak, timeout=200)
                times.append(summary['ms_median'])
                if how == '--stage=3':
                    tokens, mfu, memory = batch * 1024, summary.get('mfu'), summary['bytes']['total']
                    peak = summary['peak_device_bytes']
        plain, wrapped = statistics.median(ms['--plain']), statistics.median(ms['--stage=3'])
        return {'ms_plain': plain, 'ms_stage_3': wrapped, 'ratio': round(wrapped / plain, 4), 'mfu': mfu,
                'tokens_per_s': round(tokens / wrapped * 1000), 'planned_bytes': memory, 'peak_device_bytes': peak}

    def json_of(self, command, timeout=200, may_refuse=False):
        *_, answer = events(run(command, timeout, may_refuse=may_refuse))
        answer.pop('event', None)
        return answer


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
    return {'gpus': len(answers), 'gpu': name, 'driver': driver, 'memory': memory, 'compute_capability': capability, **found,
            'date': datetime.date.today().isoformat()}


def main():
    options = argparse.ArgumentParser()
    options.add_argument('--build', required=True)
    options.add_argument('--out', required=True)
    options.add_argument('--sanitize', action='store_true')
    o = options.parse_args()
    about = machine()
    gpu = Gpu(o.build, about, o.out)
    print(', '.join(f'{k} {v}' for k, v in about.items()), flush=True)

    together = [('tests on the GPU', gpu.tests, 'gpu')]
    if o.sanitize:
        together += [(f'{tool}: the device\'s conformance suite', gpu.sanitizer, tool, ['test', 'kernels', 'test_gpu_device'])
                     for tool in ('memcheck', 'racecheck')]
    together += [(f'stages 0 to 3, {dtype}: one state', gpu.parity, dtype) for dtype in ('f32', 'bf16')]
    together += [(f'{ranks} ranks on one GPU', gpu.several_ranks, ranks, [], {}) for ranks in (2, 3)]
    for ranks in sorted({2, about['gpus']} - {1}):
        together += [(f'{ranks} ranks, a GPU for each', gpu.several_gpus, about['gpus'], ranks, [], {}),
                     (f'{ranks} ranks, a GPU for each, bf16, checked', gpu.several_gpus, about['gpus'], ranks, ['--dtype=bf16'],
                      {'ZERO_CHECK': '1'})]
    together += [('2 ranks on one GPU, bf16, without PAT', gpu.several_ranks, 2, ['--dtype=bf16'], {'NCCL_PAT_ENABLE': '0'}),
                 ('4 ranks on one GPU, in groups of 2', gpu.groups, 4, 2)]
    gpu.rows_together(together)
    gpu.row('AdamW against a copy; GEMM 8192^3 and attention, bf16', gpu.json_of, [gpu.bench, 'kernels', '--device=cuda', '--json'])
    gpu.row('GEMM 8192^3 and attention, bf16, PyTorch', gpu.json_of, [sys.executable, 'bench/peers/kernels_peer.py'], 120, True)
    for model, batch, steps, rounds in (('gpt2-124M', 32, 20, 3), ('gpt2-1.5B', 8, 16, 1)):
        gpu.row(f'{model}, batch {batch} x 1024, bf16', gpu.speed, model, batch, steps, rounds)
        gpu.row(f'{model}, the same by PyTorch FSDP2', gpu.json_of,
                [sys.executable, 'bench/peers/torch_train.py', '--how=fsdp2', '--device=cuda', '--dtype=bf16', '--compile', f'--model={model}', f'--batch={batch}',
                 f'--steps={steps}', *gpu.peak], 300, True)
    count = {s: sum(r['status'] == s for r in gpu.rows) for s in ('ok', 'failed', 'skipped')}
    print(', '.join(f'{n} {s}' for s, n in count.items()), f'({o.out})')
    return 1 if count['failed'] or not count['ok'] else 0


if __name__ == '__main__':
    sys.exit(main())
