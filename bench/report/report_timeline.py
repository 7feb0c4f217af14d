# SPDX-License-Identifier: Apache-2.0
"""Draws one step of a rank's timeline as an SVG picture: one lane each for compute, gathers and reductions."""
import html
import json

# The kinds of events that are drawn, with lane, colour and label.
LANES = ['compute', 'gather', 'reduce']
KINDS = {'forward': (0, '#6baed6', 'forward'), 'backward': (0, '#08519c', 'backward'), 'wait': (0, '#cb181d', 'the model waits'),
         'all_gather': (1, '#fd8d3c', 'all-gather'), 'reduce_scatter': (2, '#756bb1', 'reduce-scatter'), 'update': (2, '#31a354', 'optimizer')}
WIDTH, LEFT, LANE, TOP = 900, 70, 46, 34


class Timeline:
    def __init__(self, events, step):
        self.events = sorted((e for e in events if e['args'].get('step') == step), key=lambda e: e['ts'])
        self.begin = min(e['ts'] for e in self.events)
        self.end = max(e['ts'] + e['dur'] for e in self.events)

    def of(self, *kinds):
        return [e for e in self.events if e['kind'] in kinds]

    def facts(self):
        return {'ms': (self.end - self.begin) / 1e3, 'waits_ms': sum(e['dur'] for e in self.of('wait')) / 1e3,
                'events': {kind: len(self.of(kind)) for kind in KINDS}}

    def axis(self):
        """Yields up to about eight round numbers of milliseconds."""
        span = (self.end - self.begin) / 1e3
        each = next(m * 10 ** p for p in range(-6, 9) for m in (1, 2, 5) if span / (m * 10 ** p) <= 9)
        at = 0
        while at * each <= span:
            yield at * each
            at += 1

    def svg(self):
        per_us = (WIDTH - LEFT - 10) / (self.end - self.begin)
        bottom = TOP + LANE * len(LANES)
        out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 40}" font-family="sans-serif" font-size="13">']
        shown = [k for k in KINDS if self.of(k)]
        for i, kind in enumerate(shown):
            _, colour, name = KINDS[kind]
            out.append(f'<rect x="{LEFT + 132 * i}" y="6" width="14" height="12" fill="{colour}"/><text x="{LEFT + 132 * i + 20}" y="17">{name}</text>')
        for ms in self.axis():
            x = LEFT + ms * 1e3 * per_us
            out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e3e7ec"/>'
                       f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" fill="#5b6675">{ms:g}</text>')
        out.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{bottom + 35}" text-anchor="middle" fill="#5b6675">milliseconds</text>')
        for i, lane in enumerate(LANES):
            out.append(f'<text x="{LEFT - 8}" y="{TOP + LANE * i + 28}" text-anchor="end">{lane}</text>')
        for e in self.events:
            lane, colour, name = KINDS[e['kind']]
            x, width = LEFT + (e['ts'] - self.begin) * per_us, max(e['dur'] * per_us, 0.4)
            label = f'{name}{"" if e["args"].get("unit", -1) < 0 else " of unit " + str(e["args"]["unit"])}: {e["dur"] / 1e3:.3f} ms'
            out.append(f'<rect class="{e["kind"]}" x="{x:.2f}" y="{TOP + LANE * lane + 8}" width="{width:.2f}" height="{LANE - 16}" fill="{colour}" '
                       f'stroke="white" stroke-width="0.4"><title>{html.escape(label)}</title></rect>')
        return '\n'.join(out) + '</svg>'


def read(path):
    """Reads rank 0's last step but one from a Chrome trace by zero_trace_write or zero-bench verify.

    Both have the same events for a step. The first step differs from the others, and no gathers follow the last one.
    """
    with open(path, encoding='utf-8') as f:
        trace = json.load(f)
    events = [dict(e, kind=e['name'].split()[0]) for e in (trace['traceEvents'] if isinstance(trace, dict) else trace)
              if e['ph'] == 'X' and e.get('pid', 0) == 0]
    events = [e for e in events if e['kind'] in KINDS and 'step' in e['args']]
    steps = sorted({e['args']['step'] for e in events if e['kind'] == 'backward'})
    return Timeline(events, steps[-2] if len(steps) > 1 else steps[-1])
