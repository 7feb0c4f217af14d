/* SPDX-License-Identifier: Apache-2.0 */
/* save_inside.h: what the files of zero_save share; who does what when is in save.c. */
#ifndef ZR_ZERO_SAVE_INSIDE_H
#define ZR_ZERO_SAVE_INSIDE_H

#include "kernels/thread.h"
#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/checkpoint/save.h"

enum zr_save_state { ZR_SAVE_WRITING, ZR_SAVE_WRITTEN, ZR_SAVE_COMMITTED, ZR_SAVE_FAILED };

/* A save from zero_save to its end, of one rank. */
struct zr_save {
    struct zero_ctx *z;
    int64_t number;
    char root[ZR_PATH_BYTES], folder[ZR_PATH_BYTES], name[ZR_CHECKPOINT_NAME_BYTES];
    struct zr_extents extents;
    /* rank 0's */
    struct zr_manifest manifest;
    struct zr_data *data[ZR_N_DATA];

    struct zr_thread thread;
    bool started;
    /* the snapshot was asked for */
    bool copying;
    /* as struct zero_save_options says */
    bool kept;

    uv_mutex_t lock;
    uv_cond_t changed;
    _Atomic bool cancelled;

    /* Under the lock. */
    /* the memory may be read */
    bool readable;
    /* every rank's file is written: rank 0's thread may make a checkpoint of them */
    bool commit_reported;
    enum zr_save_state state;
    struct zr_kept failure;
};

/* ---- save_thread.c: a rank's own thread, and what it and the model's thread tell each other. ---- */

/* The thread: writes the rank's file; rank 0's seals the checkpoint once all have. arg is the save. */
void zr_save_run(void *arg);
/* err: with this thread's message; the state is then ZR_SAVE_FAILED. */
void zr_save_set_state(struct zr_save *s, enum zr_save_state state, int err);
/* Sets a flag of those under the lock, and wakes who waits for it. */
void zr_save_raise(struct zr_save *s, bool *flag);
/* The snapshot is complete: the memory may be read. arg is the save; called by the stream. */
void zr_save_on_snapshot(void *arg);

/* ---- unit_steps.c: how many steps updated each tensor ---- */

/* Fills in rank 0's manifest. Collective, once the ranks know that all of them save. */
int zr_unit_steps_save(struct zero_ctx *z, struct zr_manifest *m);

#endif
