/* SPDX-License-Identifier: Apache-2.0 */
/* plan_slots.h: how many slots, how large: for gathered parameters and for gradients handed out. */
#ifndef ZR_SHARD_PLAN_SLOTS_H
#define ZR_SHARD_PLAN_SLOTS_H

#include "shard/plan.h"

/* Fills p->param_slots, p->grad_slots (sizes, not places) and their part of p->spec, and makes units resident
 * where the budget allows. p->spec must hold units and order. */
int zr_plan_choose_slots(struct zr_plan *p, const struct zr_options *opt);

/* What a step does to each unit, (n_units) each; the last two may be NULL. */
struct zr_core_work {
    int64_t *gathers, *reduces, *outer_reduces, *outer_gathers;
};

/* plan_rehearse.c: runs a core of spec over its order, step by step, until steps are alike (8 at most); work
 * gets what such a step does. Of micro-batches only so many are run as differ. */
int zr_core_rehearse(const struct zr_core_spec *spec, const struct zr_core_work *work);

/* plan_wire.c: p->traffic, of a rehearsal. */
int zr_plan_measure(struct zr_plan *p, const struct zr_options *opt);

#endif
