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

int memory_fit_needed(const struct memory_fit *f, const struct model_config *config, int64_t *out_bytes)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_tensor tensors[MODEL_MAX_TENSORS];
    struct zero_plan_info info;
    int32_t n = model_describe(tensors, NULL, config, (enum zero_dtype)f->dtype);
    int64_t element_bytes = f->dtype == ZERO_BF16 ? 2 : 4;
    cfg.stage = 0;
    cfg.launch.world = (int32_t)f->ranks;
    cfg.debug.log = report_warning;
    int err = zero_plan(tensors, n, &cfg, &info);
    if (err)
        return err;
    /* The model's first weights exist until they are wrapped. */
    *out_bytes = f->ranks * (info.bytes.total + info.bytes.param_shards +
                             model_most_bytes(config, f->batch, element_bytes) + PROCESS_BYTES);
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
