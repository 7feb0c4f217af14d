/* SPDX-License-Identifier: Apache-2.0 */
/* old_params.c: in check mode, fills the memory that the parameters had before zero_wrap with NaN. A stale
 * copy of a pointer, for example in a graph node, then gives a NaN loss at once.
 *
 * Only private, writable memory is filled, never a shared or read-only mapping of a weights file. Gradients
 * are left as they are, because *grad may point anywhere at zero_wrap. */
#include "zero/context.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Addresses [first, end) that are private and writable. */
struct range {
    uintptr_t first, end;
};

struct ranges {
    struct range *at; /* sorted, disjoint */
    size_t n;
};

static bool add(struct ranges *r, uintptr_t first, uintptr_t end)
{
    if (r->n && r->at[r->n - 1].end == first) {
        r->at[r->n - 1].end = end;
        return true;
    }
    struct range *more = realloc(r->at, (r->n + 1) * sizeof *more);
    if (!more)
        return false;
    r->at = more;
    r->at[r->n++] = (struct range){first, end};
    return true;
}

/* Reads the mappings of this process, which the kernel lists by address. */
static bool read_ranges(struct ranges *r)
{
    FILE *f = fopen("/proc/self/maps", "re");
    char *line = NULL;
    size_t room = 0;
    bool ok = f != NULL;
    while (ok && getline(&line, &room, f) > 0) {
        uintptr_t first, end;
        char may[5];
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &first, &end, may) == 3 && may[1] == 'w' &&
            may[3] == 'p')
            ok = add(r, first, end);
    }
    free(line);
    if (f)
        fclose(f);
    return ok;
}

/* Returns the first range that ends after the address. */
static size_t range_behind(const struct ranges *r, uintptr_t at)
{
    size_t lo = 0, hi = r->n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (r->at[mid].end > at)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

/* Fills memory with a value that is NaN as f32 and as bf16. It is not the NaN that check mode fills gradients
 * with (shard/engine/check/stored.c). It may get into a gradient, and must not be mistaken for that one. at
 * is even. */
static void fill(char *at, size_t n_bytes)
{
    const uint16_t nan = 0x7fc0;
    for (size_t i = 0; i + sizeof nan <= n_bytes; i += sizeof nan)
        memcpy(at + i, &nan, sizeof nan);
}

/* Returns the bytes filled. */
static size_t fill_within(const struct ranges *r, char *buffer, size_t n_bytes)
{
    uintptr_t at = (uintptr_t)buffer, end = at + n_bytes;
    size_t n = 0;
    for (size_t i = range_behind(r, at); i < r->n && r->at[i].first < end; i++) {
        uintptr_t lo = r->at[i].first > at ? r->at[i].first : at,
                  hi = r->at[i].end < end ? r->at[i].end : end;
        fill(buffer + (lo - at), hi - lo);
        n += hi - lo;
    }
    return n;
}

void zr_old_params_fill(const struct zero_ctx *z)
{
    const struct zr_layout *l = z->layout;
    struct zr_log *log = z->config.options.log;
    if (!z->config.options.check || !z->device->ops->compute_on_caller ||
        zr_values_in(z) == ZR_VALUES_ELSEWHERE) /* *param may point anywhere then */
        return;
    struct ranges r = {0};
    if (read_ranges(&r)) {
        int32_t n_filled = 0;
        for (int32_t i = 0; i < l->n_tensors; i++) {
            if (l->tensors[i].buffer || !*l->tensors[i].param)
                continue;
            size_t n_bytes = (size_t)(l->tensors[i].n_elems * zr_dtype_bytes(l->tensors[i].dtype));
            n_filled += fill_within(&r, *l->tensors[i].param, n_bytes) == n_bytes;
        }
        zr_info(log,
                "check: the model's former memory of %d of %d tensors was filled with NaN; the others are in "
                "shared or read-only memory",
                n_filled, l->n_tensors - l->n_buffers);
    } else {
        zr_warn(log,
                "check: the model's former memory was not filled with NaN: /proc/self/maps cannot be read");
    }
    free(r.at);
}
