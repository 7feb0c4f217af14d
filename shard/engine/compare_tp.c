/* SPDX-License-Identifier: Apache-2.0 */
/* compare_tp.c: compares what every tp rank has whole: weights, and in some steps reduced gradients.
 *
 * Each tp rank by itself computes the gradient of a tensor that is not cut. If a program leaves out a sum
 * over tp, the gradients differ, and the copies drift apart. Nothing shows this but a loss that is a little
 * off. So in the first steps the ranks compare their shards of these gradients, which the norm's job digests
 * before the update. The result is the same on all ranks of the job. */
#include "shard/engine/issue.h"
#include "shard/engine/mesh_axis.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What ranks exchange of a tensor's reduced gradient, before scaling: digest and squares of the shard. */
struct gradient {
    uint64_t digest;
    double squares;
};

/* ---- weights ---- */

bool zr_compare_is_due(const struct zr_engine *e)
{
    enum { EVERY = 64 };
    uint32_t step = zr_step_calls(e);
    return e->opt.check && ((step & (step - 1)) == 0 || step % EVERY == 0);
}

/* Numbers of the next words, and the sum of the digests. */
struct digesting {
    struct zr_engine *e;
    uint64_t next, *sum;
};

static int add_bytes(struct digesting *d, const void *at, int64_t bytes)
{
    const uint64_t first = d->next;
    d->next += (uint64_t)(bytes + 7) / 8;
    return d->e->dev->ops->digest(d->e->reduce_stream, d->sum, at, bytes, first);
}

static int add_weights(struct digesting *d, int32_t tensor)
{
    const struct zr_engine *e = d->e;
    const struct zr_layout *l = e->layout;
    const struct zr_tensor *t = &l->tensors[tensor];
    for (int64_t s = 0; !t->buffer && s < t->n_layers; s++) {
        int32_t id = l->piece_of[l->layer_base[tensor] + s];
        const struct zr_piece *p = &l->pieces[id];
        const struct zr_flat *f = zr_piece_flat(l, id);
        struct zr_span kept = zr_engine_kept(e, f);
        int64_t from = zr_max(kept.first, p->first), end = zr_min(kept.first + kept.n, p->first + p->n);
        if (from >= end)
            continue;
        ZR_TRY(add_bytes(d, zr_engine_param_at(e, f, from), (end - from) * zr_dtype_bytes(f->dtype)));
        for (int64_t n; zr_plan_master_size(f) && from < end; from += n) {
            n = end - from;
            ZR_TRY(zr_part_use(d->e, f, from, false, &n));
            ZR_TRY(add_bytes(d, zr_engine_master_at(e, f, from), n * zr_plan_master_size(f)));
        }
    }
    return 0;
}

int zr_digest_tensors(struct zr_engine *e, int32_t first, int32_t end, bool whole_only, uint64_t *digest)
{
    const struct zr_device_ops *ops = e->dev->ops;
    struct digesting d = {e, 0, (uint64_t *)(e->reduce_base + e->plan->control_at + ZR_DIGEST_AT)};
    ZR_TRY(ops->zero(e->reduce_stream, d.sum, sizeof *d.sum));
    for (int32_t t = first; t < end; t++)
        if (!whole_only || !e->layout->tensors[t].cut)
            ZR_TRY(add_weights(&d, t));
    ZR_TRY(ops->copy(e->reduce_stream, e->words, d.sum, sizeof *digest));
    ZR_TRY(zr_engine_drain(e));
    memcpy(digest, e->words, sizeof *digest);
    return 0;
}

/* Bytes of a tensor's name that ranks exchange. A multiple of a word. */
enum { SHOWN_NAME = 64 };

/* Packs a pair of ranks into a word. 0: no pair. */
static uint64_t pair_of(int32_t a, int32_t b)
{
    return (uint64_t)(uint32_t)(a + 1) << 32 | (uint32_t)b;
}

/* Finds two ranks of this copy of the model whose digests differ. */
static int find_pair(struct zr_engine *e, uint64_t digest, const struct zr_tag *tag, uint64_t *pair)
{
    const struct zr_comm *c = e->role[ZR_ROLE_TP].comm;
    const void *digests;
    *pair = 0;
    ZR_TRY(zr_axis_exchange(e, e->m.tp_axis, &digest, sizeof digest, tag, &digests));
    const uint64_t *all = digests;
    for (int32_t p = 1; p < e->tp && !*pair; p++)
        if (all[p] != all[0])
            *pair = pair_of(zr_comm_rank(c, 0), zr_comm_rank(c, p));
    return 0;
}

/* Replaces *word by the largest over all ranks of the job, in the memory of a step's agreement. */
static int most_of_world(struct zr_engine *e, const struct zr_tag *tag, uint64_t *word)
{
    const struct zr_device_ops *d = e->dev->ops;
    char *at = e->control_base + e->plan->agreement_at;
    const struct zr_tag of_world = {.unit = -1, .step = tag->step, .call_hash = zr_world_hash(e)};
    ZR_TRY(d->copy(e->reduce_stream, at, word, sizeof *word));
    ZR_TRY(zr_world_agree(e, e->plan->agreement_at, 0, 1, &of_world));
    ZR_TRY(d->copy(e->reduce_stream, e->words, at, sizeof *word));
    ZR_TRY(zr_engine_drain(e));
    memcpy(word, e->words, sizeof *word);
    return 0;
}

/* Finds two ranks that keep different bytes of an element, among the tensors [first, end) that are not cut.
 * *here: such a pair in this rank's tp group, or 0. *pair: the greatest pair of the job. */
static int compare_whole(struct zr_engine *e, int32_t first, int32_t end, uint64_t *here, uint64_t *pair)
{
    const struct zr_tag tag = zr_axis_tag(e, e->m.tp_axis, ZR_CALL_NONE, end, first);
    uint64_t digest;
    ZR_TRY(zr_digest_tensors(e, first, end, true, &digest));
    ZR_TRY(find_pair(e, digest, &tag, here));
    *pair = *here;
    return most_of_world(e, &tag, pair);
}

/* Spreads a name to all ranks from those that have it. name: NULL on the others. */
static int share_name(struct zr_engine *e, const char *name, char out[SHOWN_NAME])
{
    const struct zr_tag tag = zr_axis_tag(e, e->m.tp_axis, ZR_CALL_NONE, 0, 0);
    char own[SHOWN_NAME] = "";
    uint64_t word;
    snprintf(own, sizeof own, "%s", name ? name : "");
    for (size_t at = 0; at < SHOWN_NAME; at += sizeof word) {
        memcpy(&word, own + at, sizeof word);
        ZR_TRY(most_of_world(e, &tag, &word));
        memcpy(out + at, &word, sizeof word);
    }
    out[SHOWN_NAME - 1] = 0;
    return 0;
}

/* Compares tensor by tensor, and names the first that differs. Pipeline stages have different tensors, and
 * different numbers of them. */
static int name_difference(struct zr_engine *e, uint64_t pair, bool *differ)
{
    const struct zr_tag tag = zr_axis_tag(e, e->m.tp_axis, ZR_CALL_NONE, 0, 0);
    const int32_t n_tensors = e->layout->n_tensors;
    uint64_t of_tensor = 0, most = (uint64_t)n_tensors;
    char name[SHOWN_NAME];
    ZR_TRY(most_of_world(e, &tag, &most));
    for (int32_t t = 0; !of_tensor && t < (int32_t)most; t++) {
        uint64_t here = 0;
        ZR_TRY(compare_whole(e, t, t < n_tensors ? t + 1 : t, &here, &of_tensor));
        if (of_tensor) {
            ZR_TRY(share_name(e, here == of_tensor ? e->layout->tensors[t].name : NULL, name));
            pair = of_tensor;
        }
    }
    if (!of_tensor) /* the bytes have changed since */
        snprintf(name, sizeof name, "?");
    *differ = true;
    return zr_fail(ZERO_ERR_MISMATCH,
                   "tensor %s has no tp_cut, so all ranks of tp must have the same values, but rank %d and "
                   "rank %d differ",
                   name, (int)(pair >> 32) - 1, (int)(uint32_t)pair);
}

int zr_engine_tp_find_difference(struct zr_engine *e, bool *differ)
{
    uint64_t here = 0, pair = 0;
    *differ = false;
    if (e->tp == 1)
        return 0;
    int err = zr_engine_drain(e);
    struct zr_received before = zr_received_so_far(e);
    if (!err)
        err = compare_whole(e, 0, e->layout->n_tensors, &here, &pair);
    if (!err && pair)
        err = name_difference(e, pair, differ);
    zr_do_not_count_since(e, before);
    return err && !*differ ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

int zr_engine_tp_compare(struct zr_engine *e)
{
    bool differ;
    int err = zr_engine_tp_find_difference(e, &differ);
    return err || !differ ? err : zr_engine_fail(e, ZERO_ERR_MISMATCH, zr_error_text());
}

/* ---- gradients ---- */

/* Limits below which different bits count as rounding: the relative difference of two shards' sums of
 * squares, and the norm of a shard relative to that of the whole gradient. */
#define ROUNDING 1e-3
#define TINY     1e-4

/* The last step in which gradients are compared. */
enum { LAST_STEP = 16 };

/* Levels of a difference between two tp ranks. A difference is a word, and the greatest word of the job
 * counts: the worst difference, and among equals the first tensor. */
enum { EQUAL, ROUNDED, DIFFERENT };
enum { RANK_BITS = 20, TENSOR_BITS = 22 };

static uint64_t finding_of(uint64_t level, int32_t tensor, int32_t a, int32_t b)
{
    uint64_t most = (UINT64_C(1) << TENSOR_BITS) - 1;
    return level << 62 | (most - (uint64_t)tensor) << (2 * RANK_BITS) | (uint64_t)a << RANK_BITS |
           (uint64_t)b;
}

bool zr_tp_compares(const struct zr_engine *e, uint32_t step)
{
    return e->opt.compares_tp && e->tp > 1 && step <= LAST_STEP && (step & (step - 1)) == 0;
}

/* Returns what a step's NORM has found of each tensor: (n_tensors) in host memory, to be read after that
 * job. */
static struct zr_shard_digest *shard_digests(const struct zr_engine *e)
{
    return (struct zr_shard_digest *)((char *)e->agreed + e->plan->shard_digests_at);
}

/* Whether the tensor has a gradient that must be the same on all tp ranks. */
static bool has_whole_gradient(const struct zr_tensor *t)
{
    return t->grad && !t->buffer && !t->cut;
}

/* Puts digest and squares of this rank's shard of a tensor's reduced gradient on the reduce stream. */
static int digest_gradient(struct zr_engine *e, int32_t tensor, struct zr_shard_digest *to)
{
    const struct zr_layout *l = e->layout;
    struct zr_shard_digest *sum = zr_tp_shard_digest(e);
    struct digesting d = {e, 0, &sum->digest};
    ZR_TRY(e->dev->ops->zero(e->reduce_stream, sum, sizeof *sum));
    for (int64_t s = 0; s < l->tensors[tensor].n_layers; s++) {
        int32_t id = l->piece_of[l->layer_base[tensor] + s];
        const struct zr_piece *p = &l->pieces[id];
        const struct zr_flat *f = zr_piece_flat(l, id);
        struct zr_span own = zr_engine_fine(e, f);
        int64_t from = zr_max(own.first, p->first), end = zr_min(own.first + own.n, p->first + p->n);
        if (from >= end || e->i.left_out[f->unit])
            continue;
        const char *x = zr_sum_at(e, f, 0) + (from - own.first) * zr_sum_size(f);
        ZR_TRY(add_bytes(&d, x, (end - from) * zr_sum_size(f)));
        ZR_TRY(e->dev->ops->sum_squares(e->reduce_stream, &sum->squares, x, f->sum_dtype, end - from, NULL));
    }
    return e->dev->ops->copy(e->reduce_stream, to, sum, sizeof *sum);
}

int zr_tp_digest_gradients(struct zr_engine *e)
{
    struct zr_shard_digest *all = shard_digests(e);
    for (int32_t t = 0; t < e->layout->n_tensors; t++)
        if (has_whole_gradient(&e->layout->tensors[t]))
            ZR_TRY(digest_gradient(e, t, &all[t]));
    return 0;
}

int64_t zr_tp_digest_ops(const struct zr_engine *e)
{
    int64_t n = 0;
    for (int32_t t = 0; t < e->layout->n_tensors; t++)
        if (has_whole_gradient(&e->layout->tensors[t]))
            n += 2 + 2 * e->layout->tensors[t].n_layers;
    return e->opt.compares_tp && e->tp > 1 ? n : 0;
}

/* norm: that of the whole gradient, before scaling. */
static uint64_t level_of(const struct gradient *a, const struct gradient *b, double norm)
{
    double most = fmax(a->squares, b->squares);
    if (a->digest == b->digest)
        return EQUAL;
    if (!isfinite(a->squares) || !isfinite(b->squares))
        return DIFFERENT;
    return fabs(a->squares - b->squares) < ROUNDING * most || sqrt(most) < TINY * norm ? ROUNDED : DIFFERENT;
}

/* Finds the worst difference between any rank of this tp group and the first, over all tensors. */
static int find_gradient(struct zr_engine *e, double norm, uint64_t *worst)
{
    const struct zr_comm *c = e->role[ZR_ROLE_TP].comm;
    enum { MOST = ZR_EXCHANGE_BYTES / (int)sizeof(struct gradient) };
    const struct zr_shard_digest *own = shard_digests(e);
    const int32_t n_tensors = e->layout->n_tensors;
    struct gradient mine[MOST];
    for (int32_t at = 0, n; at < n_tensors; at += n) {
        n = (int32_t)zr_min(n_tensors - at, MOST);
        for (int32_t k = 0; k < n; k++)
            mine[k] = (struct gradient){own[at + k].digest, zr_exact_value(&own[at + k].squares)};
        const struct zr_tag tag = zr_axis_tag(e, e->m.tp_axis, ZR_CALL_NONE, n, at);
        const void *gradients;
        ZR_TRY(zr_axis_exchange(e, e->m.tp_axis, mine, n * (int64_t)sizeof *mine, &tag, &gradients));
        const struct gradient *all = gradients;
        for (int32_t p = 1; p < e->tp; p++)
            for (int32_t k = 0; k < n; k++) {
                uint64_t level = level_of(&all[k], &all[p * n + k], norm),
                         found = finding_of(level, at + k, zr_comm_rank(c, 0), zr_comm_rank(c, p));
                if (level && found > *worst)
                    *worst = found;
            }
    }
    return 0;
}

/* Reports the difference on all ranks. The ranks that have found it provide the name. */
static int report_gradient(struct zr_engine *e, uint64_t found, uint64_t here)
{
    const uint64_t ranks = (UINT64_C(1) << RANK_BITS) - 1, tensors = (UINT64_C(1) << TENSOR_BITS) - 1;
    int32_t a = (int32_t)(found >> RANK_BITS & ranks), b = (int32_t)(found & ranks),
            t = (int32_t)(tensors - (found >> (2 * RANK_BITS) & tensors));
    char name[SHOWN_NAME];
    ZR_TRY(share_name(e, found == here ? e->layout->tensors[t].name : NULL, name));
    if (found >> 62 == DIFFERENT)
        return zr_fail(
            ZERO_ERR_MISMATCH,
            "step %u: tensor %s has no tp_cut, so all ranks of tp must have the same gradient, but those of "
            "rank %d and rank %d differ by more than rounding: a sum over tp is missing in backward "
            "(zero_all_reduce, zero_reduce_scatter or ZERO_TP_PARTIAL), or ranks of tp read different data",
            zr_last_step_number(e), name, a, b);
    if (!e->m.said_rounding && e->rank == a)
        zr_warn(
            e->opt.log,
            "step %u: the gradients of tensor %s, which has no tp_cut, differ by rounding between rank %d "
            "and rank %d of tp: the copies drift apart; allowed: the same bits on all ranks of tp",
            zr_last_step_number(e), name, a, b);
    e->m.said_rounding = true;
    return 0;
}

int zr_compare_gradients(struct zr_engine *e)
{
    uint64_t here = 0, found;
    if (!zr_tp_compares(e, zr_step_calls(e)))
        return 0;
    int err = zr_engine_drain(e);
    if (err || zr_last_result(e)->skipped)
        return err;
    struct zr_received before = zr_received_so_far(e);
    const struct zr_tag tag = zr_axis_tag(e, e->m.tp_axis, ZR_CALL_NONE, 0, 0);
    err = find_gradient(e, zr_last_result(e)->grad_norm / fabs(zr_unclipped_scale(e, zr_engine_tuned(e))),
                        &here);
    found = here;
    if (!err)
        err = most_of_world(e, &tag, &found);
    if (!err && found)
        err = report_gradient(e, found, here);
    zr_do_not_count_since(e, before);
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}
