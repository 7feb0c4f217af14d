/* SPDX-License-Identifier: Apache-2.0 */
/* saved_model.c: the model of saved_model.h and the ranks that run it. */
#include "test/checkpoint/saved_model.h"
#include "shard/options.h"
#include "test/held_port.h"
#include "test/kernels/random.h"
#include "test/stand_in/half.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define MAX_WORLD 8

static const struct {
    const char *name;
    int64_t shape[8];
    bool bf16, frozen, stacked;
    int unit;
    enum zero_dtype buffer; /* 0: no buffer */
} table[MODEL_TENSORS] = {
    {"embedding", {37, 9}, true, false, false, 0},
    {"layers/w", {MODEL_LAYERS, 33, 21}, true, false, true, 1},
    {"layers/b", {MODEL_LAYERS, 67}, false, false, true, 1},
    {"position", {11, 9}, false, true, false, 0},
    {"mask", {5, 1, 13}, true, true, false, 2},
    {"head", {1025}, false, false, false, 0},
    {"scale", {1}, true, false, false, 3},
    {"running", {7, 43}, .frozen = true, .unit = -1, .buffer = ZERO_F32},
    {"count", {3}, .frozen = true, .buffer = ZERO_I64},
};

void model_check(bool ok, const char *file, int line, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "%s:%d: %s: %s\n", file, line, what, zero_last_error());
    abort();
}

static int64_t elems(const struct zero_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < 8 && t->shape[i]; i++)
        n *= t->shape[i];
    return n;
}

static float noise(uint64_t a, uint64_t b, uint64_t c)
{
    return random_unit(random_mix(a * 0x9e3779b97f4a7c15u + random_mix(b * 0xd1342543de82ef95u + c)));
}

/* Hashes every weight that forward can read: a stale one changes the gradients. */
static int forward_unit(struct model_rank *m, int unit, uint64_t *seen)
{
    int err = zero_begin(m->z, unit, ZERO_FORWARD);
    for (int t = 0; !err && t < MODEL_TENSORS; t++) {
        const struct zero_tensor *x = &m->tensors[t];
        int64_t slices = table[t].stacked ? x->shape[0] : 1, n = elems(x) / slices, slice = unit - x->unit;
        if (x->flags & ZERO_BUFFER)
            continue;
        size_t bytes = (size_t)n * (x->dtype == ZERO_BF16 ? 2 : 4);
        if (slice >= 0 && slice < slices)
            *seen = XXH64((const char *)m->place[t].param + (size_t)slice * bytes, bytes, *seen);
    }
    return err ? err : zero_end(m->z, unit, ZERO_FORWARD);
}

static int backward_unit(struct model_rank *m, int unit, uint64_t micro)
{
    int err = zero_begin(m->z, unit, ZERO_BACKWARD);
    for (int t = 0; !err && t < MODEL_TENSORS; t++) {
        const struct zero_tensor *x = &m->tensors[t];
        int64_t slices = table[t].stacked ? x->shape[0] : 1, n = elems(x) / slices, slice = unit - x->unit;
        if (slice < 0 || slice >= slices || !x->grad)
            continue;
        for (int64_t i = slice * n; i < (slice + 1) * n; i++) {
            bool bf16 = x->dtype == ZERO_BF16;
            float w =
                bf16 ? bf16_to_float(((uint16_t *)m->place[t].param)[i]) : ((float *)m->place[t].param)[i];
            float g = 0.25f * w + 0.125f * noise((uint64_t)t, micro, (uint64_t)i);
            if (bf16)
                ((uint16_t *)m->place[t].grad)[i] = bf16_from_float(g);
            else
                ((float *)m->place[t].grad)[i] = g;
        }
    }
    return err ? err : zero_end(m->z, unit, ZERO_BACKWARD);
}

/* Changes buffers by what only this rank has seen, like running statistics of a normalization. */
static void change_buffers(struct model_rank *m, uint64_t seen)
{
    for (int t = 0; t < MODEL_TENSORS; t++)
        for (int64_t i = 0; table[t].buffer && i < elems(&m->tensors[t]); i++)
            if (table[t].buffer == ZERO_F32)
                ((float *)m->place[t].param)[i] += noise(seen, (uint64_t)m->rank, (uint64_t)i);
            else
                ((int64_t *)m->place[t].param)[i] += i + 1;
}

int model_steps(struct model_rank *m, int n)
{
    int err = 0;
    for (int k = 0; !err && k < n; k++, m->step++) {
        uint64_t micro = (uint64_t)(m->step * m->world + m->rank);
        int units = m->z->layout->n_units;
        uint64_t seen = 0;
        for (int u = 0; !err && u < units; u++)
            err = forward_unit(m, u, &seen);
        micro ^= seen;
        for (int u = units; !err && u-- > 0;)
            if (!(m->leaves_out >> u & 1))
                err = backward_unit(m, u, micro);
        if (!err)
            err = zero_step(m->z, 1e-2f, NULL);
        change_buffers(m, seen);
    }
    return err || n < 1 ? err : zero_sync_buffers(m->z, ZERO_SYNC_MEAN);
}

int64_t model_t(const struct model_rank *m)
{
    struct zr_engine_facts facts;
    zr_engine_facts(m->z->engine, &facts);
    return facts.t;
}

uint64_t model_hash(struct model_rank *m)
{
    uint64_t h = 0;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        const struct zero_tensor *x = &m->tensors[t];
        int64_t n = elems(x);
        size_t size = table[t].buffer == ZERO_I64 ? 8 : 4;
        void *values = malloc((size_t)n * size);
        int last = x->grad ? ZERO_VALUE_STATE + m->z->layout->tensors[t].n_states : ZERO_VALUE_PARAM + 1;
        for (int v = ZERO_VALUE_PARAM; v < last; v++) {
            memset(values, 0xff, (size_t)n * size);
            CHECK_OK(zero_read(m->z, t, v, 0, n, values));
            h = XXH64(values, (size_t)n * size, h + (uint64_t)v);
        }
        free(values);
    }
    return h;
}

/* ---- ranks ---- */

struct start {
    const struct model_options *o;
    void (*fn)(struct model_rank *m, void *arg);
    void *arg;
    int rank, port;
};

static void *run_rank(void *arg)
{
    struct start *s = arg;
    const struct model_options *o = s->o;
    struct model_rank m = {.rank = s->rank, .world = o->world, .stage = o->stage};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    void *own[MODEL_TENSORS];
    char url[64];
    cfg.stage = o->stage;
    cfg.hybrid = o->hybrid == ZR_HFSDP ? ZERO_HFSDP : ZERO_HSDP;
    if (o->hybrid)
        cfg.mesh.dp_replicate = o->world / o->group;
    cfg.launch.rank = s->rank;
    cfg.launch.world = o->world;
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", s->port);
    cfg.launch.rendezvous = o->world > 1 ? url : NULL;
    if (o->prefetch)
        cfg.memory.prefetch = o->prefetch > 0 ? o->prefetch : 0;
    if (o->budget)
        cfg.memory.param_budget_bytes = o->budget;
    cfg.launch.timeout_ms = 60000;
    cfg.optim.weight_decay = 0.1f;
    cfg.clip = 1;
    cfg.checkpoint.save_async = o->async;
    cfg.checkpoint.save_keep = o->keep;
    cfg.debug.log = o->log;
    cfg.debug.log_arg = o->log_arg;
    for (int t = 0; t < MODEL_TENSORS; t++) {
        struct zero_tensor *x = &m.tensors[t];
        *x = (struct zero_tensor){.name = table[t].name,
                                  .param = &m.place[t].param,
                                  .grad = table[t].frozen ? NULL : &m.place[t].grad,
                                  .dtype = table[t].bf16 ? ZERO_BF16 : ZERO_F32,
                                  .unit = table[t].unit,
                                  .flags = table[t].stacked ? ZERO_STACKED : 0};
        if (table[t].buffer) {
            x->dtype = table[t].buffer;
            x->flags = ZERO_BUFFER;
        }
        memcpy(x->shape, table[t].shape, sizeof x->shape);
    }
    if (o->change)
        o->change(m.tensors, &cfg);
    for (int t = 0; t < MODEL_TENSORS; t++) {
        struct zero_tensor *x = &m.tensors[t];
        int64_t n = elems(x);
        own[t] = m.place[t].param = malloc((size_t)n * 8);
        for (int64_t i = 0; i < n; i++) {
            float w = noise(o->scrambled ? 77 : 7, (uint64_t)t, (uint64_t)i);
            if (x->dtype == ZERO_BF16)
                ((uint16_t *)own[t])[i] = bf16_from_float(w);
            else if (x->dtype == ZERO_I64)
                ((int64_t *)own[t])[i] = 1 + o->scrambled;
            else
                ((float *)own[t])[i] = w;
        }
    }
    CHECK_OK(zero_wrap(&m.z, m.tensors, MODEL_TENSORS, &cfg));
    for (int t = 0; t < MODEL_TENSORS; t++)
        if (!table[t].buffer)
            free(own[t]);
    if (o->files)
        m.z->files = o->files;
    s->fn(&m, s->arg);
    zero_unwrap(&m.z);
    for (int t = 0; t < MODEL_TENSORS; t++)
        if (table[t].buffer)
            free(own[t]);
    return NULL;
}

void model_run(const struct model_options *o, void (*fn)(struct model_rank *m, void *arg), void *arg)
{
    struct start s[MAX_WORLD];
    pthread_t thread[MAX_WORLD];
    int port = o->world > 1 ? held_port() : 0;
    for (int r = 0; r < o->world; r++) {
        s[r] = (struct start){o, fn, arg, r, port};
        CHECK_THAT(!pthread_create(&thread[r], NULL, run_rank, &s[r]));
    }
    for (int r = 0; r < o->world; r++)
        pthread_join(thread[r], NULL);
}
