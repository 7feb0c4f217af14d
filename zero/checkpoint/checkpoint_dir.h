/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint_dir.h: the folder that holds a run's checkpoints: names, which is the latest, which may go.
 *
 * A checkpoint is a folder save-SERIAL-step-T, or save-SERIAL-step-T-kept for one that stays, with a manifest
 * that validates and with every file it names, in the size it names. SERIAL counts the saves into this
 * folder: the latest is the last saved, also when a run was taken back to an earlier step. While it is
 * written its name begins with a dot; a folder of such a name is never a checkpoint. One context at a time
 * saves into a folder (folder_lock.h). */
#ifndef ZR_ZERO_CHECKPOINT_DIR_H
#define ZR_ZERO_CHECKPOINT_DIR_H

#include "kernels/log.h"
#include "zero/checkpoint/files.h"
#include "zero/checkpoint/folder_lock.h"
#include "zero/checkpoint/manifest.h"

#define ZR_CHECKPOINT_NAME_BYTES 64
/* What zero_set_step may set: a name has room for 18 digits, and steps go on from there. */
#define ZR_MOST_STEPS INT64_C(100000000000000000)

/* Makes root if it is missing (one level), takes its lock, and makes in it the folder .NAME for a checkpoint
 * of step t; name is what it will be called; kept: as one that stays. Blocking; ZR_ERR_IO. */
int zr_checkpoint_begin(const struct zr_files *fs, struct zr_folder_locks *locks, struct zr_log *log,
                        const char *root, int64_t t, bool kept, char name[ZR_CHECKPOINT_NAME_BYTES]);
/* The manifest, last: a temporary file, synced, renamed, and the folder synced. */
int zr_checkpoint_seal(const struct zr_files *fs, const char *folder, const struct zr_manifest *m);
/* .NAME becomes NAME, and root itself, durably. */
int zr_checkpoint_publish(const struct zr_files *fs, const char *root, const char *name);
/* Removes what is older than the `keep` latest (0: nothing) but for those that stay, which do not count, and
 * what other saves left unfinished; never `name`. A save is renamed to .NAME before it is removed. A folder
 * without a manifest stays. The log is warned of this, and of what cannot be removed. */
void zr_checkpoint_prune(const struct zr_files *fs, const char *root, const char *name, int keep,
                         struct zr_log *log);

/* Reads a folder's manifest and checks that what it names is there. *out is released with zr_manifest_free.
 * broken: set when it is no checkpoint, and not just could not be read. */
int zr_checkpoint_open(const struct zr_files *fs, const char *folder, bool *broken, struct zr_manifest *out);
/* The name of the latest checkpoint in root, "" when root itself is one. Unfinished or damaged ones that are
 * newer are skipped, with a warning. ZR_ERR_IO when there is none. */
int zr_checkpoint_latest(const struct zr_files *fs, const char *root, char name[ZR_CHECKPOINT_NAME_BYTES],
                         struct zr_log *log);

#endif
