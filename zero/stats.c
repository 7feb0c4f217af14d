/* stats.c: what a plan promises and what a context has done, in zero.h's terms; and the timeline. */
#include "zero/context.h"

void zr_plan_to_bytes(const int64_t bytes[ZR_MEM_COUNT], struct zero_bytes *out)
{
    *out = (struct zero_bytes){.param_shards = bytes[ZR_MEM_PARAM_SHARDS],
                               .param_slots = bytes[ZR_MEM_PARAM_SLOTS],
                               .grad_shards = bytes[ZR_MEM_GRAD_SHARDS],
                               .grad_slots = bytes[ZR_MEM_GRAD_SLOTS],
                               .grad_sums = bytes[ZR_MEM_GRAD_SUMS],
                               .grad_gathered = bytes[ZR_MEM_GRAD_GATHERED],
                               .master = bytes[ZR_MEM_MASTER],
                               .moments = bytes[ZR_MEM_MOMENTS],
                               .snapshot = bytes[ZR_MEM_SNAPSHOT],
                               .comm = bytes[ZR_MEM_COMM],
                               .exchange = bytes[ZR_MEM_EXCHANGE]};
    for (int i = 0; i < ZR_MEM_COUNT; i++)
        out->total += bytes[i];
}

static void to_traffic(bool all_reduces, int64_t n_gather, int64_t n_reduce, int64_t wire_bytes,
                       struct zero_traffic *out)
{
    *out = (struct zero_traffic){.n_all_gather = n_gather,
                                 .n_reduce_scatter = all_reduces ? 0 : n_reduce,
                                 .n_all_reduce = all_reduces ? n_reduce : 0,
                                 .wire_bytes = wire_bytes};
}

/* Ranks that share one copy of what is held so. */
static double shares(const struct zr_plan *p, const uint8_t hold[ZR_AXES])
{
    double n = 1;
    for (int a = 0; a < ZR_AXES; a++)
        n *= hold[a] == ZR_WHOLE ? 1 : p->hop[a].size;
    return n;
}

/* The ZeRO paper counts parameters and gradients in the model's dtype and the optimizer's state at K bytes
 * per parameter (arXiv:1910.02054, section 3.1 and figure 1: K = 12 for mixed-precision Adam). */
static int64_t paper_bytes(const struct zr_plan *p)
{
    double params = 0, grads = 0, state = 0;
    for (int32_t i = 0; i < p->layout->n_tensors; i++) {
        const struct zr_tensor *t = &p->layout->tensors[i];
        if (t->buffer)
            continue;
        double elems = (double)t->n_elems, size = (double)zr_dtype_bytes(t->dtype);
        params += elems * size;
        if (!t->grad)
            continue;
        grads += elems * size;
        state += elems * (4.0 * p->states_of[t->optimizer] + (t->dtype == ZR_F32 ? 0 : 4));
    }
    return (int64_t)(params / shares(p, p->place.param) + grads / shares(p, p->place.grad) +
                     state / shares(p, p->place.state) + 0.5);
}

int zero_plan(const struct zero_tensor *tensors, int32_t n_tensors, const struct zero_config *cfg,
              struct zero_plan_info *out)
{
    if (!out)
        return zr_fail(ZR_ERR_ARG, "zero_plan: out is NULL");
    struct zr_config config;
    enum zero_backend backend;
    int err = zr_config_resolve(cfg, &config);
    if (err)
        return zr_fail_more(err, "zero_plan");
    struct zr_tensor *t;
    struct zr_layout *layout = NULL;
    struct zr_plan *plan = NULL;
    int world = config.user.world > 0 ? config.user.world : 1;
    err = zr_config_needs(&config.user, offsetof(struct zero_config, plan_info_size));
    if (!err)
        err = zr_backend_choose(&config, world, &backend);
    if (!err)
        err = zr_tensors_check(tensors, n_tensors, &config.user, ZR_VALUES_UNSEEN, &t);
    if (!err)
        err = zr_config_layout(&config, t, n_tensors, world, &layout);
    if (!err) {
        zr_backend_reserve(&config, backend, layout);
        err = zr_plan_make(layout, &config.options, &plan);
    }
    if (!err) {
        struct zero_plan_info info = {.world = world,
                                      .stage = config.options.stage,
                                      .n_params = layout->n_params,
                                      .paper_bytes = paper_bytes(plan)};
        zr_plan_to_bytes(plan->bytes, &info.bytes);
        to_traffic(plan->place.all_reduces, plan->traffic.n_gather, plan->traffic.n_reduce,
                   plan->traffic.wire_bytes, &info.traffic);
        zr_copy_out(out, config.user.plan_info_size, &info, sizeof info);
    } else {
        zr_fail_more(err, "zero_plan");
    }
    zr_plan_free(plan);
    zr_layout_free(layout);
    zr_config_release(&config);
    return err;
}

int zero_get_stats(zero_ctx *z, struct zero_stats *out)
{
    if (!z || !out)
        return zr_fail(ZR_ERR_ARG, "zero_get_stats: %s is NULL", z ? "out" : "z");
    struct zr_engine *e = &z->engine;
    int err = zr_engine_check_process(e);
    if (!err)
        err = zr_config_needs(&z->config.user, offsetof(struct zero_config, stats_size));
    if (err)
        return zr_fail_more(err, "zero_get_stats");
    struct zr_comm_stats gather, reduce;
    e->gather->ops->stats(e->gather, &gather);
    e->reduce->ops->stats(e->reduce, &reduce);
    struct zero_stats s = {.rank = e->rank,
                           .world = e->world,
                           .local_rank = z->world.local_rank,
                           .stage = z->config.options.stage,
                           .backend = e->gather->ops->name,
                           .path = z->nccl ? zr_nccl_path(z->nccl) : e->gather->ops->name,
                           .device = e->dev->ops->name,
                           .n_steps = e->step,
                           .n_skipped = e->n_skipped,
                           .n_dropped = e->n_dropped,
                           .n_waits = e->n_waits,
                           .wait_ns = e->wait_ns,
                           .n_replans = zr_core_counts(e->core).n_replans};
    zr_plan_to_bytes(e->allocated, &s.allocated);
    zr_plan_to_bytes(z->plan->bytes, &s.planned);
    to_traffic(z->plan->place.all_reduces, e->n_gather, e->n_reduce,
               gather.wire_bytes + reduce.wire_bytes - e->wire_at_open, &s.traffic);
    zr_copy_out(out, z->config.user.stats_size, &s, sizeof s);
    return 0;
}

int zero_trace_write(zero_ctx *z, const char *path)
{
    if (!z || !path)
        return zr_fail(ZR_ERR_ARG, "zero_trace_write: %s is NULL", z ? "path" : "z");
    if (!z->config.options.trace)
        return zr_fail(ZR_ERR_ARG,
                       "zero_trace_write: trace is 0; set cfg.trace = 1 (or ZERO_TRACE=1) before zero_wrap");
    int err = zr_engine_check_process(&z->engine);
    if (!err)
        err = zr_engine_drain(&z->engine);
    return err ? err : zr_timeline_write(z->engine.timeline, z->engine.rank, path);
}
