/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_ranks.c: helpers for tests of models with pipeline stages. */
#include "test/zero/pipeline_ranks.h"
#include "test/cmocka.h"
#include "test/zero/where.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int pipeline_place(struct zero_config *cfg, int stage, int pp, int dp, int tp, struct place *at)
{
    struct zero_place p = {0};
    where_open(cfg->launch.rank, cfg);
    cfg->mesh.pp = pp;
    cfg->mesh.dp_replicate = stage > 3 ? dp / 2 : 1;
    cfg->mesh.tp = tp;
    int err = zero_find_place(cfg, &p);
    *at = (struct place){.pp = p.pp, .dp = p.data, .n_dp = p.n_data, .tp = p.tp};
    return err;
}

int pipeline_layers_before(int n_layers, int pp, int stage)
{
    return n_layers / pp * stage + (stage < n_layers % pp ? stage : n_layers % pp);
}

double pipeline_draw(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) / (double)(1 << 23) - 1;
}

void pipeline_check_memory(struct toy_rank *r, const struct zero_stats *stats,
                           const struct zero_plan_info *plan)
{
    if (memcmp(&stats->allocated, &stats->planned, sizeof stats->planned))
        toy_wrong(r, "allocated is not planned: %lld and %lld bytes", (long long)stats->allocated.total,
                  (long long)stats->planned.total);
    if (plan && memcmp(&plan->bytes, &stats->planned, sizeof stats->planned))
        toy_wrong(r, "the plan said %lld bytes, not %lld", (long long)plan->bytes.total,
                  (long long)stats->planned.total);
}

void pipeline_write_file(char path[64], const char *text)
{
    snprintf(path, 64, "/tmp/zero-schedule-XXXXXX");
    int fd = mkstemp(path);
    size_t n = strlen(text);
    assert_true(fd >= 0);
    assert_true(write(fd, text, n) == (ssize_t)n);
    close(fd);
}

void pipeline_compare(const struct toy_rank *r, int pp, int dp, int tp, uint64_t want[], const char *what)
{
    const int n_stage = dp * tp;
    for (int k = 0; k < pp * n_stage; k++)
        if (r[k].hash != r[k / n_stage * n_stage + k % tp].hash)
            fail_msg("%s: rank %d has other bits than rank %d", what, k, k / n_stage * n_stage + k % tp);
    for (int part = 0; part < tp; part++) {
        uint64_t hash = 0;
        for (int stage = 0; stage < pp; stage++)
            hash += r[stage * n_stage + part].hash;
        want[part] = want[part] ? want[part] : hash;
        if (want[part] != hash)
            fail_msg("%s: other bits", what);
    }
}
