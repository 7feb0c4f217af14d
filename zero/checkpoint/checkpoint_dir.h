/* SPDX-License-Identifier: Apache-2.0 */
/* checkpoint_dir.h: the folder that holds a run's checkpoints. It names checkpoints, finds the latest and
 * removes old ones.
 *
 * A checkpoint is a folder save-SERIAL-step-T, or save-SERIAL-step-T-kept if it is never removed. Its
 * manifest validates, and every file that the manifest names is there with its size. SERIAL counts the saves
 * into this folder. So the latest checkpoint is the one saved last, even if a run went back to an earlier
 * step. A folder's name begins with a dot while it is written, and a folder with such a name is never a
 * checkpoint. One context at a time saves into a folder (folder_lock.h). */
#ifndef ZR_ZERO_CHECKPOINT_DIR_H
#define ZR_ZERO_CHECKPOINT_DIR_H

#include "kernels/log.h"
#include "zero/checkpoint/files.h"
#include "zero/checkpoint/folder_lock.h"
#include "zero/checkpoint/manifest.h"

#define ZR_CHECKPOINT_NAME_BYTES 64
/* The largest step that zero_set_step accepts. A name holds 18 digits, which leaves room for later steps. */
#define ZR_MAX_STEPS INT64_C(100000000000000000)

/* Makes the folder .NAME in root for a checkpoint of step t. Makes root if it is missing (one level), and
 * takes its lock. Returns NAME, the name of the finished checkpoint. kept: it is never removed. Blocks.
 * ZERO_ERR_IO, ZERO_ERR_ARG. */
int zr_checkpoint_begin(const struct zr_files *fs, struct zr_folder_locks *locks, struct zr_log *log,
                        const char *root, int64_t t, bool kept, char name[ZR_CHECKPOINT_NAME_BYTES]);
/* Writes the manifest, after all other files. It goes to a temporary file, which is synced and renamed, and
 * the folder is synced. */
int zr_checkpoint_seal(const struct zr_files *fs, const char *folder, const struct zr_manifest *m);
/* Renames .NAME to NAME. Makes this and root's own name durable. */
int zr_checkpoint_publish(const struct zr_files *fs, const char *root, const char *name);
/* Removes checkpoints older than the `keep` latest, and what other saves left unfinished. With keep 0 it
 * removes only the latter. It never removes `name` or a checkpoint that is kept, and does not count the kept
 * ones. A checkpoint is renamed to .NAME before it is removed. A folder without a manifest stays. Warns about
 * such a folder, and about what cannot be removed. */
void zr_checkpoint_prune(const struct zr_files *fs, const char *root, const char *name, int keep,
                         struct zr_log *log);

/* Reads a folder's manifest and checks that the files it names are there. The caller releases *out with
 * zr_manifest_free. *broken: set if the folder is no checkpoint or a damaged one, not if it could not be
 * read. */
int zr_checkpoint_open(const struct zr_files *fs, const char *folder, bool *broken, struct zr_manifest *out);
/* Finds the latest checkpoint in root. name is "" if root itself is one. Newer ones that are unfinished or
 * damaged are skipped with a warning. ZERO_ERR_IO if there is none. */
int zr_checkpoint_latest(const struct zr_files *fs, const char *root, char name[ZR_CHECKPOINT_NAME_BYTES],
                         struct zr_log *log);

#endif
