/* SPDX-License-Identifier: Apache-2.0 */
/* whole.c: the list of the tensors of the whole model. With pipeline stages each rank has its own
 * table, but checkpoint files speak of the whole model, so that they do not depend on stages.
 *
 * ZERO_STACKED tensors with one name in several stages are one tensor, whose layers follow each other
 * in the order of the stages. A tied tensor belongs to the first stage. Any other tensor is in one stage
 * only. */
#include "kernels/alloc.h"
#include "zero/context.h"

#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* The message about the tensors of a rank: this head, a record for each tensor, and the names with their
 * terminating zeros. Ranks with the same stages have the same message, and each of them sends a slice of
 * it. */
struct head {
    int64_t n_bytes, n_tensors;
    uint64_t layout_hash;
};

struct tensor_record {
    int64_t shape[8], n_elems, cut_size;
    int32_t dtype, optimizer, n_states, masters, moments, cut_dim, cut_blocks, tie, pp_stage;
    uint8_t stacked, trained, buffer, cut;
};

/* A tensor in the table of a stage. */
struct listed_tensor {
    struct tensor_record record;
    const char *name;
    int32_t pp_at, index;
    /* first: index of the first tensor with this name. number: index of the tensor in the whole model */
    int64_t first;
    int32_t number;
    /* layers in earlier stages; in the first tensor of a name, layers in all stages */
    int64_t before, layers;
};

/* ---- the messages of ranks ---- */

static void fill_record(const struct zr_tensor *t, struct tensor_record *r)
{
    memset(r, 0, sizeof *r);
    memcpy(r->shape, t->shape, sizeof r->shape);
    r->n_elems = t->n_elems;
    r->cut_size = t->cut_size;
    r->dtype = t->dtype;
    r->optimizer = t->optimizer;
    r->n_states = t->n_states;
    r->masters = t->masters;
    r->moments = t->moments;
    r->cut_dim = t->cut_dim;
    r->cut_blocks = t->cut_blocks;
    r->tie = t->tie;
    r->pp_stage = t->pp_stage;
    r->stacked = t->stacked;
    r->trained = t->grad != NULL;
    r->buffer = t->buffer;
    r->cut = t->cut;
}

static int64_t message_bytes(const struct zr_layout *l)
{
    int64_t n = (int64_t)sizeof(struct head) + l->n_tensors * (int64_t)sizeof(struct tensor_record);
    for (int32_t i = 0; i < l->n_tensors; i++)
        n += (int64_t)strlen(l->tensors[i].name) + 1;
    return n;
}

static void fill_message(const struct zr_layout *l, int64_t n_bytes, char *out)
{
    const struct head h = {.n_bytes = n_bytes, .n_tensors = l->n_tensors, .layout_hash = l->hash};
    char *name = out + sizeof h + (size_t)l->n_tensors * sizeof(struct tensor_record);
    memcpy(out, &h, sizeof h);
    for (int32_t i = 0; i < l->n_tensors; i++) {
        struct tensor_record r;
        size_t n = strlen(l->tensors[i].name) + 1;
        fill_record(&l->tensors[i], &r);
        memcpy(out + sizeof h + (size_t)i * sizeof r, &r, sizeof r);
        memcpy(name, l->tensors[i].name, n);
        name += n;
    }
}

/* Makes the message of a rank that has all stages. */
static int take_own_table(const struct zero_ctx *z, char **out, int64_t *each_bytes)
{
    *each_bytes = message_bytes(z->layout);
    ZR_TRY(ZR_ALLOC(*out, *each_bytes, "this rank's table of tensors"));
    fill_message(z->layout, *each_bytes, *out);
    return 0;
}

/* Exchanges the tables. *out has a message of *each_bytes bytes from every rank of the pipeline. */
static int exchange_tables(struct zero_ctx *z, char **out, int64_t *each_bytes)
{
    if (!z->rendezvous)
        return take_own_table(z, out, each_bytes);
    int32_t world = z->world.world, ranks_per_stage = world / z->mesh.pp;
    int64_t own_bytes = message_bytes(z->layout), *sizes;
    int err = ZR_ALLOC(sizes, world, "the tables of %d ranks", world);
    err = err ? zr_rendezvous_fail(z->rendezvous, err)
              : zr_rendezvous_exchange(z->rendezvous, &own_bytes, sizeof own_bytes, sizes);
    *each_bytes = own_bytes;
    for (int32_t r = 0; !err && r < world; r++)
        *each_bytes = zr_max(*each_bytes, sizes[r]);
    free(sizes);
    if (err)
        return err;
    int64_t slice = (*each_bytes + ranks_per_stage - 1) / ranks_per_stage;
    *each_bytes = slice * ranks_per_stage;
    char *mine = calloc(1, (size_t)*each_bytes);
    *out = malloc((size_t)world * (size_t)slice);
    if (mine && *out) {
        fill_message(z->layout, own_bytes, mine);
        err = zr_rendezvous_exchange(z->rendezvous, mine + z->world.rank % ranks_per_stage * slice,
                                     (size_t)slice, *out);
    } else {
        err = zr_rendezvous_fail(z->rendezvous,
                                 zr_fail(ZERO_ERR_NOMEM, "no memory for the tables of %d ranks", world));
    }
    free(mine);
    return err;
}

static int64_t count_tensors(const struct zero_ctx *z, const char *all, int64_t each_bytes)
{
    int64_t n = 0;
    struct head h;
    for (int32_t r = 0; r < z->mesh.pp; r++) {
        memcpy(&h, all + r * each_bytes, sizeof h);
        n += h.n_tensors;
    }
    return n;
}

/* Lists the tensors of one stage from the message of a rank that has it. Returns the end of the list. */
static struct listed_tensor *list_stage(const struct zero_ctx *z, const char *at, int32_t stage,
                                        struct listed_tensor *list)
{
    struct head h;
    memcpy(&h, at, sizeof h);
    const char *rows = at + sizeof h, *name = rows + (size_t)h.n_tensors * sizeof(struct tensor_record);
    for (int32_t i = 0; i < h.n_tensors; i++, name += strlen(name) + 1) {
        struct listed_tensor x = {.name = name, .pp_at = stage % z->mesh.pp, .index = i};
        memcpy(&x.record, rows + (size_t)i * sizeof x.record, sizeof x.record);
        if (x.record.pp_stage == stage / z->mesh.pp)
            *list++ = x;
    }
    return list;
}

/* Lists the tensors of all stages in order. */
static void list_tensors(struct zero_ctx *z, const char *all, int64_t each_bytes, struct listed_tensor *list)
{
    uint64_t hash = 0;
    for (int32_t stage = 0; stage < zr_stages(z); stage++)
        list = list_stage(z, all + stage % z->mesh.pp * each_bytes, stage, list);
    for (int32_t r = 0; r < z->mesh.pp; r++) {
        struct head h;
        memcpy(&h, all + r * each_bytes, sizeof h);
        hash = XXH64(&h.layout_hash, sizeof h.layout_hash, hash);
    }
    z->whole.hash = hash;
}

/* ---- which tensors of stages form one of the model ---- */

static int by_name_and_stage(const void *a, const void *b)
{
    const struct listed_tensor *x = *(const struct listed_tensor *const *)a,
                               *y = *(const struct listed_tensor *const *)b;
    int order = strcmp(x->name, y->name);
    return order ? order : (x > y) - (x < y);
}

/* Whether two tensors may be layers of one stack. */
static bool same_layers(const struct tensor_record *a, const struct tensor_record *b)
{
    return !memcmp(a->shape + 1, b->shape + 1, sizeof a->shape - sizeof *a->shape) && a->dtype == b->dtype &&
           a->optimizer == b->optimizer && a->n_states == b->n_states && a->masters == b->masters &&
           a->moments == b->moments && a->trained == b->trained && a->cut == b->cut &&
           a->cut_dim == b->cut_dim && a->cut_blocks == b->cut_blocks;
}

/* Checks a tensor that has the name of a tensor in an earlier stage. */
static int check_same_name(const struct zero_ctx *z, const struct listed_tensor *first,
                           const struct listed_tensor *x)
{
    int32_t ranks_per_stage = z->world.world / z->mesh.pp;
    if (first->record.tie == ZR_TIE_OWNER && x->record.tie == ZR_TIE_COPY)
        return 0;
    if (!first->record.stacked || !x->record.stacked)
        return zr_fail(
            ZERO_ERR_MISMATCH,
            "tensor %s is in the tables of rank %d and rank %d of two pipeline stages; allowed: one stage, "
            "or several with ZERO_STACKED, each with its layers, or the first and the last with ZERO_TIED",
            x->name, first->pp_at * ranks_per_stage, x->pp_at * ranks_per_stage);
    if (!same_layers(&first->record, &x->record))
        return zr_fail(ZERO_ERR_MISMATCH,
                       "rank %d and rank %d of two pipeline stages differ in tensor %s: in the shape of a "
                       "layer, dtype, optimizer, masters, moments, tp_cut or whether it has a gradient",
                       first->pp_at * ranks_per_stage, x->pp_at * ranks_per_stage, x->name);
    return 0;
}

/* Finds the tensors of stages that form one tensor of the model, and the first layer of each in it. */
static int join_tensors(const struct zero_ctx *z, struct listed_tensor *list, int64_t n)
{
    struct listed_tensor **sorted, *first = NULL;
    int err = ZR_ALLOC(sorted, n, "comparing %lld tensors", (long long)n);
    for (int64_t i = 0; !err && i < n; i++)
        sorted[i] = &list[i];
    if (!err)
        qsort(sorted, (size_t)n, sizeof *sorted, by_name_and_stage);
    for (int64_t i = 0; !err && i < n; i++) {
        struct listed_tensor *x = sorted[i];
        if (!i || strcmp(x->name, first->name) != 0)
            first = x;
        else
            err = check_same_name(z, first, x);
        x->first = first - list;
        x->before = first->layers;
        first->layers += x->record.tie == ZR_TIE_COPY ? 0 : x->record.shape[0];
    }
    free(sorted);
    return err;
}

static int add_whole(struct zr_whole *w, const struct listed_tensor *x)
{
    const struct tensor_record *r = &x->record;
    struct zr_tensor *t = &w->tensors[w->n];
    *t = (struct zr_tensor){.name = strdup(x->name),
                            .grad = r->trained ? &w->trained : NULL,
                            .dtype = (enum zero_dtype)r->dtype,
                            .n_elems = r->n_elems / r->shape[0] * x->layers,
                            .n_layers = r->stacked ? x->layers : !r->buffer,
                            .optimizer = (enum zero_optimizer)r->optimizer,
                            .n_states = r->n_states,
                            .masters = (enum zero_masters)r->masters,
                            .moments = (enum zero_moments)r->moments,
                            .stacked = r->stacked,
                            .cut = r->cut,
                            .cut_dim = r->cut_dim,
                            .cut_blocks = r->cut_blocks,
                            .cut_size = r->cut_size,
                            .buffer = r->buffer};
    memcpy(t->shape, r->shape, sizeof t->shape);
    t->shape[0] = x->layers;
    if (!t->name)
        return zr_fail(ZERO_ERR_NOMEM, "no memory for the names of the whole model's tensors");
    w->n++;
    return 0;
}

/* Numbers the tensors in the order of stages and of their tables. */
static int number_tensors(struct zero_ctx *z, struct listed_tensor *list, int64_t n)
{
    struct zr_whole *w = &z->whole;
    int err = 0;
    if (n > INT32_MAX / 2)
        return zr_fail(ZERO_ERR_ARG, "the pipeline stages have %lld tensors; allowed: %d", (long long)n,
                       INT32_MAX / 2);
    w->owns_tensors = true;
    ZR_TRY(ZR_ZALLOC(w->tensors, n, "the %lld tensors of all pipeline stages", (long long)n));
    ZR_TRY(ZR_ZALLOC(w->at, z->layout->n_tensors, "the places of this rank's tensors"));
    for (int64_t i = 0; !err && i < n; i++) {
        struct listed_tensor *x = &list[i], *first = &list[x->first];
        if (x == first) {
            x->number = w->n;
            err = add_whole(w, x);
        }
        if (x->pp_at == z->config.place.pp)
            w->at[x->index] =
                (struct zr_whole_at){.tensor = first->number,
                                     .first = x == first || x->record.tie == ZR_TIE_COPY
                                                  ? 0
                                                  : x->before * (x->record.n_elems / x->record.shape[0])};
    }
    return err;
}

int zr_whole_make(struct zero_ctx *z)
{
    char *all = NULL;
    int64_t each_bytes;
    if (zr_stages(z) == 1) {
        z->whole = (struct zr_whole){
            .n = z->layout->n_tensors, .tensors = z->layout->tensors, .hash = z->layout->hash};
        return 0;
    }
    int err = exchange_tables(z, &all, &each_bytes);
    if (err) {
        free(all);
        return err;
    }
    int64_t n = count_tensors(z, all, each_bytes);
    struct listed_tensor *list;
    err = ZR_ZALLOC(list, n, "the %lld tensors of all pipeline stages", (long long)n);
    if (!err) {
        list_tensors(z, all, each_bytes, list);
        err = join_tensors(z, list, n);
    }
    if (!err)
        err = number_tensors(z, list, n);
    free(list);
    free(all);
    return zr_agree_on_success(z, err);
}

void zr_whole_free(struct zr_whole *w)
{
    for (int32_t i = 0; w->owns_tensors && i < w->n; i++)
        free(w->tensors[i].name);
    if (w->owns_tensors)
        free(w->tensors);
    free(w->at);
    *w = (struct zr_whole){0};
}
