/* SPDX-License-Identifier: Apache-2.0 */
/* run.c: a job on the virtual clock; see scale.h. */
#include "bench/scale/scale.h"

#include "kernels/device.h"
#include "shard/verify/verify.h"

#include <stdlib.h>
#include <string.h>

/* Steps that are simulated: the last is measured, when every one begins as the one before did. */
enum { N_STEPS = 3 };

/* Of compute in all of them: the clock counts nanoseconds in 63 bits, and links need some of them, too. */
static const double most_s = 1e9;

static int32_t n_units(const struct scale_part *p)
{
    int32_t n = 0;
    for (int32_t k = 0; k < p->n_own; k++)
        n += p->own[k].n;
    return n;
}

/* Both uses of a tied embedding are here. */
static bool has_both_ends(const struct scale_job *j, const struct scale_part *p)
{
    return n_units(p) > j->model->layers;
}

/* As many operations as a collective over tp takes time, which compute waits for. */
static double waited_flop(const struct scale_job *j, const struct scale_part *p, int n)
{
    if (j->tp <= 1 || p->free_links)
        return 0;
    return n * scale_all_reduce_s(j, scale_move_bytes(j)) * j->machine->flop_per_s * j->compute_fraction;
}

/* A sum behind each of a layer's two pairs of products, forward and before them backward; one behind the
 * embedding, one before the head. */
static void add_waits(const struct scale_job *j, const struct scale_part *p, int32_t unit,
                      struct zr_verify_unit *u)
{
    bool layer = unit > 0 && unit <= j->model->layers, tied = scale_n_units(j->model) == j->model->layers + 1;
    u->forward_flop += waited_flop(j, p, layer ? 2 : unit == 0);
    u->backward_flop += waited_flop(j, p, layer ? j->recompute ? 4 : 2 : unit > 0);
    u->again_backward_flop += waited_flop(j, p, unit == 0 && tied && has_both_ends(j, p));
}

/* The last stage of a tied model: its norm, and the products of the head, whose matrix is a copy. */
static struct scale_unit tied_head(const struct scale_job *j, int64_t tp)
{
    return (struct scale_unit){.n_params = scale_n_last_norm(j->model),
                               .flop_per_token =
                                   scale_part_of(j->model, j->context, 0, tp).again_flop_per_token};
}

/* Unit u of the model; head: in its place the tied head. */
static struct zr_verify_unit unit_of(const struct scale_job *j, const struct scale_part *p, int32_t u,
                                     bool head)
{
    double tokens = (double)(j->batch * j->context), back = j->recompute ? 3 : 2;
    int64_t tp = j->tp > 1 ? j->tp : 1;
    struct scale_unit unit = head ? tied_head(j, tp) : scale_part_of(j->model, j->context, u, tp);
    bool twice = has_both_ends(j, p);
    /* The head is not computed again: its result is the loss. */
    struct zr_verify_unit out = {.elems = unit.n_params,
                                 .forward_flop = unit.flop_per_token * tokens,
                                 .backward_flop =
                                     unit.flop_per_token * tokens * (u <= j->model->layers ? back : 2),
                                 .again_forward_flop = twice ? unit.again_flop_per_token * tokens : 0,
                                 .again_backward_flop = twice ? unit.again_flop_per_token * tokens * 2 : 0,
                                 /* as the units of tied tensors are, of the owner and of its copy */
                                 .resident = u == 0 ? p->tied_embedding : head};
    add_waits(j, p, u, &out);
    return out;
}

static struct zr_verify_unit *units_of(const struct scale_job *j, const struct scale_part *p)
{
    int32_t n = n_units(p), at = 0;
    struct zr_verify_unit *units = calloc((size_t)n, sizeof *units);
    for (int32_t k = 0; units && k < p->n_own; k++) {
        for (int32_t i = 0; i < p->own[k].n; i++, at++)
            units[at] = unit_of(j, p, p->own[k].first + i, p->tied_head && at == n - 1);
    }
    return units;
}

static double flop_of(const struct zr_verify_unit *u)
{
    return u->forward_flop + u->backward_flop + u->again_forward_flop + u->again_backward_flop;
}

static void take_shares(const struct scale_part *p, const struct zr_verify_unit *units, double *share)
{
    double all = 0;
    for (int32_t k = 0, at = 0; k < p->n_own; k++) {
        share[k] = 0;
        for (int32_t i = 0; i < p->own[k].n; i++)
            share[k] += flop_of(&units[at++]);
        all += share[k];
    }
    for (int32_t k = 0; k < p->n_own; k++)
        share[k] /= all;
}

static int check_time(const struct scale_job *j, const struct scale_part *p,
                      const struct zr_verify_unit *units)
{
    double flop = 0;
    for (int32_t u = 0; u < n_units(p); u++)
        flop += flop_of(&units[u]);
    double s = flop * (double)p->accum * N_STEPS / (j->machine->flop_per_s * j->compute_fraction);
    if (s <= most_s)
        return 0;
    return zr_fail(ZR_ERR_ARG,
                   "%d steps take %.3g s of compute, more than %g s: --batch or --context is too large, or "
                   "--compute too small",
                   N_STEPS, s, most_s);
}

static struct zr_verify_case case_of(const struct scale_job *j, const struct scale_part *p)
{
    bool plain = j->model->llama || !has_both_ends(j, p) || p->tied_head;
    return (struct zr_verify_case){.seed = 1,
                                   .stage = j->stage,
                                   .world = (int)p->dp,
                                   .n_units = n_units(p),
                                   .prefetch = j->prefetch,
                                   .accum = (int)p->accum,
                                   .n_steps = N_STEPS,
                                   .pattern = plain ? ZR_USE_PLAIN : ZR_USE_TIED,
                                   .bf16 = j->bf16,
                                   .wire_bf16 = j->wire_bf16,
                                   .declared = true,
                                   .wait_result = true,
                                   .hybrid = j->hybrid,
                                   .group = j->hybrid ? (int)j->dp_shard : 0,
                                   .poison = -1,
                                   .dead = -1};
}

/* near_bytes_per_s 0: links that take no time. Launches are not counted: they run ahead of a GPU. */
static struct zr_verify_speed speed_of(const struct scale_job *j, const struct zr_verify_unit *units,
                                       bool free_links)
{
    const struct scale_machine *m = j->machine;
    int64_t tp = j->tp > 1 ? j->tp : 1; /* ranks of one part are so far apart */
    return (struct zr_verify_speed){.flops_per_s = m->flop_per_s * j->compute_fraction,
                                    .memory_bytes_per_s = m->memory_bytes_per_s,
                                    .near_bytes_per_s =
                                        free_links ? 0 : m->near_bytes_per_s * j->link_fraction,
                                    .far_bytes_per_s = m->far_bytes_per_s * j->link_fraction,
                                    .near_ns = m->near_ns,
                                    .far_ns = m->far_ns,
                                    .ranks_per_node = tp < m->per_host ? m->per_host / (int)tp : 1,
                                    .rings = true,
                                    .units = units,
                                    .budget_bytes = j->budget_bytes};
}

/* share: as of struct scale_part_time; NULL: nobody asks. */
static int simulate(const struct scale_job *j, const struct scale_part *p, struct zr_verify_time *t,
                    double *share)
{
    struct zr_verify_unit *units = units_of(j, p);
    struct zr_verify_case c = case_of(j, p);
    struct zr_verify_result r = {0};
    if (!units)
        return zr_fail(ZR_ERR_NOMEM, "no memory for %d units", n_units(p));
    struct zr_verify_speed s = speed_of(j, units, p->free_links);
    int err = check_time(j, p, units);
    if (!err)
        err = zr_verify_scale(&c, &s, t, &r);
    if (share)
        take_shares(p, units, share);
    free(units);
    if (!err && r.n_reports)
        err = zr_fail(ZR_ERR_FAILED, "%s", r.text);
    return err ? err : r.refused; /* with the plan's words */
}

static struct scale_part whole_of(const struct scale_job *j, bool free_links)
{
    return (struct scale_part){.own = {{0, scale_n_units(j->model)}},
                               .n_own = 1,
                               .dp = j->world,
                               .accum = j->accum,
                               .free_links = free_links};
}

int scale_part_run(const struct scale_job *job, const struct scale_part *part, struct scale_part_time *out)
{
    struct zr_verify_time t = {0};
    double share[PIPE_MOST_OWN];
    int err = simulate(job, part, &t, share);
    *out = (struct scale_part_time){.step_s = (double)t.step_ns / 1e9,
                                    .memory_bytes = t.peak_bytes,
                                    .wire_bytes = t.step_wire_bytes,
                                    .outer_bytes = t.step_outer_bytes,
                                    .n_simulated = t.n_simulated};
    if (!err)
        memcpy(out->share, share, (size_t)part->n_own * sizeof *share);
    return err;
}

int scale_step(const struct scale_job *job, double *step_s)
{
    struct scale_part whole = whole_of(job, false);
    struct zr_verify_time t;
    int err = simulate(job, &whole, &t, NULL);
    *step_s = err ? 0 : (double)t.step_ns / 1e9;
    return err;
}

int scale_run(const struct scale_job *job, struct scale_result *out)
{
    struct scale_part whole = whole_of(job, false), free_links = whole_of(job, true);
    struct zr_verify_time t, unhindered;
    if (scale_has_mesh(job))
        return scale_mesh_run(job, out);
    int err = simulate(job, &whole, &t, NULL);
    if (!err)
        err = simulate(job, &free_links, &unhindered, NULL);
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
