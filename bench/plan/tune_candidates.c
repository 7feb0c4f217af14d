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

#define NO_LIMIT   (INT64_MAX / 4) /* a budget larger than any model */
#define LESS(a, b) (((a) > (b)) - ((a) < (b)))

struct planning {
    const struct tune_options *o;
    struct candidates *to;
    struct zero_tensor tensors[PLAN_N_TENSORS];
    int32_t n_tensors;
    struct zero_call *order;
    int32_t n_order;
    bool warned;
};

/* The part of `bytes`, rounded down, that comes from other hosts. A rank receives as much from each other
 * rank of a group of `size`, and `far` of these are on other hosts. */
static int64_t share_of(int64_t bytes, int64_t far, int64_t size)
{
    return size < 2 ? 0 : bytes / (size - 1) * far + bytes % (size - 1) * far / (size - 1);
}

/* The number of ranks on one host, of `size` ranks whose numbers are `every` apart. */
static int64_t on_a_host(int64_t per_host, int64_t size, int64_t every)
{
    int64_t n = per_host < every ? 1 : per_host / every;
    return n < size ? n : size;
}

static int64_t between_hosts(const struct tune_options *o, const struct zero_plan_info *info)
{
    int64_t inner = info->dp_shard, outer = o->world / inner;
    int64_t within = info->traffic.wire_bytes - info->traffic.outer_bytes;
    return share_of(within, inner - on_a_host(o->per_host, inner, 1), inner) +
           share_of(info->traffic.outer_bytes, outer - on_a_host(o->per_host, outer, inner), outer);
}

/* Only the first candidate prints warnings, because the others' are the same. */
static const char *nothing_hidden[] = {NULL};

static int plan(struct planning *p, struct candidate *c)
{
    const struct tune_options *o = p->o;
    struct zero_plan_info info;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.debug.log = report_warning;
    cfg.debug.log_arg = p->warned ? NULL : nothing_hidden;
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
    p->to->n_params = info.n_params;
    return 0;
}

static int keep(struct planning *p, const struct candidate *c)
{
    struct candidates *to = p->to;
    if (to->n == to->capacity) {
        int64_t capacity = to->capacity ? 2 * to->capacity : 64;
        ZR_TRY(ZR_GROW(to->all, capacity, "%lld candidates", (long long)capacity));
        to->capacity = capacity;
    }
    to->all[to->n++] = *c;
    return 0;
}

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
    struct candidate exact = *c;
    exact.budget = c->bytes.param_shards + c->bytes.param_slots - least.bytes.param_shards;
    if (exact.budget > 0 && !plan(p, &exact) && same_plan(&exact, c))
        *c = exact;
    return !same_plan(c, &least);
}

/* Stage 3 with everything resident is the same as stage 2, which is a separate candidate. Hybrids still share
 * the rest. */
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

/* Groups must lie inside one host, or fill hosts. */
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

static bool waits_for_gathers(const struct candidate *c)
{
    return c->prefetch == 0 && c->bytes.param_slots > 0;
}

static int simpler(const struct candidate *a, const struct candidate *b)
{
    const int64_t of_a[] = {a->stage, a->hybrid, -a->dp_shard, a->wire_dtype, -a->prefetch, a->budget};
    const int64_t of_b[] = {b->stage, b->hybrid, -b->dp_shard, b->wire_dtype, -b->prefetch, b->budget};
    for (size_t i = 0; i < sizeof of_a / sizeof *of_a; i++)
        if (of_a[i] != of_b[i])
            return LESS(of_a[i], of_b[i]);
    return 0;
}

int tune_compare(const struct candidate *a, const struct candidate *b, enum tune_reason *reason)
{
    bool fit = a->fits && b->fits;
    const int by[] = {
        [TUNE_FITS] = b->fits - a->fits,
        [TUNE_ALLOWED] = a->refused - b->refused,
        [TUNE_HIDDEN] = fit ? waits_for_gathers(a) - waits_for_gathers(b) : 0,
        [TUNE_BETWEEN] = fit ? LESS(a->between_bytes, b->between_bytes) : 0,
        [TUNE_ALL] = fit ? LESS(a->wire_bytes, b->wire_bytes) : 0,
        [TUNE_PREFETCH] = fit ? b->prefetch - a->prefetch : 0,
        [TUNE_MEMORY] = LESS(a->bytes.total, b->bytes.total),
        [TUNE_SIMPLER] = simpler(a, b),
    };
    for (int i = TUNE_FITS; i <= TUNE_SIMPLER; i++) {
        *reason = (enum tune_reason)i;
        if (by[i])
            return by[i];
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
        int64_t between = b->between_bytes - a->between_bytes;
        int64_t inside = a->wire_bytes - a->between_bytes - (b->wire_bytes - b->between_bytes);
        bool rival = b->fits && !b->refused && (waits_for_gathers(a) || !waits_for_gathers(b));
        if (rival && between > 0 && (double)inside / (double)between > most)
            most = (double)inside / (double)between;
    }
    return most;
}

static int in_order(const void *a, const void *b)
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
    bool rounds = o->train.dtype == ZERO_F32, own = !rounds || o->wire != TUNE_WIRE_BF16;
    int err = own ? add_kinds(p, 0, false) : 0;
    if (!err && rounds)
        err = add_kinds(p, ZERO_BF16, o->wire == TUNE_WIRE_OWN);
    return err;
}

int tune_plan(const struct tune_options *o, struct candidates *c)
{
    struct planning p = {.o = o, .to = c};
    int32_t layers;
    p.n_tensors = plan_model(p.tensors, &layers, &o->train.model.config, o->params, o->train.dtype);
    c->n_units = layers + 1;
    ZR_TRY(ZR_ALLOC(p.order, TRAIN_N_CALLS(layers), "%d units", layers));
    p.n_order = train_call_order(p.order, &(struct gpt2_config){.layers = layers});
    int err = add_all(&p);
    free(p.order);
    if (!err)
        qsort(c->all, (size_t)c->n, sizeof *c->all, in_order);
    return err;
}

void tune_free(struct candidates *c)
{
    free(c->all);
    *c = (struct candidates){0};
}
