/* SPDX-License-Identifier: Apache-2.0 */
/* checksums.c: computes, prints and parses the two checksums of a block. */
#include "zero/checkpoint/checksums.h"

#include <stdio.h>
#include <string.h>

#include <isa-l/crc.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

struct zr_checksum zr_checksum_of(const void *data, int64_t n)
{
    return (struct zr_checksum){.xxh3 = XXH3_64bits(data, (size_t)n),
                                .crc32c = ~crc32_iscsi((unsigned char *)(uintptr_t)data, (int)n, UINT32_MAX)};
}

bool zr_checksum_equal(const struct zr_checksum *a, const struct zr_checksum *b)
{
    return a->xxh3 == b->xxh3 && a->crc32c == b->crc32c;
}

void zr_checksum_print(const struct zr_checksum *s, char text[ZR_SUM_CHARS])
{
    snprintf(text, ZR_SUM_CHARS, "%016llx%08x", (unsigned long long)s->xxh3, s->crc32c);
}

bool zr_checksum_parse(const char *text, struct zr_checksum *out)
{
    char again[ZR_SUM_CHARS];
    unsigned long long x;
    unsigned c;
    if (strlen(text) != ZR_SUM_CHARS - 1 || sscanf(text, "%16llx%8x", &x, &c) != 2)
        return false;
    *out = (struct zr_checksum){x, c};
    zr_checksum_print(out, again);
    return !strcmp(text, again);
}

void zr_checksum_store(const struct zr_checksum *s, unsigned char out[ZR_SUM_BYTES])
{
    for (int i = 0; i < 8; i++)
        out[i] = (unsigned char)(s->xxh3 >> 8 * i);
    for (int i = 0; i < 4; i++)
        out[8 + i] = (unsigned char)(s->crc32c >> 8 * i);
}

void zr_checksum_load(const unsigned char in[ZR_SUM_BYTES], struct zr_checksum *out)
{
    *out = (struct zr_checksum){0};
    for (int i = 0; i < 8; i++)
        out->xxh3 |= (uint64_t)in[i] << 8 * i;
    for (int i = 0; i < 4; i++)
        out->crc32c |= (uint32_t)in[8 + i] << 8 * i;
}
