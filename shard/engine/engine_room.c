/* SPDX-License-Identifier: Apache-2.0 */
/* engine_room.c: how many operations a job puts on a stream, and room for them.
 *
 * A stream of the host holds a bounded number, and who puts more on it waits. The loop's thread must not: it
 * looks after sockets. Of most jobs there are a few for each flat of a unit. The norm and an update have some
 * for each tensor at most, a snapshot for each array of each flat, and these go on the reduce stream alone.
 * So room for the largest job is reserved with the engine's tables, some 200 bytes an operation, and a job is
 * issued when there is room for all of it. */
#include "shard/engine/engine_issue.h"

/* Of any job: waits, stamps, collectives, and what the norm has besides its squares. Of a flat: narrowed,
 * reduced and gathered (a communicator of one rank moves each by itself), and folds. Of a piece's update by
 * optim.update: the gradient scaled, the call, the weights rounded. */
enum { OPS_OF_JOB = 16, OPS_OF_FLAT = 3, OPS_OF_USER_UPDATE = 3 };

static int count_piece(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first, int64_t n)
{
    (void)f, (void)p, (void)first, (void)n;
    ++*(int64_t *)arg;
    return 0;
}

/* Pieces of n trainable flats of which this rank has elements, at that level. */
static int64_t count_pieces(const struct zr_engine *e, const struct zr_flat *f, int32_t n,
                            enum zr_level level)
{
    int64_t count = 0;
    for (int32_t i = 0; i < n; i++) {
        struct zr_span span = zr_flat_span(&f[i], e->at, level);
        if (f[i].trainable)
            zr_flat_ranges(e->layout, &f[i], span.first, span.first + span.n, count_piece, &count);
    }
    return count;
}

int64_t zr_room_of(const struct zr_engine *e, enum zr_action_kind kind, int32_t unit)
{
    const struct zr_layout *l = e->layout;
    int64_t any = OPS_OF_JOB + (OPS_OF_FLAT + e->plan->n_sums - 1) * (int64_t)e->most_segs;
    if (kind == ZR_ACT_NORM)
        return any + count_pieces(e, l->flats, l->n_flats, ZR_LEVEL_FINE);
    if (kind == ZR_ACT_SNAPSHOT)
        return any + (e->plan->n_states - ZR_VALUE_PARAM) * (int64_t)l->n_flats;
    if (kind != ZR_ACT_UPDATE)
        return any;
    int32_t n;
    const struct zr_flat *f = zr_unit_flats(e, unit, &n);
    int64_t n_pieces = count_pieces(e, f, n, zr_level_of(e->plan->place.state));
    return any + n_pieces * (e->opt.update ? OPS_OF_USER_UPDATE : 1);
}

/* Besides the reduce stream; NULL: there is none. */
enum { N_OTHERS = 3 };
static void list_others(const struct zr_engine *e, struct zr_stream *s[N_OTHERS])
{
    s[0] = e->gather_stream;
    s[1] = e->gather_outer_stream;
    s[2] = e->reduce_outer_stream;
}

int zr_room_open(struct zr_engine *e)
{
    struct zr_stream *s[N_OTHERS];
    int64_t any = zr_room_of(e, ZR_ACT_REDUCE, 0), most = zr_room_of(e, ZR_ACT_NORM, -1);
    if (e->plan->snapshot_bytes)
        most = zr_max(most, zr_room_of(e, ZR_ACT_SNAPSHOT, -1));
    for (int32_t u = 0; u < e->layout->n_units; u++)
        most = zr_max(most, zr_room_of(e, ZR_ACT_UPDATE, u));
    ZR_TRY(zr_stream_reserve(e->dev, e->reduce_stream, most));
    list_others(e, s);
    for (int i = 0; i < N_OTHERS; i++)
        if (s[i])
            ZR_TRY(zr_stream_reserve(e->dev, s[i], any));
    return 0;
}

bool zr_room_for(const struct zr_engine *e, const struct zr_action *a)
{
    struct zr_stream *s[N_OTHERS];
    int64_t any = zr_room_of(e, ZR_ACT_REDUCE, 0);
    list_others(e, s);
    for (int i = 0; i < N_OTHERS; i++)
        if (s[i] && !zr_stream_has_room(e->dev, s[i], any))
            return false;
    return zr_stream_has_room(e->dev, e->reduce_stream, zr_room_of(e, (enum zr_action_kind)a->kind, a->unit));
}
