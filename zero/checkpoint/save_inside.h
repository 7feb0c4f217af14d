/* SPDX-License-Identifier: Apache-2.0 */
/* save_inside.h: what the files of zero_save share. save.c has the protocol. */
#ifndef ZR_ZERO_SAVE_INSIDE_H
#define ZR_ZERO_SAVE_INSIDE_H

#include "kernels/thread.h"
#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/checkpoint/save.h"

enum zr_save_state { ZR_SAVE_WRITING, ZR_SAVE_WRITTEN, ZR_SAVE_COMMITTED, ZR_SAVE_FAILED };

/* A save on one rank, from zero_save to its end. */
struct zr_save {
    struct zero_ctx *z;
    int64_t number;
    /* the folder that zero_save was given, the checkpoint's folder while it is written, and its final name in
     * root */
    char root[ZR_PATH_BYTES], folder[ZR_PATH_BYTES], name[ZR_CHECKPOINT_NAME_BYTES];
    /* what this rank writes */
    struct zr_extents extents;
    /* On rank 0 only. */
    struct zr_manifest manifest;
    /* the program's own data, by enum zr_data_kind */
    struct zr_data *data[ZR_N_DATA];

    struct zr_thread thread;
    /* The thread runs. */
    bool started;
    /* The snapshot was requested. */
    bool copying;
    /* The value of zero_save_options.kept. */
    bool kept;

    uv_mutex_t lock;
    uv_cond_t changed;
    _Atomic bool cancelled;

    /* Fields that the lock guards. */
    /* The extents' memory may be read. */
    bool readable;
    /* Every rank's file is written, so the thread of rank 0 may commit the checkpoint. */
    bool commit_reported;
    enum zr_save_state state;
    struct zr_saved_error failure;
};

/* ---- save_thread.c: the thread of a save, and how it and the model's thread signal each other ---- */

/* The thread of a save. It writes the file of the rank. On rank 0 it commits the checkpoint once all files
 * are written. arg is the save. */
void zr_save_run(void *arg);
/* Sets the state. If err is not 0, the state is ZR_SAVE_FAILED, with the message of this thread. */
void zr_save_set_state(struct zr_save *s, enum zr_save_state state, int err);
/* Sets a flag under the lock, and wakes the threads that wait for it. */
void zr_save_raise(struct zr_save *s, bool *flag);
/* Called by the stream when the snapshot is complete, so its memory may be read. arg is the save. */
void zr_save_on_snapshot(void *arg);

/* ---- unit_steps.c: how many steps updated each tensor ---- */

/* Fills in rank 0's manifest. Collective, once the ranks know that all of them save. */
int zr_unit_steps_save(struct zero_ctx *z, struct zr_manifest *m);

#endif
