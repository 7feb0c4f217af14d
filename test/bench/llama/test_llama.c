/* SPDX-License-Identifier: Apache-2.0 */
/* test_llama.c: small models of four architectures compute what transformers computed for them
 * (make_references.py): logits, gradients, and the losses of twenty steps. With adapters they compute the
 * same as with changed weights. */
#include "bench/llama/llama.h"
#include "bench/train/plain_optimizer.h"
#include "bench/train/train.h"
#include "kernels/error.h"
#include "test/bench/llama/llama_references.h"
#include "test/cmocka.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef MODEL_TEST_CUDA
#define CUDA true
#else
#define CUDA false
#endif

/* How far values of bf16 may be from those of f32, relative to the largest, or in losses. */
#ifdef MODEL_BF16
static const double of_logits = 3e-2, of_gradients = 6e-2, of_losses[] = {2e-2, 4e-2};
#else
static const double of_logits = 1e-5, of_gradients = 2e-5, of_losses[] = {2e-5, 1e-4};
#endif

static const char *references, *const names[] = {"llama", "mistral", "qwen2", "qwen3"};
enum { N_NAMES = sizeof names / sizeof *names };

struct fixture {
    char folder[1024];
    struct hf_config sizes;
    struct llama_references r;
    struct compute compute;
    struct model m;
    struct zero_tensor table[LLAMA_N_TENSORS];
    int32_t number[LLAMA_N_TENSORS], n;
};

static void move(struct fixture *f, void *dst, const void *src, int64_t bytes)
{
    const struct zr_device_ops *dev = f->compute.dev->ops;
    assert_int_equal(dev->copy(f->compute.stream, dst, src, bytes), 0);
    assert_int_equal(dev->stream_sync(f->compute.stream), 0);
}

/* ---- weights by name ---- */

/* The n elements of a layer's slice, or of a whole tensor. */
static int64_t elements_of(const struct zero_tensor *t)
{
    int64_t n = 1;
    for (int d = t->flags & ZERO_STACKED ? 1 : 0; d < 8 && t->shape[d]; d++)
        n *= t->shape[d];
    return n;
}

static int64_t first_of(const struct zero_weight *e, const struct zero_tensor *t)
{
    return e->slice ? (e->slice - ZERO_SLICE(0)) * elements_of(t) : 0;
}

static void load(struct fixture *f, const struct zero_weight *e)
{
    const struct zero_tensor *t = &f->table[e->tensor];
    int64_t n = elements_of(t);
    real *x = malloc((size_t)n * sizeof *x);
    struct llama_weight w;
    if (f->number[e->tensor] >= LLAMA_LORA_A) {
        free(x);
        return; /* as drawn */
    }
    assert_true(llama_load_weight(f->folder, e->name, &w));
    bool is_bf16 = !strcmp(w.dtype, "BF16");
    assert_int_equal(w.n, n * (is_bf16 ? 2 : 4));
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = 0;
        float value;
        memcpy(is_bf16 ? (char *)&bits + 2 : (char *)&bits, w.bytes + i * (is_bf16 ? 2 : 4), is_bf16 ? 2 : 4);
        memcpy(&value, &bits, sizeof value);
        x[i] = from_float(value);
    }
    move(f, (real *)*t->param + first_of(e, t), x, n * (int64_t)sizeof *x);
    llama_free_weight(&w);
    free(x);
}

/* Calls a function for each published weight. */
static void for_each_weight(struct fixture *f, void (*call)(struct fixture *f, const struct zero_weight *e))
{
    int32_t n = llama_ops.n_names(&f->m.config);
    struct zero_weight *map = malloc((size_t)n * sizeof *map);
    char(*text)[MODEL_NAME_BYTES] = malloc((size_t)n * sizeof *text);
    n = llama_ops.names(map, text, f->number, f->n, &f->m.config);
    for (int32_t i = 0; i < n; i++)
        call(f, &map[i]);
    free(map);
    free(text);
}

static void open_fixture(struct fixture *f, const char *name, bool one_row, int64_t lora_rank)
{
    *f = (struct fixture){0};
    snprintf(f->folder, sizeof f->folder, "%s/%s", references, name);
    assert_int_equal(hf_config_read(&f->sizes, f->folder), 0);
    llama_references_open(&f->r, f->folder);
    struct model_config c = llama_sizes(&f->sizes);
    c.context = f->r.tokens;
    c.lora_rank = lora_rank;
    c.lora_alpha = 2.5 * (double)lora_rank;
    c.lora_targets = UINT32_MAX;
    assert_int_equal(c.vocab, f->r.vocab);
    assert_int_equal(compute_open(&f->compute, CUDA, 0, 1), 0);
    assert_int_equal(model_open(&f->m, &c, one_row ? 1 : f->r.rows, &f->compute), 0);
    assert_int_equal(model_open_params(&f->m, 7), 0);
    assert_int_equal(model_open_grads(&f->m), 0);
    const struct model_pointers pointers = model_pointers_of(&f->m);
    f->n = llama_ops.describe(f->table, f->number, &c, &pointers);
    for_each_weight(f, load);
}

static void close_fixture(struct fixture *f)
{
    model_close(&f->m);
    compute_close(&f->compute);
    llama_references_close(&f->r);
}

/* Forward for B rows from `row` on, of all batches one after the other. */
static void forward(struct fixture *f, int64_t row)
{
    struct model *m = &f->m;
    int64_t n = model_own_tokens(m), at = row * f->r.tokens;
    assert_int_equal(model_next_batch(m), 0);
    memcpy(m->tokens, f->r.inputs + at, (size_t)n * sizeof *m->tokens);
    memcpy(m->targets, f->r.targets + at, (size_t)n * sizeof *m->targets);
    model_send_batch(m);
    model_embed_forward(m);
    for (int64_t l = 0; l < m->config.layers; l++)
        model_layer_forward(m, l);
    model_head_forward(m);
    assert_int_equal(m->err, 0);
}

static void backward(struct model *m)
{
    model_head_backward(m);
    for (int64_t l = m->config.layers; l-- > 0;)
        model_layer_backward(m, l);
    model_embed_backward(m);
    assert_int_equal(m->err, 0);
}

static double loss_of(struct model *m)
{
    double loss;
    assert_int_equal(model_send_loss(m), 0);
    assert_int_equal(model_take_loss(m, &loss), 0);
    return loss;
}

/* ---- tests ---- */

/* The logits (T, V) of the last forward: the loss has written over its own. */
static void fetch_logits(struct fixture *f, float *logits)
{
    const struct llama *own = llama_of(&f->m);
    int64_t T = f->r.tokens, V = f->r.vocab, C = f->m.config.channels, ld = f->m.ld_logits;
    const real *head = f->sizes.tied ? own->params.embed : own->params.head;
    struct zr_gemm_args args =
        product_of(MODEL_DTYPE, T, V, C, own->acts.norm, C, head, C, f->m.stats.logits, ld);
    args.trans_b = true;
    args.c_dtype = ZERO_F32;
    assert_int_equal(zr_gemm_run(f->compute.gemm, &args), 0);
    move(f, logits, f->m.stats.logits, T * ld * (int64_t)sizeof *logits);
}

static void logits_are_those_of_transformers(void **state)
{
    for (int i = 0; i < N_NAMES; i++) {
        struct fixture f;
        double largest = 0, furthest = 0;
        open_fixture(&f, names[i], /* one_row */ true, /* lora_rank */ 0);
        int64_t T = f.r.tokens, V = f.r.vocab;
        float *logits = malloc((size_t)(T * f.m.ld_logits) * sizeof *logits);
        for (int64_t row = 0; row < f.r.rows; row++) {
            forward(&f, row);
            fetch_logits(&f, logits);
            for (int64_t t = 0; t < T; t++)
                for (int64_t v = 0; v < V; v++) {
                    double expected = f.r.logits[(row * T + t) * V + v];
                    largest = fmax(largest, fabs(expected));
                    furthest = fmax(furthest, fabs(logits[t * f.m.ld_logits + v] - expected));
                }
        }
        printf("%s: logits differ by %.1e of the largest\n", names[i], furthest / largest);
        assert_true(furthest <= of_logits * largest);
        free(logits);
        close_fixture(&f);
    }
}

/* Compares the sampled elements with the largest of them, and the norm. */
static void check_gradient(struct fixture *f, const struct zero_weight *e)
{
    const struct zero_tensor *t = &f->table[e->tensor];
    const struct llama_gradient g = llama_references_gradient(&f->r, e->name);
    int64_t n = elements_of(t);
    real *x = malloc((size_t)n * sizeof *x);
    double squares = 0, largest = 0, furthest = 0;
    move(f, x, (real *)*t->grad + first_of(e, t), n * (int64_t)sizeof *x);
    for (int64_t i = 0; i < n; i++)
        squares += (double)to_float(x[i]) * (double)to_float(x[i]);
    for (int64_t i = 0; i < g.n; i++) {
        largest = fmax(largest, fabs(g.elements[i]));
        furthest = fmax(furthest, fabs(to_float(x[i * g.stride]) - g.elements[i]));
    }
    if (furthest > of_gradients * fmax(largest, g.norm / sqrt((double)n)) ||
        fabs(sqrt(squares) - g.norm) > of_gradients * g.norm)
        fail_msg("%s: %s differs by %g, and the largest is %g; the norm is %.9g, not %.9g", f->folder,
                 e->name, furthest, largest, sqrt(squares), g.norm);
    free(x);
}

static void gradients_are_those_of_f64(void **state)
{
    for (int i = 0; i < N_NAMES; i++) {
        struct fixture f;
        open_fixture(&f, names[i], /* one_row */ false, /* lora_rank */ 0);
        forward(&f, 0);
        backward(&f.m);
        assert_true(fabs(loss_of(&f.m) - f.r.loss) <= of_losses[0] * f.r.loss);
        for_each_weight(&f, check_gradient);
        close_fixture(&f);
    }
}

static void losses_of_steps_are_those_of_transformers(void **state)
{
    for (int i = 0; i < N_NAMES; i++) {
        struct fixture f;
        struct plain p;
        double furthest[2] = {0};
        open_fixture(&f, names[i], /* one_row */ false, /* lora_rank */ 0);
        const struct train_options o = {
            .accum = 1, .beta1 = f.r.beta1, .beta2 = f.r.beta2, .weight_decay = f.r.weight_decay};
        assert_int_equal(plain_open(&p, &f.compute, f.table, f.n), 0);
        for (int64_t step = 0; step < f.r.steps; step++) {
            struct zero_step_info info;
            forward(&f, step * f.r.rows);
            backward(&f.m);
            double *far = &furthest[step >= 10];
            *far = fmax(*far, fabs(loss_of(&f.m) / f.r.losses[step] - 1));
            assert_int_equal(plain_step(&p, &o, (float)f.r.lr, &info), 0);
        }
        printf("%s: losses differ by %.1e in steps 1 to 10 and by %.1e in 11 to 20\n", names[i], furthest[0],
               furthest[1]);
        assert_true(furthest[0] <= of_losses[0] && furthest[1] <= of_losses[1]);
        plain_close(&p);
        close_fixture(&f);
    }
}

/* ---- adapters ---- */

enum { RANK = 3 };

/* Fetches one layer of a tensor or of its gradient. The caller frees it. */
static float *fetch(struct fixture *f, int32_t number, int64_t layer, bool gradient)
{
    int32_t i = 0;
    while (f->number[i] != number)
        i++;
    const struct zero_tensor *t = &f->table[i];
    int64_t n = elements_of(t);
    real *x = malloc((size_t)n * sizeof *x);
    float *values = malloc((size_t)n * sizeof *values);
    move(f, x, (real *)*(gradient ? t->grad : t->param) + layer * n, n * (int64_t)sizeof *x);
    for (int64_t k = 0; k < n; k++)
        values[k] = to_float(x[k]);
    free(x);
    return values;
}

static void store(struct fixture *f, int32_t number, int64_t layer, const float *values, int64_t n)
{
    real *x = malloc((size_t)n * sizeof *x);
    for (int64_t k = 0; k < n; k++)
        x[k] = from_float(values[k]);
    for (int32_t i = 0; i < f->n; i++)
        if (f->number[i] == number)
            move(f, (real *)*f->table[i].param + layer * n, x, n * (int64_t)sizeof *x);
    free(x);
}

/* Element number i of a matrix that is not 0. */
static float small_value(int64_t i, int target)
{
    return 0.03f * (float)((i * 37 + target * 11) % 17 - 8);
}

static void for_each_matrix(struct fixture *f, struct fixture *dense,
                            void (*call)(struct fixture *f, struct fixture *dense, int32_t number, int target,
                                         int64_t layer, int64_t OC, int64_t C))
{
    static const int32_t numbers[LORA_N_TARGETS] = {LLAMA_Q,    LLAMA_K,  LLAMA_V,   LLAMA_O,
                                                    LLAMA_GATE, LLAMA_UP, LLAMA_DOWN};
    for (int t = 0; t < LORA_N_TARGETS; t++)
        for (int32_t i = 0; i < dense->n; i++)
            for (int64_t l = 0; dense->number[i] == numbers[t] && l < dense->table[i].shape[0]; l++)
                call(f, dense, numbers[t], t, l, dense->table[i].shape[1], dense->table[i].shape[2]);
}

/* Gives b values, and makes the dense matrix w + s * b * a. */
static void change_weights(struct fixture *f, struct fixture *dense, int32_t number, int target,
                           int64_t layer, int64_t OC, int64_t C)
{
    float *w = fetch(f, number, layer, false), *a = fetch(f, LLAMA_LORA_A + target, layer, false);
    float *b = malloc((size_t)(OC * RANK) * sizeof *b);
    for (int64_t i = 0; i < OC * RANK; i++)
        b[i] = small_value(i, target);
    store(f, LLAMA_LORA_B + target, layer, b, OC * RANK);
    for (int64_t i = 0; i < OC * C; i++)
        for (int64_t k = 0; k < RANK; k++)
            w[i] += 2.5f * to_float(from_float(b[i / C * RANK + k])) * a[k * C + i % C];
    store(dense, number, layer, w, OC * C);
    free(w);
    free(a);
    free(b);
}

static void check_near(const float *found, const double *expected, int64_t n, const char *what)
{
    double largest = 0, furthest = 0;
    for (int64_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs(expected[i]));
        furthest = fmax(furthest, fabs(found[i] - expected[i]));
    }
    if (!(largest > 0) || furthest > of_gradients * largest)
        fail_msg("%s differs by %g, and the largest is %g", what, furthest, largest);
}

/* Compares da with s * b^T * dw and db with s * dw * a^T. */
static void check_adapter_gradients(struct fixture *f, struct fixture *dense, int32_t number, int target,
                                    int64_t layer, int64_t OC, int64_t C)
{
    float *dw = fetch(dense, number, layer, true), *a = fetch(f, LLAMA_LORA_A + target, layer, false),
          *b = fetch(f, LLAMA_LORA_B + target, layer, false),
          *da = fetch(f, LLAMA_LORA_A + target, layer, true),
          *db = fetch(f, LLAMA_LORA_B + target, layer, true);
    double *ea = calloc((size_t)(RANK * C), sizeof *ea), *eb = calloc((size_t)(OC * RANK), sizeof *eb);
    char what[200];
    for (int64_t i = 0; i < OC * C; i++)
        for (int64_t k = 0; k < RANK; k++) {
            ea[k * C + i % C] += 2.5 * (double)b[i / C * RANK + k] * (double)dw[i];
            eb[i / C * RANK + k] += 2.5 * (double)dw[i] * (double)a[k * C + i % C];
        }
    snprintf(what, sizeof what, "%.60s: gradient of adapter %d in layer %lld", strrchr(f->folder, '/'),
             target, (long long)layer);
    check_near(da, ea, RANK * C, what);
    check_near(db, eb, OC * RANK, what);
    void *all[] = {dw, a, b, da, db, ea, eb};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void adapters_are_a_change_of_the_weights(void **state)
{
    for (int i = 0; i < N_NAMES; i++) {
        struct fixture f, dense;
        open_fixture(&f, names[i], /* one_row */ false, RANK);
        open_fixture(&dense, names[i], /* one_row */ false, /* lora_rank */ 0);
        forward(&f, 0);
        double before = loss_of(&f.m); /* b is 0 */
        assert_true(fabs(before - f.r.loss) <= of_losses[0] * f.r.loss);
        for_each_matrix(&f, &dense, change_weights);
        forward(&f, 0);
        forward(&dense, 0);
        backward(&f.m);
        backward(&dense.m);
        double loss = loss_of(&f.m), expected = loss_of(&dense.m);
        printf("%s: the loss is %.7f instead of %.7f with adapters, %.7f with changed weights\n", names[i],
               loss, before, expected);
        assert_true(fabs(loss - expected) <= of_losses[0] * expected && fabs(loss - before) > 1e-2);
        for_each_matrix(&f, &dense, check_adapter_gradients);
        for (int32_t t = 0; t < f.n; t++)
            assert_true((f.table[t].grad != NULL) ==
                        (f.number[t] >= LLAMA_LORA_A)); /* the others are frozen */
        close_fixture(&f);
        close_fixture(&dense);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_those_of_transformers),
        cmocka_unit_test(gradients_are_those_of_f64),
        cmocka_unit_test(losses_of_steps_are_those_of_transformers),
        cmocka_unit_test(adapters_are_a_change_of_the_weights),
    };
    references = argc > 1 ? argv[1] : "references";
#ifdef MODEL_TEST_CUDA
    struct compute here;
    if (compute_open(&here, true, 0, 1)) {
        printf("%s\n", zr_error_text());
        return 77; /* skipped */
    }
    compute_close(&here);
#endif
    return cmocka_run_group_tests(tests, NULL, NULL);
}
