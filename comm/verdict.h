/* SPDX-License-Identifier: Apache-2.0 */
/* verdict.h: one rule for steps that may fail on one rank alone: the first rank that failed speaks.
 *
 * Each rank reports to the others how it went, and all of them go on or none does, with one code and one
 * message: those of the lowest rank that failed, which the others call by its number. Causes come before
 * consequences: a rank that has waited in vain, or lost another, speaks only where nobody has anything else
 * to say. Where ranks cannot even reach each other, one that failed keeps its own words.
 *
 *     struct card {
 *         ZR_VERDICT(240);
 *         int64_t bytes;
 *     } mine = {.bytes = 5}, *all = ...;
 *     zr_verdict_put(&mine, do_something());
 *     int err = zr_verdict(exchange(&mine, all), &mine, all, n, me);
 * */
#ifndef ZR_COMM_VERDICT_H
#define ZR_COMM_VERDICT_H

#include "kernels/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Members of whatever is exchanged: a code of error.h or 0, and its message, cut to text_bytes. */
#define ZR_VERDICT(text_bytes)                                                                               \
    int32_t err;                                                                                             \
    char text[text_bytes]

/* How it went here: code, with this thread's message if that is not 0. Returns code. */
#define zr_verdict_put(mine, code) zr_verdict_write(&(mine)->err, (mine)->text, sizeof(mine)->text, (code))

/* What all of n ranks come to: 0, or the code of the first that failed with its message as this thread's,
 * "rank 2: " before it on other ranks than that one. all: n of them, one after another; me: which of them
 * is mine. Texts of others need not end. */
#define zr_verdict_first(all, n, me)                                                                         \
    zr_verdict_of(&(all)->err, (all)->text, sizeof(all)->text, sizeof *(all), (n), (me))

/* The same behind an exchange that returned met: if that failed, what was put here, else what the exchange
 * met. */
#define zr_verdict(met, mine, all, n, me)                                                                    \
    ((met) ? zr_verdict_alone((met), (mine)->err, (mine)->text, sizeof(mine)->text)                          \
           : zr_verdict_first((all), (n), (me)))

/* The rule itself: whether a rank speaks, in place of the one that would so far, which is before it in order;
 * 0: that of none. */
bool zr_verdict_rather(int so_far, int of_next);
/* What another rank says its code is may be anything: it, or ZR_ERR_FAILED where it is none. */
int zr_verdict_code(int code);

int zr_verdict_write(int32_t *to_err, char *to_text, size_t text_bytes, int err);
int zr_verdict_of(const int32_t *err, const char *text, size_t text_bytes, size_t stride, int n, int me);
int zr_verdict_alone(int met, int err, const char *text, size_t text_bytes);

#endif
