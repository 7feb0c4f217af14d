/* SPDX-License-Identifier: Apache-2.0 */
/* meeting_file.h: a file in which rank 0 says where it waits, for ranks that share a folder and do not know
 * beforehand where rank 0 will be.
 *
 * It is a text with a mark by which ranks of its job know it, the attempt, and rank 0's addresses. Rank 0
 * writes it whole under another name first, so nobody reads half of one. Ranks do not follow a file that an
 * earlier job or attempt left there, which they see by mark and attempt. The file proves nothing: whoever is
 * found there must still show that he has the job's key (handshake.h).
 *
 * An NFS client may remember for a minute that a file is not there, or what it was. Opening the folder, and
 * then the file, makes it ask the server again, so every read does both. */
#ifndef ZR_COMM_MEETING_FILE_H
#define ZR_COMM_MEETING_FILE_H

#include "comm/meet/net_address.h"
#include "comm/meet/rendezvous.h"

enum {
    ZR_MEETING_FILE_BYTES = 2048,
    ZR_MEETING_PATH_CHARS = sizeof((struct zr_world *)0)->file + 64,
    ZR_MEETING_WHY_CHARS = 384,
    /* hex digits */
    ZR_MEETING_MARK_CHARS = 32,
    /* another rank 0 has written its file meanwhile */
    ZR_MEETING_FILE_TAKEN = 1,
    /* nothing is there; something is there that leads nowhere */
    ZR_MEETING_FILE_ABSENT = 1,
    ZR_MEETING_FILE_USELESS
};

/* The contents of such a file. */
struct zr_meeting_file {
    /* zr_shake_mark of the job */
    char mark[ZR_MEETING_MARK_CHARS + 1];
    int attempt, world;
    /* the job's name and rank 0's host, for messages */
    char job[sizeof((struct zr_world *)0)->job], host[72];
    /* rank 0's addresses, the likeliest first */
    int n;
    union zr_address at[ZR_LOOKUP_MOST];
};

/* Begins a file of w's job, without addresses yet. */
void zr_meeting_file_begin(const struct zr_world *w, struct zr_meeting_file *f);
/* Writes its text. */
void zr_meeting_file_print(const struct zr_meeting_file *f, char text[ZR_MEETING_FILE_BYTES]);
/* Reads n bytes from anywhere. Returns false if they are no such file. */
bool zr_meeting_file_parse(const char *text, size_t n, struct zr_meeting_file *out);

/* Writes w->file, or the job's file in it if that is a folder now. */
void zr_meeting_file_path(const struct zr_world *w, char path[ZR_MEETING_PATH_CHARS]);

/* Rank 0 writes its file, which only this user may write. If may_replace, a meeting file that is there is
 * replaced, and so is an empty file. Otherwise the file of another rank 0 stays: ZR_MEETING_FILE_TAKEN. Pass
 * false if nothing was there when the caller read: another rank 0 may write its file between the two calls.
 * Anything else that is there stays and is an error that names it: ZR_ERR_ARG, ZR_ERR_IO. */
int zr_meeting_file_write(const struct zr_world *w, const struct zr_meeting_file *f, bool may_replace);
/* Reads the file that is there now. Returns 0 if it is of this job and attempt, and only its owner, who is
 * this user, may write it (root follows any owner's). Otherwise it returns ZR_MEETING_FILE_ABSENT or
 * ZR_MEETING_FILE_USELESS, and why says what is there instead. */
int zr_meeting_file_read(const struct zr_world *w, struct zr_meeting_file *out,
                         char why[ZR_MEETING_WHY_CHARS]);
/* Rank 0 removes what it wrote. Returns false if another rank 0 has replaced it, or if it is gone. */
bool zr_meeting_file_remove(const struct zr_world *w, const struct zr_meeting_file *f);
/* Returns whether what rank 0 wrote is still there. */
bool zr_meeting_file_is_there(const struct zr_world *w, const struct zr_meeting_file *f);

#endif
