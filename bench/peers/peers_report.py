# SPDX-License-Identifier: Apache-2.0
"""Computes the results of bench/peers: medians, spreads, distances of losses, bars, tables. Standard library only.

A run is a dict with these keys:

- who (a key of TITLES), dtype, ranks, threads
- micro_batches, those of all ranks in a step (one for each rank, if the key is missing)
- ms and losses, one value for each step (None: not finite)
- first_forward_s and first_step_s, counted from the start of its processes
- cpu_s_per_step: CPU seconds of its processes after the first step, for each other step; None or missing if there is none
- pss_bytes, peer (versions) and device_bytes, which may be None

A run that was not made has "failed", the reason, instead of the keys of steps and memory.
"""
import json
import math
import statistics

from model_sizes import N_WARM_STEPS

N_LOSSES = 20  # losses that are compared
LOSS_BAR = 1e-4
TITLES = {
    'plain': 'zero-bench --plain', 'stage0': 'libzero, stage 0', 'stage1': 'libzero, stage 1', 'stage2': 'libzero, stage 2',
    'stage3': 'libzero, stage 3', 'tp': 'libzero, tp', 'pp': 'libzero, pp', 'torch': 'PyTorch, plain', 'ddp': 'PyTorch DDP', 'fsdp2': 'PyTorch FSDP2',
    'torch_tp': 'PyTorch tensor parallelism', 'torch_pp': 'PyTorch 1F1B', 'torch_pp_patched': 'PyTorch 1F1B, patched',
    'deepspeed1': 'DeepSpeed ZeRO-1', 'deepspeed2': 'DeepSpeed ZeRO-2', 'deepspeed3': 'DeepSpeed ZeRO-3', 'llmc': 'llm.c on the CPU',
}
OURS = ['plain', 'stage0', 'stage1', 'stage2', 'stage3', 'tp', 'pp']
TP = ['tp', 'torch_tp']
PP = ['pp', 'torch_pp', 'torch_pp_patched']

# ours, peer, figure, {dtype: the bar of ours / peer}. tokens_per_s has a minimum, the others a maximum. llm.c's
# runs are always f32. The ratio of pipelines is reported without a bar. The bars are for CPUs. On a GPU both sides
# use cuBLAS: the same ratios are then reported without a bar, and memory is that of the GPU.
BARS = [
    ('stage3', 'fsdp2', 'tokens_per_s', {'f32': 3.0, 'bf16': 3.0}), ('stage3', 'fsdp2', 'pss_gb', {'f32': 0.65, 'bf16': 0.75}),
    ('stage3', 'fsdp2', 'first_forward_s', {'f32': 0.1, 'bf16': 0.1}), ('stage0', 'ddp', 'tokens_per_s', {'f32': 2.2, 'bf16': 2.2}),
    ('plain', 'torch', 'tokens_per_s', {'f32': 2.0, 'bf16': 2.0}), ('plain', 'llmc', 'tokens_per_s', {'f32': 5.0, 'bf16': 10.0}),
    ('tp', 'torch_tp', 'tokens_per_s', {'f32': 2.0, 'bf16': 2.3}), ('pp', 'torch_pp', 'tokens_per_s', {}), ('pp', 'torch_pp_patched', 'tokens_per_s', {}),
]
# The bars of a Hugging Face folder's model.
FOLDER_BARS = [
    ('stage3', 'fsdp2', 'tokens_per_s', {'f32': 2.5, 'bf16': 2.3}), ('stage3', 'fsdp2', 'cpu_s_per_step', {}),
    ('stage3', 'fsdp2', 'pss_gb', {'f32': 0.65, 'bf16': 0.65}), ('stage3', 'fsdp2', 'first_forward_s', {}),
    ('plain', 'torch', 'tokens_per_s', {}), ('plain', 'torch', 'cpu_s_per_step', {}), ('stage0', 'ddp', 'tokens_per_s', {}),
]
NAMES = {'tokens_per_s': 'tokens/s', 'cpu_s_per_step': 'CPU seconds of a step', 'pss_gb': 'peak Pss', 'device_gb': "peak of the GPU's memory", 'first_forward_s': 'start to first forward'}


def spread(values):
    """The median, the lowest and the highest of some numbers."""
    return {'median': statistics.median(values), 'low': min(values), 'high': max(values)}


def micro_batches(run):
    return run.get('micro_batches', run['ranks'])


def tokens_per_s(run, batch, context):
    """Tokens per second of the run's median step, without its first ones, as zero-bench reports it."""
    ms = run['ms'][N_WARM_STEPS:] or run['ms']
    return micro_batches(run) * batch * context / statistics.median(ms) * 1e3


def loss_distance(losses, reference):
    """The largest relative difference of the first N_LOSSES losses, and the number of losses compared."""
    pairs = list(zip(losses, reference))[:N_LOSSES]
    if not pairs:
        return None, 0
    return max(abs(a - b) / abs(b) if a is not None and b else math.inf for a, b in pairs), len(pairs)


def n_compared(rows):
    """The number of losses compared, as text: "8", or "7 to 20" if rows differ."""
    counts = sorted({row['losses_compared'] for row in rows if row.get('losses_compared')})
    return ' to '.join(str(n) for n in (counts[:1] + counts[-1:] if len(counts) > 1 else counts)) or '0'


def json_line(row):
    """A line of strict JSON. Values that are not finite become null."""
    return json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}, allow_nan=False) + '\n'


def row_of(runs, batch, context):
    """The row for the runs of one program: {"who", "dtype", "ranks", "threads", "tokens_per_s": {"median", ...}, ...}."""
    row = {k: runs[0][k] for k in ('who', 'dtype', 'ranks', 'threads')}
    row['micro_batches'] = micro_batches(runs[0])
    made = [r for r in runs if not r.get('failed')]
    failures = [r['failed'] for r in runs if r.get('failed')]
    row['rounds'] = len(made)
    row['failed'] = failures[-1] if failures else None
    if not made:
        return row
    longest = max(made, key=lambda r: len(r['losses']))
    pss = [r['pss_bytes'] for r in made if r.get('pss_bytes')]
    cpu = [r['cpu_s_per_step'] for r in made if r.get('cpu_s_per_step')]
    device = [r['device_bytes'] for r in made if r.get('device_bytes')]
    row.update(tokens_per_s=spread([tokens_per_s(r, batch, context) for r in made]), pss_gb=max(pss) / 1e9 if pss else None,
               device_gb=max(device) / 1e9 if device else None,
               cpu_s_per_step=statistics.median(cpu) if cpu else None,
               first_forward_s=statistics.median(r['first_forward_s'] for r in made),
               first_step_s=statistics.median(r['first_step_s'] for r in made), losses=longest['losses'], peer=longest.get('peer'))
    return row


def add_distances(rows):
    """Adds to each row with losses their distance from the reference, our row with the same dtype and micro-batches."""
    for row in rows:
        same = [r for r in rows if r.get('losses') and (r['dtype'], r['micro_batches']) == (row['dtype'], row['micro_batches'])]
        reference = next((r for who in OURS for r in same if r['who'] == who), same[0] if same else None)
        if reference and row.get('losses'):
            row['loss_distance'], row['losses_compared'] = loss_distance(row['losses'], reference['losses'])
            row['loss_reference'] = reference['who']


def rows_of(runs, batch, context):
    """All rows, sorted by dtype, number of ranks, and order in TITLES."""
    keys = {(r['dtype'], r['ranks'], r['who']) for r in runs}
    order = sorted(keys, key=lambda k: (k[0] != 'f32', k[1], list(TITLES).index(k[2])))
    rows = [row_of([r for r in runs if (r['dtype'], r['ranks'], r['who']) == key], batch, context) for key in order]
    add_distances(rows)
    return rows


def bars_of(rows, wanted=BARS):
    """[name, ratio or distance, bar as text, whether it is met] for all rows that exist. Without a bar: '' and None."""
    found = {(r['who'], r['dtype']): r for r in rows if r.get('tokens_per_s')}
    answers = []
    for dtype in ('f32', 'bf16'):
        for ours, peer, what, bars in wanted:
            a, b = found.get((ours, dtype)), found.get((peer, 'f32' if peer == 'llmc' else dtype))
            if not a or not b or not a[what] or not b[what]:
                continue
            on_gpu = a['device_gb'] and b['device_gb']
            if on_gpu and what == 'pss_gb':
                what = 'device_gb'
            x, y = (v['median'] if isinstance(v, dict) else v for v in (a[what], b[what]))
            name = f'{dtype}: {TITLES[ours]} / {TITLES[peer]}, {NAMES[what]}'
            at_least = what == 'tokens_per_s'
            if on_gpu or dtype not in bars:
                answers.append([name, x / y, '', None])
                continue
            met = x / y >= bars[dtype] if at_least else x / y <= bars[dtype]
            answers.append([name, x / y, f'{"at least" if at_least else "at most"} {bars[dtype]:g}', met])
    for row in rows:
        if row['dtype'] == 'f32' and row['who'] not in OURS and row.get('loss_reference') in OURS:
            name = f'f32: losses of {TITLES[row["who"]]} from ours, relative, the first {row["losses_compared"]}'
            answers.append([name, row['loss_distance'], f'at most {LOSS_BAR:g}', row['loss_distance'] <= LOSS_BAR])
    return answers


def number(x, digits=3):
    """A number with this many significant digits, and with an exponent only if it is below 1e-3."""
    if x is None:
        return ''
    if x == 0 or abs(x) < 1e-3:
        return f'{x:.1e}' if x else '0'
    return f'{float(f"{x:.{digits}g}"):.10g}'


HEAD = ['', 'dtype', 'ranks x threads', 'tokens/s', 'low to high', 'rounds', 'CPU s/step', 'peak Pss, GB', 'to first forward, s', 'first step done, s', 'losses apart']


def cells(row):
    start = [TITLES[row['who']], row['dtype'], f'{row["ranks"]} x {row["threads"]}']
    if not row.get('tokens_per_s'):
        return start + [f'not run: {row["failed"]}'] + [''] * (len(HEAD) - 4)
    t = row['tokens_per_s']
    apart = ''
    if row.get('loss_reference') == row['who']:
        apart = 'reference'
    elif row.get('loss_distance') is not None:
        apart = number(row['loss_distance'], 2)
    memory = number(row['pss_gb']) + (f' (GPU {number(row["device_gb"])})' if row['device_gb'] else '')
    return start + [number(t['median']), f'{number(t["low"])} to {number(t["high"])}', str(row['rounds']), number(row['cpu_s_per_step']), memory,
                    number(row['first_forward_s']), number(row['first_step_s']), apart]


def text_table(lines):
    """Aligns lines of cells in columns; the first line is the head. A cell that only empty cells follow may be wider."""
    def is_last(line, i):
        return not any(line[i + 1:])
    widths = [max(len(line[i]) for line in lines if i == 0 or not is_last(line, i) or line is lines[0]) for i in range(len(lines[0]))]
    return '\n'.join('  '.join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines)


def markdown_table(lines):
    def line_of(line):
        return '| ' + ' | '.join(c.replace('|', '\\|') for c in line) + ' |'
    return '\n'.join([line_of(lines[0]), '|---' * len(lines[0]) + '|', *map(line_of, lines[1:])])


def bar_lines(rows, bars):
    words = {True: 'met', False: 'not met', None: ''}
    answers = [[name, number(x), bar, words[met]] for name, x, bar, met in bars_of(rows, bars)]
    return [['', 'measured', 'bar', ''], *answers] if answers else []


def loss_text(losses, i):
    if i >= len(losses):
        return ''
    return 'not finite' if losses[i] is None else f'{losses[i]:.6f}'


def losses_of(rows):
    """The losses of all rows side by side, for each dtype and number of micro-batches: [(title, lines of cells)]."""
    answers = []
    for key in dict.fromkeys((r['dtype'], r['micro_batches']) for r in rows):
        those = [r for r in rows if (r['dtype'], r['micro_batches']) == key and r.get('losses')]
        if those:
            n = min(N_LOSSES, max(len(r['losses']) for r in those))
            lines = [['step', *(TITLES[r['who']] for r in those)]]
            for i in range(n):
                lines.append([str(i + 1), *(loss_text(r['losses'], i) for r in those)])
            answers.append((f'{key[0]}, {key[1]} micro-batch{"es" if key[1] > 1 else ""} in a step', lines))
    return answers


def markdown(title, about, rows, bars=BARS):
    """The page as Markdown. about: the lines of about_lines in compare.py."""
    page = [f'# {title}', '', *(f'- {line}' for line in about), '', markdown_table([HEAD, *map(cells, rows)])]
    ratios = bar_lines(rows, bars)
    if ratios:
        page += ['', '## Bars', '', markdown_table(ratios)]
    if losses_of(rows):
        page += ['', '## Losses']
    for name, lines in losses_of(rows):
        page += ['', f'{name}:', '', markdown_table(lines)]
    return '\n'.join(page) + '\n'


def text(rows, bars=BARS):
    tables = [text_table([HEAD, *map(cells, rows)])]
    if bar_lines(rows, bars):
        tables.append(text_table(bar_lines(rows, bars)))
    return '\n\n'.join(tables)
