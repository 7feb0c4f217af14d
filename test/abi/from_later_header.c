/* SPDX-License-Identifier: Apache-2.0 */
/* from_later_header.c: see from_later_header.h. Compiled with the later zero.h. */
#include "test/abi/from_later_header.h"
#include "zero/config.h"

#include <string.h>

size_t later_size_of(const char *name)
{
    static const struct {
        const char *name;
        size_t size;
    } structs[] = {{"config", sizeof(struct zero_config)},       {"tensor", sizeof(struct zero_tensor)},
                   {"call", sizeof(struct zero_call)},           {"weight", sizeof(struct zero_weight)},
                   {"step_info", sizeof(struct zero_step_info)}, {"stats", sizeof(struct zero_stats)},
                   {"plan_info", sizeof(struct zero_plan_info)}};
    for (size_t i = 0; i < sizeof structs / sizeof *structs; i++)
        if (!strcmp(structs[i].name, name))
            return structs[i].size;
    return 0;
}

int64_t later_field_of_config(const void *todays_config)
{
    struct zero_config c;
    return zr_config_widen(todays_config, &c) ? -1 : c.added;
}
