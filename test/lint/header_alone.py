#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles zero/zero.h and zero/zero_config.h alone, as a user's program includes them, in every language and
with every compiler found here.

    header_alone.py ROOT
"""
import os
import shutil
import subprocess
import sys
import tempfile

STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
C = ["-Wstrict-prototypes", "-Wshadow"]
LANGUAGES = [(compiler, ["-x", "c", f"-std={std}", *C]) for compiler in ("gcc", "clang") for std in ("c99", "c11", "c17", "c2x")] + \
            [(compiler, ["-x", "c++", f"-std={std}"]) for compiler in ("g++", "clang++") for std in ("c++11", "c++14", "c++17", "c++20")]
PROGRAMS = {
    "nothing but the header": "#include <zero/zero.h>\n",
    "its structs alone": "#include <zero/zero_config.h>\n",
    "the header twice": "#include <zero/zero.h>\n#include <zero/zero.h>\n",
    "a program": """
#include <zero/zero.h>

extern float *weights, *gradient;
extern struct zero_config standing;
int run(void);
float *weights, *gradient;
struct zero_config standing = ZERO_CONFIG_INIT;

int run(void)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
#ifdef __cplusplus
    struct zero_tensor tensor = zero_tensor();
    zero_stats stats;
#else
    struct zero_tensor tensor = {0};
    struct zero_stats stats;
#endif
    struct zero_config other;
    struct zero_step_info info;
    zero_ctx *z = NULL;
    int err;
    tensor.name = "w";
    tensor.param = (void **)&weights;
    tensor.grad = (void **)&gradient;
    tensor.shape[0] = 3;
    tensor.dtype = ZERO_F32;
    tensor.flags = ZERO_STACKED;
    cfg.stage = 3;
    cfg.optim.beta1 = ZERO_AUTO;
    cfg.deterministic = ZERO_AUTO;
    if (zero_config_init(&other, sizeof other) || (err = zero_wrap(&z, &tensor, 1, &cfg)) == ZERO_ERR_NOMEM)
        return 1;
    zero_begin(z, 0, ZERO_FORWARD);
    zero_end(z, 0, ZERO_FORWARD);
    zero_step(z, 0.1f, &info);
    zero_get_stats(z, &stats);
    return zero_unwrap(&z) + (int)stats.planned.moments;
}
""",
    "an initializer of a table": """
#include <zero/zero.h>

#ifndef __cplusplus /* g++ warns of the fields that are left out */
extern const struct zero_tensor tensor;
const struct zero_tensor tensor = {.name = "w", .shape = {3, 4}, .dtype = ZERO_F32, .flags = ZERO_NO_DECAY};
int read_config(void);

int read_config(void)
{
    struct zero_config cfg;
    cfg = (struct zero_config)ZERO_CONFIG_INIT;
    return cfg.memory.prefetch + tensor.unit;
}
#endif
""",
    # The error codes are an X-macro that a program may use for its own tables.
    "the error map": """
#include <zero/zero.h>
#define TEXT(name, value, text, help) text,
static const char *const texts[] = {ZERO_ERR_MAP(TEXT) ""};
extern const char *text(int i);
const char *text(int i)
{
    return texts[i];
}
""",
}


def main(root):
    failures = n_tried = 0
    with tempfile.TemporaryDirectory() as folder:
        for command, flags in LANGUAGES:
            if not shutil.which(command):
                print(f"no {command} here")
                continue
            for what, text in PROGRAMS.items():
                if "c++" in " ".join(flags) and "extern const char *text" in text:
                    text = text.replace("extern const char *text(int i);", "const char *text(int i);")
                source = os.path.join(folder, "program.c")
                with open(source, "w", encoding="utf-8") as f:
                    f.write(text)
                done = subprocess.run([command, *flags, *STRICT, "-I", root, source], capture_output=True, text=True,
                                      check=False)
                n_tried += 1
                if done.returncode != 0:
                    failures += 1
                    print(f"{command} {' '.join(flags)}: {what}:\n{done.stderr}")
    print(f"{n_tried - failures} of {n_tried} compiled")
    return 1 if failures or n_tried == 0 else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
