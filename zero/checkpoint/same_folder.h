/* SPDX-License-Identifier: Apache-2.0 */
/* same_folder.h: checks that all ranks see the same folder at one path. Ranks on several hosts may have
 * different file systems there, and the checkpoint would be in pieces. Rank 0 leaves a mark in the folder
 * that it has made. Each other rank looks for the mark before it writes. */
#ifndef ZR_ZERO_SAME_FOLDER_H
#define ZR_ZERO_SAME_FOLDER_H

#include "zero/checkpoint/files.h"

#define ZR_FOLDER_MARK       ".who" /* name of the file; removed before the folder is a checkpoint */
#define ZR_FOLDER_MARK_BYTES 16

/* Called on rank 0. Writes a random mark into the folder. It is not synced, because only ranks that are
 * running look for it. */
int zr_folder_mark(const struct zr_files *fs, const char *folder, unsigned char mark[ZR_FOLDER_MARK_BYTES]);
/* Called on the other ranks. ZERO_ERR_IO if the mark is not there. */
int zr_folder_same(const struct zr_files *fs, const char *folder,
                   const unsigned char mark[ZR_FOLDER_MARK_BYTES]);
int zr_folder_unmark(const struct zr_files *fs, const char *folder);

#endif
