/* SPDX-License-Identifier: Apache-2.0 */
/* llmc_peer.c: trains with llm.c on the CPU, on the batches that the other peers on one rank train on. Prints
 * zero-bench's JSON lines.
 *
 *     cc -Ofast -march=native -fopenmp -DOMP -DTESTING -I DIR -include DIR/train_gpt2.c llmc_peer.c -lm
 *     llmc_peer WEIGHTS BATCHES BATCH CONTEXT STEPS LR
 *
 * Forward, backward and AdamW are llm.c's own. TESTING leaves out its main, as in llm.c's own test. That main
 * has no clipping, warm-up or weight decay. So this program scales the gradients between backward and update,
 * raises the learning rate over the first steps, and calls the update for each tensor with its decay. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define N_WARMUP_STEPS 10 /* the same number is in gpt2_sizes.py and bench/train/train_cmd.c */

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* Scales gradients to a norm of at most 1. Returns the norm before. */
static double clip(GPT2 *m)
{
    double sum = 0;
#pragma omp parallel for reduction(+ : sum)
    for (size_t i = 0; i < m->num_parameters; i++)
        sum += (double)m->grads_memory[i] * m->grads_memory[i];
    float scale = sum > 1 ? (float)(1 / sqrt(sum)) : 1.0f;
    if (scale < 1.0f) {
#pragma omp parallel for
        for (size_t i = 0; i < m->num_parameters; i++)
            m->grads_memory[i] *= scale;
    }
    return sqrt(sum);
}

/* Whether a tensor has weight decay. Vectors (norms and biases) have none. */
static int decays(int tensor)
{
    static const int matrices[] = {0, 1, 4, 6, 10, 12}; /* wte, wpe, qkvw, attprojw, fcw, fcprojw */
    for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++)
        if (matrices[i] == tensor)
            return 1;
    return 0;
}

static void update(GPT2 *m, float lr, int step)
{
    /* llm.c's first update would allocate these in `part`, a copy of *m, and they would be lost. */
    if (!m->m_memory) {
        m->m_memory = calloc(m->num_parameters, sizeof(float));
        m->v_memory = calloc(m->num_parameters, sizeof(float));
        if (!m->m_memory || !m->v_memory)
            exit(1);
    }
    size_t at = 0;
    for (int t = 0; t < NUM_PARAMETER_TENSORS; t++) {
        GPT2 part = *m;
        part.params_memory += at;
        part.grads_memory += at;
        part.m_memory += at;
        part.v_memory += at;
        part.num_parameters = m->param_sizes[t];
        /* the same numbers are in torch_train.py and bench/train/train_cmd.c */
        gpt2_update(&part, lr, 0.9f, 0.95f, 1e-8f, decays(t) ? 0.1f : 0.0f, step);
        at += m->param_sizes[t];
    }
}

/* Reads (B, T + 1) tokens, and splits them into inputs and targets of (B, T). */
static int next_batch(FILE *f, int *row, int *inputs, int *targets, int B, int T)
{
    for (int b = 0; b < B; b++) {
        if (fread(row, sizeof *row, (size_t)T + 1, f) != (size_t)T + 1)
            return -1;
        for (int t = 0; t < T; t++) {
            inputs[b * T + t] = row[t];
            targets[b * T + t] = row[t + 1];
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 7) {
        fprintf(stderr, "usage: llmc_peer WEIGHTS BATCHES BATCH CONTEXT STEPS LR\n");
        return 2;
    }
    int B = atoi(argv[3]), T = atoi(argv[4]), steps = atoi(argv[5]);
    double lr = atof(argv[6]);
    GPT2 m;
    gpt2_build_from_checkpoint(&m, argv[1]);
    FILE *f = fopen(argv[2], "rb");
    int *row = calloc((size_t)T + 1, sizeof *row);
    int *inputs = calloc((size_t)B * (size_t)T, sizeof *inputs);
    int *targets = calloc((size_t)B * (size_t)T, sizeof *targets);
    if (!f || !row || !inputs || !targets) {
        perror(argv[2]);
        return 1;
    }
    for (int step = 1; step <= steps; step++) {
        double start = now_ms();
        if (next_batch(f, row, inputs, targets, B, T)) {
            fprintf(stderr, "%s is too short for %d steps\n", argv[2], steps);
            return 1;
        }
        gpt2_forward(&m, inputs, targets, (size_t)B, (size_t)T);
        gpt2_zero_grad(&m);
        gpt2_backward(&m);
        double norm = clip(&m), ramp = step < N_WARMUP_STEPS ? (double)step / N_WARMUP_STEPS : 1.0;
        update(&m, (float)(lr * ramp), step);
        printf("{\"event\": \"step\", \"step\": %d, \"loss\": %.9g, \"grad_norm\": %.9g, \"ms\": %.6f}\n",
               step, (double)m.mean_loss, norm, now_ms() - start);
        fflush(stdout);
    }
    fclose(f);
    free(row);
    free(inputs);
    free(targets);
    gpt2_free(&m);
    return 0;
}
