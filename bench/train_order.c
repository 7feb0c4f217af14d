/* train_order.c: what libzero may know of the training loop in advance; see train.h. */
#include "bench/train.h"
#include "kernels/device.h"

void train_call_order(struct zero_call *out, int32_t layers)
{
    int32_t n = 0;
#define CALL(u, p, e) out[n++] = (struct zero_call){.unit = (u), .phase = (p), .is_end = (e)}
    CALL(0, ZERO_FORWARD, 0); /* the embedding */
    CALL(0, ZERO_FORWARD, 1);
    for (int32_t l = 0; l < layers; l++) {
        CALL(1 + l, ZERO_FORWARD, 0);
        CALL(1 + l, ZERO_FORWARD, 1);
    }
    CALL(0, ZERO_FORWARD, 0); /* the head */
    CALL(0, ZERO_FORWARD, 1);
    CALL(0, ZERO_BACKWARD, 0); /* open around all of backward */
    for (int32_t l = layers; l-- > 0;) {
        CALL(1 + l, ZERO_BACKWARD, 0);
        CALL(1 + l, ZERO_BACKWARD, 1);
    }
    CALL(0, ZERO_BACKWARD, 1);
#undef CALL
}

int train_n_states(enum zero_optimizer optimizer, double beta1)
{
    return zr_optimizer_states((enum zr_optimizer)optimizer, (float)beta1);
}
