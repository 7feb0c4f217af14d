# SPDX-License-Identifier: Apache-2.0
"""The page of bench/report.sh: it holds what was measured, needs no other file, and a browser shows it
without a warning."""
import html.parser
import json
import os
import re
import shutil
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ET

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_program import ROOT, TEXT, ZERO_BENCH, ZERO_RUN, run  # noqa: E402

sys.path.insert(0, os.path.join(ROOT, 'bench', 'report'))
sys.dont_write_bytecode = True
import report_curves  # noqa: E402
import report_page  # noqa: E402
import report_timeline  # noqa: E402

PROGRAM = [sys.executable, '-B', os.path.join(ROOT, 'bench', 'report', 'report_page.py'), '--zero-bench', ZERO_BENCH, '--zero-run', ZERO_RUN, '--quick', '--data', TEXT]
PEERS = [{'who': 'PyTorch <FSDP2>', 'dtype': 'f32', 'tokens_per_s': 77, 'pss_gb': 2.3},
         {'who': 'ours', 'dtype': 'bf16', 'tokens_per_s': {'median': 351.4, 'low': 340, 'high': 363}, 'pss_gb': 1.49},
         {'who': 'broken', 'dtype': 'f32', 'failed': 'no such module'},
         {'who': 'broken once', 'dtype': 'f32', 'tokens_per_s': {'median': 12, 'low': 11, 'high': 13}, 'pss_gb': 1, 'failed': 'exit code 1'}]
SECTIONS = ['memory', 'losses', 'timeline', 'comm', 'peers', 'scale']
PICTURES = ['memory', 'losses', 'simulated', 'trained', 'comm', 'scale']
VOID = {'meta', 'link', 'br', 'img', 'hr'}


class Reader(html.parser.HTMLParser):
    """Collects matching tags by section, tables as lists of rows, everything that a browser would load, and
    ids."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sections, self.loads, self.ids, self.tables, self.texts = [], [], [], [], {}, {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids += [attrs['id']] if 'id' in attrs else []
        self.loads += [(tag, v) for k, v in attrs.items() if k in ('src', 'href', 'xlink:href', 'data', 'srcset') and not v.startswith('#')]
        if tag == 'section':
            self.sections.append(attrs['id'])
        if tag in ('td', 'th'):
            self.row.append('')
        if tag == 'tr':
            self.row = []
            self.tables.setdefault(self.sections[-1], []).append(self.row)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if self.open and self.open[-1] in ('td', 'th'):
            self.row[-1] += data
        if self.sections:
            self.texts[self.sections[-1]] = self.texts.get(self.sections[-1], '') + data


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.path, peers = (os.path.join(cls.folder.name, name) for name in ('page.html', 'peers.jsonl'))
        with open(peers, 'w', encoding='utf-8') as f:
            f.writelines(json.dumps(p) + '\n' for p in PEERS)
        done = run([*PROGRAM, '--out', cls.path, '--peers', peers])
        assert done.returncode == 0, done
        with open(cls.path, encoding='utf-8') as f:
            cls.text = f.read()
        with open(os.path.join(cls.folder.name, 'page.json'), encoding='utf-8') as f:
            cls.facts = json.load(f)
        cls.read = Reader(cls.text)
        cls.pictures = dict(zip(PICTURES, (ET.fromstring(svg) for svg in re.findall(r'<svg.*?</svg>', cls.text, re.DOTALL))))

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_sections(self):
        self.assertEqual(self.read.sections, SECTIONS)
        self.assertEqual(re.findall(r'<figure id="picture-(\w+)">', self.text), PICTURES)

    def test_it_needs_nothing_else(self):
        self.assertEqual(self.read.loads, [('link', 'data:,')])
        self.assertNotRegex(self.text, r'@import|url\(["\']?(?!#)|<script|<iframe|<img')
        self.assertNotIn(self.folder.name, self.text)
        self.assertEqual(len(self.read.ids), len(set(self.read.ids)))  # of all pictures together
        for reference in re.findall(r'(?:xlink:href=["\']|url\()#([^"\')]+)', self.text):
            self.assertIn(reference, self.read.ids)

    def test_pictures(self):
        self.assertEqual(len(self.pictures), len(PICTURES))
        for name, svg in self.pictures.items():
            left, top, width, height = map(float, svg.get('viewBox').split())
            self.assertEqual((left, top), (0, 0), name)
            self.assertGreater(min(width, height), 100, name)
            self.assertGreater(sum(e.tag.split('}')[1] in ('path', 'rect', 'polygon', 'circle') for e in svg.iter()), 5, name)

    def table(self, name):
        return self.read.tables[name]

    def test_memory(self):
        *stages, plain = self.facts['memory']
        head, *rows = self.table('memory')
        self.assertEqual(head, ['per rank', 'stage 0', 'stage 1', 'stage 2', 'stage 3', 'not wrapped'])
        found = {row[0]: row[1:] for row in rows}
        for key, text in report_page.CATEGORIES:
            want = [report_page.size(s['bytes'][key]) if s['bytes'][key] else '' for s in [*stages, plain]]
            self.assertEqual(found.get(text, [''] * 5), want)
        self.assertEqual(found['in physical memory (Pss), all of the process'], [report_page.size(s['peak_rss_bytes']) for s in [*stages, plain]])
        self.assertEqual(found['planned'], found['allocated'])
        drawn = [''.join(t.itertext()) for t in self.pictures['memory'].iter() if t.tag.endswith('}text')]
        for s in [*stages, plain]:  # zero-bench writes them as the page does
            self.assertIn(report_page.size(s['peak_rss_bytes']), [t.strip() for t in drawn])
        self.assertIn(report_page.size(2 * stages[3]['peak_rss_bytes']), self.read.texts['memory'])

    def test_losses(self):
        runs = self.facts['losses']
        self.assertEqual([len(r['losses']) for r in runs], [6] * 4)
        self.assertEqual(len({r['state_sha256'] for r in runs}), 1)
        for said in ['All losses are the same bits', runs[0]['state_sha256'], f'{runs[0]["losses"][0]:.4f}', f'{runs[0]["losses"][-1]:.4f}']:
            self.assertIn(said, self.read.texts['losses'])

    def test_timelines(self):
        """There is one rectangle per event, as wide as the event was long."""
        for name, begun in (('simulated', 4), ('trained', 9)):  # units
            svg, facts = self.pictures[name], self.facts['timeline'][name]
            rects = [r for r in svg.iter() if r.get('class')]
            for kind, n in facts['events'].items():
                self.assertEqual(sum(r.get('class') == kind for r in rects), n)
            self.assertEqual(facts['events']['backward'], begun)
            self.assertEqual(facts['events']['reduce_scatter'], begun)
        per_ms = (report_timeline.WIDTH - report_timeline.LEFT - 10) / self.facts['timeline']['simulated']['ms']
        compute = sum(float(r.get('width')) for r in self.pictures['simulated'].iter() if r.get('class') in ('forward', 'backward'))
        self.assertAlmostEqual(compute / per_ms, self.facts['simulated']['compute_ms'], delta=0.1)
        self.assertIn(f'{self.facts["simulated"]["exposed_ms"]:.2f} ms', self.read.texts['timeline'])

    def test_comm(self):
        measured = [r for r in self.facts['comm'] if r['event'] == 'row' and r['limit']]
        _, *rows = self.table('comm')
        self.assertEqual(len(rows), len(measured))
        self.assertEqual({r['op'] for r in measured}, {'all_gather', 'reduce_scatter'})
        for row, r in zip(rows, measured):
            self.assertEqual(row, [r['op'].replace('_', '-'), 'shm', report_page.size(r['bytes']), f'{r["busbw"]:.2f}', f'{r["limit"]:.2f}',
                                   f'{100 * r["of_limit"]:.0f}%', '0'])

    def test_peers(self):
        self.assertEqual(self.facts['peers'], PEERS)
        self.assertEqual([row[:5] for row in self.table('peers')[1:]],
                         [['PyTorch <FSDP2>', 'f32', '77', '', '2.30'], ['ours', 'bf16', '351', '340 to 363', '1.49'],
                          ['broken', 'f32', 'failed: no such module', '', ''], ['broken once', 'f32', '12', '11 to 13', '1.00']])

    def test_without_peers(self):
        without = Reader(report_page.page({**self.facts, 'peers': None}, {name: '' for name in PICTURES}))
        self.assertIn('sh bench/peers/run.sh', without.texts['peers'])
        self.assertNotIn('peers', without.tables)

    def test_what_is_not_the_same_is_called_so(self):
        facts = json.loads(json.dumps(self.facts))
        facts['losses'][2]['losses'][3] += 1e-9
        said = Reader(report_page.page(facts, {name: '' for name in PICTURES})).texts['losses']
        self.assertIn('They differ', said)
        self.assertNotIn('same bits', said)

    def test_scale(self):
        """There is one point per number of GPUs and kind of sharding, higher for a larger share. The table
        has the projected values."""
        points = [c for c in self.pictures['scale'] if c.tag.endswith('circle')]
        rows = [r for hybrid in report_page.SCALE_CURVES for r in self.facts['scale ' + hybrid]]
        self.assertEqual(len(points), len(rows))
        heights = [(r['mfu'], float(c.get('cy'))) for r, c in zip(rows, points)]
        bottom, top = (report_curves.svg({'x': [(8, 0), (16, 1)]}).split('cy="')[k].split('"')[0] for k in (1, 2))
        for share, at in heights:
            self.assertAlmostEqual(at, float(bottom) + share * (float(top) - float(bottom)), delta=0.1)
        self.assertEqual(len(self.read.tables['scale']) - 1, len(report_page.SCALE_CURVES) * len(report_page.SCALE_IN_TABLE))
        last = self.facts['scale hfsdp'][-1]
        self.assertEqual(self.read.tables['scale'][-1][:3], ['HFSDP', '16384', f'{last["step_ms"]:.0f}'])
        self.assertEqual(self.read.tables['scale'][-1][4], f'{100 * last["mfu"]:.1f}%')

    def test_a_browser(self):
        """The browser's console is empty, and every picture has a size."""
        browser = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
        if not browser:
            self.skipTest('no chromium here: apt-get install chromium')
        asks = ('<script>addEventListener("load", () => { document.title = JSON.stringify([...document.querySelectorAll("svg")].map(s => {'
                ' const r = s.getBoundingClientRect(), b = s.getBBox(); return [r.width, r.height, b.width, b.height]; })); });</script>')
        copy = os.path.join(self.folder.name, 'asked.html')
        with open(copy, 'w', encoding='utf-8') as f:
            f.write(self.text.replace('</body>', asks + '</body>'))
        done = run([browser, '--headless', '--no-sandbox', '--disable-gpu', '--enable-logging=stderr', '--host-resolver-rules=MAP * ~NOTFOUND',
                    f'--user-data-dir={self.folder.name}/profile', '--window-size=1100,3000', '--dump-dom', 'file://' + copy], timeout=100)
        self.assertEqual(done.returncode, 0, done.stderr[-2000:])
        self.assertEqual([line for line in done.stderr.splitlines() if 'CONSOLE' in line], [])
        sizes = json.loads(re.search(r'<title>(\[\[.*?\]\])</title>', done.stdout)[1])
        self.assertEqual(len(sizes), len(PICTURES))
        for size in sizes:
            self.assertGreater(min(size), 50, sizes)


class Wrong(unittest.TestCase):
    def test_peers_that_are_no_json(self):
        with tempfile.TemporaryDirectory() as folder:
            peers = os.path.join(folder, 'peers')
            with open(peers, 'w', encoding='utf-8') as f:
                f.write('who: me\n')
            with self.assertRaisesRegex(report_page.Failed, 'does not hold JSON lines'):
                report_page.read_peers(peers)
            self.assertIsNone(report_page.read_peers(None))

    def test_peers_that_are_not_there(self):
        """Reported before anything is run."""
        with tempfile.TemporaryDirectory() as folder:
            page, none = os.path.join(folder, 'page.html'), os.path.join(folder, 'none')
            done = run([*PROGRAM, '--out', page, '--peers', none])
            self.assertEqual((done.returncode, done.stdout, done.stderr), (1, '', f'report: --peers: {none}: No such file or directory\n'))
            self.assertFalse(os.path.exists(page))

    def test_report_sh_gives_peers_that_are_there(self):
        """Uses the peers of the build folder if there are any, and then those of its caller."""
        with tempfile.TemporaryDirectory() as folder:
            for path in ('.ci/install.sh', 'build/build.ninja', 'bench/report/report_page.py', 'bin/meson'):
                os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
            for path, text in [('.ci/install.sh', ''), ('build/build.ninja', ''), ('bin/meson', '#!/bin/sh\n'),
                               ('bench/report/report_page.py', 'import sys\nprint(*sys.argv[1:], sep="\\n")\n')]:
                with open(os.path.join(folder, path), 'w', encoding='utf-8') as f:
                    f.write(text)
            os.chmod(os.path.join(folder, 'bin', 'meson'), 0o755)
            shutil.copy(os.path.join(ROOT, 'bench', 'report.sh'), os.path.join(folder, 'bench'))
            peers = os.path.join(os.path.realpath(folder), 'build', 'peers', 'rows.jsonl')
            for there, args, given in [(False, [], []), (False, ['--peers', 'x'], ['x']), (True, [], [peers]), (True, ['--peers', 'x'], [peers, 'x'])]:
                if there:
                    os.makedirs(os.path.dirname(peers), exist_ok=True)
                    open(peers, 'w', encoding='utf-8').close()
                done = run(['sh', os.path.join(os.path.realpath(folder), 'bench', 'report.sh'), *args],
                           env={'PATH': os.path.join(folder, 'bin') + os.pathsep + os.environ['PATH']})
                self.assertEqual((done.returncode, done.stderr), (0, ''))
                words = done.stdout.splitlines()
                self.assertEqual([words[i + 1] for i, w in enumerate(words) if w == '--peers'], given)

    def test_a_run_that_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            page = os.path.join(folder, 'page.html')
            done = run([*PROGRAM, '--out', page], env={'ZERO_STAGE': '3', 'PATH': '/nonexistent'})  # a folder without gnuplot
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr.splitlines()[-1], r'^report: zero-bench memory .*: exit code 1$')
            self.assertFalse(os.path.exists(page))


if __name__ == '__main__':
    unittest.main()
