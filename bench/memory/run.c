/* SPDX-License-Identifier: Apache-2.0 */
/* run.c: runs zero-bench train under zero-run, and reads its JSON lines. */
#include "bench/memory/run.h"
#include "bench/child.h"
#include "bench/schedule/pipeline_stages.h"

#include <jansson.h>
#include <libgen.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Finds zero-run as it is installed (in this program's folder), as it is built, or in PATH. */
static void find_zero_run(const char *self, char out[PATH_MAX + 32])
{
    static const char *const places[] = {"", "../zero/"};
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", self);
    const char *dir = dirname(folder);
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        snprintf(out, PATH_MAX + 32, "%s/%szero-run", dir, places[i]);
        if (!access(out, X_OK))
            return;
    }
    strcpy(out, "zero-run");
}

/* A command line, built word by word. */
enum { MAX_WORDS = 42 };
struct command {
    char text[MAX_WORDS][48];
    char *argv[MAX_WORDS + 1];
    int n;
};

static void add(struct command *c, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void add(struct command *c, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(c->text[c->n], sizeof c->text[c->n], fmt, ap);
    va_end(ap);
    c->argv[c->n] = c->text[c->n];
    c->n++;
}

static void add_number(struct command *c, const char *name, int64_t n)
{
    add(c, "--%s=%lld", name, (long long)n);
}

/* Adds a path, which must outlive the command. */
static void add_path(struct command *c, char *path)
{
    c->argv[c->n++] = path;
}

static int read_bytes(const json_t *rank, const char *key, struct zero_bytes *out)
{
    const json_t *o = json_object_get(rank, key);
#define FIELD(name, text) out->name = json_integer_value(json_object_get(o, #name));
    ZERO_MEM_MAP(FIELD)
    FIELD(total, "")
#undef FIELD
    return json_is_object(o) ? 0 : -1;
}

static int read_rank(const json_t *o, struct report_rank *out)
{
    out->activation_bytes = json_integer_value(json_object_get(o, "activation_bytes"));
    out->peak_rss_bytes = json_integer_value(json_object_get(o, "peak_rss_bytes"));
    return read_bytes(o, "planned_bytes", &out->planned) || read_bytes(o, "bytes", &out->allocated);
}

/* Memory of the library and activations. */
static int64_t allocated_bytes(const struct report_rank *r)
{
    return r->allocated.total + r->activation_bytes;
}

/* Reads the summary of a run on `ranks` ranks into a column. With --pp the summary has an entry for each rank
 * of the pipeline, which out->n_ranks counts. Otherwise one entry stands for all ranks, and n_ranks is 1. */
static int read_summary(const json_t *line, int64_t ranks, struct memory_column *out)
{
    const char *sha256 = json_string_value(json_object_get(line, "state_sha256"));
    const json_t *pp_ranks = json_object_get(line, "pp_ranks");
    snprintf(out->state_sha256, sizeof out->state_sha256, "%s", sha256 ? sha256 : "");
    out->peak_device_bytes = json_integer_value(json_object_get(line, "peak_device_bytes"));
    out->n_ranks = pp_ranks ? (int32_t)json_array_size(pp_ranks) : 1;
    out->ranks = calloc((size_t)out->n_ranks, sizeof *out->ranks);
    if (!out->ranks || out->n_ranks < 1)
        return -1;
    for (int32_t i = 0; i < out->n_ranks; i++) {
        if (read_rank(pp_ranks ? json_array_get(pp_ranks, (size_t)i) : line, &out->ranks[i]))
            return -1;
        if (allocated_bytes(&out->ranks[i]) > allocated_bytes(&out->ranks[out->fullest_rank]))
            out->fullest_rank = i;
        out->resident_of_all += out->ranks[i].peak_rss_bytes * (ranks / out->n_ranks);
    }
    out->fullest = out->ranks[out->fullest_rank];
    return 0;
}

/* Reads the line of one step: keeps its loss, and shows the progress. */
static void read_step(struct memory_runs *runs, const json_t *line, struct memory_column *out)
{
    int64_t step = json_integer_value(json_object_get(line, "step"));
    const json_t *loss = json_object_get(line, "loss");
    if (step < 1 || step > runs->o->steps)
        return;
    out->loss[step - 1] = json_is_number(loss) ? json_number_value(loss) : NAN;
    /* the last part of the bar is for the summary */
    double in_run = (double)step / (double)(runs->o->steps + 1);
    progress_show(&runs->progress, (runs->n_done + in_run) / runs->n_runs, "%s: step %lld of %lld", out->name,
                  (long long)step, (long long)runs->o->steps);
}

/* Reads all lines of a run. Returns 0 if there was a summary. */
static int read_lines(struct memory_runs *runs, int64_t ranks, FILE *lines, struct memory_column *out)
{
    char *line = NULL;
    size_t capacity = 0;
    int err = -1;
    while (getline(&line, &capacity, lines) > 0) {
        json_t *o = json_loads(line, 0, NULL);
        const char *event = json_string_value(json_object_get(o, "event"));
        if (event && !strcmp(event, "summary"))
            err = read_summary(o, ranks, out);
        else if (event && !strcmp(event, "step"))
            read_step(runs, o, out);
        json_decref(o);
    }
    free(line);
    return err;
}

/* The number of ranks of a run. The plain program is one process. */
static int64_t ranks_of(const struct memory_runs *runs, const struct memory_column *m)
{
    return m->plain ? 1 : runs->o->ranks;
}

static void add_sizes(struct command *a, const struct memory_runs *runs)
{
    const struct model_config *c = &runs->o->model.config;
    add_number(a, "steps", runs->o->steps);
    add_number(a, "batch", runs->o->batch);
    add_number(a, "accum", runs->o->accum);
    add_number(a, "layers", c->layers);
    add_number(a, "context", c->context);
    if (c->recompute)
        add(a, "--recompute");
    if (c->hf) {
        add(a, "--model=%s", runs->o->model.dir);
        return;
    }
    add_number(a, "heads", c->heads);
    add_number(a, "channels", c->channels);
    add_number(a, "vocab", c->vocab);
}

/* Adds the options of tensor, context and pipeline parallelism. */
static void add_parallelism(struct command *a, const struct memory_runs *runs)
{
    if (runs->o->model.config.tp > 1)
        add_number(a, "tp", runs->o->model.config.tp);
    if (runs->o->model.config.sequence)
        add(a, "--sequence-parallel");
    const struct model_config *c = &runs->o->model.config;
    if (c->cp > 1)
        add_number(a, "cp", c->cp);
    if (c->cp_form)
        add(a, "--cp-form=%s", option_word_of(model_cp_forms, c->cp_form));
    if (c->cp_order)
        add(a, "--cp-order=%s", option_word_of(model_cp_orders, c->cp_order));
    if (c->cp_heads)
        add_number(a, "cp-heads", c->cp_heads);
    if (runs->o->pp == 1)
        return;
    add_number(a, "pp", runs->o->pp);
    add(a, "--schedule=%s", option_word_of(pipe_schedules, runs->o->schedule));
    add_number(a, "stages-per-rank", runs->o->stages_per_rank);
}

static void add_states(struct command *a, const struct states_options *s)
{
    if (s->grad_sum)
        add(a, "--grad-sum-dtype=%s", option_word_of(option_dtypes, s->grad_sum));
    add(a, "--masters=%s", option_word_of(option_masters, s->masters));
    add(a, "--moments=%s", option_word_of(option_moments, s->moments));
    add(a, "--states=%s", option_word_of(option_states, s->states));
    if (s->dir) {
        add(a, "--states-dir");
        add_path(a, (char *)s->dir);
    }
}

static void add_hybrid(struct command *a, const struct memory_options *o, int hybrid)
{
    const struct model_config *c = &o->model.config;
    int64_t tp = c->tp > 1 ? c->tp : 1, cp = c->cp > 1 ? c->cp : 1, n_dp = o->ranks / (o->pp * cp * tp);
    /* one copy of the model if dp_shard is n_dp; libzero refuses a dp_shard above n_dp */
    add(a, "--hybrid=%s", option_word_of(option_hybrids, hybrid));
    add_number(a, "dp-replicate", n_dp > o->dp_shard ? n_dp / o->dp_shard : 1);
    add_number(a, "dp-shard", o->dp_shard);
}

/* Starts "zero-run --raw -n N zero-bench train --json ..." for a column. */
static int open_run(const struct memory_runs *runs, const struct memory_column *m, struct child *child)
{
    char self[PATH_MAX], zero_run[PATH_MAX + 32];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0) {
        fprintf(stderr, "zero-bench memory: cannot find this program: %s\n", strerror(errno));
        return EXIT_FAILURE;
    }
    self[n] = 0;
    find_zero_run(self, zero_run);
    struct command a = {0};
    add_path(&a, zero_run);
    add(&a, "--raw");
    add(&a, "-n");
    add(&a, "%lld", (long long)ranks_of(runs, m));
    add_path(&a, self);
    add(&a, "train");
    add(&a, "--json");
    add(&a, "--dtype=%s", option_word_of(option_dtypes, runs->o->dtype));
    add(&a, "--device=%s", option_word_of(option_devices, runs->o->device));
    add_sizes(&a, runs);
    if (m->plain) {
        add(&a, "--plain");
    } else {
        add_number(&a, "stage", m->stage);
        add_parallelism(&a, runs);
        add_states(&a, &m->states);
    }
    if (m->hybrid)
        add_hybrid(&a, runs->o, m->hybrid);
    if (child_open(child, a.argv, /* to_child */ false)) {
        fprintf(stderr, "zero-bench memory: cannot run %s: %s\n", zero_run, strerror(errno));
        return EXIT_FAILURE;
    }
    return 0;
}

int memory_run(struct memory_runs *runs, struct memory_column *m)
{
    struct child child;
    m->loss = malloc((size_t)runs->o->steps * sizeof *m->loss);
    if (!m->loss) {
        fprintf(stderr, "zero-bench memory: no memory for %lld losses\n", (long long)runs->o->steps);
        return EXIT_FAILURE;
    }
    for (int64_t i = 0; i < runs->o->steps; i++)
        m->loss[i] = NAN;
    progress_show(&runs->progress, (double)runs->n_done / runs->n_runs, "%s begins", m->name);
    int err = open_run(runs, m, &child);
    if (err)
        return err;
    err = read_lines(runs, ranks_of(runs, m), child.pipe, m);
    int code = child_close(&child);
    runs->n_done++;
    progress_clear(&runs->progress);
    if (code || err) {
        fprintf(stderr, "zero-bench memory: the run of %s ended with code %d%s\n", m->name, code,
                code ? "" : " but without a summary");
        return code == EXIT_USAGE ? EXIT_USAGE : EXIT_FAILURE;
    }
    return 0;
}

void memory_column_free(struct memory_column *m)
{
    free(m->ranks);
    free(m->loss);
    *m = (struct memory_column){0};
}
