/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_config.c: passes arbitrary keys and values (KEY=VALUE, one per line) to zero_config_set. A refused
 * value must change nothing and set a message. The accepted values must resolve to a valid configuration, or
 * be refused with a message. */
#include "zero/config.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zr_config resolved;
    char *text = malloc(n + 1), *rest = text;
    if (!text)
        return 0;
    memcpy(text, data, n);
    text[n] = 0;
    for (char *line; (line = strsep(&rest, "\n"));) {
        char *value = strchr(line, '=');
        if (!value)
            continue;
        *value++ = 0;
        struct zero_config before = cfg;
        int err = zero_config_set(&cfg, line, value);
        if (err && (memcmp(&before, &cfg, sizeof cfg) != 0 || !*zero_last_error()))
            abort();
    }
    int err = zr_config_resolve(&cfg, &resolved);
    if (!err) {
        const struct zr_options *o = &resolved.options;
        if (o->stage < 0 || o->stage > 3 || o->grad_accum_steps < 1 || o->prefetch < 0 ||
            o->timeout_ms <= 0 || o->grad_scale == 0 || o->optim[0].n_states > ZR_MAX_STATES)
            abort();
        zr_config_release(&resolved);
    } else if (!*zero_last_error()) {
        abort();
    }
    free(text);
    return 0;
}
