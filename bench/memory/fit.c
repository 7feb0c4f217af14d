/* SPDX-License-Identifier: Apache-2.0 */
/* fit.c: estimates the memory of a model, and makes the model smaller until it fits or is as small as it
 * gets. */
#include "bench/memory/fit.h"
#include "bench/report/report.h"
#include "bench/train/train.h"

#include "kernels/host/host_memory.h"

#include <stdio.h>

/* A rank's program, its libraries, and what they allocate. */
#define PROCESS_BYTES (INT64_C(64) << 20)

/* Bytes that model_open() takes besides parameters (bench/model/model.h), rounded up. Per token and layer:
 *
 *   16 C    ln1, qkv, atty, residual2, ln2, fch, fch_gelu and residual3
 *
 * Per token:
 *
 *   V       dlogits
 *   16 C    embedded, lnf and the buffers of backward, which have less
 *
 * In fp32, whatever the dtype:
 *
 *   NH       per token and layer: logsum; and once more per token: dots
 *   T * V    logits of one row
 *   9 C      per token: rows of heads that attention copies (bench/model/attention.c), and four arrays of
 *            scores of at most 4 MiB */
static int64_t activation_bytes(const struct memory_fit *f, const struct model_config *c)
{
    int64_t L = c->layers, C = c->channels, T = c->context, V = c->vocab, NH = c->heads, B = f->batch;
    int64_t element = f->dtype == ZERO_BF16 ? 2 : 4, scores = B * NH * T * T * 4, most = INT64_C(4) << 20;
    int64_t of_layers = L * B * T * 16 * C, of_ends = B * T * (V + 16 * C);
    int64_t in_fp32 = (L + 1) * B * T * NH + T * V + 9 * B * T * C;
    return (of_layers + of_ends) * element + in_fp32 * 4 + 4 * (scores < most ? scores : most);
}

int memory_fit_needed(const struct memory_fit *f, const struct model_config *config, int64_t *out_bytes)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_tensor tensors[TRAIN_N_TENSORS];
    struct zero_plan_info info;
    (f->dtype == ZERO_BF16 ? train_describe_bf16 : train_describe_f32)(tensors, config, NULL, false);
    cfg.stage = 0;
    cfg.launch.world = (int32_t)f->ranks;
    cfg.debug.log = report_warning;
    int err = zero_plan(tensors, TRAIN_N_TENSORS, &cfg, &info);
    if (err)
        return err;
    /* The model's first weights exist until they are wrapped. */
    *out_bytes =
        f->ranks * (info.bytes.total + info.bytes.param_shards + activation_bytes(f, config) + PROCESS_BYTES);
    return 0;
}

static int64_t limit_of(const struct memory_fit *f)
{
    struct zr_host_memory m;
    if (f->limit)
        return f->limit;
    zr_host_memory_look(f->root, &m);
    int64_t least = zr_host_memory_least(&m);
    return least == INT64_MAX ? least : least > m.swap_bytes ? least - m.swap_bytes : 0;
}

/* Halves the layers until the model fits, or one layer is left. */
static int halve_layers(const struct memory_fit *f, int64_t limit, struct model_options *m, int64_t *needed)
{
    static char name[64];
    const char *asked = m->name;
    int err = 0;
    while (!err && *needed > limit && m->config.layers > 1) {
        m->config.layers /= 2;
        snprintf(name, sizeof name, "%s with %lld layer%s", asked, (long long)m->config.layers,
                 m->config.layers == 1 ? "" : "s");
        m->name = name;
        err = memory_fit_needed(f, &m->config, needed);
    }
    return err;
}

int memory_fit_choose(const struct memory_fit *f, struct model_options *model, const char *prefix)
{
    int64_t limit = limit_of(f), first = 0, needed = 0;
    const char *asked = model->name;
    struct model_options nano = *model;
    model_take_nano(&nano);
    int err = memory_fit_needed(f, &model->config, &needed);
    first = needed;
    err = err ? err : halve_layers(f, limit, model, &needed);
    if (!err && needed > limit && model_n_params(&nano.config) < model_n_params(&model->config)) {
        *model = nano;
        err = memory_fit_needed(f, &model->config, &needed);
    }
    if (err) {
        fprintf(stderr, "%s: --fit: %s\n", prefix, zero_last_error());
        return EXIT_FAILURE;
    }
    if (first > limit)
        fprintf(stderr,
                "%s: stage 0 of %s on %lld ranks takes about %s, and %s are %s: taking %s, about %s\n",
                prefix, asked, (long long)f->ranks, report_bytes(first).text, report_bytes(limit).text,
                f->limit ? "allowed" : "free", model->name, report_bytes(needed).text);
    return 0;
}
