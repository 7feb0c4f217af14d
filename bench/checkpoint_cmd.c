/* checkpoint_cmd.c: zero-bench checkpoint: how fast checkpoints are saved and loaded, beside dd on the same
 * disk, and what an asynchronous save costs the steps. The model is the tensors of a GPT-2 without its
 * arithmetic: each backward writes every gradient. */
#include "bench/arguments.h"
#include "bench/child.h"
#include "bench/commands.h"
#include "bench/report.h"
#include "bench/train.h"

#include "kernels/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KEY_STAGE = 0x300, KEY_DIR, KEY_REPEAT, KEY_JSON };

static const struct argp_option checkpoint_argp_options[] = {
    {"dir", KEY_DIR, "DIR", 0,
     "A folder on the disk to measure; it is made, and holds two checkpoints at the end (needed)", 2},
    {"stage", KEY_STAGE, "0..3", 0, "What is sharded (1)", 2},
    {"repeat", KEY_REPEAT, "N", 0, "Times that each is measured; the median counts (3)", 2},
    {"json", KEY_JSON, NULL, 0, "One JSON line, from rank 0", 2},
    {0},
};

struct options {
    struct model_options model;
    const char *dir;
    int stage;
    int64_t repeat;
    bool json;
};

#define MAX_REPEAT 25
#define N_STEPS    12

struct bench {
    const struct options *o;
    struct zero_tensor tensors[TRAIN_N_TENSORS];
    void *param[TRAIN_N_TENSORS], *grad[TRAIN_N_TENSORS];
    zero_ctx *z;
    int32_t rank;
    int64_t bytes; /* of a checkpoint, all ranks */
};

static error_t parse_checkpoint(int key, char *arg, struct argp_state *state)
{
    struct options *o = state->input;
    int64_t n;
    error_t err;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &o->model;
        return 0;
    case KEY_DIR:
        o->dir = arg;
        return 0;
    case KEY_STAGE:
        err = option_int(state, "--stage", arg, 0, 3, &n);
        o->stage = err ? o->stage : (int)n;
        return err;
    case KEY_REPEAT:
        return option_int(state, "--repeat", arg, 1, MAX_REPEAT, &o->repeat);
    case KEY_JSON:
        o->json = true;
        return 0;
    case ARGP_KEY_SUCCESS:
        if (!o->dir) {
            argp_error(state, "--dir: is needed");
            return EINVAL;
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static int told(int err)
{
    return err ? zr_fail(err, "%s", zero_last_error()) : 0;
}

static int open_model(struct bench *b, bool async)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    void *own[TRAIN_N_TENSORS];
    int err = 0;
    cfg.stage = b->o->stage;
    cfg.save_async = async;
    cfg.save_keep = 1;
    train_describe_f32(b->tensors, &b->o->model.config, NULL);
    b->bytes = 0;
    for (int t = 0; t < TRAIN_N_TENSORS; t++) {
        int64_t n = tensor_elements(&b->tensors[t]);
        float *p = malloc((size_t)n * sizeof *p);
        for (int64_t i = 0; p && i < n; i++) {
            p[i] = (float)(i % 1009) * 1e-3f;
        }
        err = p ? err : zr_fail(ZR_ERR_NOMEM, "no memory for %lld parameters", (long long)n);
        own[t] = b->param[t] = p;
        b->tensors[t].param = &b->param[t];
        b->tensors[t].grad = &b->grad[t];
        b->tensors[t].flags |= ZERO_GRAD_OVERWRITE;
        b->bytes += n * 12; /* master and two moments */
    }
    err = err ? err : told(zero_wrap(&b->z, b->tensors, TRAIN_N_TENSORS, &cfg));
    for (int t = 0; t < TRAIN_N_TENSORS; t++) {
        free(own[t]);
    }
    return err;
}

/* Gradients that are all there is of a model. */
static int step(struct bench *b)
{
    int32_t units = (int32_t)b->o->model.config.layers + 1;
    int err = 0;
    for (int32_t u = units; !err && u-- > 0;) {
        err = zero_begin(b->z, u, ZERO_BACKWARD);
        for (int t = 0; !err && t < TRAIN_N_TENSORS; t++) {
            const struct zero_tensor *x = &b->tensors[t];
            bool stacked = x->flags & ZERO_STACKED;
            if (stacked ? u == 0 : u != x->unit) {
                continue;
            }
            int64_t n = tensor_elements(x) / (stacked ? x->shape[0] : 1);
            float *g = (float *)b->grad[t] + (stacked ? (u - 1) * n : 0),
                  *p = (float *)b->param[t] + (stacked ? (u - 1) * n : 0);
            for (int64_t i = 0; i < n; i++) {
                g[i] = 0.5f * p[i] + 1e-3f;
            }
        }
        err = err ? err : zero_end(b->z, u, ZERO_BACKWARD);
    }
    struct zero_step_info info;
    return told(err ? err : zero_step(b->z, 1e-3f, &info));
}

static double seconds_since(int64_t start)
{
    return (double)(zr_now_ns() - start) * 1e-9;
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int64_t n)
{
    qsort(v, (size_t)n, sizeof *v, ascending);
    return v[n / 2];
}

/* dd of as many bytes, with fsync, and back; rank 0 only. */
static int run_dd(struct bench *b, bool write, double *seconds)
{
    char file[1024], in[1100], out[1100], count[64];
    snprintf(file, sizeof file, "%s/dd.tmp", b->o->dir);
    snprintf(in, sizeof in, "if=%s", write ? "/dev/zero" : file);
    snprintf(out, sizeof out, "of=%s", write ? file : "/dev/null");
    snprintf(count, sizeof count, "count=%lld", (long long)(b->bytes + (1 << 20) - 1) >> 20);
    char *const argv[] = {"dd", in, out, "bs=1M", count, "status=none", write ? "conv=fsync" : NULL, NULL};
    struct child c;
    int64_t start = zr_now_ns();
    if (write) {
        unlink(file); /* as a checkpoint's files are new */
        start = zr_now_ns();
    }
    if (child_open(&c, argv, false) || child_close(&c)) {
        return zr_fail(ZR_ERR_SYSTEM, "dd could not be run in %s", b->o->dir);
    }
    *seconds = seconds_since(start);
    return 0;
}

struct results {
    double save, load, dd_write, dd_read;                     /* seconds */
    double step_ms, saving_step_ms, save_call_ms, written_ms; /* asynchronous */
};

static int measure_blocking(struct bench *b, struct results *r)
{
    double save[MAX_REPEAT], load[MAX_REPEAT], dd_write[MAX_REPEAT], dd_read[MAX_REPEAT], all[1] = {0};
    int64_t n = b->o->repeat;
    int err = open_model(b, false);
    struct zero_stats s;
    err = err ? err : told(zero_stats(b->z, &s));
    b->rank = err ? 0 : s.rank;
    err = err ? err : step(b);
    err = err ? err : told(zero_save(b->z, b->o->dir)); /* makes the folder, warms up */
    for (int64_t i = 0; !err && i < n; i++) {           /* in turns, so that both meet the same disk */
        int64_t start = zr_now_ns();
        err = told(zero_save(b->z, b->o->dir));
        save[i] = seconds_since(start);
        if (!err && b->rank == 0) {
            err = run_dd(b, true, &dd_write[i]);
        }
        err = err ? err : told(zero_mean(b->z, all, 1));
    }
    for (int64_t i = 0; !err && i < n; i++) {
        int64_t start = zr_now_ns();
        err = told(zero_load(b->z, b->o->dir));
        load[i] = seconds_since(start);
        if (!err && b->rank == 0) {
            err = run_dd(b, false, &dd_read[i]);
        }
        err = err ? err : told(zero_mean(b->z, all, 1));
    }
    if (b->rank == 0) {
        char file[1024];
        snprintf(file, sizeof file, "%s/dd.tmp", b->o->dir);
        unlink(file);
    }
    if (!err) {
        r->save = median(save, n);
        r->load = median(load, n);
        r->dd_write = b->rank == 0 ? median(dd_write, n) : 0;
        r->dd_read = b->rank == 0 ? median(dd_read, n) : 0;
    }
    zero_unwrap(&b->z);
    return err;
}

static int measure_async(struct bench *b, struct results *r)
{
    double plain[N_STEPS], saving[N_STEPS];
    int err = open_model(b, true);
    err = err ? err : step(b);
    for (int i = 0; !err && i < N_STEPS; i++) {
        int64_t start = zr_now_ns();
        err = step(b);
        plain[i] = seconds_since(start);
    }
    int64_t begun = zr_now_ns();
    err = err ? err : told(zero_save(b->z, b->o->dir));
    r->save_call_ms = seconds_since(begun) * 1e3;
    for (int i = 0; !err && i < N_STEPS; i++) {
        int64_t start = zr_now_ns();
        err = step(b);
        saving[i] = seconds_since(start);
    }
    err = err ? err : told(zero_save_wait(b->z));
    r->written_ms = seconds_since(begun) * 1e3;
    if (!err) {
        r->step_ms = median(plain, N_STEPS) * 1e3;
        r->saving_step_ms = median(saving, N_STEPS) * 1e3;
    }
    zero_unwrap(&b->z);
    return err;
}

static void tell(const struct bench *b, const struct results *r)
{
    double gb = (double)b->bytes * 1e-9;
    if (b->o->json) {
        report_line(json_pack("{s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "event", "checkpoint",
                              "bytes", (json_int_t)b->bytes, "save_gb_s", gb / r->save, "dd_write_gb_s",
                              gb / r->dd_write, "load_gb_s", gb / r->load, "dd_read_gb_s", gb / r->dd_read,
                              "step_ms", r->step_ms, "saving_step_ms", r->saving_step_ms, "save_call_ms",
                              r->save_call_ms, "written_ms", r->written_ms));
        return;
    }
    printf("%s: %s a checkpoint\n", b->o->model.name, report_bytes(b->bytes).text);
    printf("save   %6.2f GB/s, dd with fsync %6.2f GB/s: %3.0f%%\n", gb / r->save, gb / r->dd_write,
           100 * r->dd_write / r->save);
    printf("load   %6.2f GB/s, dd            %6.2f GB/s: %3.0f%% (of what the system has in memory)\n",
           gb / r->load, gb / r->dd_read, 100 * r->dd_read / r->load);
    printf("asynchronous: a step takes %.1f ms, while a checkpoint is written %.1f ms; the call %.2f ms; on "
           "the disk after %.0f ms\n",
           r->step_ms, r->saving_step_ms, r->save_call_ms, r->written_ms);
}

int checkpoint_command(const char *name, int argc, char **argv)
{
    const struct argp_child children[] = {{&gpt2_config_argp, 0, "Model:", 1}, {0}};
    const struct argp argp = {
        .options = checkpoint_argp_options,
        .parser = parse_checkpoint,
        .doc =
            "Measures saving and loading checkpoints of a GPT-2's size on as many ranks as zero-run starts.",
        .children = children,
    };
    struct options o = {.stage = 1, .repeat = 3};
    int status = options_parse(&argp, name, argc, argv, &o);
    if (status) {
        return status;
    }
    struct bench b = {.o = &o};
    struct results r = {0};
    int err = measure_blocking(&b, &r);
    err = err ? err : measure_async(&b, &r);
    if (err) {
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
        return EXIT_FAILURE;
    }
    if (b.rank == 0) {
        tell(&b, &r);
    }
    return EXIT_SUCCESS;
}
