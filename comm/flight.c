/* SPDX-License-Identifier: Apache-2.0 */
/* flight.c: the flight recorder's memory, entries, and copies.
 *
 * The memory is shared, so that other processes can read it after this one has crashed. Writers use atomic
 * stores without locks. An entry of a ring has a number, which is 0 while the entry is written: a reader that
 * finds another number before or after its copy drops the copy. */
#include "comm/flight_view.h"
#include "kernels/alloc.h"
#include "kernels/limits.h"
#include "kernels/standard_fds.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef F_ADD_SEALS
#include <linux/fcntl.h>
#endif

enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, FIRST_FD = 3 };

/* CALLS: the ring of the latest calls that the program entered. Readers want the last one only; the others
 * give a reader time to copy it. A reader that is too slow for that tries again, up to TRIES times. */
enum { CALLS = 16, TRIES = 16 };

/* The communicators whose ranks compare their programs' calls: ZR_ROLE_CONTROL, TP, CP and WORLD. */
enum { FIRST_LOG = ZR_ROLE_CONTROL, LOGS = ZR_ROLE_WORLD - ZR_ROLE_CONTROL + 1 };
_Static_assert((int)LOGS == (int)ZR_SHARED_CALLS, "ranks send all of their logs to rank 0");

/* A call of the program into the library. call is its name and arguments, packed by zr_call_log_pack. left_ns
 * is 0 until it returns. */
struct call {
    _Atomic uint64_t number, call;
    _Atomic int64_t entered_ns, left_ns;
};

/* An operation of a communicator. serial counts all operations, and seq those of one role. role_op is the
 * enum zr_role and the enum zr_op, step_unit the step and the unit, each in one word. call is the call that
 * queued the operation, and call_hash the hash of all calls up to it. */
struct op {
    _Atomic uint64_t serial;
    _Atomic uint64_t seq, role_op, step_unit, bytes, call_hash, call;
    _Atomic int64_t queued_ns, issued_ns, started_ns, finished_ns;
};

/* A communicator's role: its group (size, this rank's place, the first member, a hash of the members), and
 * how many operations were issued, started and finished. The issuing thread and the stream's thread write to
 * separate cache lines. */
struct role {
    _Alignas(64) _Atomic int32_t size;
    _Atomic int32_t place, first;
    _Atomic uint64_t group, issued;
    _Alignas(64) _Atomic uint64_t started;
    _Atomic uint64_t finished;
};

/* The memory that other processes read. */
struct zr_flight_record {
    /* Process that owns the record. 0: none. */
    _Atomic int32_t owner;
    /* enum zr_flight_state. 0: nothing below is written. */
    _Atomic int32_t state;
    int32_t rank, world, attempt, pid;
    char job[ZR_FLIGHT_NAME], host[ZR_FLIGHT_NAME];
    int64_t opened_ns, epoch_ns;
    /* text and failed_ns are written before code. */
    _Atomic int32_t code;
    int64_t failed_ns;
    char text[ZR_FLIGHT_TEXT];
    struct role role[ZR_ROLES];
    /* Written by the model's thread. */
    _Alignas(64) _Atomic uint64_t n_calls;
    _Atomic uint64_t n_queued;
    _Atomic int64_t queued_ns;
    /* Written by the thread that carries out jobs: the job that it carries out, and the number of jobs that
     * are done. The name is two words. */
    _Alignas(64) _Atomic uint64_t job_name[ZR_FLIGHT_JOB / 8];
    _Atomic int32_t job_unit;
    _Atomic uint64_t n_done;
    _Atomic int64_t job_ns;
    /* Written by the thread that issues operations. */
    _Alignas(64) _Atomic uint64_t n_ops;
    struct call call[CALLS];
    struct op op[ZR_FLIGHT_OPS];
    /* Written by the model's thread. */
    struct zr_call_log log[LOGS];
};

struct zr_flight {
    struct zr_flight_record *rec;
    /* the shared memory; -1: memory of this process alone */
    int fd;
    /* zero-run made the memory, and it stays for the next context */
    bool given;
    char folder[ZR_FLIGHT_PATH];
    /* the first failure was recorded; a file was written */
    _Atomic bool failed, saved;
    /* Used by the model's thread: depth of nested calls, and the outermost call. */
    int depth;
    struct zr_flight_from now;
};

/* A reader that sees what PUBLISH stored also sees everything that was PUT before. */
#define PUT(to, value)     atomic_store_explicit(&(to), (value), memory_order_relaxed)
#define PUBLISH(to, value) atomic_store_explicit(&(to), (value), memory_order_release)
#define GET(from)          atomic_load_explicit(&(from), memory_order_relaxed)

/* ---- memory ---- */

static size_t record_bytes(void)
{
    return (sizeof(struct zr_flight_record) + 4095) & ~(size_t)4095;
}

int zr_flight_make(void)
{
    int err, fd = zr_above_standard(memfd_create("zero-flight", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd < 0)
        return -errno;
    do /* allocate now, so that a lack of memory is no fault in the middle of a step */
        err = zr_limited_fallocate(fd, 0, 0, (off_t)record_bytes()) ? errno : 0;
    while (err == EINTR);
    if (!err && fcntl(fd, F_ADD_SEALS, SEALS))
        err = errno;
    if (!err)
        return fd;
    close(fd);
    return -err;
}

/* Maps a record. Returns NULL if fd is not the memory of a record. */
static struct zr_flight_record *map_record(int fd, int protection)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS || fstat(fd, &st) || st.st_size != (off_t)record_bytes())
        return NULL;
    void *p = mmap(NULL, record_bytes(), protection, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* Takes a record that has no owner, or whose owner has ended, such as a program that a script ran earlier. */
static bool claim(struct zr_flight_record *rec)
{
    int32_t owner = 0, pid = (int32_t)getpid();
    while (!atomic_compare_exchange_strong(&rec->owner, &owner, pid))
        if (owner == pid || kill(owner, 0) == 0 || errno != ESRCH)
            return false;
    return true;
}

/* Takes the record that zero-run made for this rank. */
static struct zr_flight_record *take_given(int *fd)
{
    const char *text = getenv("ZERO_FLIGHT_FD");
    char *end;
    long given = text && *text ? strtol(text, &end, 10) : -1;
    if (given < FIRST_FD || given > INT32_MAX || *end)
        return NULL;
    struct zr_flight_record *rec = map_record((int)given, PROT_READ | PROT_WRITE);
    if (rec && !claim(rec)) {
        munmap(rec, record_bytes());
        rec = NULL;
    }
    *fd = rec ? (int)given : -1;
    return rec;
}

/* Makes a record of this process: shared memory, or, with the reason in why, ordinary memory. */
static struct zr_flight_record *make_own(int *fd, char why[ZR_FLIGHT_TEXT])
{
    char words[ZR_SYSTEM_WORDS];
    *fd = zr_flight_make();
    struct zr_flight_record *rec = *fd < 0 ? NULL : map_record(*fd, PROT_READ | PROT_WRITE);
    if (rec && claim(rec))
        return rec;
    snprintf(why, ZR_FLIGHT_TEXT, "no shared memory for the flight recorder: %s",
             zr_system_words(*fd < 0 ? -*fd : errno, words));
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
    void *p = aligned_alloc(4096, record_bytes());
    if (p)
        memset(p, 0, record_bytes());
    return p;
}

int64_t zr_flight_epoch_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec - zr_now_ns();
}

static void begin_record(struct zr_flight_record *rec, const struct zr_flight_owner *owner)
{
    size_t first = offsetof(struct zr_flight_record, state);
    memset((char *)rec + first, 0, sizeof *rec - first);
    rec->rank = owner->rank;
    rec->world = owner->world;
    rec->attempt = owner->attempt;
    rec->pid = (int32_t)getpid();
    snprintf(rec->job, sizeof rec->job, "%s", owner->job);
    gethostname(rec->host, sizeof rec->host - 1);
    rec->opened_ns = zr_now_ns();
    rec->epoch_ns = zr_flight_epoch_ns();
    PUBLISH(rec->state, ZR_FLIGHT_OPEN);
}

int zr_flight_open(const struct zr_flight_owner *owner, struct zr_flight **out, char why[ZR_FLIGHT_TEXT])
{
    const char *folder = getenv("ZERO_FLIGHT_DIR");
    struct zr_flight *f = calloc(1, sizeof *f);
    *out = NULL;
    why[0] = 0;
    if (f)
        f->rec = take_given(&f->fd);
    if (f)
        f->given = f->rec != NULL;
    if (f && !f->rec)
        f->rec = make_own(&f->fd, why);
    if (!f || !f->rec) {
        free(f);
        return zr_fail(ZERO_ERR_NOMEM, "no memory for the flight recorder");
    }
    snprintf(f->folder, sizeof f->folder, "%s", folder ? folder : "");
    begin_record(f->rec, owner);
    *out = f;
    return 0;
}

void zr_flight_close(struct zr_flight *f)
{
    if (!f)
        return;
    if (f->depth) { /* the call that closes the context has not left yet */
        f->depth = 1;
        zr_flight_leave(f);
    }
    PUBLISH(f->rec->state, ZR_FLIGHT_CLOSED);
    atomic_store(&f->rec->owner, 0);
    if (f->fd < 0) {
        free(f->rec);
    } else {
        munmap(f->rec, record_bytes());
        if (!f->given)
            close(f->fd);
    }
    free(f);
}

/* ---- the model's thread ---- */

void zr_flight_enter(struct zr_flight *f, const struct zr_logged_call *call)
{
    if (!f || f->depth++)
        return;
    f->now = (struct zr_flight_from){zr_now_ns(), zr_call_log_pack(call)};
    uint64_t n = GET(f->rec->n_calls) + 1;
    struct call *c = &f->rec->call[n % CALLS];
    PUT(c->number, 0);
    atomic_thread_fence(memory_order_release);
    PUT(c->call, f->now.call);
    PUT(c->entered_ns, f->now.queued_ns);
    PUT(c->left_ns, 0);
    PUBLISH(c->number, n);
    PUBLISH(f->rec->n_calls, n);
}

void zr_flight_leave(struct zr_flight *f)
{
    if (f && --f->depth == 0)
        PUBLISH(f->rec->call[GET(f->rec->n_calls) % CALLS].left_ns, zr_now_ns());
}

struct zr_logged_call zr_flight_entered(const struct zr_flight *f)
{
    return zr_call_log_unpack(f && f->depth ? f->now.call : 0, 0);
}

void zr_flight_called(struct zr_flight *f, enum zr_role role, const struct zr_logged_call *call)
{
    if (f)
        zr_call_log_put(&f->rec->log[role - FIRST_LOG], call);
}

struct zr_flight_from zr_flight_queue(struct zr_flight *f)
{
    if (!f)
        return (struct zr_flight_from){0};
    if (!f->depth)
        f->now = (struct zr_flight_from){zr_now_ns(), 0};
    PUT(f->rec->queued_ns, f->now.queued_ns);
    PUT(f->rec->n_queued, GET(f->rec->n_queued) + 1);
    return f->now;
}

/* ---- the thread that carries out jobs ---- */

/* Stores the name as words, because a reader may copy it at the same time. */
static void name_job(struct zr_flight_record *rec, const char *name)
{
    uint64_t words[ZR_FLIGHT_JOB / 8] = {0};
    memcpy(words, name, strnlen(name, ZR_FLIGHT_JOB - 1));
    for (size_t i = 0; i < ZR_FLIGHT_JOB / 8; i++)
        PUT(rec->job_name[i], words[i]);
}

void zr_flight_job(struct zr_flight *f, const char *name, int32_t unit)
{
    if (!f)
        return;
    PUT(f->rec->job_unit, unit);
    PUT(f->rec->job_ns, zr_now_ns());
    name_job(f->rec, name);
}

void zr_flight_job_done(struct zr_flight *f)
{
    if (!f)
        return;
    name_job(f->rec, "");
    PUT(f->rec->n_done, GET(f->rec->n_done) + 1);
}

/* ---- operations ---- */

void zr_flight_role(struct zr_flight *f, enum zr_role role, const struct zr_group *group)
{
    if (!f)
        return;
    struct role *r = &f->rec->role[role];
    uint64_t members = 0;
    for (int32_t i = 0; i < group->size; i++)
        members = members * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)zr_group_member(group, i) + 1;
    PUT(r->place, group->rank);
    PUT(r->first, zr_group_member(group, 0));
    PUT(r->group, members);
    PUBLISH(r->size, group->size);
}

void zr_flight_issue(struct zr_flight *f, enum zr_role role, enum zr_op op, int64_t bytes, struct zr_tag *tag)
{
    if (!f)
        return;
    struct role *r = &f->rec->role[role];
    uint64_t serial = atomic_fetch_add_explicit(&f->rec->n_ops, 1, memory_order_relaxed) + 1;
    struct op *o = &f->rec->op[serial % ZR_FLIGHT_OPS];
    struct zr_flight_from from = tag->from;
    int64_t now = zr_now_ns();
    if (!from.queued_ns)
        from = (struct zr_flight_from){now, f->now.call};
    PUT(o->serial, 0);
    atomic_thread_fence(memory_order_release);
    PUT(o->seq, GET(r->issued) + 1);
    PUT(o->role_op, (uint64_t)role << 32 | (uint64_t)op);
    PUT(o->step_unit, (uint64_t)tag->step << 32 | (uint32_t)tag->unit);
    PUT(o->bytes, (uint64_t)bytes);
    PUT(o->call_hash, tag->call_hash);
    PUT(o->call, from.call);
    PUT(o->queued_ns, from.queued_ns);
    PUT(o->issued_ns, now);
    PUT(o->started_ns, 0);
    PUT(o->finished_ns, 0);
    PUBLISH(o->serial, serial);
    PUT(r->issued, GET(r->issued) + 1);
    tag->mark = (struct zr_flight_mark){f, serial};
}

/* Finds the entry of an operation, and its role. Returns NULL if a later operation has overwritten the
 * entry. */
static struct op *entry_of(const struct zr_flight_mark *m, struct role **role)
{
    if (!m->flight)
        return NULL;
    struct zr_flight_record *rec = m->flight->rec;
    struct op *o = &rec->op[m->serial % ZR_FLIGHT_OPS];
    *role = &rec->role[(GET(o->role_op) >> 32) % ZR_ROLES];
    return GET(o->serial) == m->serial ? o : NULL;
}

void zr_flight_start(const struct zr_flight_mark *m)
{
    struct role *r;
    struct op *o = entry_of(m, &r);
    if (!o)
        return;
    PUBLISH(o->started_ns, zr_now_ns());
    PUBLISH(r->started, GET(o->seq));
}

void zr_flight_finish(const struct zr_flight_mark *m)
{
    struct role *r;
    struct op *o = entry_of(m, &r);
    if (!o)
        return;
    PUBLISH(o->finished_ns, zr_now_ns());
    PUBLISH(r->finished, GET(o->seq));
}

/* ---- failures ---- */

void zr_flight_fail(struct zr_flight *f, int code, const char *text)
{
    if (!f || atomic_exchange(&f->failed, true))
        return;
    snprintf(f->rec->text, sizeof f->rec->text, "%s", text);
    f->rec->failed_ns = zr_now_ns();
    PUBLISH(f->rec->code, code);
}

int zr_flight_save(struct zr_flight *f, char path[ZR_FLIGHT_PATH])
{
    path[0] = 0;
    if (!f || !f->folder[0] || atomic_exchange(&f->saved, true))
        return 0;
    struct zr_flight_view *v;
    ZR_TRY(ZR_ALLOC(v, 1, "a copy of the flight recorder"));
    zr_flight_copy(f, v);
    int err = zr_flight_write_file(v, f->folder, path);
    free(v);
    return err;
}

/* ---- copies ---- */

/* Returns false if the entry was written before or during the copy. */
static bool copy_call(const struct call *c, uint64_t number, struct zr_flight_call *out)
{
    if (atomic_load_explicit(&c->number, memory_order_acquire) != number)
        return false;
    *out = (struct zr_flight_call){number, GET(c->call), GET(c->entered_ns), GET(c->left_ns)};
    atomic_thread_fence(memory_order_acquire);
    return GET(c->number) == number;
}

static bool copy_op(const struct op *o, uint64_t serial, struct zr_flight_op *out)
{
    if (atomic_load_explicit(&o->serial, memory_order_acquire) != serial)
        return false;
    uint64_t role_op = GET(o->role_op), step_unit = GET(o->step_unit);
    *out = (struct zr_flight_op){.serial = serial,
                                 .seq = GET(o->seq),
                                 .role = (int32_t)(role_op >> 32),
                                 .op = (int32_t)role_op,
                                 .unit = (int32_t)step_unit,
                                 .step = (uint32_t)(step_unit >> 32),
                                 .bytes = (int64_t)GET(o->bytes),
                                 .call_hash = GET(o->call_hash),
                                 .call = GET(o->call),
                                 .queued_ns = GET(o->queued_ns),
                                 .issued_ns = GET(o->issued_ns),
                                 .started_ns = GET(o->started_ns),
                                 .finished_ns = GET(o->finished_ns)};
    atomic_thread_fence(memory_order_acquire);
    return GET(o->serial) == serial;
}

/* Reads the counts in an order that never shows more operations finished than started, or more started than
 * issued. */
static void copy_roles(const struct zr_flight_record *rec, struct zr_flight_view *out)
{
    for (int i = 0; i < ZR_ROLES; i++) {
        const struct role *r = &rec->role[i];
        uint64_t finished = atomic_load_explicit(&r->finished, memory_order_acquire);
        uint64_t started = atomic_load_explicit(&r->started, memory_order_acquire);
        out->role[i] = (struct zr_flight_role_view){
            .size = atomic_load_explicit(&r->size, memory_order_acquire),
            .place = GET(r->place),
            .first = GET(r->first),
            .group = GET(r->group),
            .issued = GET(r->issued),
            .started = started,
            .finished = finished,
        };
    }
}

static void copy_loop(const struct zr_flight_record *rec, struct zr_flight_loop *out)
{
    uint64_t words[ZR_FLIGHT_JOB / 8];
    for (size_t i = 0; i < ZR_FLIGHT_JOB / 8; i++)
        words[i] = GET(rec->job_name[i]);
    memcpy(out->name, words, sizeof words);
    out->name[ZR_FLIGHT_JOB - 1] = 0;
    out->unit = GET(rec->job_unit);
    out->n_queued = GET(rec->n_queued);
    out->n_done = GET(rec->n_done);
    out->since_ns = GET(rec->job_ns);
    out->queued_ns = GET(rec->queued_ns);
}

static void copy_ops(const struct zr_flight_record *rec, struct zr_flight_view *out)
{
    uint64_t n = atomic_load_explicit(&rec->n_ops, memory_order_acquire);
    for (uint64_t i = n > ZR_FLIGHT_OPS ? n - ZR_FLIGHT_OPS + 1 : 1; i <= n; i++)
        out->n_ops += copy_op(&rec->op[i % ZR_FLIGHT_OPS], i, &out->ops[out->n_ops]);
}

static void copy_record(const struct zr_flight_record *rec, struct zr_flight_view *out)
{
    memset(out, 0, sizeof *out);
    out->magic = ZR_FLIGHT_MAGIC;
    out->version = ZR_FLIGHT_VERSION;
    out->head_bytes = (uint32_t)offsetof(struct zr_flight_view, ops);
    out->state = atomic_load_explicit(&rec->state, memory_order_acquire);
    out->rank = rec->rank;
    out->world = rec->world;
    out->attempt = rec->attempt;
    out->pid = rec->pid;
    memcpy(out->job, rec->job, sizeof out->job - 1);
    memcpy(out->host, rec->host, sizeof out->host - 1);
    out->code = atomic_load_explicit(&rec->code, memory_order_acquire);
    if (out->code)
        memcpy(out->text, rec->text, sizeof out->text - 1);
    out->opened_ns = rec->opened_ns;
    out->epoch_ns = rec->epoch_ns;
    out->copied_ns = zr_now_ns();
    copy_roles(rec, out);
    copy_loop(rec, &out->loop);
    copy_ops(rec, out);
    (void)zr_flight_read_call(rec, &out->call);
}

void zr_flight_copy(struct zr_flight *f, struct zr_flight_view *out)
{
    copy_record(f->rec, out);
}

/* ---- other ranks on this host ---- */

bool zr_flight_where(const struct zr_flight *f, struct zr_shared_at *out)
{
    memset(out, 0, sizeof *out); /* no padding may be uninitialized, as it is sent */
    out->fd = -1;
    if (!f || f->fd < 0 || zr_shared_inode(f->fd, &out->inode))
        return false;
    out->rank = f->rec->rank;
    out->pid = (int32_t)getpid();
    out->fd = f->fd;
    return true;
}

int zr_flight_map(const struct zr_shared_at *where, const struct zr_flight_record **out)
{
    char *at = NULL;
    int err = zr_shared_map(where, (int64_t)record_bytes(), PROT_READ, &at);
    *out = (const void *)at;
    return err;
}

void zr_flight_unmap(const struct zr_flight_record *rec)
{
    zr_shared_unmap((void *)(uintptr_t)rec, (int64_t)record_bytes());
}

const struct zr_flight_record *zr_flight_record_of(const struct zr_flight *f)
{
    return f ? f->rec : NULL;
}

/* If a rank was killed while it wrote a call, the call before is returned. */
bool zr_flight_read_call(const struct zr_flight_record *rec, struct zr_flight_call *out)
{
    for (int i = 0; i < TRIES; i++) {
        uint64_t n = atomic_load_explicit(&rec->n_calls, memory_order_acquire);
        if (!n)
            break;
        if (copy_call(&rec->call[n % CALLS], n, out))
            return true;
    }
    memset(out, 0, sizeof *out);
    return false;
}

void zr_flight_shared_calls(const struct zr_flight_record *rec, struct zr_shared_calls out[ZR_SHARED_CALLS])
{
    for (int i = 0; i < LOGS; i++) {
        const struct role *r = &rec->role[FIRST_LOG + i];
        int32_t size = atomic_load_explicit(&r->size, memory_order_acquire);
        out[i] = size > 1 ? (struct zr_shared_calls){GET(r->group), size, &rec->log[i]}
                          : (struct zr_shared_calls){0};
    }
}

/* Finds a communicator that both ranks are in. ZR_ROLE_CP comes first, because its ranks are data-parallel
 * ranks with more calls in common. ZR_ROLE_WORLD comes last, because pipeline stages have the fewest. */
bool zr_flight_common_calls(const struct zr_flight_record *mine, const struct zr_flight_record *theirs,
                            const struct zr_call_log **my_log, const struct zr_call_log **their_log)
{
    static const enum zr_role order[LOGS] = {ZR_ROLE_CP, ZR_ROLE_CONTROL, ZR_ROLE_TP, ZR_ROLE_WORLD};
    struct zr_shared_calls a[LOGS], b[LOGS];
    zr_flight_shared_calls(mine, a);
    zr_flight_shared_calls(theirs, b);
    for (int k = 0; k < LOGS; k++) {
        const struct zr_shared_calls *x = &a[order[k] - FIRST_LOG], *y = &b[order[k] - FIRST_LOG];
        if (!x->log || !y->log || x->size != y->size || x->group != y->group)
            continue;
        *my_log = x->log;
        *their_log = y->log;
        return true;
    }
    return false;
}

int zr_flight_read_failure(const struct zr_flight_record *rec, int64_t *failed_ns, char text[ZR_FLIGHT_TEXT])
{
    int code = atomic_load_explicit(&rec->code, memory_order_acquire);
    *failed_ns = code ? rec->failed_ns : 0;
    snprintf(text, ZR_FLIGHT_TEXT, "%.*s", ZR_FLIGHT_TEXT - 1, code ? rec->text : "");
    return code;
}

int32_t zr_flight_process_of(const struct zr_flight_record *rec)
{
    return rec->pid;
}

/* ---- zero-run ---- */

bool zr_flight_look(int fd, struct zr_flight_view *out)
{
    struct zr_flight_record *rec = map_record(fd, PROT_READ);
    if (!rec)
        return false;
    copy_record(rec, out);
    munmap(rec, record_bytes());
    return out->state && zr_flight_check(out) == 0;
}
