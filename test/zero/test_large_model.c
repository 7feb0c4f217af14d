/* SPDX-License-Identifier: Apache-2.0 */
/* test_large_model.c: a model whose parameters, gradients and optimizer state are 4 times the memory limit of
 * a rank. There are 8 ranks, each a process in a separate memory control group. They wrap the model with
 * cfg.init, train, save, export, load and import.
 *
 * The limit of a group is the plan's total, one unit, and what the same program with a small model uses
 * beyond its plan. In one group with 8 times the plan and the unit, they run up to the first step. zero_wrap
 * must refuse a limit equal to the plan. Skipped if control groups of version 1 cannot be made. */
#include "test/held_port.h"
#include "zero/zero.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORLD = 8, SMALL = 4, LARGE = 64, UNIT = 256 << 10, SKIPPED = 77 };

static struct zero_tensor tensors[LARGE];
static void *param[LARGE], *grad[LARGE];
static char names[LARGE][16], groups[WORLD][512], folder[] = "/tmp/zero-large-XXXXXX";
static pid_t ranks[WORLD];

static void die(int rank, const char *what)
{
    fprintf(stderr, "rank %d: %s: %s %s\n", rank, what, zero_last_error(), errno ? strerror(errno) : "");
    exit(1);
}

static float value_of(int32_t tensor, int64_t i)
{
    return (float)((tensor * 7919 + i * 31) % 1009) * 1e-3f;
}

static int init(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    (void)arg;
    for (int64_t i = 0; i < n; i++)
        ((float *)dst)[i] = value_of(tensor, first + i);
    return 0;
}

static struct zero_config config(int rank, const char *url)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = 3;
    cfg.launch.rank = rank;
    cfg.launch.world = WORLD;
    cfg.launch.rendezvous = url;
    cfg.launch.timeout_ms = 300000;
    return cfg;
}

static void make_table(int n)
{
    memset(param, 0, sizeof param);
    for (int t = 0; t < n; t++) {
        snprintf(names[t], sizeof names[t], "unit%d", t);
        tensors[t] = (struct zero_tensor){.name = names[t],
                                          .param = &param[t],
                                          .grad = &grad[t],
                                          .shape = {UNIT},
                                          .dtype = ZERO_F32,
                                          .unit = t};
    }
}

static void step(int rank, zero_ctx *z, int n)
{
    for (int t = 0; t < n; t++)
        if (zero_begin(z, t, ZERO_FORWARD) || zero_end(z, t, ZERO_FORWARD))
            die(rank, "forward");
    for (int t = n; t-- > 0;) {
        if (zero_begin(z, t, ZERO_BACKWARD))
            die(rank, "backward");
        for (int64_t i = 0; i < UNIT; i++)
            ((float *)grad[t])[i] = 0.5f * ((float *)param[t])[i] + 0.25f;
        if (zero_end(z, t, ZERO_BACKWARD))
            die(rank, "backward");
    }
    if (zero_step(z, 1e-2f, NULL))
        die(rank, "zero_step");
}

/* Reads a few elements of every tensor. */
static void sample(int rank, zero_ctx *z, int n, float *out)
{
    for (int t = 0; t < n; t++)
        if (zero_read(z, t, ZERO_VALUE_PARAM, (t * 1237) % (UNIT - 4), 4, out + 4 * t))
            die(rank, "zero_read");
}

/* How to run the ranks. */
struct trial {
    int n;            /* units */
    bool together;    /* all ranks are in the first group */
    const char *says; /* part of the error of zero_wrap; NULL: no error */
    long long limit;
};

static void run_rank(int rank, const char *url, const struct trial *trial)
{
    struct zero_config cfg = config(rank, url);
    float trained[4 * LARGE], again[4 * LARGE];
    int n = trial->n;
    zero_ctx *z;
    cfg.init_from = ZERO_INIT_CALL;
    cfg.init = init;
    int err = zero_wrap(&z, tensors, n, &cfg);
    const char *text = zero_last_error();
    if (trial->says) {
        /* The limit is too small for every rank, and the message names the first rank's group. */
        if (err == ZERO_ERR_NOMEM && strstr(text, trial->says) && strstr(text, groups[0]))
            exit(0);
        die(rank, "the limit is not what zero_wrap says");
    }
    if (err)
        die(rank, "zero_wrap");
    sample(rank, z, n, trained);
    for (int t = 0; t < n; t++)
        for (int i = 0; i < 4; i++)
            if (trained[4 * t + i] != value_of(t, (t * 1237) % (UNIT - 4) + i))
                die(rank, "cfg.init's values are not there");
    step(rank, z, n);
    if (trial->together)
        exit(zero_unwrap(&z));
    sample(rank, z, n, trained);
    if (zero_save(z, folder, NULL) || zero_export(z, folder, NULL, 0, 16 << 20) || zero_unwrap(&z))
        die(rank, "saving");
    cfg.init_from = ZERO_INIT_LATER;
    cfg.init = NULL;
    for (int way = 0; way < 2; way++) {
        memset(param, 0, sizeof param);
        if (zero_wrap(&z, tensors, n, &cfg))
            die(rank, "zero_wrap");
        if (way == 0 ? zero_load(z, folder) : zero_import(z, folder, NULL, 0))
            die(rank, way == 0 ? "zero_load" : "zero_import");
        sample(rank, z, n, again);
        if (memcmp(again, trained, (size_t)n * 4 * sizeof *again) != 0)
            die(rank, "other values came back");
        step(rank, z, n);
        if (zero_unwrap(&z))
            die(rank, "zero_unwrap");
    }
    exit(0);
}

/* ---- control groups ---- */

static long long ask(int rank, const char *file)
{
    char path[600];
    long long n = -1;
    snprintf(path, sizeof path, "%.500s/%.60s", groups[rank], file);
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%lld", &n) != 1)
        n = -1;
    if (f)
        fclose(f);
    return n;
}

static int report(int rank, const char *file, long long n)
{
    char path[600];
    snprintf(path, sizeof path, "%.500s/%.60s", groups[rank], file);
    FILE *f = fopen(path, "w");
    int err = !f || fprintf(f, "%lld\n", n) < 0;
    if (f)
        err |= fclose(f);
    return err;
}

static const char *make_groups(void)
{
#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
    return "a sanitizer's own memory would count";
#endif
    char line[512], own[512] = "";
    FILE *f = fopen("/proc/self/cgroup", "r");
    while (f && fgets(line, sizeof line, f)) {
        char *at = strstr(line, ":memory:");
        if (at)
            snprintf(own, sizeof own, "%.*s", (int)strcspn(at + 8, "\n"), at + 8);
    }
    if (f)
        fclose(f);
    if (!*own)
        return "no memory control group of version 1";
    for (int r = 0; r < WORLD; r++) {
        snprintf(groups[r], sizeof groups[r], "/sys/fs/cgroup/memory%.300s/zero-%d-%d", own, (int)getpid(),
                 r);
        if (mkdir(groups[r], 0755))
            return strerror(errno);
        if (report(r, "memory.limit_in_bytes", 1LL << 40))
            return "its limit cannot be set";
    }
    return NULL;
}

static void remove_groups(void)
{
    for (int r = 0; r < WORLD; r++)
        if (groups[r][0])
            rmdir(groups[r]);
}

/* Ends the test, and leaves no rank and no group behind. */
static void on_signal(int number)
{
    for (int r = 0; r < WORLD; r++)
        if (ranks[r] > 0)
            kill(ranks[r], SIGKILL);
    for (int r = 0; r < WORLD; r++)
        if (ranks[r] > 0)
            waitpid(ranks[r], NULL, 0);
    remove_groups();
    _exit(128 + number);
}

static void begin_rank(int r, const char *url, const struct trial *t)
{
    signal(SIGTERM, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    if (report(t->together ? 0 : r, "cgroup.procs", getpid()))
        die(r, "cannot join its group");
    run_rank(r, url, t);
}

/* Returns how many ranks failed. *peak: most bytes that a group used. */
static int run_world(const struct trial *t, long long *peak)
{
    char url[64];
    int n_failed = 0;
    make_table(t->n);
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", held_port());
    for (int r = 0; r < WORLD; r++) {
        if (report(r, "memory.limit_in_bytes", t->limit) || report(r, "memory.max_usage_in_bytes", 0) ||
            report(r, "memory.failcnt", 0))
            fprintf(stderr, "rank %d's group cannot be set\n", r), n_failed++;
        fflush(NULL);
        ranks[r] = fork();
        if (ranks[r] == 0)
            begin_rank(r, url, t);
    }
    *peak = 0;
    for (int r = 0; r < WORLD; r++) {
        int status = -1, group = t->together ? 0 : r;
        waitpid(ranks[r], &status, 0);
        ranks[r] = 0;
        long long most = ask(group, "memory.max_usage_in_bytes");
        *peak = most > *peak ? most : *peak;
        if (status != 0) {
            fprintf(stderr, "rank %d ended with status %d, %lld bytes at most of %lld, %lld refused\n", r,
                    status, most, t->limit, ask(group, "memory.failcnt"));
            n_failed++;
        }
    }
    return n_failed;
}

static long long plan_bytes(int n)
{
    struct zero_config cfg = config(0, NULL);
    struct zero_plan_info info;
    make_table(n);
    if (zero_plan(tensors, n, &cfg, &info))
        die(0, "zero_plan");
    return info.bytes.total;
}

/* Runs the large model. A run with the small model first shows how much the program uses beyond its plan. */
static int run_large(bool together)
{
    long long peak, unit = UNIT * 4LL, model = LARGE * UNIT * 16LL; /* f32 with AdamW: 16 bytes per element */
    long long n = together ? WORLD : 1, plan = plan_bytes(LARGE);
    struct trial t = {.n = SMALL, .together = together, .limit = 1LL << 40};
    if (run_world(&t, &peak))
        return 1;
    long long base = peak - n * plan_bytes(SMALL);
    t.n = LARGE;
    t.limit = n * (plan + unit) + base;
    printf("%lld x (plan %lld + unit %lld) + base %lld = limit %lld bytes of %s, the model %lld\n", n, plan,
           unit, base, t.limit, together ? "all ranks" : "each rank", model);
    if (!together && 4 * t.limit > model) {
        fprintf(stderr, "the model is less than 4 times the limit\n");
        return 1;
    }
    if (run_world(&t, &peak))
        return 1;
    printf("%lld bytes at most\n", peak);
    t.limit = n * plan;
    t.says = together ? "for each of 8 ranks in memory control group"
                      : "for each of 1 ranks in memory control group";
    return run_world(&t, &peak);
}

int main(void)
{
    const char *why = make_groups();
    if (why) {
        remove_groups();
        printf("skipped: %s\n", why);
        return SKIPPED;
    }
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    int n_failed = !mkdtemp(folder);
    if (!n_failed)
        n_failed = run_large(false);
    if (!n_failed)
        n_failed = run_large(true);
    remove_groups();
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command) || n_failed ? 1 : 0;
}
