/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h: how much memory each rank takes and where everything lies in it. The plan is made before anything
 * is allocated.
 *
 * A plan depends only on the layout, the options and the world. It is the same on every rank and never
 * changes. Its traffic figures come from running the schedule core over the declared order. So they are what
 * a steady step does, not an estimate. */
#ifndef ZR_SHARD_PLAN_H
#define ZR_SHARD_PLAN_H

#include "kernels/agreement.h"
#include "shard/core.h"
#include "shard/layout.h"
#include "shard/placement.h"

/* Memory categories, in the order of zero.h's ZERO_MEM_MAP. */
enum zr_mem {
    /* Parameters kept: shards, or whole resident units. */
    ZR_MEM_PARAM_SHARDS,
    /* Slots for gathered copies. */
    ZR_MEM_PARAM_SLOTS,
    /* Reduced gradients. */
    ZR_MEM_GRAD_SHARDS,
    /* Memory that backward writes to: slots, or whole gradients at stages 0 and 1. */
    ZR_MEM_GRAD_SLOTS,
    /* Further sums for deterministic accumulation, the reduce slot, and group slots. */
    ZR_MEM_GRAD_SUMS,
    /* One unit's reduced gradient, gathered for ranks that update all of it (full_grad_at). With HSDP a
     * rank gathers its inner slice. */
    ZR_MEM_GRAD_GATHERED,
    ZR_MEM_MASTER,
    ZR_MEM_MOMENTS,
    /* Two parts of the file of masters and states. */
    ZR_MEM_STATE_BUFFERS,
    ZR_MEM_SNAPSHOT,
    /* Memory that the communicators reserve. */
    ZR_MEM_COMM,
    /* Agreement, values on their way, rounding to pages. */
    ZR_MEM_EXCHANGE,
    ZR_MEM_COUNT
};
const char *zr_mem_name(enum zr_mem m);

#define ZR_EXCHANGE_BYTES     704  /* bytes of one rank's entry in an exchange */
#define ZR_CONTROL_BYTES      1024 /* step scalars, and at ZR_STRAY_AT a struct zr_exact_sum */
#define ZR_OUTCOME_BYTES      1024 /* their results for the host: struct zr_agreed, and the same sum */
#define ZR_STRAY_AT           256  /* offset of squares without brackets (check/lost_gradients.c) */
#define ZR_DIGEST_AT          832  /* offset of the digest of tensors, in ZR_CONTROL_BYTES (compare_tp.c) */
#define ZR_AXIS_ELEMS         (256 << 10) /* most elements of activations that go over an axis at a time */
#define ZR_AXIS_RANKS         64          /* most ranks along tp or cp: the arena has room for their slices */
#define ZR_AXIS_BYTES         (3192 << 10) /* bytes of the arena for them */
#define ZR_SMALL_VALUES_BYTES (64 << 10)   /* least bytes for values, if the model has as many */
#define ZR_VALUE_BYTES        (256 << 10)  /* most bytes for values, in zero_read and zero_write */
#define ZR_DISK_ALIGN         4096         /* parts of the file of states begin and end at its multiples */

_Static_assert(sizeof(struct zr_agreed) <= ZR_STRAY_AT &&
                   ZR_STRAY_AT + sizeof(struct zr_exact_sum) <= ZR_OUTCOME_BYTES,
               "what a step found out must fit");
_Static_assert(ZR_STRAY_AT + sizeof(struct zr_exact_sum) <= ZR_DIGEST_AT &&
                   ZR_DIGEST_AT + sizeof(uint64_t) <= ZR_CONTROL_BYTES,
               "they follow each other");

/* Sum of squares and digest of this rank's shard of a tensor's reduced gradient, which tp ranks compare. */
struct zr_shard_digest {
    struct zr_exact_sum squares;
    uint64_t digest;
};

struct zr_traffic {
    /* Gathers and reductions of units. */
    int64_t n_gather, n_reduce;
    /* Bytes taken from other ranks. */
    int64_t wire_bytes;
    /* The bytes among them for the step's agreement. */
    int64_t agreement_bytes;
    /* Between groups: reductions and gathers of units, and the part of wire_bytes from other groups. If there
     * are groups, that includes the step's agreement. */
    int64_t n_outer_reduce, n_outer_gather, outer_bytes;
};

struct zr_slot_region {
    int64_t at, bytes;
};

/* The reduction over one axis. */
struct zr_hop {
    /* Ranks. 1: there is no reduction. */
    int32_t size;
    /* The optimizer needs whole sums, which are gathered right after the reduction or for UPDATE. */
    bool sums_whole;
};

struct zr_plan {
    /* Borrowed. */
    const struct zr_layout *layout;

    /* Data-parallel ranks; ranks that hold one copy of the model together; tensor-parallel ranks of a
     * pipeline stage. */
    int32_t world, model_ranks, tp;
    struct zr_placement placement;
    struct zr_hop hop[ZR_AXES];
    /* As in the options. */
    int64_t gather_packs_up_to, reduce_packs_up_to;
    /* Every contribution is reduced between groups by itself, so that the sum over ranks and micro-batches is
     * one fixed tree, and a bf16 sum is rounded only when it is complete over ranks. false: once a step. */
    bool outer_each;

    /* Offsets in the gather arena. */
    /* (n_units) The full unit if resident, else this rank's shard of it. */
    int64_t *param_at;
    /* (n_units) The unit is resident. */
    bool *resident;

    int64_t in_place_param_at;
    int32_t n_param_slots;
    struct zr_slot_region *param_slots;
    /* Bytes of the arena. The last opt->gather_scratch_bytes are the communicator's. */
    int64_t gather_bytes;

    /* Offsets in the reduce arena. */
    /* (n_units) Gradients that have memory outside the slots (zr_plan_grad_home). */
    int64_t *grad_at;

    int64_t in_place_grad_at;
    int32_t n_grad_slots;
    struct zr_slot_region *grad_slots;
    /* The sums of a step's gradients. They lie in the gradients themselves if these have the sums' dtype, one
     * rank keeps all of them, and a step has one contribution. */
    /* (n_units) The unit's sums lie in its gradients. */
    bool *sum_in_place;
    /* (n_flats) Byte offset in a sums array. -1: the sums lie in the gradients, or the flat is frozen. */
    int64_t *sum_at;
    /* Bytes of a sums array. */
    int64_t sum_bytes;

    int32_t n_sums;
    /* n_sums arrays of sum_bytes, end to end. With groups and without outer_each they are of inner
     * slices, which are reduced between groups in place. Otherwise they are of fine slices. */
    int64_t sums_at;
    /* The reduce slot. It holds the fp32 sums of one unit over ranks until they are rounded to bf16 sums. */
    int64_t reduce_slot_at, reduce_slot_bytes;
    /* (n_flats) The flat's byte offset in the reduce slot. -1: its gradient is reduced straight to its
     * sum. */
    int64_t *in_reduce_slot;
    /* With outer_each: slots for the sum of one contribution over a group, before it is reduced between
     * groups. */
    int32_t n_group_slots;
    int64_t group_slots_at, group_slot_bytes;
    /* (n_flats) The flat's byte offset in a group slot. -1: it has none. */
    int64_t *in_group_slot;
    int64_t exchange_at, control_at;
    /* Places of struct zr_agreement, next to the exchanges, and of struct zr_own_squares, for this rank's
     * gradients. */
    int64_t agreement_at, norm_at;
    /* With hop.sums_whole: place of one unit's gathered gradient, if it cannot be gathered in place. */
    int64_t full_grad_at, full_grad_bytes;

    int64_t values_at, values_bytes;
    /* Bytes of a separate arena for exchange_at, agreement_at and values_at, if there are groups or pipeline
     * stages. The last opt->control_scratch_bytes are the communicator's. 0: the three are in the reduce
     * arena. */
    int64_t control_bytes;
    /* Bytes of the arena. The last opt->reduce_scratch_bytes are the communicator's. */
    int64_t reduce_bytes;

    /* Bytes of the arenas of activations over tp and over cp (mesh_axis.c) and between pipeline stages
     * (pipe.c), and of tied tensors (tied.c). 0: there is no such arena. The last opt->tp_scratch_bytes and
     * opt->cp_scratch_bytes of the first two are the communicators'. */
    int64_t tp_bytes, cp_bytes, pipe_bytes, tied_bytes;

    /* Optimizer state, outside the arenas. */
    /* As in the options. */
    enum zero_states states;
    /* (n_flats) Offset of the flat's region in the master array. -1: it has none (zr_plan_master_size). */
    int64_t *master_at;
    /* Bytes of the master array. */
    int64_t master_bytes;
    /* Most states of any flat. */
    int32_t n_states;
    /* Bytes of each state's array. */
    int64_t state_bytes[ZR_MAX_STATES];

    /* (n_states, n_flats) Offset of the flat's region in the state's array. A region of Q8 has the codes of
     * all elements, and then a scale for each block of ZR_Q8_BLOCK. -1: the flat does not have this state. */
    int64_t *state_at;

    /* With ZERO_STATES_FILE masters and states are in a file of file_bytes bytes, and the arrays above are
     * empty. The elements that a rank keeps of a flat are cut into parts of part_elems elements; the last may
     * be shorter. The largest part has part_bytes bytes. */
    int64_t file_bytes, part_elems, part_bytes;
    /* (n_flats) Offset of the flat's first part in the file. */
    int64_t *file_at;

    /* Host memory that the device can reach. */
    /* Bytes of a snapshot. 0: none is kept. */
    int64_t snapshot_bytes;
    /* Offset in it of the buffers' copies, which are in the table's order. */
    int64_t snapshot_buffers_at;
    /* Bytes for the outcome of a step, for each rank's entry in an exchange, and with buffers for
     * values_bytes of their values. With tp, a struct zr_shard_digest for each tensor follows at
     * shard_digests_at. */
    int64_t words_bytes, shard_digests_at;
    /* Bytes of both, of state buffers, and of masters and states in host memory; part of total_bytes. */
    int64_t host_bytes;

    int64_t bytes[ZR_MEM_COUNT], total_bytes;
    /* Traffic of one steady step on rank 0. If slices differ in size (zr_layout.has_places): on the rank that
     * takes most. */
    struct zr_traffic traffic;

    uint64_t hash;

    /* For the schedule core. Its arrays belong to the plan. */
    struct zr_core_spec spec;
};

/* Makes a plan. layout must outlive it. Returns ZERO_ERR_BUDGET, naming the field, the unit and the bytes;
 * ZERO_ERR_ARG for an order with units that do not exist; or ZERO_ERR_NOMEM. */
int zr_plan_make(const struct zr_layout *layout, const struct zr_options *opt, struct zr_plan **out);
/* p may be NULL. */
void zr_plan_free(struct zr_plan *p);

/* Makes the order of a program that declares none: each unit forward, then each backward in reverse, with as
 * many backward brackets in a row as its tensors say. The caller frees *out. Returns ZERO_ERR_ARG for too
 * many calls, or ZERO_ERR_NOMEM. */
int zr_plan_assume_order(const struct zr_layout *l, struct zero_call **out, int32_t *n);

/* Byte offsets in the gather arena (parameters) and the reduce arena (gradients). The functions with full
 * return that of the flat's whole region, in a slot or (-1) in resident memory. The one with own returns that
 * of a rank's inner slice. */
int64_t zr_plan_param_full(const struct zr_plan *p, const struct zr_flat *f, int32_t slot);
int64_t zr_plan_param_own(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at);
int64_t zr_plan_grad_full(const struct zr_plan *p, const struct zr_flat *f, int32_t slot);
/* Whether the unit's gradient has memory outside the slots. */
bool zr_plan_grad_home(const struct zr_plan *p, int32_t unit);
/* Offset of a rank's fine slice in sums[k], in a sums array or in the gradients. */
int64_t zr_plan_sum(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at, int k);
/* Offset to which the last reduction takes a rank's fine slice: the reduce slot, or sums[k]. */
int64_t zr_plan_reduced(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at, int k);
/* With groups only: offset of the sum of a rank's inner slice over its group, in a group slot, or (-1) in
 * sums[0]. */
int64_t zr_plan_inner_sum(const struct zr_plan *p, const struct zr_flat *f, struct zr_where at,
                          int32_t group_slot);
/* Returns the most elements of the flat whose optimizer state a rank keeps. */
int64_t zr_plan_kept_elems(const struct zr_plan *p, const struct zr_flat *f);
/* Return the bytes of an element in the flat's region of the master array, and in those of its states. The
 * region is of fp32 masters, or of the bits that the weights lack. 0: there is no region, because the weights
 * are the masters, or the flat is frozen. */
int64_t zr_plan_master_size(const struct zr_flat *f);
int64_t zr_plan_state_size(const struct zr_flat *f);
/* Returns the bytes of a state of n elements. 8-bit codes have their scales behind them. */
int64_t zr_plan_state_bytes(const struct zr_flat *f, int64_t n);
/* Returns the offset in a state's array of the flat's scales. It has them if its states are Q8. */
int64_t zr_plan_scales_at(const struct zr_plan *p, const struct zr_flat *f, int state);

/* A part of the file of states: masters and states of elements [first, first + n) of a flat. It takes `bytes`
 * bytes of the file, from `at` on. Masters and each state begin at the offsets master_at and state_at in the
 * part; -1 means that the part has none. */
struct zr_state_part {
    const struct zr_flat *flat;
    int64_t first, n, at, bytes;
    int64_t master_at, state_at[ZR_MAX_STATES];
};
/* plan_parts.c. Places all parts in the file. part_elems 0 chooses the usual size. */
void zr_plan_place_parts(struct zr_plan *p, int64_t part_elems);
/* Finds part k of the elements that a rank keeps of a flat. Returns false if there is no such part. */
bool zr_plan_part(const struct zr_plan *p, const struct zr_flat *f, struct zr_span kept, int64_t k,
                  struct zr_state_part *part);

/* Return the bytes that a rank takes from others in its group to gather the unit, to reduce it, and to gather
 * its gradient if sums are whole. */
int64_t zr_plan_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);
int64_t zr_plan_reduce_wire(const struct zr_plan *p, int32_t unit, struct zr_where at, enum zero_dtype wire);
int64_t zr_plan_grad_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);
/* Return the bytes that it takes from other groups: for one reduction, to gather its sum, and to gather
 * parameters. */
int64_t zr_plan_outer_reduce_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);
int64_t zr_plan_outer_sum_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);
int64_t zr_plan_outer_gather_wire(const struct zr_plan *p, int32_t unit, struct zr_where at);

/* Whether a checkpoint holds this value of the flat (a kind as in zr_engine_read, or ZR_SCALE(i)). f32
 * weights are their own masters and are held once. */
bool zr_plan_saves(const struct zr_flat *f, int kind);
/* Returns the bytes of such a value as a rank keeps it. */
int64_t zr_plan_saved_size(const struct zr_flat *f, int kind);
/* Returns the bytes that a snapshot reserves for the values of elems elements. */
int64_t zr_plan_snapshot_bytes(const struct zr_flat *f, int kind, int64_t elems);

/* Whether the flat takes part in gathers of its unit. A frozen flat of a resident unit does not, because it
 * never changes. */
bool zr_plan_gathers(const struct zr_plan *p, const struct zr_flat *f);

/* Writes the plan as a table for messages, one line per category, cut off at n bytes. */
void zr_plan_table(const struct zr_plan *p, char *text, size_t n);

#endif
