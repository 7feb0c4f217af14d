/* SPDX-License-Identifier: Apache-2.0 */
/* verify_compute.c: simulates the model's compute. Each use of a unit touches the bytes of its parameters and
 * gradients, and the simulated device compares what they contain with what the script expects. */
#include "kernels/asserts.h"
#include "shard/verify/verify_world.h"

#include <stdlib.h>

/* Most pieces of a unit: up to three tensors and one layer of a stacked tensor (verify_tensors.c). */
enum { MAX_PIECES = 4 };

/* Reports a use outside the unit's bracket. At ZeRO stages 2 and 3 the model has no pointer then. Returns 0,
 * so that the run goes on and finds more. */
static int outside(struct zr_verify_rank *r, const struct zr_script_op *op, const char *tensor,
                   const char *what)
{
    zr_report(zr_sim_recorder(r->v->sim),
              "the model's fault: rank %d uses %s%s of unit %d in %s, step %d, outside its bracket; "
              "zero_begin must come first",
              r->id, what, tensor, op->index, zr_phase_name(op->phase), op->step);
    return 0;
}

struct zr_content zr_compute_expected_param(const struct zr_verify_rank *r, int32_t piece,
                                            const int32_t *n_updates)
{
    const struct zr_layout *l = &r->layout;
    const struct zr_piece *p = &l->pieces[piece];
    const struct zr_tensor *t = &l->tensors[p->tensor];
    const struct zr_flat *f = zr_piece_flat(l, piece);
    bool trained = t->tie == ZR_TIE_COPY ? t->tied_grad != NULL : f->trainable;
    return (struct zr_content){.kind = ZR_CONTENT_PARAM,
                               .size = (uint8_t)zr_dtype_bytes(t->dtype),
                               .flat = zr_stage_flat(r, t, (int32_t)(f - l->flats)),
                               .first = p->first,
                               .value = trained && n_updates ? (uint64_t)n_updates[f->unit] : 0};
}

/* The rank's contribution to a gradient by the k-th backward use in the step. param: the content of the
 * piece's parameters. If all tensor-parallel ranks have the same tensor, they contribute the same
 * gradient. */
static struct zr_content contribution(const struct zr_verify_rank *r, const struct zr_tensor *t,
                                      struct zr_content param, uint32_t step, int32_t k)
{
    struct zr_content grad = param;
    grad.kind = ZR_CONTENT_GRAD;
    grad.value = zr_sim_contribution(zr_stage_contributor(r->v, r->id, t), step, param.flat, k);
    grad.n = 1;
    return grad;
}

static int64_t piece_bytes(const struct zr_layout *l, const struct zr_piece *p)
{
    return p->n * zr_dtype_bytes(l->tensors[p->tensor].dtype);
}

/* The piece in its tensor, which begins at `base`. base may be outside any memory: of a stacked tensor only
 * the layers of open units need to have memory. */
static char *piece_in(const struct zr_layout *l, const struct zr_piece *p, void *base)
{
    return (char *)((uintptr_t)base + (uintptr_t)(p->layer * piece_bytes(l, p)));
}

/* Duration of one use of a unit. Each half of a split backward takes half of the time. */
static int64_t compute_ns(const struct zr_verify_speed *s, const struct zr_script_op *op, int64_t elems)
{
    const struct zr_verify_unit *u = s->units ? &s->units[op->index] : NULL;
    bool backward = zr_phase_is_backward(op->phase);
    double flop = (backward ? 4.0 : 2.0) * (double)elems * s->tokens;
    if (u && op->again)
        flop = backward ? u->again_backward_flop : u->again_forward_flop;
    else if (u)
        flop = backward ? u->backward_flop : u->forward_flop;
    return (int64_t)((zr_phase_is_part(op->phase) ? flop / 2 : flop) / s->flops_per_s * 1e9);
}

int zr_compute_use(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    struct zr_verify_world *v = r->v;
    const struct zr_layout *l = &r->layout;
    const struct zr_unit *u = &l->units[op->index];
    struct zr_sim_touch touch[2 * MAX_PIECES];
    int n = 0;
    int64_t elems = 0;
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &l->flats[u->first_flat + i];
        for (int32_t k = 0; k < f->n_pieces; k++) {
            const struct zr_piece *p = &l->pieces[f->first_piece + k];
            const struct zr_tensor *t = &l->tensors[p->tensor];
            struct zr_content content = zr_compute_expected_param(r, f->first_piece + k, r->n_done);
            void **grad = t->tie == ZR_TIE_COPY ? t->tied_grad : f->trainable ? t->grad : NULL;
            bool reads = zr_phase_has_params(op->phase);
            elems += p->n;
            ZR_ASSERT(n + 2 <= 2 * MAX_PIECES);
            if (reads && !*t->param)
                return outside(r, op, t->name, "");
            if (reads)
                touch[n++] =
                    (struct zr_sim_touch){piece_in(l, p, *t->param), piece_bytes(l, p), ZR_SIM_READ, content};
            if (!zr_phase_has_grads(op->phase) || !grad)
                continue;
            if (!*grad)
                return outside(r, op, t->name, "the gradient of ");
            touch[n++] = (struct zr_sim_touch){
                piece_in(l, p, *grad), piece_bytes(l, p), t->overwrite ? ZR_SIM_SET : ZR_SIM_ADD,
                contribution(r, t, content, (uint32_t)op->step, r->n_used[op->index])};
        }
    }
    r->n_used[op->index] += zr_phase_has_grads(op->phase);
    int64_t ns = v->speed ? compute_ns(v->speed, op, elems) : 0;
    if (r->id == 0)
        v->compute_ns += ns;
    return zr_sim_compute(r->engine.compute, zr_phase_name(op->phase), touch, n, ns);
}

int zr_compute_zero_grads(struct zr_verify_rank *r)
{
    const struct zr_layout *l = &r->layout;
    struct zr_sim_touch *touch = malloc(((size_t)l->n_pieces + 1) * sizeof *touch);
    int n = 0;
    if (!touch)
        abort();
    for (int32_t i = 0; i < l->n_pieces; i++) {
        const struct zr_piece *p = &l->pieces[i];
        const struct zr_tensor *t = &l->tensors[p->tensor];
        void **grad = t->tie == ZR_TIE_COPY ? t->tied_grad : t->grad;
        if (grad && *grad)
            touch[n++] = (struct zr_sim_touch){
                piece_in(l, p, *grad), piece_bytes(l, p), ZR_SIM_SET, {.kind = ZR_CONTENT_ZERO}};
    }
    int err = zr_sim_compute(r->engine.compute, "the model's zeroing", touch, n, 0);
    free(touch);
    return err;
}
