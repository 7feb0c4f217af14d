/* SPDX-License-Identifier: Apache-2.0 */
/* graph_net_wrap.h: trains graph_net.h plain and wrapped by libzero. */
#ifndef TEST_GRAPH_NET_WRAP_H
#define TEST_GRAPH_NET_WRAP_H

#include "test/models/graph_net.h"
#include "test/models/model_ranks.h"

#include <stdint.h>

struct graph_net_options {
    int steps;
    /* updates with libzero's RMSprop, in PyTorch's form; otherwise with the net's own, through
     * optim.update */
    bool library_rmsprop;
    /* the middle layer is constant */
    bool frozen;
    /* a forward on other sums after every other step */
    bool evaluate;
    /* step in which the net's optimizer refuses; 0: never */
    int fail_at;
    /* If not NULL: how many ranks updated each element in the last step, (world, elements), in the net's
     * own order. */
    uint8_t *covered;
    /* elements between two ranks' rows of covered */
    int64_t covered_stride;
};

extern const struct run_model graph_net_run_model;

#endif
