/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_flight.c: parses arbitrary bytes as a file of the flight recorder, and a valid file with changed
 * bytes. Each three bytes of input give a position and a value; a remaining byte says how much of the end is
 * missing. An accepted file must equal its input, and it must be possible to describe it in words. */
#include "comm/flight_view.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static struct zr_flight_view v;

static void check(const void *data, size_t n)
{
    char text[512];
    int err = zr_flight_parse(data, n, &v);
    if (err) {
        if (err != ZERO_ERR_ARG || !zr_error_text()[0])
            abort();
        return;
    }
    if (zr_flight_bytes(&v) != n || memcmp(&v, data, n) || v.rank >= v.world)
        abort();
    zr_flight_last_words(&v, text, sizeof text);
    for (int i = 0; i < v.n_ops; i++)
        zr_flight_describe_op(&v.ops[i], text, sizeof text);
}

static void make_good(struct zr_flight_view *good)
{
    const struct zr_logged_call call = {
        .name = ZR_CALL_END, .phase = ZERO_BACKWARD, .subject = 3, .step = 12};
    memset(good, 0, sizeof *good);
    good->magic = ZR_FLIGHT_MAGIC;
    good->version = ZR_FLIGHT_VERSION;
    good->head_bytes = offsetof(struct zr_flight_view, ops);
    good->state = ZR_FLIGHT_OPEN;
    good->rank = 2;
    good->world = 4;
    snprintf(good->job, sizeof good->job, "job");
    good->n_calls = 2;
    for (int i = 0; i < 2; i++)
        good->calls[i] = (struct zr_flight_call){(uint64_t)i + 1, zr_call_log_pack(&call), 10, 20};
    good->n_ops = 3;
    for (int i = 0; i < 3; i++)
        good->ops[i] = (struct zr_flight_op){
            .serial = (uint64_t)i + 1, .seq = 1, .role = i, .op = ZR_OP_ALL_GATHER, .started_ns = i % 2};
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static struct zr_flight_view good;
    check(data, n);
    make_good(&good);
    size_t bytes = zr_flight_bytes(&good), cut = n % 3 == 1 ? data[n - 1] : 0;
    for (size_t i = 0; i + 3 <= n; i += 3)
        ((uint8_t *)&good)[((size_t)data[i] | (size_t)data[i + 1] << 8) % bytes] = data[i + 2];
    check(&good, bytes - cut);
    return 0;
}
