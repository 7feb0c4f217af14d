/* SPDX-License-Identifier: Apache-2.0 */
/* test_pointers.c: the model's own pointers. If the model assigned one after zero_wrap, the next call fails
 * and names the tensor, and the context goes on once the pointer is put back. Two layers of a stacked tensor
 * may be open at once only if the model takes their pointers after each zero_begin. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <stdlib.h>
#include <string.h>

struct plan {
    int stage;
    bool brackets, per_begin;
};

#define REFUSED(call, ...) refused(r, #call, call, (const char *const[]){__VA_ARGS__, NULL})

static void refused(struct toy_rank *r, const char *call, int code, const char *const *said)
{
    if (code != ZERO_ERR_ORDER)
        toy_wrong(r, "%s: code %d (%s), not refused", call, code, code ? zero_last_error() : "");
    for (; code && *said; said++)
        if (!strstr(zero_last_error(), *said))
            toy_wrong(r, "%s: \"%s\" does not say \"%s\"", call, zero_last_error(), *said);
}

static int wrap(struct toy_rank *r, struct toy *m, zero_ctx **z)
{
    const struct plan *p = r->arg;
    struct zero_config cfg = toy_config(r, p->stage);
    toy_make(m);
    m->table[TOY_STACKED].uses = 2; /* two_layers begins layer 1 inside layer 0, and again after it */
    if (p->per_begin)
        m->table[TOY_STACKED].flags |= ZERO_POINTER_PER_BEGIN;
    return zero_wrap(z, m->table, TOY_TENSORS, &cfg);
}

/* A trainer that allocates its gradients lazily, one that clears the pointers, and one that loads weights
 * into other memory. Each call that sees it is refused, and training goes on unchanged once the pointer is
 * put back. */
static void assigns(struct toy_rank *r)
{
    const struct plan *p = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    static float lazy[MAX_TOY_RANKS][1024];
    int err = wrap(r, &m, &z);
    for (int step = 0; !err && step < 2; step++) {
        for (int k = 0; k < 3; k++) {
            /* At stages 2 and 3 the library has set these pointers to NULL outside brackets. */
            void **at = k == 2 ? &m.param[0] : &m.grad[0], *was = *at;
            *at = k == 1 ? NULL : lazy[r->rank];
            const char *which = k == 2 ? "*param of tensor embedding" : "*grad of tensor embedding";
            if (*at != was) {
                REFUSED(zero_begin(z, 0, ZERO_FORWARD), "zero_begin", which, "unit 0", "must not assign it");
                REFUSED(zero_step(z, 1e-2f, NULL), "zero_step", step && p->brackets ? "no backward" : which);
            }
            if (*at != was && p->stage < 2)
                REFUSED(zero_micro(z), "zero_micro", which);
            *at = was;
        }
        if (!err)
            err = toy_forward(&m, z, p->brackets);
        if (!err && p->brackets) { /* inside a bracket */
            err = zero_begin(z, 1, ZERO_FORWARD);
            void *was = m.param[TOY_STACKED];
            m.param[TOY_STACKED] = lazy[r->rank];
            REFUSED(zero_end(z, 1, ZERO_FORWARD), "zero_end", "*param of tensor layers");
            m.param[TOY_STACKED] = was;
            if (!err)
                err = zero_end(z, 1, ZERO_FORWARD);
        }
        if (!err)
            err = toy_backward(&m, z, p->brackets, step, r->rank);
        if (!err)
            err = zero_step(z, 1e-2f, NULL);
    }
    if (!err)
        err = toy_hash(z, 2, &r->hash);
    m.grad[4] = lazy[r->rank];
    if (!err)
        err = zero_unwrap(&z);
    toy_note(r, err);
    if (m.grad[4] != lazy[r->rank] || m.param[0] || m.grad[0])
        toy_wrong(r, "zero_unwrap left the library's pointers, or took the model's own");
    zero_unwrap(&z);
    toy_free(&m);
}

/* Begins layer 1 inside layer 0, as if layer 0 computed a norm of layer 1. */
static void two_layers(struct toy_rank *r)
{
    const struct plan *p = r->arg;
    const int64_t n = toy_elems(TOY_STACKED) / 2;
    struct toy m;
    zero_ctx *z = NULL;
    int err = wrap(r, &m, &z);
    const float *own = m.own[TOY_STACKED];
    for (int k = 0; !err && k < 2; k++) {
        enum zero_phase phase = k ? ZERO_BACKWARD : ZERO_FORWARD;
        err = zero_begin(z, 1, phase);
        const float *first = m.param[TOY_STACKED];
        if (!err && p->stage >= 2 && !p->per_begin) {
            REFUSED(zero_begin(z, 2, phase), "unit 2 of stacked tensor layers", "while unit 1 is",
                    "ZERO_POINTER_PER_BEGIN", "ZERO_RESIDENT");
            REFUSED(zero_begin(z, 2, ZERO_FORWARD), "unit 2 of stacked tensor layers");
        } else if (!err) {
            err = zero_begin(z, 2, phase);
            const float *second = m.param[TOY_STACKED];
            if (!err && (second[n] != own[n] || second[2 * n - 1] != own[2 * n - 1]))
                toy_wrong(r, "layer 1 reads %g", (double)second[n]);
            if (!err && (first[0] != own[0] || first[n - 1] != own[n - 1]))
                toy_wrong(r, "layer 0 reads %g by its own pointer", (double)first[0]);
            if (!err)
                err = zero_end(z, 2, phase);
            /* The pointer is set back to the layer that is still open. */
            if (!err && ((const float *)m.param[TOY_STACKED])[0] != own[0])
                toy_wrong(r, "the pointer is not layer 0's again");
        }
        if (!err) /* one layer after the other is always allowed */
            err = zero_end(z, 1, phase);
        if (!err)
            err = zero_begin(z, 2, phase);
        if (!err)
            err = zero_end(z, 2, phase);
    }
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

static void run(void (*fn)(struct toy_rank *r), struct plan p, int world, uint64_t *hash)
{
    struct toy_rank r[MAX_TOY_RANKS];
    toy_ranks(world, fn, &p, r);
    for (int i = 0; i < world; i++)
        if (r[i].err || r[i].wrong[0])
            fail_msg("stage %d brackets %d per begin %d world %d rank %d: %s %s", p.stage, p.brackets,
                     p.per_begin, world, i, r[i].text, r[i].wrong);
    *hash = r[0].hash;
}

static void assigned_pointers(void **state)
{
    for (int world = 1; world <= 2; world++) {
        uint64_t first = 0, hash;
        for (int stage = 0; stage < 4; stage++)
            for (int brackets = stage >= 2; brackets < 2; brackets++) {
                run(assigns, (struct plan){.stage = stage, .brackets = brackets}, world, &hash);
                first = first ? first : hash;
                assert_int_equal(hash, first);
            }
    }
}

static void layers_of_one_tensor(void **state)
{
    uint64_t hash;
    for (int world = 1; world <= 2; world++)
        for (int stage = 0; stage < 4; stage++)
            for (int per_begin = 0; per_begin < 2; per_begin++)
                run(two_layers, (struct plan){stage, true, per_begin}, world, &hash);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(assigned_pointers),
        cmocka_unit_test(layers_of_one_tensor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
