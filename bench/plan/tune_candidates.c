/* SPDX-License-Identifier: Apache-2.0 */
/* tune_candidates.c: the configurations that zero-bench tune chooses among, planned by zero_plan and
 * sorted. */
#include "bench/hybrids.h"
#include "bench/libzero_error.h"
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
    /* (n_ranks) the pipeline ranks whose plans differ, or one with the whole model */
    struct plan_rank *ranks;
    int32_t n_ranks;
    /* (n_ranks) what zero_plan says of the candidate that was planned last */
    struct zero_plan_info *info;
    /* (n_ranks) bytes of parameters that stay with the least budget */
    int64_t *least_params;
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

/* Bytes that a rank receives from other hosts in a step. The ranks of a shard group, cp included, are tp
 * apart. Those of a replicate group, one of each shard group, are dp_shard times tp apart. */
static int64_t between_hosts(const struct tune_options *o, const struct zero_plan_info *info)
{
    int64_t dp_shard = info->dp_shard, tp = plan_tp(&o->plan);
    int64_t dp_replicate = tune_n_dp(o) * plan_cp(&o->plan) / dp_shard;
    int64_t replicate_bytes = info->traffic.outer_bytes,
            shard_bytes = info->traffic.wire_bytes - replicate_bytes;
    int64_t shard_on_host = members_on_host(o->per_host, dp_shard, tp),
            replicate_on_host = members_on_host(o->per_host, dp_replicate, dp_shard * tp);
    return remote_bytes(shard_bytes, dp_shard - shard_on_host, dp_shard) +
           remote_bytes(replicate_bytes, dp_replicate - replicate_on_host, dp_replicate);
}

/* For report_warning (report.h): an empty list of warnings to leave out, so all are printed. */
static const char *print_all[] = {NULL};

/* Plans a candidate for one pipeline rank. Only the first candidate prints warnings, because the others' are
 * the same. */
static int plan_rank(struct planning *p, const struct candidate *c, int32_t i)
{
    const struct plan_rank *rank = &p->ranks[i];
    struct plan_options o = p->o->plan;
    o.prefetch = c->prefetch;
    o.budget = c->budget;
    o.wire_dtype = c->wire_dtype;
    o.deterministic = c->deterministic;
    o.dp_shard = c->dp_shard;
    o.states = c->states;
    struct zero_config cfg = plan_config(&o, c->stage, c->hybrid, rank);
    cfg.debug.log = report_warning;
    cfg.debug.log_arg = p->warned ? NULL : print_all;
    p->warned = true;
    return take_libzero_error(zero_plan(rank->tensors, rank->n, &cfg, &p->info[i]));
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t limited_bytes(const struct states_options *s, const struct zero_bytes *b)
{
    return b->total - (s->states == ZERO_STATES_HOST ? b->master + b->moments : 0);
}

int64_t tune_limited_bytes(const struct candidate *c)
{
    return limited_bytes(&c->states, &c->bytes);
}

/* Adds to a candidate what zero_plan says of one pipeline rank. */
static void take_info(struct candidate *c, const struct tune_options *o, const struct zero_plan_info *info,
                      int64_t pp_rank)
{
    int64_t limited = limited_bytes(&c->states, &info->bytes);
    if (limited > tune_limited_bytes(c)) {
        c->bytes = info->bytes;
        c->pp_rank = pp_rank;
    }
    if (info->bytes.param_slots) {
        c->gathers = true;
        c->without_slots = larger(c->without_slots, limited - info->bytes.param_slots);
    }
    c->wire_bytes = larger(c->wire_bytes, info->traffic.wire_bytes);
    c->between_bytes = larger(c->between_bytes, between_hosts(o, info));
    c->sum_memory += info->bytes.total;
    c->sum_wire += info->traffic.wire_bytes;
}

/* Plans a candidate for all pipeline ranks, and fills in the fields that depend on it. */
static int plan(struct planning *p, struct candidate *c)
{
    c->bytes = (struct zero_bytes){0};
    c->wire_bytes = c->between_bytes = c->without_slots = c->sum_memory = c->sum_wire = 0;
    c->gathers = false;
    for (int32_t i = 0; i < p->n_ranks; i++) {
        ZR_TRY(plan_rank(p, c, i));
        take_info(c, p->o, &p->info[i], p->ranks[i].pp_at);
    }
    c->fits = !p->o->limit || tune_limited_bytes(c) <= p->o->limit;
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
    return !memcmp(&a->bytes, &b->bytes, sizeof a->bytes) && a->sum_memory == b->sum_memory &&
           a->sum_wire == b->sum_wire;
}

/* Returns the budget that the candidate which was planned last uses: the most that it has added to the memory
 * of parameters of any pipeline rank. */
static int64_t used_budget(const struct planning *p)
{
    int64_t most = 0;
    for (int32_t i = 0; i < p->n_ranks; i++)
        most =
            larger(most, p->info[i].bytes.param_shards + p->info[i].bytes.param_slots - p->least_params[i]);
    return most;
}

/* Raises the budget of *c, which was planned last, from what prefetch needs to all that the limit leaves. A
 * budget that the plan does not use up is lowered to what is used, if that gives the same plan. Returns false
 * if there is no other plan. */
static bool spend_limit(struct planning *p, struct candidate *c)
{
    const struct candidate least = *c;
    int64_t limit = p->o->limit;
    if (!least.gathers) /* everything is resident */
        return false;
    for (int32_t i = 0; i < p->n_ranks; i++)
        p->least_params[i] = p->info[i].bytes.param_shards;
    c->budget = limit ? limit - least.without_slots : NO_LIMIT;
    if (c->budget < 1 || plan(p, c))
        return false;
    if (!c->fits) { /* rounding has added to its memory */
        c->budget -= tune_limited_bytes(c) - limit;
        if (c->budget < 1 || plan(p, c))
            return false;
    }
    struct candidate used = *c;
    used.budget = used_budget(p);
    if (used.budget > 0 && !plan(p, &used) && same_plan(&used, c))
        *c = used;
    return !same_plan(c, &least);
}

/* Adds a candidate of stage 3 or a hybrid. Stage 3 is not added if all parameters are resident, that is,
 * without slots: it is then the same as stage 2, which is a separate candidate. A hybrid is added also then,
 * because its groups differ from stage 2. */
static int keep_sharded(struct planning *p, const struct candidate *c)
{
    return c->hybrid || c->gathers ? keep(p, c) : 0;
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
    int64_t n_dp = tune_n_dp(o);
    return n > 1 && n < n_dp && n_dp % n == 0 && tune_on_hosts(o, n * tune_stride(o)) &&
           (!o->plan.dp_shard || o->plan.dp_shard == n);
}

/* Inside one host, groups that add up micro-batches keep the fixed order of sums, as zero_wrap decides.
 * zero_plan takes each group for a host, so deterministic must be set for it. */
static int32_t deterministic_of(const struct tune_options *o)
{
    bool one_host = o->plan.world / o->plan.pp <= o->per_host;
    bool on = o->plan.accum > 1 && one_host && o->plan.device == ZERO_DEVICE_HOST;
    return o->plan.deterministic == ZERO_AUTO && on ? 1 : o->plan.deterministic;
}

static int add_hybrids(struct planning *p, struct candidate c)
{
    c.deterministic = deterministic_of(p->o);
    for (int64_t n = 2; n <= tune_n_dp(p->o) / 2; n++) {
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
static int add_kinds(struct planning *p, const struct states_options *states, int32_t wire, bool refused)
{
    struct candidate c = {.states = *states,
                          .dp_shard = (int32_t)tune_n_dp(p->o),
                          .prefetch = 2,
                          .budget = ZERO_AUTO,
                          .wire_dtype = wire,
                          .refused = refused,
                          .deterministic = p->o->plan.deterministic};
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
    return c->prefetch == 0 && c->gathers;
}

/* Compares what a user has to configure: negative if a is simpler than b. */
static int simpler(const struct candidate *a, const struct candidate *b)
{
    const int64_t config[2][10] = {
#define CONFIG(c)                                                                                            \
    {(c)->stage,          (c)->hybrid,         -(c)->dp_shard,     (c)->wire_dtype, (c)->states.grad_sum,    \
     (c)->states.masters, (c)->states.moments, (c)->states.states, -(c)->prefetch,  (c)->budget}
        CONFIG(a), CONFIG(b)
#undef CONFIG
    };
    for (int i = 0; i < 10; i++)
        if (config[0][i] != config[1][i])
            return COMPARE(config[0][i], config[1][i]);
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
           a->wire_dtype == b->wire_dtype && !memcmp(&a->states, &b->states, sizeof a->states);
}

/* ---- precisions ---- */

bool tune_is_inexact(const struct states_options *s)
{
    return s->grad_sum == ZERO_BF16 || s->masters == ZERO_MASTERS_NONE || s->moments;
}

/* Returns the cost of a precision. The cheapest one that fits is chosen. States in host memory, which the
 * update waits for, cost less than any rounding. Rounding costs more in this order: gradient sums, moments in
 * bf16, moments in 8 bits, weights. */
static int cost_of(const struct states_options *s)
{
    int cost = s->states == ZERO_STATES_HOST;
    cost += s->grad_sum == ZERO_BF16 ? 2 : 0;
    cost += s->moments == ZERO_MOMENTS_BF16 ? 4 : s->moments == ZERO_MOMENTS_Q8 ? 8 : 0;
    return cost + (s->masters == ZERO_MASTERS_NONE ? 16 : 0);
}
enum { N_COSTS = 32 };

/* Whether the options allow the value of one of the fields of plan.states. */
static bool allows(int option, int value)
{
    return option == TUNE_ANY || option == value;
}

/* Whether the options allow a precision. An option with TUNE_ANY allows only values that make a difference:
 * for masters and gradient sums with a bf16 model, and for states in host memory with a GPU. */
static bool is_allowed(const struct plan_options *o, const struct states_options *s)
{
    bool bf16 = o->dtype == ZERO_BF16, gpu = o->device == ZERO_DEVICE_CUDA;
    return allows(o->states.grad_sum, s->grad_sum) && allows(o->states.masters, s->masters) &&
           allows(o->states.moments, s->moments) && allows(o->states.states, s->states) &&
           (bf16 || (!s->grad_sum && !s->masters)) && (gpu || !s->states || o->states.states == s->states);
}

static int add_precision(struct planning *p, const struct states_options *states)
{
    const struct tune_options *o = p->o;
    /* bf16 gradients are bf16 on the wire anyway. */
    bool may_round = o->plan.dtype == ZERO_F32, unrounded = !may_round || o->wire != TUNE_WIRE_BF16;
    int err = unrounded ? add_kinds(p, states, 0, false) : 0;
    if (!err && may_round)
        err = add_kinds(p, states, ZERO_BF16, o->wire == TUNE_WIRE_OWN);
    return err;
}

/* Adds all precisions with this cost that the options allow. */
static int add_cost(struct planning *p, int cost)
{
    const struct plan_options *o = &p->o->plan;
    struct states_options s = o->states;
    for (s.masters = ZERO_MASTERS_F32; s.masters <= ZERO_MASTERS_NONE; s.masters++)
        for (s.moments = ZERO_MOMENTS_F32; s.moments <= ZERO_MOMENTS_Q8; s.moments++)
            for (s.grad_sum = 0; s.grad_sum <= ZERO_BF16; s.grad_sum += ZERO_BF16)
                for (s.states = ZERO_STATES_DEVICE; s.states <= ZERO_STATES_HOST; s.states++)
                    if (cost_of(&s) == cost && is_allowed(o, &s))
                        ZR_TRY(add_precision(p, &s));
    return 0;
}

static bool any_fits(const struct candidates *c)
{
    for (int64_t i = 0; i < c->n; i++)
        if (c->all[i].fits && !c->all[i].refused)
            return true;
    return false;
}

/* Adds the precisions by their cost. As soon as a candidate fits, dearer ones are left out. */
static int add_all(struct planning *p)
{
    for (int cost = 0; cost < N_COSTS && !any_fits(p->candidates); cost++)
        ZR_TRY(add_cost(p, cost));
    return 0;
}

/* Makes the ranks to plan for. layers are those of plan_model. */
static int make_ranks(struct planning *p, const struct zero_tensor *tensors, int32_t n, int32_t layers)
{
    const struct plan_options *o = &p->o->plan;
    static int64_t like[PIPE_MAX_STAGES];
    const struct model_config sizes = plan_sizes(&o->model.config, o->params);
    int64_t n_layers = o->pp > 1 ? sizes.layers : layers;
    pipe_find_alike(like, n_layers, o->pp, o->stages_per_rank);
    for (int64_t rank = 0; rank < o->pp; rank++) {
        if (like[rank] != rank)
            continue;
        ZR_TRY(ZR_GROW(p->ranks, p->n_ranks + 1, "the tensors of pipeline rank %lld", (long long)rank));
        struct plan_rank *to = &p->ranks[p->n_ranks];
        if (!plan_rank_of(to, &sizes, tensors, n, n_layers, o->pp, o->stages_per_rank, rank))
            return zr_fail(ZERO_ERR_NOMEM, "no memory for the calls of %lld layers", (long long)n_layers);
        p->n_ranks++;
    }
    ZR_TRY(ZR_ALLOC(p->info, p->n_ranks, "plans of %d ranks", p->n_ranks));
    return ZR_ALLOC(p->least_params, p->n_ranks, "sizes of %d ranks", p->n_ranks);
}

int tune_plan(const struct tune_options *o, struct candidates *c)
{
    struct planning p = {.o = o, .candidates = c};
    struct zero_tensor tensors[PLAN_N_TENSORS];
    int32_t layers, n = plan_model(tensors, &layers, &o->plan.model.config, o->plan.params, o->plan.dtype);
    c->n_units = plan_n_units(tensors, n);
    c->n_params = plan_n_params(tensors, n);
    int err = make_ranks(&p, tensors, n, layers);
    err = err ? err : add_all(&p);
    for (int32_t i = 0; i < p.n_ranks; i++)
        free(p.ranks[i].order);
    free(p.ranks);
    free(p.info);
    free(p.least_params);
    if (!err)
        qsort(c->all, (size_t)c->n, sizeof *c->all, compare_for_qsort);
    return err;
}

void tune_free(struct candidates *c)
{
    free(c->all);
    *c = (struct candidates){0};
}
