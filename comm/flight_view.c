/* SPDX-License-Identifier: Apache-2.0 */
/* flight_view.c: checks flight recorder snapshots, reads and writes their files, and describes them in
 * words. */
#include "comm/flight_view.h"
#include "comm/post.h"
#include "kernels/alloc.h"
#include "kernels/limits.h"
#include "kernels/standard_fds.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEAD_BYTES = offsetof(struct zr_flight_view, ops), MAX_WORLD = 1 << 24 };

_Static_assert(HEAD_BYTES % 8 == 0 && sizeof(struct zr_flight_op) % 8 == 0, "no padding before operations");

/* ---- checks ---- */

static int refuse_file(const char *what)
{
    return zr_fail(ZERO_ERR_ARG, "this is not a flight recorder's file, or it is damaged: %s", what);
}

static bool ends(const char *text, size_t n)
{
    return memchr(text, 0, n) != NULL;
}

static int check_head(const struct zr_flight_view *v)
{
    if (v->magic != ZR_FLIGHT_MAGIC)
        return refuse_file("it does not begin like one");
    if (v->version != ZR_FLIGHT_VERSION || v->head_bytes != HEAD_BYTES)
        return zr_fail(ZERO_ERR_ARG,
                       "a flight recorder's file of version %u with a head of %u bytes: this program reads "
                       "version %d with %d bytes",
                       v->version, v->head_bytes, ZR_FLIGHT_VERSION, (int)HEAD_BYTES);
    if (v->state != ZR_FLIGHT_OPEN && v->state != ZR_FLIGHT_CLOSED)
        return refuse_file("its state is unknown");
    if (v->world < 1 || v->world > MAX_WORLD || v->rank < 0 || v->rank >= v->world || v->attempt < 0)
        return refuse_file("its rank, world or attempt is out of range");
    if (!ends(v->job, sizeof v->job) || !ends(v->host, sizeof v->host) || !ends(v->text, sizeof v->text) ||
        !ends(v->loop.name, sizeof v->loop.name))
        return refuse_file("a text in it does not end");
    if (v->n_ops < 0 || v->n_ops > ZR_FLIGHT_OPS)
        return refuse_file("it counts more operations than a recorder has");
    return 0;
}

static int check_role(const struct zr_flight_view *v, const struct zr_flight_role_view *r)
{
    if (r->size < 0 || r->size > v->world || r->first < 0 || r->first >= v->world || r->place < 0 ||
        (r->size && r->place >= r->size))
        return refuse_file("a communicator's size or place is out of range");
    return 0;
}

static int check_op(const struct zr_flight_op *o, uint64_t before)
{
    if (o->role < 0 || o->role >= ZR_ROLES || o->op < ZR_OP_ALL_GATHER || o->op >= ZR_OPS)
        return refuse_file("an operation of an unknown kind");
    if (o->serial <= before || o->seq < 1 || o->bytes < 0 || o->unit < -1)
        return refuse_file("an operation out of order or out of range");
    return 0;
}

int zr_flight_check(const struct zr_flight_view *v)
{
    int err = check_head(v);
    for (int i = 0; !err && i < ZR_ROLES; i++)
        err = check_role(v, &v->role[i]);
    for (int i = 0; !err && i < v->n_ops; i++)
        err = check_op(&v->ops[i], i ? v->ops[i - 1].serial : 0);
    return err;
}

/* ---- files ---- */

size_t zr_flight_bytes(const struct zr_flight_view *v)
{
    return HEAD_BYTES + (size_t)v->n_ops * sizeof *v->ops;
}

int zr_flight_parse(const void *data, size_t n, struct zr_flight_view *out)
{
    if (n < HEAD_BYTES)
        return refuse_file("it is too short");
    memcpy(out, data, HEAD_BYTES);
    int err = check_head(out);
    if (err)
        return err;
    if (n != zr_flight_bytes(out))
        return refuse_file("its length is not the one that it states");
    memcpy(out->ops, (const char *)data + HEAD_BYTES, n - HEAD_BYTES);
    return zr_flight_check(out);
}

int zr_flight_read_file(const char *path, struct zr_flight_view *out)
{
    char why[ZR_SYSTEM_WORDS];
    FILE *f = fopen(path, "rb");
    if (!f)
        return zr_fail(ZERO_ERR_IO, "%s: %s", path, zr_system_words(errno, why));
    size_t room = sizeof *out + 1; /* a longer file is not a recorder's */
    char *data;
    if (ZR_ALLOC(data, (int64_t)room, "the bytes of %s", path)) {
        fclose(f);
        return ZERO_ERR_NOMEM;
    }
    errno = 0;
    size_t n = fread(data, 1, room, f);
    int err =
        ferror(f) ? zr_fail(ZERO_ERR_IO, "%s: %s", path, strerror(errno)) : zr_flight_parse(data, n, out);
    free(data);
    fclose(f);
    return err == ZERO_ERR_ARG ? zr_fail_more(err, "%s", path) : err;
}

static bool is_plain(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '-' || c == '_';
}

static int write_all(const char *path, const void *data, size_t n)
{
    int fd = zr_above_standard(open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    size_t at = 0;
    while (fd >= 0 && at < n) {
        ssize_t one = zr_limited_write(fd, (const char *)data + at, n - at);
        if (one < 0 && errno != EINTR)
            break;
        at += one > 0 ? (size_t)one : 0;
    }
    int error = fd < 0 || at < n ? errno : 0;
    if (fd >= 0 && close(fd) && !error)
        error = errno;
    return error;
}

enum { PART_CHARS = ZR_FLIGHT_PATH + 16 };

/* Each process has its own temporary file, as a rank and zero-run may write the same file at the same
 * time. */
static void name_part(const char *path, int pid, char part[PART_CHARS])
{
    snprintf(part, PART_CHARS, "%s.%d", path, pid);
}

void zr_flight_remove_part(const struct zr_flight_view *v, const char *path)
{
    char part[PART_CHARS];
    name_part(path, v->pid, part);
    unlink(part);
}

int zr_flight_write_file(const struct zr_flight_view *v, const char *folder, char path[ZR_FLIGHT_PATH])
{
    char job[ZR_FLIGHT_NAME], temp[PART_CHARS], why[ZR_SYSTEM_WORDS];
    snprintf(job, sizeof job, "%s", v->job[0] ? v->job : "job");
    for (char *c = job; *c; c++)
        *c = is_plain(*c) ? *c : '_';
    int n = snprintf(path, ZR_FLIGHT_PATH, "%s/flight-%s-attempt%d-rank%d", folder, job, v->attempt, v->rank);
    if (n >= ZR_FLIGHT_PATH)
        return zr_fail(ZERO_ERR_ARG, "the name of the folder for flight recorders is too long: %.100s...",
                       folder);
    name_part(path, (int)getpid(), temp);
    int error = write_all(temp, v, zr_flight_bytes(v));
    if (!error && rename(temp, path))
        error = errno;
    if (!error)
        return 0;
    unlink(temp);
    return zr_fail(ZERO_ERR_IO, "%s: %s", path, zr_system_words(error, why));
}

/* ---- in words ---- */

bool zr_flight_ended_by_launcher(const struct zr_flight_view *v)
{
    return v->has_ended && v->signal > 0 && v->signal < 32 && v->asked >> v->signal & 1;
}

const struct zr_flight_op *zr_flight_last_op(const struct zr_flight_view *v)
{
    const struct zr_flight_op *found = NULL;
    for (int i = v->n_ops; i-- > 0 && !(found && found->started_ns);) {
        const struct zr_flight_op *o = &v->ops[i];
        if (!o->finished_ns && (!found || o->started_ns))
            found = o;
    }
    return found;
}

void zr_flight_describe_call(const struct zr_flight_call *c, char text[ZR_FLIGHT_CALL_CHARS])
{
    const struct zr_logged_call called = zr_call_log_unpack(c->call, 0);
    char call[ZR_CALL_LOG_CHARS];
    zr_call_log_describe(&called, call);
    snprintf(text, ZR_FLIGHT_CALL_CHARS, "%s%s", call, c->left_ns ? ", which had returned" : "");
}

void zr_flight_describe_op(const struct zr_flight_op *o, char *text, size_t n_text)
{
    char op[96];
    const struct zr_post post = {.seq = o->seq, .op = o->op, .unit = o->unit};
    zr_post_describe(&post, op, sizeof op);
    snprintf(text, n_text, "%s of %s", op, zr_role_name((enum zr_role)o->role));
}

void zr_flight_last_words(const struct zr_flight_view *v, char *text, size_t n_text)
{
    const struct zr_flight_op *o = zr_flight_last_op(v);
    char call[ZR_FLIGHT_CALL_CHARS], op[160] = "", described[128];
    text[0] = 0;
    if (!v->call.number)
        return;
    zr_flight_describe_call(&v->call, call);
    if (o) {
        zr_flight_describe_op(o, described, sizeof described);
        snprintf(op, sizeof op, "; %s had %s", described, o->started_ns ? "begun" : "not begun");
    }
    snprintf(text, n_text, "; its last call was %s%s", call, op);
}
