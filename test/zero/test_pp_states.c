/* SPDX-License-Identifier: Apache-2.0 */
/* test_pp_states.c: masters and moments that are rounded at random get the same bits on every mesh. Noise
 * belongs to an element of the whole model. So it does not depend on which pipeline stage has a layer, or on
 * how tensor parallelism cuts it. */
#include "test/cmocka.h"
#include "test/zero/pp_model.h"
#include "test/zero/sample.h"

static int train(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    for (int step = 0; step < STEPS; step++)
        OR_RETURN(pp_step(m, z, step, at));
    OR_RETURN(pp_look(m, z, &pp_found[r->rank][0]));
    OR_RETURN(pp_step(m, z, STEPS, at));
    return pp_look(m, z, &pp_found[r->rank][1]);
}

/* The model's tensors are too small for blocks of 8-bit states on several ranks of tp. */
static void meshes_agree(void **state)
{
    static const struct setup choices[] = {{.masters = ZERO_MASTERS_REMAINDER, .moments = ZERO_MOMENTS_BF16},
                                           {.masters = ZERO_MASTERS_NONE, .moments = ZERO_MOMENTS_BF16},
                                           {.masters = ZERO_MASTERS_NONE, .moments = ZERO_MOMENTS_Q8}};
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        uint64_t want[2] = {0};
        for (int k = 0; k < PP_MESHES; k++) {
            struct setup s = choices[i];
            s.mesh = &pp_meshes[k];
            if ((s.moments == ZERO_MOMENTS_Q8 && s.mesh->tp > 1) || (want[0] && !sample_has()))
                continue;
            pp_run(&s, train, "choices");
            pp_check_bits(s.mesh, want, "choices");
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(meshes_agree)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
