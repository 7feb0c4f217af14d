#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes one self-contained HTML page of fresh runs on this machine. bench/report.sh calls it. The page shows memory
and losses of all stages, a timeline of what overlaps, communication against its limits, peers if they were measured,
and projections to thousands of GPUs."""
import argparse
import datetime
import html
import json
import os
import re
import subprocess
import sys
import tempfile

import report_curves
import report_timeline

FULL = {
    'memory': ['--ranks=4', '--model=gpt2-124M', '--dtype=bf16', '--context=64', '--batch=1', '--steps=2', '--fit=free'],
    'losses': ['--ranks=4', '--model=gpt2-nano', '--steps=120'],
    'simulated': ['--world=16', '--units=8', '--far=100'],
    'trained': ['--model=gpt2-nano', '--steps=6', '--layers=8', '--batch=8'],
    'comm': ['--bytes=1Ki:64Mi'],
}
QUICK = {
    'memory': ['--ranks=2', '--layers=8', '--heads=2', '--channels=64', '--context=16', '--batch=1', '--steps=1'],
    'losses': ['--ranks=2', '--layers=8', '--heads=2', '--channels=32', '--context=16', '--batch=2', '--steps=6'],
    'simulated': ['--world=2', '--units=4'],
    'trained': ['--layers=8', '--heads=2', '--channels=32', '--context=16', '--batch=2', '--steps=4'],
    'comm': ['--bytes=4Ki:64Ki', '--rounds=3'],
}
SCALE_CURVES = {'none': 'stage 3', 'hsdp': 'HSDP, a copy a host', 'hfsdp': 'HFSDP'}
SCALE_OPTIONS = {'none': [], 'hsdp': ['--dp-replicate=auto'], 'hfsdp': ['--dp-replicate=auto', '--hybrid=hfsdp']}
SCALE_WORLDS = [8 << i for i in range(12)]
SCALE_IN_TABLE = (8, 64, 512, 4096, 16384)
CATEGORIES = [('param_shards', 'parameters, sharded at stage 3'), ('param_slots', 'gathered parameters'), ('grad_shards', 'gradient shards'),
              ('grad_slots', 'gradients as backward writes them'), ('grad_sums', 'gradient sums'), ('grad_gathered', 'gathered gradients'),
              ('master', 'fp32 master weights'), ('moments', 'optimizer moments'), ('snapshot', 'snapshot'), ('comm', 'communicators'),
              ('exchange', 'exchange')]
CSS = """
:root { --ink: #1c2430; --soft: #5b6675; --line: #dfe4ea; --mark: #08519c; }
body { margin: 0; background: #f4f6f8; color: var(--ink); font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.8rem; margin: 0; } h2 { font-size: 1.25rem; margin: 0 0 .4rem; }
.about { color: var(--soft); margin: .3rem 0 1.5rem; }
section { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 1.2rem 1.4rem; margin: 0 0 1.2rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 1rem; margin: 0 0 1.2rem; }
.card { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1.1rem; }
.card b { display: block; font-size: 1.5rem; color: var(--mark); line-height: 1.2; } .card span { color: var(--soft); font-size: .9rem; }
figure { margin: .8rem 0 0; } figure svg { width: 100%; height: auto; display: block; } figcaption, .note { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; width: 100%; margin: .8rem 0 0; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: right; } th:first-child, td:first-child { text-align: left; }
thead th { color: var(--soft); font-weight: 600; } tr.sum td { font-weight: 700; }
code { background: #eef1f4; padding: .05rem .3rem; border-radius: 4px; font-size: .9em; overflow-wrap: anywhere; }
"""


def size(n):
    """Bytes with three digits and decimal units, as zero-bench writes them."""
    units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB']
    while abs(n) >= 999.5 and len(units) > 1:
        n /= 1000
        units.pop(0)
    digits = 0 if units[0] == 'B' or abs(n) >= 99.95 else 1 if abs(n) >= 9.995 else 2
    return f'{n:.{digits}f} {units[0]}'


def number(x, digits=2):
    return '' if x is None else f'{x:.{digits}f}'


class Failed(Exception):
    pass


class Runs:
    """Runs zero-bench on this machine, and keeps every command for the page."""

    def __init__(self, o):
        self.o, self.sizes, self.commands = o, QUICK if o.quick else FULL, {}
        env = {k: v for k, v in os.environ.items() if not k.startswith('ZERO_') and k not in ('RANK', 'WORLD_SIZE')}
        self.env = env

    def lines(self, what, *args, ranks=0):
        words = [self.o.zero_bench, *args, *self.sizes.get(what, []), *(['--data', self.o.data] if self.o.data and args[0] == 'train' else [])]
        if ranks:
            words = [self.o.zero_run, '-n', str(ranks), '--raw', *words]
        shown = [os.path.basename(w) if w in (self.o.zero_bench, self.o.zero_run) else w for w in words if not w.startswith(self.o.work)]
        shown = [w for w in shown if w not in ('--plot', '--plot-loss', '--trace', '--json')]
        self.commands[what] = ' '.join(shown)
        print(f'{self.commands[what]}', file=sys.stderr, flush=True)
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=self.env, check=False)
        if done.returncode:
            raise Failed(f'report: {self.commands[what]}: exit code {done.returncode}')
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{')]


def inline(path, prefix):
    """Prepares an SVG of zero-bench for a page with others: makes its ids unique, and removes its size so that it scales."""
    with open(path, encoding='utf-8') as f:
        svg = f.read()
    svg = svg[svg.index('<svg'):]
    svg = re.sub(r'\bid=(["\'])', rf'id=\1{prefix}-', svg)
    svg = re.sub(r'(xlink:href=["\']#|url\(#)', rf'\1{prefix}-', svg)
    head, rest = svg.split('>', 1)
    return re.sub(r'\s(width|height)="[^"]*"', '', head) + '>' + rest


def machine():
    with open('/proc/cpuinfo', encoding='utf-8') as f:
        found = re.search(r'^model name\s*: (.*)$', f.read(), re.MULTILINE)
    with open('/proc/meminfo', encoding='utf-8') as f:
        total = re.search(r'^MemTotal:\s+(\d+) kB', f.read(), re.MULTILINE)
    return {'cpu': found[1] if found else os.uname().machine, 'cores': len(os.sched_getaffinity(0)),
            'memory_bytes': int(total[1]) * 1024 if total else None}


def read_peers(path):
    if not path:
        return None
    try:
        with open(path, encoding='utf-8') as f:
            return [json.loads(line) for line in f if line.strip()]
    except OSError as e:
        raise Failed(f'report: --peers: {path}: {e.strerror}') from e
    except ValueError as e:
        raise Failed(f'report: --peers: {path} does not hold JSON lines: {e}') from e


def collect(o):
    """Runs everything. Returns the numbers of the page and its pictures."""
    runs, facts, pictures = Runs(o), {}, {}

    def at(name):
        return os.path.join(o.work, name)
    facts['date'] = datetime.datetime.now().isoformat(' ', 'minutes')
    facts['machine'] = machine()
    facts['peers'] = read_peers(o.peers)  # before the long measurements
    facts['memory'] = runs.lines('memory', 'memory', '--plain', '--json', '--plot', at('memory.svg'))
    facts['losses'] = runs.lines('losses', 'memory', '--json', '--plot-loss', at('losses.svg'))
    facts['simulated'], = runs.lines('simulated', 'verify', '--time', '--json', '--trace', at('simulated.json'))
    facts['trained'] = runs.lines('trained', 'train', '--stage=3', '--json', '--trace', at('trained.json'), ranks=2)[-1]
    facts['comm'] = runs.lines('comm', 'comm', '--backend=shm', '--op=all_gather,reduce_scatter', '--json', '--plot', at('comm.svg'), ranks=2)
    for hybrid in SCALE_CURVES:
        facts['scale ' + hybrid] = runs.lines('scale ' + hybrid, 'scale', '--json', *SCALE_OPTIONS[hybrid], '--worlds=' + ','.join(map(str, SCALE_WORLDS)))
    facts['commands'] = runs.commands
    for name in ('memory', 'losses', 'comm'):
        pictures[name] = inline(at(name + '.svg'), name)
    facts['timeline'] = {}
    for name in ('simulated', 'trained'):
        timeline = report_timeline.read(at(name + '.json'))
        facts['timeline'][name] = timeline.facts()
        pictures[name] = timeline.svg()
    pictures['scale'] = report_curves.svg({title: [(r['world'], r['mfu']) for r in facts['scale ' + hybrid]] for hybrid, title in SCALE_CURVES.items()})
    return facts, pictures


def table(head, rows, last_is_sum=0):
    """An HTML table. Cells are text; the last rows may be sums."""
    out = ['<table><thead><tr>', *(f'<th>{html.escape(c)}</th>' for c in head), '</tr></thead><tbody>']
    for i, row in enumerate(rows):
        out += [f'<tr{" class=sum" if i >= len(rows) - last_is_sum else ""}>', *(f'<td>{html.escape(c)}</td>' for c in row), '</tr>']
    return ''.join(out) + '</tbody></table>'


def figure(name, pictures, caption):
    return f'<figure id="picture-{name}">{pictures[name]}<figcaption>{caption}</figcaption></figure>'


def section(name, title, *parts):
    return f'<section id="{name}"><h2>{html.escape(title)}</h2>{"".join(parts)}</section>\n'


def command(facts, name):
    return f'<p class="note"><code>{html.escape(facts["commands"][name])}</code></p>'


def saved(facts):
    """The shares of memory that stage 3 saves, compared with stage 0 and with as many plain programs as ranks."""
    zero, *_, three, plain = facts['memory']
    return 1 - three['peak_rss_bytes'] / zero['peak_rss_bytes'], 1 - three['peak_rss_bytes'] / plain['peak_rss_bytes']


def memory_section(facts, pictures):
    *stages, plain = facts['memory']
    columns = [*stages, plain]
    rows = [[text, *(size(c['bytes'][key]) if c['bytes'][key] else '' for c in columns)] for key, text in CATEGORIES
            if any(c['bytes'][key] for c in columns)]
    rows.append(['planned', *(size(c['planned_bytes']['total']) for c in columns)])
    rows.append(['allocated', *(size(c['bytes']['total']) for c in columns)])
    rows.append(['in physical memory (Pss), all of the process', *(size(c['peak_rss_bytes']) for c in columns)])
    n = stages[0]['ranks']
    text = (f'<p>{html.escape(stages[0]["model"])}, {stages[0]["n_params"] / 1e6:.2f} million parameters. All {n} ranks together hold '
            f'<b>{size(n * stages[3]["peak_rss_bytes"])}</b> at stage 3, and {size(n * stages[0]["peak_rss_bytes"])} at stage 0; {n} programs without '
            f'libzero, each measured at {size(plain["peak_rss_bytes"])}, would hold {size(n * plain["peak_rss_bytes"])}.</p>')
    return section('memory', 'Memory per stage', text, figure('memory', pictures, 'Of one rank, measured while it trains.'),
                   table(['per rank', *(f'stage {s["stage"]}' for s in stages), 'not wrapped'], rows, 3), command(facts, 'memory'))


def losses_section(facts, pictures):
    states = {s['state_sha256'] for s in facts['losses']}
    same = len(states) == 1 and len({tuple(s['losses']) for s in facts['losses']}) == 1
    first, last = facts['losses'][0]['losses'][0], facts['losses'][0]['losses'][-1]
    text = (f'<p>{len(facts["losses"])} runs of {len(facts["losses"][0]["losses"])} steps, one at each stage: the loss goes from {number(first, 4)} to '
            f'{number(last, 4)}. ' + ('<b>All losses are the same bits</b>, and so are weights and optimizer state at the end: sha256 '
                                      f'<code>{states.pop()}</code>.' if same else '<b>They differ</b>, which they should not on a CPU.') + '</p>')
    return section('losses', 'Losses of stages 0 to 3', text, figure('losses', pictures, 'Four curves, the later ones narrower.'), command(facts, 'losses'))


def timeline_section(facts, pictures):
    s, t = facts['simulated'], facts['timeline']
    text = (f'<p>A step on {s["world"]} simulated GPUs takes {number(s["step_ms"])} ms, of which compute is {number(s["compute_ms"])} ms and '
            f'<b>{number(s["exposed_ms"])} ms</b> are exposed: communication and the optimizer that no compute hides. The schedule is the '
            'real one, on a virtual clock; nobody is late there, and no link congested. It begins with the optimizer of the step before, whose end the first '
            'gathers wait for.</p>')
    real = (f'<p>The same on this machine, 2 ranks on {facts["machine"]["cores"]} cores, measured: the model waits '
            f'{number(t["trained"]["waits_ms"])} ms of a step of {number(t["trained"]["ms"])} ms. Where ranks are as many as cores, what runs beside '
            'compute takes its time from it.</p>')
    return section('timeline', 'What overlaps', text, figure('simulated', pictures, 'Rank 0, one step, simulated.'), command(facts, 'simulated'), real,
                   figure('trained', pictures, 'Rank 0, one step, measured here.'), command(facts, 'trained'))


def comm_rows(facts):
    return [r for r in facts['comm'] if r.get('event') == 'row' and r['limit']]


def comm_section(facts, pictures):
    rows = [[r['op'].replace('_', '-'), r['backend'], size(r['bytes']), number(r['busbw']), number(r['limit']), f'{100 * r["of_limit"]:.0f}%', str(r['wrong'])]
            for r in comm_rows(facts)]
    text = ('<p>Collectives over shared memory, beside what this machine can copy (for an all-gather) and add (for a reduce-scatter), measured in the same '
            'rounds. <i>Wrong</i> counts elements that are not what they should be.</p>')
    return section('comm', 'Communication against its limits', text, figure('comm', pictures, 'Dashed: the limits.'),
                   table(['', 'backend', 'region', 'GB/s', 'limit', 'of it', 'wrong'], rows), command(facts, 'comm'))


def middle(x):
    """Returns a number, or the median of {"median", "low", "high"}."""
    return x['median'] if isinstance(x, dict) else x


def peers_section(facts):
    if not facts['peers']:
        return section('peers', 'Peers', '<p>Not measured here. <code>sh bench/peers/run.sh</code> trains the same model by PyTorch, DDP, FSDP2 and others, '
                       'and the next report shows its rows; or give a file of them by <code>--peers FILE</code>.</p>')
    rows = []
    for p in facts['peers']:
        speed = p.get('tokens_per_s')  # from the rounds that did not fail
        spread = f'{speed["low"]:.0f} to {speed["high"]:.0f}' if isinstance(speed, dict) else ''
        told = 'failed: ' + str(p['failed'])[:80] if p.get('failed') and not speed else number(middle(speed), 0)
        rows.append([str(p['who']), str(p.get('dtype', '')), told, spread, number(p.get('pss_gb')), number(middle(p.get('first_forward_s')))])
    return section('peers', 'Peers', '<p>The same model, data and steps.</p>',
                   table(['', 'dtype', 'tokens/s', 'from, to', 'Pss, GB', 'start to first forward, s'], rows))


def scale_section(facts, pictures):
    rows = [[title, str(r['world']), number(r['step_ms'], 0), number(r['tokens_per_s_per_gpu'], 0), f'{100 * r["mfu"]:.1f}%', number(r['exposed_ms'], 1),
             size(r['memory_bytes'])] for hybrid, title in SCALE_CURVES.items() for r in facts['scale ' + hybrid] if r['world'] in SCALE_IN_TABLE]
    about = facts['scale none'][0]
    return section('scale', 'To thousands of GPUs, on paper',
                   f'<p>{html.escape(about["model"])} on {html.escape(about["machine"])}, by the same schedule on a virtual clock: no '
                   'stragglers, no congestion, links and products at what data sheets say.</p>',
                   figure('scale', pictures, 'The share of the GPUs’ products that a step reaches (MFU).'),
                   table(['', 'GPUs', 'step, ms', 'tokens/s per GPU', 'MFU', 'exposed, ms', 'memory of each'], rows), command(facts, 'scale none'))


def cards(facts):
    of_zero, of_plain = saved(facts)
    largest = max((r for r in comm_rows(facts) if r['op'] == 'all_gather'), key=lambda r: r['bytes'])
    all_same = len({s['state_sha256'] for s in facts['losses']}) == 1
    hidden = 1 - facts['simulated']['exposed_ms'] / facts['simulated']['step_ms']
    found = [(f'{100 * of_zero:.0f}%', 'less memory at stage 3 than at stage 0, measured'), (f'{100 * of_plain:.0f}%', 'less than programs without libzero'),
             ('same bits' if all_same else 'differ', 'weights and optimizer state after training at stages 0 to 3'),
             (f'{100 * hidden:.1f}%', f'of a step is compute, on {facts["simulated"]["world"]} simulated GPUs'),
             (f'{100 * largest["of_limit"]:.0f}%', f'of the machine’s limit, an all-gather of {size(largest["bytes"])}')]
    return '<div class="cards">' + ''.join(f'<div class="card"><b>{b}</b><span>{html.escape(t)}</span></div>' for b, t in found) + '</div>\n'


def page(facts, pictures):
    m = facts['machine']
    about = f'{m["cpu"]}, {m["cores"]} cores, {size(m["memory_bytes"] or 0)}; {facts["date"]}'
    return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>libzero on this machine</title><link rel="icon" href="data:,"><style>{CSS}</style></head><body><main>\n'
            f'<h1>libzero on this machine</h1><p class="about">{html.escape(about)}</p>\n'
            + cards(facts) + memory_section(facts, pictures) + losses_section(facts, pictures) + timeline_section(facts, pictures)
            + comm_section(facts, pictures) + peers_section(facts) + scale_section(facts, pictures) + '</main></body></html>\n')


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--zero-bench', required=True)
    p.add_argument('--zero-run', required=True)
    p.add_argument('--out', required=True, help='the page; its numbers go beside it, into .json')
    p.add_argument('--peers', help='JSON lines {"who":, "dtype":, "tokens_per_s":, "pss_gb":}')
    p.add_argument('--data', help='text to train on (the C headers)')
    p.add_argument('--quick', action='store_true', help='small models and few steps')
    o = p.parse_args()
    o.zero_bench, o.zero_run = os.path.abspath(o.zero_bench), os.path.abspath(o.zero_run)
    try:
        with tempfile.TemporaryDirectory() as o.work:
            facts, pictures = collect(o)
    except Failed as e:
        print(e, file=sys.stderr)
        return 1
    with open(o.out, 'w', encoding='utf-8') as f:
        f.write(page(facts, pictures))
    with open(os.path.splitext(o.out)[0] + '.json', 'w', encoding='utf-8') as f:
        json.dump(facts, f, indent=1)
    print(f'The page is {o.out}.')
    return 0


if __name__ == '__main__':
    sys.exit(main())
