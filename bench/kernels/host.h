/* SPDX-License-Identifier: Apache-2.0 */
/* host.h: measures the host's kernels and matrix products, each next to the machine's limit. */
#ifndef ZERO_BENCH_KERNELS_HOST_H
#define ZERO_BENCH_KERNELS_HOST_H

#include "bench/compute.h"

#include <jansson.h>

struct kernels_host;

struct kernels_host_options {
    /* elements of an array */
    int64_t n;
    /* m, n, k of the product */
    int64_t gemm[3];
    int64_t n_rounds;
};

/* A row of the table, with medians. */
struct kernels_host_row {
    /* such as "adamw bf16" */
    char name[40];
    /* bytes read and written per element; 0: the row is a product */
    int64_t bytes;
    /* bytes or operations per second, and the machine's limit: for bytes on one thread, where the kernels
     * run; for operations on all threads */
    double rate, limit;
    /* for bytes, the limit on all threads; for operations, limit */
    double limit_of_all;
};

/* Takes memory and measures everything, in n_rounds after a few warm-up rounds. Returns 0 or a zero_err, and
 * then holds nothing. */
int kernels_host_measure(struct kernels_host **out, const struct compute *compute,
                         const struct kernels_host_options *o);
/* The row of this name, which must exist. */
const struct kernels_host_row *kernels_host_row(const struct kernels_host *h, const char *name);
void kernels_host_print(const struct kernels_host *h);
/* A list of objects, as a new reference. */
json_t *kernels_host_json(const struct kernels_host *h);
/* NULL is allowed. */
void kernels_host_close(struct kernels_host *h);

#endif
