/* SPDX-License-Identifier: Apache-2.0 */
/* host_kernels.c: selects the host's kernels among the instruction sets that this CPU and this build have. */
#include "kernels/host/host_kernels.h"

#include <stdlib.h>

static bool cpu_has(enum zr_isa isa)
{
    switch (isa) {
    case ZR_ISA_PORTABLE:
        return true;
#ifdef ZR_HAVE_AVX2
    case ZR_ISA_AVX2:
        return __builtin_cpu_supports("avx2");
#endif
#ifdef ZR_HAVE_AVX512
    case ZR_ISA_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    default:
        return false;
    }
}

static const struct zr_host_kernels *const tables[ZR_ISA_COUNT] = {
    [ZR_ISA_PORTABLE] = &zr_host_portable,
#ifdef ZR_HAVE_AVX2
    [ZR_ISA_AVX2] = &zr_host_avx2,
#endif
#ifdef ZR_HAVE_AVX512
    [ZR_ISA_AVX512] = &zr_host_avx512,
#endif
};

const struct zr_host_kernels *zr_host_kernels(enum zr_isa isa)
{
    return (unsigned)isa < ZR_ISA_COUNT && cpu_has(isa) ? tables[isa] : NULL;
}

const struct zr_host_kernels *zr_host_kernels_named(const char *name)
{
    for (int isa = 0; isa < ZR_ISA_COUNT; isa++) {
        const struct zr_host_kernels *k = zr_host_kernels((enum zr_isa)isa);
        if (k && strcmp(k->name, name) == 0)
            return k;
    }
    return NULL;
}

const struct zr_host_kernels *zr_host_kernels_best(void)
{
    const char *name = getenv("ZERO_ISA");
    const struct zr_host_kernels *k = name ? zr_host_kernels_named(name) : NULL;
    for (int isa = ZR_ISA_COUNT - 1; !k && isa >= 0; isa--)
        k = zr_host_kernels((enum zr_isa)isa);
    return k;
}
