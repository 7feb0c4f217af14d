/* SPDX-License-Identifier: Apache-2.0 */
/* layer_net_wrap.h: trains layer_net.h plain and wrapped by libzero. */
#ifndef TEST_LAYER_NET_WRAP_H
#define TEST_LAYER_NET_WRAP_H

#include "test/models/layer_net.h"
#include "test/models/model_ranks.h"

struct layer_net_options {
    int steps;
    /* updates with the net's own momentum arithmetic through cfg.optim.update; otherwise with libzero's
     * SGD */
    bool own_update;
    /* the first layer is not trained: a unit without gradients */
    bool frozen;
    /* a forward on other images after every other step */
    bool evaluate;
    bool no_momentum;
};

extern const struct run_model layer_net_run_model;

#endif
