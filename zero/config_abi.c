/* SPDX-License-Identifier: Apache-2.0 */
/* config_abi.c: which programs this library serves: those whose structs, as the head of their configuration
 * gives them, are those of its own zero.h or shorter.
 *
 * The public structs grow at their end. A shorter struct that the program wrote is completed by defaults, and
 * one that the library fills is filled up to its end. A field must not be put into the padding at the end of
 * an earlier version's struct: the size would stay, and an old program's padding would be read as the field.
 * A reserved field goes there first. */
#include "zero/config.h"

#include <string.h>

/* Where version 1 of a struct ends. */
#define END_OF(type, field) (offsetof(struct type, field) + sizeof(((struct type *)0)->field))

/* Of the structs beside zero_config. first: of the first version; 0 is one that the program does not use. */
static const struct {
    const char *key, *name;
    size_t offset, first, own;
} others[] = {
#define OTHER(key, type, last)                                                                               \
    {                                                                                                        \
#key, "struct " #type, offsetof(struct zero_config, key), END_OF(type, last), sizeof(struct type)    \
    }
    OTHER(tensor_size, zero_tensor, group),      OTHER(call_size, zero_call, is_end),
    OTHER(weight_size, zero_weight, transposed), OTHER(step_info_size, zero_step_info, skipped),
    OTHER(stats_size, zero_stats, path),         OTHER(plan_info_size, zero_plan_info, paper_bytes),
    OTHER(action_size, zero_action, kept),
#undef OTHER
};

#define FIRST_BYTES END_OF(zero_config, init_arg)

/* Before the head had a version a program's struct had the stage there. */
#define LAST_OLD_STAGE 3

static int later(const char *key, size_t size, const char *name, size_t own)
{
    return zr_fail(ZR_ERR_ARG,
                   "%s is %zu, but %s of this library (%s) has %zu bytes: the program was built with a later "
                   "zero.h; run it with that version's library, or build it with this one's zero.h",
                   key, size, name, zero_version(), own);
}

static int check_version(const struct zero_config *cfg)
{
    if (cfg->version == ZERO_ABI_VERSION)
        return 0;
    if (cfg->size == 0 && cfg->version == 0)
        return zr_fail(ZR_ERR_ARG,
                       "the configuration was not begun: its size and version are 0; begin it with "
                       "ZERO_CONFIG_INIT or zero_config_init");
    if (cfg->size != 0 && cfg->size < 4096 && cfg->version <= LAST_OLD_STAGE)
        return zr_fail(ZR_ERR_ARG,
                       "version is %u with a size of %zu: the program was built with a zero.h that is older "
                       "than this library (%s) can serve; build it anew with this library's zero.h",
                       cfg->version, cfg->size, zero_version());
    return zr_fail(ZR_ERR_ARG,
                   "version is 0x%x and size %zu: the configuration was not begun with ZERO_CONFIG_INIT or "
                   "zero_config_init, or by a zero.h whose version this library (%s, 0x%x) does not know",
                   cfg->version, cfg->size, zero_version(), ZERO_ABI_VERSION);
}

static int check_size(size_t size)
{
    if (size > sizeof(struct zero_config))
        return later("size", size, "struct zero_config", sizeof(struct zero_config));
    if (size < FIRST_BYTES)
        return zr_fail(ZR_ERR_ARG, "size is %zu; allowed: %zu, the bytes of struct zero_config (%s)", size,
                       sizeof(struct zero_config), "set by ZERO_CONFIG_INIT");
    return 0;
}

int zr_config_check_head(const struct zero_config *cfg)
{
    if (!cfg)
        return zr_fail(ZR_ERR_ARG, "cfg is NULL; it must be a configuration begun with ZERO_CONFIG_INIT or "
                                   "zero_config_init");
    int err = check_version(cfg);
    if (!err)
        err = check_size(cfg->size);
    for (size_t i = 0; !err && i < sizeof others / sizeof *others; i++) {
        uint32_t size;
        memcpy(&size, (const char *)cfg + others[i].offset, sizeof size);
        if (size > others[i].own)
            err = later(others[i].key, size, others[i].name, others[i].own);
        else if (size != 0 && size < others[i].first)
            err = zr_fail(ZR_ERR_ARG, "%s is %u; allowed: %zu, the bytes of %s (set by ZERO_CONFIG_INIT)",
                          others[i].key, size, others[i].own, others[i].name);
    }
    return err;
}

int zr_config_widen(const struct zero_config *cfg, struct zero_config *out)
{
    int err = zr_config_check_head(cfg);
    if (err)
        return err;
    struct zero_config c = ZERO_CONFIG_INIT;
    memcpy(&c, cfg, cfg->size);
    c.size = sizeof c;
    *out = c;
    return 0;
}

int zr_config_needs(const struct zero_config *cfg, size_t offset_of_size)
{
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        uint32_t size;
        memcpy(&size, (const char *)cfg + others[i].offset, sizeof size);
        if (others[i].offset == offset_of_size && size == 0)
            return zr_fail(ZR_ERR_ARG, "%s is 0; set it to the bytes of %s as this program has it",
                           others[i].key, others[i].name);
    }
    return 0;
}

void zr_copy_in(void *dst, size_t dst_bytes, const void *array, int64_t i, size_t stride)
{
    memset(dst, 0, dst_bytes);
    memcpy(dst, (const char *)array + (size_t)i * stride, stride < dst_bytes ? stride : dst_bytes);
}

void zr_copy_out(void *dst, size_t dst_bytes, const void *src, size_t src_bytes)
{
    memcpy(dst, src, dst_bytes < src_bytes ? dst_bytes : src_bytes);
}

int zero_config_init(struct zero_config *cfg, size_t size)
{
    if (!cfg)
        return zr_fail(ZR_ERR_ARG, "zero_config_init: cfg is NULL");
    int err = check_size(size);
    if (err)
        return zr_fail_more(err, "zero_config_init");
    struct zero_config c = ZERO_CONFIG_INIT;
    c.size = size;
    c.tensor_size = c.call_size = c.weight_size = 0;
    c.step_info_size = c.stats_size = c.plan_info_size = c.action_size = 0;
    memcpy(cfg, &c, size);
    return 0;
}
