/* SPDX-License-Identifier: Apache-2.0 */
/* same_folder.c: writes, finds and removes the mark by which ranks know that they see one folder. */
#include "zero/checkpoint/same_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

int zr_folder_mark(const struct zr_files *fs, const char *folder, unsigned char mark[ZR_FOLDER_MARK_BYTES])
{
    char path[ZR_PATH_BYTES];
    int fd, err = zr_path_join(path, folder, ZR_FOLDER_MARK);
    if (!err && getrandom(mark, ZR_FOLDER_MARK_BYTES, 0) != ZR_FOLDER_MARK_BYTES)
        err = zr_fail(ZERO_ERR_SYSTEM, "getrandom: %s", strerror(errno));
    if (!err)
        err = zr_file_open(fs, path, O_WRONLY | O_CREAT | O_TRUNC, &fd);
    if (err)
        return err;
    err = zr_file_write(fs, fd, path, mark, ZR_FOLDER_MARK_BYTES, 0);
    int closed = zr_file_close(fs, fd, path);
    return err ? err : closed;
}

int zr_folder_same(const struct zr_files *fs, const char *folder,
                   const unsigned char mark[ZR_FOLDER_MARK_BYTES])
{
    static const char must[] = "all ranks must share a file system";
    char path[ZR_PATH_BYTES], *found;
    bool missing;
    int64_t n;
    int err = zr_path_join(path, folder, ZR_FOLDER_MARK);
    if (!err)
        err = zr_file_load(fs, path, ZR_FOLDER_MARK_BYTES, &missing, &found, &n);
    if (err == ZERO_ERR_IO)
        return zr_fail(err, "this rank cannot see the folder that rank 0 made: %s; %s", zr_error_text(),
                       must);
    if (err)
        return err;
    bool same = n == ZR_FOLDER_MARK_BYTES && !memcmp(found, mark, ZR_FOLDER_MARK_BYTES);
    free(found);
    return same
               ? 0
               : zr_fail(ZERO_ERR_IO, "on this rank %s is not the folder that rank 0 made; %s", folder, must);
}

int zr_folder_unmark(const struct zr_files *fs, const char *folder)
{
    char path[ZR_PATH_BYTES];
    ZR_TRY(zr_path_join(path, folder, ZR_FOLDER_MARK));
    return zr_file_remove(fs, path);
}
