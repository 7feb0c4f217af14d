/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint_cmd.c: zero-bench checkpoint. It measures how fast checkpoints are saved and loaded, compared
 * with dd on the same disk, and what an asynchronous save costs the steps. The model is the tensors of a
 * GPT-2; its backward pass only writes the gradients. */
#include "bench/arguments.h"
#include "bench/checkpoint/disk.h"
#include "bench/commands.h"
#include "bench/libzero_error.h"
#include "bench/report/report.h"
#include "bench/train/train.h"

#include "kernels/alloc.h"
#include "kernels/device.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct options {
    struct model_options model;
    const char *dir;
    int64_t stage, repeat;
    bool json;
};

#define MAX_REPEAT 25
#define N_STEPS    12
#define MAX_STEPS  10000

struct bench {
    const struct options *o;
    struct zero_tensor tensors[MODEL_MAX_TENSORS];
    void *param[MODEL_MAX_TENSORS], *grad[MODEL_MAX_TENSORS];
    int32_t n_tensors;
    zero_ctx *z;
    int32_t rank;
    int64_t bytes;               /* of all ranks' files of a checkpoint */
    char dir[1024], saves[1040]; /* the folder for all that is measured, and one in it for checkpoints */
    struct disk_dd dd;
    int n_plain;
    _Atomic bool saved;
};

static error_t finish(struct argp_state *state, void *options)
{
    const struct options *o = options;
    if (!o->dir)
        return option_fault(state, "--dir: is needed");
    return 0;
}

#define OPTION_STRUCT struct options
static const struct option_row rows[] = {
    {"dir", "DIR", "A folder on the disk to measure (needed); a folder zero-bench is made in it, and removed",
     OPTION_TEXT(dir), .group = 2},
    {"stage", "0..3", "What is sharded (1)", OPTION_INT(stage, 0, 3)},
    {"repeat", "N", "Times that each is measured; the median counts (3)", OPTION_INT(repeat, 1, MAX_REPEAT)},
    {"json", NULL, "One JSON line, from rank 0", OPTION_FLAG(json)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc = "Measures saving and loading checkpoints of a GPT-2's size on as many ranks as zero-run starts.",
    .finish = finish,
    OPTIONS_WITH_MODEL(struct options, model),
};

static void on_line(void *arg, const char *line)
{
    struct bench *b = arg;
    if (!strncmp(line, "saved ", 6))
        atomic_store(&b->saved, true);
}

static int open_model(struct bench *b, bool async)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    void *own[MODEL_MAX_TENSORS];
    int err = 0;
    cfg.stage = (int)b->o->stage;
    cfg.checkpoint.save_async = async;
    cfg.debug.log = on_line;
    cfg.debug.log_arg = b;
    b->saved = false;
    b->n_tensors = model_describe(b->tensors, NULL, &b->o->model.config, ZERO_F32);
    for (int t = 0; t < b->n_tensors; t++) {
        int64_t n = tensor_elements(&b->tensors[t]);
        float *p;
        if (ZR_ALLOC(p, n, "%lld parameters", (long long)n))
            err = ZERO_ERR_NOMEM;
        for (int64_t i = 0; p && i < n; i++)
            p[i] = (float)(i % 1009) * 1e-3f;
        own[t] = b->param[t] = p;
        b->tensors[t].param = &b->param[t];
        b->tensors[t].grad = &b->grad[t];
        b->tensors[t].flags |= ZERO_GRAD_OVERWRITE;
    }
    err = err ? err : take_libzero_error(zero_wrap(&b->z, b->tensors, b->n_tensors, &cfg));
    for (int t = 0; t < b->n_tensors; t++)
        free(own[t]);
    return err;
}

/* A step of a model that only has gradients. */
static int step(struct bench *b)
{
    const struct model_config *c = &b->o->model.config;
    int32_t units = c->ops->units(c).n;
    int err = 0;
    for (int32_t u = units; !err && u-- > 0;) {
        err = zero_begin(b->z, u, ZERO_BACKWARD);
        for (int t = 0; !err && t < b->n_tensors; t++) {
            const struct zero_tensor *x = &b->tensors[t];
            bool stacked = x->flags & ZERO_STACKED;
            if (u < x->unit || u >= x->unit + (stacked ? x->shape[0] : 1))
                continue;
            int64_t n = tensor_elements(x) / (stacked ? x->shape[0] : 1);
            float *g = (float *)b->grad[t] + (u - x->unit) * n, *p = (float *)b->param[t] + (u - x->unit) * n;
            for (int64_t i = 0; i < n; i++)
                g[i] = 0.5f * p[i] + 1e-3f;
        }
        err = err ? err : zero_end(b->z, u, ZERO_BACKWARD);
    }
    struct zero_step_info info;
    return take_libzero_error(err ? err : zero_step(b->z, 1e-3f, &info));
}

static double seconds_since(int64_t start)
{
    return (double)(zr_now_ns() - start) * 1e-9;
}

/* Times of ours and of dd over the rounds, and their medians. The ratio is a median too, over pairs that
 * ran one after the other. */
struct pair {
    double ours[MAX_REPEAT], theirs[MAX_REPEAT]; /* seconds */
    double ours_s, theirs_s, ratio;
};

/* What is compared with dd: a save, and loads with files that are in the page cache or not. */
enum { SAVE, SAVE_DIRECT, COLD, COLD_MEMORY, WARM, WARM_MEMORY, N_PAIRS };
static const struct {
    const char *key, *what, *beside;
} pairs[N_PAIRS] = {[SAVE] = {"save", "save", "dd with fsync"},
                    [SAVE_DIRECT] = {"save_direct", "", "dd with fsync, direct"},
                    [COLD] = {"load_cold", "", "dd into 1 MiB"},
                    [COLD_MEMORY] = {"load_cold_memory", "load, cold", "dd to /dev/shm"},
                    [WARM] = {"load_warm", "", "dd into 1 MiB"},
                    [WARM_MEMORY] = {"load_warm_memory", "load, warm", "dd to /dev/shm"}};

struct results {
    struct pair pair[N_PAIRS];
    double step_ms, pays_ms, during_ms, during_dd_ms; /* asynchronous saves; see report() */
    double call_ms, written_ms, dd_written_ms;
};

/* Computes the medians of n measurements of libzero (ours) and of dd (theirs). */
static void set_medians(struct pair *p, int64_t n)
{
    double ratio[MAX_REPEAT];
    for (int64_t i = 0; i < n; i++)
        ratio[i] = p->theirs[i] / p->ours[i];
    p->ratio = report_median(ratio, n);
    p->ours_s = report_median(p->ours, n);
    p->theirs_s = report_median(p->theirs, n);
}

/* Waits until all ranks are here and the disk is idle. */
static int meet(struct bench *b)
{
    double nothing = 0;
    if (b->rank == 0)
        sync();
    return take_libzero_error(zero_mean(b->z, &nothing, 1));
}

static int run_dd(struct bench *b, enum disk_job job, double *seconds)
{
    int err = meet(b);
    if (err || b->rank != 0)
        return err;
    if (job == DISK_WRITE || job == DISK_WRITE_DIRECT) {
        disk_dd_remove(&b->dd); /* a checkpoint's files are new too */
        sync();
    }
    int64_t start = zr_now_ns();
    err = disk_dd_start(&b->dd, job);
    err = err ? err : disk_dd_wait(&b->dd);
    *seconds = seconds_since(start);
    return err;
}

static int run_save(struct bench *b, double *seconds)
{
    int err = b->rank == 0 ? disk_remove_folder(b->saves) : 0;
    err = err ? err : meet(b);
    int64_t start = zr_now_ns();
    err = err ? err : take_libzero_error(zero_save(b->z, b->saves, NULL));
    *seconds = seconds_since(start);
    return err;
}

static int run_load(struct bench *b, double *seconds)
{
    int err = meet(b);
    int64_t start = zr_now_ns();
    err = err ? err : take_libzero_error(zero_load(b->z, b->saves));
    *seconds = seconds_since(start);
    return err;
}

static void set_cache(struct bench *b, bool warm)
{
    if (b->rank == 0 && warm)
        disk_make_warm(b->dir);
    else if (b->rank == 0)
        disk_make_cold(b->dir);
}

/* One round. Each of ours runs next to its dd, so that both find the disk in the same state. */
static int measure_round(struct bench *b, struct results *r, int64_t i)
{
    struct pair *p = r->pair;
    int err = run_dd(b, DISK_WRITE_DIRECT, &p[SAVE_DIRECT].theirs[i]);
    err = err ? err : run_save(b, &p[SAVE].ours[i]);
    p[SAVE_DIRECT].ours[i] = p[SAVE].ours[i];
    err = err ? err : run_dd(b, DISK_WRITE, &p[SAVE].theirs[i]);
    for (int warm = 0; warm < 2; warm++) {
        struct pair *into_buffer = &p[warm ? WARM : COLD],
                    *into_memory = &p[warm ? WARM_MEMORY : COLD_MEMORY];
        set_cache(b, warm);
        err = err ? err : run_load(b, &into_buffer->ours[i]);
        into_memory->ours[i] = into_buffer->ours[i];
        set_cache(b, warm);
        err = err ? err : run_dd(b, DISK_READ_TO_MEMORY, &into_memory->theirs[i]);
        disk_dd_forget(&b->dd);
        set_cache(b, warm);
        err = err ? err : run_dd(b, DISK_READ, &into_buffer->theirs[i]);
    }
    return err;
}

static int open_bench(struct bench *b, bool async)
{
    struct zero_stats s;
    int err = open_model(b, async);
    err = err ? err : take_libzero_error(zero_get_stats(b->z, &s));
    if (!err) {
        b->rank = s.place.rank;
        b->dd = (struct disk_dd){.dir = b->dir,
                                 .n = s.place.world < DISK_MAX_WRITERS ? s.place.world : DISK_MAX_WRITERS,
                                 .bytes = b->bytes};
    }
    return err;
}

static int measure_blocking(struct bench *b, struct results *r)
{
    double warm_up;
    int64_t n = b->o->repeat;
    int err = open_bench(b, false);
    err = err ? err : step(b);
    err = err ? err : run_save(b, &warm_up); /* also creates the folder */
    b->bytes = b->dd.bytes = disk_count_bytes(b->dir);
    for (int64_t i = 0; !err && i < n; i++)
        err = measure_round(b, r, i);
    for (int k = 0; !err && k < N_PAIRS; k++)
        set_medians(&r->pair[k], n);
    zero_unwrap(&b->z);
    return err;
}

/* Makes steps until ended() is true on rank 0, at least one. *ms is the median. */
static int steps_until(struct bench *b, bool (*ended)(struct bench *), double *ms)
{
    double seconds[MAX_STEPS], over = 0;
    int64_t n = 0;
    int err = 0;
    while (!err && !(over > 0) && n < MAX_STEPS) {
        int64_t start = zr_now_ns();
        err = step(b);
        seconds[n++] = seconds_since(start);
        over = b->rank == 0 && ended(b);
        err = err ? err : take_libzero_error(zero_mean(b->z, &over, 1));
    }
    *ms = report_median(seconds, n) * 1e3;
    return err;
}

static bool enough(struct bench *b)
{
    return ++b->n_plain >= N_STEPS;
}

static bool is_saved(struct bench *b)
{
    return atomic_load(&b->saved);
}

static bool dd_ended(struct bench *b)
{
    return disk_dd_ended(&b->dd);
}

static int measure_async(struct bench *b, struct results *r)
{
    double after = 0;
    int err = open_bench(b, true);
    err = err ? err : step(b);
    err = err ? err : steps_until(b, enough, &r->step_ms);
    err = err ? err : meet(b);
    int64_t begun = zr_now_ns();
    err = err ? err : take_libzero_error(zero_save(b->z, b->saves, NULL));
    r->call_ms = seconds_since(begun) * 1e3;
    err = err ? err : step(b);
    r->pays_ms = seconds_since(begun) * 1e3 - r->step_ms;
    err = err ? err : steps_until(b, is_saved, &r->during_ms);
    r->written_ms = seconds_since(begun) * 1e3;
    err = err ? err : take_libzero_error(zero_save_wait(b->z, NULL));
    err = err ? err : meet(b);
    begun = zr_now_ns();
    if (!err && b->rank == 0) {
        disk_dd_remove(&b->dd);
        sync();
        begun = zr_now_ns();
        err = disk_dd_start(&b->dd, DISK_WRITE);
    }
    err = err ? err : steps_until(b, dd_ended, &r->during_dd_ms);
    r->dd_written_ms = seconds_since(begun) * 1e3;
    if (!err && b->rank == 0)
        err = disk_dd_wait(&b->dd);
    err = err ? err : take_libzero_error(zero_mean(b->z, &after, 1));
    if (b->rank == 0)
        disk_dd_remove(&b->dd);
    zero_unwrap(&b->z);
    return err;
}

static json_t *pair_json(double gb, const struct pair *p)
{
    return json_pack("{s:f, s:f, s:f}", "gb_s", gb / p->ours_s, "dd_gb_s", gb / p->theirs_s, "ratio",
                     p->ratio);
}

static void report(const struct bench *b, const struct results *r)
{
    double gb = (double)b->bytes * 1e-9;
    if (b->o->json) {
        json_t *line = json_pack("{s:s, s:I, s:i}", "event", "checkpoint", "bytes", (json_int_t)b->bytes,
                                 "files", b->dd.n);
        for (int k = 0; k < N_PAIRS; k++)
            json_object_set_new(line, pairs[k].key, pair_json(gb, &r->pair[k]));
        json_object_update_new(line, json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "step_ms", r->step_ms,
                                               "save_call_ms", r->call_ms, "saving_step_ms", r->pays_ms,
                                               "step_while_saving_ms", r->during_ms, "step_while_dd_ms",
                                               r->during_dd_ms, "written_ms", r->written_ms, "dd_written_ms",
                                               r->dd_written_ms));
        report_line(line);
        return;
    }
    printf("%s: %s a checkpoint, %d file%s\n", b->o->model.name, report_bytes(b->bytes).text, b->dd.n,
           b->dd.n == 1 ? "" : "s");
    static const int order[N_PAIRS] = {SAVE, SAVE_DIRECT, COLD_MEMORY, COLD, WARM_MEMORY, WARM};
    for (int k = 0; k < N_PAIRS; k++) {
        const struct pair *p = &r->pair[order[k]];
        printf("%-10s %6.2f GB/s, %-24s %6.2f GB/s: %4.0f%%\n", pairs[order[k]].what, gb / p->ours_s,
               pairs[order[k]].beside, gb / p->theirs_s, 100 * p->ratio);
    }
    printf(
        "asynchronous: a step takes %.1f ms; the call to save %.1f ms, with the step after it %.1f ms more "
        "than a step; while the checkpoint is written, for %.0f ms, steps take %.1f ms\n",
        r->step_ms, r->call_ms, r->pays_ms, r->written_ms, r->during_ms);
    printf("              while dd writes as much instead, for %.0f ms, steps take %.1f ms\n",
           r->dd_written_ms, r->during_dd_ms);
}

int checkpoint_command(const char *name, int argc, char **argv)
{
    struct options o = {.stage = 1, .repeat = 3};
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    struct bench b = {.o = &o};
    struct results r = {0};
    mkdir(o.dir, 0777); /* if this fails, the save says why */
    snprintf(b.dir, sizeof b.dir, "%s/zero-bench", o.dir);
    mkdir(b.dir, 0777);
    snprintf(b.saves, sizeof b.saves, "%s/saves", b.dir);
    int err = measure_blocking(&b, &r);
    err = err ? err : measure_async(&b, &r);
    if (b.rank == 0)
        disk_remove_folder(b.dir);
    if (err) {
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
        return EXIT_FAILURE;
    }
    if (b.rank == 0)
        report(&b, &r);
    return EXIT_SUCCESS;
}
