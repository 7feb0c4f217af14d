/* gpt2_place.h: where a model lives and computes: on the host, or on a CUDA device. */
#ifndef ZERO_BENCH_GPT2_PLACE_H
#define ZERO_BENCH_GPT2_PLACE_H

#include "bench/gpt2_layers.h"
#include "kernels/gemm.h"

struct gpt2_place {
    struct zr_device *dev;
    struct zr_stream *stream; /* all of the model's work, in order */
    struct zr_gemm *gemm;
    const struct gpt2_layers *layers;
};

/* cuda: on the device that is current on this thread, else on the host with n_threads for matrix products.
 * Returns 0 or a zr_err (ZR_ERR_NOTSUP: no such device here, the message says why), holding nothing. */
int gpt2_place_open(struct gpt2_place *p, bool cuda, int n_threads);
/* Finishes what is on the stream. A place that was not opened is allowed. */
void gpt2_place_close(struct gpt2_place *p);

#endif
