/* SPDX-License-Identifier: Apache-2.0 */
/* cublaslt_stand_in.h: controls of the stand-in for cuBLASLt.
 *
 * Products run in stream order on the stream's thread, as plain loops with fp32 sums. Misuse is counted by
 * stand_in_misuse:
 * - an object used after it was destroyed
 * - an attribute of the wrong size
 * - a matrix that does not fit its memory
 * - an operand that overlaps the result
 * - an algorithm used for another product than the heuristic was asked for, or with less alignment or
 *   workspace */
#ifndef ZR_TEST_CUBLASLT_STAND_IN_H
#define ZR_TEST_CUBLASLT_STAND_IN_H

#include <stdint.h>

/* From now on the heuristic finds no algorithm for these epilogues (the bits of cublasLtEpilogue_t; 0: it
 * finds all). */
void cublaslt_stand_in_refuse(uint32_t epilogues);
#define CUBLASLT_STAND_IN_EPILOGUES (32u | 64u | 512u) /* all but a bias: GELU, its gradient, a bias's */

/* Returns how many handles, layouts, descriptors and preferences were not destroyed. */
int cublaslt_stand_in_n_open(void);

/* The number of products put on streams so far, and of those with an epilogue other than a bias. */
int64_t cublaslt_stand_in_n_products(void);
int64_t cublaslt_stand_in_n_epilogues(void);

#endif
