/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_custom.c: options and checks of nccl_custom.h. */
#include "test/comm/nccl/nccl_custom.h"
#include "test/cmocka.h"
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"

#include <stdio.h>
#include <string.h>

int expected_misuse;

static void keep_log(void *arg, const char *text);

int nccl_test_start(void **state)
{
    assert_int_equal(zr_log_open(keep_log, NULL, NULL, &custom.to_log), 0);
    stand_in_the_machine()->n_devices = STAND_IN_MAX_DEVICES;
    expected_misuse = 0;
    return 0;
}

int nccl_test_finish(void **state)
{
    const char *text;
    nccl_stand_in_end();
    zr_log_close(custom.to_log);
    custom.to_log = NULL;
    int n = stand_in_end(&text);
    if (expected_misuse >= 0 && n != expected_misuse)
        print_error("%d misuses, expected %d: %s\n", n, expected_misuse, text);
    return expected_misuse >= 0 && n != expected_misuse;
}

struct nccl_custom custom = {.lock = PTHREAD_MUTEX_INITIALIZER};

void customize(bool deterministic, int64_t timeout_ms)
{
    custom.deterministic = deterministic;
    custom.timeout_ms = timeout_ms;
    custom.copy_engine = false;
    custom.change = NULL;
    custom.odd_rank = -1;
    custom.log[0] = 0;
}

void wait_long_to_start(struct zr_nccl_options *opt, int rank)
{
    opt->start_timeout_ms = LONG_MS;
}

static void keep_log(void *arg, const char *text)
{
    pthread_mutex_lock(&custom.lock);
    size_t n = strlen(custom.log);
    snprintf(custom.log + n, sizeof custom.log - n, "%s\n", text);
    pthread_mutex_unlock(&custom.lock);
}

static int open_custom_device(const struct zr_world *w, struct zr_device **out)
{
    return zr_cuda_device_open(w->local_rank, out);
}

static int open_custom(struct fixture *o, int n, int64_t timeout_ms)
{
    struct zr_nccl_options opt = nccl_fixture_options(custom.deterministic, custom.timeout_ms);
    struct zr_role_ask ask[ZR_ROLES];
    nccl_fixture_ask(o, ask);
    opt.copy_engine = custom.copy_engine;
    opt.log = custom.to_log;
    if (custom.change)
        custom.change(&opt, zr_rendezvous_rank(o->rdv));
    if (zr_rendezvous_rank(o->rdv) == custom.odd_rank)
        ask[ZR_ROLE_REDUCE].largest_bytes -= 1024;
    return nccl_fixture_open(o, &opt, ask);
}

int64_t custom_reserve(int world, int i)
{
    return i == 1 ? zr_nccl_reserve_bytes(world, custom.deterministic, NCCL_SLICE_BYTES, NCCL_PACKED_BYTES)
                  : zr_nccl_room_bytes(world, NCCL_PACKED_BYTES);
}

const struct fixture_kind fixture_custom = {.open_device = open_custom_device,
                                            .open_comms = open_custom,
                                            .reserve_bytes = custom_reserve,
                                            .same_order = true,
                                            .gather_packs = NCCL_SMALL_BYTES,
                                            .reduce_packs = NCCL_SMALL_BYTES,
                                            .one_reduces = true};
