/* scale_run.c: a job on the virtual clock; see scale.h. */
#include "bench/scale.h"

#include "kernels/device.h"
#include "shard/verify/verify.h"

#include <stdlib.h>

/* Steps that are simulated: the last is measured, when every one begins as the one before did. */
enum { N_STEPS = 3 };

/* Of compute in all of them: the clock counts nanoseconds in 63 bits, and links need some of them, too. */
static const double most_s = 1e9;

static struct zr_verify_unit *units_of(const struct scale_job *j)
{
    int32_t n = scale_n_units(j->model);
    struct zr_verify_unit *units = calloc((size_t)n, sizeof *units);
    double tokens = (double)(j->batch * j->context), back = j->recompute ? 3 : 2;
    for (int32_t u = 0; units && u < n; u++) {
        struct scale_unit unit = scale_unit_of(j->model, j->context, u);
        /* The head is not computed again: its result is the loss. */
        units[u] = (struct zr_verify_unit){.elems = unit.n_params,
                                           .forward_flop = unit.flop_per_token * tokens,
                                           .backward_flop = unit.flop_per_token * tokens *
                                                            (u <= j->model->layers ? back : 2),
                                           .again_forward_flop = unit.again_flop_per_token * tokens,
                                           .again_backward_flop = unit.again_flop_per_token * tokens * 2};
    }
    return units;
}

static int check_time(const struct scale_job *j, const struct zr_verify_unit *units)
{
    double flop = 0;
    for (int32_t u = 0; u < scale_n_units(j->model); u++)
        flop += units[u].forward_flop + units[u].backward_flop + units[u].again_forward_flop +
                units[u].again_backward_flop;
    double s = flop * (double)j->accum * N_STEPS / (j->machine->flop_per_s * j->compute_fraction);
    if (s <= most_s)
        return 0;
    return zr_fail(ZR_ERR_ARG,
                   "%d steps take %.3g s of compute, more than %g s: --batch or --context is too large, or "
                   "--compute too small",
                   N_STEPS, s, most_s);
}

static struct zr_verify_case case_of(const struct scale_job *j)
{
    return (struct zr_verify_case){.seed = 1,
                                   .stage = j->stage,
                                   .world = (int)j->world,
                                   .n_units = scale_n_units(j->model),
                                   .prefetch = j->prefetch,
                                   .accum = (int)j->accum,
                                   .n_steps = N_STEPS,
                                   .pattern = j->model->llama ? ZR_USE_PLAIN : ZR_USE_TIED,
                                   .bf16 = j->bf16,
                                   .wire_bf16 = j->wire_bf16,
                                   .declared = true,
                                   .wait_result = true,
                                   .hybrid = j->hybrid,
                                   .group = j->hybrid ? (int)j->shard_group : 0,
                                   .poison = -1,
                                   .dead = -1};
}

/* near_bytes_per_s 0: links that take no time. Launches are not counted: they run ahead of a GPU. */
static struct zr_verify_speed speed_of(const struct scale_job *j, const struct zr_verify_unit *units,
                                       bool free_links)
{
    const struct scale_machine *m = j->machine;
    return (struct zr_verify_speed){.flops_per_s = m->flop_per_s * j->compute_fraction,
                                    .memory_bytes_per_s = m->memory_bytes_per_s,
                                    .near_bytes_per_s =
                                        free_links ? 0 : m->near_bytes_per_s * j->link_fraction,
                                    .far_bytes_per_s = m->far_bytes_per_s * j->link_fraction,
                                    .near_ns = m->near_ns,
                                    .far_ns = m->far_ns,
                                    .ranks_per_node = m->per_host,
                                    .rings = true,
                                    .units = units,
                                    .budget_bytes = j->budget_bytes};
}

static int simulate(const struct scale_job *j, bool free_links, struct zr_verify_time *t)
{
    struct zr_verify_unit *units = units_of(j);
    struct zr_verify_case c = case_of(j);
    struct zr_verify_result r = {0};
    if (!units)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d units", scale_n_units(j->model));
    struct zr_verify_speed s = speed_of(j, units, free_links);
    int err = check_time(j, units);
    if (!err)
        err = zr_verify_scale(&c, &s, t, &r);
    free(units);
    if (!err && r.n_reports)
        err = zr_fail(ZR_ERR_FAILED, "%s", r.text);
    return err ? err : r.refused; /* with the plan's words */
}

int scale_step(const struct scale_job *job, double *step_s)
{
    struct zr_verify_time t;
    int err = simulate(job, false, &t);
    *step_s = err ? 0 : (double)t.step_ns / 1e9;
    return err;
}

int scale_run(const struct scale_job *job, struct scale_result *out)
{
    struct zr_verify_time t, unhindered;
    int err = simulate(job, false, &t);
    if (!err)
        err = simulate(job, true, &unhindered);
    if (err)
        return err;
    double tokens = (double)(job->batch * job->context * job->accum), step_s = (double)t.step_ns / 1e9;
    *out = (struct scale_result){.step_s = step_s,
                                 .tokens_per_s_per_gpu = tokens / step_s,
                                 .exposed_s = (double)(t.step_ns - unhindered.step_ns) / 1e9,
                                 .mfu = scale_flop_per_token(job->model, job->context) * tokens / step_s /
                                        job->machine->flop_per_s,
                                 .memory_bytes = t.peak_bytes,
                                 .received_bytes = t.step_wire_bytes,
                                 .outer_bytes = t.step_outer_bytes,
                                 .n_simulated = t.n_simulated};
    return 0;
}
