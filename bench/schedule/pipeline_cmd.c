/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_cmd.c: zero-bench pipeline. It takes a pipeline schedule by name or from PyTorch's CSV, checks
 * it, times it on a virtual clock, draws it, and can write it with all its messages. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/report/report.h"
#include "kernels/error.h"
#include "shard/pipeline/pipeline.h"

#include <stdio.h>
#include <string.h>

enum { MAX_UNITS = 4096, MAX_COLUMNS = 120 };

struct pipeline_options {
    int kind;
    int64_t ranks, per_rank, micro_batches, unsharded;
    int64_t forward_us, backward_us, weight_us, move_us, activation_bytes;
    bool forward_only, messages, json;
    const char *read, *write, *units;
};

static const struct option_word kinds[] = {{"gpipe", ZR_GPIPE},
                                           {"1f1b", ZR_1F1B},
                                           {"interleaved", ZR_INTERLEAVED},
                                           {"zero-bubble", ZR_ZERO_BUBBLE},
                                           {0}};

#define OPTION_STRUCT struct pipeline_options
static const struct option_row rows[] = {
    {"schedule", "gpipe|1f1b|interleaved|zero-bubble", "Which one (1f1b)", OPTION_WORD(kind, kinds)},
    {"ranks", "N", "Ranks of the pipeline", OPTION_INT(ranks, 1, ZR_PIPE_MAX_RANKS)},
    {"stages-per-rank", "N", "Stages of each (1; interleaved: 2)",
     OPTION_INT(per_rank, 1, ZR_PIPE_MAX_NUMBERS)},
    {"micro-batches", "N", "Of a step (two for each rank)",
     OPTION_INT(micro_batches, 1, ZR_PIPE_MAX_NUMBERS)},
    {"forward-only", NULL, "For evaluation: no backward", OPTION_FLAG(forward_only)},
    {"read", "FILE",
     "Instead of these: a schedule in PyTorch's CSV, computations alone or with all that moves",
     OPTION_TEXT(read)},
    {.help = "What moves:"},
    {"messages", NULL, "Adds sends, receives, gathers and reductions to what is computed",
     OPTION_FLAG(messages)},
    {"unsharded", "N", "With --messages: stages of which a rank has whole parameters at a time (any number)",
     OPTION_INT(unsharded, 1, ZR_PIPE_MAX_NUMBERS)},
    {"write", "FILE", "Writes the schedule, when it is right, in PyTorch's CSV", OPTION_TEXT(write)},
    {.help = "Costs, of a stage and a micro-batch:"},
    {"forward-us", "N", "Of a forward, in microseconds (1)", OPTION_INT(forward_us, 1, 1000000000)},
    {"backward-us", "N", "Of a backward (2)", OPTION_INT(backward_us, 1, 1000000000)},
    {"weight-us", "N",
     "Of the gradient of weights, where a schedule has it apart; the rest of the backward is "
     "that of the input (half of it)",
     OPTION_INT(weight_us, 1, 1000000000)},
    {"move-us", "N", "From a rank to the next (0)", OPTION_INT(move_us, 0, 1000000000)},
    {"activation-bytes", "BYTES", "Kept from a forward to its backward (0: they are counted alone)",
     OPTION_BYTES(activation_bytes, 0)},
    {"units", "LIST", "Of each stage, as 3,4,4,1: its costs are so many times those above (1 each)",
     OPTION_TEXT(units)},
    {"json", NULL, "One JSON line", OPTION_FLAG(json), .group = 4},
    {0},
};

static error_t refuse(struct argp_state *state, const char *text)
{
    return option_fault(state, "%s", text);
}

static error_t finish(struct argp_state *state, void *options)
{
    struct pipeline_options *o = options;
    if (!o->read && !o->ranks)
        return refuse(state, "--ranks: is needed, or --read");
    if (o->read && (o->ranks || o->per_rank || o->micro_batches || o->forward_only || o->kind >= 0))
        return refuse(state, "--read: the file says what --schedule, --ranks, --stages-per-rank, "
                             "--micro-batches and --forward-only would");
    if (o->unsharded && !o->messages)
        return refuse(state, "--unsharded: is of --messages");
    if (o->forward_only && (o->backward_us || o->weight_us))
        return refuse(state, "--forward-only: has no --backward-us and no --weight-us");
    if (o->weight_us && !o->read)
        return refuse(state, "--weight-us: is of schedules that have it apart, by --read");
    o->backward_us = o->backward_us ? o->backward_us : 2;
    if (o->weight_us >= o->backward_us)
        return refuse(state, "--weight-us: is a part of --backward-us");
    o->kind = o->kind >= 0 ? o->kind : ZR_1F1B;
    o->per_rank = o->per_rank ? o->per_rank : o->kind == ZR_INTERLEAVED ? 2 : 1;
    o->micro_batches = o->micro_batches ? o->micro_batches : 2 * o->ranks;
    return 0;
}

static const struct option_table table = {
    .rows = rows,
    .doc =
        "A pipeline schedule, by its name or from a file: whether each stage takes each micro-batch once, "
        "each "
        "way, behind what it needs; whether every message is sent and received once, in one order, and ranks "
        "go through to the end even where a send waits for its receiver; then its bubble, and the most "
        "activations that each rank keeps. Nothing is run.",
    .read_word = option_refuse_word,
    .finish = finish,
};

/* Reads a list such as "3,4,4,1", one number for each stage. */
static int read_units(const char *name, const char *text, int32_t n_stages, int32_t units[MAX_UNITS])
{
    int32_t n = 0;
    const char *at = text;
    for (char *end; n < MAX_UNITS; at = end + 1) {
        long long u = strtoll(at, &end, 10);
        if (end == at || u < 1 || u > 1000000 || (*end && *end != ','))
            break;
        units[n++] = (int32_t)u;
        if (!*end && n == n_stages)
            return 0;
        if (!*end)
            break;
    }
    fprintf(stderr,
            "%s: --units: '%s' is no list of %d numbers from 1 to 1000000, one for each stage (at most %d)\n",
            name, text, n_stages, MAX_UNITS);
    return EXIT_USAGE;
}

/* ---- output ---- */

static int64_t divisor(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The sign in a column: forward passes 0 1 2, backward passes and gradients of inputs a b c, gradients of
 * weights A B C. */
static char mark(struct zr_pipe_action a)
{
    return (char)(a.kind == ZR_PIPE_FORWARD           ? '0' + a.micro_batch % 10
                  : a.kind == ZR_PIPE_BACKWARD_WEIGHT ? 'A' + a.micro_batch % 26
                                                      : 'a' + a.micro_batch % 26);
}

static void draw_row(const struct zr_pipe_row *row, const struct zr_pipe_time *times, int64_t column_ns,
                     int64_t n_columns, int32_t rank)
{
    char line[MAX_COLUMNS + 1];
    memset(line, '.', sizeof line);
    line[n_columns] = 0;
    for (int64_t i = 0, k = 0; i < row->n; i++) {
        if (!zr_pipe_computes(row->at[i].kind))
            continue;
        for (int64_t at = times[k].start_ns / column_ns; at < times[k].end_ns / column_ns; at++)
            line[at] = mark(row->at[i]);
        k++;
    }
    printf("%6d  %s\n", rank, line);
}

static void draw(const struct zr_pipeline *p, const struct zr_pipe_report *report)
{
    int64_t column_ns = report->span_ns;
    for (int32_t r = 0; r < p->n_ranks; r++) {
        for (int64_t i = 0, k = 0; i < p->rows[r].n; i++) {
            if (zr_pipe_computes(p->rows[r].at[i].kind)) {
                column_ns = divisor(column_ns, report->times[r][k].start_ns);
                column_ns = divisor(column_ns, report->times[r][k++].end_ns);
            }
        }
    }
    int64_t n = report->span_ns / column_ns;
    if (n > MAX_COLUMNS || p->n_ranks > 64) {
        printf("\nno picture: %lld columns and %d rows; %d and 64 can be drawn\n", (long long)n, p->n_ranks,
               MAX_COLUMNS);
        return;
    }
    printf("\n  rank  a column is %g us; forwards are 0 1 2 ..., backwards a b c ..., of weights alone A B "
           "C\n",
           (double)column_ns * 1e-3);
    for (int32_t r = 0; r < p->n_ranks; r++)
        draw_row(&p->rows[r], report->times[r], column_ns, n, r);
}

static void print(const struct pipeline_options *o, const struct zr_pipeline *p,
                  const struct zr_pipe_report *report)
{
    printf("%s, %d ranks, %d stages, %d micro-batches: %.3f ms\n",
           o->read ? o->read : option_word_of(kinds, o->kind), p->n_ranks, p->n_stages, p->n_micro_batches,
           (double)report->span_ns * 1e-6);
    printf("%6s %12s %12s %9s %17s %14s %8s %11s\n", "rank", "computes, ms", "idle, ms", "idle",
           "most activations", "their bytes", "sends", "unsharded");
    for (int32_t r = 0; r < p->n_ranks; r++) {
        const struct zr_pipe_rank *rank = &report->ranks[r];
        char unsharded[24] = "-", bytes[24] = "-";
        if (rank->peak_unsharded)
            snprintf(unsharded, sizeof unsharded, "%lld", (long long)rank->peak_unsharded);
        if (o->activation_bytes)
            snprintf(bytes, sizeof bytes, "%s", report_bytes(rank->peak_bytes).text);
        printf("%6d %12.3f %12.3f %8.2f%% %17lld %14s %8lld %11s\n", r, (double)rank->busy_ns * 1e-6,
               (double)rank->idle_ns * 1e-6, 100 * (double)rank->idle_ns / (double)report->span_ns,
               (long long)rank->peak_activations, bytes, (long long)rank->n_sends, unsharded);
    }
    printf("each stage adds up gradients in %s\n",
           report->in_order ? "the order of micro-batches" : "another order than that of micro-batches");
    draw(p, report);
}

static void print_json(const struct pipeline_options *o, const struct zr_pipeline *p,
                       const struct zr_pipe_report *report)
{
    json_t *ranks = json_array();
    for (int32_t r = 0; r < p->n_ranks; r++) {
        const struct zr_pipe_rank *rank = &report->ranks[r];
        json_array_append_new(ranks,
                              json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "busy_ns",
                                        (json_int_t)rank->busy_ns, "idle_ns", (json_int_t)rank->idle_ns,
                                        "peak_activations", (json_int_t)rank->peak_activations, "peak_bytes",
                                        (json_int_t)rank->peak_bytes, "sends", (json_int_t)rank->n_sends,
                                        "peak_unsharded", (json_int_t)rank->peak_unsharded));
    }
    json_t *schedule = json_string(o->read ? o->read : option_word_of(kinds, o->kind));
    schedule = schedule ? schedule : json_null(); /* the path is not valid UTF-8 */
    report_line(json_pack("{s:s, s:o, s:i, s:i, s:i, s:I, s:b, s:o}", "event", "pipeline", "schedule",
                          schedule, "n_ranks", p->n_ranks, "n_stages", p->n_stages, "n_micro_batches",
                          p->n_micro_batches, "span_ns", (json_int_t)report->span_ns, "in_order",
                          report->in_order, "ranks", ranks));
}

/* ---- the schedule ---- */

static int make(struct zr_pipeline **p, const struct pipeline_options *o)
{
    return o->read ? zr_pipeline_read(p, o->read)
                   : zr_pipeline_build(p, (enum zr_pipeline_kind)o->kind, (int32_t)o->ranks,
                                       (int32_t)o->per_rank, (int32_t)o->micro_batches, o->forward_only);
}

/* Replaces the schedule by the same one with messages. */
static int add_messages(struct zr_pipeline **p, const struct pipeline_options *o,
                        const struct zr_pipe_cost *cost)
{
    struct zr_pipeline *lowered;
    int err = zr_pipeline_lower(&lowered, *p, cost, (int32_t)o->unsharded);
    if (err)
        return err;
    zr_pipeline_close(*p);
    *p = lowered;
    return 0;
}

static int check(struct zr_pipeline **p, const struct pipeline_options *o, const struct zr_pipe_cost *cost)
{
    struct zr_pipe_report report;
    int err = o->messages ? add_messages(p, o, cost) : 0;
    err = err ? err : zr_pipeline_check(*p, cost, &report);
    if (err)
        return err;
    if ((*p)->n_micro_batches < (*p)->n_ranks)
        fprintf(stderr, "warning: fewer micro-batches (%d) than ranks (%d)\n", (*p)->n_micro_batches,
                (*p)->n_ranks);
    if (o->json)
        print_json(o, *p, &report);
    else
        print(o, *p, &report);
    zr_pipe_report_close(&report, *p);
    return o->write ? zr_pipeline_write(*p, o->write) : 0;
}

int pipeline_command(const char *name, int argc, char **argv)
{
    struct pipeline_options o = {.kind = -1, .forward_us = 1};
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    int32_t units[MAX_UNITS];
    struct zr_pipeline *p;
    int err = make(&p, &o);
    if (err) {
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
        return EXIT_USAGE;
    }
    const struct zr_pipe_cost cost = {.forward_ns = o.forward_us * 1000,
                                      .backward_ns = o.backward_us * 1000,
                                      .weight_ns = o.weight_us ? o.weight_us * 1000 : o.backward_us * 500,
                                      .move_ns = o.move_us * 1000,
                                      .activation_bytes = o.activation_bytes,
                                      .units = o.units ? units : NULL};
    if (o.units)
        status = read_units(name, o.units, p->n_stages, units);
    if (!status && check(&p, &o, &cost)) {
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
        status = EXIT_FAILURE;
    }
    zr_pipeline_close(p);
    return status;
}
