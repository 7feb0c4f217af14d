/* SPDX-License-Identifier: Apache-2.0 */
/* host.h: the host's kernels and products, each beside what the machine can do at most for it. */
#ifndef ZERO_BENCH_KERNELS_HOST_H
#define ZERO_BENCH_KERNELS_HOST_H

#include "bench/place.h"

#include <jansson.h>

struct kernels_host;

struct kernels_host_options {
    /* elements of an array */
    int64_t n;
    /* m, n, k of the product that is asked for */
    int64_t gemm[3];
    int64_t n_rounds;
};

/* A row of the table: medians. */
struct kernels_host_row {
    /* "adamw bf16" */
    char name[40];
    /* per element, read and written; 0: a product */
    int64_t bytes;
    /* bytes or operations in a second, and what the machine does at most: of bytes, on one thread, as the
     * kernels are; of operations, on all of the place's */
    double rate, limit;
    /* of bytes, on all of the place's threads; of operations the limit */
    double limit_of_all;
};

/* Takes memory and measures all, in n_rounds after a few that do not count. Returns 0 or a zr_err, holding
 * nothing. */
int kernels_host_measure(struct kernels_host **out, const struct place *place,
                         const struct kernels_host_options *o);
/* The row of this name, which there is. */
const struct kernels_host_row *kernels_host_row(const struct kernels_host *h, const char *name);
void kernels_host_print(const struct kernels_host *h);
/* A list of objects; a new reference. */
json_t *kernels_host_json(const struct kernels_host *h);
/* NULL is allowed. */
void kernels_host_close(struct kernels_host *h);

#endif
