#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs into an empty folder, and builds and runs programs against the installed files, as a user would.
One program links the library. Another opens it by dlopen(), as Python, Julia and plug-ins do. No link of an
installed page may be dead.

    installed.py BUILD MPI MESON...

MPI is ompi or mpich, for which the build has a module, or none.
"""
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "comm", "mpi"))
import under_mpi  # noqa: E402

HEADERS = {"zero/zero.h", "zero/types.h", "zero/zero_config.h", "zero/zero_info.h", "zero/export.h"}
PROGRAMS = ("zero-run", "zero-bench")
PROGRAM = r"""
#include <zero/zero.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    float w[4] = {1, 2, 3, 4}, g[4], *param = w, *grad = g, back[4];
    struct zero_tensor tensor = {
        .name = "w", .param = (void **)&param, .grad = (void **)&grad, .shape = {4}, .dtype = ZERO_F32};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    char header[32];
    zero_ctx *z;
    cfg.stage = 1;
    cfg.optim.optimizer = ZERO_SGD;
    if (zero_wrap(&z, &tensor, 1, &cfg))
        return fprintf(stderr, "%s\n", zero_last_error()), 1;
    for (int i = 0; i < 4; i++)
        grad[i] = 0.5f;
    if (zero_step(z, 2.0f, NULL) || zero_read(z, 0, ZERO_VALUE_PARAM, 0, 4, back) || zero_unwrap(&z))
        return fprintf(stderr, "%s\n", zero_last_error()), 1;
    snprintf(header, sizeof header, "%d.%d.%d", ZERO_VERSION_MAJOR, ZERO_VERSION_MINOR, ZERO_VERSION_PATCH);
    if (strcmp(header, zero_version()) != 0)
        return fprintf(stderr, "header %s, library %s\n", header, zero_version()), 1;
    printf("%g %g %g %g\n", back[0], back[1], back[2], back[3]);
    return 0;
}
"""
# Closes the library and opens it again. Check mode makes the state that the library has once per process: a
# handler and a key.
OPENS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <zero/zero.h>

#define FIND(name) __typeof__(name) *my_##name = (__typeof__(name) *)dlsym(library, #name)

static int update(void *arg, const struct zero_update *u)
{
    (void)arg;
    for (int64_t i = 0; i < u->n; i++)
        u->master[i] -= u->lr * u->grad[i];
    return 0;
}

static int train(void *library)
{
    FIND(zero_wrap);
    FIND(zero_begin);
    FIND(zero_end);
    FIND(zero_step);
    FIND(zero_read);
    FIND(zero_unwrap);
    FIND(zero_last_error);
    float w[4] = {1, 2, 3, 4}, g[4], *param = w, *grad = g, back[4];
    struct zero_tensor tensor = {
        .name = "w", .param = (void **)&param, .grad = (void **)&grad, .shape = {4}, .dtype = ZERO_F32};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z;
    cfg.launch.world = 1;
    cfg.stage = 3;
    cfg.debug.check = 1;
    cfg.optim.update = update;
    if (my_zero_wrap(&z, &tensor, 1, &cfg) || my_zero_begin(z, 0, ZERO_FORWARD) || my_zero_end(z, 0, ZERO_FORWARD) ||
        my_zero_begin(z, 0, ZERO_BACKWARD))
        return fprintf(stderr, "%s\n", my_zero_last_error()), 1;
    for (int i = 0; i < 4; i++)
        grad[i] = 0.5f;
    if (my_zero_end(z, 0, ZERO_BACKWARD) || my_zero_step(z, 2.0f, NULL) ||
        my_zero_read(z, 0, ZERO_VALUE_PARAM, 0, 4, back) || my_zero_unwrap(&z))
        return fprintf(stderr, "%s\n", my_zero_last_error()), 1;
    printf("%g %g %g %g\n", back[0], back[1], back[2], back[3]);
    return 0;
}

int main(int argc, char **argv)
{
    (void)argc;
    for (int i = 0; i < 2; i++) {
        void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
        if (!library)
            return fprintf(stderr, "%s\n", dlerror()), 1;
        if (train(library) || dlclose(library))
            return 1;
        if (dlopen(argv[1], RTLD_NOW | RTLD_NOLOAD))
            return fprintf(stderr, "the library is still loaded after dlclose()\n"), 1;
    }
    return 0;
}
"""


def run(*command, env=None):
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode != 0:
        print(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        sys.exit(1)
    return done.stdout


def over_mpi(key, program, module, env):
    """Returns what fails in two ranks of PROGRAM that have to load that module."""
    launcher = under_mpi.LAUNCHERS.get(key)
    if launcher and shutil.which(launcher[0]):
        done = subprocess.run([*launcher, "-n", "2", program], env={**under_mpi.environment(), **env, "ZERO_BACKEND": "mpi", "ZERO_LOG": "stderr"},
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=under_mpi.SECONDS, check=False)
        if done.stdout != 2 * "0 1 2 3\n" or done.stderr.count(f", by {os.path.realpath(module)} (loaded for libzero)") < 2:
            yield f"two ranks over {key} and {module}: exit code {done.returncode}\n{done.stdout}{done.stderr}"


def dead_links(pages):
    """Returns targets of links in installed Markdown pages that are not installed."""
    for page in pages:
        with open(page, encoding="utf-8") as f:
            text = re.sub(r"^```.*?^```$", "", f.read(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", text):
            if not re.match(r"\w+:", link) and not os.path.exists(os.path.join(os.path.dirname(page), link)):
                yield f"{os.path.basename(page)} is installed, and what it links to is not: {link}"


def main(build, mpi, meson):
    failures = []
    with tempfile.TemporaryDirectory() as root:
        run(*meson, "install", "--no-rebuild", "-C", build, "--destdir", root)
        found = {}
        for folder, _, names in os.walk(root):
            for name in names:
                found[os.path.relpath(os.path.join(folder, name), root)] = os.path.join(folder, name)

        headers = {path.split("include/", 1)[1] for path in found if "/include/" in path}
        if headers != HEADERS:
            failures.append(f"headers installed: {sorted(headers)}, expected {sorted(HEADERS)}")
        pages = [at for path, at in found.items() if path.endswith(".md")]
        failures += dead_links(pages)
        if len(pages) < 20:
            failures.append(f"only {len(pages)} pages are installed")
        programs = {}
        for name in PROGRAMS:
            paths = [at for path, at in found.items() if path.endswith("/bin/" + name)]
            if len(paths) != 1 or not os.access(paths[0], os.X_OK):
                failures.append(f"program {name} is not installed")
            else:
                programs[name] = paths[0]
        extra = [path for path in found if path.endswith(".a") or "/bin/" in path and path.split("/")[-1] not in PROGRAMS]
        if extra:
            failures.append(f"installed besides: {extra}")
        pc = [at for path, at in found.items() if path.endswith("pkgconfig/libzero.pc")]
        library = [at for path, at in found.items() if path.endswith("/libzero.so.0")]
        if len(pc) != 1 or len(library) != 1:
            print(f"libzero.pc: {pc}, libzero.so.0: {library}")
            return 1

        module = os.path.join(os.path.dirname(library[0]), "libzero-mpi.so")
        if os.path.exists(module) != (mpi != "none"):
            failures.append(f"{module} is {'' if mpi == 'none' else 'not '}installed")
        elif mpi != "none":
            ctypes.CDLL(module)  # finds its MPI without a path from the build

        env = {**os.environ, "PKG_CONFIG_PATH": os.path.dirname(pc[0]), "PKG_CONFIG_SYSROOT_DIR": root,
               "LD_LIBRARY_PATH": os.path.dirname(library[0])}
        for name in [name for name in env if name.startswith("ZERO_")]:
            del env[name]
        flags = run("pkg-config", "--cflags", "--libs", "libzero", env=env).split()
        program = os.path.join(root, "program")
        with open(program + ".c", "w", encoding="utf-8") as f:
            f.write(PROGRAM)
        run(os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-o", program, program + ".c", *flags, env=env)
        told = run(program, env=env).strip()
        if told != "0 1 2 3":
            failures.append(f"the program printed {told!r}, expected '0 1 2 3'")
        failures += over_mpi(mpi, program, module, {"LD_LIBRARY_PATH": os.path.dirname(library[0])})
        opens = os.path.join(root, "opens")
        with open(opens + ".c", "w", encoding="utf-8") as f:
            f.write(OPENS)
        run(os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-o", opens, opens + ".c", *[flag for flag in flags if flag != "-lzero"], env=env)
        told = run(opens, library[0], env={**env, "ZERO_LOG": "off"})
        if told != 2 * "0 1 2 3\n":
            failures.append(f"the program that opens the library by dlopen() printed {told!r}, expected '0 1 2 3' twice")
        version = run(sys.executable, "-c", "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).zero_version; f.restype = ctypes.c_char_p; "
                      "print(f().decode())", library[0], env=env).strip()
        if os.path.realpath(library[0]).split(".so.")[1] != version:
            failures.append(f"zero_version() says {version!r} to Python, of {os.path.realpath(library[0])}")
        # A program that links libzero needs no other library of the project.
        for name, at in programs.items():
            run(at, "--help", env=env)
    print("\n".join(failures) or "installed, built and ran")
    return 1 if failures else 0


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
