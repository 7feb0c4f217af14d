/* body_update.h: the optimizers' element-wise update, written once over the words of a vec_*.h.
 *
 * Included by host_portable.c, host_avx2.c and host_avx512.c after their vec_*.h. Each function is
 * instantiated for a kind of optimizer and of written parameter, so that the loops have no branches. device.h
 * defines the arithmetic. */

/* SGD splits in three: without momentum, the first step (the momentum is the gradient), and the others. */
enum update_rule { RULE_ADAMW, RULE_ADAM, RULE_SGD_PLAIN, RULE_SGD_FIRST, RULE_SGD, RULE_RMSPROP };
enum update_param { PARAM_NONE, PARAM_F32, PARAM_BF16 };

/* Updates elements [0, n), n a multiple of VEC_LANES. */
ALWAYS_INLINE void update_range(const struct zr_update *u, int64_t n, enum update_rule rule,
                                enum update_param out)
{
    const bool adam = rule == RULE_ADAMW || rule == RULE_ADAM;
    const vec scale = vec_set(u->scalars->grad_scale), lr = vec_set(u->lr), eps = vec_set(u->eps),
              decay = vec_set(u->decay), b1 = vec_set(u->beta1), one_b1 = vec_set(1.0f - u->beta1),
              b2 = vec_set(u->beta2), one_b2 = vec_set(1.0f - u->beta2), c1 = vec_set(u->c1),
              c2 = vec_set(u->c2);
    float *master = u->master, *param = u->param;
    unsigned char *half = u->param;
    const float *grad = u->grad;
    float *state0 = u->state[0], *state1 = u->state[1];

    for (int64_t i = 0; i < n; i += VEC_LANES) {
        vec w = vec_load(master + i), g = vec_mul(vec_load(grad + i), scale), move;
        if (rule != RULE_ADAMW)
            g = vec_add(g, vec_mul(decay, w));

        if (adam) {
            vec m = vec_add(vec_mul(b1, vec_load(state0 + i)), vec_mul(one_b1, g));
            vec v = vec_add(vec_mul(b2, vec_load(state1 + i)), vec_mul(one_b2, vec_mul(g, g)));
            vec_store(state0 + i, m);
            vec_store(state1 + i, v);
            move = vec_div(vec_div(m, c1), vec_add(vec_sqrt(vec_div(v, c2)), eps));
            if (rule == RULE_ADAMW)
                move = vec_add(move, vec_mul(decay, w));
        } else if (rule == RULE_RMSPROP) {
            vec v = vec_add(vec_mul(b2, vec_load(state0 + i)), vec_mul(one_b2, vec_mul(g, g)));
            vec_store(state0 + i, v);
            move = vec_div(g, vec_add(vec_sqrt(v), eps));
        } else if (rule == RULE_SGD_PLAIN) {
            move = g;
        } else {
            move = rule == RULE_SGD_FIRST ? g : vec_add(vec_mul(b1, vec_load(state0 + i)), g);
            vec_store(state0 + i, move);
        }

        w = vec_sub(w, vec_mul(lr, move));
        vec_store(master + i, w);
        if (out == PARAM_F32)
            vec_store(param + i, w);
        else if (out == PARAM_BF16)
            vec_store_bf16(half + 2 * i, w);
    }
}

ALWAYS_INLINE void update_with(const struct zr_update *u, int64_t n, enum update_rule rule)
{
    if (!u->param || u->param == u->master)
        update_range(u, n, rule, PARAM_NONE);
    else if (u->param_dtype == ZR_F32)
        update_range(u, n, rule, PARAM_F32);
    else
        update_range(u, n, rule, PARAM_BF16);
}

static void host_update(const struct zr_update *u)
{
    if (u->scalars->skip)
        return;
    int64_t n = u->n - u->n % VEC_LANES;
    switch (u->kind) {
    case ZR_ADAMW:
        update_with(u, n, RULE_ADAMW);
        break;
    case ZR_ADAM:
        update_with(u, n, RULE_ADAM);
        break;
    case ZR_SGD:
        if (u->beta1 == 0)
            update_with(u, n, RULE_SGD_PLAIN);
        else if (u->t == 1)
            update_with(u, n, RULE_SGD_FIRST);
        else
            update_with(u, n, RULE_SGD);
        break;
    case ZR_RMSPROP:
        update_with(u, n, RULE_RMSPROP);
        break;
    }
#if VEC_LANES > 1
    if (n < u->n) {
        struct zr_update tail = *u;
        tail.n = u->n - n;
        tail.master += n;
        tail.grad += n;
        if (tail.param)
            tail.param = (char *)tail.param + n * zr_dtype_bytes(u->param_dtype);
        for (int i = 0; i < 2; i++)
            if (tail.state[i])
                tail.state[i] += n;
        zr_host_portable.update(&tail);
    }
#endif
}
