/* SPDX-License-Identifier: Apache-2.0 */
/* memory_cmd.c: zero-bench memory. It trains a few steps at every stage on N ranks, or at one stage with
 * every precision of optimizer state, and compares planned, allocated and resident memory. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/memory/fit.h"
#include "bench/memory/plot.h"
#include "bench/memory/run.h"
#include "bench/report/loss_plot.h"
#include "bench/report/plot.h"
#include "bench/report/report.h"
#include "bench/report/stage_table.h"
#include "bench/schedule/pipeline_stages.h"

#include <stdio.h>
#include <string.h>

static const char prefix[] = "zero-bench memory";

static error_t read_fit(struct argp_state *state, const struct option_row *row, char *arg, void *options)
{
    struct memory_options *o = options;
    o->fit = 0;
    return strcmp(arg, "free") ? option_bytes(state, row, arg, &o->fit) : 0;
}

#define OPTION_STRUCT struct memory_options
static const struct option_row rows[] = {
    {"dtype", "f32|bf16", "Of weights, gradients and activations (f32)", OPTION_WORD(dtype, option_dtypes)},
    {"batch", "N", "Rows in a micro-batch of one rank (4)", OPTION_INT(batch, 1, 1000000)},
    {"accum", "N", "Micro-batches per step (1; with --pp two for each of its ranks)",
     OPTION_INT(accum, 1, 100000)},
    {"ranks", "N", "Ranks to run on (4)", OPTION_INT(ranks, 1, 4096)},
    {"dp-shard", "N",
     "Adds HSDP and HFSDP, with shard groups of N ranks; N divides --ranks / (--pp * --cp * --tp)",
     OPTION_INT(dp_shard, 1, 4096)},
    {"tp", "N", "Each layer in parts, on N ranks, which have the same data (1)",
     OPTION_INT(model.own.tp, 1, 1024)},
    {"sequence-parallel", NULL, "With --tp: activations between matrix products are cut by tokens, too",
     OPTION_FLAG(model.own.sequence)},
    MODEL_CP_ROWS(model.),
    {"pp", "N",
     "Pipeline of N ranks, with one stage each or --stages-per-rank; the table shows the fullest rank, "
     "--json "
     "all of them (1)",
     OPTION_INT(pp, 1, PIPE_MAX_STAGES)},
    {"schedule", "1f1b|gpipe|interleaved|zero-bubble",
     "With --pp: the order in which stages take micro-batches (1f1b)", OPTION_WORD(schedule, pipe_schedules)},
    {"stages-per-rank", "N", "With --pp and --schedule interleaved or gpipe: stages on each of its ranks (1)",
     OPTION_INT(stages_per_rank, 1, PIPE_MAX_OWN)},
    MODEL_RECOMPUTE_ROW(model.),
    {"precisions", NULL,
     "Instead of every stage, run one stage with six precisions: f32; gradient sums in bf16; with these also "
     "masters remainder; with both also moments in bf16, or in q8; and no masters, with sums and moments in "
     "bf16. Needs --dtype bf16",
     OPTION_FLAG(precisions)},
    {"stage", "0..3", "With --precisions: the stage (0)", OPTION_INT(stage, 0, 3)},
    PRECISION_ROWS(states.),
    STATES_ROW(states.),
    STATES_DIR_ROW(states.),
    {"steps", "N", "Steps of each run (3)", OPTION_INT(steps, 1, 1000000)},
    {"device", "host|cuda", "Where the model computes; cuda: a GPU for each rank (host)",
     OPTION_WORD(device, option_devices)},
    {"plain", NULL, "The program without libzero, too, in one process", OPTION_FLAG(plain)},
    {"fit", "free|BYTES",
     "Take a smaller model, and say so, where stage 0 of all ranks needs more than is free here, or than "
     "BYTES",
     OPTION_BY(read_fit), .min = 1},
    {"plot", "FILE", "Draw the table into FILE.svg or FILE.png, with gnuplot", OPTION_PLOT(plot)},
    {"plot-loss", "FILE", "Draw the losses of all columns into FILE.svg or FILE.png", OPTION_PLOT(plot_loss)},
    {"json", NULL, "A JSON line per column", OPTION_FLAG(json)},
    {0},
};

static int64_t tp_of(const struct memory_options *o)
{
    return o->model.config.tp > 1 ? o->model.config.tp : 1;
}

static int64_t cp_of(const struct memory_options *o)
{
    return o->model.config.cp > 1 ? o->model.config.cp : 1;
}

static bool has_axes(const struct memory_options *o)
{
    return tp_of(o) > 1 || cp_of(o) > 1 || o->pp > 1;
}

/* Names options that do not go together, or returns NULL. */
static const char *what_is_wrong(const struct memory_options *o)
{
    if (o->model.config.sequence && tp_of(o) == 1)
        return "--sequence-parallel: is for --tp of 2 or more";
    if (o->plain && has_axes(o))
        return "--plain: has all layers in one process, so not with --tp, --cp or --pp";
    if (o->fit >= 0 && (has_axes(o) || o->accum > 1))
        return "--fit: reckons with one micro-batch of whole layers, so not with --accum, --tp, --cp or --pp";
    if (o->fit >= 0 && o->device == ZERO_DEVICE_CUDA)
        return "--fit: reckons with memory of the host, so not with --device cuda";
    if (o->plot && o->device == ZERO_DEVICE_CUDA)
        return "--plot: draws memory of the host, so not with --device cuda";
    if (o->stage >= 0 && !o->precisions)
        return "--stage: needs --precisions; without it every stage is run";
    if (o->precisions && o->dtype != ZERO_BF16)
        return "--precisions: needs a bf16 model (--dtype bf16)";
    if (o->precisions && (o->dp_shard || o->states.grad_sum || o->states.masters || o->states.moments))
        return "--precisions: sets --grad-sum-dtype, --masters and --moments itself, and runs without "
               "--dp-shard";
    const char *fault = states_fault(&o->states, o->dtype);
    fault = fault ? fault : states_dir_fault(&o->states);
    return fault ? fault : pipe_options_fault(o->schedule, o->pp, o->stages_per_rank);
}

static error_t check_numbers(struct argp_state *state, const struct memory_options *o)
{
    const struct model_config *c = &o->model.config;
    long long tp = (long long)tp_of(o), pp = (long long)o->pp, stages = pp * (long long)o->stages_per_rank;
    long long cp = (long long)cp_of(o), tokens = (long long)(o->batch * model_own_context(c));
    char fault[128];
    if (model_tp_fault(c, fault, sizeof fault) || model_cp_fault(c, fault, sizeof fault))
        return option_fault(state, "%s", fault);
    if (c->sequence && tokens % tp)
        return option_fault(state,
                            "--sequence-parallel: %lld parts do not divide the %lld tokens of a micro-batch",
                            tp, tokens);
    if (stages > c->layers)
        return option_fault(state, "--pp: %lld stages are more than the %lld layers", stages,
                            (long long)c->layers);
    if (cp > 1 && o->ranks % (pp * cp * tp))
        return option_fault(
            state, "--ranks: %lld are not a multiple of %lld (--pp) times %lld (--cp) times %lld (--tp)",
            (long long)o->ranks, pp, cp, tp);
    if (o->ranks % (pp * tp))
        return option_fault(state, "--ranks: %lld are not a multiple of %lld (--pp) times %lld (--tp)",
                            (long long)o->ranks, pp, tp);
    return 0;
}

static error_t finish(struct argp_state *state, void *options)
{
    struct memory_options *o = options;
    const char *wrong = what_is_wrong(o), *set = option_set_variable(option_layout_variables);
    if (wrong)
        return option_fault(state, "%s", wrong);
    if (set)
        return option_fault(state, "%s is set in the environment and would override every run: unset it",
                            set);
    pipe_options_default(&o->schedule, &o->accum, o->pp);
    return check_numbers(state, o);
}

static const struct option_table table = {
    .rows = rows,
    .doc = "Trains a few steps at every stage, and compares the memory that was planned, allocated and "
           "really resident on each rank. With --dp-shard it compares HSDP and HFSDP, too. With --pp it "
           "shows the rank of the pipeline that takes the most. With --precisions it compares precisions of "
           "optimizer state instead of stages.",
    .read_word = option_refuse_word,
    .finish = finish,
    OPTIONS_WITH_MODEL(struct memory_options, model),
};

/* The columns of --precisions, from the most bytes per parameter to the fewest. */
static const struct precision {
    const char *name;
    int grad_sum, masters, moments;
} precisions[] = {
    {"f32", 0, ZERO_MASTERS_F32, ZERO_MOMENTS_F32},
    {"bf16 sums", ZERO_BF16, ZERO_MASTERS_F32, ZERO_MOMENTS_F32},
    {"remainder", ZERO_BF16, ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_F32},
    {"+ bf16", ZERO_BF16, ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_BF16},
    {"+ q8", ZERO_BF16, ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_Q8},
    {"no masters", ZERO_BF16, ZERO_MASTERS_NONE, ZERO_MOMENTS_BF16},
};
enum { N_PRECISIONS = sizeof precisions / sizeof *precisions };
_Static_assert(N_PRECISIONS <= N_COLUMNS, "tables have room for so many columns");

/* What was measured: columns 0 to n - 1 of the table, and the program without libzero. */
struct measured {
    struct memory_column columns[N_COLUMNS], plain;
    int n;
    bool has_plain;
};

static json_t *losses_json(const struct memory_column *m, int64_t steps)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < steps; i++)
        json_array_append_new(list, report_number(m->loss[i]));
    return list;
}

static void add_parallelism(const struct memory_options *o, const struct memory_column *m, json_t *line)
{
    json_object_set_new(line, "tp", json_integer(tp_of(o)));
    json_object_set_new(line, "cp", json_integer(cp_of(o)));
    json_object_set_new(line, "sequence_parallel", json_boolean(o->model.config.sequence));
    json_object_set_new(line, "pp", json_integer(o->pp));
    json_object_set_new(line, "micro_batches", json_integer(o->accum));
    json_object_set_new(line, "activation_bytes", json_integer(m->fullest.activation_bytes));
    if (o->pp == 1)
        return;
    json_t *ranks = json_array();
    for (int32_t i = 0; i < m->n_ranks; i++)
        json_array_append_new(ranks, report_rank_json(&m->ranks[i], i));
    json_object_set_new(line, "schedule", json_string(option_word_of(pipe_schedules, o->schedule)));
    json_object_set_new(line, "stages_per_rank", json_integer(o->stages_per_rank));
    json_object_set_new(line, "pp_rank", json_integer(m->fullest_rank));
    json_object_set_new(line, "pp_ranks", ranks);
}

static void print_json(const struct memory_options *o, const struct memory_column *m)
{
    bool plain = m->plain;
    json_t *line = json_pack(
        "{s:o, s:s, s:I, s:I, s:o, s:o, s:I, s:s, s:o}", "stage",
        plain ? json_null() : json_integer(m->stage), "model", o->model.name, "n_params",
        (json_int_t)model_n_params(&o->model.config), "ranks", plain ? (json_int_t)1 : (json_int_t)o->ranks,
        "planned_bytes", report_bytes_json(&m->fullest.planned), "bytes",
        report_bytes_json(&m->fullest.allocated), "peak_rss_bytes", (json_int_t)m->fullest.peak_rss_bytes,
        "state_sha256", m->state_sha256, "losses", losses_json(m, o->steps));
    if (!plain)
        states_add_json(&m->states, line);
    if (m->hybrid) {
        json_object_set_new(line, "hybrid", json_string(option_word_of(option_hybrids, m->hybrid)));
        json_object_set_new(line, "dp_shard", json_integer(o->dp_shard));
    }
    if (o->device == ZERO_DEVICE_CUDA)
        json_object_set_new(line, "peak_device_bytes", json_integer(m->peak_device_bytes));
    if (has_axes(o))
        add_parallelism(o, m, line);
    report_line(line);
}

/* Prints the share of the host's memory that stage 3, or the last precision, saves, over all ranks. */
static void print_saved(const struct memory_options *o, const struct measured *m)
{
    const struct memory_column *last = &m->columns[o->precisions ? m->n - 1 : 3], *first = &m->columns[0];
    int64_t least = last->resident_of_all, most = first->resident_of_all;
    if (o->ranks == 1)
        printf("\nThe rank");
    else
        printf("\nAll %lld ranks together", (long long)o->ranks);
    printf(", measured (Pss): %s holds %s; %s %s, so %.0f%% are saved", last->name, report_bytes(least).text,
           first->name, report_bytes(most).text, 100 * (1 - (double)least / (double)most));
    if (m->has_plain && o->ranks == 1) {
        printf("; the plain program %s, so %.0f%%", report_bytes(m->plain.resident_of_all).text,
               100 * (1 - (double)least / (double)m->plain.resident_of_all));
    } else if (m->has_plain) {
        int64_t copies = m->plain.resident_of_all * o->ranks;
        printf("; %lld plain programs of %s each %s, so %.0f%%", (long long)o->ranks,
               report_bytes(m->plain.resident_of_all).text, report_bytes(copies).text,
               100 * (1 - (double)least / (double)copies));
    }
    printf(".\n");
}

/* Says what the columns of --precisions are. */
static void print_precisions(const struct memory_options *o)
{
    const struct states_options where = {.states = o->states.states};
    char states[STATES_TEXT];
    printf("stage %lld with AdamW%s%s, and in each column:\n", (long long)o->stage,
           *states_text(&where, states) ? ", " : "", states);
    for (int c = 0; c < N_PRECISIONS; c++) {
        const struct precision *p = &precisions[c];
        const struct states_options s = {
            .grad_sum = p->grad_sum, .masters = p->masters, .moments = p->moments};
        char text[STATES_TEXT];
        printf("  %-10s  %s\n", p->name, *states_text(&s, text) ? text : "sums, masters and moments f32");
    }
}

static void print_head(const struct memory_options *o)
{
    printf("%s: %.2f million parameters, %s, %lld rank%s, %lld row%s of %lld tokens each\n", o->model.name,
           (double)model_n_params(&o->model.config) * 1e-6, option_word_of(option_dtypes, o->dtype),
           (long long)o->ranks, o->ranks == 1 ? "" : "s", (long long)o->batch, o->batch == 1 ? "" : "s",
           (long long)o->model.config.context);
    if (has_axes(o))
        printf("data on %lld of them", (long long)(o->ranks / (o->pp * cp_of(o) * tp_of(o))));
    if (cp_of(o) > 1)
        printf(", each row on %lld", (long long)cp_of(o));
    if (tp_of(o) > 1)
        printf(", each layer in %lld parts%s", (long long)tp_of(o),
               o->model.config.sequence ? " with sequence parallelism" : "");
    if (o->pp > 1)
        printf(", %lld pipeline stages, %lld on a rank, %s, %lld micro-batches",
               (long long)(o->pp * o->stages_per_rank), (long long)o->stages_per_rank,
               option_word_of(pipe_schedules, o->schedule), (long long)o->accum);
    printf(has_axes(o) ? "\n\n" : "\n");
    char text[STATES_TEXT];
    if (o->precisions)
        print_precisions(o);
    else if (*states_text(&o->states, text))
        printf("%s\n", text);
}

/* Prints the bytes of weights, gradients, masters and moments per parameter, for ranks that have all of the
 * model. */
static void print_ratios(const struct measured *m, int64_t n_params)
{
    double ratio[N_COLUMNS];
    for (int c = 0; c < m->n; c++) {
        const struct zero_bytes *b = &m->columns[c].fullest.planned;
        ratio[c] = (double)(b->param_shards + b->grad_shards + b->grad_slots + b->grad_sums + b->master +
                            b->moments) /
                   (double)n_params;
    }
    stage_table_numbers("bytes per parameter", ratio, 2, m->n);
}

/* Prints the mean loss of the last tenth of the steps, and how far it is from the first column's. */
static void print_losses(const struct measured *m, int64_t steps)
{
    int64_t n = steps < 10 ? 1 : steps / 10;
    double loss[N_COLUMNS] = {0}, percent[N_COLUMNS];
    for (int c = 0; c < m->n; c++) {
        for (int64_t i = steps - n; i < steps; i++)
            loss[c] += m->columns[c].loss[i] / (double)n;
        percent[c] = 100 * (loss[c] / loss[0] - 1);
    }
    stage_table_numbers("loss of the last tenth", loss, 4, m->n);
    stage_table_numbers("more than f32, percent", percent, 3, m->n);
}

/* Prints each rank of the pipeline, in each column. */
static void print_ranks(const struct measured *m)
{
    int64_t allocated[N_COLUMNS], resident[N_COLUMNS];
    for (int32_t i = 0; i < m->columns[0].n_ranks; i++) {
        char name[40];
        for (int c = 0; c < m->n; c++) {
            allocated[c] = m->columns[c].ranks[i].allocated.total;
            resident[c] = m->columns[c].ranks[i].peak_rss_bytes;
        }
        snprintf(name, sizeof name, "allocated, rank %d", i);
        stage_table_bytes(name, allocated, m->n);
        snprintf(name, sizeof name, "resident, rank %d", i);
        stage_table_bytes(name, resident, m->n);
    }
}

static void print_table(const struct memory_options *o, const struct measured *m)
{
    struct zero_bytes planned[N_COLUMNS];
    int64_t allocated[N_COLUMNS], activations[N_COLUMNS], resident[N_COLUMNS], fullest_rank[N_COLUMNS],
        gpu[N_COLUMNS];
    for (int c = 0; c < m->n; c++) {
        planned[c] = m->columns[c].fullest.planned;
        allocated[c] = m->columns[c].fullest.allocated.total;
        activations[c] = m->columns[c].fullest.activation_bytes;
        resident[c] = m->columns[c].fullest.peak_rss_bytes;
        fullest_rank[c] = m->columns[c].fullest_rank;
        gpu[c] = m->columns[c].peak_device_bytes;
    }
    print_head(o);
    char names[N_COLUMNS][STAGE_TABLE_NAME];
    for (int c = 0; c < m->n; c++)
        memcpy(names[c], m->columns[c].name, sizeof names[c]);
    stage_table_titles("memory per rank", names, m->n);
    if (o->pp > 1)
        stage_table_counts("fullest rank of pp", fullest_rank, m->n);
    stage_table_memory(planned, "planned", m->n);
    stage_table_bytes("allocated", allocated, m->n);
    if (o->precisions && !has_axes(o))
        print_ratios(m, model_n_params(&o->model.config));
    if (o->precisions)
        print_losses(m, o->steps);
    if (has_axes(o))
        stage_table_bytes("activations besides", activations, m->n);
    stage_table_bytes("peak resident", resident, m->n);
    if (o->device == ZERO_DEVICE_CUDA)
        stage_table_bytes(o->pp > 1 ? "peak, last stage's GPU" : "peak of a GPU", gpu, m->n);
    if (o->pp > 1)
        print_ranks(m);
    if (m->has_plain)
        printf("The plain program, one process: %s of weights, gradients and optimizer state, peak resident "
               "%s.\n",
               report_bytes(m->plain.fullest.allocated.total).text,
               report_bytes(m->plain.fullest.peak_rss_bytes).text);
    printf("\nPlanned and allocated are libzero's: weights, gradients, optimizer state. Resident is all of a "
           "rank: those,\n"
           "activations, training text and code; a page that n ranks map counts as 1/n.%s\n",
           o->device == ZERO_DEVICE_CUDA ? " It is memory of the host." : "");
    if (o->precisions && !has_axes(o))
        printf("Bytes per parameter are those of a rank, without parameter slots, gathered gradients, "
               "exchange and\nstate buffers.\n");
}

/* Says what each column is to run. */
static void choose_columns(const struct memory_options *o, struct measured *m)
{
    m->n = o->precisions ? N_PRECISIONS : o->dp_shard ? N_COLUMNS : N_STAGES;
    m->has_plain = o->plain;
    m->plain = (struct memory_column){.name = "the plain program", .plain = true};
    for (int c = 0; c < m->n; c++) {
        struct memory_column *column = &m->columns[c];
        column->states = o->states;
        if (o->precisions) {
            snprintf(column->name, sizeof column->name, "%s", precisions[c].name);
            column->stage = (int)o->stage;
            column->states.grad_sum = precisions[c].grad_sum;
            column->states.masters = precisions[c].masters;
            column->states.moments = precisions[c].moments;
        } else {
            column_name(c, column->name);
            column->stage = stage_of_column(c);
            column->hybrid = hybrid_of_column(c);
        }
    }
}

/* Runs zero-bench train once for each column, and then the plain program, which the table does not show as a
 * column. */
static int measure(const struct memory_options *o, struct measured *m)
{
    struct memory_runs runs = {.o = o, .progress = progress_on(stderr), .n_runs = m->n + m->has_plain};
    int status = 0;
    for (int c = 0; !status && c < m->n; c++) {
        status = memory_run(&runs, &m->columns[c]);
        if (!status && o->json)
            print_json(o, &m->columns[c]);
    }
    if (!status && m->has_plain) {
        status = memory_run(&runs, &m->plain);
        if (!status && o->json)
            print_json(o, &m->plain);
    }
    return status;
}

static int draw_losses(const struct memory_options *o, const struct measured *m)
{
    struct loss_curve curves[N_COLUMNS];
    char title[160];
    for (int c = 0; c < m->n; c++) {
        curves[c] = (struct loss_curve){.loss = m->columns[c].loss, .n = o->steps, .first = 1};
        snprintf(curves[c].name, sizeof curves[c].name, "%s", m->columns[c].name);
    }
    snprintf(title, sizeof title, "%s on %lld ranks, every %s on top of the others", o->model.name,
             (long long)o->ranks, o->precisions ? "precision" : "stage");
    return loss_plot(o->plot_loss, title, prefix, curves, m->n);
}

static int draw(const struct memory_options *o, const struct measured *m)
{
    int status = 0;
    if (o->plot) {
        char title[160];
        snprintf(title, sizeof title, "%s: memory of %s of %lld ranks, measured", o->model.name,
                 o->pp > 1 ? "the fullest" : "each", (long long)o->ranks);
        status = memory_plot(o->plot, title, m->columns, m->n, m->has_plain ? &m->plain : NULL);
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
    struct memory_options o = {.ranks = 4,
                               .steps = 3,
                               .batch = 4,
                               .pp = 1,
                               .stages_per_rank = 1,
                               .stage = -1,
                               .dtype = ZERO_F32,
                               .device = ZERO_DEVICE_HOST,
                               .schedule = -1,
                               .fit = -1};
    int status = options_parse(&table, name, argc, argv, &o);
    if (!status && o.fit >= 0) {
        const struct memory_fit fit = {o.ranks, o.batch, (enum zero_dtype)o.dtype, o.fit, ""};
        status = memory_fit_choose(&fit, &o.model, prefix);
    }
    if (status)
        return status;
    o.stage = o.stage < 0 ? 0 : o.stage;
    struct measured m = {0};
    choose_columns(&o, &m);
    status = measure(&o, &m);
    if (!status && !o.json)
        print_table(&o, &m);
    int drawn = status ? 0 : draw(&o, &m); /* if it fails, the measurements are printed anyway */
    if (!status && !o.json && o.device == ZERO_DEVICE_HOST)
        print_saved(&o, &m);
    status = status ? status : drawn;
    for (int c = 0; c < m.n; c++)
        memory_column_free(&m.columns[c]);
    memory_column_free(&m.plain);
    return status;
}
