/* SPDX-License-Identifier: Apache-2.0 */
/* shadow.c: what every byte stands for, its last writer and its readers since.
 *
 * An allocation is cut into ranges, which become finer each time an operation touches part of one. Layouts
 * repeat from step to step, so the cuts soon stop. */
#include "kernels/check/recorder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct epoch {
    int32_t line;
    uint32_t info, tick;
};

struct range {
    int64_t from; /* offset; the next range's is the end */
    struct zr_content content;
    struct epoch writer; /* tick 0: no writer */
    struct epoch *readers;
    int32_t n_readers, cap;
};

struct zr_block {
    const char *at, *name;
    int64_t bytes;
    int rank;
    struct range *ranges;
    int32_t n_ranges, cap;
};

/* Makes room for element n of an array. Returns false if there is no memory; the recorder is broken then. */
static bool room(struct zr_recorder *rec, void **array, int32_t n, int32_t *cap, size_t item)
{
    if (n < *cap)
        return true;
    int32_t more = *cap ? *cap * 2 : 4;
    void *p = realloc(*array, (size_t)more * item);
    rec->broken |= !p;
    if (!p)
        return false;
    *array = p;
    *cap = more;
    return true;
}

int zr_shadow_add(struct zr_recorder *rec, int rank, const char *name, const void *at, int64_t bytes)
{
    struct zr_block *b = calloc(1, sizeof *b);
    if (b)
        *b = (struct zr_block){.at = at, .name = name, .bytes = bytes, .rank = rank};
    if (!b || !room(rec, (void **)&rec->blocks, rec->n_blocks, &rec->cap_blocks, sizeof(struct zr_block *)) ||
        !room(rec, (void **)&b->ranges, 0, &b->cap, sizeof *b->ranges)) {
        free(b);
        return zr_fail(ZERO_ERR_NOMEM, "no memory to keep track of %lld bytes", (long long)bytes);
    }
    b->ranges[b->n_ranges++] = (struct range){0};
    int32_t i = rec->n_blocks++;
    for (; i > 0 && rec->blocks[i - 1]->at > b->at; i--)
        rec->blocks[i] = rec->blocks[i - 1];
    rec->blocks[i] = b;
    return 0;
}

static void free_block(struct zr_block *b)
{
    for (int32_t i = 0; i < b->n_ranges; i++)
        free(b->ranges[i].readers);
    free(b->ranges);
    free(b);
}

static int32_t index_of(const struct zr_recorder *rec, const char *at)
{
    int32_t lo = 0, hi = rec->n_blocks;
    while (lo < hi) {
        int32_t mid = (lo + hi) / 2;
        if (rec->blocks[mid]->at <= at)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo - 1;
}

void zr_shadow_remove(struct zr_recorder *rec, const void *at)
{
    int32_t i = index_of(rec, at);
    if (i < 0 || rec->blocks[i]->at != at)
        return;
    free_block(rec->blocks[i]);
    memmove(&rec->blocks[i], &rec->blocks[i + 1], (size_t)(--rec->n_blocks - i) * sizeof *rec->blocks);
    rec->last = NULL;
}

void zr_shadow_close(struct zr_recorder *rec)
{
    for (int32_t i = 0; i < rec->n_blocks; i++)
        free_block(rec->blocks[i]);
    free(rec->blocks);
    rec->blocks = NULL;
    rec->n_blocks = 0;
}

/* Returns the block that holds all of [at, at + bytes), or NULL. If every byte must be known, NULL is
 * reported. */
static struct zr_block *find(struct zr_recorder *rec, const void *address, int64_t bytes, int64_t *off)
{
    const char *at = address;
    struct zr_block *b = rec->last;
    if (rec->broken)
        return NULL;
    if (!b || at < b->at || at >= b->at + b->bytes) {
        int32_t i = index_of(rec, at);
        b = i < 0 ? NULL : rec->blocks[i];
    }
    if (!b || at + bytes > b->at + b->bytes) {
        if (rec->every_byte_known)
            zr_report(rec, "%lld bytes at %p are in no allocation%s%s", (long long)bytes, address,
                      b ? "; the one before is " : "", b ? b->name : "");
        return NULL;
    }
    rec->last = b;
    *off = at - b->at;
    return b;
}

void zr_shadow_name(struct zr_recorder *rec, const void *at, const char *name)
{
    int64_t off;
    struct zr_block *b = find(rec, at, 1, &off);
    if (b)
        b->name = name;
}

static int64_t end_of(const struct zr_block *b, int32_t i)
{
    return i + 1 < b->n_ranges ? b->ranges[i + 1].from : b->bytes;
}

/* Makes a range begin at off and returns its index. */
static int32_t cut(struct zr_recorder *rec, struct zr_block *b, int64_t off)
{
    int32_t lo = 0, hi = b->n_ranges;
    while (lo < hi) {
        int32_t mid = (lo + hi) / 2;
        if (b->ranges[mid].from <= off)
            lo = mid + 1;
        else
            hi = mid;
    }
    if (b->ranges[lo - 1].from == off || off == b->bytes)
        return b->ranges[lo - 1].from == off ? lo - 1 : lo;
    int32_t n_readers = b->ranges[lo - 1].n_readers;
    struct epoch *readers = n_readers ? malloc((size_t)n_readers * sizeof *readers) : NULL;
    rec->broken |= n_readers && !readers;
    if (rec->broken || !room(rec, (void **)&b->ranges, b->n_ranges, &b->cap, sizeof *b->ranges)) {
        free(readers);
        return lo - 1;
    }
    memmove(&b->ranges[lo + 1], &b->ranges[lo], (size_t)(b->n_ranges - lo) * sizeof *b->ranges);
    b->n_ranges++;
    struct range *left = &b->ranges[lo - 1], *right = &b->ranges[lo];
    *right = *left;
    right->from = off;
    right->readers = readers;
    right->cap = n_readers;
    if (n_readers)
        memcpy(readers, left->readers, (size_t)n_readers * sizeof *readers);
    if (right->content.size && (off - left->from) % right->content.size == 0)
        right->content.first += (off - left->from) / right->content.size;
    else if (right->content.size)
        right->content = (struct zr_content){.kind = ZR_CONTENT_MIXED};
    return lo;
}

/* ---- earlier accesses ---- */

/* Text such as "rank 3's", for a line or a block. */
struct owner {
    char text[24];
};

static struct owner owner(int rank)
{
    struct owner o = {"another rank's"};
    if (rank >= 0)
        snprintf(o.text, sizeof o.text, "rank %d's", rank);
    return o;
}

static void race(struct zr_recorder *rec, const struct zr_block *b, const struct range *r,
                 const struct epoch *e, const char *did, const struct zr_line *l, const char *does)
{
    const struct zr_info *was = zr_info_at(rec, e->info), *is = zr_info_at(rec, l->info);
    const struct zr_line *o = &rec->lines[e->line];
    zr_report(
        rec,
        "race on %s %s at +%lld: %s (%s, unit %d, step %u) on %s %s %s what %s (%s, unit %d, step %u) on %s "
        "%s %s, and nothing orders them; missing: an event recorded on %s %s after %s, %s by %s %s before %s",
        owner(b->rank).text, b->name, (long long)r->from, is->name, is->during, is->unit, is->step,
        owner(l->rank).text, l->name, does, was->name, was->during, was->unit, was->step, owner(o->rank).text,
        o->name, did, owner(o->rank).text, o->name, was->name,
        o->rank == l->rank ? "waited for" : "told to every rank by a barrier and waited for",
        owner(l->rank).text, l->name, is->name);
}

static bool ordered(const struct epoch *e, const struct zr_line *l)
{
    return e->tick <= l->clock->at[e->line];
}

void zr_shadow_read(struct zr_recorder *rec, struct zr_line *l, const void *at, int64_t bytes)
{
    int64_t off;
    rec->n_accesses++;
    struct zr_block *b = bytes > 0 ? find(rec, at, bytes, &off) : NULL;
    if (!b)
        return;
    struct epoch me = {.line = l->id, .info = l->info, .tick = l->clock->at[l->id]};
    int32_t last = cut(rec, b, off + bytes);
    int32_t n = b->n_ranges, i = cut(rec, b, off);
    for (last += b->n_ranges - n; i < last; i++) {
        struct range *r = &b->ranges[i];
        if (r->writer.tick && !ordered(&r->writer, l))
            race(rec, b, r, &r->writer, "wrote", l, "reads");
        int32_t k = 0;
        while (k < r->n_readers && r->readers[k].line != l->id)
            k++;
        if (!room(rec, (void **)&r->readers, k, &r->cap, sizeof *r->readers))
            return;
        r->readers[k] = me;
        r->n_readers += k == r->n_readers;
    }
}

void zr_shadow_write(struct zr_recorder *rec, struct zr_line *l, const void *at, int64_t bytes)
{
    int64_t off;
    rec->n_accesses++;
    struct zr_block *b = bytes > 0 ? find(rec, at, bytes, &off) : NULL;
    if (!b)
        return;
    int32_t last = cut(rec, b, off + bytes);
    int32_t n = b->n_ranges, i = cut(rec, b, off);
    for (last += b->n_ranges - n; i < last; i++) {
        struct range *r = &b->ranges[i];
        if (r->writer.tick && !ordered(&r->writer, l))
            race(rec, b, r, &r->writer, "wrote", l, "overwrites");
        for (int32_t k = 0; k < r->n_readers; k++)
            if (!ordered(&r->readers[k], l))
                race(rec, b, r, &r->readers[k], "reads", l, "overwrites");
        r->n_readers = 0;
        r->writer = (struct epoch){.line = l->id, .info = l->info, .tick = l->clock->at[l->id]};
    }
}

void zr_shadow_touch(struct zr_recorder *rec, struct zr_line *l, const struct zr_access *a, int n)
{
    for (int i = 0; i < n; i++) {
        zr_shadow_read(rec, l, a[i].at, a[i].bytes);
        if (a[i].write)
            zr_shadow_write(rec, l, a[i].at, a[i].bytes);
    }
}

/* ---- contents ---- */

/* Calls fn for every range of [at, at + bytes). */
typedef void (*range_fn)(struct zr_recorder *rec, void *arg, struct zr_block *b, struct range *r,
                         int64_t end);
static void each(struct zr_recorder *rec, const void *at, int64_t bytes, range_fn fn, void *arg)
{
    int64_t off;
    struct zr_block *b = bytes > 0 ? find(rec, at, bytes, &off) : NULL;
    if (!b)
        return;
    int32_t last = cut(rec, b, off + bytes), n = b->n_ranges, i = cut(rec, b, off);
    for (last += b->n_ranges - n; i < last; i++)
        fn(rec, arg, b, &b->ranges[i], end_of(b, i));
}

/* Returns the content of element k of a range whose first element has content t. */
static struct zr_content moved(struct zr_content t, int64_t k)
{
    if (t.size)
        t.first += k;
    return t;
}

struct placing {
    int64_t from; /* offset of the first byte in its block */
    struct zr_content content;
};

/* Joins ranges [first, last) where that loses nothing. A write stores elements of one size, so no old cut may
 * stay inside an element. */
static int32_t unite(struct zr_block *b, int32_t first, int32_t last)
{
    int32_t kept = first;
    for (int32_t i = first + 1; i < last; i++) {
        struct range *a = &b->ranges[kept], *r = &b->ranges[i];
        if (!a->n_readers && !r->n_readers && a->writer.line == r->writer.line &&
            a->writer.tick == r->writer.tick)
            free(r->readers);
        else
            b->ranges[++kept] = *r;
    }
    int32_t n_gone = last - 1 - kept;
    if (n_gone > 0) {
        memmove(&b->ranges[kept + 1], &b->ranges[last], (size_t)(b->n_ranges - last) * sizeof *b->ranges);
        b->n_ranges -= n_gone;
    }
    return kept + 1;
}

static int64_t offset_of(struct zr_recorder *rec, const void *at)
{
    int64_t off = 0;
    find(rec, at, 1, &off);
    return off;
}

void zr_shadow_set(struct zr_recorder *rec, const void *at, int64_t bytes, struct zr_content content)
{
    int64_t off;
    struct zr_block *b = bytes > 0 ? find(rec, at, bytes, &off) : NULL;
    if (!b)
        return;
    int32_t last = cut(rec, b, off + bytes), n = b->n_ranges, i = cut(rec, b, off);
    last = unite(b, i, last + b->n_ranges - n);
    for (; i < last; i++)
        b->ranges[i].content =
            content.size ? moved(content, (b->ranges[i].from - off) / content.size) : content;
}

static struct zr_content sum_of(struct zr_content a, struct zr_content b)
{
    if (a.kind == ZR_CONTENT_ZERO)
        return b;
    if (b.kind == ZR_CONTENT_ZERO)
        return a;
    if (a.kind != ZR_CONTENT_GRAD || b.kind != ZR_CONTENT_GRAD || a.flat != b.flat || a.first != b.first)
        return (struct zr_content){.kind = ZR_CONTENT_MIXED};
    a.value += b.value;
    a.n += b.n;
    return a;
}

static void add_one(struct zr_recorder *rec, void *arg, struct zr_block *b, struct range *r, int64_t end)
{
    const struct placing *p = arg;
    (void)rec;
    (void)b;
    (void)end;
    struct zr_content more =
        p->content.size ? moved(p->content, (r->from - p->from) / p->content.size) : p->content;
    uint8_t size = r->content.size;
    r->content = sum_of(r->content, more);
    if (size && r->content.size)
        r->content.size = size;
}

void zr_shadow_add_to(struct zr_recorder *rec, const void *at, int64_t bytes, struct zr_content content)
{
    if (bytes > 0)
        each(rec, at, bytes, add_one, &(struct placing){offset_of(rec, at), content});
}

/* A range of a copy's source. It is stored separately, because writing the destination may cut the same
 * block. */
struct run {
    int64_t first, n; /* elements from the start of the source */
    struct zr_content content;
};

struct runs {
    int64_t from;
    int size;
    struct run *run;
    int32_t n, cap;
};

static void take_one(struct zr_recorder *rec, void *arg, struct zr_block *b, struct range *r, int64_t end)
{
    struct runs *s = arg;
    (void)b;
    int64_t first = (r->from - s->from) / s->size, n = (end - s->from) / s->size - first;
    struct zr_content t = r->content;
    if (s->size > 1 && t.size && t.size != s->size)
        t = (struct zr_content){.kind = ZR_CONTENT_MIXED};
    if (s->n && t.size == 0 && s->run[s->n - 1].content.size == 0 &&
        s->run[s->n - 1].content.kind == t.kind) {
        s->run[s->n - 1].n += n;
        return;
    }
    if (!room(rec, (void **)&s->run, s->n, &s->cap, sizeof *s->run))
        return;
    s->run[s->n++] = (struct run){first, n, t};
}

static void transfer(struct zr_recorder *rec, const void *dst, int dst_size, const void *src, int src_size,
                     int64_t n, bool add)
{
    if (n <= 0)
        return;
    bool same = dst_size == src_size; /* copied byte for byte */
    struct runs s = {.from = offset_of(rec, src), .size = same ? 1 : src_size};
    each(rec, src, n * src_size, take_one, &s);
    if (same)
        dst_size = 1;
    for (int32_t i = 0; i < s.n; i++) {
        struct run *r = &s.run[i];
        if (r->content.size && !same)
            r->content.size = (uint8_t)dst_size;
        const char *to = (const char *)dst + r->first * dst_size;
        if (add)
            zr_shadow_add_to(rec, to, r->n * dst_size, r->content);
        else
            zr_shadow_set(rec, to, r->n * dst_size, r->content);
    }
    free(s.run);
}

void zr_shadow_copy(struct zr_recorder *rec, const void *dst, int dst_size, const void *src, int src_size,
                    int64_t n)
{
    transfer(rec, dst, dst_size, src, src_size, n, false);
}

void zr_shadow_sum(struct zr_recorder *rec, const void *dst, int dst_size, const void *src, int src_size,
                   int64_t n)
{
    transfer(rec, dst, dst_size, src, src_size, n, true);
}

static const char *kind_name(int kind)
{
    static const char *const name[] = {"nothing known",
                                       "zeros",
                                       "parameters",
                                       "gradients",
                                       "optimizer state",
                                       "activations",
                                       "a mixture of elements that do not belong together"};
    return name[kind];
}

struct expecting {
    struct placing p;
    const struct zr_line *line;
};

static void expect_one(struct zr_recorder *rec, void *arg, struct zr_block *b, struct range *r, int64_t end)
{
    const struct expecting *e = arg;
    struct zr_content want = e->p.content, got = r->content;
    (void)end;
    if (want.size)
        want = moved(want, (r->from - e->p.from) / want.size);
    if (got.kind == ZR_CONTENT_ZERO &&
        (want.kind == ZR_CONTENT_ZERO || (want.kind == ZR_CONTENT_STATE && want.value == 0) ||
         (want.kind == ZR_CONTENT_GRAD && want.n == 0)))
        return;
    if (got.kind == want.kind && got.flat == want.flat && got.first == want.first &&
        got.value == want.value && got.n == want.n && got.size == want.size)
        return;
    const struct zr_info *i = zr_info_at(rec, e->line->info);
    char holds[160];
    if (got.kind == want.kind && got.flat == want.flat && got.first == want.first &&
        got.kind != ZR_CONTENT_GRAD)
        snprintf(holds, sizeof holds, "version %llu instead of %llu", (unsigned long long)got.value,
                 (unsigned long long)want.value);
    else if (got.kind == want.kind && got.flat == want.flat && got.first == want.first)
        snprintf(holds, sizeof holds, "the sum of %d contributions, %s the %d of this step", got.n,
                 got.n == want.n  ? "not"
                 : got.n > want.n ? "more than"
                                  : "not all",
                 want.n);
    else
        snprintf(holds, sizeof holds, "%s of flat %d from element %lld", kind_name(got.kind), got.flat,
                 (long long)got.first);
    zr_report(rec,
              "%s (%s, unit %d, step %u) on rank %d's %s takes %s of flat %d from element %lld at +%lld "
              "of rank %d's %s, which holds %s",
              i->name, i->during, i->unit, i->step, e->line->rank, e->line->name, kind_name(want.kind),
              want.flat, (long long)want.first, (long long)r->from, b->rank, b->name, holds);
}

void zr_shadow_expect(struct zr_recorder *rec, const struct zr_line *l, const void *at, int64_t bytes,
                      struct zr_content content)
{
    if (bytes > 0 && !rec->forgiving && !rec->contents_unknown)
        each(rec, at, bytes, expect_one, &(struct expecting){{offset_of(rec, at), content}, l});
}

struct zr_content zr_shadow_at(struct zr_recorder *rec, const void *at)
{
    int64_t off;
    struct zr_block *b = find(rec, at, 1, &off);
    if (!b)
        return (struct zr_content){0};
    int32_t i = cut(rec, b, off); /* cut may move the ranges */
    struct range *r = &b->ranges[i];
    return r->content.size ? moved(r->content, (off - r->from) / r->content.size) : r->content;
}

void zr_shadow_move(struct zr_recorder *rec, struct zr_line *l, const void *dst, const void *src,
                    int64_t bytes)
{
    zr_shadow_read(rec, l, src, bytes);
    zr_shadow_write(rec, l, dst, bytes);
    int size = zr_shadow_at(rec, src).size;
    size = size ? size : 1;
    zr_shadow_copy(rec, dst, size, src, size, bytes / size);
}
