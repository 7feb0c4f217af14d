/* SPDX-License-Identifier: Apache-2.0 */
/* stats.c: zero_plan, zero_get_stats and zero_trace_write. */
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
                               .state_buffers = bytes[ZR_MEM_STATE_BUFFERS],
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

/* Returns how many ranks share one copy of data with this placement. */
static double shares(const struct zr_plan *p, const uint8_t hold[ZR_AXES])
{
    double n = 1;
    for (int a = 0; a < ZR_AXES; a++)
        n *= hold[a] == ZR_CUT ? p->hop[a].size : 1;
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
        state += elems * (4.0 * t->n_states + (t->dtype == ZERO_F32 ? 0 : 4));
    }
    return (int64_t)(params / shares(p, p->placement.param) + grads / shares(p, p->placement.grad) +
                     state / shares(p, p->placement.state) + 0.5);
}

static int32_t runs_as(const struct zr_config *c)
{
    return c->options.hybrid == ZR_HFSDP ? ZERO_HFSDP : ZERO_HSDP;
}

static void fill_info(int stage, const struct zr_plan *p, struct zero_plan_info *out)
{
    *out = (struct zero_plan_info){.world = p->world,
                                   .stage = stage,
                                   .n_params = p->layout->n_params,
                                   .paper_bytes = paper_bytes(p),
                                   .host_bytes = p->host_bytes,
                                   .file_bytes = p->file_bytes};
    zr_plan_to_bytes(p->bytes, &out->bytes);
    to_traffic(p->placement.all_reduces, p->traffic.n_gather, p->traffic.n_reduce, p->traffic.wire_bytes,
               &out->traffic);
    out->traffic.n_outer = p->traffic.n_outer_reduce + p->traffic.n_outer_gather;
    out->traffic.outer_bytes = p->traffic.outer_bytes;
}

/* Resolves groups without knowing hosts: each group counts as a host. */
static int plan_groups(struct zr_config *c)
{
    ZR_TRY(zr_config_mesh(c, c->user.launch.rank, c->user.launch.world > 0 ? c->user.launch.world : 1));
    ZR_TRY(zr_config_groups(c, NULL));
    zr_config_mind_network(c, c->options.dp_shard < zr_place_dp(&c->place));
    return 0;
}

int zero_plan(const struct zero_tensor *tensors, int32_t n_tensors, const struct zero_config *cfg,
              struct zero_plan_info *out)
{
    if (!out)
        return zr_fail(ZERO_ERR_ARG, "zero_plan: out is NULL");
    struct zr_config config;
    int err = zr_config_resolve(cfg, &config);
    if (err)
        return zr_fail_more(err, "zero_plan");
    struct zr_prepared made = {0};
    err = plan_groups(&config);
    if (!err)
        err = zr_prepare(&config, zr_place_dp(&config.place), tensors, n_tensors, ZR_VALUES_UNSEEN, &made);
    if (!err) {
        fill_info(config.options.stage, made.plan, out);
        out->dp_shard = config.options.dp_shard;
        out->hybrid = runs_as(&config);
    } else {
        zr_fail_more(err, "zero_plan");
    }
    zr_plan_free(made.plan);
    zr_schedule_free(made.schedule);
    zr_layout_free(made.layout);
    zr_config_release(&config);
    return err;
}

int zero_get_stats(zero_ctx *z, struct zero_stats *out)
{
    if (!z || !out)
        return zr_fail(ZERO_ERR_ARG, "zero_get_stats: %s is NULL", z ? "out" : "z");
    int err = zr_engine_check_process(z->engine);
    if (err)
        return zr_fail_more(err, "zero_get_stats");
    struct zr_engine_facts f;
    zr_engine_facts(z->engine, &f);
    const struct zr_options *o = &z->config.options;
    struct zero_stats s = {.stage = o->stage,
                           .grad_sum_dtype = o->grad_sum_dtype,
                           .masters = o->optim[0].masters,
                           .moments = o->optim[0].moments,
                           .states = o->states,
                           .backend = f.backend,
                           .path = zr_backend_path(z),
                           .device = f.device,
                           .n_steps = f.n_steps,
                           .n_skipped = f.n_skipped,
                           .n_dropped = f.n_dropped,
                           .n_waits = f.n_waits,
                           .wait_ns = f.wait_ns,
                           .n_replans = f.n_replans,
                           .dp_shard = z->mesh.dp_shard,
                           .hybrid = runs_as(&z->config),
                           .grad_accum_steps = zr_engine_tuned(z->engine)->grad_accum_steps,
                           .attempt = z->world.attempt,
                           .n_micro = z->n_micro,
                           .library_bytes = f.library_bytes,
                           .tp_bytes = f.tp_bytes,
                           .cp_bytes = f.cp_bytes,
                           .pp_bytes = f.pipe_bytes,
                           .place = z->config.place};
    s.place.local_rank = z->world.local_rank;
    zr_plan_to_bytes(f.allocated, &s.allocated);
    zr_plan_to_bytes(z->plan->bytes, &s.planned);
    to_traffic(z->plan->placement.all_reduces, f.n_gather, f.n_reduce, f.wire_bytes, &s.traffic);
    s.traffic.n_outer = f.n_outer_gather + f.n_outer_reduce;
    s.traffic.outer_bytes = f.outer_bytes;
    *out = s;
    return 0;
}

int zero_trace_write(zero_ctx *z, const char *path)
{
    if (!z || !path)
        return zr_fail(ZERO_ERR_ARG, "zero_trace_write: %s is NULL", z ? "path" : "z");
    if (!z->config.options.trace)
        return zr_fail(
            ZERO_ERR_ARG,
            "zero_trace_write: trace is 0; set cfg.debug.trace = 1 (or ZERO_TRACE=1) before zero_wrap");
    ZR_TRY(zr_engine_check_process(z->engine));
    return zr_engine_trace_write(z->engine, path);
}
