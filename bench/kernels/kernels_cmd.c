/* SPDX-License-Identifier: Apache-2.0 */
/* kernels_cmd.c: zero-bench kernels. On a GPU it measures a copy, AdamW, a matrix product and, in bf16, the
 * GPT's attention. The host has a separate table (host.h).
 *
 * Everything runs on random data that no cache holds. A round measures one thing after another, so that a
 * changing clock rate affects all of them. A time is between two stamps of the stream, around a few runs. The
 * first rounds are warm-up; the median of the others counts. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/compute.h"
#include "bench/kernels/host.h"
#include "bench/random_bits.h"
#include "bench/report/report.h"
#include "zero/zero.h"

#define MODEL_BF16
#include "bench/model/layers.h"
#include "kernels/alloc.h"

#include <stdio.h>

#define N_WARM_ROUNDS 3

struct kernels_options {
    int device, dtype;
    int64_t gpu, params, rounds, threads;
    int64_t gemm[3];      /* m, n, k */
    int64_t attention[4]; /* B, T, NH, HS */
    bool json;
};

/* Reads n numbers from 1 to 1000000 with commas between, at most 4. Returns false if arg is something
 * else. */
static bool read_sizes(const char *arg, int n, int64_t *to)
{
    int64_t size[4];
    for (int i = 0; i < n; i++) {
        char *end;
        size[i] = *arg >= '0' && *arg <= '9' ? strtoll(arg, &end, 10) : 0;
        if (size[i] < 1 || size[i] > 1000000 || *end != (i + 1 < n ? ',' : 0))
            return false;
        arg = end + 1;
    }
    memcpy(to, size, (size_t)n * sizeof *to);
    return true;
}

static error_t read_gemm(struct argp_state *state, const struct option_row *row, char *arg, void *options)
{
    struct kernels_options *o = options;
    if (!read_sizes(arg, 3, o->gemm))
        return option_fault(state, "--%s: '%s' is not three numbers from 1 to 1000000, as in 8192,8192,8192",
                            row->name, arg);
    return 0;
}

static error_t read_attention(struct argp_state *state, const struct option_row *row, char *arg,
                              void *options)
{
    struct kernels_options *o = options;
    if (!read_sizes(arg, 4, o->attention))
        return option_fault(state, "--%s: '%s' is not four numbers from 1 to 1000000, as in 8,1024,12,64",
                            row->name, arg);
    return 0;
}

static error_t finish(struct argp_state *state, void *options)
{
    (void)state;
    struct kernels_options *o = options;
    bool cuda = o->device == ZERO_DEVICE_CUDA;
    o->params = o->params ? o->params : cuda ? 128000000 : 8000000;
    for (int i = 0; i < 3; i++)
        o->gemm[i] = o->gemm[i] ? o->gemm[i] : cuda ? 8192 : 512;
    return 0;
}

#define OPTION_STRUCT struct kernels_options
static const struct option_row rows[] = {
    {"device", "host|cuda", "What to measure (host)", OPTION_WORD(device, option_devices)},
    {"gpu", "N", "Which GPU (the rank's number on this host)", OPTION_INT(gpu, 0, 1000)},
    {"dtype", "f32|bf16", "Of the model's weights and of the matrices (bf16)",
     OPTION_WORD(dtype, option_dtypes)},
    {"params", "N", "Weights that AdamW updates (cuda 128e6, host 8e6)",
     OPTION_INT(params, 1, INT64_C(100000000000))},
    {"gemm", "M,N,K", "Matrix product (M,K) x (K,N) (cuda 8192,8192,8192, host 512,512,512)",
     OPTION_BY(read_gemm)},
    {"attention", "B,T,NH,HS", "Rows, tokens, heads and their channels of the GPT's attention (8,1024,12,64)",
     OPTION_BY(read_attention)},
    {"rounds", "N", "Measured rounds; the median counts (21)", OPTION_INT(rounds, 1, 100000)},
    {"threads", "N", "For matrix products of the host (1)", OPTION_INT(threads, 1, 1024)},
    {"json", NULL, "One JSON line", OPTION_FLAG(json)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc = "How fast a device copies, updates weights by AdamW, and multiplies matrices.",
    .read_word = option_refuse_word,
    .finish = finish,
};

/* ---- measurements ---- */

/* The buffers: AdamW's master weights, gradients, moments and parameters; the product's matrices C = A * B;
 * and what attention reads and writes (bench/model/layers.h): its input, output and their gradients, and
 * a float for each row of each head: the logarithm of the softmax's sum, and the backward pass's dot
 * products. */
enum { MASTER, GRAD, M, V, LOGSUM, DOTS, PARAM, A, B, C, QKV, ATTY, DATTY, DQKV, N_BUFFERS };
/* What is measured. */
enum { COPY, ADAMW, GEMM, ATTENTION, N_MEASURES };

struct bench {
    const struct kernels_options *o;
    struct compute compute;
    enum zero_dtype dtype;
    const struct model_attention *attention; /* fused attention; NULL: there is none here */
    struct buffer {
        void *p;
        int64_t bytes;
    } buffers[N_BUFFERS];
    struct zr_step_scalars *scalars;
    int64_t *stamps;                  /* (2) times at the start and the end, in host memory */
    double *seconds[N_MEASURES];      /* (rounds) */
    int64_t n_runs[N_MEASURES];       /* between the two stamps */
    double bytes_or_flop[N_MEASURES]; /* of one run */
};

/* Bytes read and written per weight. Master weights, both moments and the fp32 gradient are read. All but the
 * gradient are written, and the model's weights, too, if they are not fp32. */
static int64_t adamw_bytes(enum zero_dtype dtype)
{
    return 4 * 4 + 3 * 4 + (dtype == ZERO_F32 ? 0 : zr_dtype_bytes(dtype));
}

/* Fills a buffer with random numbers in (-1, 1), which repeat after N_RANDOM numbers. */
static int fill_random(struct bench *b, const struct buffer *to, enum zero_dtype dtype, uint64_t seed)
{
    enum { N_RANDOM = 1 << 18 };
    const struct zr_device_ops *dev = b->compute.dev->ops;
    int64_t size = zr_dtype_bytes(dtype), n = to->bytes / size;
    float *numbers;
    ZR_TRY(ZR_ALLOC(numbers, N_RANDOM, "random numbers"));
    for (int64_t i = 0; i < N_RANDOM; i++)
        numbers[i] = (float)((double)(random_bits(seed + (uint64_t)i) >> 11) * 0x1p-52 - 1.0);
    zr_host_kernels_best()->cast(numbers, dtype, numbers, ZERO_F32, N_RANDOM);
    int err = 0;
    for (int64_t first = 0; first < n && !err; first += N_RANDOM) {
        int64_t n_copied = n - first < N_RANDOM ? n - first : N_RANDOM;
        err = dev->copy(b->compute.stream, (char *)to->p + first * size, numbers, n_copied * size);
    }
    err = err ? err : dev->stream_sync(b->compute.stream);
    free(numbers);
    return err;
}

/* Vectors of one head and one token, over all rows. 0 without fused attention. */
static int64_t n_head_vectors(const struct bench *b)
{
    const int64_t *a = b->o->attention;
    return b->attention ? a[0] * a[1] * a[2] : 0;
}

/* Takes memory for all buffers and fills them. */
static int open_buffers(struct bench *b)
{
    const int64_t n = b->o->params, *g = b->o->gemm, size = zr_dtype_bytes(b->dtype);
    const int64_t n_vectors = n_head_vectors(b), y = n_vectors * b->o->attention[3] * size;
    const int64_t bytes[N_BUFFERS] = {[MASTER] = n * 4,
                                      [GRAD] = n * 4,
                                      [M] = n * 4,
                                      [V] = n * 4,
                                      [LOGSUM] = n_vectors * 4,
                                      [DOTS] = n_vectors * 4,
                                      [PARAM] = n * size,
                                      [A] = g[0] * g[2] * size,
                                      [B] = g[2] * g[1] * size,
                                      [C] = g[0] * g[1] * size,
                                      [QKV] = 3 * y,
                                      [ATTY] = y,
                                      [DATTY] = y,
                                      [DQKV] = 3 * y};
    struct zr_device *dev = b->compute.dev;
    int err = 0;
    for (int i = 0; i < N_BUFFERS && !err; i++) {
        if (bytes[i] == 0)
            continue;
        err = dev->ops->alloc(dev, bytes[i], &b->buffers[i].p);
        b->buffers[i].bytes = err ? 0 : bytes[i];
        if (!err)
            err = fill_random(b, &b->buffers[i], i < PARAM ? ZERO_F32 : b->dtype, (uint64_t)i << 32);
    }
    /* second moments must not be negative */
    return err ? err : dev->ops->zero(b->compute.stream, b->buffers[V].p, n * 4);
}

/* The bytes or operations of one run, and the number of runs that are timed together. */
static void count_work(struct bench *b)
{
    const int64_t n = b->o->params, *g = b->o->gemm, *a = b->o->attention;
    b->bytes_or_flop[COPY] = 2.0 * (double)(n * 4);
    b->bytes_or_flop[ADAMW] = (double)(n * adamw_bytes(b->dtype));
    b->bytes_or_flop[GEMM] = 2.0 * (double)g[0] * (double)g[1] * (double)g[2];
    /* Two products forward and five backward, half of each because of the causal mask. Products that a
     * kernel repeats do not count. */
    b->bytes_or_flop[ATTENTION] = 7.0 * (double)n_head_vectors(b) * (double)a[1] * (double)a[3];
    for (int i = 0; i < N_MEASURES; i++)
        b->n_runs[i] = b->compute.cuda ? 5 : 1;
}

static int bench_open(struct bench *b)
{
    const struct kernels_options *o = b->o;
    int err = compute_open(&b->compute, o->device == ZERO_DEVICE_CUDA, (int)o->gpu, (int)o->threads);
    if (err)
        return err;
    b->attention = b->dtype == ZERO_BF16 ? model_layers_for(&b->compute)->attention : NULL;
    if (b->attention && !b->attention->fits(o->attention[3]))
        return zr_fail(ZERO_ERR_NOTSUP, "attention in one piece is not there for heads of %lld channels",
                       (long long)o->attention[3]);
    struct zr_device *dev = b->compute.dev;
    err = open_buffers(b);
    err = err ? err : dev->ops->alloc(dev, sizeof *b->scalars, (void **)&b->scalars);
    err = err ? err : dev->ops->host_alloc(dev, 2 * sizeof *b->stamps, (void **)&b->stamps);
    const struct zr_step_scalars scalars = {.grad_scale = 1.0f};
    err = err ? err : dev->ops->put(b->compute.stream, b->scalars, &scalars, sizeof scalars);
    for (int i = 0; i < N_MEASURES && !err; i++)
        err = ZR_ALLOC(b->seconds[i], o->rounds, "%lld times", (long long)o->rounds);
    count_work(b);
    return err;
}

static void bench_close(struct bench *b)
{
    struct zr_device *dev = b->compute.dev;
    if (dev) {
        dev->ops->stream_sync(b->compute.stream);
        for (int i = 0; i < N_BUFFERS; i++)
            if (b->buffers[i].p)
                dev->ops->free(dev, b->buffers[i].p, b->buffers[i].bytes);
        if (b->scalars)
            dev->ops->free(dev, b->scalars, sizeof *b->scalars);
        if (b->stamps)
            dev->ops->host_free(dev, b->stamps, 2 * sizeof *b->stamps);
    }
    for (int i = 0; i < N_MEASURES; i++)
        free(b->seconds[i]);
    compute_close(&b->compute);
}

static int run_adamw(struct bench *b)
{
    struct zr_update u = {
        .kind = ZERO_ADAMW,
        .param_dtype = b->dtype,
        .grad_dtype = ZERO_F32,
        .lr = 1e-4f,
        .beta1 = 0.9f,
        .beta2 = 0.95f,
        .eps = 1e-8f,
        .decay = 0.1f,
        .c1 = 0.1f,
        .c2 = 0.05f,
        .t = 1,
        .n = b->o->params,
        .master = b->buffers[MASTER].p,
        .param = b->dtype == ZERO_F32 ? NULL : b->buffers[PARAM].p,
        .grad = b->buffers[GRAD].p,
        .state = {b->buffers[M].p, b->buffers[V].p},
        .scalars = b->scalars,
    };
    return b->compute.dev->ops->update(b->compute.stream, &u);
}

static int run_attention(struct bench *b)
{
    const struct model_attention *att = b->attention;
    const int64_t *a = b->o->attention, row = a[2] * a[3];
    const struct buffer *buf = b->buffers;
    const real *qkv = buf[QKV].p;
    real *dqkv = buf[DQKV].p;
    const struct model_rows all = {.n = {a[1]}};
    const struct model_attention_args args = {.B = a[0],
                                              .T = a[1],
                                              .NH = a[2],
                                              .n_kv = a[2],
                                              .HS = a[3],
                                              .queries = all,
                                              .keys = all,
                                              .q = qkv,
                                              .k = qkv + row,
                                              .v = qkv + 2 * row,
                                              .q_row = 3 * row,
                                              .kv_row = 3 * row};
    const struct model_attention_grads grads = {
        .dq = dqkv, .dk = dqkv + row, .dv = dqkv + 2 * row, .dq_row = 3 * row, .dkv_row = 3 * row};
    int err = att->forward(&b->compute, &args, buf[ATTY].p, NULL, buf[LOGSUM].p);
    return err ? err
               : att->backward(&b->compute, &args, buf[DATTY].p, buf[ATTY].p, buf[LOGSUM].p, buf[DOTS].p,
                               &grads);
}

static int run_gemm(struct bench *b)
{
    const int64_t *g = b->o->gemm;
    const struct zr_gemm_args args = product_of(b->dtype, g[0], g[1], g[2], b->buffers[A].p, g[2],
                                                b->buffers[B].p, g[1], b->buffers[C].p, g[1]);
    return zr_gemm_run(b->compute.gemm, &args);
}

/* Enqueues one run. */
static int run_one(struct bench *b, int what)
{
    switch (what) {
    case COPY: /* as large as AdamW's largest arrays */
        return b->compute.dev->ops->copy(b->compute.stream, b->buffers[M].p, b->buffers[GRAD].p,
                                         b->buffers[M].bytes);
    case ADAMW:
        return run_adamw(b);
    case ATTENTION:
        return run_attention(b);
    default:
        return run_gemm(b);
    }
}

/* Times the runs that are timed together, and returns the seconds of one. */
static int measure(struct bench *b, int what, double *seconds)
{
    const struct zr_device_ops *dev = b->compute.dev->ops;
    int err = dev->stamp(b->compute.stream, &b->stamps[0]);
    for (int64_t i = 0; i < b->n_runs[what] && !err; i++)
        err = run_one(b, what);
    err = err ? err : dev->stamp(b->compute.stream, &b->stamps[1]);
    err = err ? err : dev->stream_sync(b->compute.stream);
    *seconds = (double)(b->stamps[1] - b->stamps[0]) * 1e-9 / (double)b->n_runs[what];
    return err;
}

static int measure_all(struct bench *b)
{
    for (int64_t round = -N_WARM_ROUNDS; round < b->o->rounds; round++) {
        for (int what = 0; what < (b->attention ? N_MEASURES : ATTENTION); what++) {
            double seconds;
            int err = measure(b, what, &seconds);
            if (err)
                return err;
            if (round >= 0)
                b->seconds[what][round] = seconds;
        }
    }
    return 0;
}

/* Figures that the host has in common with a GPU, for programs that read either. */
static void take_host_rates(const struct bench *b, const struct kernels_host *h, double rate[N_MEASURES])
{
    bool bf16 = b->dtype == ZERO_BF16;
    rate[COPY] = kernels_host_row(h, "copy")->rate;
    rate[ADAMW] = kernels_host_row(h, bf16 ? "adamw bf16" : "adamw f32")->rate;
    rate[GEMM] = kernels_host_row(h, bf16 ? "product bf16" : "product f32")->rate;
}

static void report_json(const struct bench *b, const double *rate, json_t *kernels)
{
    const struct kernels_options *o = b->o;
    const char *device = option_word_of(option_devices, o->device);
    report_line(json_pack(
        "{s:s, s:s, s:s, s:I, s:I, s:o, s:o, s:I, s:o, s:[I,I,I], s:o, s:[I,I,I,I], s:o, s:o*}", "event",
        "kernels", "device", device, "dtype", zr_dtype_name(b->dtype), "rounds", (json_int_t)o->rounds,
        "params", (json_int_t)o->params, "copy_gb_per_s", report_number(rate[COPY] * 1e-9), "adamw_gb_per_s",
        report_number(rate[ADAMW] * 1e-9), "adamw_bytes_per_param", (json_int_t)adamw_bytes(b->dtype),
        "adamw_over_copy", report_number(rate[ADAMW] / rate[COPY]), "gemm", (json_int_t)o->gemm[0],
        (json_int_t)o->gemm[1], (json_int_t)o->gemm[2], "gemm_tflop_per_s", report_number(rate[GEMM] * 1e-12),
        "attention", (json_int_t)o->attention[0], (json_int_t)o->attention[1], (json_int_t)o->attention[2],
        (json_int_t)o->attention[3], "attention_tflop_per_s",
        b->attention ? report_number(rate[ATTENTION] * 1e-12) : json_null(), "kernels", kernels));
}

static void report(struct bench *b)
{
    const struct kernels_options *o = b->o;
    double rate[N_MEASURES]; /* per second */
    for (int i = 0; i < (b->attention ? N_MEASURES : ATTENTION); i++)
        rate[i] = b->bytes_or_flop[i] / report_median(b->seconds[i], o->rounds);
    if (o->json) {
        report_json(b, rate, NULL);
        return;
    }
    printf("%s, %s, medians of %lld rounds\n", option_word_of(option_devices, o->device),
           zr_dtype_name(b->dtype), (long long)o->rounds);
    printf("copy within the device   %10.1f GB/s read and written\n", rate[COPY] * 1e-9);
    printf("AdamW, %.3g weights     %10.1f GB/s, %lld bytes each: %.0f%% of the copy\n", (double)o->params,
           rate[ADAMW] * 1e-9, (long long)adamw_bytes(b->dtype), 100 * rate[ADAMW] / rate[COPY]);
    printf("product %lldx%lldx%lld   %10.3f TFLOP/s\n", (long long)o->gemm[0], (long long)o->gemm[1],
           (long long)o->gemm[2], rate[GEMM] * 1e-12);
    if (b->attention) {
        printf("attention %lldx%lldx%lldx%lld  %10.3f TFLOP/s forward and backward\n",
               (long long)o->attention[0], (long long)o->attention[1], (long long)o->attention[2],
               (long long)o->attention[3], rate[ATTENTION] * 1e-12);
    }
}

static int measure_host(struct bench *b)
{
    const struct kernels_options *o = b->o;
    struct kernels_host *h = NULL;
    struct kernels_host_options host = {.n = o->params, .n_rounds = o->rounds};
    memcpy(host.gemm, o->gemm, sizeof host.gemm);
    int err = compute_open(&b->compute, false, 0, (int)o->threads);
    err = err ? err : kernels_host_measure(&h, &b->compute, &host);
    if (err)
        return err;
    double rate[N_MEASURES];
    take_host_rates(b, h, rate);
    if (o->json) {
        report_json(b, rate, kernels_host_json(h));
    } else {
        printf("host, arrays of %.3g elements, products %lldx%lldx%lld on %lld thread%s, medians of %lld "
               "rounds\n",
               (double)o->params, (long long)o->gemm[0], (long long)o->gemm[1], (long long)o->gemm[2],
               (long long)o->threads, o->threads == 1 ? "" : "s", (long long)o->rounds);
        kernels_host_print(h);
    }
    kernels_host_close(h);
    return 0;
}

static int measure_gpu(struct bench *b)
{
    int err = bench_open(b);
    err = err ? err : measure_all(b);
    if (!err)
        report(b);
    return err;
}

int kernels_command(const char *name, int argc, char **argv)
{
    struct kernels_options o = {.device = ZERO_DEVICE_HOST,
                                .gpu = GPU_OF_LOCAL_RANK,
                                .dtype = ZERO_BF16,
                                .rounds = 21,
                                .threads = 1,
                                .attention = {8, 1024, 12, 64}};
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    struct bench b = {.o = &o, .dtype = (enum zero_dtype)o.dtype};
    int err = o.device == ZERO_DEVICE_CUDA ? measure_gpu(&b) : measure_host(&b);
    if (err)
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
    bool no_gpu = err && o.device == ZERO_DEVICE_CUDA && !b.compute.dev;
    bench_close(&b);
    return !err ? EXIT_SUCCESS : no_gpu ? EXIT_USAGE : EXIT_FAILURE;
}
