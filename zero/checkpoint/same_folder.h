/* SPDX-License-Identifier: Apache-2.0 */
/* same_folder.h: whether all ranks mean one folder by one path: on several hosts they may have file systems
 * of their own there, and a checkpoint would lie in pieces. Rank 0 leaves a mark in the folder that it has
 * made, and each other rank looks for it before it writes. */
#ifndef ZR_ZERO_SAME_FOLDER_H
#define ZR_ZERO_SAME_FOLDER_H

#include "zero/checkpoint/files.h"

#define ZR_FOLDER_MARK       ".who" /* a file's name; it goes before the folder is a checkpoint */
#define ZR_FOLDER_MARK_BYTES 16

/* Rank 0: chooses a mark at random and leaves it there. Not synced: it is for those who look now. */
int zr_folder_mark(const struct zr_files *fs, const char *folder, unsigned char mark[ZR_FOLDER_MARK_BYTES]);
/* Another rank: ZR_ERR_IO where the mark is not there. */
int zr_folder_same(const struct zr_files *fs, const char *folder,
                   const unsigned char mark[ZR_FOLDER_MARK_BYTES]);
int zr_folder_unmark(const struct zr_files *fs, const char *folder);

#endif
