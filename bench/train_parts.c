/* SPDX-License-Identifier: Apache-2.0 */
/* train_parts.c: see train_parts.h. */
#include "bench/train_parts.h"
#include "bench/failed.h"

#include <stdlib.h>

static int sum(void *arg, real *x, int64_t n)
{
    zero_ctx **z = arg;
    return zero_all_reduce(*z, ZERO_AXIS_TP, x, x, n, GPT2_ZERO_DTYPE, ZERO_SUM);
}

static int reduce(void *arg, float *x, int64_t n, bool largest)
{
    zero_ctx **z = arg;
    return zero_all_reduce(*z, ZERO_AXIS_TP, x, x, n, ZERO_F32, largest ? ZERO_MAX : ZERO_SUM);
}

static int gather(void *arg, real *dst, const real *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_all_gather(*z, ZERO_AXIS_TP, dst, src, n, GPT2_ZERO_DTYPE);
}

static int scatter(void *arg, real *dst, const real *src, int64_t n)
{
    zero_ctx **z = arg;
    return zero_reduce_scatter(*z, ZERO_AXIS_TP, dst, src, n, GPT2_ZERO_DTYPE);
}

static int take_place(struct train_place *to, const struct zero_place *p, int64_t pp, int64_t tp)
{
    *to = (struct train_place){
        .dp = p->data, .n_dp = p->n_data, .part = p->tp, .stage = p->pp, .n_stages = p->n_pp};
    if (p->n_pp == (pp > 1 ? pp : 1) && p->n_tp == (tp > 1 ? tp : 1))
        return 0;
    return failed(ZERO_ERR_ARG,
                  "pp is %d and tp %d by ZERO_PP and ZERO_TP, which this program wants as --pp and --tp",
                  p->n_pp, p->n_tp);
}

int train_place_open(struct train_place *p, int64_t pp, int64_t tp, struct zero_config *cfg)
{
    struct zero_place place;
    *p = (struct train_place){.n_dp = 1, .n_stages = 1};
    if (tp <= 1 && pp <= 1)
        return 0;
    cfg->mesh.pp = pp > 1 ? (int32_t)pp : 1;
    cfg->mesh.tp = tp > 1 ? (int32_t)tp : 1;
    int err = reported(zero_find_place(cfg, &place));
    return err ? err : take_place(p, &place, pp, tp);
}

int train_place_wrapped(struct train_place *p, int64_t pp, int64_t tp, const struct zero_stats *stats)
{
    return take_place(p, &stats->place, pp, tp);
}

void train_parts_join(const struct train_place *p, struct gpt2 *model, zero_ctx **z)
{
    model->part = p->part;
    model->sum = sum;
    model->reduce = reduce;
    model->gather = gather;
    model->scatter = scatter;
    model->sum_arg = z;
}

/* How a tensor of the part lies in the whole: as rows, of which each is a run of `run` elements from column
 * `at` of a row of `width`. rows: of a layer, in blocks that each part has some of. */
struct cut {
    int64_t rows, blocks, run, width, at;
};

/* No rows: it is not cut. */
static struct cut cut_of(const struct gpt2_config *c, int32_t part, int t)
{
    int64_t C = c->channels, A = gpt2_part_channels(c), F = gpt2_part_hidden(c);
    switch (t) {
    case 0: /* wte */
        return (struct cut){gpt2_part_vocab(c), 1, C, C, 0};
    case 4: /* qkvw */
        return (struct cut){3 * A, 3, C, C, 0};
    case 5: /* qkvb */
        return (struct cut){3 * A, 3, 1, 1, 0};
    case 6: /* attprojw */
        return (struct cut){C, 0, A, C, part * A};
    case 10: /* fcw */
        return (struct cut){F, 1, C, C, 0};
    case 11: /* fcb */
        return (struct cut){F, 1, 1, 1, 0};
    case 12: /* fcprojw */
        return (struct cut){C, 0, F, 4 * C, part * F};
    default:
        return (struct cut){0};
    }
}

/* The row of the whole tensor that row r of the part's is, layers counted through. */
static int64_t whole_row(const struct gpt2_config *c, const struct cut *cut, int32_t part, int64_t r)
{
    if (!cut->blocks)
        return r;
    int64_t layer = r / cut->rows, in_layer = r % cut->rows, of_block = cut->rows / cut->blocks;
    int64_t block = in_layer / of_block;
    return layer * cut->rows * c->tp + block * of_block * c->tp + part * of_block + in_layer % of_block;
}

void train_draw_part(const struct gpt2_config *config, int32_t part, uint64_t seed, int t, int64_t first,
                     int64_t n, real *x)
{
    const struct cut cut = cut_of(config, part, t);
    if (config->tp <= 1 || !cut.rows) {
        gpt2_draw(config, seed, t, first, n, x);
        return;
    }
    for (int64_t at = first, k; at < first + n; at += k) {
        int64_t row = at / cut.run, column = at % cut.run;
        k = cut.run - column < first + n - at ? cut.run - column : first + n - at;
        int64_t whole = whole_row(config, &cut, part, row);
        if (t == 0 && whole >= config->vocab) { /* an id that is nobody's */
            memset(x + (at - first), 0, (size_t)k * sizeof *x);
            continue;
        }
        gpt2_draw(config, seed, t, whole * cut.width + cut.at + column, k, x + (at - first));
    }
}

/* Each rank puts its digits in its own place, and all are added up. */
int train_parts_hash(zero_ctx *z, int32_t part, int64_t n_parts, char hash[STATE_HASH_CHARS])
{
    enum { DIGITS = STATE_HASH_CHARS - 1 };
    float *digits = calloc((size_t)n_parts * DIGITS, sizeof *digits);
    char *all = malloc((size_t)n_parts * DIGITS + 1);
    int err = digits && all
                  ? 0
                  : zr_fail(ZR_ERR_NOMEM, "no memory for the hashes of %lld parts", (long long)n_parts);
    for (int i = 0; !err && i < DIGITS; i++)
        digits[part * DIGITS + i] = (float)hash[i];
    if (!err)
        err = zero_all_reduce(z, ZERO_AXIS_TP, digits, digits, n_parts * DIGITS, ZERO_F32, ZERO_SUM);
    for (int64_t i = 0; !err && i < n_parts * DIGITS; i++)
        all[i] = (char)digits[i];
    if (!err)
        state_hash_text(hash, all, (size_t)n_parts * DIGITS);
    free(digits);
    free(all);
    return err;
}
