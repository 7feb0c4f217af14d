/* SPDX-License-Identifier: Apache-2.0 */
/* config.h: from the program's struct zero_config to the options that the floors below work with.
 *
 * One table (config_keys.c) holds every field: its key, place, kind and allowed range. zero_config_set, the
 * ZERO_* environment and the checks of zero_wrap and zero_plan all read it, so they know the same fields. A
 * text means what its number means in the field.
 *
 * Thread-safety: plain functions on plain data; the environment must not change meanwhile. */
#ifndef ZR_ZERO_CONFIG_H
#define ZR_ZERO_CONFIG_H

#include "shard/layout.h"
#include "shard/options.h"
#include "zero/zero.h"

/* "adamw, adam, ...", for messages. */
#define ZR_OPTIMIZER_KEY(name, value, key, text) ", " #key
#define ZR_OPTIMIZER_KEYS                        (&(ZERO_OPTIMIZER_MAP(ZR_OPTIMIZER_KEY))[2])
/* ", self, shm, ..." */
#define ZR_BACKEND_KEY(name, value, key, text) ", " #key
#define ZR_BACKEND_KEYS                        ZERO_BACKEND_MAP(ZR_BACKEND_KEY)
/* Numbered from 1 without gaps. */
#define ZR_BACKEND_ONE(name, value, key, text) +1
/* One more than the last. */
enum { ZR_BACKEND_COUNT = 1 ZERO_BACKEND_MAP(ZR_BACKEND_ONE) };

struct zr_config {
    /* the program's, the environment applied; ZERO_AUTO is still itself here. For what options does not
     * carry: rank, world, rendezvous, backend, device, stream, update */
    struct zero_config user;

    /* all defaults filled in. update and update_arg are left NULL: whoever knows the tensors' names puts an
     * adapter to the groups' there */
    struct zr_options options;
    /* (options.n_optims) the program's parameter groups: cfg.optim, then cfg.optim_groups */
    struct zero_optim *groups;
    /* This rank's, by zr_config_mesh, and with dp_replicate auto by zr_config_groups. local_rank is 0. */
    struct zero_place place;
    /* what options.order points to; NULL: none */
    struct zr_call *order;
    /* options.log: to cfg.debug.log, and where ZERO_LOG says */
    struct zr_log *log;
};

/* Fills *out from the program's configuration and the environment and checks every field. Talks to nobody. On
 * success release it with zr_config_release; on failure (ZR_ERR_ARG naming the field or variable, its value
 * and what is allowed; ZR_ERR_NOMEM) nothing is held. */
int zr_config_resolve(const struct zero_config *user, struct zr_config *out);

/* The same without a log, for who asks before zero_wrap, which will tell what there is to tell. */
int zr_config_resolve_silently(const struct zero_config *user, struct zr_config *out);

/* In find_place.c. What cfg.mesh comes to: place, and options.pp and parts. The ranks of each part are then a
 * world of their own to everything else here. ZR_ERR_ARG: axes that do not make the world. ZR_ERR_NOTSUP: an
 * axis that this library or the device does not have. */
int zr_config_mesh(struct zr_config *config, int32_t rank, int32_t world);

/* In groups.c, after it and before zr_backend_choose: completes place where dp_replicate is auto, and sets
 * options.hybrid and options.dp_shard, which is all data-parallel ranks without a hybrid. A hybrid with
 * groups of 1 rank becomes a stage without one. The log of rank 0 says what has no effect. t is NULL for a
 * plan.
 * ZR_ERR_ARG: dp_replicate is auto in a plan, or on hosts that are no replicas. */
struct zr_topology;
int zr_config_groups(struct zr_config *config, const struct zr_topology *t);

/* deterministic that nobody asked for is turned off where groups span hosts and a step has several
 * micro-batches: each of them would be reduced over the network between hosts. The log of rank 0 says so. */
void zr_config_mind_network(struct zr_config *config, bool outer_spans_hosts);

/* Returns the limit of zero_wrap that start_timeout_ms sets, its default included. c was checked. */
int64_t zr_config_start_ms(const struct zero_config *c);

/* Copies those fields of a refused configuration, and of the environment, that are needed to find the other
 * ranks. */
void zr_config_legible(const struct zero_config *cfg, struct zero_config *out);

/* Copies cfg.launch.name as it is shown, and as ranks compare it: as much as there is room for, control
 * characters, which are refused, as \xNN. NULL is "". */
void zr_config_print_name(const char *name, char *out, size_t n_out);

/* Frees what it holds. NULL and a zeroed struct are allowed. */
void zr_config_release(struct zr_config *config);

/* The layout of the model in a world; tensors and errors: as of zr_layout_make. */
int zr_config_layout(const struct zr_config *config, struct zr_tensor *tensors, int32_t n_tensors, int world,
                     struct zr_layout **out);

/* Checks that the configuration was begun with this library's zero.h. Reads only its size and version. NULL
 * is an error too. */
int zr_config_check_head(const struct zero_config *cfg);

/* In config_keys.c. */

/* Applies the ZERO_* variables of the fields marked + in zero.h; empty ones count as unset. A ZERO_
 * variable that nothing reads is warned of. */
int zr_config_apply_env(struct zero_config *cfg, struct zr_log *log);
/* The same of those that can be read; the others are as if they were not set. */
void zr_config_apply_legible(struct zero_config *cfg);

/* What the field named key may hold as a number, except ZERO_AUTO, rounded as the field holds it. The field
 * is a float or a double. */
int zr_config_check_number(const char *key, double value, double *out);

/* Every field by itself against its range. */
int zr_config_check_fields(const struct zero_config *cfg);
/* The same for the fields of one parameter group. */
int zr_config_check_optim(const struct zero_optim *group);

/* A field's value in messages: by name where it is one of an enum, else the number. A key that is no field's
 * is allowed, and gives the number. */
struct zr_value_text {
    char text[32];
};
struct zr_value_text zr_config_value_text(const char *key, double value);

#endif
