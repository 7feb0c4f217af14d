/* SPDX-License-Identifier: Apache-2.0 */
/* mesh_axis.h: one axis of the mesh over which the program moves activations: tp or cp. */
#ifndef ZR_SHARD_ENGINE_MESH_AXIS_H
#define ZR_SHARD_ENGINE_MESH_AXIS_H

#include "shard/engine/internal.h"

struct zr_mesh_axis {
    /* ZR_ROLE_TP or ZR_ROLE_CP, whose communicator this is, and "tp" or "cp" for messages */
    enum zr_role role;
    const char *name;
    /* ranks along the axis, and this rank's number among them. size 1: there is no communicator */
    int32_t size, rank;
    /* the arena */
    char *base;
    /* number of the `out` that the last operation went through */
    int out;
    /* hash of all collectives over the axis so far, even those that move nothing */
    uint64_t calls;
    /* warned that the contributions to a sum were the same on all ranks; that two ranks gave the same rows;
     * and that ranks gave two arrays in different orders */
    bool said_sum, said_rows, said_order;
    /* src of the last gather or all-to-all */
    const char *last_src;
    /* stream of shifts, which the model does not wait for. NULL: the model's own */
    struct zr_stream *shift_stream;
    /* a shift has begun and has not been ended */
    bool is_shifting;
    /* compute -> shift stream: src and dst are ready. shift stream -> compute: the shift is done. NULL if
     * shift_stream is */
    struct zr_event *shift_ready, *shift_done;
};

/* A piece is cut into a slice for each rank. All slices have room for the same number of bytes; the last may
 * be partly or wholly empty. */
enum {
    ZR_AXIS_CUT_BYTES = 128,
    ZR_AXIS_IN_AT = 0,
    ZR_AXIS_IN_BYTES = ZR_AXIS_ELEMS * (int)sizeof(float),
    /* A slice has a multiple of ZR_AXIS_CUT_BYTES. So the slices of all ranks take at most size *
     * ZR_AXIS_CUT_BYTES more than their elements, which are ZR_AXIS_IN_BYTES of f32, or half of that of bf16.
     * For bf16, one slice is also stored as fp32, in ZR_AXIS_IN_BYTES / size + 2 * ZR_AXIS_CUT_BYTES. As size
     * is at least 2, all fit into ZR_AXIS_IN_BYTES + size * ZR_AXIS_CUT_BYTES * 2. */
    ZR_AXIS_OUT_BYTES = ZR_AXIS_IN_BYTES + ZR_AXIS_RANKS * ZR_AXIS_CUT_BYTES * 2,
    /* behind `in` and both `out`: memory for other files */
    ZR_AXIS_END = ZR_AXIS_IN_BYTES + 2 * ZR_AXIS_OUT_BYTES
};

/* Returns the axis. */
struct zr_mesh_axis *zr_axis_of(const struct zr_engine *e, enum zero_axis axis);
/* Returns the byte offset of `out` number 0 or 1. */
int64_t zr_axis_out_at(int out);
/* Sums the n elements in `in` over the axis, to `out` number `out`, in the same dtype. Each rank adds up its
 * slice in fp32. */
int zr_axis_sum_piece(struct zr_engine *e, struct zr_mesh_axis *a, int64_t n, enum zero_dtype dtype, int out,
                      const struct zr_tag *tag);
/* Gives the bytes of every rank of the axis to all, at most ZR_EXCHANGE_BYTES of each, and waits for them.
 * mine is in any memory. *all: those of rank 0, 1, ..., in e->words. The second takes them from this rank's
 * part of `in`. */
int zr_axis_exchange(struct zr_engine *e, struct zr_mesh_axis *a, const void *mine, int64_t bytes,
                     const struct zr_tag *tag, const void **all);
int zr_axis_exchange_in(struct zr_engine *e, struct zr_mesh_axis *a, int64_t bytes, const struct zr_tag *tag,
                        const void **all);
/* Returns the tag of a collective over the axis. The call, n and kind must be equal on all its ranks. kind: a
 * dtype, a root, a unit, or anything else that must be equal. */
struct zr_tag zr_axis_tag(const struct zr_engine *e, const struct zr_mesh_axis *a, enum zr_call_name call,
                          int64_t n, int32_t kind);

/* ---- for engine.c ---- */

int zr_axes_open(struct zr_engine *e);
/* Collective: all ranks allocate in one order. */
int zr_axes_allocate(struct zr_engine *e);
/* Waits for a shift that was not ended. */
void zr_axes_close(struct zr_engine *e);

#endif
