/* SPDX-License-Identifier: Apache-2.0 */
/* state_file.h: the file that holds a rank's masters and optimizer states (cfg.memory.states = file).
 *
 * The file has no name, and all of its space is reserved when it is opened. So a full disk is an error before
 * training begins, and nothing is left behind when the process ends, however it ends. File systems that copy
 * on write reserve nothing. On them a write may still find the disk full. */
#ifndef ZR_ZERO_STATE_FILE_H
#define ZR_ZERO_STATE_FILE_H

#include "zero/checkpoint/block_file.h"

struct zr_state_file {
    struct zr_block_file file;
    int64_t bytes;
    int rank;
    char folder[ZR_PATH_BYTES], path[ZR_PATH_BYTES];
    /* The contents of the file, while it is mapped; otherwise NULL. */
    char *map;
};

/* Makes a file of zeros in an existing folder. rank is part of the name that the file may have for a moment.
 * *f must stay where it is until it is closed. ZERO_ERR_IO names the folder and the bytes. The caller closes
 * *f, even after a failure. */
int zr_state_file_open(const struct zr_files *fs, const char *folder, int rank, int64_t bytes,
                       struct zr_state_file *f);
/* Makes another file in the same folder. */
int zr_state_file_open_like(const struct zr_state_file *model, int64_t bytes, struct zr_state_file *f);
/* Transfer n bytes. Any thread. They are fast if buf, n and at are multiples of ZR_DIRECT_ALIGN. */
int zr_state_file_read(struct zr_state_file *f, void *buf, int64_t n, int64_t at);
int zr_state_file_write(struct zr_state_file *f, const void *buf, int64_t n, int64_t at);
/* Map the file for a save or a load, during which nothing else may use it. zr_state_file_unmap ends that, and
 * writes to the disk what was changed. It does nothing if the file is not mapped. If the disk fails, or is
 * full and reserved no space for the file, an access to the map raises SIGBUS. */
int zr_state_file_map(struct zr_state_file *f);
int zr_state_file_unmap(struct zr_state_file *f);
/* Frees the space on the disk. Does nothing to a zeroed *f. */
void zr_state_file_close(struct zr_state_file *f);

#endif
