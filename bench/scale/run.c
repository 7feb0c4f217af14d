/* SPDX-License-Identifier: Apache-2.0 */
/* run.c: simulates a data-parallel job on the verifier's virtual clock (shard/verify/verify.h). */
#include "bench/scale/scale.h"

#include "kernels/device.h"
#include "shard/verify/verify.h"

#include <stdlib.h>

/* Number of simulated steps. The last one is measured, because it begins as every later step does. */
enum { N_STEPS = 3 };

/* Most seconds of compute in all steps. The clock counts nanoseconds in 63 bits, and links need some of
 * them. */
static const double most_s = 1e9;

static int32_t n_units(const struct scale_part *p)
{
    int32_t n = 0;
    for (int32_t k = 0; k < p->n_own; k++)
        n += p->own[k].n;
    return n;
}

/* Whether the embedding and the head are both here. */
static bool has_both_ends(const struct scale_job *j, const struct scale_part *p)
{
    return n_units(p) > j->model->layers;
}

/* Compute waits for collectives over tp. This is their time, expressed as operations. */
static double waited_flop(const struct scale_job *j, const struct scale_part *p, int n)
{
    if (j->tp <= 1 || p->free_links)
        return 0;
    return n * scale_all_reduce_s(j, scale_move_bytes(j)) * j->machine->flop_per_s * j->compute_fraction;
}

/* The same for n gathers of a layer's keys and values over cp, or reductions of their gradients. */
static double waited_for_rows(const struct scale_job *j, const struct scale_part *p, int n,
                              int64_t element_bytes)
{
    if (j->cp <= 1 || p->free_links)
        return 0;
    return n * scale_gather_s(j, element_bytes) * j->machine->flop_per_s * j->compute_fraction;
}

/* Adds the all-reduces over tp: two in a layer's forward pass and two in its backward pass, one after the
 * embedding and one before the head. Over cp a layer gathers keys and values in each pass, and reduces their
 * gradients in fp32. */
static void add_waits(const struct scale_job *j, const struct scale_part *p, int32_t unit,
                      struct zr_verify_unit *u)
{
    bool layer = unit > 0 && unit <= j->model->layers, tied = scale_n_units(j->model) == j->model->layers + 1;
    u->forward_flop += waited_flop(j, p, layer ? 2 : unit == 0);
    u->backward_flop += waited_flop(j, p, layer ? j->recompute ? 4 : 2 : unit > 0);
    u->forward_flop += waited_for_rows(j, p, layer, scale_element_bytes(j));
    u->backward_flop += waited_for_rows(j, p, layer * (j->recompute ? 2 : 1), scale_element_bytes(j)) +
                        waited_for_rows(j, p, layer, sizeof(float));
    u->again_backward_flop += waited_flop(j, p, unit == 0 && tied && has_both_ends(j, p));
}

/* In the last stage of a model with a tied head: the last norm, and the products with a copy of the
 * embedding. */
static struct scale_unit tied_head(const struct scale_job *j, int64_t tp)
{
    return (struct scale_unit){.n_params = scale_n_last_norm(j->model),
                               .flop_per_token =
                                   scale_part_of(j->model, j->context, 0, tp).head_flop_per_token};
}

/* Describes unit u of the model, or the tied head in its place. */
static struct zr_verify_unit unit_of(const struct scale_job *j, const struct scale_part *p, int32_t u,
                                     bool head)
{
    double tokens = (double)scale_own_tokens(j), back = j->recompute ? 3 : 2;
    int64_t tp = j->tp > 1 ? j->tp : 1;
    struct scale_unit unit = head ? tied_head(j, tp) : scale_part_of(j->model, j->context, u, tp);
    bool twice = has_both_ends(j, p);
    /* The head is never recomputed, because its result is the loss. */
    struct zr_verify_unit out = {.elems = unit.n_params,
                                 .forward_flop = unit.flop_per_token * tokens,
                                 .backward_flop =
                                     unit.flop_per_token * tokens * (u <= j->model->layers ? back : 2),
                                 .again_forward_flop = twice ? unit.head_flop_per_token * tokens : 0,
                                 .again_backward_flop = twice ? unit.head_flop_per_token * tokens * 2 : 0,
                                 /* units of tied tensors are resident, at the owner and at the copy */
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

/* Fills in each stage's share of the compute. */
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

/* Checks that the virtual clock can count the steps. */
static int check_time(const struct scale_job *j, const struct scale_part *p,
                      const struct zr_verify_unit *units)
{
    double flop = 0;
    for (int32_t u = 0; u < n_units(p); u++)
        flop += flop_of(&units[u]);
    double s = flop * (double)p->accum * N_STEPS / (j->machine->flop_per_s * j->compute_fraction);
    if (s <= most_s)
        return 0;
    return zr_fail(ZERO_ERR_ARG,
                   "%d steps take %.3g s of compute, more than %g s: --batch or --context is too large, or "
                   "--compute too small",
                   N_STEPS, s, most_s);
}

static struct zr_verify_case case_of(const struct scale_job *j, const struct scale_part *p)
{
    bool plain = j->model->llama || !has_both_ends(j, p) || p->tied_head;
    return (struct zr_verify_case){.seed = 1,
                                   .stage = (int)j->stage,
                                   .world = (int)p->dp,
                                   .n_units = n_units(p),
                                   .prefetch = (int)j->prefetch,
                                   .accum = (int)p->accum,
                                   .n_steps = N_STEPS,
                                   .pattern = plain ? ZR_USE_PLAIN : ZR_USE_TIED,
                                   .bf16 = j->dtype == ZERO_BF16,
                                   .wire_bf16 = j->wire_dtype == ZERO_BF16,
                                   .sums_bf16 = j->states.grad_sum == ZERO_BF16,
                                   .masters = j->states.masters,
                                   .moments = j->states.moments,
                                   .states = j->states.states,
                                   .declared = true,
                                   .wait_result = true,
                                   .hybrid = j->hybrid,
                                   .group = j->hybrid ? (int)j->dp_shard : 0,
                                   .poison = -1,
                                   .dead = -1};
}

/* With free links, near_bytes_per_s is 0 and communication takes no time. Launches are not counted,
 * because they run ahead of a GPU. */
static struct zr_verify_speed speed_of(const struct scale_job *j, const struct zr_verify_unit *units,
                                       bool free_links)
{
    const struct scale_machine *m = j->machine;
    int64_t tp = j->tp > 1 ? j->tp : 1; /* data-parallel ranks are tp ranks apart */
    return (struct zr_verify_speed){
        .flops_per_s = m->flop_per_s * j->compute_fraction,
        .memory_bytes_per_s = m->memory_bytes_per_s,
        .near_bytes_per_s = free_links ? 0 : m->near_bytes_per_s * j->link_fraction,
        .far_bytes_per_s = m->far_bytes_per_s * j->link_fraction,
        .states_bytes_per_s =
            j->states.states == ZERO_STATES_HOST ? m->host_bytes_per_s * j->link_fraction : 0,
        .near_ns = m->near_ns,
        .far_ns = m->far_ns,
        .ranks_per_node = tp < m->per_host ? m->per_host / (int)tp : 1,
        .rings = true,
        .units = units,
        .budget_bytes = j->budget_bytes};
}

int scale_part_run(const struct scale_job *job, const struct scale_part *part, struct scale_part_time *out)
{
    struct zr_verify_unit *units = units_of(job, part);
    struct zr_verify_case c = case_of(job, part);
    struct zr_verify_result r = {0};
    struct zr_verify_time t = {0};
    if (!units)
        return zr_fail(ZERO_ERR_NOMEM, "no memory for %d units", n_units(part));
    struct zr_verify_speed s = speed_of(job, units, part->free_links);
    int err = check_time(job, part, units);
    if (!err)
        err = zr_verify_scale(&c, &s, &t, &r);
    *out = (struct scale_part_time){.step_s = (double)t.step_ns / 1e9,
                                    .memory_bytes = t.peak_bytes - t.states_bytes,
                                    .host_bytes = t.states_bytes,
                                    .wire_bytes = t.step_wire_bytes,
                                    .outer_bytes = t.step_outer_bytes,
                                    .n_simulated = t.n_simulated};
    take_shares(part, units, out->share);
    free(units);
    if (!err && r.n_reports)
        err = zr_fail(ZERO_ERR_FAILED, "%s", r.text);
    return err ? err : r.refused; /* the plan has said why */
}
