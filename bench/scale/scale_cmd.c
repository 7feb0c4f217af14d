/* SPDX-License-Identifier: Apache-2.0 */
/* scale_cmd.c: zero-bench scale, which projects the steps of a model on thousands of GPUs. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/report/report.h"
#include "bench/scale/scale.h"
#include "bench/schedule/pipeline_stages.h"

#include "kernels/device.h"

#include <string.h>

enum { MAX_WORLDS = 32 };

struct scale_options {
    /* the job of each line, without its world; hybrid and dp_shard are found at the end */
    struct scale_job job;
    int64_t world[MAX_WORLDS];
    int n_worlds;
    int64_t micro_batches, dp_shard;
    /* whether groups are hosts; enum zero_hybrid */
    int per_host, hybrid;
    bool json;
};

static error_t read_model(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    struct scale_options *o = to;
    o->job.model = scale_model_of(arg);
    if (o->job.model)
        return 0;
    return option_fault(state, "--%s: '%s' is not %s", row->name, arg, scale_model_names());
}

static error_t read_machine(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    struct scale_options *o = to;
    o->job.machine = scale_machine_of(arg);
    if (o->job.machine)
        return 0;
    return option_fault(state, "--%s: '%s' is not %s", row->name, arg, scale_machine_names());
}

/* Reads a list such as "8,64,512". */
static error_t read_worlds(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    struct scale_options *o = to;
    o->n_worlds = 0;
    for (char *p = arg, *end = ""; p == arg || *end; p = end + 1) {
        long long n = strtoll(p, &end, 10);
        if (end == p || (*end && *end != ',') || n < 1 || n > SCALE_MAX_RANKS || o->n_worlds == MAX_WORLDS)
            return option_fault(state,
                                "--%s: '%s' is not a list of up to %d numbers from 1 to %d, such as 8,64,512",
                                row->name, arg, MAX_WORLDS, SCALE_MAX_RANKS);
        o->world[o->n_worlds++] = n;
    }
    return 0;
}

static const struct option_word only_auto[] = {{"auto", 1}, {0}};
static const struct option_word states_words[] = {
    {"device", ZERO_STATES_DEVICE}, {"host", ZERO_STATES_HOST}, {0}};

#define OPTION_STRUCT struct scale_options
static const struct option_row rows[] = {
    {"model", "NAME", "Such as gpt2-124M, llama-3-8B (default) or llama-3-405B", OPTION_BY(read_model)},
    {"machine", "NAME", "a100-40, a100-80, h100 (default), h200 or b200", OPTION_BY(read_machine)},
    {"worlds", "N,N,...", "Numbers of ranks, one a GPU (8,64,512,4096,16384)", OPTION_BY(read_worlds)},
    {"batch", "ROWS", "Of a rank's micro-batch (1)", OPTION_INT(job.batch, 1, SCALE_MAX_BATCH)},
    {"context", "N", "Tokens in a row (the model's)", OPTION_INT(job.context, 1, SCALE_MAX_CONTEXT)},
    {"accum", "N", "Micro-batches of a step (1; with --pp two for each of its N)",
     OPTION_INT(job.accum, 1, SCALE_MAX_ACCUM)},
    {"micro-batches", "N", "The same", OPTION_INT(micro_batches, 1, SCALE_MAX_ACCUM)},
    {"recompute", NULL, "Backward computes forward again, as activation checkpointing does",
     OPTION_FLAG(job.recompute)},
    {"activations", NULL, "Counts in the memory what the model keeps, as with --tp, --cp and --pp",
     OPTION_FLAG(job.activations)},
    {.help = "Sharding:"},
    {"tp", "N", "Each layer in N parts, on ranks side by side, which have the same data (1)",
     OPTION_INT(job.tp, 1, 1024)},
    {"cp", "N",
     "Each row on N ranks, in the gather form and zigzag order: compute waits for keys and values (1)",
     OPTION_INT(job.cp, 1, 1024)},
    {"pp", "N",
     "Layers in N stages of a pipeline, on GPUs of their own, or in --stages-per-rank times as many (1)",
     OPTION_INT(job.pp, 1, PIPE_MAX_STAGES)},
    {"schedule", "1f1b|gpipe|interleaved|zero-bubble",
     "With --pp: the order in which stages take micro-batches (1f1b)",
     OPTION_WORD(job.schedule, pipe_schedules)},
    {"stages-per-rank", "N", "With --pp and --schedule interleaved or gpipe: stages on each GPU (1)",
     OPTION_INT(job.stages_per_rank, 1, PIPE_MAX_OWN)},
    {"stage", "N", "0 to 3 (3)", OPTION_INT(job.stage, 0, 3)},
    {"dp-replicate", "auto", "Stage 3 in each host, with a copy of the parameters in each (not)",
     OPTION_WORD(per_host, only_auto)},
    {"dp-shard", "N", "The same in groups of N ranks, which are as many as the world leaves",
     OPTION_INT(dp_shard, 1, SCALE_MAX_RANKS)},
    {"hybrid", "hsdp|hfsdp",
     "With either: whether groups hold the same optimizer states, or shard them (hsdp)",
     OPTION_WORD(hybrid, option_hybrid)},
    {"dtype", "f32|bf16", "Of weights and gradients; products are bf16's all the same (bf16)",
     OPTION_WORD(job.dtype, option_dtypes)},
    {"wire-dtype", "f32|bf16", "Of gradients between ranks (that of the model)",
     OPTION_WORD(job.wire_dtype, option_dtypes)},
    PRECISION_ROWS(job.states.),
    {"states", "device|host",
     "Where masters and moments are: on the GPU, or in the host's memory, over PCIe (device)",
     OPTION_WORD(job.states.states, states_words)},
    {"prefetch", "N", "Units gathered ahead (2)", OPTION_INT(job.prefetch, 0, 100)},
    {"budget", "BYTES", "For gathered parameters at stage 3 (what prefetch needs)",
     OPTION_BYTES(job.budget_bytes, 1)},
    {.help = "What is reached of the data sheets:"},
    {"compute", "X", "Of the peak of products (1: the limit, which nobody reaches)",
     OPTION_DOUBLE(job.compute_fraction, 1e-3, 1)},
    {"links", "X", "Of the bandwidth of links (1)", OPTION_DOUBLE(job.link_fraction, 1e-3, 1)},
    {"json", NULL, "A JSON line for each number of ranks", OPTION_FLAG(json), .group = 4},
    {0},
};

static bool is_hybrid(const struct scale_options *o)
{
    return o->per_host || o->dp_shard;
}

static const char *what_is_ignored(const struct scale_options *o)
{
    if (o->job.accum && o->micro_batches)
        return "--micro-batches: says what --accum does";
    if (o->job.pp > SCALE_MAX_ACCUM / 2 && !o->job.accum && !o->micro_batches)
        return "--pp: two micro-batches for each of so many are more than 256, so say --accum";
    if (is_hybrid(o) && o->job.stage != 3)
        return "--dp-replicate and --dp-shard: are of stage 3";
    if (o->per_host && o->dp_shard)
        return "--dp-shard: is what --dp-replicate=auto finds";
    if (o->hybrid == ZERO_HFSDP && !is_hybrid(o))
        return "--hybrid=hfsdp: is of groups, which --dp-replicate=auto or --dp-shard asks for";
    if (o->job.budget_bytes && o->job.stage != 3)
        return "--budget: is of stage 3, which gathers parameters";
    if (o->job.prefetch >= 0 && o->job.stage != 3)
        return "--prefetch: is of stage 3, which gathers parameters";
    if (o->job.wire_dtype == ZERO_F32 && o->job.dtype == ZERO_BF16)
        return "--wire-dtype=f32: gradients of bf16 travel as they are";
    const char *fault = states_fault(&o->job.states, o->job.dtype);
    return fault ? fault : pipe_options_fault(o->job.schedule, o->job.pp, o->job.stages_per_rank);
}

/* The number of a host's ranks that have the same part of the layers. */
static int64_t group_of_host(const struct scale_options *o)
{
    return o->job.tp < o->job.machine->per_host ? o->job.machine->per_host / o->job.tp : 1;
}

static error_t finish(struct argp_state *state, void *options)
{
    static const int64_t worlds[] = {8, 64, 512, 4096, 16384};
    struct scale_options *o = options;
    const char *ignored = what_is_ignored(o);
    if (ignored)
        return option_fault(state, "%s", ignored);
    if (o->per_host && group_of_host(o) == 1)
        return option_fault(
            state,
            "--dp-replicate=auto: a host's %d GPUs have %lld different parts, so a group of a host's "
            "ranks with "
            "the same part is of one rank; --dp-shard says how large groups are",
            o->job.machine->per_host, (long long)o->job.tp);
    o->job.accum = o->job.accum ? o->job.accum : o->micro_batches;
    pipe_options_default(&o->job.schedule, &o->job.accum, o->job.pp);
    o->job.prefetch = o->job.prefetch >= 0 ? o->job.prefetch : 2;
    if (!o->n_worlds) {
        memcpy(o->world, worlds, sizeof worlds);
        o->n_worlds = sizeof worlds / sizeof *worlds;
    }
    return 0;
}

static const struct option_table table = {
    .rows = rows,
    .doc = "Projects what a step takes on N GPUs: the schedule of the library on a virtual clock, with the "
           "machine's "
           "figures from its data sheet (bench/scale/machines.c). No stragglers, no congestion.",
    .read_word = option_refuse_word,
    .finish = finish,
};

static struct scale_job job_of(const struct scale_options *o, int64_t world)
{
    struct scale_job job = o->job;
    job.world = world;
    job.context = job.context ? job.context : job.model->context;
    job.hybrid = !is_hybrid(o) ? HYBRID_NONE : o->hybrid == ZERO_HFSDP ? HYBRID_HFSDP : HYBRID_HSDP;
    job.dp_shard = o->dp_shard ? o->dp_shard : group_of_host(o);
    return job;
}

static void print_pipeline(const struct scale_job *j)
{
    int64_t v = j->stages_per_rank, parts = pipe_parts(j->schedule, v, j->recompute ? 3 : 2);
    printf("layers in %lld stages (pp)", (long long)(j->pp * v));
    if (v > 1)
        printf(", %lld on each GPU", (long long)v);
    printf(", %s: with stages that take as long they stand still for %.1f %%, (p-1)/(%sm+p-1); ",
           option_word_of(pipe_schedules, j->schedule),
           100 * (double)(j->pp - 1) / (double)(parts * j->accum + j->pp - 1),
           v > 1       ? "v"
           : parts > 2 ? "3"
           : parts > 1 ? "2"
                       : "");
}

/* Prints tp and pp, and what of them is not counted. */
static void print_mesh_head(const struct scale_options *o, const struct scale_job *j)
{
    if (j->tp > 1)
        printf("each layer in %lld parts (tp); ", (long long)j->tp);
    if (j->cp > 1)
        printf("each row on %lld GPUs (cp); ", (long long)j->cp);
    if (j->pp > 1)
        print_pipeline(j);
    printf(
        "memory is with activations, attention in one piece, without statistics and scratch of the model\n");
    if (j->tp > 1 || j->pp > 1)
        printf(
            "tp: all-reduces that compute waits for, on links inside a host up to %d parts; not counted: the "
            "loss's reductions over tp, what a tied embedding moves; "
            "tp and pp have not run on real GPUs yet; micro-batches are of the GPUs that share them\n",
            o->job.machine->per_host);
}

static void print_head(const struct scale_options *o, const struct scale_job *j)
{
    bool mesh = scale_has_mesh(j);
    printf("%s, %lld parameters, %lld x %lld tokens a GPU and micro-batch, %lld a step%s; ",
           o->job.model->name, (long long)scale_n_params(j->model, j->context), (long long)j->batch,
           (long long)j->context, (long long)j->accum, j->recompute ? ", recomputed" : "");
    printf("%s; at %g of its peak and %g of its links\n", o->job.machine->text, j->compute_fraction,
           j->link_fraction);
    if (j->hybrid)
        printf("%s in groups of %lld", option_word_of(option_hybrids, j->hybrid), (long long)j->dp_shard);
    else
        printf("stage %lld", (long long)j->stage);
    printf("; a projection: no stragglers, no congestion%s\n", mesh ? "" : "; memory is without activations");
    if (mesh)
        print_mesh_head(o, j);
    char states[STATES_TEXT];
    if (*states_text(&j->states, states))
        printf("%s\n", states);
    putchar('\n');
    printf("%8s %12s %14s %8s %20s %12s %12s", "GPUs", "step", "tokens/s/GPU", "MFU", "exposed comm.",
           "memory", "received");
    if (mesh)
        printf(" %12s %8s", "activations", "bubble");
    if (j->states.states == ZERO_STATES_HOST)
        printf(" %12s", "of the host");
    putchar('\n');
}

/* All memory of a GPU, with activations if they are counted. */
static int64_t all_bytes(const struct scale_result *r)
{
    return r->memory_bytes + r->activation_bytes;
}

static bool fits(const struct scale_job *j, const struct scale_result *r)
{
    return (double)all_bytes(r) <= j->machine->memory_bytes;
}

static void print_row(const struct scale_job *j, const struct scale_result *r)
{
    printf("%8lld %9.1f ms %14.0f %6.1f %% %9.1f ms, %4.1f %% %12s %12s", (long long)j->world,
           r->step_s * 1e3, r->tokens_per_s_per_gpu, r->mfu * 100, r->exposed_s * 1e3,
           r->exposed_s / r->step_s * 100, report_bytes(all_bytes(r)).text,
           report_bytes(r->received_bytes).text);
    if (scale_has_mesh(j))
        printf(" %12s %6.1f %%", report_bytes(r->activation_bytes).text, r->bubble * 100);
    if (j->states.states == ZERO_STATES_HOST)
        printf(" %12s", report_bytes(r->host_bytes).text);
    printf("%s\n", fits(j, r) ? "" : "  more than a GPU has");
}

static void print_line(const struct scale_job *j, const struct scale_result *r)
{
    json_t *line = json_pack(
        "{s:s, s:s, s:I, s:I, s:s, s:o, s:o, s:o, s:o, s:I, s:I, s:I, s:b, s:i, s:s}", "model",
        j->model->name, "machine", j->machine->name, "world", (json_int_t)j->world, "stage",
        (json_int_t)j->stage, "hybrid", option_word_of(option_hybrids, j->hybrid), "step_ms",
        report_number(r->step_s * 1e3), "tokens_per_s_per_gpu", report_number(r->tokens_per_s_per_gpu), "mfu",
        report_number(r->mfu), "exposed_ms", report_number(r->exposed_s * 1e3), "memory_bytes",
        (json_int_t)r->memory_bytes, "received_bytes", (json_int_t)r->received_bytes, "outer_bytes",
        (json_int_t)r->outer_bytes, "fits", fits(j, r), "simulated_ranks", r->n_simulated, "assumes",
        "no stragglers, no congestion");
    states_add_json(&j->states, line);
    json_object_set_new(line, "host_bytes", json_integer(r->host_bytes));
    if (scale_has_mesh(j)) {
        json_object_set_new(line, "tp", json_integer(j->tp));
        if (j->cp > 1) {
            json_object_set_new(line, "cp", json_integer(j->cp));
            json_object_set_new(line, "cp_bytes", json_integer(r->cp_bytes));
        }
        json_object_set_new(line, "pp", json_integer(j->pp));
        json_object_set_new(line, "schedule", json_string(option_word_of(pipe_schedules, j->schedule)));
        if (j->stages_per_rank > 1)
            json_object_set_new(line, "stages_per_rank", json_integer(j->stages_per_rank));
        json_object_set_new(line, "micro_batches", json_integer(j->accum));
        json_object_set_new(line, "bubble", report_number(r->bubble));
        json_object_set_new(line, "activation_bytes", json_integer(r->activation_bytes));
        json_object_set_new(line, "all_bytes", json_integer(all_bytes(r)));
        json_object_set_new(line, "tp_bytes", json_integer(r->tp_bytes));
        json_object_set_new(line, "pp_bytes", json_integer(r->pp_bytes));
    }
    report_line(line);
}

/* An impossible job is a mistake in the options. */
static int exit_of(int err)
{
    return err == ZERO_ERR_ARG || err == ZERO_ERR_BUDGET ? EXIT_USAGE : err ? EXIT_FAILURE : 0;
}

static int project(const char *name, const struct scale_options *o)
{
    for (int i = 0; i < o->n_worlds; i++) {
        struct scale_job j = job_of(o, o->world[i]);
        struct scale_result r;
        int err = scale_run(&j, &r);
        if (err) {
            fprintf(stderr, "%s: %lld GPUs: %s\n", name, (long long)j.world, zr_error_text());
            return exit_of(err);
        }
        if (i == 0)
            pipe_warn_of_few(name, j.accum, j.pp);
        if (i == 0 && !o->json)
            print_head(o, &j);
        (o->json ? print_line : print_row)(&j, &r);
    }
    return 0;
}

int scale_command(const char *name, int argc, char **argv)
{
    struct scale_options o = {.job = {.model = scale_model_of("llama-3-8B"),
                                      .machine = scale_machine_of("h100"),
                                      .batch = 1,
                                      .tp = 1,
                                      .pp = 1,
                                      .stages_per_rank = 1,
                                      .schedule = -1, /* not given */
                                      .stage = 3,
                                      .prefetch = -1, /* not given */
                                      .dtype = ZERO_BF16,
                                      .compute_fraction = 1,
                                      .link_fraction = 1}};
    int status = options_parse(&table, name, argc, argv, &o);
    return status ? status : project(name, &o);
}
