/* SPDX-License-Identifier: Apache-2.0 */
/* checksums.h: checksums of blocks. Each block has two, of different families: XXH3 with 64 bits, and
 * CRC-32C, which detects every error burst up to 32 bits. Both are from libraries: xxHash, and ISA-L's
 * crc32_iscsi, which uses the CPU's instruction. */
#ifndef ZR_ZERO_SUMS_H
#define ZR_ZERO_SUMS_H

#include <stdbool.h>
#include <stdint.h>

struct zr_checksum {
    uint64_t xxh3;
    uint32_t crc32c;
};

#define ZR_SUM_CHARS 25 /* as text: 16 and 8 hexadecimal digits, and the terminating zero */
#define ZR_SUM_BYTES 12 /* as bytes, little-endian */

/* n is below 2^31. */
struct zr_checksum zr_checksum_of(const void *data, int64_t n);
bool zr_checksum_equal(const struct zr_checksum *a, const struct zr_checksum *b);
void zr_checksum_print(const struct zr_checksum *s, char text[ZR_SUM_CHARS]);
/* Accepts exactly what zr_checksum_print writes. */
bool zr_checksum_parse(const char *text, struct zr_checksum *out);
void zr_checksum_store(const struct zr_checksum *s, unsigned char out[ZR_SUM_BYTES]);
void zr_checksum_load(const unsigned char in[ZR_SUM_BYTES], struct zr_checksum *out);

#endif
