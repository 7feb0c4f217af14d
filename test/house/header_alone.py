#!/usr/bin/env python3
"""zero/zero.h alone, as a user's program includes it, in every language and by every compiler found here.

    header_alone.py ROOT
"""
import os
import shutil
import subprocess
import sys
import tempfile

STRICT = ["-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
COMPILERS = (  # command, language flags
    ("gcc", ["-x", "c", "-std=c11", "-Wstrict-prototypes", "-Wshadow"]),
    ("gcc", ["-x", "c", "-std=c99", "-Wstrict-prototypes", "-Wshadow"]),
    ("g++", ["-x", "c++", "-std=c++17"]),
    ("clang", ["-x", "c", "-std=c11", "-Wstrict-prototypes", "-Wshadow"]),
    ("clang", ["-x", "c", "-std=c99", "-Wstrict-prototypes", "-Wshadow"]),
    ("clang++", ["-x", "c++", "-std=c++17"]),
)
PROGRAMS = {
    "nothing but the header": "#include <zero/zero.h>\n",
    "the header twice": "#include <zero/zero.h>\n#include <zero/zero.h>\n",
    "a program": """
#include <zero/zero.h>

extern float *weights, *gradient;
int run(void);
float *weights, *gradient;

int run(void)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_tensor tensor = {
        "w", (void **)&weights, (void **)&gradient, {3, 4, 0, 0, 0, 0, 0, 0}, ZERO_F32, 0, ZERO_STACKED};
    struct zero_bytes bytes = {0, 0, 0, 0, 0, 0, 0, 0};
    zero_ctx *z = NULL;
    int err;
    cfg.stage = 3;
    if ((err = zero_wrap(&z, &tensor, 1, &cfg)) == ZERO_ERR_NOMEM)
        return err;
    zero_begin(z, 0, ZERO_FORWARD);
    zero_end(z, 0, ZERO_FORWARD);
    zero_step(z, 0.1f, NULL);
    return zero_unwrap(&z) + (int)bytes.moments;
}
""",
    # The error codes are an X-macro that a program may use for its own tables.
    "the error map": """
#include <zero/zero.h>
#define TEXT(name, value, text) text,
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
        for command, flags in COMPILERS:
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
