/* SPDX-License-Identifier: Apache-2.0 */
/* adapters.c: reads and writes adapters as folders of the PEFT library, and exports the model with the
 * adapters added to its matrices. */
#include "bench/llama/hf_folder.h"
#include "bench/llama/llama_ops.h"
#include "bench/threads.h"
#include "bench/train/run.h"
#include "kernels/alloc.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 1024

static int join(char path[PATH_BYTES], const char *folder, const char *name)
{
    int n = snprintf(path, PATH_BYTES, "%s/%s", folder, name);
    return n < PATH_BYTES ? 0 : zr_fail(ZERO_ERR_ARG, "%.100s...: the path is too long", folder);
}

int train_import_adapters(struct run *r, const char *dir)
{
    char path[PATH_BYTES];
    TRY(join(path, dir, LORA_WEIGHTS_FILE));
    return train_move_weights(r, path, /* export */ false, /* adapters */ true);
}

/* Moves the file of zero_export from its folder to where PEFT looks for it, and describes it. */
static int finish_folder(const struct run *r, const char *dir, const char *folder)
{
    char from[PATH_BYTES], to[PATH_BYTES];
    TRY(join(from, folder, "model.safetensors"));
    TRY(join(to, dir, LORA_WEIGHTS_FILE));
    if (rename(from, to) || rmdir(folder))
        return zr_fail(ZERO_ERR_IO, "%s: cannot become %s: %s", from, to, strerror(errno));
    return lora_config_write(&r->o->model.config, dir, r->o->model.dir);
}

/* zero_export writes into a new folder inside dir. */
int train_export_adapters(struct run *r, const char *dir)
{
    char folder[PATH_BYTES];
    TRY(join(folder, dir, ".adapters"));
    if (r->rank == 0)
        (void)mkdir(dir, 0777); /* if it fails, zero_export says why */
    TRY(train_move_weights(r, folder, /* export */ true, /* adapters */ true));
    return train_agree(r, r->rank == 0 ? finish_folder(r, dir, folder) : 0);
}

/* ---- merging ---- */

/* One layer's matrix w (OC, C) and its adapter. If w, a and b are NULL, this rank only takes part in
 * collective reads and writes. */
struct matrix {
    int64_t OC, C, LR;
    real *w, *a, *b;
};

/* Replaces a row by w + s * b * a, added up in fp32 and rounded once. */
MODEL_CLONES static void merge_row(real *w, const real *a, const real *b, float s, int64_t C, int64_t LR)
{
    enum { SOME = 512 };
    float sum[SOME];
    for (int64_t at = 0; at < C; at += SOME) {
        int64_t n = C - at < SOME ? C - at : SOME;
        for (int64_t i = 0; i < n; i++)
            sum[i] = to_float(w[at + i]);
        for (int64_t k = 0; k < LR; k++) {
            const real *row = a + k * C + at;
            float factor = s * to_float(b[k]);
            for (int64_t i = 0; i < n; i++)
                sum[i] += factor * to_float(row[i]);
        }
        for (int64_t i = 0; i < n; i++)
            w[at + i] = from_float(sum[i]);
    }
}

static void merge(const struct run *r, const struct matrix *x)
{
    const struct compute *on = &r->compute;
    const float s = (float)lora_scale(&r->o->model.config);
    IN_PARTS(on)
    for (int64_t row = part_at(on, x->OC, part); x->w && row < part_at(on, x->OC, part + 1); row++)
        merge_row(x->w + row * x->C, x->a, x->b + row * x->LR, s, x->C, x->LR);
}

static int read_matrix(struct run *r, int32_t tensor, int64_t layer, int64_t n, real *dst)
{
    return take_libzero_error(zero_read(r->z, tensor, ZERO_VALUE_PARAM, layer * n, n, dst));
}

/* Merges all layers of a tensor, given the numbers of the three in this rank's table. With tp each rank has
 * the rows or columns of w for which its parts of a and b are enough. */
static int merge_tensor(struct run *r, int32_t w, int32_t a, int32_t b)
{
    const struct zero_tensor *t = r->tensors;
    struct matrix x = {.OC = t[w].shape[1], .C = t[w].shape[2], .LR = t[a].shape[1]};
    const int64_t n = x.OC * x.C, n_a = x.LR * x.C, n_b = x.OC * x.LR;
    real *memory = NULL;
    int err = 0;
    if (r->at.dp == 0 && r->at.cp == 0) {
        TRY(ZR_ALLOC(memory, n + n_a + n_b, "a matrix of %lld elements", (long long)n));
        x.w = memory;
        x.a = memory + n;
        x.b = x.a + n_a;
    }
    for (int64_t l = 0; l < t[w].shape[0] && !err; l++) {
        err = read_matrix(r, w, l, n, x.w);
        err = err ? err : read_matrix(r, a, l, n_a, x.a);
        err = err ? err : read_matrix(r, b, l, n_b, x.b);
        if (!err) {
            merge(r, &x);
            err = take_libzero_error(zero_write(r->z, w, ZERO_VALUE_PARAM, l * n, n, x.w));
        }
    }
    free(memory);
    return err;
}

/* The place of the tensor with this number among those of a stage, in this rank's table. */
static int32_t find(const struct run *r, const struct train_stage *s, int32_t number)
{
    int32_t i = s->first;
    while (r->number[i] != number)
        i++;
    return i;
}

int train_export_merged(struct run *r, const char *dir)
{
    static const int32_t matrices[LORA_N_TARGETS] = {
        [LORA_Q] = LLAMA_Q,       [LORA_K] = LLAMA_K,   [LORA_V] = LLAMA_V,       [LORA_O] = LLAMA_O,
        [LORA_GATE] = LLAMA_GATE, [LORA_UP] = LLAMA_UP, [LORA_DOWN] = LLAMA_DOWN,
    };
    for (int32_t k = 0; k < r->n_own; k++)
        for (int32_t i = 0; i < LORA_N_TARGETS; i++) {
            const struct train_stage *s = &r->stage[k];
            if (lora_has(&s->config, i))
                TRY(merge_tensor(r, find(r, s, matrices[i]), find(r, s, LLAMA_LORA_A + i),
                                 find(r, s, LLAMA_LORA_B + i)));
        }
    TRY(train_move_weights(r, dir, /* export */ true, /* adapters */ false));
    return train_agree(r, r->rank == 0 ? hf_folder_copy(r->o->model.dir, dir, r->o->dtype) : 0);
}
