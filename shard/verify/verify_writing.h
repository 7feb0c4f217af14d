/* SPDX-License-Identifier: Apache-2.0 */
/* verify_writing.h: the state of a script that verify_script.c and verify_actions.c are writing. */
#ifndef ZR_SHARD_VERIFY_WRITING_H
#define ZR_SHARD_VERIFY_WRITING_H

#include "shard/verify/verify_world.h"

struct zr_writing {
    const struct zr_verify_case *c;
    const struct zr_verify_stage *stage;
    struct zr_script *s;
    int32_t n_units;
    /* (n_units) All units in forward order; the units of one micro-batch. */
    int32_t *all, *list;
    /* (n_units) Units that the model does not bracket. */
    bool *no_forward, *no_backward;
    /* ZR_USE_TWICE: the unit with two backward brackets in every micro-batch. */
    int32_t twice;
    /* (n_units) Units that the declared order uses twice in backward (see zr_verify_case.repeats); the
     * declared order is being written. */
    bool *repeated, declaring;
    /* Brackets do not show where a micro-batch ends, so the script calls zero_micro. */
    bool needs_micro;
    /* Random states: for calls that all pipeline stages make together, and for everything else. They are one
     * state if there is one pipeline stage. */
    uint64_t *common, *random;
    int32_t step;
    /* The phase of backward brackets: ZERO_BACKWARD, or that of the current action. */
    enum zero_phase phase;
    /* The calls belong to a step that is dropped, so their contributions must not arrive anywhere. */
    bool dropped;
    /* Evaluations and steps so far, including dropped steps. */
    int32_t n_passes;
    /* A shift over tp, over cp is open. */
    bool is_shifting[2];
};

void zr_write(struct zr_script *s, struct zr_script_op op);
/* Writes a call that concerns no unit. */
void zr_write_call(struct zr_writing *w, enum zr_script_op_kind kind);
/* list: the units used, in forward order. */
void zr_write_forward(struct zr_writing *w, const int32_t *list, int32_t n);
void zr_write_backward(struct zr_writing *w, const int32_t *list, int32_t n);
/* where: a bit of zr_verify_case.zeroes. */
void zr_write_zero(struct zr_writing *w, int where, int micro);

/* verify_actions.c: writes the calls of a row of the schedule; the collectives and shifts over tp and cp
 * after a use; the ends of some of the shifts that are open. */
void zr_write_actions(struct zr_writing *w, const struct zr_walk_row *row, bool evaluates);
void zr_write_moves(struct zr_writing *w);
void zr_write_shift_ends(struct zr_writing *w);

#endif
