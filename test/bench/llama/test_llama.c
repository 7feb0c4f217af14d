/* SPDX-License-Identifier: Apache-2.0 */
/* test_llama.c: small models of four architectures compute what transformers computed for them
 * (make_references.py): logits, gradients, and the losses of twenty steps. */
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

static void open_fixture(struct fixture *f, const char *name, bool one_row)
{
    *f = (struct fixture){0};
    snprintf(f->folder, sizeof f->folder, "%s/%s", references, name);
    assert_int_equal(hf_config_read(&f->sizes, f->folder), 0);
    llama_references_open(&f->r, f->folder);
    struct model_config c = llama_sizes(&f->sizes);
    c.context = f->r.tokens;
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
        open_fixture(&f, names[i], /* one_row */ true);
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
        open_fixture(&f, names[i], /* one_row */ false);
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
        open_fixture(&f, names[i], /* one_row */ false);
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

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_those_of_transformers),
        cmocka_unit_test(gradients_are_those_of_f64),
        cmocka_unit_test(losses_of_steps_are_those_of_transformers),
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
