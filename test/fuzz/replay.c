/* SPDX-License-Identifier: Apache-2.0 */
/* replay.c: runs a fuzz target on files, or on all files of folders. It is for compilers without libFuzzer,
 * and turns the seeds into a plain test. Each input is also tried with its end cut off, at every length. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static int n_inputs;

static void replay_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    static uint8_t data[1 << 16];
    if (!f) {
        perror(path);
        exit(1);
    }
    size_t n = fread(data, 1, sizeof data, f);
    fclose(f);
    for (size_t k = 0; k <= n; k++) {
        uint8_t *exact = malloc(k ? k : 1); /* so that a sanitizer sees a read past the end */
        memcpy(exact, data, k);
        LLVMFuzzerTestOneInput(exact, k);
        free(exact);
    }
    n_inputs++;
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        DIR *d = opendir(argv[i]);
        if (!d) {
            replay_file(argv[i]);
            continue;
        }
        for (const struct dirent *e; (e = readdir(d));) {
            char path[4096];
            snprintf(path, sizeof path, "%s/%s", argv[i], e->d_name);
            if (*e->d_name != '.')
                replay_file(path);
        }
        closedir(d);
    }
    printf("%d inputs\n", n_inputs);
    return n_inputs ? 0 : 1;
}
