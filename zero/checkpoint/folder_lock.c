/* SPDX-License-Identifier: Apache-2.0 */
/* folder_lock.c: takes, finds and releases the lock of a folder. */
#include "zero/checkpoint/folder_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <uv.h>

#define LOCK_NAME    ".lock"
#define HOLDER_BYTES 256 /* size of the file; it is fixed, so that nothing of an earlier holder remains */
#define HOST_BYTES   65
#define MAX_TRIES    1000

/* ---- who holds it ---- */

static void print_host(char host[HOST_BYTES])
{
    size_t n = HOST_BYTES;
    if (uv_os_gethostname(host, &n))
        snprintf(host, HOST_BYTES, "unknown");
}

/* Writes who holds the lock, for messages only. The lock holds even if this fails. */
static void write_holder(const struct zr_files *fs, int fd, const char *path)
{
    char text[HOLDER_BYTES + 1], host[HOST_BYTES];
    const char *job = getenv("SLURM_JOB_ID");
    print_host(host);
    int n = snprintf(text, sizeof text, "process %ld on host %s%s%.40s", (long)getpid(), host,
                     job ? ", job " : "", job ? job : "");
    memset(text + n, ' ', (size_t)(HOLDER_BYTES - n));
    text[HOLDER_BYTES - 1] = '\n';
    if (zr_file_write(fs, fd, path, text, HOLDER_BYTES, 0))
        zr_fail(0, "%s", ""); /* clears the message, because the lock is taken all the same */
}

/* Who made the file. UNKNOWN: it is empty, or has only a beginning of what write_holder writes. A power
 * failure may have left it, or it is the user's. */
enum maker { LIBZERO, UNKNOWN, USER };

/* Finds who made the file. A power failure may have left zeros in place of its end. */
static enum maker find_maker(const char *text, int64_t n_bytes)
{
    static const char pattern[] = "process # on host "; /* # stands for digits */
    const char *p = pattern;
    for (int64_t i = (int64_t)strlen(text); i < n_bytes; i++)
        if (text[i])
            return USER;
    for (; *p && *text; p++) {
        size_t n = *p == '#' ? strspn(text, "0123456789") : *p == *text;
        if (!n)
            return USER;
        text += n;
    }
    return *p ? UNKNOWN : LIBZERO;
}

/* Reads who holds the lock; "" if nobody has written that yet. A file that is the user's is an error. */
static int read_holder(const struct zr_files *fs, int fd, const char *path, char text[HOLDER_BYTES + 1],
                       enum maker *maker)
{
    int64_t n;
    memset(text, 0, HOLDER_BYTES + 1);
    ZR_TRY(zr_file_size(fs, fd, path, &n));
    if (n <= HOLDER_BYTES)
        ZR_TRY(zr_file_read(fs, fd, path, text, n, 0));
    *maker = n > HOLDER_BYTES ? USER : find_maker(text, n);
    if (*maker == UNKNOWN)
        *text = 0;
    if (*maker == USER)
        return zr_fail(
            ZERO_ERR_ARG,
            "%s: libzero did not make this file and does not change it, but needs its name for the "
            "folder's lock; allowed: a folder without such a file",
            path);
    return 0;
}

static int fail_held(const char *folder, char text[HOLDER_BYTES + 1])
{
    char host[HOST_BYTES], other[HOST_BYTES];
    const char *more = "";
    long pid;
    size_t n = strlen(text);
    for (size_t i = 0; i < n; i++)
        if (text[i] < ' ' || text[i] > '~')
            text[i] = ' ';
    while (n > 0 && text[n - 1] == ' ')
        text[--n] = 0;
    print_host(host);
    if (sscanf(text, "process %ld on host %64[^, ]", &pid, other) == 2 && !strcmp(host, other)) {
        if (pid == (long)getpid())
            more = ", which is this process: another of its contexts saves there";
        else if (kill((pid_t)pid, 0) && errno == ESRCH)
            more = ", which has ended, but its child process still holds the lock: end that child";
    }
    return zr_fail(ZERO_ERR_IO,
                   "%s: another run saves into this folder (%s%s), and the two would remove each other's "
                   "saves; give each run its own folder",
                   folder, n > 0 ? text : "it is not known which", more);
}

/* ---- taking and releasing ---- */

/* Takes the lock. The last holder may remove the file after it was opened here and before it is locked.
 * Another file may then have its name, so the lock is tried again. The holder is read before the lock is
 * taken, so that a file that is the user's (USER) is never locked. A file that may be the user's (UNKNOWN) is
 * locked, but not written, unless this call made it. */
static int take(const struct zr_files *fs, const char *folder, struct zr_log *log, struct zr_folder_lock *out)
{
    char path[ZR_PATH_BYTES], holder[HOLDER_BYTES + 1];
    int err = zr_path_join(path, folder, LOCK_NAME);
    for (int i = 0; !err && i < MAX_TRIES; i++) {
        enum zr_lock_outcome outcome = ZR_LOCK_TAKEN;
        enum maker maker = UNKNOWN;
        bool is_there = false, is_new;
        int fd = -1;
        err = zr_file_open_or_make(fs, path, &is_new, &fd);
        if (err)
            break;
        if (fd < 0)
            continue;
        err = read_holder(fs, fd, path, holder, &maker);
        if (!err)
            err = zr_file_lock(fs, fd, path, &outcome);
        if (!err && outcome == ZR_LOCK_BUSY)
            err = fail_held(folder, holder);
        if (!err && outcome == ZR_LOCK_TAKEN)
            err = zr_file_is_at(fs, fd, path, &is_there);
        if (!err && outcome == ZR_LOCK_TAKEN && is_there) {
            out->stays = maker == UNKNOWN && !is_new;
            if (!out->stays)
                write_holder(fs, fd, path);
            out->fd = fd;
            return 0;
        }
        struct zr_saved_error kept;
        zr_error_save(&kept, err);
        zr_file_close(fs, fd, path);
        if (err)
            return zr_error_restore(&kept);
        if (outcome == ZR_LOCK_UNSUPPORTED) {
            zr_warn(log,
                    "%s: the file system has no locks, so another run that saves into this folder is not "
                    "noticed; the two would remove each other's saves",
                    folder);
            out->fd = -1;
            return 0;
        }
    }
    return err ? err : zr_fail(ZERO_ERR_IO, "%s: other processes keep taking and releasing its lock", path);
}

/* *in_place: the lock's path still leads to the file that is locked. It leads to another one, or to none, if
 * somebody renamed or removed the folder or the file. Always true without file system locks. */
static int check_in_place(const struct zr_folder_lock *l, bool *in_place)
{
    char path[ZR_PATH_BYTES];
    *in_place = l->fd < 0;
    int err = *in_place ? 0 : zr_path_join(path, l->folder, LOCK_NAME);
    return err || *in_place ? err : zr_file_is_at(l->fs, l->fd, path, in_place);
}

/* Finds the lock file in a folder that was renamed. A lock file that was renamed itself is not searched
 * for. */
static bool find_renamed(const struct zr_folder_lock *l, char path[ZR_PATH_BYTES])
{
    bool is_there = false;
    if (!l->fs->path_of || l->fs->path_of(l->fs->arg, l->fd, path, ZR_PATH_BYTES))
        return false;
    const char *name = strrchr(path, '/');
    return name && !strcmp(name, "/" LOCK_NAME) && !zr_file_is_at(l->fs, l->fd, path, &is_there) && is_there;
}

/* Releases a lock. The file is removed while the lock is held, because afterwards it may be another holder's.
 * A file that may be the user's stays. */
static void give_back(const struct zr_folder_lock *l)
{
    char path[ZR_PATH_BYTES];
    bool in_place;
    if (l->fd < 0 || zr_path_join(path, l->folder, LOCK_NAME))
        return;
    if (!l->stays && l->pid == (int64_t)getpid() &&
        ((!check_in_place(l, &in_place) && in_place) || find_renamed(l, path)))
        zr_file_remove(l->fs, path);
    zr_file_close(l->fs, l->fd, path);
}

/* *at: the folder's index in the list, or locks->n. *in_place: the lock in the list is still the folder's. */
static int find(const struct zr_folder_locks *locks, const struct zr_files *fs, const char *folder, int *at,
                bool *in_place)
{
    *at = 0;
    while (*at < locks->n && (locks->list[*at].fs != fs || strcmp(locks->list[*at].folder, folder) != 0))
        ++*at;
    *in_place = false;
    return *at < locks->n ? check_in_place(&locks->list[*at], in_place) : 0;
}

int zr_folder_find_lock(const struct zr_folder_locks *locks, const struct zr_files *fs, const char *folder,
                        bool *held)
{
    int at;
    return find(locks, fs, folder, &at, held);
}

int zr_folder_lock(struct zr_folder_locks *locks, const struct zr_files *fs, const char *folder,
                   struct zr_log *log)
{
    struct zr_folder_lock *list = locks->list, found = {.fs = fs, .pid = (int64_t)getpid()};
    int at;
    bool in_place;
    ZR_TRY(find(locks, fs, folder, &at, &in_place));
    if (at < locks->n && !in_place) {
        give_back(&list[at]);
        memmove(list + at, list + at + 1, (size_t)(--locks->n - at) * sizeof *list);
        at = locks->n;
    }
    if (at < locks->n) {
        found = list[at];
    } else {
        snprintf(found.folder, sizeof found.folder, "%s", folder);
        ZR_TRY(take(fs, folder, log, &found));
        if (locks->n == ZR_MAX_FOLDER_LOCKS)
            give_back(&list[--locks->n]);
        at = locks->n++;
    }
    memmove(list + 1, list, (size_t)at * sizeof *list);
    list[0] = found;
    return 0;
}

void zr_folder_unlock_all(struct zr_folder_locks *locks)
{
    while (locks->n)
        give_back(&locks->list[--locks->n]);
}
