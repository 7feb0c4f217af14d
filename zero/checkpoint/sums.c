/* sums.c: see sums.h. */
#include "zero/checkpoint/sums.h"

#include <stdio.h>
#include <string.h>

#include <isa-l/crc.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

struct zr_sum zr_sum_of(const void *data, int64_t n)
{
    return (struct zr_sum){.xxh3 = XXH3_64bits(data, (size_t)n),
                           .crc32c = ~crc32_iscsi((unsigned char *)(uintptr_t)data, (int)n, UINT32_MAX)};
}

bool zr_sum_equal(const struct zr_sum *a, const struct zr_sum *b)
{
    return a->xxh3 == b->xxh3 && a->crc32c == b->crc32c;
}

void zr_sum_print(const struct zr_sum *s, char text[ZR_SUM_CHARS])
{
    snprintf(text, ZR_SUM_CHARS, "%016llx%08x", (unsigned long long)s->xxh3, s->crc32c);
}

bool zr_sum_parse(const char *text, struct zr_sum *out)
{
    char again[ZR_SUM_CHARS];
    unsigned long long x;
    unsigned c;
    if (strlen(text) != ZR_SUM_CHARS - 1 || sscanf(text, "%16llx%8x", &x, &c) != 2)
        return false;
    *out = (struct zr_sum){x, c};
    zr_sum_print(out, again);
    return !strcmp(text, again);
}

void zr_sum_store(const struct zr_sum *s, unsigned char out[ZR_SUM_BYTES])
{
    for (int i = 0; i < 8; i++)
        out[i] = (unsigned char)(s->xxh3 >> 8 * i);
    for (int i = 0; i < 4; i++)
        out[8 + i] = (unsigned char)(s->crc32c >> 8 * i);
}

void zr_sum_load(const unsigned char in[ZR_SUM_BYTES], struct zr_sum *out)
{
    *out = (struct zr_sum){0};
    for (int i = 0; i < 8; i++)
        out->xxh3 |= (uint64_t)in[i] << 8 * i;
    for (int i = 0; i < 4; i++)
        out->crc32c |= (uint32_t)in[8 + i] << 8 * i;
}
