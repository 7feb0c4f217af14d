/* SPDX-License-Identifier: Apache-2.0 */
/* config.h: from the program's struct zero_config, of whatever version, to the options that the floors below
 * work with.
 *
 * One table (config_keys.c) holds every field: its key, place, kind and allowed range. zero_config_set, the
 * ZERO_* environment and the checks of zero_wrap and zero_plan all read it, so none of them can know a field
 * that another does not. A text means what its number means in the field.
 *
 * Thread-safety: plain functions on plain data; the environment must not change meanwhile. */
#ifndef ZR_ZERO_CONFIG_H
#define ZR_ZERO_CONFIG_H

#include "shard/layout.h"
#include "shard/options.h"
#include "zero/zero.h"

/* "adamw, adam, ... ", for messages. */
#define ZR_OPTIMIZER_KEY(name, value, key, text) #key ", "
#define ZR_OPTIMIZER_KEYS                        ZERO_OPTIMIZER_MAP(ZR_OPTIMIZER_KEY)
/* ", self, shm, ..." */
#define ZR_BACKEND_KEY(name, value, key, text) ", " #key
#define ZR_BACKEND_KEYS                        ZERO_BACKEND_MAP(ZR_BACKEND_KEY)
/* Numbered from 1 without gaps. */
#define ZR_BACKEND_ONE(name, value, key, text) +1
/* One more than the last. */
enum { ZR_BACKEND_COUNT = 1 ZERO_BACKEND_MAP(ZR_BACKEND_ONE) };

struct zr_config {
    /* the program's, widened to this library's fields, the environment applied; ZERO_AUTO is still itself
     * here. For what options does not carry: the sizes of the program's structs, rank, world, rendezvous,
     * backend, device, stream, update */
    struct zero_config user;

    /* all defaults filled in. update and update_arg are left NULL: whoever knows the tensors' names puts an
     * adapter to user.update there (user.update set: optimizer 0) */
    struct zr_options options;
    /* of options.pp pipeline stages, this rank's (zr_config_mesh) */
    int32_t pp_at;
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

/* In groups.c. What hybrid and shard_group come to in a world: options.shard_group is how many ranks share
 * one copy of the parameters, world without a hybrid; world: of the ranks that have the same part of the
 * model. A hybrid with groups of 1 rank, or with one group of all, becomes a stage without one, and the log
 * of rank 0 says so; it also says where shard_group is given without a hybrid. has_hosts: t was asked for
 * (zr_topology_probe); else shard_group auto is refused. ZR_ERR_ARG: a number that does not divide the world;
 * auto where hosts have unequal numbers of ranks. Before zr_backend_choose. */
struct zr_topology;
int zr_config_groups(struct zr_config *config, const struct zr_topology *t, int32_t world, bool has_hosts);

/* In axes.c, before it. What cfg.mesh comes to: options.pp and parts, 1 without, pp_at, and shard_group of a
 * hybrid. The ranks of each part are then a world of their own to everything else here. rank: of this one,
 * -1: of a plan. ZR_ERR_ARG: a mesh of another rank or world; shard_group given, too. ZR_ERR_NOTSUP: a
 * device without such an axis. */
int zr_config_mesh(struct zr_config *config, int32_t rank, int32_t world);

/* Afterwards: ranks of one group. */
int32_t zr_config_inner(const struct zr_config *config, int32_t world);

/* deterministic that nobody asked for is turned off where groups span hosts and a step has several
 * micro-batches: each of them would be reduced over the network between hosts. The log of rank 0 says so. */
void zr_config_mind_network(struct zr_config *config, bool outer_spans_hosts, int32_t rank);

/* What start_timeout_ms comes to, of fields that were checked. */
int64_t zr_config_start_ms(const struct zero_config *c);

/* What can be read of a configuration that is refused, and of the environment, to look for the others. */
void zr_config_legible(const struct zero_config *cfg, struct zero_config *out);

/* Copies cfg.launch.name as it is shown, and as ranks compare it: as much as there is room for, control
 * characters, which are refused, as \xNN. NULL is "". */
void zr_config_print_name(const char *name, char *out, size_t n_out);

/* Frees what it holds. NULL and a zeroed struct are allowed. */
void zr_config_release(struct zr_config *config);

/* The layout of the model in a world; tensors and errors: as of zr_layout_make. */
int zr_config_layout(const struct zr_config *config, struct zr_tensor *tensors, int32_t n_tensors, int world,
                     struct zr_layout **out);

/* In config_abi.c. */

/* Was the configuration begun by the zero.h of some version up to this library's, and are its structs those
 * of one? NULL is an error too. */
int zr_config_check_head(const struct zero_config *cfg);

/* Checks the head and copies, the fields that an older program's struct does not have filled with their
 * defaults. */
int zr_config_widen(const struct zero_config *cfg, struct zero_config *out);

/* Refuses a call whose struct's size the program left 0. offset_of_size: of the field, as
 * offsetof(struct zero_config, stats_size). */
int zr_config_needs(const struct zero_config *cfg, size_t offset_of_size);

/* Element i of the program's array, whose elements have stride bytes, into a struct of dst_bytes; what an
 * older program's struct does not have is 0. */
void zr_copy_in(void *dst, size_t dst_bytes, const void *array, int64_t i, size_t stride);

/* Into the program's struct, of dst_bytes: no byte beyond them. */
void zr_copy_out(void *dst, size_t dst_bytes, const void *src, size_t src_bytes);

/* In config_keys.c. */

/* Applies the ZERO_* variables of the fields marked + in zero.h; empty ones count as unset. A ZERO_
 * variable that nothing reads is warned of. */
int zr_config_apply_env(struct zero_config *cfg, struct zr_log *log);
/* The same of those that can be read; the others are as if they were not set. */
void zr_config_apply_legible(struct zero_config *cfg);

/* What the field named key may hold as a number, ZERO_AUTO apart, as a float; it is one of the floats. */
int zr_config_check_number(const char *key, double value, float *out);

/* Every field by itself against its range. */
int zr_config_check_fields(const struct zero_config *cfg);

/* A field's value in messages: by name where it is one of an enum, else the number. A key that is no field's
 * is allowed, and gives the number. */
struct zr_value_text {
    char text[32];
};
struct zr_value_text zr_config_value_text(const char *key, double value);

#endif
