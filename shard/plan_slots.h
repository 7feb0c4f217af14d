/* SPDX-License-Identifier: Apache-2.0 */
/* plan_slots.h: the steps of making a plan that plan.c leaves to other files: choosing slots for gathered
 * parameters and for gradients, rehearsing a step, and counting its traffic. */
#ifndef ZR_SHARD_PLAN_SLOTS_H
#define ZR_SHARD_PLAN_SLOTS_H

#include "shard/plan.h"

/* Fills p->param_slots and p->grad_slots (their sizes, not their offsets) and their part of p->spec. Makes
 * units resident if the budget allows. p->spec must hold units and order. */
int zr_plan_choose_slots(struct zr_plan *p, const struct zr_options *opt);

/* How often a step does each operation on each unit, (n_units) each. The last two may be NULL. */
struct zr_core_work {
    int64_t *gathers, *reduces, *outer_reduces, *outer_gathers;
};

/* plan_rehearse.c: runs a core of spec over its order, step by step, until steps repeat (at most 8). Writes
 * what such a step does to work. Micro-batches that repeat are counted without running them. */
int zr_core_rehearse(const struct zr_core_spec *spec, const struct zr_core_work *work);

/* plan_wire.c: sets p->traffic from a rehearsal. */
int zr_plan_measure(struct zr_plan *p, const struct zr_options *opt);

#endif
