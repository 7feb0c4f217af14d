/* SPDX-License-Identifier: Apache-2.0 */
/* tune_candidates.c: the configurations that zero-bench tune chooses among, planned by zero_plan and
 * sorted. */
#include "bench/hybrids.h"
#include "bench/libzero_error.h"
#include "bench/plan/model.h"
#include "bench/plan/tune.h"
#include "bench/report/report.h"
#include "kernels/alloc.h"

#include <string.h>

#define NO_LIMIT (INT64_MAX / 4) /* a budget larger than any model */
/* Negative, 0 or positive, as a is less than, equal to or more than b. */
#define COMPARE(a, b) (((a) > (b)) - ((a) < (b)))

/* What all candidates are planned from, and where they are collected. */
struct planning {
    const struct tune_options *o;
    struct candidates *candidates;
    struct zero_tensor tensors[PLAN_N_TENSORS];
    int32_t n_tensors;
    /* the calls of a micro-batch, for cfg.memory.order */
    struct zero_call *order;
    int32_t n_order;
    /* the warnings of zero_plan have been printed, by the first candidate */
    bool warned;
};

/* A rank receives `bytes` from the other members of a group, equally many from each. Returns how many of
 * them, rounded down, come from the n_remote members on other hosts. group_size counts all members. */
static int64_t remote_bytes(int64_t bytes, int64_t n_remote, int64_t group_size)
{
    int64_t others = group_size - 1; /* without this rank */
    return others < 1 ? 0 : bytes / others * n_remote + bytes % others * n_remote / others;
}

/* How many members of a group are on one host, if the ranks of neighbouring members differ by `stride`. */
static int64_t members_on_host(int64_t per_host, int64_t group_size, int64_t stride)
{
    int64_t n = per_host < stride ? 1 : per_host / stride;
    return n < group_size ? n : group_size;
}

/* Bytes that a rank receives from other hosts in a step. The ranks of a shard group have consecutive numbers.
 * Those of a replicate group, one of each shard group, are dp_shard apart. */
static int64_t between_hosts(const struct tune_options *o, const struct zero_plan_info *info)
{
    int64_t dp_shard = info->dp_shard, dp_replicate = o->world / dp_shard;
    int64_t replicate_bytes = info->traffic.outer_bytes,
            shard_bytes = info->traffic.wire_bytes - replicate_bytes;
    int64_t shard_on_host = members_on_host(o->per_host, dp_shard, 1),
            replicate_on_host = members_on_host(o->per_host, dp_replicate, dp_shard);
    return remote_bytes(shard_bytes, dp_shard - shard_on_host, dp_shard) +
           remote_bytes(replicate_bytes, dp_replicate - replicate_on_host, dp_replicate);
}

/* For report_warning (report.h): an empty list of warnings to leave out, so all are printed. */
static const char *print_all[] = {NULL};

/* Fills in what zero_plan says about a candidate. Only the first candidate prints warnings, because the
 * others' are the same. */
static int plan(struct planning *p, struct candidate *c)
{
    const struct tune_options *o = p->o;
    struct zero_plan_info info;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.debug.log = report_warning;
    cfg.debug.log_arg = p->warned ? NULL : print_all;
    p->warned = true;
    cfg.launch.world = (int32_t)o->world;
    cfg.device = o->train.device;
    cfg.optim.optimizer = o->train.optimizer;
    cfg.optim.beta1 = 0.9f;
    cfg.grad_accum_steps = (int32_t)o->train.accum;
    cfg.memory.order = p->order;
    cfg.memory.n_order = p->n_order;
    cfg.stage = c->stage;
    hybrid_to_config(&cfg, c->hybrid, o->world, c->dp_shard);
    cfg.memory.prefetch = c->prefetch;
    cfg.memory.param_budget_bytes = c->budget;
    cfg.memory.wire_dtype = c->wire_dtype;
    cfg.deterministic = c->deterministic;
    int err = zero_plan(p->tensors, p->n_tensors, &cfg, &info);
    if (err)
        return take_libzero_error(err);
    c->bytes = info.bytes;
    c->wire_bytes = info.traffic.wire_bytes;
    c->between_bytes = between_hosts(o, &info);
    c->fits = !o->limit || c->bytes.total <= o->limit;
    p->candidates->n_params = info.n_params;
    return 0;
}

/* Adds a copy of the candidate to the list. */
static int keep(struct planning *p, const struct candidate *c)
{
    struct candidates *to = p->candidates;
    if (to->n == to->capacity) {
        int64_t capacity = to->capacity ? 2 * to->capacity : 64;
        ZR_TRY(ZR_GROW(to->all, capacity, "%lld candidates", (long long)capacity));
        to->capacity = capacity;
    }
    to->all[to->n++] = *c;
    return 0;
}

/* Whether two candidates come to the same memory and traffic. */
static bool same_plan(const struct candidate *a, const struct candidate *b)
{
    return !memcmp(&a->bytes, &b->bytes, sizeof a->bytes) && a->wire_bytes == b->wire_bytes;
}

/* Raises the budget of *c from what prefetch needs to all that the limit leaves. A budget that the plan does
 * not use up is lowered to what is used, if that gives the same plan. Returns false if there is no other
 * plan. */
static bool spend_limit(struct planning *p, struct candidate *c)
{
    const struct candidate least = *c;
    int64_t limit = p->o->limit;
    if (!least.bytes.param_slots) /* everything is resident */
        return false;
    c->budget = limit ? limit - (least.bytes.total - least.bytes.param_slots) : NO_LIMIT;
    if (c->budget < 1 || plan(p, c))
        return false;
    if (!c->fits) { /* rounding has added to its memory */
        c->budget -= c->bytes.total - limit;
        if (c->budget < 1 || plan(p, c))
            return false;
    }
    /* what the larger budget has added to the memory of parameters */
    struct candidate used = *c;
    used.budget = c->bytes.param_shards + c->bytes.param_slots - least.bytes.param_shards;
    if (used.budget > 0 && !plan(p, &used) && same_plan(&used, c))
        *c = used;
    return !same_plan(c, &least);
}

/* Adds a candidate of stage 3 or a hybrid. Stage 3 is not added if all parameters are resident, that is,
 * without slots: it is then the same as stage 2, which is a separate candidate. A hybrid is added also then,
 * because its groups differ from stage 2. */
static int keep_sharded(struct planning *p, const struct candidate *c)
{
    return c->hybrid || c->bytes.param_slots ? keep(p, c) : 0;
}

/* Adds stage 3 or a hybrid of it with each prefetch, once with the budget that prefetch needs and once
 * with all that the limit leaves. */
static int add_sharded(struct planning *p, struct candidate c)
{
    for (c.prefetch = 2; c.prefetch >= 0; c.prefetch--) {
        c.budget = ZERO_AUTO;
        int err = plan(p, &c);
        err = err ? err : keep_sharded(p, &c);
        if (!err && spend_limit(p, &c))
            err = keep_sharded(p, &c);
        if (err)
            return err;
    }
    return 0;
}

/* Whether dp_shard may be n: groups must lie inside one host, or fill hosts. */
static bool is_group(const struct tune_options *o, int64_t n)
{
    return n > 1 && n < o->world && o->world % n == 0 && (o->per_host % n == 0 || n % o->per_host == 0) &&
           (!o->dp_shard || o->dp_shard == n);
}

/* On one host, groups that add up micro-batches keep the fixed order of sums, as zero_wrap decides. zero_plan
 * takes each group for a host, so deterministic must be set for it. */
static int32_t deterministic_of(const struct tune_options *o)
{
    bool on = o->train.accum > 1 && o->per_host == o->world && o->train.device == ZERO_DEVICE_HOST;
    return o->train.deterministic == ZERO_AUTO && on ? 1 : o->train.deterministic;
}

static int add_hybrids(struct planning *p, struct candidate c)
{
    c.deterministic = deterministic_of(p->o);
    for (int64_t n = 2; n <= p->o->world / 2; n++) {
        for (c.hybrid = HYBRID_HSDP; is_group(p->o, n) && c.hybrid <= HYBRID_HFSDP; c.hybrid++) {
            c.dp_shard = (int32_t)n;
            int err = add_sharded(p, c);
            if (err)
                return err;
        }
    }
    return 0;
}

/* Adds all candidates with this dtype of gradients on the wire (0: their own). A kind is a stage, or a hybrid
 * and its dp_shard. refused: the options do not allow this dtype, and the report only says what it would
 * bring. */
static int add_kinds(struct planning *p, int32_t wire, bool refused)
{
    struct candidate c = {.dp_shard = (int32_t)p->o->world,
                          .prefetch = 2,
                          .budget = ZERO_AUTO,
                          .wire_dtype = wire,
                          .refused = refused,
                          .deterministic = p->o->train.deterministic};
    for (; c.stage < 3; c.stage++) {
        int err = plan(p, &c);
        err = err ? err : keep(p, &c);
        if (err)
            return err;
    }
    int err = add_sharded(p, c);
    return err ? err : add_hybrids(p, c);
}

/* Without prefetch, the compute waits for each gather of parameters that have no memory of their own. */
static bool waits_for_gathers(const struct candidate *c)
{
    return c->prefetch == 0 && c->bytes.param_slots > 0;
}

/* Compares what a user has to configure: negative if a is simpler than b. */
static int simpler(const struct candidate *a, const struct candidate *b)
{
    const int64_t config_a[] = {a->stage, a->hybrid, -a->dp_shard, a->wire_dtype, -a->prefetch, a->budget};
    const int64_t config_b[] = {b->stage, b->hybrid, -b->dp_shard, b->wire_dtype, -b->prefetch, b->budget};
    for (size_t i = 0; i < sizeof config_a / sizeof *config_a; i++)
        if (config_a[i] != config_b[i])
            return COMPARE(config_a[i], config_b[i]);
    return 0;
}

int tune_compare(const struct candidate *a, const struct candidate *b, enum tune_reason *reason)
{
    bool fit = a->fits && b->fits;
    /* the criteria in their order of importance: negative if a is better */
    const int criteria[] = {
        [TUNE_FITS] = b->fits - a->fits,
        [TUNE_ALLOWED] = a->refused - b->refused,
        [TUNE_HIDDEN] = fit ? waits_for_gathers(a) - waits_for_gathers(b) : 0,
        [TUNE_BETWEEN] = fit ? COMPARE(a->between_bytes, b->between_bytes) : 0,
        [TUNE_ALL] = fit ? COMPARE(a->wire_bytes, b->wire_bytes) : 0,
        [TUNE_PREFETCH] = fit ? b->prefetch - a->prefetch : 0,
        [TUNE_MEMORY] = COMPARE(a->bytes.total, b->bytes.total),
        [TUNE_SIMPLER] = simpler(a, b),
    };
    for (int i = TUNE_FITS; i <= TUNE_SIMPLER; i++) {
        *reason = (enum tune_reason)i;
        if (criteria[i])
            return criteria[i];
    }
    *reason = TUNE_SAME;
    return 0;
}

double tune_ratio(const struct candidates *c, int64_t chosen)
{
    const struct candidate *a = &c->all[chosen];
    double most = 0;
    for (int64_t i = 0; i < c->n; i++) {
        const struct candidate *b = &c->all[i];
        /* b receives fewer bytes inside hosts, and more between hosts; the ratio is where both cost the
         * same */
        int64_t more_between = b->between_bytes - a->between_bytes;
        int64_t fewer_inside = a->wire_bytes - a->between_bytes - (b->wire_bytes - b->between_bytes);
        bool rival = b->fits && !b->refused && (waits_for_gathers(a) || !waits_for_gathers(b));
        if (rival && more_between > 0 && (double)fewer_inside / (double)more_between > most)
            most = (double)fewer_inside / (double)more_between;
    }
    return most;
}

static int compare_for_qsort(const void *a, const void *b)
{
    enum tune_reason reason;
    return tune_compare(a, b, &reason);
}

bool tune_same_kind(const struct candidate *a, const struct candidate *b)
{
    return a->stage == b->stage && a->hybrid == b->hybrid && a->dp_shard == b->dp_shard &&
           a->wire_dtype == b->wire_dtype;
}

static int add_all(struct planning *p)
{
    const struct tune_options *o = p->o;
    /* bf16 gradients are bf16 on the wire anyway. */
    bool may_round = o->train.dtype == ZERO_F32, unrounded = !may_round || o->wire != TUNE_WIRE_BF16;
    int err = unrounded ? add_kinds(p, 0, false) : 0;
    if (!err && may_round)
        err = add_kinds(p, ZERO_BF16, o->wire == TUNE_WIRE_OWN);
    return err;
}

int tune_plan(const struct tune_options *o, struct candidates *c)
{
    struct planning p = {.o = o, .candidates = c};
    int32_t layers;
    p.n_tensors = plan_model(p.tensors, &layers, &o->train.model.config, o->params, o->train.dtype);
    c->n_units = layers + 1;
    ZR_TRY(ZR_ALLOC(p.order, TRAIN_N_CALLS(layers), "%d units", layers));
    p.n_order = train_call_order(p.order, &(struct gpt2_config){.layers = layers});
    int err = add_all(&p);
    free(p.order);
    if (!err)
        qsort(c->all, (size_t)c->n, sizeof *c->all, compare_for_qsort);
    return err;
}

void tune_free(struct candidates *c)
{
    free(c->all);
    *c = (struct candidates){0};
}
