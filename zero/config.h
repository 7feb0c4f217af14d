/* config.h: from the program's struct zero_config, of whatever version, to the options that the floors below
 * work with.
 *
 * One table (config_keys.c) holds every field: its key, place, kind and allowed range. zero_config_set, the
 * ZERO_* environment and the checks of zero_wrap and zero_plan all read it, so none of them can know a field
 * that another does not. A text means what its number means in the field: "0" is the documented default there
 * too.
 *
 * Thread-safety: plain functions on plain data; the environment must not change meanwhile. */
#ifndef ZR_ZERO_CONFIG_H
#define ZR_ZERO_CONFIG_H

#include "shard/layout.h"
#include "shard/options.h"
#include "zero/zero.h"

struct zr_config {
    struct zero_config user; /* the program's, widened to this library's fields, the environment applied; 0 is
                                still "default" here. For what options does not carry: rank, world,
                                rendezvous, backend, device, stream, update */
    struct zr_options
        options; /* all defaults filled in. update and update_arg are left NULL: whoever knows the tensors'
                    names puts an adapter to user.update there (user.update set: optimizer 0) */
    struct zr_call *order; /* what options.order points to; NULL: none */
    struct zr_log *log;    /* options.log: to cfg.log, and where ZERO_LOG says */
};

/* Fills *out from the program's configuration and the environment and checks every field. Talks to nobody. On
 * success release it with zr_config_release; on failure (ZR_ERR_ARG naming the field or variable, its value
 * and what is allowed; ZR_ERR_NOMEM) nothing is held. user NULL is ZERO_CONFIG_INIT. */
int zr_config_resolve(const struct zero_config *user, struct zr_config *out);

/* The same without a log, for who asks before zero_wrap, which will tell what there is to tell. */
int zr_config_resolve_silently(const struct zero_config *user, struct zr_config *out);

/* Frees what it holds. NULL and a zeroed struct are allowed. */
void zr_config_release(struct zr_config *config);

/* The layout of the model in a world; tensors and errors: as of zr_layout_make. */
int zr_config_layout(const struct zr_config *config, struct zr_tensor *tensors, int32_t n_tensors, int world,
                     struct zr_layout **out);

/* The parts, in config_keys.c. */

/* Is size what ZERO_CONFIG_INIT of some version up to this library's wrote? */
int zr_config_check_size(size_t size);

/* Applies the ZERO_* variables of the fields marked + in zero.h; empty ones count as unset. A ZERO_
 * variable that nothing reads is warned of. */
int zr_config_apply_env(struct zero_config *cfg, struct zr_log *log);

/* Every field by itself against its range. */
int zr_config_check_fields(const struct zero_config *cfg);

#endif
