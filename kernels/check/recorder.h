/* SPDX-License-Identifier: Apache-2.0 */
/* recorder.h: records who touches which bytes, and finds accesses that nothing orders.
 *
 *   recorder.c  lines, their clocks and operations, and the faults found
 *   shadow.c    what every byte holds, its last writer and its readers since
 *
 * A *line* is something that runs in order: a stream, or a host thread of a rank. Each line has a vector
 * clock (Fidge 1988, Mattern 1989): how far it knows every other line to have come. Clocks are joined where
 * one line waits for another: at events, collectives, host syncs, and where a host thread issues work.
 *
 * Every operation declares which bytes it reads and writes. Two operations that touch the same byte, one of
 * them writing, must be ordered by the clocks. Otherwise they are a race: some device would run them the
 * other way round. As in FastTrack (Flanagan and Freund, PLDI 2009) a byte keeps its last write and the reads
 * since as epochs, one number each. So one run stands for all the orders that the device could have chosen.
 *
 * Bytes may also have a content, which stands for their values: an element of a flat, at a version. For
 * gradients it is the sum over the (rank, step, contribution) that they consist of. A copy takes the content
 * along. An operation that uses the bytes says what it expects.
 *
 * The simulated device (sim_device.h) records all ranks at once, and the checking device (check_device.h) one
 * rank in a real run.
 *
 * Thread-safety: none. Without memory a recorder becomes `broken`, and calls do nothing from then on. */
#ifndef ZR_KERNELS_RECORDER_H
#define ZR_KERNELS_RECORDER_H

#include "kernels/device.h"

/* A clock that several holders may share. */
struct zr_vclock {
    int refs;
    int64_t now_ns;
    /* (n_lines) how far each line is known to have come */
    uint32_t at[];
};

struct zr_line {
    int32_t id;
    /* rank of the line; negative: all other ranks, taken as one */
    int rank;
    const char *name;
    /* copied before a change if somebody else holds it */
    struct zr_vclock *clock;
    /* for host threads: the current action, which goes into the operations that they issue */
    const char *during;
    int32_t unit;
    uint32_t step;
    /* number of the current operation */
    uint32_t info;
};

/* An operation, for reports. */
struct zr_info {
    const char *name, *during;
    int32_t line, unit;
    uint32_t step, number;
};

/* An allocation, defined in shadow.c. */
struct zr_block;

struct zr_recorder {
    int32_t n_lines;
    /* (n_lines) lines, whose rank and name the user sets */
    struct zr_line *lines;
    /* ring of the last cap_infos operations */
    struct zr_info *infos;
    uint32_t n_infos, cap_infos;
    struct zr_block **blocks, *last;
    int32_t n_blocks, cap_blocks;
    int64_t n_ops, n_accesses, n_reports;
    /* touching memory that was not added is also a fault */
    bool every_byte_known;
    /* contents of bytes are not checked */
    bool contents_unknown;
    /* from now on contents need not make sense, and nothing is reported */
    bool forgiving;
    bool broken;
    char first_report[ZR_ERROR_BYTES];
};

int zr_recorder_open(struct zr_recorder *r, int32_t n_lines);
void zr_recorder_close(struct zr_recorder *r);

/* Records a fault. The text of the first one is kept. */
void zr_report(struct zr_recorder *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Returns the operation with this number, or a placeholder if it is too long ago. */
const struct zr_info *zr_info_at(const struct zr_recorder *r, uint32_t number);

/* Clocks. They may be NULL if the recorder is broken. zr_vclock_new makes a clock that has seen nothing.
 * zr_vclock_drop gives it back, and also what zr_vclock_hold returns. */
struct zr_vclock *zr_vclock_new(struct zr_recorder *r);
/* Returns the line's current clock. */
struct zr_vclock *zr_vclock_hold(struct zr_line *l);
void zr_vclock_drop(struct zr_vclock *s);
void zr_vclock_join(struct zr_recorder *r, struct zr_vclock *into, const struct zr_vclock *s);
void zr_line_join(struct zr_recorder *r, struct zr_line *l, const struct zr_vclock *s);
/* Returns the line's clock for a change, or NULL if the recorder is broken. */
struct zr_vclock *zr_line_own(struct zr_recorder *r, struct zr_line *l);
/* Begins a new operation on the line. The accesses that follow belong to it. */
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
    /* kind: enum zr_content_kind. size: bytes of an element. */
    uint8_t kind, size;
    int32_t flat;
    /* element of the flat at which the range begins */
    int64_t first;
    /* PARAM, STATE: version. ACTIVATION: its number. GRAD: sum of the contributions. */
    uint64_t value;
    /* GRAD: number of contributions */
    int32_t n;
};

/* Adds memory to the record. name must outlive it. */
int zr_shadow_add(struct zr_recorder *r, int rank, const char *name, const void *at, int64_t bytes);
void zr_shadow_name(struct zr_recorder *r, const void *at, const char *name);
void zr_shadow_remove(struct zr_recorder *r, const void *at);
/* The current operation of l reads or writes these bytes. This is checked against earlier accesses. */
void zr_shadow_read(struct zr_recorder *r, struct zr_line *l, const void *at, int64_t bytes);
void zr_shadow_write(struct zr_recorder *r, struct zr_line *l, const void *at, int64_t bytes);
/* Reads each of n ranges, and writes those that are marked so. */
void zr_shadow_touch(struct zr_recorder *r, struct zr_line *l, const struct zr_access *a, int n);
/* Makes a copy: src is read, dst is written, and the content moves along, whatever the size of elements. */
void zr_shadow_move(struct zr_recorder *r, struct zr_line *l, const void *dst, const void *src,
                    int64_t bytes);
/* zr_shadow_copy copies contents in order of elements, and changes the size of elements. zr_shadow_sum adds
 * gradients. Neither is checked against earlier accesses. If src does not hold n elements of src_size, the
 * result is ZR_CONTENT_MIXED. */
void zr_shadow_copy(struct zr_recorder *r, const void *dst, int dst_size, const void *src, int src_size,
                    int64_t n);
void zr_shadow_sum(struct zr_recorder *r, const void *dst, int dst_size, const void *src, int src_size,
                   int64_t n);
void zr_shadow_set(struct zr_recorder *r, const void *at, int64_t bytes, struct zr_content content);
/* Adds to the content of the bytes, which is a gradient or zero. */
void zr_shadow_add_to(struct zr_recorder *r, const void *at, int64_t bytes, struct zr_content content);
/* Checks that the bytes hold exactly content. Anything else is reported as found by l. */
void zr_shadow_expect(struct zr_recorder *r, const struct zr_line *l, const void *at, int64_t bytes,
                      struct zr_content content);
/* Returns the content of the first byte. */
struct zr_content zr_shadow_at(struct zr_recorder *r, const void *at);
void zr_shadow_close(struct zr_recorder *r);

#endif
