/* overhead_cmd.c: zero-bench overhead: what a begin and end cost the model's thread when there is nothing to
 * move. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/report.h"
#include "bench/stage_table.h"

#include "kernels/device.h"

#define UNIT_ELEMENTS 1024 /* 4 KiB of f32 */

struct overhead_options {
    int device;
    int64_t units, passes;
    bool json;
};

static const struct option_row rows[] = {
    {"device", "host|cuda", "Where the units are (host)", 1,
     OPTION_WORD(struct overhead_options, device, option_devices)},
    {"units", "N", "Units of 4 KiB (200)", 1, OPTION_INT(struct overhead_options, units, 1, 100000)},
    {"passes", "N", "Times that all units are used; the median counts (400)", 1,
     OPTION_INT(struct overhead_options, passes, 1, 1000000)},
    {"json", NULL, "A JSON line per stage", 1, OPTION_FLAG(struct overhead_options, json)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc = "Times one zero_begin and zero_end on the model's thread, on one rank, at every stage.",
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

/* Times of one pass each way; the model itself does nothing. */
static int pass(zero_ctx *z, int32_t n, struct timing *t)
{
    int err = 0;
    int64_t start = zr_now_ns();
    for (int32_t u = 0; !err && u < n; u++) {
        err = zero_begin(z, u, ZERO_FORWARD);
        err = err ? err : zero_end(z, u, ZERO_FORWARD);
    }
    int64_t turn = zr_now_ns();
    for (int32_t u = n; !err && u-- > 0;) {
        err = zero_begin(z, u, ZERO_BACKWARD);
        err = err ? err : zero_end(z, u, ZERO_BACKWARD);
    }
    int64_t end = zr_now_ns();
    t->forward_ns = (double)(turn - start) / n;
    t->backward_ns = (double)(end - turn) / n;
    return err ? err : zero_step(z, 0.0f, NULL);
}

static int measure(int device, int stage, struct units *u, int64_t n_passes, struct timing *out)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.device = device;
    cfg.stage = stage;
    cfg.world = 1;
    cfg.backend = ZERO_BACKEND_SELF;
    for (int32_t i = 0; i < u->n; i++) { /* an earlier unwrap has set them to NULL */
        u->params[i] = u->values + (int64_t)i * UNIT_ELEMENTS;
    }
    double *forward = malloc((size_t)n_passes * sizeof *forward),
           *backward = malloc((size_t)n_passes * sizeof *backward);
    if (!forward || !backward) {
        free(forward);
        free(backward);
        return zr_fail(ZR_ERR_NOMEM, "no memory for the times of %lld passes", (long long)n_passes);
    }
    zero_ctx *z = NULL;
    int err = zero_wrap(&z, u->tensors, u->n, &cfg);
    for (int64_t i = -2; !err && i < n_passes; i++) { /* two passes to warm up */
        struct timing t = {0};
        err = pass(z, u->n, &t);
        if (i >= 0) {
            forward[i] = t.forward_ns;
            backward[i] = t.backward_ns;
        }
    }
    if (err) {
        zr_fail(err, "%s", zero_last_error());
    } else {
        *out = (struct timing){report_median(forward, n_passes), report_median(backward, n_passes)};
    }
    zero_unwrap(&z);
    free(forward);
    free(backward);
    return err;
}

int overhead_command(const char *name, int argc, char **argv)
{
    struct overhead_options o = {.device = ZERO_DEVICE_HOST, .units = 200, .passes = 400};
    int status = options_parse(&table, name, argc, argv, &o);
    if (status) {
        return status;
    }
    struct units units;
    if (units_open(&units, (int32_t)o.units)) {
        fprintf(stderr, "%s: no memory for %lld units\n", name, (long long)o.units);
        return EXIT_FAILURE;
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
