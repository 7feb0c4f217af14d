/* SPDX-License-Identifier: Apache-2.0 */
/* tune_cmd.c: zero-bench tune, which chooses stage, hybrid, prefetch, budget, wire dtype and precisions for a
 * model, a world and a memory limit. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/plan/tune.h"
#include "bench/report/report.h"
#include "kernels/error.h"

#include <stdarg.h>

static const struct option_word wire_words[] = {
    {"own", TUNE_WIRE_OWN}, {"bf16", TUNE_WIRE_BF16}, {"any", TUNE_WIRE_ANY}, {0}};

/* Words for what candidates have: one value, or any that the model allows. */
static const struct option_word sum_words[] = {{"f32", 0}, {"bf16", ZERO_BF16}, {"any", TUNE_ANY}, {0}};
static const struct option_word masters_words[] = {{"f32", ZERO_MASTERS_F32},
                                                   {"remainder", ZERO_MASTERS_REMAINDER},
                                                   {"none", ZERO_MASTERS_NONE},
                                                   {"any", TUNE_ANY},
                                                   {0}};
static const struct option_word moments_words[] = {
    {"f32", ZERO_MOMENTS_F32}, {"bf16", ZERO_MOMENTS_BF16}, {"q8", ZERO_MOMENTS_Q8}, {"any", TUNE_ANY}, {0}};
static const struct option_word states_words[] = {
    {"device", ZERO_STATES_DEVICE}, {"host", ZERO_STATES_HOST}, {"any", TUNE_ANY}, {0}};

static error_t finish(struct argp_state *state, void *options)
{
    struct tune_options *o = options;
    struct states_options fixed = o->plan.states;
    fixed.masters = fixed.masters == TUNE_ANY ? 0 : fixed.masters;
    const char *fault = states_fault(&fixed, o->plan.dtype);
    if (fault)
        return option_fault(state, "%s", fault);
    if (!o->plan.params && o->plan.model.config.vocab < 256)
        return option_fault(state, "--vocab: %lld ids are too few for bytes, which need 256",
                            (long long)o->plan.model.config.vocab);
    return plan_finish_axes(state, &o->plan);
}

#define OPTION_STRUCT struct tune_options
static const struct option_row rows[] = {
    {"params", "N", "A GPT of this many parameters, such as 7.5e9, instead of a named model (no probe)",
     OPTION_INT(plan.params, 1, 1000000000000000)},
    {"dtype", "f32|bf16", "Of weights and gradients (bf16)", OPTION_WORD(plan.dtype, option_dtypes)},
    {.help = "Where it is to run:"},
    {"world", "N", "Ranks (as many as a launcher has started)", OPTION_INT(plan.world, 1, 1000000)},
    {"ranks-per-host", "N",
     "Of them on each host, a number that divides the world (as the launcher says; else all)",
     OPTION_INT(per_host, 1, 1000000)},
    {"limit", "BYTES", "Memory of a rank for what libzero holds, without activations (no limit)",
     OPTION_BYTES(limit, 1)},
    {"device", "host|cuda", "Where the model computes (host)", OPTION_WORD(plan.device, option_devices)},
    PLAN_MESH_ROWS(plan.),
    {.help = "Training:"},
    {"optimizer", "NAME", "One of:" OPTION_OPTIMIZERS " (adamw)",
     OPTION_WORD(plan.optimizer, option_optimizers)},
    {"accum", "N", "Micro-batches per step and rank (1; with --pp two for each of its ranks)",
     OPTION_INT(plan.accum, 1, 100000)},
    {"dp-shard", "N",
     "Groups of N ranks only, a number that divides the data-parallel ranks (every size that does)",
     OPTION_INT(plan.dp_shard, 1, 1000000)},
    {"wire-dtype", "own|bf16|any",
     "Of gradients between ranks: the model's own; bf16, to which gradients of f32 are rounded; both (own)",
     OPTION_WORD(wire, wire_words)},
    {"deterministic", "on|off", "Sums in a fixed order (as the library chooses)",
     OPTION_WORD(plan.deterministic, option_on_off)},
    {"grad-sum-dtype", "f32|bf16|any", "The dtype in which gradients of a bf16 model are added up (f32)",
     OPTION_WORD(plan.states.grad_sum, sum_words)},
    {"masters", "f32|remainder|none|any", "Masters of bf16 weights (f32)",
     OPTION_WORD(plan.states.masters, masters_words)},
    {"moments", "f32|bf16|q8|any", "States of the optimizer (f32)",
     OPTION_WORD(plan.states.moments, moments_words)},
    {"states", "device|host|any",
     "Where masters and moments are; those in host memory do not count for --limit (device)",
     OPTION_WORD(plan.states.states, states_words)},
    {.help = "The probe:"},
    {"probe", "N", "Kinds of candidates to time where several ranks were started; 0: none (3)",
     OPTION_INT(n_probe, 0, 100)},
    {"steps", "N", "Timed steps of each (10)", OPTION_INT(steps, 4, TUNE_MAX_STEPS)},
    {"batch", "N", "Rows in a micro-batch of one rank; messages between pipeline stages have as many (4)",
     OPTION_INT(plan.batch, 1, 1000000)},
    {"data", "PATH", "A file of text, or a folder of them (the C headers under /usr/include)",
     OPTION_TEXT(data)},
    {"threads", "N", "Of each rank on the host, for its products and layers (1)",
     OPTION_INT(threads, 1, 1024)},
    {"gpu", "N", "Which GPU (the rank's number on this host)", OPTION_INT(gpu, 0, 1000)},
    {"json", NULL, "A JSON line per candidate, and one of the choice", OPTION_FLAG(plan.json), .group = 5},
    {"log", NULL, "Show libzero's log on stderr, and what each rank has chosen", OPTION_FLAG(log)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc =
        "Chooses stage, hybrid and its groups, prefetch, budget of gathered parameters, wire dtype and "
        "precisions by the "
        "plan, which is exact, and prints what was rejected, why, and the lines that configure the choice."
        "\vThe order of candidates: first those that fit the limit; of these those whose gathers "
        "can be hidden (prefetch above 0, or nothing to gather), then the fewest bytes that a rank receives "
        "from other "
        "hosts in a step, then the fewest in all, then the most prefetch, then the least memory, then the "
        "simplest. The first is chosen. No time decides, unless several ranks were started (zero-run -n N "
        "zero-bench tune): then the first three kinds train for ten steps each, in two rounds, and one "
        "further down "
        "wins if its upper quartile is below the other's lower quartile: whatever overlaps is noise, and "
        "leaves the order as it is. If --masters, --moments, --grad-sum-dtype or --states is any, precisions "
        "are "
        "tried in this order until a candidate fits: exact ones (f32 and remainder), states in host memory, "
        "and then inexact ones, which end in other bits: gradient sums in bf16, moments in bf16, moments in "
        "8 bits, no masters.",
    .read_word = option_refuse_word,
    .finish = finish,
    OPTIONS_WITH_MODEL(struct tune_options, plan.model),
};

static int refuse(const char *name, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int refuse(const char *name, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "%s: ", name);
    vfprintf(stderr, fmt, ap);
    fputc('\n', stderr);
    va_end(ap);
    return EXIT_USAGE;
}

/* Refuses environment variables that would override every candidate. */
static int check_environment(const char *name)
{
    static const char *const chosen[] = {"ZERO_PREFETCH",      "ZERO_WIRE_DTYPE", "ZERO_PARAM_BUDGET_BYTES",
                                         "ZERO_DETERMINISTIC", "ZERO_OPTIMIZER",  NULL};
    const char *layout = option_set_variable(option_layout_variables);
    const char *set = layout ? layout : option_set_variable(chosen);
    return set ? refuse(name, "%s is set in the environment and would override every candidate: unset it",
                        set)
               : 0;
}

/* The number of ranks on this host, if a launcher says it (zero-run, torchrun, Open MPI, MPICH); else 0. */
static int64_t ranks_of_host(void)
{
    static const char *const names[] = {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        long long n = value ? strtoll(value, NULL, 10) : 0;
        if (n > 0)
            return n;
    }
    return 0;
}

/* Refuses a mesh that does not fit the ranks and their hosts, or leaves no ranks to shard over. */
static int check_mesh(const char *name, const struct tune_options *o)
{
    long long tp = (long long)plan_tp(&o->plan), pp = (long long)o->plan.pp, world = (long long)o->plan.world;
    long long cp = (long long)plan_cp(&o->plan);
    if (cp > 1 && world % (pp * cp * tp))
        return refuse(name,
                      "--cp: %lld ranks for each row, of %lld parts on %lld pipeline ranks, do not divide "
                      "the %lld ranks",
                      cp, tp, pp, world);
    if (world % (pp * tp))
        return refuse(
            name, "--tp and --pp: %lld parts of a layer on %lld pipeline ranks do not divide the %lld ranks",
            tp, pp, world);
    if (tune_n_dp(o) * cp == 1)
        return refuse(
            name,
            "--tp and --pp: each of the %lld ranks has another part of the model, so there is nothing to "
            "shard and nothing to choose",
            world);
    const struct {
        const char *option, *group;
        long long n;
    } groups[] = {
        {"tp", "tensor-parallel group", tp}, {"cp", "row", cp * tp}, {"pp", "pipeline stage", world / pp}};
    for (int i = 0; i < 3; i++)
        if (!tune_on_hosts(o, groups[i].n))
            return refuse(
                name, "--%s: the %lld ranks of a %s neither divide the %lld ranks of a host nor fill hosts",
                groups[i].option, groups[i].n, groups[i].group, (long long)o->per_host);
    return 0;
}

static int check_groups(const char *name, const struct tune_options *o)
{
    long long dp_shard = (long long)o->plan.dp_shard, n_dp = (long long)tune_n_dp(o);
    const char *which = n_dp < o->plan.world ? "data-parallel ranks" : "ranks";
    if (dp_shard && n_dp % dp_shard)
        return refuse(name, "--dp-shard: %lld does not divide the %lld %s", dp_shard, n_dp, which);
    if (dp_shard == 1 || dp_shard == n_dp)
        return refuse(name, "--dp-shard: %lld of %lld %s are no groups; more than 1 and less than all are",
                      dp_shard, n_dp, which);
    if (dp_shard && !tune_on_hosts(o, dp_shard * tune_stride(o)))
        return refuse(name,
                      "--dp-shard: groups of %lld neither divide the %lld ranks of a host nor fill hosts",
                      dp_shard, (long long)o->per_host);
    return 0;
}

/* Fills in what the launcher says, and refuses sizes that do not divide each other. */
static int check_world(const char *name, struct tune_options *o, int32_t started)
{
    if (started > 1 && o->plan.world && o->plan.world != started)
        return refuse(name,
                      "--world: %lld, but %d ranks were started; leave it out, or run one program alone",
                      (long long)o->plan.world, started);
    o->plan.world = o->plan.world ? o->plan.world : started;
    if (o->plan.world == 1)
        return refuse(name,
                      "--world: with 1 rank there is nothing to shard and nothing to choose; give 2 and "
                      "more, or start as many by zero-run");
    if (!o->per_host && started > 1)
        o->per_host = ranks_of_host();
    o->per_host = o->per_host ? o->per_host : o->plan.world;
    if (o->plan.world % o->per_host)
        return refuse(name, "--ranks-per-host: %lld does not divide the %lld ranks", (long long)o->per_host,
                      (long long)o->plan.world);
    int status = check_mesh(name, o);
    return status ? status : check_groups(name, o);
}

static int refuse_limit(const char *name, const struct tune_options *o, const struct candidates *c)
{
    int64_t least = 0;
    for (int64_t i = 1; i < c->n; i++)
        if (c->all[least].refused ||
            (!c->all[i].refused && tune_limited_bytes(&c->all[i]) < tune_limited_bytes(&c->all[least])))
            least = i;
    return refuse(name, "--limit: no candidate fits %lld bytes; the least that one needs is %lld, by %s",
                  (long long)o->limit, (long long)tune_limited_bytes(&c->all[least]),
                  tune_name(&c->all[least]).text);
}

static void probe(const char *name, const struct tune_options *o, struct candidates *c, int32_t rank)
{
    if (o->plan.params) {
        if (rank == 0)
            fprintf(stderr, "%s: no probe: --params names sizes, not a model that runs\n", name);
    } else if (tune_probe(o, c)) {
        fprintf(stderr, "%s: rank %d: the probe failed, so the order decides\n", name, rank);
    }
}

static int tune(const char *name, const struct tune_options *o, struct candidates *c, int32_t rank,
                int32_t started)
{
    if (rank == 0)
        pipe_warn_of_few(name, o->plan.accum, o->plan.pp);
    if (tune_plan(o, c)) {
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
        return EXIT_USAGE;
    }
    if (!c->all[0].fits || c->all[0].refused)
        return refuse_limit(name, o, c);
    if (started > 1 && o->n_probe)
        probe(name, o, c, rank);
    int64_t chosen = tune_choose(c);
    if (o->log)
        fprintf(stderr, "%s: rank %d chose %s\n", name, rank, tune_name(&c->all[chosen]).text);
    if (rank == 0)
        (o->plan.json ? tune_report_json : tune_report)(o, c, chosen);
    return 0;
}

int tune_command(const char *name, int argc, char **argv)
{
    struct tune_options o = {
        .plan = plan_defaults(), .n_probe = 3, .steps = 10, .threads = 1, .gpu = GPU_OF_LOCAL_RANK};
    o.plan.world = 0; /* not known yet */
    o.plan.batch = 4;
    struct candidates c = {0};
    struct zero_place at = {.world = 1};
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    status = check_environment(name);
    if (!status && zero_find_place(NULL, &at))
        return refuse(name, "%s", zero_last_error());
    if (!status)
        status = check_world(name, &o, at.world);
    if (!status)
        status = tune(name, &o, &c, at.rank, at.world);
    tune_free(&c);
    return status;
}
