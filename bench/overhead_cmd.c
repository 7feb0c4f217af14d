/* SPDX-License-Identifier: Apache-2.0 */
/* overhead_cmd.c: zero-bench overhead: what a begin and end cost the model's thread when there is nothing to
 * move. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/overhead_world.h"
#include "bench/report/report.h"
#include "bench/report/stage_table.h"

#include "kernels/device.h"

#define UNIT_ELEMENTS 1024 /* 4 KiB of f32 */

struct overhead_options {
    int device;
    int64_t units, passes, world;
    bool json;
};

static const struct option_row rows[] = {
    {"device", "host|cuda", "Where the units are (host)", 1,
     OPTION_WORD(struct overhead_options, device, option_devices)},
    {"units", "N", "Units of 4 KiB (200)", 1, OPTION_INT(struct overhead_options, units, 1, 100000)},
    {"passes", "N", "Times that all units are used; the median counts (400)", 1,
     OPTION_INT(struct overhead_options, passes, 1, 1000000)},
    {"world", "N",
     "Times forward brackets of resident units among N ranks and among 2 instead, by turns: rank 0 calls, "
     "nothing has "
     "to be issued, the others sleep. What is left is what every bracket asks before it does anything, so "
     "the two "
     "should not differ. Shared memory of this host, up to 64 ranks (1: no others)",
     1, OPTION_INT(struct overhead_options, world, 1, 64)},
    {"json", NULL, "A JSON line per stage", 1, OPTION_FLAG(struct overhead_options, json)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc =
        "Times one zero_begin and zero_end on the model's thread, on one rank or among many, at every stage.",
    .read_word = option_refuse_word,
};

/* The model: units of one tensor each. */
struct units {
    int32_t n;
    void **params, **grads;      /* (n) each */
    char (*names)[16];           /* (n) */
    struct zero_tensor *tensors; /* (n) */
    float *values;               /* (n, UNIT_ELEMENTS), wanted by zero_wrap only */
};

static void units_close(struct units *u)
{
    free(u->params);
    free(u->grads);
    free(u->names);
    free(u->tensors);
    free(u->values);
}

static int units_open(struct units *u, int32_t n)
{
    size_t count = (size_t)n;
    *u = (struct units){.n = n,
                        .params = calloc(count, sizeof *u->params),
                        .grads = calloc(count, sizeof *u->grads),
                        .names = calloc(count, sizeof *u->names),
                        .tensors = calloc(count, sizeof *u->tensors),
                        .values = calloc(count * UNIT_ELEMENTS, sizeof *u->values)};
    if (!u->params || !u->grads || !u->names || !u->tensors || !u->values) {
        units_close(u);
        return -1;
    }
    for (int32_t i = 0; i < n; i++) {
        u->params[i] = u->values + (int64_t)i * UNIT_ELEMENTS;
        snprintf(u->names[i], sizeof u->names[i], "w%d", i);
        u->tensors[i] = (struct zero_tensor){.name = u->names[i],
                                             .param = &u->params[i],
                                             .grad = &u->grads[i],
                                             .shape = {UNIT_ELEMENTS},
                                             .dtype = ZERO_F32,
                                             .unit = i};
    }
    return 0;
}

struct timing {
    double forward_ns, backward_ns; /* of one begin and end */
};

/* Where the model would compute. */
struct site {
    struct zr_device *dev;
    struct zr_stream *stream;
};

static void site_close(struct site *s)
{
    if (s->dev) {
        s->dev->ops->stream_close(s->stream);
        s->dev->ops->close(s->dev);
    }
}

static int site_open(struct site *s, bool cuda)
{
    *s = (struct site){0};
    int err = cuda ? zr_cuda_device_open(ZR_CUDA_CURRENT, &s->dev) : zr_host_device_open(&s->dev);
    enum zr_stream_kind kind = cuda ? ZR_STREAM_QUEUE : ZR_STREAM_CALLER;
    return err ? err : s->dev->ops->stream_open(s->dev, kind, "model", NULL, &s->stream);
}

/* Times of one pass each way. The model itself does nothing but in its first pass (where is not NULL): a
 * first step without any gradient is an error. */
static int pass(zero_ctx *z, const struct units *model, const struct site *where, struct timing *t)
{
    const float ones[2] = {1, 1};
    int32_t n = model->n;
    int err = 0;
    int64_t start = zr_now_ns();
    for (int32_t u = 0; !err && u < n; u++) {
        err = zero_begin(z, u, ZERO_FORWARD);
        err = err ? err : zero_end(z, u, ZERO_FORWARD);
    }
    int64_t turn = zr_now_ns();
    for (int32_t u = n; !err && u-- > 0;) {
        err = zero_begin(z, u, ZERO_BACKWARD);
        if (where && !err)
            err = where->dev->ops->put(where->stream, model->grads[u], ones, sizeof ones);
        err = err ? err : zero_end(z, u, ZERO_BACKWARD);
    }
    int64_t end = zr_now_ns();
    t->forward_ns = (double)(turn - start) / n;
    t->backward_ns = (double)(end - turn) / n;
    return err ? err : zero_step(z, 0.0f, NULL);
}

/* Warned of, and the measurement's choice. */
static const char *chosen[] = {"stage 3 shards nothing", "every gradient of a step was zero", NULL};

static int measure(int device, int stage, struct units *u, int64_t n_passes, struct timing *out)
{
    struct site site;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.device = device;
    cfg.stage = stage;
    cfg.launch.world = 1;
    cfg.launch.backend = ZERO_BACKEND_SELF;
    cfg.debug.log = report_warning;
    cfg.debug.log_arg = chosen;
    for (int32_t i = 0; i < u->n; i++) /* an earlier unwrap has set them to NULL */
        u->params[i] = u->values + (int64_t)i * UNIT_ELEMENTS;
    double *forward = malloc((size_t)n_passes * sizeof *forward),
           *backward = malloc((size_t)n_passes * sizeof *backward);
    if (!forward || !backward) {
        free(forward);
        free(backward);
        return zr_fail(ZR_ERR_NOMEM, "no memory for the times of %lld passes", (long long)n_passes);
    }
    zero_ctx *z = NULL;
    int err = site_open(&site, device == ZERO_DEVICE_CUDA);
    cfg.stream = err ? NULL : site.dev->ops->stream_native(site.stream);
    if (err) {
        site_close(&site);
        free(forward);
        free(backward);
        return err;
    }
    err = zero_wrap(&z, u->tensors, u->n, &cfg);
    for (int64_t i = -2; !err && i < n_passes; i++) { /* two passes to warm up */
        struct timing t = {0};
        err = pass(z, u, i == -2 ? &site : NULL, &t);
        if (i >= 0) {
            forward[i] = t.forward_ns;
            backward[i] = t.backward_ns;
        }
    }
    if (err)
        zr_fail(err, "%s", zero_last_error());
    else
        *out = (struct timing){report_median(forward, n_passes), report_median(backward, n_passes)};
    zero_unwrap(&z);
    site_close(&site);
    free(forward);
    free(backward);
    return err;
}

/* One pass of forward brackets: nothing is issued by them where units are resident, and no step follows. */
static int forward_pass(void *arg, zero_ctx *z, double *ns)
{
    const struct units *u = arg;
    int err = 0;
    int64_t start = zr_now_ns();
    for (int32_t i = 0; !err && i < u->n; i++) {
        err = zero_begin(z, i, ZERO_FORWARD);
        err = err ? err : zero_end(z, i, ZERO_FORWARD);
    }
    *ns = (double)(zr_now_ns() - start) / u->n;
    return err;
}

static int world_command(const char *name, const struct overhead_options *o, struct units *units)
{
    for (int stage = 0; stage < N_STAGES; stage++) {
        struct zero_config cfg = ZERO_CONFIG_INIT;
        double ns[2];
        cfg.device = o->device;
        cfg.stage = stage;
        cfg.launch.backend = ZERO_BACKEND_SHM;
        cfg.debug.log = report_warning;
        cfg.debug.log_arg = chosen;
        for (int32_t i = 0; i < units->n; i++) {
            units->tensors[i].flags = ZERO_RESIDENT;
            units->params[i] = units->values + (int64_t)i * UNIT_ELEMENTS;
        }
        int err =
            overhead_world(units->tensors, units->n, &cfg, (int)o->world, o->passes, forward_pass, units, ns);
        if (err) {
            fprintf(stderr, "%s: stage %d: %s\n", name, stage, zr_error_text());
            return err == ZR_ERR_ARG ? EXIT_USAGE : EXIT_FAILURE;
        }
        if (o->json) {
            report_line(json_pack("{s:i, s:I, s:I, s:o, s:o, s:o}", "stage", stage, "units",
                                  (json_int_t)o->units, "world", (json_int_t)o->world, "forward_ns",
                                  report_number(ns[1]), "forward_of_2_ns", report_number(ns[0]), "ratio",
                                  report_number(ns[1] / ns[0])));
            continue;
        }
        if (stage == 0) {
            printf(
                "one forward begin and end, %lld resident units of 4 KiB, medians of %lld passes by turns\n\n"
                "%-8s %10s 2 %9s %2lld %9s\n",
                (long long)o->units, (long long)o->passes, "stage", "ranks:", "ranks:", (long long)o->world,
                "ratio");
        }
        printf("%-8d %9.0f ns %9.0f ns %9.3f\n", stage, ns[0], ns[1], ns[1] / ns[0]);
    }
    return 0;
}

int overhead_command(const char *name, int argc, char **argv)
{
    struct overhead_options o = {.device = ZERO_DEVICE_HOST, .units = 200, .passes = 400, .world = 1};
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    struct units units;
    if (units_open(&units, (int32_t)o.units)) {
        fprintf(stderr, "%s: no memory for %lld units\n", name, (long long)o.units);
        return EXIT_FAILURE;
    }
    if (o.world > 1) {
        status = world_command(name, &o, &units);
        units_close(&units);
        return status;
    }
    for (int stage = 0; !status && stage < N_STAGES; stage++) {
        struct timing t = {0};
        int err = measure(o.device, stage, &units, o.passes, &t);
        if (err) {
            fprintf(stderr, "%s: stage %d: %s\n", name, stage, zr_error_text());
            status = err == ZR_ERR_NOTSUP ? EXIT_USAGE : EXIT_FAILURE;
        } else if (o.json) {
            report_line(json_pack("{s:i, s:I, s:o, s:o}", "stage", stage, "units", (json_int_t)o.units,
                                  "forward_ns", report_number(t.forward_ns), "backward_ns",
                                  report_number(t.backward_ns)));
        } else {
            if (stage == 0) {
                printf("one begin and end, %lld units of 4 KiB, one rank, median of %lld passes\n\n%-8s %12s "
                       "%12s\n",
                       (long long)o.units, (long long)o.passes, "stage", "forward", "backward");
            }
            printf("%-8d %9.0f ns %9.0f ns\n", stage, t.forward_ns, t.backward_ns);
        }
    }
    units_close(&units);
    return status;
}
