/* SPDX-License-Identifier: Apache-2.0 */
/* frame.c: see frame.h. */
#include "comm/meet/frame.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct zr_frame) == 24,
               "the head is what travels: no padding, no change without a new version");

char *zr_frame_room(struct zr_frame_reader *r, size_t *n)
{
    const size_t head = sizeof r->head;
    if (r->n_in < head) {
        *n = head - r->n_in;
        return (char *)&r->head + r->n_in;
    }
    *n = r->head.n_bytes - (r->n_in - head);
    return r->payload + (r->n_in - head);
}

enum zr_frame_state zr_frame_took(struct zr_frame_reader *r, size_t n)
{
    const size_t head = sizeof r->head;
    r->n_in += n;
    /* A connection that is not identified may say no more than its first bytes. */
    if (r->n_in >= sizeof r->head.magic && r->head.magic != ZR_FRAME_MAGIC)
        return ZR_FRAME_STRANGE;
    if (r->n_in < head)
        return ZR_FRAME_UNFINISHED;
    if (r->head.n_bytes > r->most_bytes)
        return ZR_FRAME_LARGE;
    if (r->head.n_bytes && !r->payload) {
        /* One byte more, for the zero that ends a text. */
        r->payload = malloc((size_t)r->head.n_bytes + 1);
        if (!r->payload)
            return ZR_FRAME_NO_MEMORY;
        r->payload[r->head.n_bytes] = 0;
    }
    return r->n_in == head + r->head.n_bytes ? ZR_FRAME_WHOLE : ZR_FRAME_UNFINISHED;
}

void zr_frame_next(struct zr_frame_reader *r)
{
    free(r->payload);
    r->payload = NULL;
    r->n_in = 0;
}
