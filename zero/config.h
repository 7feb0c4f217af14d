/* SPDX-License-Identifier: Apache-2.0 */
/* config.h: turns the program's struct zero_config into the options of the engine (shard/options.h).
 *
 * One table (config_keys.c) holds every field: its key, place, kind and allowed range. zero_config_set, the
 * ZERO_* environment and the checks of zero_wrap and zero_plan all read it. So they know the same fields, and
 * a value means the same as text and as a number.
 *
 * Thread-safety: plain functions on plain data. The environment must not change meanwhile. */
#ifndef ZR_ZERO_CONFIG_H
#define ZR_ZERO_CONFIG_H

#include "shard/layout.h"
#include "shard/options.h"
#include "zero/zero.h"

/* The names of all optimizers for messages: "adamw, adam, ...". */
#define ZR_OPTIMIZER_KEY(name, value, key, text) ", " #key
#define ZR_OPTIMIZER_KEYS                        (&(ZERO_OPTIMIZER_MAP(ZR_OPTIMIZER_KEY))[2])
/* The names of all backends for messages: ", self, shm, ...". */
#define ZR_BACKEND_KEY(name, value, key, text) ", " #key
#define ZR_BACKEND_KEYS                        ZERO_BACKEND_MAP(ZR_BACKEND_KEY)
/* Adds 1 for each backend. Backends are numbered from 1 without gaps. */
#define ZR_BACKEND_ONE(name, value, key, text) +1
/* One more than the last backend's number. */
enum { ZR_BACKEND_COUNT = 1 ZERO_BACKEND_MAP(ZR_BACKEND_ONE) };

struct zr_config {
    /* The program's configuration with the environment applied. ZERO_AUTO is not resolved here. Needed for
     * what options lacks: rank, world, rendezvous, backend, device, stream and update. */
    struct zero_config user;

    /* The options, with all defaults filled in. update and update_arg are NULL; zero_wrap sets them to an
     * adapter that calls the groups' updates. */
    struct zr_options options;
    /* (options.n_optims) The program's parameter groups: cfg.optim, then cfg.optim_groups. */
    struct zero_optim *groups;
    /* This rank's place in the mesh, which zr_config_mesh sets. zr_config_groups completes it if dp_replicate
     * is auto. local_rank is 0. */
    struct zero_place place;
    /* Memory of options.order. NULL: none. */
    struct zero_call *order;
    /* The log of options.log. It writes to cfg.debug.log and where ZERO_LOG says. */
    struct zr_log *log;
};

/* Fills *out from the program's configuration and the environment, and checks every field. Local. On success
 * the caller releases *out with zr_config_release. After a failure there is nothing to release. Returns
 * ZERO_ERR_ARG with a message that names the field or variable, its value and what is allowed; or
 * ZERO_ERR_NOMEM. */
int zr_config_resolve(const struct zero_config *user, struct zr_config *out);

/* The same without a log. For zero_find_place: the later zero_wrap logs what there is to log. */
int zr_config_resolve_silently(const struct zero_config *user, struct zr_config *out);

/* find_place.c. Computes place and options.pp, tp and cp from cfg.mesh. Everything else here then takes the
 * number of data-parallel ranks (zr_place_dp) for the world. ZERO_ERR_ARG if the axes do not make the
 * world. */
int zr_config_mesh(struct zr_config *config, int32_t rank, int32_t world);

/* Returns the number of data-parallel ranks. Ranks along cp are among them: they share shards, though not
 * rows. */
static inline int32_t zr_place_dp(const struct zero_place *p)
{
    return p->n_data * p->n_cp;
}

/* groups.c. Completes place if dp_replicate is auto, and sets options.hybrid and options.dp_shard. Call it
 * after zr_config_mesh and before zr_backend_choose. Without a hybrid, dp_shard is the number of
 * data-parallel ranks. A hybrid with groups of 1 rank becomes a stage without a hybrid. Rank 0 logs settings
 * that have no effect. t is NULL for a plan. ZERO_ERR_ARG if dp_replicate is auto in a plan, or the hosts do
 * not make whole replicas. */
struct zr_topology;
int zr_config_groups(struct zr_config *config, const struct zr_topology *t);

/* Turns deterministic off if it is auto, groups span hosts, and a step has several micro-batches. Otherwise
 * each micro-batch would be reduced over the network between hosts. Rank 0 logs this. */
void zr_config_mind_network(struct zr_config *config, bool outer_spans_hosts);

/* Returns how long zero_wrap waits for other ranks, in ms: start_timeout_ms, or its default. c must have been
 * checked. */
int64_t zr_config_start_ms(const struct zero_config *c);

/* Copies what can be read of a refused configuration and of the environment. A rank needs it to find the
 * other ranks and report the error. */
void zr_config_legible(const struct zero_config *cfg, struct zero_config *out);

/* Copies cfg.launch.name in the form that messages show and ranks compare. Control characters, which are
 * refused, become \xNN. A name that does not fit is cut. NULL becomes "". */
void zr_config_print_name(const char *name, char *out, size_t n_out);

/* Frees what config holds. NULL and a zeroed struct are allowed. */
void zr_config_release(struct zr_config *config);

/* Makes the layout of the model for a world of this many ranks. Tensors and errors are those of
 * zr_layout_make. */
int zr_config_layout(const struct zr_config *config, struct zr_tensor *tensors, int32_t n_tensors, int world,
                     struct zr_layout **out);

/* Checks that the configuration was initialized with this library's zero.h. Reads only its size and version.
 * NULL is an error too. */
int zr_config_check_head(const struct zero_config *cfg);

/* ---- config_keys.c ---- */

/* Applies the ZERO_* variables of the fields marked + in zero_config.h. An empty variable counts as unset.
 * Warns about each ZERO_ variable that nothing reads. */
int zr_config_apply_env(struct zero_config *cfg, struct zr_log *log);
/* The same without warnings. Variables that cannot be read are ignored. */
void zr_config_apply_legible(struct zero_config *cfg);

/* Checks a number for the field named key, a float or a double, and rounds it to the field's type. ZERO_AUTO
 * is refused. */
int zr_config_check_number(const char *key, double value, double *out);

/* Checks each field against its range. */
int zr_config_check_fields(const struct zero_config *cfg);
/* The same for the fields of one parameter group. */
int zr_config_check_optim(const struct zero_optim *group);

/* Returns a field's value for messages: the name if the field is an enum, otherwise the number. If key is no
 * field, the number is returned. */
struct zr_value_text {
    char text[32];
};
struct zr_value_text zr_config_value_text(const char *key, double value);

#endif
