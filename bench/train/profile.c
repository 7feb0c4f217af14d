/* SPDX-License-Identifier: Apache-2.0 */
/* profile.c: counts the time of each part of training, and divides the library's part by its timeline. */
#include "bench/train/profile.h"
#include "bench/libzero_error.h"
#include "bench/report/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

const char *const profile_names[PROFILE_N_PARTS] = {
#define PROFILE_NAME(NAME, name) name,
    PROFILE_PART_MAP(PROFILE_NAME)
#undef PROFILE_NAME
};

/* A micro-batch has 2 * layers + 3 brackets, and each may wait for its unit. It also has layers + 1 waits for
 * a gradient's place, and one span at the end. A step is a span with two waits, and the step before the first
 * measured one is needed too. The timeline's other tracks have fewer spans. */
int64_t profile_most_micro_batches(int64_t layers, int64_t steps)
{
    int64_t room = PROFILE_MAX_SPANS - 3 * (steps + 1);
    return room / (2 * (2 * layers + 3) + layers + 1 + 1);
}

static int64_t thread_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

enum profile_part profile_enter(struct profile *p, enum profile_part part)
{
    if (!p)
        return part;
    enum profile_part before = p->part;
    int64_t now = report_now_ns();
    if (p->running)
        p->ns[before] += now - p->since_ns;
    if (p->running && before == PROFILE_EXPOSED && p->n_means < PROFILE_MAX_STEPS) {
        p->means[p->n_means][0] = p->since_ns;
        p->means[p->n_means++][1] = now;
    }
    if (before != part && before == PROFILE_ATTENTION && p->running)
        p->attention_cpu_ns += thread_cpu_ns() - p->cpu_since_ns;
    if (before != part && part == PROFILE_ATTENTION)
        p->cpu_since_ns = thread_cpu_ns();
    p->since_ns = now;
    p->part = part;
    return before;
}

enum profile_part profile_enter_product(struct profile *p, double flop)
{
    if (!p)
        return PROFILE_PRODUCTS;
    enum profile_part part = p->part == PROFILE_ATTENTION ? PROFILE_ATTENTION : PROFILE_PRODUCTS;
    if (p->running)
        p->flop[part] += flop;
    return profile_enter(p, part);
}

void profile_step(struct profile *p, int64_t step, bool last)
{
    if (!p)
        return;
    profile_enter(p, p->part);
    p->n_steps += p->running;
    if (p->running && last) {
        p->running = false;
        p->last_step_ns = p->since_ns;
        p->total_ns = p->since_ns - p->start_ns;
    } else if (step == p->n_warm) {
        p->running = true;
        p->start_ns = p->since_ns;
    }
}

/* ---- the timeline, in nanoseconds of its clock ---- */

struct span {
    int64_t from, to;
};

/* The spans of some kinds, in the order of their beginnings. Returns NULL if there is no memory. */
static struct span *spans_of(json_t *events, const char *const *kinds, size_t *n)
{
    struct span *out = calloc(json_array_size(events) + 1, sizeof *out);
    size_t i;
    json_t *e;
    *n = 0;
    json_array_foreach(events, i, e)
    {
        const char *kind = json_string_value(json_object_get(e, "cat"));
        double ts = json_number_value(json_object_get(e, "ts")),
               dur = json_number_value(json_object_get(e, "dur"));
        for (int k = 0; out && kind && kinds[k]; k++)
            if (!strcmp(kind, kinds[k]))
                out[(*n)++] = (struct span){llround(ts * 1e3), llround(ts * 1e3) + llround(dur * 1e3)};
    }
    return out;
}

static int by_beginning(const void *a, const void *b)
{
    const struct span *x = a, *y = b;
    return (x->from > y->from) - (x->from < y->from);
}

/* How much of [from, to) is covered by spans that do not overlap each other. */
static int64_t overlap(const struct span *s, size_t n, int64_t from, int64_t to)
{
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        int64_t begin = s[i].from > from ? s[i].from : from, end = s[i].to < to ? s[i].to : to;
        sum += end > begin ? end - begin : 0;
    }
    return sum;
}

/* Moves time from one part to another, at most what that part has. */
static void move(struct profile *p, enum profile_part from, enum profile_part to, int64_t ns)
{
    ns = ns < p->ns[from] ? ns : p->ns[from];
    p->ns[to] += ns;
    p->ns[from] -= ns;
}

/* Divides the time that the model's thread waits in the library. It waits for what runs at that time: an
 * update, the norm, or else communication. With one rank the remaining wait is the library's own work. */
static int divide_waits(struct profile *p, json_t *events)
{
    static const char *const step[] = {"step", NULL}, *const wait[] = {"wait", "step", NULL},
                             *const update[] = {"update", NULL}, *const norm[] = {"norm", NULL};
    size_t n_steps, n_waits, n_updates, n_norms;
    struct span *steps = spans_of(events, step, &n_steps), *waits = spans_of(events, wait, &n_waits),
                *updates = spans_of(events, update, &n_updates), *norms = spans_of(events, norm, &n_norms);
    bool ok = steps && waits && updates && norms && n_steps > (size_t)p->n_steps;
    if (ok) {
        qsort(steps, n_steps, sizeof *steps, by_beginning);
        int64_t from = steps[n_steps - (size_t)p->n_steps - 1].to, to = steps[n_steps - 1].to;
        qsort(waits, n_waits, sizeof *waits, by_beginning);
        for (size_t i = 0; i < n_waits; i++) {
            int64_t begin = waits[i].from > from ? waits[i].from : from;
            int64_t end = waits[i].to < to ? waits[i].to : to;
            if (end <= begin)
                continue;
            from = end; /* a step may contain waits, which begin later */
            int64_t in_update = overlap(updates, n_updates, begin, end),
                    in_norm = overlap(norms, n_norms, begin, end);
            move(p, PROFILE_LIBRARY, PROFILE_OPTIMIZER, in_update);
            move(p, PROFILE_LIBRARY, PROFILE_NORM, in_norm);
            if (p->world > 1)
                move(p, PROFILE_LIBRARY, PROFILE_EXPOSED, end - begin - in_update - in_norm);
        }
        /* Both clocks know when the last step returned, which relates one to the other. */
        for (int64_t i = 0; i < p->n_means; i++)
            move(p, PROFILE_EXPOSED, PROFILE_OPTIMIZER,
                 overlap(updates, n_updates, p->means[i][0] - p->last_step_ns + to,
                         p->means[i][1] - p->last_step_ns + to));
        if (p->world == 1)
            move(p, PROFILE_EXPOSED, PROFILE_LIBRARY, p->ns[PROFILE_EXPOSED]);
    }
    free(steps), free(waits), free(updates), free(norms);
    return ok ? 0
              : zr_fail(ZERO_ERR_IO,
                        "the timeline does not have %lld steps: take a smaller --steps or --accum",
                        (long long)p->n_steps + 1);
}

int profile_finish(struct profile *p, zero_ctx *z)
{
    char path[256];
    if (!p || !z)
        return 0;
    const char *folder = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/zero-profile-XXXXXX", folder && *folder ? folder : "/tmp");
    int fd = mkstemp(path);
    if (fd < 0)
        return zr_fail(ZERO_ERR_IO, "%s: no file can be made there", path);
    close(fd);
    int err = take_libzero_error(zero_trace_write(z, path));
    json_t *trace = err ? NULL : json_load_file(path, 0, NULL);
    unlink(path);
    if (!err)
        err = trace ? divide_waits(p, json_object_get(trace, "traceEvents"))
                    : zr_fail(ZERO_ERR_IO, "%s: the timeline cannot be read", path);
    json_decref(trace);
    return err;
}
