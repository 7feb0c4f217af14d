# SPDX-License-Identifier: Apache-2.0
"""Tests the demonstration, bench/run.sh, and .ci/install.sh, which installs its packages: what they print and
do if packages, root or gnuplot are missing. Stand-ins that print their arguments replace the programs that
install, build and train.
"""
import os
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TOOLS = 'awk cat dirname grep mkdir sed sh tail'.split()
ONE, TWO = 64500000, 27600000  # bytes of the two packages that represent all
APT_GET = f'''#!/bin/sh
echo "apt-get $*" >>"$CALLS"
case " $* " in
*' update '*) exit "${{UPDATE:-0}}" ;;
*' -s '*) printf 'Inst one (1)\\nInst two (1)\\nConf one (1)\\n' ;;
*' --print-uris '*) printf "'http://x/one.deb' one.deb {ONE} SHA256:0\\n'http://x/two.deb' two.deb {TWO} SHA256:0\\n" ;;
*) echo 'Selecting previously unselected package one.' && echo 'W: a line' >&2 && exit "${{INSTALL:-0}}" ;;
esac
'''
DPKG_QUERY = '''#!/bin/sh
for package; do :; done
case " $MISSING " in *" $package "*) exit 1 ;; esac
echo 'install ok installed'
'''
SUDO = '#!/bin/sh\necho "sudo $*" >>"$CALLS"\n[ "$1" != -v ] || exit "${REFUSED:-0}"\nexec "$@"\n'
MESON = '#!/bin/sh\necho "meson $*" >>"$CALLS"\n'
SAYS_ALL = '#!/bin/sh\necho "${0##*/} $*"\n'


def packages(name):
    with open(os.path.join(ROOT, '.ci', name), encoding='utf-8') as f:
        return re.sub(r'#.*', '', f.read()).split()


class Demonstration(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tree, self.bin, self.calls = (os.path.join(folder.name, name) for name in ('tree', 'bin', 'calls'))
        for name in os.listdir(os.path.join(ROOT, '.ci')):
            os.makedirs(os.path.join(self.tree, '.ci'), exist_ok=True)
            shutil.copy(os.path.join(ROOT, '.ci', name), os.path.join(self.tree, '.ci'))
        for name in 'run.sh', 'report.sh':
            os.makedirs(os.path.join(self.tree, 'bench'), exist_ok=True)
            shutil.copy(os.path.join(ROOT, 'bench', name), os.path.join(self.tree, 'bench'))
        os.mkdir(self.bin)
        for tool in TOOLS:
            os.symlink(shutil.which(tool), os.path.join(self.bin, tool))
        os.symlink(shutil.which('env'), os.path.join(self.bin, 'env'))
        self.program('id', '#!/bin/sh\necho "${USER_ID:-0}"\n')
        self.program('apt-get', APT_GET)
        self.program('dpkg-query', DPKG_QUERY)
        self.program('meson', MESON)
        self.program('gnuplot', SAYS_ALL)
        for name in 'zero/zero-run', 'bench/zero-bench':
            self.program(name, SAYS_ALL, os.path.join(self.tree, 'build'))

    def program(self, name, text, folder=None):
        path = os.path.join(folder or self.bin, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w', encoding='utf-8') as f:
            f.write(text)
        os.chmod(path, 0o755)

    def run_script(self, *command, **env):
        open(self.calls, 'w', encoding='utf-8').close()
        done = subprocess.run([os.path.join(self.bin, 'sh'), *command], cwd=self.tree, env={'PATH': self.bin, 'CALLS': self.calls, **env},
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        with open(self.calls, encoding='utf-8') as f:
            self.called = f.read().splitlines()
        return done

    def install(self, *lists, **env):
        return self.run_script('.ci/install.sh', *lists, **env)

    def log(self):
        with open(os.path.join(self.tree, 'build', 'packages.log'), encoding='utf-8') as f:
            return f.read()

    # ---- .ci/install.sh ----

    def test_nothing_is_missing(self):
        done = self.install()
        self.assertEqual((done.returncode, done.stdout, done.stderr, self.called), (0, '', '', []))

    def test_says_what_comes_first(self):
        done = self.install(MISSING='gcc gnuplot-nox mpich')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertEqual(done.stdout, 'installing 2 packages, 92 MB to fetch: gcc gnuplot-nox\n')  # mpich belongs to the tests
        self.assertEqual([' update ' in f'{call} ' for call in self.called], [True, False, False, False])
        self.assertRegex(self.called[-1], r'^apt-get install -y .* gcc gnuplot-nox$')
        self.assertIn('Selecting previously unselected package', self.log())

    def test_lists_together(self):
        done = self.install('packages', 'packages-test', MISSING='gcc mpich')
        self.assertEqual((done.returncode, done.stdout), (0, 'installing 2 packages, 92 MB to fetch: gcc mpich\n'))

    def test_a_failure_shows_the_log(self):
        for env in {'UPDATE': '100'}, {'INSTALL': '100'}:
            done = self.install(MISSING='gcc', **env)
            self.assertEqual(done.returncode, 1)
            self.assertIn('failed; all that it printed is in build/packages.log', done.stderr)
        self.assertIn('W: a line', done.stderr)

    def test_sudo(self):
        self.program('sudo', SUDO)
        done = self.install(MISSING='gcc', USER_ID='1000')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertIn('sudo apt-get update -qq', self.called)

    def test_without_root(self):
        """Missing packages are named with their size, and the build goes on: the machine may have them from
        elsewhere."""
        for refused in None, '1':
            if refused:
                self.program('sudo', SUDO)
            done = self.install('packages', 'packages-test', MISSING='libuv1-dev gnuplot-nox g++', USER_ID='1000', REFUSED=refused or '0')
            self.assertEqual((done.returncode, done.stderr), (0, ''))
            first, *rest = done.stdout.splitlines()
            self.assertIn('Only root may install packages', first)
            self.assertEqual(rest, ['  libuv1-dev: the build stops', '  gnuplot-nox: no pictures (loss.svg, memory.svg), and no report page',
                                    '  g++: no tests of GPU code on the CPU'])
            self.assertFalse([call for call in self.called if 'apt-get' in call])

    def test_without_apt(self):
        os.unlink(os.path.join(self.bin, 'apt-get'))
        done = self.install()
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertIn('There is no apt-get here', done.stdout)
        self.assertEqual([line.split(':')[0].strip() for line in done.stdout.splitlines()[1:]], packages('packages'))

    def test_lists(self):
        """Each package is in one list, except those of the comparison and the tests. The demonstration's list
        has no package that only tests need."""
        demonstration, tests = packages('packages'), packages('packages-test')
        self.assertEqual(len(set(demonstration + tests)), len(demonstration + tests))
        self.assertFalse({name for name in demonstration if re.search(r'mpi|clang|iproute|cmocka|help2man|g\+\+', name)})
        with open(os.path.join(ROOT, 'test', 'run.sh'), encoding='utf-8') as f:
            self.assertRegex(f.read(), r'sh \.ci/install\.sh packages packages-test\b')

    # ---- bench/run.sh and bench/report.sh ----

    def test_demonstration(self):
        done = self.run_script('bench/run.sh', '5', MISSING='gnuplot-nox')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertRegex(done.stdout, r'(?s)^installing .*its text is the C headers of this machine.*zero-run .* --export build/gpt2-nano --seconds 5 --plot build/loss.svg\n'
                                      r'.*zero-bench memory .* --plot build/memory.svg\n.*Where to go next'
                                      r'.*zero-bench sample .* --import build/gpt2-nano .*\n$')
        for name in re.findall(r'^  (?:sh )?(\S+\.(?:sh|md))\b', done.stdout, re.MULTILINE):
            self.assertTrue(os.path.exists(os.path.join(ROOT, name)), name)

    def test_demonstration_without_gnuplot_and_root(self):
        os.unlink(os.path.join(self.bin, 'gnuplot'))
        done = self.run_script('bench/run.sh', '5', MISSING='gnuplot-nox', USER_ID='1000')
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertIn('There is no gnuplot: no pictures.', done.stdout)
        self.assertNotIn('--plot', done.stdout)
        self.assertIn('Where to go next', done.stdout)
        self.assertIn('meson compile -C build zero-bench zero-run', self.called)

    def test_report_without_gnuplot(self):
        os.unlink(os.path.join(self.bin, 'gnuplot'))
        done = self.run_script('bench/report.sh', MISSING='gnuplot-nox', USER_ID='1000')
        self.assertEqual((done.returncode, self.called), (1, []))
        self.assertIn('no report page', done.stderr)


if __name__ == '__main__':
    unittest.main()
