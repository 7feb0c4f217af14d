/* SPDX-License-Identifier: Apache-2.0 */
/* vocab.c: the functions of vocab.h. The threads of bench/threads.h split the rows. */
#include "bench/model/vocab.h"
#include "bench/threads.h"

#include <math.h>
#include <string.h>

void model_vocab_localize(int32_t *ids, int64_t n, int64_t first, int64_t V)
{
    for (int64_t i = 0; i < n; i++) {
        int64_t id = ids[i] - first;
        if (ids[i] != MODEL_LEFT_OUT)
            ids[i] = id >= 0 && id < V ? (int32_t)id : -1;
    }
}

int model_vocab_top(const struct compute *on, float *top, const float *logits, int64_t N, int64_t V,
                    int64_t ld)
{
    IN_PARTS(on)
    for (int64_t row = part_at(on, N, part); row < part_at(on, N, part + 1); row++) {
        top[row] = -INFINITY;
        for (int64_t i = 0; i < V; i++) {
            float x = logits[row * ld + i];
            top[row] = x > top[row] || x != x ? x : top[row]; /* a NaN reaches the loss */
        }
    }
    return 0;
}

int model_vocab_exponentials(const struct compute *on, float *logits, float *total, float *wanted,
                             const float *top, const int32_t *targets, int64_t N, int64_t V, int64_t ld,
                             struct model_label label)
{
    IN_PARTS(on)
    for (int64_t row = part_at(on, N, part); row < part_at(on, N, part + 1); row++) {
        float *x = logits + row * ld;
        double sum = 0, below = 0;
        float at_target = targets[row] < 0 ? 0.0f : label.target * (x[targets[row]] - top[row]);
        for (int64_t i = 0; i < V; i++) {
            below += (double)(x[i] - top[row]);
            x[i] = expf(x[i] - top[row]);
            sum += (double)x[i];
        }
        total[row] = (float)sum;
        wanted[row] = label.each > 0 ? (float)((double)at_target + (double)label.each * below) : at_target;
    }
    return 0;
}

int model_vocab_loss(const struct compute *on, real *dlogits, double *loss, const float *logits,
                     const float *total, const float *wanted, const int32_t *targets, int64_t N, int64_t V,
                     int64_t width, int64_t ld, struct model_label label, float scale)
{
    IN_PARTS(on)
    for (int64_t row = part_at(on, N, part); row < part_at(on, N, part + 1); row++) {
        const float *x = logits + row * ld;
        real *dx = dlogits + row * ld;
        float factor = scale / total[row], each = scale * label.each, more = scale * label.target;
        if (targets[row] == MODEL_LEFT_OUT) {
            memset(dx, 0, (size_t)width * sizeof *dx);
            loss[row] = 0.0;
            continue;
        }
        for (int64_t i = 0; i < width; i++) {
            float gradient = i < V ? x[i] * factor - each : 0.0f;
            dx[i] = from_float(i < V && i == targets[row] ? gradient - more : gradient);
        }
        loss[row] = log((double)total[row]) - (double)wanted[row];
    }
    return 0;
}
