/* layer_net_wrap.h: layer_net.h trained plain, and wrapped by libzero. */
#ifndef TEST_LAYER_NET_WRAP_H
#define TEST_LAYER_NET_WRAP_H

#include "test/models/layer_net.h"
#include "test/models/model_ranks.h"

struct layer_net_options {
    int steps;
    bool own_update; /* the net's own momentum arithmetic through cfg.update; else libzero's SGD */
    bool frozen;     /* the first layer is not trained: a unit without gradients */
    bool evaluate;   /* a forward on other images after every other step */
    bool no_momentum;
};

extern const struct run_model layer_net_run_model;

#endif
