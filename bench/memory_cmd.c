/* memory_cmd.c: zero-bench memory: trains a few steps at every stage on N ranks and compares the memory
 * planned, allocated and really resident. Each stage is a run of its own (zero-run -n N zero-bench train
 * --json), so that one leaves nothing behind that another could use. */
#include "bench/arguments.h"
#include "bench/child.h"
#include "bench/commands.h"
#include "bench/memory_plot.h"
#include "bench/plot.h"
#include "bench/report.h"
#include "bench/stage_table.h"
#include "bench/train.h"

#include <libgen.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>

struct memory_options {
    struct model_options model;
    int64_t ranks, steps, batch;
    int64_t shard_group; /* 0: no hybrids */
    int dtype;
    const char *plot;
    bool json;
};

static error_t read_plot(struct argp_state *state, const struct option_row *row, char *arg, void *options)
{
    struct memory_options *o = options;
    if (!plot_can_draw(arg)) {
        argp_error(state, "--%s: '%s' does not end in .svg or .png", row->name, arg);
        return EINVAL;
    }
    o->plot = arg;
    return 0;
}

static const struct option_row rows[] = {
    {"dtype", "f32|bf16", "Of weights, gradients and activations (f32)", 1,
     OPTION_WORD(struct memory_options, dtype, option_dtypes)},
    {"batch", "N", "Rows in a micro-batch of one rank (4)", 1,
     OPTION_INT(struct memory_options, batch, 1, 1000000)},
    {"ranks", "N", "Ranks to run on (4)", 1, OPTION_INT(struct memory_options, ranks, 1, 4096)},
    {"shard-group", "N", "Groups of N ranks, a number that divides --ranks: HSDP and HFSDP, too", 1,
     OPTION_INT(struct memory_options, shard_group, 1, 4096)},
    {"steps", "N", "Steps at each stage (3)", 1, OPTION_INT(struct memory_options, steps, 1, 1000000)},
    {"plot", "FILE", "Draw the table into FILE.svg or FILE.png, with gnuplot", 1, OPTION_BY(read_plot)},
    {"json", NULL, "A JSON line per stage", 1, OPTION_FLAG(struct memory_options, json)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc = "Trains a few steps at every stage, and with groups as hybrids too, and compares the memory that "
           "was planned, allocated and "
           "really resident.",
    .read_word = option_refuse_word,
    OPTIONS_WITH_MODEL(struct memory_options),
};

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

static int read_bytes(const json_t *summary, const char *key, struct zero_bytes *out)
{
    const json_t *o = json_object_get(summary, key);
#define FIELD(name, text) out->name = json_integer_value(json_object_get(o, #name));
    ZERO_MEM_MAP(FIELD)
    FIELD(total, "")
#undef FIELD
    return json_is_object(o) ? 0 : -1;
}

/* Takes what is needed from the summary among a run's lines; returns 0 if there was one. */
static int read_summary(FILE *lines, struct memory_stage *out)
{
    char *line = NULL;
    size_t capacity = 0;
    int err = -1;
    while (getline(&line, &capacity, lines) > 0) {
        json_t *o = json_loads(line, 0, NULL);
        const char *event = json_string_value(json_object_get(o, "event"));
        if (event && !strcmp(event, "summary")) {
            err = read_bytes(o, "planned_bytes", &out->planned) || read_bytes(o, "bytes", &out->allocated);
            out->peak_resident = json_integer_value(json_object_get(o, "peak_rss_bytes"));
        }
        json_decref(o);
    }
    free(line);
    return err;
}

static int run_column(const struct memory_options *o, int column, struct memory_stage *out)
{
    const struct gpt2_config *c = &o->model.config;
    char self[PATH_MAX], zero_run[PATH_MAX + 32];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0) {
        fprintf(stderr, "zero-bench memory: cannot find this program: %s\n", strerror(errno));
        return EXIT_FAILURE;
    }
    self[n] = 0;
    find_zero_run(self, zero_run);
    struct argument ranks, a[9];
    char name[STAGE_TABLE_NAME];
    int hybrid = hybrid_of_column(column);
    snprintf(ranks.text, sizeof ranks.text, "%lld", (long long)o->ranks);
    char *argv[] = {
        zero_run,
        "--raw",
        "-n",
        ranks.text,
        self,
        "train",
        "--json",
        o->dtype == ZERO_BF16 ? "--dtype=bf16" : "--dtype=f32",
        option(&a[0], "stage", stage_of_column(column)),
        option(&a[1], "steps", o->steps),
        option(&a[2], "batch", o->batch),
        option(&a[3], "layers", c->layers),
        option(&a[4], "heads", c->heads),
        option(&a[5], "channels", c->channels),
        option(&a[6], "context", c->context),
        option(&a[7], "vocab", c->vocab),
        hybrid == ZERO_HYBRID_HSDP ? "--hybrid=hsdp"
        : hybrid                   ? "--hybrid=hfsdp"
                                   : NULL,
        option(&a[8], "shard-group", o->shard_group),
        NULL,
    };
    struct child child;
    if (child_open(&child, argv, false)) {
        fprintf(stderr, "zero-bench memory: cannot run %s: %s\n", zero_run, strerror(errno));
        return EXIT_FAILURE;
    }
    int err = read_summary(child.pipe, out), code = child_close(&child);
    if (code || err) {
        fprintf(stderr, "zero-bench memory: the run of %s ended with code %d%s\n", column_name(column, name),
                code, code ? "" : " but without a summary");
        return code == EXIT_USAGE ? EXIT_USAGE : EXIT_FAILURE;
    }
    return 0;
}

static void print_json(const struct memory_options *o, const struct memory_stage *m, int column)
{
    json_t *line = json_pack("{s:i, s:o, s:o, s:I}", "stage", stage_of_column(column), "planned_bytes",
                             report_bytes_json(&m->planned), "bytes", report_bytes_json(&m->allocated),
                             "peak_rss_bytes", (json_int_t)m->peak_resident);
    if (hybrid_of_column(column)) {
        json_object_set_new(line, "hybrid",
                            json_string(option_word_of(option_hybrids, hybrid_of_column(column))));
        json_object_set_new(line, "shard_group", json_integer(o->shard_group));
    }
    report_line(line);
}

static void print_table(const struct memory_options *o, const struct memory_stage *stages, int n)
{
    struct zero_bytes planned[N_COLUMNS];
    int64_t allocated[N_COLUMNS], resident[N_COLUMNS];
    for (int s = 0; s < n; s++) {
        planned[s] = stages[s].planned;
        allocated[s] = stages[s].allocated.total;
        resident[s] = stages[s].peak_resident;
    }
    printf("%s: %.2f million parameters, %s, %lld rank%s, %lld rows of %lld tokens each\n\n", o->model.name,
           (double)gpt2_n_params(&o->model.config) * 1e-6, option_word_of(option_dtypes, o->dtype),
           (long long)o->ranks, o->ranks == 1 ? "" : "s", (long long)o->batch,
           (long long)o->model.config.context);
    stage_table_head("memory per rank", n);
    stage_table_memory(planned, "planned", n);
    stage_table_bytes("allocated", allocated, n);
    stage_table_bytes("peak resident", resident, n);
    printf("\nPlanned and allocated are libzero's: weights, gradients, optimizer state. Resident is all of a "
           "rank: those,\n"
           "activations, text and code, pages that several ranks map counted in equal parts.\n");
}

int memory_command(const char *name, int argc, char **argv)
{
    struct memory_options o = {.ranks = 4, .steps = 3, .batch = 4, .dtype = ZERO_F32};
    int status = options_parse(&table, name, argc, argv, &o);
    struct memory_stage stages[N_COLUMNS] = {0};
    int n = o.shard_group ? N_COLUMNS : N_STAGES;
    for (int s = 0; !status && s < n; s++) {
        status = run_column(&o, s, &stages[s]);
        if (!status && o.json)
            print_json(&o, &stages[s], s);
    }
    if (!status && !o.json)
        print_table(&o, stages, n);
    if (!status && o.plot) {
        status = memory_plot(o.plot, o.model.name, (int)o.ranks, stages, n);
        if (!status && !o.json)
            printf("Drawn in %s.\n", o.plot);
    }
    return status;
}
