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

/* Cuts by tensor parallelism at every ZeRO stage, with data parallelism and both hybrids. */
static const struct mesh cuts[] = {{1, 1, 2, 0}, {1, 2, 2, 0}, {1, 2, 2, 1}, {1, 2, 2, 3},
                                   {1, 4, 2, 4}, {1, 4, 2, 5}, {1, 1, 4, 3}, {1, 2, 4, 0},
                                   {1, 2, 4, 1}, {2, 1, 4, 2}, {1, 2, 4, 3}, {1, 4, 4, 5}};

/* Checks that meshes have the same bits as the first, which has one rank. All meshes run, or a sample. */
static void meshes_agree(int masters, int moments)
{
    const int n_cuts = sizeof cuts / sizeof *cuts;
    uint64_t want[2] = {0};
    for (int k = 0; k < PP_MESHES + n_cuts; k++) {
        const struct setup s = {.mesh = k < PP_MESHES ? &pp_meshes[k] : &cuts[k - PP_MESHES],
                                .masters = masters,
                                .moments = moments};
        if (want[0] && !sample_has())
            continue;
        pp_run(&s, train, "choices");
        pp_check_bits(s.mesh, want, "choices");
    }
}

static void meshes_agree_in_bf16(void **state)
{
    meshes_agree(ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_BF16);
    meshes_agree(ZERO_MASTERS_NONE, ZERO_MOMENTS_BF16);
}

/* Blocks of a rank of tp are blocks of the whole tensor. */
static void meshes_agree_in_8_bits(void **state)
{
    pp_use_blocks(4);
    meshes_agree(ZERO_MASTERS_F32, ZERO_MOMENTS_Q8);
    meshes_agree(ZERO_MASTERS_REMAINDER, ZERO_MOMENTS_Q8);
    meshes_agree(ZERO_MASTERS_NONE, ZERO_MOMENTS_Q8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(meshes_agree_in_bf16),
                                       cmocka_unit_test(meshes_agree_in_8_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
