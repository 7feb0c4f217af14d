/* SPDX-License-Identifier: Apache-2.0 */
/* recorder.h: who touches which bytes, and whether anything orders it.
 *
 *   recorder.c  lines, their clocks, what they do, what was found
 *   shadow.c    what every byte holds, who wrote it last and who has read it since
 *
 * A *line* is something that runs in order: a stream, or a host thread of a rank. Each has a vector clock
 * (Fidge 1988, Mattern 1989): how far it knows every other line to have come. Clocks are joined where one
 * line waits for another: at events, collectives, host syncs, and where a host thread issues work. Every
 * operation says which bytes it reads and writes; two operations that touch the same byte, one of them
 * writing, must be ordered by the clocks, or they are a race: some device would run them the other way round.
 * As in FastTrack (Flanagan and Freund, PLDI 2009) a byte keeps its last write and the reads since as epochs,
 * one number each. So one run speaks for all the orders that the device could have chosen.
 *
 * Bytes may also have a content in place of values: which element of which flat they are, at which version,
 * or for gradients the sum over (rank, step, contribution) that they stand for. A copy takes it along; who
 * uses it says what it expects.
 *
 * Two use it: the simulated device (sim_device.h), for all ranks at once, and the checking device
 * (check_device.h), for one rank in a real run.
 *
 * Thread-safety: none. Without memory a recorder stops: it is `broken`, and everything done to it does
 * nothing. */
#ifndef ZR_KERNELS_RECORDER_H
#define ZR_KERNELS_RECORDER_H

#include "kernels/device.h"

/* A clock that others may hold on to. */
struct zr_vclock {
    int refs;
    int64_t now_ns;
    /* (n_lines), one for each line */
    uint32_t at[];
};

struct zr_line {
    int32_t id;
    /* whose it is; negative: of the other ranks, taken as one */
    int rank;
    const char *name;
    /* copied when somebody else holds it and it changes */
    struct zr_vclock *clock;
    /* host threads: the action being taken; goes into what is issued */
    const char *during;
    int32_t unit;
    uint32_t step;
    /* number of the operation under way */
    uint32_t info;
};

/* An operation, for reports. */
struct zr_info {
    const char *name, *during;
    int32_t line, unit;
    uint32_t step, number;
};

/* An allocation (shadow.c). */
struct zr_block;

struct zr_recorder {
    int32_t n_lines;
    /* (n_lines), each with an id, a rank and a name of the user's */
    struct zr_line *lines;
    /* a ring: the last cap_infos operations */
    struct zr_info *infos;
    uint32_t n_infos, cap_infos;
    struct zr_block **blocks, *last;
    int32_t n_blocks, cap_blocks;
    int64_t n_ops, n_accesses, n_reports;
    /* touching memory that was not added is a fault, too */
    bool every_byte_known;
    /* what bytes hold is not looked at */
    bool contents_unknown;
    /* from here on bytes need not make sense any more, and nothing is reported */
    bool forgiving;
    bool broken;
    char first_report[ZR_ERROR_BYTES];
};

int zr_recorder_open(struct zr_recorder *r, int32_t n_lines);
void zr_recorder_close(struct zr_recorder *r);

/* A fault was found. The first one's text is kept. */
void zr_report(struct zr_recorder *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Returns the operation with this number, or one that says that it is too long ago. */
const struct zr_info *zr_info_at(const struct zr_recorder *r, uint32_t number);

/* Clocks. They may be NULL where a recorder is broken.
 * A new one has seen nothing. Give it back with zr_vclock_drop, as what hold returns. */
struct zr_vclock *zr_vclock_new(struct zr_recorder *r);
/* The line's clock now. */
struct zr_vclock *zr_vclock_hold(struct zr_line *l);
void zr_vclock_drop(struct zr_vclock *s);
void zr_vclock_join(struct zr_recorder *r, struct zr_vclock *into, const struct zr_vclock *s);
void zr_line_join(struct zr_recorder *r, struct zr_line *l, const struct zr_vclock *s);
/* The line's clock, for changing it. NULL: broken. */
struct zr_vclock *zr_line_own(struct zr_recorder *r, struct zr_line *l);
/* A new operation on the line: the accesses that follow are its. */
void zr_line_begin(struct zr_recorder *r, struct zr_line *l, const char *name, const char *during,
                   int32_t unit, uint32_t step);

/* ---- shadow.c ---- */

/* The content of a byte range, element by element. */
enum zr_content_kind {
    ZR_CONTENT_UNKNOWN,
    ZR_CONTENT_ZERO,
    ZR_CONTENT_PARAM,
    ZR_CONTENT_GRAD,
    ZR_CONTENT_STATE,
    ZR_CONTENT_ACTIVATION,
    ZR_CONTENT_MIXED
};
struct zr_content {
    /* enum zr_content_kind; bytes of an element */
    uint8_t kind, size;
    int32_t flat;
    /* element of the flat that the range begins with */
    int64_t first;
    /* PARAM, STATE: the version. ACTIVATION: which one. GRAD: a sum over what was added up */
    uint64_t value;
    /* GRAD: how many were added up */
    int32_t n;
};

/* Memory that takes part. name must outlive it. */
int zr_shadow_add(struct zr_recorder *r, int rank, const char *name, const void *at, int64_t bytes);
void zr_shadow_name(struct zr_recorder *r, const void *at, const char *name);
void zr_shadow_remove(struct zr_recorder *r, const void *at);
/* The operation under way on l reads or writes these bytes: checked against who did before. */
void zr_shadow_read(struct zr_recorder *r, struct zr_line *l, const void *at, int64_t bytes);
void zr_shadow_write(struct zr_recorder *r, struct zr_line *l, const void *at, int64_t bytes);
/* Each of n ranges is read, and where it says so written. */
void zr_shadow_touch(struct zr_recorder *r, struct zr_line *l, const struct zr_access *a, int n);
/* A copy: src is read, dst written, and the content goes along, whatever the size of elements. */
void zr_shadow_move(struct zr_recorder *r, struct zr_line *l, const void *dst, const void *src,
                    int64_t bytes);
/* Contents, in order of elements; not checked against who did before. copy changes the size of elements; sum
 * adds gradients. Where src does not hold n elements of size src_size, the result is unknown. */
void zr_shadow_copy(struct zr_recorder *r, const void *dst, int dst_size, const void *src, int src_size,
                    int64_t n);
void zr_shadow_sum(struct zr_recorder *r, const void *dst, const void *src, int src_size, int64_t n);
void zr_shadow_set(struct zr_recorder *r, const void *at, int64_t bytes, struct zr_content content);
/* Adds to what is there, which is a gradient or zero. */
void zr_shadow_add_to(struct zr_recorder *r, const void *at, int64_t bytes, struct zr_content content);
/* The bytes must be exactly content; anything else is reported as found by l. */
void zr_shadow_expect(struct zr_recorder *r, const struct zr_line *l, const void *at, int64_t bytes,
                      struct zr_content content);
/* The content of the first byte. */
struct zr_content zr_shadow_at(struct zr_recorder *r, const void *at);
void zr_shadow_close(struct zr_recorder *r);

#endif
