/* sums.h: checksums of blocks. Two functions of different families guard each: XXH3 of 64 bits, and CRC-32C,
 * which finds every burst of errors up to 32 bits; both from libraries (xxHash; ISA-L's crc32_iscsi, which
 * uses the CPU's instruction). */
#ifndef ZR_ZERO_SUMS_H
#define ZR_ZERO_SUMS_H

#include <stdbool.h>
#include <stdint.h>

struct zr_sum {
    uint64_t xxh3;
    uint32_t crc32c;
};

#define ZR_SUM_CHARS 25 /* as text: 16 and 8 hexadecimal digits, and the terminating zero */
#define ZR_SUM_BYTES 12 /* as bytes, little-endian */

/* n < 2^31. */
struct zr_sum zr_sum_of(const void *data, int64_t n);
bool zr_sum_equal(const struct zr_sum *a, const struct zr_sum *b);
void zr_sum_print(const struct zr_sum *s, char text[ZR_SUM_CHARS]);
/* Exactly what zr_sum_print writes. */
bool zr_sum_parse(const char *text, struct zr_sum *out);
void zr_sum_store(const struct zr_sum *s, unsigned char out[ZR_SUM_BYTES]);
void zr_sum_load(const unsigned char in[ZR_SUM_BYTES], struct zr_sum *out);

#endif
