/* memory_run.c: see memory_run.h. */
#include "bench/memory_run.h"
#include "bench/child.h"
#include "bench/stage_table.h"

#include <jansson.h>
#include <libgen.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* zero-run as it is installed (beside this program), as it is built (in the folder of the front door), or
 * from PATH. */
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

struct argument {
    char text[48];
};

static char *option(struct argument *a, const char *name, int64_t n)
{
    snprintf(a->text, sizeof a->text, "--%s=%lld", name, (long long)n);
    return a->text;
}

static const char *name_of(int column, char text[STAGE_TABLE_NAME])
{
    return column == MEMORY_PLAIN ? "the plain program" : column_name(column, text);
}

static int read_bytes(const json_t *summary, const char *key, struct zero_bytes *out)
{
    const json_t *o = json_object_get(summary, key);
#define FIELD(name, text) out->name = json_integer_value(json_object_get(o, #name));
    ZERO_MEM_MAP(FIELD)
    FIELD(total, "")
#undef FIELD
    return json_is_object(o) ? 0 : -1;
}

static int read_summary(const json_t *line, struct memory_stage *out)
{
    const char *sha256 = json_string_value(json_object_get(line, "state_sha256"));
    snprintf(out->state_sha256, sizeof out->state_sha256, "%s", sha256 ? sha256 : "");
    out->peak_resident = json_integer_value(json_object_get(line, "peak_rss_bytes"));
    return read_bytes(line, "planned_bytes", &out->planned) || read_bytes(line, "bytes", &out->allocated);
}

static void read_step(struct memory_runs *runs, const json_t *line, const char *what,
                      struct memory_stage *out)
{
    int64_t step = json_integer_value(json_object_get(line, "step"));
    const json_t *loss = json_object_get(line, "loss");
    if (step < 1 || step > runs->steps)
        return;
    out->loss[step - 1] = json_is_number(loss) ? json_number_value(loss) : NAN;
    double in_run = (double)step / (double)(runs->steps + 1); /* the last part is for the summary */
    progress_show(&runs->progress, (runs->n_done + in_run) / runs->n_runs, "%s: step %lld of %lld", what,
                  (long long)step, (long long)runs->steps);
}

/* Takes what is needed from a run's lines; returns 0 if a summary was among them. */
static int read_lines(struct memory_runs *runs, FILE *lines, const char *what, struct memory_stage *out)
{
    char *line = NULL;
    size_t capacity = 0;
    int err = -1;
    while (getline(&line, &capacity, lines) > 0) {
        json_t *o = json_loads(line, 0, NULL);
        const char *event = json_string_value(json_object_get(o, "event"));
        if (event && !strcmp(event, "summary"))
            err = read_summary(o, out);
        else if (event && !strcmp(event, "step"))
            read_step(runs, o, what, out);
        json_decref(o);
    }
    free(line);
    return err;
}

static int open_run(const struct memory_runs *runs, int column, struct child *child)
{
    const struct gpt2_config *c = &runs->config;
    char self[PATH_MAX], zero_run[PATH_MAX + 32];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0) {
        fprintf(stderr, "zero-bench memory: cannot find this program: %s\n", strerror(errno));
        return EXIT_FAILURE;
    }
    self[n] = 0;
    find_zero_run(self, zero_run);
    struct argument ranks, a[9];
    bool plain = column == MEMORY_PLAIN;
    int hybrid = plain ? 0 : hybrid_of_column(column);
    snprintf(ranks.text, sizeof ranks.text, "%lld", plain ? 1 : (long long)runs->ranks);
    char *argv[] = {
        zero_run,
        "--raw",
        "-n",
        ranks.text,
        self,
        "train",
        "--json",
        runs->dtype == ZERO_BF16 ? "--dtype=bf16" : "--dtype=f32",
        plain ? "--plain" : option(&a[0], "stage", stage_of_column(column)),
        option(&a[1], "steps", runs->steps),
        option(&a[2], "batch", runs->batch),
        option(&a[3], "layers", c->layers),
        option(&a[4], "heads", c->heads),
        option(&a[5], "channels", c->channels),
        option(&a[6], "context", c->context),
        option(&a[7], "vocab", c->vocab),
        hybrid == ZERO_HYBRID_HSDP ? "--hybrid=hsdp"
        : hybrid                   ? "--hybrid=hfsdp"
                                   : NULL,
        option(&a[8], "shard-group", runs->shard_group),
        NULL,
    };
    if (child_open(child, argv, false)) {
        fprintf(stderr, "zero-bench memory: cannot run %s: %s\n", zero_run, strerror(errno));
        return EXIT_FAILURE;
    }
    return 0;
}

int memory_run(struct memory_runs *runs, int column, struct memory_stage *out)
{
    char name[STAGE_TABLE_NAME];
    const char *what = name_of(column, name);
    struct child child;
    *out = (struct memory_stage){.loss = malloc((size_t)runs->steps * sizeof *out->loss)};
    if (!out->loss) {
        fprintf(stderr, "zero-bench memory: no memory for %lld losses\n", (long long)runs->steps);
        return EXIT_FAILURE;
    }
    for (int64_t i = 0; i < runs->steps; i++)
        out->loss[i] = NAN;
    progress_show(&runs->progress, (double)runs->n_done / runs->n_runs, "%s begins", what);
    int err = open_run(runs, column, &child);
    if (err)
        return err;
    err = read_lines(runs, child.pipe, what, out);
    int code = child_close(&child);
    runs->n_done++;
    progress_clear(&runs->progress);
    if (code || err) {
        fprintf(stderr, "zero-bench memory: the run of %s ended with code %d%s\n", what, code,
                code ? "" : " but without a summary");
        return code == EXIT_USAGE ? EXIT_USAGE : EXIT_FAILURE;
    }
    return 0;
}
