/* SPDX-License-Identifier: Apache-2.0 */
/* config_abi.c: refuses programs that were built with another zero.h than this library's. The size and the
 * version at the head of their configuration tell. */
#include "zero/config.h"

int zr_config_check_head(const struct zero_config *cfg)
{
    if (!cfg)
        return zr_fail(
            ZR_ERR_ARG,
            "cfg is NULL; it must be a configuration initialised by ZERO_CONFIG_INIT or zero_config_init");
    if (cfg->size == sizeof *cfg && cfg->version == ZERO_ABI_VERSION)
        return 0;
    if (cfg->size == 0 && cfg->version == 0)
        return zr_fail(ZR_ERR_ARG, "the configuration was not initialised: its size and version are 0; "
                                   "initialise it by ZERO_CONFIG_INIT or zero_config_init");
    return zr_fail(
        ZR_ERR_ARG,
        "version is 0x%x and size is %zu; allowed: 0x%x and %zu, those of this library (%s): the program was "
        "built with another zero.h, or did not initialise cfg by ZERO_CONFIG_INIT or zero_config_init",
        cfg->version, cfg->size, ZERO_ABI_VERSION, sizeof *cfg, zero_version());
}

int zero_config_init(struct zero_config *cfg, size_t size)
{
    if (!cfg)
        return zr_fail(ZR_ERR_ARG, "zero_config_init: cfg is NULL");
    if (size != sizeof *cfg)
        return zr_fail(ZR_ERR_ARG,
                       "zero_config_init: size is %zu; allowed: %zu, the bytes of struct zero_config of this "
                       "library (%s): the program was built with another zero.h",
                       size, sizeof *cfg, zero_version());
    *cfg = (struct zero_config)ZERO_CONFIG_INIT;
    return 0;
}
