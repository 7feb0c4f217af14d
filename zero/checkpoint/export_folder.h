/* SPDX-License-Identifier: Apache-2.0 */
/* export_folder.h: the files of an export in their folder, and the switch from an earlier export to a new
 * one.
 *
 * Every export has an id: 16 random hexadecimal digits. Each of its files carries the id, in safetensors'
 * __metadata__ or in the index's metadata, under the key ZR_EXPORT_KEY. This is how libzero recognizes its
 * own files. A new export is written under hidden names, synced and renamed to names that no file has. Then
 * one rename switches readers from the old export to the new one, and the old files are removed. */
#ifndef ZR_ZERO_EXPORT_FOLDER_H
#define ZR_ZERO_EXPORT_FOLDER_H

#include "kernels/log.h"
#include "zero/checkpoint/files.h"
#include "zero/checkpoint/folder_lock.h"
#include "zero/checkpoint/safetensors.h"

#define ZR_WEIGHTS_INDEX     "model.safetensors.index.json"
#define ZR_WEIGHTS_SINGLE    "model.safetensors"
#define ZR_WEIGHTS_MAX_INDEX (256 << 20)
#define ZR_EXPORT_NAME_BYTES 80

/* Rank 0's view of the folder. zr_export_end accepts a zeroed struct. */
struct zr_export_folder {
    const struct zr_files *fs;
    char path[ZR_PATH_BYTES], id[ZR_EXPORT_ID_BYTES];
    int32_t n_files;
    /* Files of earlier exports. */
    struct zr_names old;
    struct zr_folder_locks locks;
    /* Set once readers may see the new export. */
    bool is_switched;
};

/* Makes the folder if it is missing, locks it, removes what killed exports left unfinished, and draws the id.
 * held: locks that this context has already. ZERO_ERR_ARG names weight files that zero_export did not write.
 * ZERO_ERR_IO. Call zr_export_end afterwards, even after a failure. */
int zr_export_begin(const struct zr_files *fs, const struct zr_folder_locks *held, struct zr_log *log,
                    const char *path, int32_t n_files, struct zr_export_folder *f);
/* Writes the name that a file has when the export is finished. Files count from 0. The only file of an export
 * is ZR_WEIGHTS_SINGLE. */
void zr_export_name(const char *id, int32_t file, int32_t n_files, char out[ZR_EXPORT_NAME_BYTES]);
/* Writes the name that a file has while it is written. */
void zr_export_hidden_name(const char *id, int32_t file, char out[ZR_EXPORT_NAME_BYTES]);
/* Renames all files, which were synced, to their final names, and switches readers to them. An export of one
 * file has no index; otherwise `index` is its text. Then removes the earlier export. ZERO_ERR_IO. */
int zr_export_publish(struct zr_export_folder *f, const char *index);
/* Unlocks the folder. Removes the new files if readers cannot see them yet. */
void zr_export_end(struct zr_export_folder *f);

#endif
