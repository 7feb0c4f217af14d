/* SPDX-License-Identifier: Apache-2.0 */
/* call_log.c: names, keeps and compares calls. */
#include "comm/meet/call_log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct name {
    const char *function, *detail;
};

static const struct name *name_of(enum zr_call_name name)
{
    static const struct name names[] = {{"nothing", ""},
#define NAME(id, function, detail) {function, detail},
                                        ZR_CALL_MAP(NAME)
#undef NAME
    };
    return &names[(size_t)name < sizeof names / sizeof *names ? name : ZR_CALL_NONE];
}

const char *zr_call_function(enum zr_call_name name)
{
    return name_of(name)->function;
}

void zr_call_log_describe(const struct zr_logged_call *c, char text[ZR_CALL_LOG_CHARS])
{
    char name[48];
    snprintf(name, sizeof name, "%s%s", name_of(c->name)->function, name_of(c->name)->detail);
    bool bracket = c->name == ZR_CALL_BEGIN || c->name == ZR_CALL_END;
    if (bracket)
        snprintf(text, ZR_CALL_LOG_CHARS, "%s(unit %d, %s) in step %u", name, c->subject,
                 zr_phase_name(c->phase), c->step);
    else if (c->subject >= 0)
        snprintf(text, ZR_CALL_LOG_CHARS, "%s(tensor %d) in step %u", name, c->subject, c->step);
    else if (c->step)
        snprintf(text, ZR_CALL_LOG_CHARS, "%s in step %u", name, c->step);
    else
        snprintf(text, ZR_CALL_LOG_CHARS, "%s", name);
}

bool zr_call_log_is_for_step(enum zr_call_name name)
{
    return name == ZR_CALL_CARRY || name == ZR_CALL_SET_STEP || name == ZR_CALL_TUNE_CLIP ||
           name == ZR_CALL_TUNE_BETA1 || name == ZR_CALL_TUNE_BETA2 || name == ZR_CALL_TUNE_EPS ||
           name == ZR_CALL_TUNE_DECAY;
}

/* These calls come several in a row, often with equal names. So if one is omitted, the next one looks the
 * same. */
bool zr_call_log_is_of_axis(enum zr_call_name name)
{
    return name >= ZR_CALL_ALL_REDUCE_SUM && name <= ZR_CALL_EXPECT_ROWS;
}

void zr_call_log_report(int rank_a, const struct zr_logged_call *a, int rank_b,
                        const struct zr_logged_call *b, enum zr_call_log_gap gap,
                        char text[ZR_CALL_LOG_BOTH_CHARS])
{
    char of_a[ZR_CALL_LOG_CHARS], of_b[ZR_CALL_LOG_CHARS], left_out[80] = "";
    zr_call_log_describe(a, of_a);
    zr_call_log_describe(b, of_b);
    const char *other = a->name == ZR_CALL_STEP
                            ? " after different numbers in zero_carry, zero_tune or zero_set_step"
                        : zr_call_log_is_of_axis(a->name) && !gap
                            ? " with other arguments, or one of them left out the call before"
                            : " with other arguments";
    if (gap)
        snprintf(left_out, sizeof left_out, "; rank %d seems to have left out the call of rank %d",
                 gap == ZR_CALL_LOG_GAP_A ? rank_a : rank_b, gap == ZR_CALL_LOG_GAP_A ? rank_b : rank_a);
    snprintf(
        text, ZR_CALL_LOG_BOTH_CHARS,
        "rank %d called %s; rank %d called %s%s; every rank must make the same calls, in the same order%s",
        rank_a, of_a, rank_b, of_b, strcmp(of_a, of_b) ? "" : other, left_out);
}

void zr_call_log_report_none(bool compared, char *text, size_t n_text)
{
    if (compared)
        snprintf(text, n_text, "; the latest %d calls of the programs do not differ", ZR_CALL_LOG_KEPT);
    else
        snprintf(text, n_text, "; the calls of the programs could not be compared");
}

/* Packs a call into one word, so that it can be read at once: 6 bits name, 3 phase, 23 step, 32 subject.
 * The kept bits of the step are enough: calls that are far apart differ in their number. */
uint64_t zr_call_log_pack(const struct zr_logged_call *c)
{
    return (uint64_t)c->name << 58 | (uint64_t)(c->phase & 7) << 55 | (uint64_t)(c->step & 0x7fffffu) << 32 |
           (uint32_t)c->subject;
}

struct zr_logged_call zr_call_log_unpack(uint64_t what, uint64_t args)
{
    return (struct zr_logged_call){.name = (enum zr_call_name)(what >> 58),
                                   .phase = (enum zero_phase)(what >> 55 & 7),
                                   .step = (uint32_t)(what >> 32) & 0x7fffffu,
                                   .subject = (int32_t)(uint32_t)what,
                                   .args = args};
}

void zr_call_log_put(struct zr_call_log *ring, const struct zr_logged_call *c)
{
    uint64_t n = atomic_load_explicit(&ring->n, memory_order_relaxed) + 1;
    int i = (int)(n % ZR_CALL_LOG_KEPT);
    atomic_store_explicit(&ring->at[i].n, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&ring->at[i].what, zr_call_log_pack(c), memory_order_relaxed);
    atomic_store_explicit(&ring->at[i].args, c->args, memory_order_relaxed);
    atomic_store_explicit(&ring->at[i].n, n, memory_order_release);
    atomic_store_explicit(&ring->n, n, memory_order_release);
}

/* Reads a call. Returns false if it is not kept any more. */
static bool get(const struct zr_call_log *ring, uint64_t n, struct zr_logged_call *out)
{
    int i = (int)(n % ZR_CALL_LOG_KEPT);
    if (atomic_load_explicit(&ring->at[i].n, memory_order_acquire) != n)
        return false;
    uint64_t what = atomic_load_explicit(&ring->at[i].what, memory_order_relaxed);
    uint64_t args = atomic_load_explicit(&ring->at[i].args, memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&ring->at[i].n, memory_order_relaxed) != n)
        return false;
    *out = zr_call_log_unpack(what, args);
    return true;
}

/* Number of the oldest call that may still be kept. */
static uint64_t oldest(uint64_t n)
{
    return n > ZR_CALL_LOG_KEPT ? n - ZR_CALL_LOG_KEPT + 1 : 1;
}

void zr_call_log_copy(const struct zr_call_log *ring, struct zr_call_log_copy *out)
{
    struct zr_logged_call c;
    memset(out, 0, sizeof *out);
    out->n = atomic_load_explicit(&ring->n, memory_order_acquire);
    for (uint64_t n = oldest(out->n); n <= out->n; n++)
        if (get(ring, n, &c)) {
            out->at[n % ZR_CALL_LOG_KEPT].what = zr_call_log_pack(&c);
            out->at[n % ZR_CALL_LOG_KEPT].args = c.args;
        }
}

void zr_call_log_restore(struct zr_call_log *ring, const struct zr_call_log_copy *from)
{
    uint64_t all = from->n < INT64_MAX ? from->n : INT64_MAX;
    memset(ring, 0, sizeof *ring);
    for (uint64_t n = oldest(all); n <= all; n++) {
        int i = (int)(n % ZR_CALL_LOG_KEPT);
        atomic_init(&ring->at[i].n, from->at[i].what ? n : 0);
        atomic_init(&ring->at[i].what, from->at[i].what);
        atomic_init(&ring->at[i].args, from->at[i].args);
    }
    atomic_init(&ring->n, all);
}

static bool same(const struct zr_logged_call *a, const struct zr_logged_call *b)
{
    return a->name == b->name && a->phase == b->phase && a->step == b->step && a->subject == b->subject &&
           a->args == b->args;
}

uint64_t zr_call_log_differ(const struct zr_call_log *a, const struct zr_call_log *b,
                            struct zr_logged_call *of_a, struct zr_logged_call *of_b)
{
    uint64_t n_a = atomic_load_explicit(&a->n, memory_order_acquire);
    uint64_t n_b = atomic_load_explicit(&b->n, memory_order_acquire);
    uint64_t most = n_a > n_b ? n_a : n_b, both = n_a < n_b ? n_a : n_b;
    for (uint64_t n = oldest(most); n <= both; n++)
        if (get(a, n, of_a) && get(b, n, of_b) && !same(of_a, of_b))
            return n;
    return 0;
}

bool zr_call_log_overlap(const struct zr_call_log *a, const struct zr_call_log *b)
{
    uint64_t n_a = atomic_load_explicit(&a->n, memory_order_acquire);
    uint64_t n_b = atomic_load_explicit(&b->n, memory_order_acquire);
    return oldest(n_a > n_b ? n_a : n_b) <= (n_a < n_b ? n_a : n_b);
}

/* Whether the calls are equal except for the step, as in another layer or step. */
static bool same_calls(struct zr_logged_call a, const struct zr_logged_call *b)
{
    a.step = b->step;
    return same(&a, b);
}

/* Whether a ring has `first` and then `second` from call number n on. */
static bool follow_at(const struct zr_call_log *ring, uint64_t n, const struct zr_logged_call *first,
                      const struct zr_logged_call *second)
{
    struct zr_logged_call c;
    return get(ring, n, &c) && same_calls(c, first) && get(ring, n + 1, &c) && same_calls(c, second);
}

/* Whether `first` and `second` follow each other at an earlier place, after the same call that comes before
 * number n. */
static bool followed_before(const struct zr_call_log *ring, uint64_t n, const struct zr_logged_call *first,
                            const struct zr_logged_call *second)
{
    struct zr_logged_call before, c;
    if (n < 2 || !get(ring, n - 1, &before))
        return false;
    for (uint64_t k = n - 2; k >= oldest(n) && k > 1; k--)
        if (follow_at(ring, k, first, second) && get(ring, k - 1, &c) && same_calls(c, &before))
            return true;
    return false;
}

enum zr_call_log_gap zr_call_log_left_out(const struct zr_call_log *a, const struct zr_call_log *b,
                                          uint64_t n)
{
    struct zr_logged_call of_a, of_b;
    if (!get(a, n, &of_a) || !get(b, n, &of_b))
        return ZR_CALL_LOG_GAP_NONE;
    bool by_a = zr_call_log_is_of_axis(of_b.name) &&
                (follow_at(b, n, &of_b, &of_a) || followed_before(b, n, &of_b, &of_a));
    bool by_b = zr_call_log_is_of_axis(of_a.name) &&
                (follow_at(a, n, &of_a, &of_b) || followed_before(a, n, &of_a, &of_b));
    return by_a == by_b ? ZR_CALL_LOG_GAP_NONE : by_a ? ZR_CALL_LOG_GAP_A : ZR_CALL_LOG_GAP_B;
}

bool zr_call_log_last(const struct zr_call_log *ring, struct zr_logged_call *out)
{
    uint64_t n = atomic_load_explicit(&ring->n, memory_order_acquire);
    return n && get(ring, n, out);
}

static int by_communicator(const void *a, const void *b)
{
    const struct zr_sharing_rank *x = a, *y = b;
    if (x->group != y->group)
        return x->group < y->group ? -1 : 1;
    return x->size != y->size ? x->size - y->size : x->rank - y->rank;
}

void zr_call_log_furthest(struct zr_sharing_rank *s, int n)
{
    qsort(s, (size_t)n, sizeof *s, by_communicator);
    for (int first = 0, end; first < n; first = end) {
        const struct zr_sharing_rank *most = &s[first], *fewest = most;
        for (end = first + 1; end < n && s[end].group == most->group && s[end].size == most->size; end++) {
            most = s[end].n_calls > most->n_calls ? &s[end] : most;
            fewest = s[end].n_calls < fewest->n_calls ? &s[end] : fewest;
        }
        for (int k = first; k < end; k++) {
            s[k].ahead = end - first > 1 ? most->rank : -1;
            s[k].behind = end - first > 1 ? fewest->rank : -1;
        }
    }
}
