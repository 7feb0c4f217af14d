/* SPDX-License-Identifier: Apache-2.0 */
/* meeting_file.c: writes, reads and removes the file with rank 0's address. */
#include "comm/meet/meeting_file.h"
#include "comm/meet/handshake.h"
#include "comm/meet/net_address.h"
#include "kernels/limits.h"
#include "kernels/standard_fds.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char first_line[] = "libzero: rank 0 of a job waits here, version 1\n";

enum { LINE_CHARS = 256 };

/* --- the text --- */

static void copy_printable(char *to, size_t n_to, const char *from)
{
    snprintf(to, n_to, "%s", from);
    for (char *c = to; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
}

void zr_meeting_file_begin(const struct zr_world *w, struct zr_meeting_file *f)
{
    char host[sizeof f->host] = "";
    *f = (struct zr_meeting_file){.attempt = w->attempt, .world = w->world};
    zr_shake_mark(w, f->mark);
    if (gethostname(host, sizeof host - 1))
        host[0] = 0;
    copy_printable(f->job, sizeof f->job, w->job);
    copy_printable(f->host, sizeof f->host, host);
}

void zr_meeting_file_print(const struct zr_meeting_file *f, char text[ZR_MEETING_FILE_BYTES])
{
    int n = snprintf(text, ZR_MEETING_FILE_BYTES, "%smark %s\nattempt %d\nworld %d\njob %s\nhost %s\n",
                     first_line, f->mark, f->attempt, f->world, f->job, f->host);
    for (int i = 0; i < f->n; i++) {
        char at[ZR_ADDRESS_CHARS];
        zr_address_print(&f->at[i], at);
        n += snprintf(text + n, (size_t)(ZR_MEETING_FILE_BYTES - n), "at %s\n", at);
    }
    snprintf(text + n, (size_t)(ZR_MEETING_FILE_BYTES - n), "end\n");
}

/* The part of a text that is not read yet. */
struct text {
    const char *at, *end;
};

/* Takes the next line if it is "NAME VALUE". Otherwise returns false, and takes nothing. */
static bool take_value(struct text *t, const char *name, char value[LINE_CHARS])
{
    size_t n_name = strlen(name);
    const char *end = memchr(t->at, '\n', (size_t)(t->end - t->at));
    if (!end || (size_t)(end - t->at) < n_name + 1 || memcmp(t->at, name, n_name) != 0 ||
        t->at[n_name] != ' ')
        return false;
    const char *from = t->at + n_name + 1;
    size_t n = (size_t)(end - from);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)from[i] < 0x20 || from[i] == 0x7f)
            return false;
    if (n >= LINE_CHARS)
        return false;
    memcpy(value, from, n);
    value[n] = 0;
    t->at = end + 1;
    return true;
}

/* Reads a number of digits only, without leading zeros. */
static bool read_digits(const char *text, int lo, int hi, int *out)
{
    size_t n = strspn(text, "0123456789");
    long v = n && n <= 10 ? strtol(text, NULL, 10) : -1;
    if (text[n] || v < lo || v > hi || (text[0] == '0' && n > 1))
        return false;
    *out = (int)v;
    return true;
}

static bool take_digits(struct text *t, const char *name, int lo, int hi, int *out)
{
    char value[LINE_CHARS];
    return take_value(t, name, value) && read_digits(value, lo, hi, out);
}

static bool take_text(struct text *t, const char *name, char *out, size_t n_out)
{
    char value[LINE_CHARS];
    if (!take_value(t, name, value) || strlen(value) >= n_out)
        return false;
    memcpy(out, value, strlen(value) + 1);
    return true;
}

bool zr_meeting_file_parse(const char *text, size_t n, struct zr_meeting_file *out)
{
    const size_t n_first = sizeof first_line - 1;
    struct zr_meeting_file f = {.n = 0};
    char at[LINE_CHARS];
    if (n < n_first || memcmp(text, first_line, n_first) != 0)
        return false;
    struct text t = {text + n_first, text + n};
    if (!take_text(&t, "mark", f.mark, sizeof f.mark) || strlen(f.mark) != ZR_MEETING_MARK_CHARS ||
        strspn(f.mark, "0123456789abcdef") != ZR_MEETING_MARK_CHARS ||
        !take_digits(&t, "attempt", 0, INT_MAX, &f.attempt) ||
        !take_digits(&t, "world", 2, INT_MAX, &f.world) || !take_text(&t, "job", f.job, sizeof f.job) ||
        !take_text(&t, "host", f.host, sizeof f.host))
        return false;
    while (take_value(&t, "at", at))
        if (f.n == ZR_LOOKUP_MAX || !zr_address_read(at, strlen(at), &f.at[f.n++]))
            return false;
    /* Without its last line the text is incomplete. */
    if (f.n == 0 || t.end - t.at != 4 || memcmp(t.at, "end\n", 4) != 0)
        return false;
    *out = f;
    return true;
}

/* --- the path --- */

void zr_meeting_file_path(const struct zr_world *w, char path[ZR_MEETING_PATH_CHARS])
{
    struct stat st;
    size_t n = strlen(w->file);
    bool has_slash = n && w->file[n - 1] == '/';
    char mark[ZR_MEETING_MARK_CHARS + 1];
    zr_shake_mark(w, mark);
    if (has_slash || (stat(w->file, &st) == 0 && S_ISDIR(st.st_mode)))
        snprintf(path, ZR_MEETING_PATH_CHARS, "%s%slibzero-%.16s-%d", w->file, has_slash ? "" : "/", mark,
                 w->attempt);
    else
        snprintf(path, ZR_MEETING_PATH_CHARS, "%s", w->file);
}

static void folder_of(const char *path, char folder[ZR_MEETING_PATH_CHARS])
{
    snprintf(folder, ZR_MEETING_PATH_CHARS, "%s", path);
    char *slash = strrchr(folder, '/');
    if (slash)
        slash[slash == folder] = 0;
}

/* Reads the current file at path. Returns its bytes, or -errno. */
static ssize_t load_meeting(const char *path, struct stat *st, char text[ZR_MEETING_FILE_BYTES])
{
    char folder[ZR_MEETING_PATH_CHARS];
    ssize_t n = 0, got = 1;
    folder_of(path, folder);
    int seen = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    int err = fd < 0 ? -errno : 0;
    if (seen >= 0)
        close(seen);
    if (err)
        return err;
    if (fstat(fd, st))
        err = -errno;
    while (!err && S_ISREG(st->st_mode) && got != 0 && n < ZR_MEETING_FILE_BYTES) {
        got = read(fd, text + n, (size_t)(ZR_MEETING_FILE_BYTES - n));
        if (got < 0 && errno != EINTR)
            err = -errno;
        n += got > 0 ? got : 0;
    }
    close(fd);
    return err ? err : n;
}

/* --- rank 0 --- */

/* Fails if the existing file does not belong to libzero, and must not be replaced. */
static int check_replaceable(const char *path)
{
    struct stat st;
    char text[ZR_MEETING_FILE_BYTES], words[ZR_SYSTEM_WORDS];
    const size_t n_first = sizeof first_line - 1;
    ssize_t n = load_meeting(path, &st, text);
    if (n == -ENOENT)
        return 0;
    if (n < 0)
        return zr_fail(ZERO_ERR_IO, "cannot write where ranks meet: %.400s exists and cannot be read: %s",
                       path, n == -ELOOP ? "it is a symbolic link" : zr_system_words((int)-n, words));
    bool ours = n >= (ssize_t)n_first && memcmp(text, first_line, n_first) == 0;
    if (!S_ISREG(st.st_mode) || (n > 0 && !ours))
        return zr_fail(ZERO_ERR_ARG,
                       "cannot write where ranks meet: %.400s exists and is %s, so it is not replaced; give "
                       "the path of a new file or of a folder",
                       path, S_ISREG(st.st_mode) ? "not a file of libzero" : "not a regular file");
    return 0;
}

static int put_text(int fd, const char *text)
{
    for (size_t n = strlen(text), done = 0; done < n;) {
        ssize_t got = zr_limited_write(fd, text + done, n - done);
        if (got < 0 && errno != EINTR)
            return -errno;
        done += got > 0 ? (size_t)got : 0;
    }
    return fsync(fd) ? -errno : 0;
}

/* Puts the whole file in its place. If it may not replace one, another rank 0 may have been faster: -EEXIST.
 * On network file systems without hard links the later one wins. */
static int put_in_place(const char *whole, const char *path, bool may_replace)
{
    int err = may_replace ? ENOTSUP : link(whole, path) ? errno : 0;
    if (err && err != EEXIST)
        return rename(whole, path) ? -errno : 0;
    unlink(whole);
    return -err;
}

int zr_meeting_file_write(const struct zr_world *w, const struct zr_meeting_file *f, bool may_replace)
{
    char path[ZR_MEETING_PATH_CHARS], whole[ZR_MEETING_PATH_CHARS + 64], text[ZR_MEETING_FILE_BYTES],
        why[ZR_SYSTEM_WORDS];
    uint64_t nonce;
    zr_meeting_file_path(w, path);
    zr_meeting_file_print(f, text);
    int err = check_replaceable(path);
    if (!err)
        err = zr_shake_random((uint8_t *)&nonce, sizeof nonce);
    if (err)
        return err;
    snprintf(whole, sizeof whole, "%s.%016llx", path, (unsigned long long)nonce);
    int fd = zr_above_standard(open(whole, O_CREAT | O_EXCL | O_WRONLY | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (fd < 0)
        return zr_fail(ZERO_ERR_IO, "cannot write where ranks meet: %.400s: %s", path,
                       zr_system_words(errno, why));
    err = put_text(fd, text);
    if (close(fd) && !err)
        err = -errno;
    if (!err)
        err = put_in_place(whole, path, may_replace);
    if (!err || err == -EEXIST)
        return err ? ZR_MEETING_FILE_TAKEN : 0;
    unlink(whole);
    return zr_fail(ZERO_ERR_IO, "cannot write where ranks meet: %.400s: %s", path,
                   zr_system_words(-err, why));
}

bool zr_meeting_file_is_there(const struct zr_world *w, const struct zr_meeting_file *f)
{
    char path[ZR_MEETING_PATH_CHARS], mine[ZR_MEETING_FILE_BYTES], text[ZR_MEETING_FILE_BYTES];
    struct stat st;
    zr_meeting_file_path(w, path);
    zr_meeting_file_print(f, mine);
    ssize_t n = load_meeting(path, &st, text);
    return n == (ssize_t)strlen(mine) && memcmp(text, mine, (size_t)n) == 0;
}

bool zr_meeting_file_remove(const struct zr_world *w, const struct zr_meeting_file *f)
{
    char path[ZR_MEETING_PATH_CHARS];
    zr_meeting_file_path(w, path);
    return zr_meeting_file_is_there(w, f) && unlink(path) == 0;
}

/* --- the other ranks --- */

static int say_absent(const char *path, char why[ZR_MEETING_WHY_CHARS])
{
    char folder[ZR_MEETING_PATH_CHARS];
    struct stat st;
    folder_of(path, folder);
    if (stat(folder, &st))
        snprintf(why, ZR_MEETING_WHY_CHARS, "its folder does not exist on this host: %s", strerror(errno));
    else
        snprintf(why, ZR_MEETING_WHY_CHARS,
                 "there is no such file on this host: rank 0 has not started, has given up and left, "
                 "has another ZERO_JOB or key, or does not share the folder");
    return ZR_MEETING_FILE_ABSENT;
}

/* Returns whether only its owner, who is this user, may write it. */
static bool may_follow(const struct stat *st, char why[ZR_MEETING_WHY_CHARS])
{
    why[0] = 0;
    if (!S_ISREG(st->st_mode))
        snprintf(why, ZR_MEETING_WHY_CHARS, "it is not a regular file");
    else if (geteuid() != 0 && st->st_uid != geteuid())
        snprintf(why, ZR_MEETING_WHY_CHARS, "the file belongs to user %ld, so user %ld does not trust it",
                 (long)st->st_uid, (long)geteuid());
    else if (st->st_mode & 022)
        snprintf(why, ZR_MEETING_WHY_CHARS,
                 "the file has mode %04o and is not trusted: others than its owner may write it",
                 (unsigned)(st->st_mode & 07777));
    return !why[0];
}

static bool is_of_job(const struct zr_world *w, const struct zr_meeting_file *f,
                      char why[ZR_MEETING_WHY_CHARS])
{
    char mark[ZR_MEETING_MARK_CHARS + 1];
    zr_shake_mark(w, mark);
    if (strcmp(mark, f->mark) != 0)
        snprintf(why, ZR_MEETING_WHY_CHARS,
                 "the file is of another job, \"%.100s\" (attempt %d, %d ranks, rank 0 on \"%.64s\"), or of "
                 "one with another key, and is ignored",
                 f->job, f->attempt, f->world, f->host);
    else if (f->attempt != w->attempt)
        snprintf(why, ZR_MEETING_WHY_CHARS,
                 "the file is of attempt %d of this job, but this rank is of attempt %d: the file is ignored",
                 f->attempt, w->attempt);
    else
        return true;
    return false;
}

int zr_meeting_file_read(const struct zr_world *w, struct zr_meeting_file *out,
                         char why[ZR_MEETING_WHY_CHARS])
{
    char path[ZR_MEETING_PATH_CHARS], text[ZR_MEETING_FILE_BYTES], shown[41], words[ZR_SYSTEM_WORDS];
    struct stat st;
    struct zr_meeting_file f;
    zr_meeting_file_path(w, path);
    ssize_t n = load_meeting(path, &st, text);
    if (n == -ENOENT)
        return say_absent(path, why);
    if (n < 0)
        snprintf(why, ZR_MEETING_WHY_CHARS, "it cannot be read: %s",
                 n == -ELOOP ? "it is a symbolic link" : zr_system_words((int)-n, words));
    if (n < 0 || !may_follow(&st, why))
        return ZR_MEETING_FILE_USELESS;
    if (zr_meeting_file_parse(text, (size_t)n, &f)) {
        if (is_of_job(w, &f, why))
            *out = f;
        return why[0] ? ZR_MEETING_FILE_USELESS : 0;
    }
    snprintf(shown, sizeof shown, "%.*s", n < 40 ? (int)n : 40, text);
    for (char *c = shown; *c; c++)
        *c = (char)((unsigned char)*c < 0x20 || (unsigned char)*c > 0x7e ? '?' : *c);
    snprintf(why, ZR_MEETING_WHY_CHARS,
             n ? "the file has other contents (%zd bytes, \"%s\")" : "the file is empty", n, shown);
    return ZR_MEETING_FILE_USELESS;
}
