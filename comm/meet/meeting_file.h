/* SPDX-License-Identifier: Apache-2.0 */
/* meeting_file.h: a file with rank 0's address, for ranks that share a folder and do not know beforehand
 * where rank 0 will be.
 *
 * The file is a text with the job's mark, the attempt, and rank 0's addresses. Rank 0 first writes it under
 * another name, so no rank reads a partial file. Mark and attempt show whether an earlier job or attempt left
 * the file there; ranks ignore such a file. The file proves nothing: the process at that address must still
 * prove that it has the job's key (handshake.h).
 *
 * An NFS client may cache for a minute that a file is missing, or what it was. Opening the folder, and then
 * the file, makes it ask the server again, so every read does both. */
#ifndef ZR_COMM_MEETING_FILE_H
#define ZR_COMM_MEETING_FILE_H

#include "comm/meet/net_address.h"
#include "comm/meet/rendezvous.h"

enum {
    ZR_MEETING_FILE_BYTES = 2048,
    ZR_MEETING_PATH_CHARS = sizeof((struct zr_world *)0)->file + 64,
    ZR_MEETING_WHY_CHARS = 384,
    /* Number of hex digits. */
    ZR_MEETING_MARK_CHARS = 32,
    /* Another rank 0 has written its file meanwhile. */
    ZR_MEETING_FILE_TAKEN = 1,
    /* There is no file; there is one that leads to no rank 0 of this job. */
    ZR_MEETING_FILE_ABSENT = 1,
    ZR_MEETING_FILE_USELESS
};

/* The contents of such a file. */
struct zr_meeting_file {
    /* zr_shake_mark of the job. */
    char mark[ZR_MEETING_MARK_CHARS + 1];
    int attempt, world;
    /* The job's name and rank 0's host, for messages. */
    char job[sizeof((struct zr_world *)0)->job], host[72];
    /* Rank 0's addresses, the likeliest first. */
    int n;
    union zr_address at[ZR_LOOKUP_MAX];
};

/* Begins a file for w's job, without addresses yet. */
void zr_meeting_file_begin(const struct zr_world *w, struct zr_meeting_file *f);
/* Writes its text. */
void zr_meeting_file_print(const struct zr_meeting_file *f, char text[ZR_MEETING_FILE_BYTES]);
/* Reads n bytes, which may be anything. Returns false if they are no such file. */
bool zr_meeting_file_parse(const char *text, size_t n, struct zr_meeting_file *out);

/* Writes the path: w->file, or the job's file in it if that is a folder now. */
void zr_meeting_file_path(const struct zr_world *w, char path[ZR_MEETING_PATH_CHARS]);

/* Rank 0 writes its file, which only this user may write. If may_replace, an existing meeting file or an
 * empty file is replaced. Otherwise the file of another rank 0 stays: ZR_MEETING_FILE_TAKEN. Pass false if
 * there was no file when the caller read: another rank 0 may write its file between the two calls. Any other
 * existing file stays and is an error that names it: ZERO_ERR_ARG, ZERO_ERR_IO. */
int zr_meeting_file_write(const struct zr_world *w, const struct zr_meeting_file *f, bool may_replace);
/* Reads the current file. Returns 0 if it belongs to this job and attempt, and only its owner, who is this
 * user, may write it. For root the owner does not matter. Otherwise returns ZR_MEETING_FILE_ABSENT or
 * ZR_MEETING_FILE_USELESS, and why describes what is there instead. */
int zr_meeting_file_read(const struct zr_world *w, struct zr_meeting_file *out,
                         char why[ZR_MEETING_WHY_CHARS]);
/* Rank 0 removes its file. Returns false if another rank 0 has replaced it, or if it is gone. */
bool zr_meeting_file_remove(const struct zr_world *w, const struct zr_meeting_file *f);
/* Returns whether rank 0's file is still there. */
bool zr_meeting_file_is_there(const struct zr_world *w, const struct zr_meeting_file *f);

#endif
