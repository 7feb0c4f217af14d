/* graph_net_wrap.h: graph_net.h trained plain, and wrapped by libzero. */
#ifndef TEST_GRAPH_NET_WRAP_H
#define TEST_GRAPH_NET_WRAP_H

#include "test/models/graph_net.h"
#include "test/models/model_ranks.h"

#include <stdint.h>

struct graph_net_options {
    int steps;
    bool library_rmsprop; /* libzero's, in PyTorch's form; else the net's own through cfg.update */
    bool frozen;          /* the middle layer is constant */
    bool evaluate;        /* a forward on other sums after every other step */
    int fail_at;          /* the net's optimizer refuses in this step; 0: never */
    /* If not NULL: how many ranks updated each element in the last step, (world, elements), in the net's own
     * order. */
    uint8_t *covered;
    int64_t covered_stride; /* elements of a rank */
};

extern const struct run_model graph_net_run_model;

#endif
