/* SPDX-License-Identifier: Apache-2.0 */
/* stacked_mlp_wrap.c: wraps a stacked model. It takes a table of its tensors, two lines around each layer,
 * and zero_step instead of the optimizer. */
#include "test/models/stacked_mlp_wrap.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

const struct mlp_config mlp_test_config = {.vocab = 24, .context = 3, .channels = 10, .layers = 4};

#define LR     0.02f
#define BETA1  0.9f
#define BETA2  0.95f
#define EPS    1e-8f
#define DECAY  0.1f
#define SEED   41
#define EDITED 5 /* the row of wte that options.edit sets */

static uint64_t hash(uint64_t a, uint64_t b)
{
    uint64_t z = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* Each token follows from the one before it, except for one in eight. */
void mlp_data(uint64_t seed, int step, int first, int n, int *tokens, int *targets)
{
    const int T = mlp_test_config.context, V = mlp_test_config.vocab;
    for (int b = 0; b < n; b++) {
        uint64_t bits = hash(hash(seed, (uint64_t)step), (uint64_t)(first + b));
        int token = (int)(bits % (uint64_t)V);
        for (int t = 0; t < T; t++) {
            tokens[b * T + t] = token;
            bits = hash(bits, (uint64_t)t);
            token = bits % 8 == 0 ? (int)(bits / 8 % (uint64_t)V) : (5 * token + 3) % V;
        }
        targets[b] = token;
    }
}

/* Sets the layers that run in this step. */
static void set_path(struct mlp *m, const struct mlp_options *o, int step)
{
    int L = m->config.layers;
    m->n_path = 0;
    for (int i = 0; i < L; i++) {
        int l = o->reorder && step >= 3 ? L - 1 - i : i;
        if (!(o->drop && l == step % L))
            m->path[m->n_path++] = l;
    }
}

static void edited_row(float *row, int C)
{
    for (int c = 0; c < C; c++)
        row[c] = 0.25f * (float)(c % 3 - 1);
}

/* --- plain ------------------------------------------------------------------------------------------------
 */

static void train_plain(const void *options, struct run_log *log)
{
    const struct mlp_options *o = options;
    const int T = mlp_test_config.context, C = mlp_test_config.channels;
    int tokens[MLP_ROWS * 8], targets[MLP_ROWS];
    struct mlp *m = mlp_new(mlp_test_config, MLP_ROWS, SEED);
    if (m == NULL || T > 8) {
        log->err = -1;
        return;
    }
    if (o->frozen_wpe)
        m->grads.wpe = NULL;
    m->store_headb = o->overwrite;
    m->leaves_out = o->leaves_out;
    for (int step = 0; step < o->steps; step++) {
        set_path(m, o, step);
        mlp_data(SEED, step, 0, MLP_ROWS, tokens, targets);
        mlp_zero_grad(m);
        if (o->twice) {
            mlp_data(SEED + 1, step, 0, MLP_ROWS, tokens, targets);
            mlp_forward(m, tokens, targets);
            log->eval[step] = m->mean_loss;
            mlp_data(SEED, step, 0, MLP_ROWS, tokens, targets);
        }
        mlp_forward(m, tokens, targets);
        mlp_backward(m);
        log->loss[step] = m->mean_loss;
        log->norm[step] = mlp_clip(m, o->clip);
        mlp_update(m, (struct mlp_adamw){LR, BETA1, BETA2, EPS, DECAY, step + 1});
        if (o->edit && step == 2)
            edited_row(m->params.wte + EDITED * C, C);
        if (o->evaluate && step % 2 == 0) {
            mlp_data(SEED + 1, step, 0, MLP_ROWS, tokens, targets);
            mlp_forward(m, tokens, targets);
            log->eval[step] = m->mean_loss;
        }
    }
    log->n_steps = o->steps;
    log->n_weights = (int64_t)m->n_params;
    log->weights = malloc(m->n_params * sizeof(float));
    if (log->weights != NULL)
        memcpy(log->weights, m->params_memory, m->n_params * sizeof(float));
    mlp_free(m);
}

/* --- wrapped ----------------------------------------------------------------------------------------------
 */

int mlp_zero_tensors(struct mlp *m, const struct mlp_options *o, struct zero_tensor *t)
{
    struct mlp_tensors *p = &m->params, *g = &m->grads;
    int64_t V = m->config.vocab, T = m->config.context, C = m->config.channels, L = m->config.layers;
    int32_t head = (int32_t)L + 1;
    uint32_t stacked = ZERO_STACKED | (o->early ? ZERO_POINTER_PER_BEGIN : 0);
    uint32_t keep = o->resident ? ZERO_RESIDENT : 0, norm = stacked | ZERO_NO_DECAY;
    uint32_t headb = ZERO_NO_DECAY | (o->overwrite ? ZERO_GRAD_OVERWRITE : 0);
#define TENSOR(field, unit, flags, ...)                                                                      \
    {                                                                                                        \
#field, (void **)&p->field, (void **)&g->field, {__VA_ARGS__ }, ZERO_F32, unit, flags                \
    }
    const struct zero_tensor table[MLP_N_TENSORS] = {
        TENSOR(wte, 0, keep, V, C),
        TENSOR(wpe, 0, keep, T, C),
        TENSOR(ln1w, 1, norm, L, C),
        TENSOR(ln1b, 1, norm, L, C),
        TENSOR(fcw, 1, stacked, L, 4 * C, C),
        TENSOR(fcb, 1, norm, L, 4 * C),
        TENSOR(projw, 1, stacked, L, C, 4 * C),
        TENSOR(projb, 1, norm, L, C),
        TENSOR(lnfw, head, ZERO_NO_DECAY, C),
        TENSOR(lnfb, head, ZERO_NO_DECAY, C),
        TENSOR(headb, head, headb, V),
    };
#undef TENSOR
    memcpy(t, table, sizeof table);
    t[0].uses = o->tie == MLP_TIE_SEPARATE ? 2 : 0;
    m->store_headb = o->overwrite;
    if (o->frozen_wpe) {
        t[1].grad = NULL;
        m->grads.wpe = NULL;
    }
    return MLP_N_TENSORS;
}

#define DO(call)                                                                                             \
    do {                                                                                                     \
        int do_err_ = (call);                                                                                \
        if (do_err_ != 0)                                                                                    \
            return do_err_;                                                                                  \
    } while (0)

/* Opens a unit early. */
static int touch(zero_ctx *z, int unit)
{
    DO(zero_begin(z, unit, ZERO_FORWARD));
    return zero_end(z, unit, ZERO_FORWARD);
}

/* mlp_forward with brackets. */
static int forward(zero_ctx *z, struct mlp *m, const struct mlp_options *o, const int *tokens,
                   const int *targets)
{
    const int head = m->config.layers + 1;
    const size_t BC = (size_t)(m->batch * m->config.channels) * sizeof(float);
    int prev = -1;
    DO(zero_begin(z, 0, ZERO_FORWARD));
    mlp_encode(m, tokens);
    if (o->tie == MLP_TIE_SEPARATE)
        DO(zero_end(z, 0, ZERO_FORWARD));
    for (int i = 0; i < m->n_path; i++) {
        int l = m->path[i];
        DO(zero_begin(z, 1 + l, ZERO_FORWARD));
        if (o->early && i + 1 < m->n_path)
            DO(touch(z, 1 + m->path[i + 1]));
        mlp_block_forward(m, l, prev);
        DO(zero_end(z, 1 + l, ZERO_FORWARD));
        prev = l;
        if (o->recompute != MLP_KEEP) { /* by now another layer uses their memory */
            memset((char *)m->acts.ln1 + (size_t)l * BC, 0xff, BC);
            memset((char *)m->acts.fch + (size_t)l * 4 * BC, 0xff, 4 * BC);
            memset((char *)m->acts.gelu + (size_t)l * 4 * BC, 0xff, 4 * BC);
        }
    }
    if (o->tie == MLP_TIE_SEPARATE)
        DO(zero_begin(z, 0, ZERO_FORWARD));
    DO(zero_begin(z, head, ZERO_FORWARD));
    mlp_head_forward(m, prev, targets);
    DO(zero_end(z, head, ZERO_FORWARD));
    return zero_end(z, 0, ZERO_FORWARD);
}

/* Repeats the forward of the i-th layer that ran. */
static int forward_again(zero_ctx *z, struct mlp *m, int i)
{
    int l = m->path[i];
    DO(zero_begin(z, 1 + l, ZERO_FORWARD));
    mlp_block_forward(m, l, i > 0 ? m->path[i - 1] : -1);
    return zero_end(z, 1 + l, ZERO_FORWARD);
}

/* mlp_backward with brackets. */
static int backward(zero_ctx *z, struct mlp *m, const struct mlp_options *o)
{
    const int head = m->config.layers + 1;
    mlp_zero_grads_acts(m);
    DO(zero_begin(z, 0, ZERO_BACKWARD));
    DO(zero_begin(z, head, ZERO_BACKWARD));
    mlp_head_backward(m, m->n_path > 0 ? m->path[m->n_path - 1] : -1);
    DO(zero_end(z, head, ZERO_BACKWARD));
    if (o->tie == MLP_TIE_SEPARATE)
        DO(zero_end(z, 0, ZERO_BACKWARD));
    for (int i = m->n_path; i-- > 0;) {
        int l = m->path[i], prev = i > 0 ? m->path[i - 1] : -1;
        if (o->recompute == MLP_RECOMPUTE_SEGMENT && (m->n_path - 1 - i) % 2 == 0) {
            if (i > 0)
                DO(forward_again(z, m, i - 1));
            DO(forward_again(z, m, i));
        }
        DO(zero_begin(z, 1 + l, ZERO_BACKWARD));
        if (o->recompute == MLP_RECOMPUTE_LAYER)
            DO(forward_again(z, m, i));
        if (o->early && i > 0)
            DO(touch(z, 1 + prev));
        mlp_block_backward(m, l, prev);
        DO(zero_end(z, 1 + l, ZERO_BACKWARD));
    }
    if (o->tie == MLP_TIE_SEPARATE)
        DO(zero_begin(z, 0, ZERO_BACKWARD));
    mlp_encode_backward(m);
    return zero_end(z, 0, ZERO_BACKWARD);
}

int mlp_zero_micro_batch(zero_ctx *z, struct mlp *m, const struct mlp_options *o, const int *tokens,
                         const int *targets)
{
    DO(forward(z, m, o, tokens, targets));
    return backward(z, m, o);
}

/* The calls of one micro-batch with the embedding nested, for cfg.memory.order. Returns their number. */
static int nested_order(int L, struct zero_call *c)
{
    int n = 0;
    for (uint8_t phase = ZERO_FORWARD; phase <= ZERO_BACKWARD; phase++) {
        c[n++] = (struct zero_call){0, phase, 0};
        for (int i = 0; i <= L; i++) {
            int unit = phase == ZERO_FORWARD ? 1 + i : 1 + L - i;
            c[n++] = (struct zero_call){unit, phase, 0};
            c[n++] = (struct zero_call){unit, phase, 1};
        }
        c[n++] = (struct zero_call){0, phase, 1};
    }
    return n;
}

static int read_all(zero_ctx *z, const struct mlp *m, int32_t value, bool frozen_wpe, float *dst)
{
    for (int32_t i = 0; i < MLP_N_TENSORS; i++) {
        if (!(frozen_wpe && i == 1 && value != ZERO_VALUE_PARAM))
            DO(zero_read(z, i, value, 0, (int64_t)m->sizes[i], dst));
        if (dst != NULL)
            dst += m->sizes[i];
    }
    return 0;
}

int mlp_zero_read_all(zero_ctx *z, const struct mlp *m, int32_t value, float *dst)
{
    return read_all(z, m, value, false, dst);
}

int mlp_zero_write_all(zero_ctx *z, const struct mlp *m, const float *src)
{
    for (int32_t i = 0; i < MLP_N_TENSORS; i++) {
        DO(zero_write(z, i, ZERO_VALUE_PARAM, 0, (int64_t)m->sizes[i], src));
        if (src != NULL)
            src += m->sizes[i];
    }
    return 0;
}

/* At stages 2 and 3 nothing of the model is readable outside brackets. A forgotten bracket then crashes at
 * once, instead of giving a wrong number later. With cfg.debug.check it accesses protected memory. */
static bool pointers_are_as_promised(const struct mlp *m, int stage)
{
    const char *check = getenv("ZERO_CHECK");
    bool none = stage >= 2 && !(check && !strcmp(check, "1"));
    const float *p[2 * MLP_N_TENSORS];
    memcpy(p, &m->params, sizeof m->params);
    memcpy(p + MLP_N_TENSORS, &m->grads, sizeof m->grads);
    for (int i = 0; i < 2 * MLP_N_TENSORS; i++) {
        bool frozen = i == MLP_N_TENSORS + 1 && m->grads.wpe == NULL;
        if (!frozen && (p[i] == NULL) != none)
            return false;
    }
    return true;
}

/* The model's own AdamW on a range. In the first step it also checks that the range is the stated one. arg
 * is a model with the initial weights. */
static int own_update(void *arg, const struct zero_update *u)
{
    const struct mlp *initial = arg;
    const float *w = initial->params_memory + u->first;
    for (int i = 0; i < u->tensor_index; i++)
        w += initial->sizes[i];
    if (u->t == 1 && memcmp(u->master, w, (size_t)u->n * sizeof *w) != 0)
        return 1;
    mlp_adamw(
        (size_t)u->n, u->master, u->grad, u->state[0], u->state[1],
        (struct mlp_adamw){u->lr, BETA1, BETA2, EPS, mlp_decays(u->tensor_index) ? DECAY : 0.0f, (int)u->t});
    return 0;
}

#define REFUSED(code, call)                                                                                  \
    do {                                                                                                     \
        if ((call) != (code) || strlen(zero_last_error()) < 10) {                                            \
            run_failed(log, ZERO_ERR_FAILED, "not refused as it should be: " #call);                         \
            return ZERO_ERR_FAILED;                                                                          \
        }                                                                                                    \
    } while (0)

/* Makes wrong calls between two micro-batches. Each is refused with its own code and text. With no_micro,
 * no micro-batch was run yet. The library cannot know that at stages 0 and 1, where a model may have no
 * brackets. */
static int misuse(zero_ctx *z, struct run_log *log, bool no_micro)
{
    float x[1];
    int head = mlp_test_config.layers + 1;
    REFUSED(ZERO_ERR_ORDER, zero_end(z, 1, ZERO_FORWARD));
    REFUSED(ZERO_ERR_ORDER, zero_end(z, 1, ZERO_BACKWARD));
    REFUSED(ZERO_ERR_ARG, zero_begin(z, head + 1, ZERO_FORWARD));
    REFUSED(ZERO_ERR_ARG, zero_begin(z, -1, ZERO_BACKWARD));
    REFUSED(ZERO_ERR_ARG, zero_begin(z, 1, (enum zero_phase)5));
    if (no_micro)
        REFUSED(ZERO_ERR_ORDER, zero_step(z, LR, NULL));
    REFUSED(ZERO_ERR_ARG, zero_step(z, INFINITY, NULL));
    REFUSED(ZERO_ERR_ARG, zero_read(z, MLP_N_TENSORS, ZERO_VALUE_PARAM, 0, 1, x));
    REFUSED(ZERO_ERR_ARG, zero_read(z, 0, ZERO_VALUE_PARAM, -1, 1, x));
    REFUSED(ZERO_ERR_ARG, zero_write(z, 0, ZERO_VALUE_STATE + 2, 0, 1, x));
    DO(zero_begin(z, 2, ZERO_FORWARD));
    REFUSED(ZERO_ERR_ORDER, zero_step(z, LR, NULL));
    REFUSED(ZERO_ERR_ORDER, zero_read(z, 0, ZERO_VALUE_PARAM, 0, 1, x));
    REFUSED(ZERO_ERR_ORDER, zero_begin(z, 2, ZERO_FORWARD));
    REFUSED(ZERO_ERR_ORDER, zero_end(z, 2, ZERO_BACKWARD));
    return zero_end(z, 2, ZERO_FORWARD);
}

/* mlp_zero_grad without the flat buffer, which now belongs to the library, in pieces. */
static void zero_own_gradients(struct mlp *m)
{
    float *g[MLP_N_TENSORS];
    memcpy(g, &m->grads, sizeof g);
    for (int i = 0; i < MLP_N_TENSORS; i++)
        if (g[i] != NULL)
            memset(g[i], 0, m->sizes[i] * sizeof(float));
}

static void train_rank(const void *options, const struct run_setup *setup, int rank, const char *url,
                       struct run_log *log)
{
    const struct mlp_options *o = options;
    const int A = setup->accum > 0 ? setup->accum : 1, B = MLP_ROWS / (setup->world * A);
    const int C = mlp_test_config.channels, L = mlp_test_config.layers;
    int tokens[MLP_ROWS * 8], targets[MLP_ROWS];
    zero_ctx *z = NULL;
    /* Only rank 0's weights count; those of other ranks must be replaced. */
    struct mlp *m = mlp_new(mlp_test_config, B, SEED + (uint64_t)rank * 1000);
    struct mlp *initial = mlp_new(mlp_test_config, 1, SEED);
    if (m == NULL || initial == NULL) {
        log->err = ZERO_ERR_NOMEM;
        goto out;
    }

    struct zero_config cfg = run_config(setup, rank, url);
    if (o->own_update) {
        cfg.optim.update = own_update;
        cfg.optim.update_arg = initial;
        cfg.optim.n_states = 2;
    } else {
        cfg.optim.beta1 = BETA1;
        cfg.optim.beta2 = BETA2;
        cfg.optim.eps = EPS;
        cfg.optim.weight_decay = DECAY;
    }
    cfg.clip = o->clip;
    struct zero_call order[64];
    if (setup->order) {
        cfg.memory.order = order;
        cfg.memory.n_order = nested_order(L, order);
    }
    struct zero_tensor table[MLP_N_TENSORS];
    RUN_TRY(log, zero_wrap(&z, table, mlp_zero_tensors(m, o, table), &cfg));
    free(m->params_memory);
    free(m->grads_memory);
    m->params_memory = m->grads_memory = NULL;

    for (int step = 0; step < o->steps; step++) {
        set_path(m, o, step);
        double loss = 0.0, eval = 0.0;
        for (int a = 0; a < A; a++) {
            if (o->misuse)
                RUN_TRY(log, misuse(z, log, a == 0 && setup->stage >= 2));
            if (o->twice) {
                mlp_data(SEED + 1, step, run_micro(setup, rank, a) * B, B, tokens, targets);
                if (setup->brackets)
                    RUN_TRY(log, forward(z, m, o, tokens, targets));
                else
                    mlp_forward(m, tokens, targets);
                eval += (double)m->mean_loss / A;
            }
            mlp_data(SEED, step, run_micro(setup, rank, a) * B, B, tokens, targets);
            if (run_zeroes(setup, a, false))
                zero_own_gradients(m);
            if (setup->brackets)
                RUN_TRY(log, forward(z, m, o, tokens, targets));
            else
                mlp_forward(m, tokens, targets);
            run_lag(setup, rank);
            if (run_zeroes(setup, a, true))
                zero_own_gradients(m);
            if (setup->brackets)
                RUN_TRY(log, backward(z, m, o));
            else
                mlp_backward(m);
            if (!setup->brackets && !setup->no_micro && a < A - 1)
                RUN_TRY(log, zero_micro(z));
            loss += (double)m->mean_loss / A;
        }
        struct zero_step_info info = {.t = step + 1};
        RUN_TRY(log, zero_step(z, LR, setup->no_info ? NULL : &info));
        RUN_TRY(log, zero_mean(z, &loss, 1));
        log->loss[step] = loss;
        log->norm[step] = info.grad_norm;
        if (info.t != step + 1 || info.skipped ||
            (!setup->no_info && (info.clipped != 0) != (o->clip > 0 && info.grad_norm > o->clip)) ||
            (setup->brackets && !pointers_are_as_promised(m, setup->stage))) {
            run_failed(log, ZERO_ERR_FAILED, "zero_step told something else than what happened");
            goto out;
        }

        if (o->edit && step == 2) {
            float row[16];
            edited_row(row, C);
            RUN_TRY(log, zero_write(z, 0, ZERO_VALUE_PARAM, EDITED * C, C, rank == 0 ? row : NULL));
        }
        if (o->twice) {
            RUN_TRY(log, zero_mean(z, &eval, 1));
            log->eval[step] = eval;
        }
        if (o->evaluate && step % 2 == 0) {
            for (int a = 0; a < A; a++) {
                mlp_data(SEED + 1, step, run_micro(setup, rank, a) * B, B, tokens, targets);
                if (setup->brackets)
                    RUN_TRY(log, forward(z, m, o, tokens, targets));
                else
                    mlp_forward(m, tokens, targets);
                eval += (double)m->mean_loss / A;
            }
            RUN_TRY(log, zero_mean(z, &eval, 1));
            log->eval[step] = eval;
        }
    }

    log->n_steps = o->steps;
    log->n_weights = (int64_t)m->n_params;
    log->n_states = 2 * log->n_weights;
    log->weights = malloc(m->n_params * sizeof(float));
    log->states = calloc(2 * m->n_params, sizeof(float));
    if (log->weights == NULL || log->states == NULL) {
        log->err = ZERO_ERR_NOMEM;
        goto out;
    }
    RUN_TRY(log, mlp_zero_read_all(z, m, ZERO_VALUE_PARAM, log->weights));
    RUN_TRY(log, read_all(z, m, ZERO_VALUE_STATE + 0, o->frozen_wpe, log->states));
    RUN_TRY(log, read_all(z, m, ZERO_VALUE_STATE + 1, o->frozen_wpe, log->states + m->n_params));
out:
    run_unwrap(log, &z);
    mlp_free(initial);
    mlp_free(m);
}

const struct run_model mlp_run_model = {.plain = train_plain, .rank = train_rank, .tolerance = 5e-6};
