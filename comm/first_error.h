/* SPDX-License-Identifier: Apache-2.0 */
/* first_error.h: a common result for steps that may fail on one rank alone: the first rank that failed
 * decides.
 *
 * Each rank reports its result to the others. Either all of them go on, or all fail with one code and one
 * message: those of the lowest rank that failed. The other ranks put its number before the message. Causes
 * come before consequences: a rank that timed out, or lost another, decides only if no rank has another
 * failure. If the ranks cannot reach each other, a rank that failed keeps its own message.
 *
 *     struct record {
 *         ZR_FIRST_ERROR(240);
 *         int64_t bytes;
 *     } mine = {.bytes = 5}, *all = ...;
 *     zr_first_error_put(&mine, do_something());
 *     int err = zr_first_error(exchange(&mine, all), &mine, all, n, me); */
#ifndef ZR_COMM_FIRST_ERROR_H
#define ZR_COMM_FIRST_ERROR_H

#include "kernels/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Members of the record that is exchanged: a code of error.h or 0, and its message, cut to text_bytes. */
#define ZR_FIRST_ERROR(text_bytes)                                                                           \
    int32_t err;                                                                                             \
    char text[text_bytes]

/* Writes this rank's result: code, with this thread's message if it is not 0. Returns code. */
#define zr_first_error_put(mine, code)                                                                       \
    zr_first_error_write(&(mine)->err, (mine)->text, sizeof(mine)->text, (code))

/* The common result of n ranks: 0, or the code of the rank that decides, with its message as this thread's.
 * Other ranks put "rank 2: " before it. all has n records, one after another; me is the index of this rank's.
 * The texts of other ranks need not end. */
#define zr_first_error_of(all, n, me)                                                                        \
    zr_first_error_find(&(all)->err, (all)->text, sizeof(all)->text, sizeof *(all), (n), (me))

/* The same after an exchange of these records, which returned met. If met is an error, the result is this
 * rank's own failure if it has one, and met otherwise. */
#define zr_first_error(met, mine, all, n, me)                                                                \
    ((met) ? zr_first_error_alone((met), (mine)->err, (mine)->text, sizeof(mine)->text)                      \
           : zr_first_error_of((all), (n), (me)))

/* Decides between ranks: whether of_next, the code of a rank, replaces so_far, the result of the ranks before
 * it. 0 is success. */
bool zr_first_error_rather(int so_far, int of_next);
/* Checks a code that another rank sent. Returns it, or ZERO_ERR_FAILED if it is not a known code. */
int zr_first_error_code(int code);

int zr_first_error_write(int32_t *to_err, char *to_text, size_t text_bytes, int err);
int zr_first_error_find(const int32_t *err, const char *text, size_t text_bytes, size_t stride, int n,
                        int me);
int zr_first_error_alone(int met, int err, const char *text, size_t text_bytes);

#endif
