/* train_order.c: what libzero may know of the training loop in advance; see train.h. */
#include "bench/train.h"
#include "kernels/device.h"

#include <stdlib.h>
#include <string.h>

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

bool train_stores_each(const struct train_options *o)
{
    const char *in_place = getenv("ZERO_GRAD_IN_PLACE"); /* says that the model adds them up */
    bool adds = in_place && *in_place && strcmp(in_place, "0") != 0;
    return !o->plain && ((o->stage >= 2 && !adds) || o->accum == 1);
}

int train_n_states(enum zero_optimizer optimizer, double beta1)
{
    return zr_optimizer_states((enum zr_optimizer)optimizer, (float)beta1);
}
