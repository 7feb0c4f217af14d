/* memory_cmd.c: zero-bench memory: trains a few steps at every stage on N ranks and compares the memory
 * planned, allocated and really resident. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/loss_plot.h"
#include "bench/memory_fit.h"
#include "bench/memory_plot.h"
#include "bench/memory_run.h"
#include "bench/plot.h"
#include "bench/report.h"
#include "bench/stage_table.h"

#include <stdio.h>
#include <string.h>

static const char who[] = "zero-bench memory";

struct memory_options {
    struct model_options model;
    int64_t ranks, steps, batch;
    int64_t shard_group; /* 0: no hybrids */
    int dtype;
    int64_t fit; /* -1: take the model as it is; 0: what is free; else so many bytes */
    const char *plot, *plot_loss;
    bool json, plain;
};

static error_t read_plot(struct argp_state *state, const struct option_row *row, char *arg, void *options)
{
    struct memory_options *o = options;
    *(strcmp(row->name, "plot") ? &o->plot_loss : &o->plot) = arg;
    return plot_read_path(state, row, arg);
}

static error_t read_fit(struct argp_state *state, const struct option_row *row, char *arg, void *options)
{
    struct memory_options *o = options;
    o->fit = 0;
    return strcmp(arg, "free") ? option_bytes(state, row, arg, &o->fit) : 0;
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
    {"plain", NULL, "The program without libzero, too, in one process", 1,
     OPTION_FLAG(struct memory_options, plain)},
    {"fit", "free|BYTES",
     "Take a smaller model, and say so, where stage 0 of all ranks needs more than is free here, or than "
     "BYTES",
     1, OPTION_BY(read_fit), .min = 1},
    {"plot", "FILE", "Draw the table into FILE.svg or FILE.png, with gnuplot", 1, OPTION_BY(read_plot)},
    {"plot-loss", "FILE", "Draw the losses of all stages into FILE.svg or FILE.png", 1, OPTION_BY(read_plot)},
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

/* What was measured: a column for each stage and hybrid, and the plain program. */
struct measured {
    struct memory_stage stages[N_COLUMNS], plain;
    int n;
    bool has_plain;
};

static json_t *losses_json(const struct memory_stage *m, int64_t steps)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < steps; i++)
        json_array_append_new(list, report_number(m->loss[i]));
    return list;
}

static void print_json(const struct memory_options *o, const struct memory_stage *m, int column)
{
    bool plain = column == MEMORY_PLAIN;
    json_t *line = json_pack("{s:o, s:s, s:I, s:I, s:o, s:o, s:I, s:s, s:o}", "stage",
                             plain ? json_null() : json_integer(stage_of_column(column)), "model",
                             o->model.name, "n_params", (json_int_t)gpt2_n_params(&o->model.config), "ranks",
                             plain ? (json_int_t)1 : (json_int_t)o->ranks, "planned_bytes",
                             report_bytes_json(&m->planned), "bytes", report_bytes_json(&m->allocated),
                             "peak_rss_bytes", (json_int_t)m->peak_resident, "state_sha256", m->state_sha256,
                             "losses", losses_json(m, o->steps));
    if (!plain && hybrid_of_column(column)) {
        json_object_set_new(line, "hybrid",
                            json_string(option_word_of(option_hybrids, hybrid_of_column(column))));
        json_object_set_new(line, "shard_group", json_integer(o->shard_group));
    }
    report_line(line);
}

/* What stage 3 leaves of memory that was taken before, all ranks together. */
static void print_saved(const struct memory_options *o, const struct measured *m)
{
    int64_t least = m->stages[3].peak_resident * o->ranks, most = m->stages[0].peak_resident * o->ranks;
    printf("\nAll %lld ranks together, measured (Pss): stage 3 holds %s; stage 0 %s, so %.0f%% are saved",
           (long long)o->ranks, report_bytes(least).text, report_bytes(most).text,
           100 * (1 - (double)least / (double)most));
    if (m->has_plain) {
        int64_t copies = m->plain.peak_resident * o->ranks;
        printf("; %lld plain programs of %s each %s, so %.0f%%", (long long)o->ranks,
               report_bytes(m->plain.peak_resident).text, report_bytes(copies).text,
               100 * (1 - (double)least / (double)copies));
    }
    printf(".\n");
}

static void print_table(const struct memory_options *o, const struct measured *m)
{
    struct zero_bytes planned[N_COLUMNS];
    int64_t allocated[N_COLUMNS], resident[N_COLUMNS];
    for (int s = 0; s < m->n; s++) {
        planned[s] = m->stages[s].planned;
        allocated[s] = m->stages[s].allocated.total;
        resident[s] = m->stages[s].peak_resident;
    }
    printf("%s: %.2f million parameters, %s, %lld rank%s, %lld row%s of %lld tokens each\n\n", o->model.name,
           (double)gpt2_n_params(&o->model.config) * 1e-6, option_word_of(option_dtypes, o->dtype),
           (long long)o->ranks, o->ranks == 1 ? "" : "s", (long long)o->batch, o->batch == 1 ? "" : "s",
           (long long)o->model.config.context);
    stage_table_head("memory per rank", m->n);
    stage_table_memory(planned, "planned", m->n);
    stage_table_bytes("allocated", allocated, m->n);
    stage_table_bytes("peak resident", resident, m->n);
    if (m->has_plain)
        printf("The plain program, one process: %s of weights, gradients and optimizer state, peak resident "
               "%s.\n",
               report_bytes(m->plain.allocated.total).text, report_bytes(m->plain.peak_resident).text);
    printf("\nPlanned and allocated are libzero's: weights, gradients, optimizer state. Resident is all of a "
           "rank: those,\n"
           "activations, text and code, pages that several ranks map counted in equal parts.\n");
}

/* Each stage, and last the plain program, which is no part of the table. */
static int measure(const struct memory_options *o, struct measured *m)
{
    struct memory_runs runs = {
        .config = o->model.config,
        .ranks = o->ranks,
        .steps = o->steps,
        .batch = o->batch,
        .dtype = (enum zero_dtype)o->dtype,
        .shard_group = o->shard_group,
        .progress = progress_on(stderr),
        .n_runs = m->n + m->has_plain,
    };
    int status = 0;
    for (int s = 0; !status && s < m->n; s++) {
        status = memory_run(&runs, s, &m->stages[s]);
        if (!status && o->json)
            print_json(o, &m->stages[s], s);
    }
    if (!status && m->has_plain) {
        status = memory_run(&runs, MEMORY_PLAIN, &m->plain);
        if (!status && o->json)
            print_json(o, &m->plain, MEMORY_PLAIN);
    }
    return status;
}

static int draw_losses(const struct memory_options *o, const struct measured *m)
{
    struct loss_curve curves[N_COLUMNS];
    char title[160];
    for (int s = 0; s < m->n; s++) {
        char text[STAGE_TABLE_NAME];
        curves[s] = (struct loss_curve){.loss = m->stages[s].loss, .n = o->steps, .first = 1};
        snprintf(curves[s].name, sizeof curves[s].name, "%s", column_name(s, text));
    }
    snprintf(title, sizeof title, "%s on %lld ranks, every stage on top of the others", o->model.name,
             (long long)o->ranks);
    return loss_plot(o->plot_loss, title, who, curves, m->n);
}

static int draw(const struct memory_options *o, const struct measured *m)
{
    int status = 0;
    if (o->plot) {
        status = memory_plot(o->plot, o->model.name, (int)o->ranks, m->stages, m->n,
                             m->has_plain ? &m->plain : NULL);
        if (!status && !o->json)
            printf("Drawn in %s.\n", o->plot);
    }
    if (!status && o->plot_loss) {
        status = draw_losses(o, m);
        if (!status && !o->json)
            printf("Losses drawn in %s.\n", o->plot_loss);
    }
    return status;
}

int memory_command(const char *name, int argc, char **argv)
{
    struct memory_options o = {.ranks = 4, .steps = 3, .batch = 4, .dtype = ZERO_F32, .fit = -1};
    int status = options_parse(&table, name, argc, argv, &o);
    if (!status && o.fit >= 0) {
        const struct memory_fit fit = {o.ranks, o.batch, (enum zero_dtype)o.dtype, o.fit, ""};
        status = memory_fit_choose(&fit, &o.model, who);
    }
    if (status)
        return status;
    struct measured m = {.n = o.shard_group ? N_COLUMNS : N_STAGES, .has_plain = o.plain};
    status = measure(&o, &m);
    if (!status && !o.json)
        print_table(&o, &m);
    int drawn = status ? 0 : draw(&o, &m); /* where it fails, what was measured is still told */
    if (!status && !o.json)
        print_saved(&o, &m);
    status = status ? status : drawn;
    for (int s = 0; s < m.n; s++)
        free(m.stages[s].loss);
    free(m.plain.loss);
    return status;
}
