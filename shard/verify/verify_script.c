/* verify_script.c: the model of a case: its tensors, its calls, and which bytes its compute touches. */
#include "shard/verify/verify_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- tensors ---- */

static int64_t any_size(uint64_t *s)
{
    static const int64_t sizes[] = {1, 15, 17, 31, 32, 33, 63, 64, 100, 127, 128, 129, 17 * 257, 8100};
    return zr_verify_chance(s, 30) ? 1 + zr_verify_below(s, 3000)
                                   : sizes[zr_verify_below(s, sizeof sizes / sizeof *sizes)];
}

static void name_tensor(struct zr_tensor *t, int32_t i)
{
    char name[16];
    snprintf(name, sizeof name, "t%d", i);
    t->name = strdup(name);
}

int zr_script_tensors(const struct zr_verify_case *c, const struct zr_verify_speed *speed,
                      struct zr_tensor **out, int32_t *n)
{
    uint64_t s = c->seed ^ 0x7e45;
    struct zr_tensor *t = calloc((size_t)c->n_units * 3 + 1, sizeof *t);
    static void *nowhere;
    if (!t)
        return zr_fail(ZR_ERR_NOMEM, "no memory for the tensors of %d units", c->n_units);
    *n = 0;
    /* One tensor over several units, and one to three of each unit's own. */
    int32_t first = c->stacked ? (int32_t)zr_verify_below(&s, c->n_units) : 0;
    for (int32_t u = c->stacked ? -1 : 0; u < c->n_units; u++) {
        int32_t k = u < 0 || speed ? 1 : 1 + (int32_t)zr_verify_below(&s, 3);
        for (; k > 0; k--, ++*n) {
            struct zr_tensor *x = &t[*n];
            *x = (struct zr_tensor){.param = &nowhere,
                                    .grad = &nowhere,
                                    .dtype = ZR_F32,
                                    .n_slices = 1,
                                    .unit = u < 0 ? first : u};
            x->n_elems = !speed         ? any_size(&s)
                         : speed->units ? speed->units[zr_max(u, 0)].elems
                                        : speed->unit_elems;
            name_tensor(x, *n);
            if (!x->name) {
                zr_tensors_free(t, *n);
                return zr_fail(ZR_ERR_NOMEM, "no memory for a name");
            }
            if (u < 0) {
                x->stacked = x->pointer_per_begin = true;
                x->n_slices = c->n_units - first;
                x->n_elems *= x->n_slices;
            }
            if (c->bf16 && (speed || zr_verify_chance(&s, 50)))
                x->dtype = ZR_BF16;
            if (zr_verify_chance(&s, c->frozen))
                x->grad = NULL;
            x->lr_scale = 1;
            x->decay_scale = zr_verify_chance(&s, 30) ? 0 : 1;
            if (c->mixed) /* of several kinds, some without state */
                x->optimizer = (enum zr_optimizer)((c->seed + (uint64_t)*n * 7) % ZR_OPTIMIZER_COUNT);
            /* Stored instead of added: only where the model writes each gradient just once before it is
             * handed in. */
            bool often =
                c->pattern == ZR_USE_TIED || (c->unbracketed && (c->pattern == ZR_USE_TWICE || c->skipped));
            x->overwrite = c->overwrite && !often && zr_verify_chance(&s, 50);
            x->resident = (c->resident && zr_verify_chance(&s, 30)) ||
                          (speed && speed->units && speed->units[zr_max(u, 0)].resident);
            x->granule = zr_min(c->granule, x->n_elems / x->n_slices);
        }
    }
    *out = t;
    return 0;
}

/* ---- calls ---- */

static void add(struct zr_script *s, struct zr_script_op op)
{
    if (s->n == s->cap) {
        s->cap = s->cap ? s->cap * 2 : 256;
        s->ops = realloc(s->ops, (size_t)s->cap * sizeof *s->ops);
        if (!s->ops)
            abort();
    }
    s->ops[s->n++] = op;
}

enum { DROPPED_STEP = 100 }; /* added to the number of a step that is dropped; a case has fewer */

struct writing {
    const struct zr_verify_case *c;
    struct zr_script *s;
    int32_t *all, *list;            /* (n_units) in order of forward; room for those of a micro-batch */
    bool *no_forward, *no_backward; /* (n_units) that the model does not bracket */
    bool needs_micro;               /* brackets do not tell where a micro-batch ends */
    uint64_t *random;
    int32_t step;
    bool dropped; /* what is written is of no step: its contributions must be nowhere */
};

/* A call that is of no unit. */
static void add_call(struct writing *w, enum zr_script_op_kind kind)
{
    add(w->s, (struct zr_script_op){.kind = (uint8_t)kind, .unit = -1, .step = w->step});
}

static bool bracketed(const struct writing *w, int32_t u, bool backward)
{
    return !(backward ? w->no_backward : w->no_forward)[u];
}

static void begin(struct writing *w, int32_t u, bool backward)
{
    if (bracketed(w, u, backward))
        add(w->s, (struct zr_script_op){ZR_DO_BEGIN, backward, u, w->step, false});
}

static void end(struct writing *w, int32_t u, bool backward)
{
    if (bracketed(w, u, backward))
        add(w->s, (struct zr_script_op){ZR_DO_END, backward, u, w->step, false});
}

static void use_as(struct writing *w, int32_t u, bool backward, bool again)
{
    add(w->s,
        (struct zr_script_op){ZR_DO_USE, backward, u, w->step + (w->dropped ? DROPPED_STEP : 0), again});
    if (backward && !w->dropped)
        w->s->n_contrib[w->step * w->c->n_units + u]++;
}

static void use(struct writing *w, int32_t u, bool backward)
{
    use_as(w, u, backward, false);
}

static void whole_as(struct writing *w, int32_t u, bool backward, bool again)
{
    begin(w, u, backward);
    use_as(w, u, backward, again);
    end(w, u, backward);
}

static void whole(struct writing *w, int32_t u, bool backward)
{
    whole_as(w, u, backward, false);
}

/* list: the units used, in order of forward. */
static void forward(struct writing *w, const int32_t *list, int32_t n)
{
    enum zr_verify_pattern p = w->c->pattern;
    bool nested = p == ZR_USE_NESTED && n > 1;
    if (nested) {
        begin(w, list[0], false);
        use(w, list[0], false);
    }
    for (int32_t i = nested; i < n; i++) {
        if (p != ZR_USE_OVERLAP) {
            whole(w, list[i], false);
            continue;
        }
        begin(w, list[i], false);
        if (i > 0)
            end(w, list[i - 1], false);
        use(w, list[i], false);
    }
    if (p == ZR_USE_OVERLAP)
        end(w, list[n - 1], false);
    if (nested) {
        use(w, list[0], false);
        end(w, list[0], false);
    }
    if ((p == ZR_USE_TIED || p == ZR_USE_TWICE) && n > 1)
        whole_as(w, list[0], false, true);
}

/* The order that is declared has two backward brackets of each unit; later steps have the second now and
 * then. Where none is declared, two of each would be one micro-batch too many. */
static bool repeats(const struct writing *w)
{
    bool may = w->c->repeats && w->c->declared && w->c->pattern == ZR_USE_PLAIN;
    bool first = w->step == 0 && !w->dropped;
    return may && (first || zr_verify_chance(w->random, w->c->repeats));
}

static void backward(struct writing *w, const int32_t *list, int32_t n)
{
    enum zr_verify_pattern p = w->c->pattern;
    bool held = (p == ZR_USE_NESTED || p == ZR_USE_TIED) && n > 1;
    if (held) {
        begin(w, list[0], true);
        if (p == ZR_USE_TIED)
            use_as(w, list[0], true, true);
    }
    if (p == ZR_USE_TWICE && n > 1)
        whole_as(w, list[0], true, true);
    for (int32_t i = n - 1; i >= held; i--) {
        if (p == ZR_USE_RECOMPUTE) {
            begin(w, list[i], true);
            whole(w, list[i], false);
            use(w, list[i], true);
            end(w, list[i], true);
        } else if (p == ZR_USE_OVERLAP) {
            begin(w, list[i], true);
            if (i < n - 1)
                end(w, list[i + 1], true);
            use(w, list[i], true);
        } else {
            whole(w, list[i], true);
            if (repeats(w))
                whole(w, list[i], true);
        }
    }
    if (p == ZR_USE_OVERLAP)
        end(w, list[0], true);
    if (held) {
        use(w, list[0], true);
        end(w, list[0], true);
    }
}

static void snapshot(struct writing *w, int32_t step)
{
    if (zr_verify_chance(w->random, w->c->snapshots))
        add(w->s, (struct zr_script_op){.kind = ZR_DO_SNAPSHOT, .unit = -1, .step = step});
}

/* All at once: some of them used without brackets, some inside them. */
static void all_at_once(struct writing *w)
{
    if (!zr_verify_chance(w->random, w->c->alls))
        return;
    add_call(w, ZR_DO_GATHER_ALL);
    for (int32_t i = 0; i < w->c->n_units; i++)
        use(w, w->all[i], false);
    forward(w, w->all, w->c->n_units);
    add_call(w, ZR_DO_RELEASE_ALL);
}

/* where: as in zr_verify_case.zeroes. Where the sum of the micro-batches is kept, the first alone may be
 * preceded by it. */
static void zero(struct writing *w, int where, int micro)
{
    if ((w->c->zeroes & where) && !(w->c->grad_in_place && micro > 0))
        add_call(w, ZR_DO_ZERO);
}

static void values(struct writing *w, int32_t step)
{
    static const uint8_t kinds[] = {ZR_DO_READ, ZR_DO_WRITE, ZR_DO_MEAN};
    int32_t t = (int32_t)zr_verify_below(w->random, 1 << 20);
    for (int k = 0; w->c->values && k < 3; k++)
        if (zr_verify_chance(w->random, 50))
            add(w->s, (struct zr_script_op){.kind = kinds[k], .unit = t, .step = step});
}

/* cut: backward stops in its midst. */
static void micro_batch(struct writing *w, int micro, bool cut)
{
    int32_t n = 0, *list = w->list;
    /* The first is never left out: the longest count of backward passes tells how many micro-batches there
     * were. A unit without backward brackets cannot be left out either: its gradient is reduced all the same,
     * with what is in it. */
    for (int32_t i = 0; i < w->c->n_units; i++)
        if (i == 0 || !zr_verify_chance(w->random, w->c->skipped))
            list[n++] = w->all[i];
    zero(w, 1, micro);
    forward(w, list, n);
    if (micro == 0 && !w->dropped)
        snapshot(w, w->step);
    zero(w, 2, micro);
    int32_t from = cut ? (int32_t)zr_verify_below(w->random, n) : 0;
    backward(w, list + from, n - from);
}

/* A step that is given up: part of it, all of it, or after its norm was asked for. */
static void drop_step(struct writing *w)
{
    int n = 1 + (int)zr_verify_below(w->random, w->c->accum);
    bool cut = zr_verify_chance(w->random, 50);
    w->dropped = true;
    for (int a = 0; a < n; a++) {
        micro_batch(w, a, cut && a + 1 == n);
        if (w->needs_micro && a + 1 < n)
            add_call(w, ZR_DO_MICRO);
    }
    bool uneven = w->c->skipped || w->c->repeats ||
                  w->c->pattern == ZR_USE_TWICE; /* its norm may be refused, and ends the run */
    if (n == w->c->accum && !cut && !uneven && zr_verify_chance(w->random, w->c->norms))
        add_call(w, ZR_DO_NORM);
    add_call(w, ZR_DO_DROP);
    w->dropped = false;
}

/* Sometimes the model changes the order of its units. */
static void change_order(struct writing *w)
{
    int32_t n = w->c->n_units, *all = w->all;
    if (n < 2 || !zr_verify_chance(w->random, w->c->changes))
        return;
    int64_t i = zr_verify_below(w->random, n), j = zr_verify_below(w->random, n);
    int32_t swap = all[i];
    all[i] = all[j];
    all[j] = swap;
    w->s->reordered |= i != j && w->step > 0;
}

static void evaluate(struct writing *w)
{
    for (int e = 0; e < w->c->n_evals; e++) {
        forward(w, w->all, w->c->n_units);
        values(w, w->step);
        snapshot(w, w->step);
    }
}

/* The calls from `at` on are those that the model declares of a micro-batch. */
static void declare(struct zr_script *s, int32_t at)
{
    s->order = calloc((size_t)(s->n - at) + 1, sizeof *s->order);
    if (!s->order)
        abort();
    for (; at < s->n; at++) {
        const struct zr_script_op *op = &s->ops[at];
        if (op->kind == ZR_DO_BEGIN || op->kind == ZR_DO_END)
            s->order[s->n_order++] = (struct zr_call){op->unit, op->backward, op->kind == ZR_DO_END};
    }
}

static void train(struct writing *w)
{
    for (int a = 0; a < w->c->accum; a++) {
        int32_t at = w->s->n;
        micro_batch(w, a, false);
        if (w->step == 0 && a == 0 && w->c->declared)
            declare(w->s, at);
        if (a + 1 < w->c->accum && (w->needs_micro || zr_verify_chance(w->random, 30)))
            add_call(w, ZR_DO_MICRO);
    }
}

/* Between the last micro-batch and the step. */
static void before_step(struct writing *w)
{
    /* A gradient that was not handed out has nothing in it: the model may zero it until the step. */
    if (w->c->accum == 1 && !w->c->unbracketed)
        zero(w, 8, 0);
    if (w->c->late_evals)
        forward(w, w->all, w->c->n_units);
    all_at_once(w);
    if (!zr_verify_chance(w->random, w->c->norms))
        return;
    add_call(w, ZR_DO_NORM);
    if (w->c->values) /* which writes where the norms were exchanged */
        add(w->s, (struct zr_script_op){.kind = ZR_DO_MEAN, .unit = 0, .step = w->step});
    if (w->c->late_evals)
        forward(w, w->all, w->c->n_units);
}

static void after_step(struct writing *w)
{
    zero(w, 4, 0);
    w->step++;
    all_at_once(w);
    w->step--;
    values(w, w->step + 1);
    snapshot(w, w->step + 1);
}

/* Which units the model brackets, and in which order it uses them. */
static void choose_units(struct writing *w)
{
    const struct zr_verify_case *c = w->c;
    w->needs_micro = c->unbracketed;
    for (int32_t u = 0; u < c->n_units; u++) {
        w->all[u] = c->reversed ? c->n_units - 1 - u : u;
        w->no_forward[u] = zr_verify_model_holds(c) && zr_verify_chance(w->random, c->unbracketed);
        w->no_backward[u] = zr_verify_model_holds(c) && zr_verify_chance(w->random, c->unbracketed);
    }
}

static void open_writing(struct writing *w)
{
    size_t n_units = (size_t)w->c->n_units;
    w->all = malloc(n_units * sizeof *w->all);
    w->list = malloc(n_units * sizeof *w->list);
    w->no_forward = calloc(n_units, 1);
    w->no_backward = calloc(n_units, 1);
    w->s->n_contrib = calloc((size_t)w->c->n_steps * n_units, sizeof *w->s->n_contrib);
    if (!w->all || !w->list || !w->no_forward || !w->no_backward || !w->s->n_contrib)
        abort();
}

static void close_writing(struct writing *w)
{
    free(w->all);
    free(w->list);
    free(w->no_forward);
    free(w->no_backward);
}

int zr_script_make(const struct zr_verify_case *c, struct zr_script *out)
{
    uint64_t random = c->seed ^ 0x5c41;
    struct zr_script script = {0};
    struct writing w = {.c = c, .s = &script, .random = &random};
    open_writing(&w);
    choose_units(&w);
    for (w.step = 0; w.step < c->n_steps; w.step++) {
        change_order(&w);
        evaluate(&w);
        if (zr_verify_chance(w.random, c->drops))
            drop_step(&w);
        train(&w);
        before_step(&w);
        add_call(&w, ZR_DO_STEP);
        after_step(&w);
    }
    close_writing(&w);
    *out = script;
    return 0;
}

void zr_script_free(struct zr_script *s)
{
    free(s->ops);
    free(s->order);
    free(s->n_contrib);
}

/* ---- compute ---- */

/* At stages 2 and 3 the model has no pointer to a unit that is not open. */
static int outside(struct zr_verify_rank *r, const struct zr_script_op *op, const char *tensor,
                   const char *what)
{
    zr_report(zr_sim_recorder(r->v->sim),
              "the model's fault: rank %d uses %s%s of unit %d in %s, step %d, outside its bracket; "
              "zero_begin must come first",
              r->id, what, tensor, op->unit, op->backward ? "backward" : "forward", op->step);
    return 0;
}

struct zr_content zr_script_values(const struct zr_layout *l, int32_t piece, int32_t n_updates)
{
    const struct zr_piece *p = &l->pieces[piece];
    const struct zr_flat *f = zr_piece_flat(l, piece);
    return (struct zr_content){.kind = ZR_CONTENT_PARAM,
                               .size = (uint8_t)zr_dtype_bytes(l->tensors[p->tensor].dtype),
                               .flat = (int32_t)(f - l->flats),
                               .first = p->first,
                               .value = f->trainable ? (uint64_t)n_updates : 0};
}

/* Of one use of a unit. */
static int64_t compute_ns(const struct zr_verify_speed *s, const struct zr_script_op *op, int64_t elems)
{
    const struct zr_verify_unit *u = s->units ? &s->units[op->unit] : NULL;
    double flop = (op->backward ? 4.0 : 2.0) * (double)elems * s->tokens;
    if (u && op->again)
        flop = op->backward ? u->again_backward_flop : u->again_forward_flop;
    else if (u)
        flop = op->backward ? u->backward_flop : u->forward_flop;
    return (int64_t)(flop / s->flops_per_s * 1e9);
}

int zr_script_use(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    struct zr_verify_world *v = r->v;
    const struct zr_layout *l = &r->layout;
    const struct zr_unit *u = &l->units[op->unit];
    struct zr_sim_touch touch[2 * 64];
    int n = 0;
    int64_t elems = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &l->flats[u->first_flat + i];
        for (int32_t k = 0; k < f->n_pieces && n + 2 <= 2 * 64; k++) {
            const struct zr_piece *p = &l->pieces[f->first_piece + k];
            const struct zr_tensor *t = &l->tensors[p->tensor];
            int64_t size = zr_dtype_bytes(t->dtype), bytes = p->n * size;
            uintptr_t slice = (uintptr_t)(p->slice * (t->n_elems / t->n_slices) * size);
            struct zr_content content = zr_script_values(l, f->first_piece + k, r->n_done);
            elems += p->n;
            if (!*t->param)
                return outside(r, op, t->name, "");
            touch[n++] =
                (struct zr_sim_touch){(char *)((uintptr_t)*t->param + slice), bytes, ZR_SIM_READ, content};
            if (!op->backward || !f->trainable)
                continue;
            if (!*t->grad)
                return outside(r, op, t->name, "the gradient of ");
            content.kind = ZR_CONTENT_GRAD;
            content.value = zr_sim_share(r->id, (uint32_t)op->step, content.flat, r->n_used[op->unit]);
            content.n = 1;
            touch[n++] = (struct zr_sim_touch){(char *)((uintptr_t)*t->grad + slice), bytes,
                                               t->overwrite ? ZR_SIM_SET : ZR_SIM_ADD, content};
        }
    }
    r->n_used[op->unit] += op->backward;
    int64_t ns = v->speed ? compute_ns(v->speed, op, elems) : 0;
    if (r->id == 0)
        v->compute_ns += ns;
    return zr_sim_compute(r->engine.compute, op->backward ? "backward" : "forward", touch, n, ns);
}

/* A tensor of which a layer had no bracket yet: its pointer stays, as the layer may be one that never has,
 * but what is summed in place of other layers is not the model's. */
static bool is_partly_lent(const struct zr_verify_rank *r, int32_t tensor)
{
    const struct zr_lending *l = &r->engine.m.lending[tensor];
    return l->n_in_flight && l->n_unbracketed;
}

int zr_script_zero(struct zr_verify_rank *r)
{
    const struct zr_layout *l = &r->layout;
    struct zr_sim_touch *touch = malloc(((size_t)l->n_pieces + 1) * sizeof *touch);
    int n = 0;
    if (!touch)
        abort();
    for (int32_t i = 0; i < l->n_pieces; i++) {
        const struct zr_tensor *t = &l->tensors[l->pieces[i].tensor];
        int64_t bytes = l->pieces[i].n * zr_dtype_bytes(t->dtype);
        if (t->grad && *t->grad && !is_partly_lent(r, l->pieces[i].tensor))
            touch[n++] = (struct zr_sim_touch){
                (char *)*t->grad + l->pieces[i].slice * bytes, bytes, ZR_SIM_SET, {.kind = ZR_CONTENT_ZERO}};
    }
    int err = zr_sim_compute(r->engine.compute, "the model's zeroing", touch, n, 0);
    free(touch);
    return err;
}
