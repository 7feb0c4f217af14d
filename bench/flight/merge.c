/* SPDX-License-Identifier: Apache-2.0 */
/* merge.c: reads flight recorders, and finds the ranks that stand out. */
#include "bench/flight/merge.h"
#include "bench/arguments.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- files ---- */

void flight_close(struct flight *f)
{
    for (int32_t i = 0; i < f->n; i++)
        free(f->rank[i].view);
    free(f->rank);
    *f = (struct flight){0};
}

static int by_rank(const void *a, const void *b)
{
    const struct zr_flight_view *x = ((const struct flight_rank *)a)->view,
                                *y = ((const struct flight_rank *)b)->view;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

static int read_one(struct flight *f, const char *name, const char *path)
{
    struct zr_flight_view *v = malloc(sizeof *v);
    int err = v ? zr_flight_read_file(path, v) : ZERO_ERR_NOMEM;
    if (err) {
        fprintf(stderr, "%s: %s\n", name, v ? zr_error_text() : "no memory");
        free(v);
        return v ? EXIT_USAGE : EXIT_FAILURE;
    }
    f->rank[f->n++] = (struct flight_rank){path, v};
    return 0;
}

/* Checks that all files are of one attempt of one job. */
static int check_one_job(const struct flight *f, const char *name)
{
    const struct flight_rank *first = &f->rank[0];
    for (int32_t i = 1; i < f->n; i++) {
        const struct flight_rank *r = &f->rank[i];
        const char *what = strcmp(r->view->job, first->view->job)     ? "another job"
                           : r->view->attempt != first->view->attempt ? "another attempt"
                           : r->view->world != first->view->world     ? "a world of another size"
                           : r->view->rank == r[-1].view->rank        ? "the same rank"
                                                                      : NULL;
        if (what) {
            fprintf(stderr, "%s: %s is of %s %s %s: give the files of one attempt of one job\n", name,
                    r->path, what, strcmp(what, "the same rank") ? "than" : "as",
                    strcmp(what, "the same rank") ? first->path : r[-1].path);
            return EXIT_USAGE;
        }
    }
    return 0;
}

int flight_open(struct flight *f, const char *name, char *const paths[], int n)
{
    *f = (struct flight){.rank = calloc((size_t)n, sizeof *f->rank)};
    int status = f->rank ? 0 : EXIT_FAILURE;
    for (int i = 0; i < n && !status; i++)
        status = read_one(f, name, paths[i]);
    if (!status) {
        qsort(f->rank, (size_t)f->n, sizeof *f->rank, by_rank);
        f->world = f->rank[0].view->world;
        status = check_one_job(f, name);
    }
    if (status)
        flight_close(f);
    return status;
}

/* ---- findings ---- */

const char *flight_kind_name(enum flight_kind k)
{
    static const char *const name[] = {[FLIGHT_DEAD] = "dead",
                                       [FLIGHT_DIFFERENT] = "different",
                                       [FLIGHT_LATE] = "late",
                                       [FLIGHT_MISSING] = "missing"};
    return name[k];
}

/* The files, and the function that findings are reported to. */
struct reporter {
    const struct flight *f;
    void (*found)(void *arg, const struct flight_finding *finding);
    void *arg;
};

static void describe_call(uint64_t packed, char call[ZR_CALL_LOG_CHARS])
{
    const struct zr_logged_call c = zr_call_log_unpack(packed, 0);
    call[0] = 0;
    if (c.name != ZR_CALL_NONE)
        zr_call_log_describe(&c, call);
}

void flight_last_call(const struct zr_flight_view *v, char call[ZR_CALL_LOG_CHARS], bool *inside,
                      int64_t *for_ns)
{
    const struct zr_flight_call *c = &v->call;
    *inside = c->number && !c->left_ns;
    *for_ns = c->number ? v->copied_ns - (*inside ? c->entered_ns : c->left_ns) : 0;
    describe_call(c->call, call);
}

/* Appends the last call: "; it is in ...", or that the program is outside of the library. */
static size_t add_call(const struct zr_flight_view *v, char *text, size_t n_text)
{
    char call[ZR_CALL_LOG_CHARS];
    bool inside;
    int64_t ns;
    flight_last_call(v, call, &inside, &ns);
    int n = 0;
    if (!call[0])
        text[0] = 0;
    else if (inside)
        n = snprintf(text, n_text, "; it is in %s, for %.3f s", call, (double)ns * 1e-9);
    else
        n = snprintf(text, n_text, "; the program has been outside of the library for %.3f s, after %s",
                     (double)ns * 1e-9, call);
    return (size_t)n;
}

/* Whether the rank died by itself. One that had failed says so itself, and one that its launcher ended was
 * alive until then. */
static bool is_dead(const struct zr_flight_view *v)
{
    return v->has_ended && !v->code && !zr_flight_ended_by_launcher(v) &&
           (v->signal || v->state == ZR_FLIGHT_OPEN);
}

/* Whether its launcher asked the rank to end before it exited, which may be why it exited. */
static bool may_be_asked(const struct zr_flight_view *v)
{
    return v->asked && !v->signal;
}

/* The time of day at which a rank's recorder was copied. A dead rank's recorder is copied when the rank
 * ends. */
static int64_t day_ns(const struct zr_flight_view *v)
{
    return (int64_t)((uint64_t)v->epoch_ns + (uint64_t)v->copied_ns);
}

/* Orders dead ranks by which is more likely the cause. Ranks that the launcher asked to end come last. Among
 * the others the earlier end comes first, and at the same time a rank that was killed. */
static bool is_before(const struct zr_flight_view *a, const struct zr_flight_view *b)
{
    if (may_be_asked(a) != may_be_asked(b))
        return may_be_asked(b);
    if (day_ns(a) != day_ns(b))
        return day_ns(a) < day_ns(b);
    return !a->signal != !b->signal ? a->signal != 0 : a->rank < b->rank;
}

/* Returns the dead rank that follows *last in the order of is_before, or NULL. If last is NULL, it returns
 * the first. */
static const struct zr_flight_view *next_dead(const struct flight *f, const struct zr_flight_view *last)
{
    const struct zr_flight_view *next = NULL;
    for (int32_t i = 0; i < f->n; i++) {
        const struct zr_flight_view *v = f->rank[i].view;
        if (is_dead(v) && (!last || is_before(last, v)) && (!next || is_before(v, next)))
            next = v;
    }
    return next;
}

static void report_dead(const struct reporter *j, const struct zr_flight_view *v)
{
    struct flight_finding out = {.kind = FLIGHT_DEAD, .rank = v->rank};
    char words[512];
    bool inside;
    int64_t ns;
    flight_last_call(v, out.call, &inside, &ns);
    zr_flight_last_words(v, words, sizeof words);
    if (v->signal)
        snprintf(out.text, sizeof out.text, "was killed by signal %d (%s)%s", v->signal, strsignal(v->signal),
                 words);
    else
        snprintf(out.text, sizeof out.text, "exited with code %d and without zero_unwrap%s%s", v->exit_code,
                 may_be_asked(v) ? " (its launcher had asked it to end)" : "", words);
    j->found(j->arg, &out);
}

/* Returns operation number seq of a role, or NULL if the rank has not made it or no longer has its record. */
static const struct zr_flight_op *find_op(const struct zr_flight_view *v, int role, uint64_t seq)
{
    for (int32_t i = v->n_ops; i-- > 0;)
        if (v->ops[i].role == role && v->ops[i].seq == seq)
            return &v->ops[i];
    return NULL;
}

static bool same_group(const struct zr_flight_view *a, const struct zr_flight_view *b, int role)
{
    return a->role[role].size && a->role[role].size == b->role[role].size &&
           a->role[role].group == b->role[role].group;
}

/* Returns in what a differs from b, or NULL if both are equal. */
static const char *difference(const struct zr_flight_op *a, const struct zr_flight_op *b)
{
    return a->op != b->op                 ? "another operation"
           : a->unit != b->unit           ? "another unit"
           : a->step != b->step           ? "another step"
           : a->bytes != b->bytes         ? "other bytes"
           : a->call_hash != b->call_hash ? "other calls before it"
                                          : NULL;
}

/* Returns the number of the first operation of a role that differs between two ranks of a group. 0: none. */
static uint64_t first_difference(const struct zr_flight_view *a, const struct zr_flight_view *b, int role)
{
    for (int32_t i = 0; i < a->n_ops; i++) {
        const struct zr_flight_op *mine = &a->ops[i];
        const struct zr_flight_op *other = mine->role == role ? find_op(b, role, mine->seq) : NULL;
        if (other && difference(mine, other))
            return mine->seq;
    }
    return 0;
}

static void put_op(const struct zr_flight_op *o, char *text, size_t n_text)
{
    char op[128], call[ZR_CALL_LOG_CHARS];
    zr_flight_describe_op(o, op, sizeof op);
    describe_call(o->call, call);
    snprintf(text, n_text, "%s of step %u with %lld bytes, from %s", op, o->step, (long long)o->bytes,
             call[0] ? call : "no call");
}

/* Whether this rank is the first of its group in a role. Findings about a group are reported once, there. */
static bool is_first_of_group(const struct flight *f, int32_t i, int role)
{
    for (int32_t k = 0; k < i; k++)
        if (same_group(f->rank[k].view, f->rank[i].view, role))
            return false;
    return f->rank[i].view->role[role].size > 1;
}

static void report_different(const struct reporter *j, int32_t i, int role)
{
    const struct flight *f = j->f;
    const struct zr_flight_view *a = f->rank[i].view, *found = NULL;
    uint64_t first = 0;
    for (int32_t k = i + 1; k < f->n; k++) {
        const struct zr_flight_view *b = f->rank[k].view;
        uint64_t seq = same_group(a, b, role) ? first_difference(a, b, role) : 0;
        if (seq && (!first || seq < first)) {
            first = seq;
            found = b;
        }
    }
    if (!found)
        return;
    const struct zr_flight_op *mine = find_op(a, role, first), *other = find_op(found, role, first);
    struct flight_finding out = {.kind = FLIGHT_DIFFERENT, .rank = found->rank};
    char here[256], there[256];
    put_op(mine, here, sizeof here);
    put_op(other, there, sizeof there);
    describe_call(other->call, out.call);
    snprintf(out.text, sizeof out.text, "made %s (%s); rank %d made %s", there, difference(other, mine),
             a->rank, here);
    j->found(j->arg, &out);
}

/* Appends the action that the rank's loop is carrying out, if any. */
static void add_loop(const struct zr_flight_view *v, char *text, size_t n_text)
{
    const struct zr_flight_loop *l = &v->loop;
    char unit[24] = "";
    text[0] = 0;
    if (l->unit >= 0)
        snprintf(unit, sizeof unit, " of unit %d", l->unit);
    if (l->name[0])
        snprintf(text, n_text, "; the library's own thread is in %s%s, for %.3f s", l->name, unit,
                 (double)(v->copied_ns - l->since_ns) * 1e-9);
    else if (l->n_queued > l->n_done)
        snprintf(text, n_text, "; the library's own thread has %llu jobs before it",
                 (unsigned long long)(l->n_queued - l->n_done));
}

/* Finds ranks of a group that have not begun an operation that another rank has begun. */
static void report_late(const struct reporter *j, int32_t i, int role)
{
    const struct flight *f = j->f;
    uint64_t most = 0;
    int32_t ahead = 0;
    for (int32_t k = i; k < f->n; k++) {
        const struct zr_flight_view *v = f->rank[k].view;
        if (same_group(f->rank[i].view, v, role) && v->role[role].started > most) {
            most = v->role[role].started;
            ahead = v->rank;
        }
    }
    for (int32_t k = i; k < f->n; k++) {
        const struct zr_flight_view *v = f->rank[k].view;
        if (!same_group(f->rank[i].view, v, role) || is_dead(v) || v->role[role].started >= most)
            continue;
        struct flight_finding out = {.kind = FLIGHT_LATE, .rank = v->rank};
        char call[256], loop[128];
        bool inside;
        int64_t ns;
        flight_last_call(v, out.call, &inside, &ns);
        add_call(v, call, sizeof call);
        add_loop(v, loop, sizeof loop);
        snprintf(out.text, sizeof out.text,
                 "is late: of %s it has begun operation %llu (%llu issued), rank %d operation %llu%s%s",
                 zr_role_name((enum zr_role)role), (unsigned long long)v->role[role].started,
                 (unsigned long long)v->role[role].issued, ahead, (unsigned long long)most, call, loop);
        j->found(j->arg, &out);
    }
}

static void report_missing(const struct reporter *j)
{
    int32_t at = 0;
    for (int32_t rank = 0; rank < j->f->world; rank++) {
        if (at < j->f->n && j->f->rank[at].view->rank == rank) {
            at++;
            continue;
        }
        struct flight_finding out = {.kind = FLIGHT_MISSING, .rank = rank};
        snprintf(out.text, sizeof out.text, "has no file here");
        j->found(j->arg, &out);
    }
}

void flight_judge(const struct flight *f, void (*found)(void *arg, const struct flight_finding *finding),
                  void *arg)
{
    const struct reporter j = {f, found, arg};
    for (const struct zr_flight_view *v = NULL; (v = next_dead(f, v));)
        report_dead(&j, v);
    for (int role = 0; role < ZR_ROLES; role++)
        for (int32_t i = 0; i < f->n; i++)
            if (is_first_of_group(f, i, role))
                report_different(&j, i, role);
    for (int role = 0; role < ZR_ROLES; role++)
        for (int32_t i = 0; i < f->n; i++)
            if (is_first_of_group(f, i, role))
                report_late(&j, i, role);
    report_missing(&j);
}
