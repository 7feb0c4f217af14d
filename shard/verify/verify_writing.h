/* SPDX-License-Identifier: Apache-2.0 */
/* verify_writing.h: a script while it is written, by verify_script.c and verify_actions.c. */
#ifndef ZR_SHARD_VERIFY_WRITING_H
#define ZR_SHARD_VERIFY_WRITING_H

#include "shard/verify/verify_world.h"

struct zr_writing {
    const struct zr_verify_case *c;
    const struct zr_verify_stage *stage;
    struct zr_script *s;
    int32_t n_units;
    /* (n_units) in order of forward; room for those of a micro-batch */
    int32_t *all, *list;
    /* (n_units) that the model does not bracket */
    bool *no_forward, *no_backward;
    /* ZR_USE_TWICE: the unit with two backward brackets in every micro-batch */
    int32_t twice;
    /* (n_units) which have two in the order that is declared, of repeats; it is being written */
    bool *repeated, declaring;
    /* brackets do not tell where a micro-batch ends */
    bool needs_micro;
    /* of calls that all stages make together, and of all else; with one stage they are one */
    uint64_t *common, *random;
    int32_t step;
    /* the action is a part of a backward */
    bool apart, inputs;
    /* what is written is of no step: its contributions must be nowhere */
    bool dropped;
    /* evaluations, and steps, dropped ones too, so far */
    int32_t n_passes;
};

void zr_write(struct zr_script *s, struct zr_script_op op);
/* A call that is of no unit. */
void zr_write_call(struct zr_writing *w, enum zr_script_op_kind kind);
/* list: the units used, in order of forward. */
void zr_write_forward(struct zr_writing *w, const int32_t *list, int32_t n);
void zr_write_backward(struct zr_writing *w, const int32_t *list, int32_t n);
/* where: as in zr_verify_case.zeroes. */
void zr_write_zero(struct zr_writing *w, int where, int micro);

/* verify_actions.c: a stage's row, and what its actions are made of; what the parts move around a use. */
void zr_write_actions(struct zr_writing *w, const struct zr_walk_row *row, bool evaluates);
void zr_write_parts(struct zr_writing *w, bool backward);

#endif
