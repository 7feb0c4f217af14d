/* SPDX-License-Identifier: Apache-2.0 */
/* limits.c: McCalpin's STREAM, with as many arrays as a kernel has. */
#include "bench/kernels/limits.h"
#define MODEL_BF16
#include "bench/model/model_real.h"

/* The number of sums that a pass keeps. Each addition goes to another sum than the one before, so that it
 * need not wait for that one. */
enum { LANES = 64 };

/* Takes sums that nobody reads, so that the compiler cannot drop them. */
static _Thread_local volatile float sink;

/* Makes one pass over n elements. The last five parameters are the numbers of X in limits.h. r32 and r16 are
 * 0, 1 or 4, and at most one of them is not 0. Each is a constant at every call, so the compiler drops the
 * branches on them. */
static inline __attribute__((always_inline)) void pass(const struct stream_arrays *a, int64_t n, int r32,
                                                       int r16, int updated, int w32, int w16)
{
    const float *restrict f0 = a->read_f32[0], *restrict f1 = a->read_f32[1], *restrict f2 = a->read_f32[2],
                          *restrict f3 = a->read_f32[3];
    const uint16_t *restrict h0 = a->read_bf16[0], *restrict h1 = a->read_bf16[1],
                             *restrict h2 = a->read_bf16[2], *restrict h3 = a->read_bf16[3];
    float *restrict u0 = a->updated[0], *restrict u1 = a->updated[1], *restrict u2 = a->updated[2];
    float *restrict to = a->written_f32;
    uint16_t *restrict half = a->written_bf16;
    float sum[LANES] = {0};
    for (int64_t i = 0; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++) {
            float x = r32 > 0 ? f0[i + j] : r16 > 0 ? to_float(h0[i + j]) : 0;
            if (r32 > 3)
                x = (x + f1[i + j]) + (f2[i + j] + f3[i + j]);
            if (r16 > 3)
                x = (x + to_float(h1[i + j])) + (to_float(h2[i + j]) + to_float(h3[i + j]));
            if (updated > 0)
                x = u0[i + j] = u0[i + j] + x * 0x1p-60f;
            if (updated > 1)
                u1[i + j] = u1[i + j] + x * 0x1p-60f;
            if (updated > 2)
                u2[i + j] = u2[i + j] + x * 0x1p-60f;
            if (w32)
                to[i + j] = x;
            if (w16) {
                uint32_t bits;
                memcpy(&bits, &x, sizeof bits);
                half[i + j] = (uint16_t)(bits >> 16);
            }
            if (!updated && !w32 && !w16)
                sum[j] += x;
        }
    if (!updated && !w32 && !w16)
        for (int j = 0; j < LANES; j++)
            sink = sum[j];
}

#define PASS(NAME, r32, r16, updated, w32, w16)                                                              \
    MODEL_CLONES static void pass_##NAME(const struct stream_arrays *a, int64_t n)                           \
    {                                                                                                        \
        pass(a, n, r32, r16, updated, w32, w16);                                                             \
    }
STREAM_MIX_MAP(PASS)
#undef PASS

static const struct {
    void (*pass)(const struct stream_arrays *a, int64_t n);
    int64_t bytes;
} mixes[STREAM_N_MIXES] = {
#define MIX(NAME, r32, r16, updated, w32, w16)                                                               \
    [STREAM_##NAME] = {pass_##NAME, 4 * (r32 + 2 * updated + w32) + 2 * (r16 + w16)},
    STREAM_MIX_MAP(MIX)
#undef MIX
};

int64_t stream_bytes(enum stream_mix mix)
{
    return mixes[mix].bytes;
}

struct stream_arrays stream_from(const struct stream_arrays *a, int64_t first)
{
    struct stream_arrays from = *a;
    for (int i = 0; i < LIMIT_MAX_READ; i++) {
        from.read_f32[i] += first;
        from.read_bf16[i] += first;
    }
    for (int i = 0; i < LIMIT_MAX_UPDATED; i++)
        from.updated[i] += first;
    from.written_f32 += first;
    from.written_bf16 += first;
    return from;
}

void stream_pass(enum stream_mix mix, const struct stream_arrays *a, int64_t n)
{
    mixes[mix].pass(a, n);
}
