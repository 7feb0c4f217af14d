/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h: how much memory each rank takes and where everything in it lies; made before anything is allocated.
 *
 * A plan follows from the layout, the options and the world alone, is the same on every rank and never
 * changes. Its traffic figures come from running the schedule core over the declared order, so they are what
 * a steady step does, not an estimate. */
#ifndef ZR_SHARD_PLAN_H
#define ZR_SHARD_PLAN_H

#include "kernels/agreement.h"
#include "shard/core.h"
#include "shard/layout.h"
#include "shard/placement.h"

/* Memory categories, in the order of zero.h's ZERO_MEM_MAP. */
enum zr_mem {
    /* parameters kept: shards, or whole where a unit is resident */
    ZR_MEM_PARAM_SHARDS,
    /* places for gathered copies */
    ZR_MEM_PARAM_SLOTS,
    /* reduced gradients, fp32 */
    ZR_MEM_GRAD_SHARDS,
    /* where backward writes: slots, or whole where the model holds them */
    ZR_MEM_GRAD_SLOTS,
    /* further sums, which deterministic accumulation takes */
    ZR_MEM_GRAD_SUMS,
    ZR_MEM_GRAD_GATHERED,
    ZR_MEM_MASTER,
    ZR_MEM_MOMENTS,
    ZR_MEM_SNAPSHOT,
    /* what the communicators reserve */
    ZR_MEM_COMM,
    /* agreement, values on their way, rounding to pages */
    ZR_MEM_EXCHANGE,
    ZR_MEM_COUNT
};
const char *zr_mem_name(enum zr_mem m);

#define ZR_EXCHANGE_BYTES     704  /* of one rank's part in an exchange */
#define ZR_CONTROL_BYTES      1024 /* step scalars, and at ZR_STRAY_AT a struct zr_exact_sum */
#define ZR_OUTCOME_BYTES      1024 /* what the host reads of a step: struct zr_agreed, and the same */
#define ZR_STRAY_AT           256  /* squares of gradients that had no bracket (check/missing_brackets.c) */
#define ZR_MODEL_ELEMS        (256 << 10)  /* of activations that go between parts of the model at a time */
#define ZR_MODEL_BYTES        (3192 << 10) /* their arena */
#define ZR_SMALL_VALUES_BYTES (64 << 10)   /* at least, where the model has as much */
#define ZR_VALUE_BYTES        (256 << 10)  /* at most: values on their way in zero_read, zero_write */

_Static_assert(sizeof(struct zr_agreed) <= ZR_STRAY_AT &&
                   ZR_STRAY_AT + sizeof(struct zr_exact_sum) <= ZR_OUTCOME_BYTES,
               "what a step found out must fit");

struct zr_traffic {
    /* units gathered and reduced */
    int64_t n_gather, n_reduce;
    /* taken from other ranks */
    int64_t wire_bytes;
    /* of them, for the agreement of a step */
    int64_t agreement_bytes;
    /* Between groups: units reduced and gathered there, and what of wire_bytes comes from other groups. Where
     * there are groups that is the step's agreement, too. */
    int64_t n_outer_reduce, n_outer_gather, outer_bytes;
};

struct zr_slot_place {
    int64_t at, bytes;
};

/* One reduction of an axis. */
struct zr_hop {
    /* 1: there is none */
    int32_t size;
    /* the optimizer wants all of it: gathered behind the reduction, or for UPDATE */
    bool sums_whole;
};

struct zr_plan {
    /* borrowed */
    const struct zr_layout *layout;

    /* ranks that have the same part of the same pipeline stage; ranks that have the model together, one for
     * each part of each stage; and parts of a stage */
    int32_t world, model_ranks, parts;
    struct zr_placement place;
    struct zr_hop hop[ZR_AXES];
    /* as in the options */
    int64_t gather_packs_up_to, reduce_packs_up_to;
    /* Between groups every contribution is reduced by itself, so that the sum over ranks and micro-batches is
     * one fixed tree; else once a step. */
    bool outer_each;

    /* Offsets in the gather arena. */
    /* (n_units) resident: the full unit; sharded: this rank's shard of it */
    int64_t *param_at;
    /* (n_units) */
    bool *resident;

    int64_t in_place_param_at;
    int32_t n_param_slots;
    struct zr_slot_place *param_slots;
    /* the last opt->gather_scratch_bytes of them are the communicator's */
    int64_t gather_bytes;

    /* Offsets in the reduce arena. */
    /* (n_units) of gradients with a place of their own: zr_plan_grad_home */
    int64_t *grad_at;

    int64_t in_place_grad_at;
    int32_t n_grad_slots;
    struct zr_slot_place *grad_slots;
    /* The sums of a step's gradients, fp32. Of some units they lie in the gradients themselves: where
     * one rank keeps all of them, if they are f32 and a step has one contribution to them. */
    /* (n_units) */
    bool *sum_in_place;
    /* (n_flats) of the others: element of a sums array; else -1 */
    int64_t *sum_at;
    /* of a sums array */
    int64_t sum_elems;

    int32_t n_sums;
    /* n_sums arrays of sum_elems floats, end to end. Without groups or outer_each of fine slices, else of
     * inner slices, which the reduction between groups then makes sums of the world in place */
    int64_t sums_at;
    /* outer_each: the sum of one contribution over a group, on its way to the sums. partial_at: (n_flats)
     * bytes in a partial slot, -1: frozen. */
    int32_t n_partial_slots;
    int64_t partial_slots_at, partial_slot_bytes;
    int64_t *partial_at;
    int64_t exchange_at, control_at;
    /* Of struct zr_agreement, where exchanges are; of struct zr_own_squares, of this rank's gradients. */
    int64_t agreement_at, norm_at;
    /* hop.sums_whole: one unit's gradient gathered, fp32, where it cannot be in place */
    int64_t full_grad_at, full_grad_bytes;

    int64_t values_at, values_bytes;
    /* of an arena for exchange_at, agreement_at and values_at, where there are groups, the last
     * opt->control_scratch_bytes the communicator's; 0: they are in this one */
    int64_t control_bytes;
    /* the last opt->reduce_scratch_bytes of them are the communicator's */
    int64_t reduce_bytes;

    /* Of the arena of activations between parts (tensor_parallel.c), and between pipeline stages
     * (pipe.c), and of that of tied tensors (tied.c); 0: there is one. */
    int64_t model_bytes, pipe_bytes, tied_bytes;

    /* Device memory of its own. */
    /* (n_flats) element in the master array, -1: the parameters are their own masters, or frozen */
    int64_t *master_at;
    /* fp32 */
    int64_t master_elems;
    /* the most that any flat has */
    int32_t n_states;
    /* fp32, of each state's array */
    int64_t state_elems[ZR_MAX_STATES];

    /* (n_states, n_flats) element in the state's array; -1: its kind keeps fewer, or it is frozen */
    int64_t *state_at;

    /* Memory of the host that the device reaches. */
    /* 0: none is kept */
    int64_t snapshot_bytes;
    /* in it, of the buffers' copies, in the table's order */
    int64_t snapshot_buffers_at;
    /* the outcome of a step, what each rank said in an exchange, and with buffers values_bytes of their
     * values */
    int64_t words_bytes;
    /* both; part of total_bytes */
    int64_t host_bytes;

    int64_t bytes[ZR_MEM_COUNT], total_bytes;
    /* of one steady step on rank 0; where slices differ in size (zr_layout.has_places), on the rank that
     * takes most */
    struct zr_traffic traffic;

    uint64_t hash;

    /* for the schedule core; its arrays belong to the plan */
    struct zr_core_spec spec;
};

/* layout must outlive the plan. Errors: ZR_ERR_BUDGET naming the field, the unit and the bytes; ZR_ERR_ARG
 * for an order with units that do not exist; ZR_ERR_NOMEM. */
int zr_plan_make(const struct zr_layout *layout, const struct zr_options *opt, struct zr_plan **out);
/* NULL is allowed. */
void zr_plan_free(struct zr_plan *p);

/* The calls of a micro-batch where the program declares none: each unit forward, then each backward in
 * reverse, with as many backward brackets in a row as its tensors say. The caller frees *out. ZR_ERR_ARG for
 * too many calls; ZR_ERR_NOMEM. */
int zr_plan_assume_order(const struct zr_layout *l, struct zr_call **out, int32_t *n);

/* Byte offsets in the gather arena (params) and the reduce arena (gradients): of a flat's full region, given
 * its slot or -1 for the resident place, and of a rank's inner slice. */
int64_t zr_plan_param_full(const struct zr_plan *p, const struct zr_flat *f, int32_t slot);
int64_t zr_plan_param_own(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at);
int64_t zr_plan_grad_full(const struct zr_plan *p, const struct zr_flat *f, int32_t slot);
/* The unit's gradient has a place of its own, and no slot. */
bool zr_plan_grad_home(const struct zr_plan *p, int32_t unit);
/* Of a rank's fine slice, in sums[k], wherever it lies. */
int64_t zr_plan_sum(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at, int k);
/* Of a rank's inner slice, where the reduction inside its group puts the sum: in a partial slot, or (-1)
 * where sums[0] is. With groups only. */
int64_t zr_plan_inner_sum(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at,
                          int32_t partial);
/* Elements of the flat whose optimizer state a rank keeps, at most. */
int64_t zr_plan_kept_elems(const struct zr_plan *p, const struct zr_flat *f);

/* Bytes that a rank takes from the others to gather the unit, to reduce it, and where sums are whole to
 * gather its gradient: inside its group. */
int64_t zr_plan_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);
int64_t zr_plan_reduce_wire(const struct zr_plan *p, int32_t unit, struct zr_where at, enum zr_dtype wire);
int64_t zr_plan_grad_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);
/* And from other groups: of one reduction, of gathering its sum, and of gathering its parameters. */
int64_t zr_plan_outer_reduce_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);
int64_t zr_plan_outer_sum_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);
int64_t zr_plan_outer_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);

/* A checkpoint holds this value of the flat (a kind as in zr_engine_read): f32 weights are their own masters
 * and are held once. */
bool zr_plan_saves(const struct zr_flat *f, int kind);
/* What the snapshot reserves for it: bytes, one rank's. */
int64_t zr_plan_snapshot_bytes(const struct zr_flat *f, int kind);

/* A flat takes part in gathers of its unit: not when it is frozen and resident, as it never changes. */
bool zr_plan_gathers(const struct zr_plan *p, const struct zr_flat *f);

/* The plan as a table, one line a category, for messages; cut at n. */
void zr_plan_table(const struct zr_plan *p, char *text, size_t n);

#endif
