/* SPDX-License-Identifier: Apache-2.0 */
/* raw_bits.h: what kernels do with the bits of elements, for the host and a GPU. A digest of bytes has a
 * value that does not depend on the order of threads. A maximum keeps NaN. */
#ifndef ZR_KERNELS_RAW_BITS_H
#define ZR_KERNELS_RAW_BITS_H

#include "kernels/host_device_code.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Returns what a word of 8 bytes adds to a digest, in which it has that number. A word that is zero adds
 * nothing. Two rounds of multiply and shift spread every bit over the result. */
ZR_HOST_DEVICE uint64_t zr_digest_word(uint64_t word, uint64_t number)
{
    uint64_t x = word ^ (number + 1) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
    return word ? x ^ x >> 32 : 0;
}

/* Returns whether an element takes the place of the greatest one so far. */
ZR_HOST_DEVICE bool zr_is_greater(float x, float greatest)
{
    return x > greatest || x != x;
}

#endif
