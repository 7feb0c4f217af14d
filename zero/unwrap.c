/* SPDX-License-Identifier: Apache-2.0 */
/* unwrap.c: zero_unwrap, which closes a context, or leaves it in memory if something still uses it. */
#include "kernels/check/check_device.h"
#include "zero/context.h"

#include <stdatomic.h>
#include <stdlib.h>

static void on_stop(void *arg)
{
    struct zero_ctx *z = arg;
    if (z->rendezvous)
        zr_rendezvous_close(z->rendezvous);
}

/* Contexts that nobody can close. A forked child shares their memory with its parent, and has none of their
 * threads. Or one of their threads or a GPU is stuck, and will use their memory when it continues. They end
 * with the process. The list lets a leak checker find them. */
static zero_ctx *_Atomic all_left;

static void leave(zero_ctx *z)
{
    z->next_unfreed = atomic_load(&all_left);
    while (!atomic_compare_exchange_weak(&all_left, &z->next_unfreed, z))
        ;
}

/* Leaves the context in memory because a thread or an operation has not returned and may still use it. user:
 * names it for the warning. */
static void leave_to(struct zero_ctx *z, const char *user)
{
    struct zr_log *log = z->config.options.log;
    zr_warn(log, "%s has not returned, so the memory of its context is not freed; the process should end",
            user);
    zr_log_let_go(log);
    leave(z);
}

void zr_tear_down(struct zero_ctx *z)
{
    struct zr_saved_error kept;
    zr_error_save(&kept, 0);
    zr_progress_close(&z->progress);
    struct zr_open_name *open_name = z->open_name;
    bool loop_ended = zr_loop_close(z->loop, on_stop, z);
    zr_folder_unlock_all(&z->locks);
    if (!loop_ended) {
        zr_open_name_drop(open_name);
        leave_to(z, "the library's own thread");
        zr_error_restore(&kept);
        return;
    }
    bool rests = zr_engine_close(z->engine);
    zr_backend_close_comms(z);
    if (!rests) {
        zr_open_name_drop(open_name);
        leave_to(z, "an operation of the communicator");
        zr_error_restore(&kept);
        return;
    }
    zr_rendezvous_free(z->rendezvous);
    zr_check_close(z->check);
    if (z->device)
        z->device->ops->close(z->device);
    zr_engine_free(z->engine);
    zr_states_close(z->states);
    zr_flight_peers_close(z->flight_peers);
    zr_flight_close(z->flight);
    zr_plan_free(z->plan);
    zr_whole_free(&z->whole);
    zr_schedule_free(z->schedule);
    zr_layout_free(z->layout);
    zr_mesh_free(&z->mesh);
    zr_topology_free(&z->topology);
    zr_config_release(&z->config);
    zr_init_later_close(z);
    zr_missing_brackets_close(z);
    for (int kind = 0; kind < ZR_N_DATA; kind++)
        zr_data_drop(z->data[kind]);
    zr_loaded_checkpoint_free(z->loaded);
    free(z->from_all);
    free(z->sharers);
    free(z);
    zr_open_name_drop(open_name);
    zr_error_restore(&kept);
}

/* Warns about gradients that no zero_step has used. */
static void report_unused_gradients(const struct zero_ctx *z)
{
    if (zr_engine_between_steps(z->engine))
        return;
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    if (facts.n_steps == 0)
        zr_warn(z->config.options.log,
                "zero_unwrap: zero_step was never called: no gradient was used, and nothing trained");
    else
        zr_warn(z->config.options.log,
                "zero_unwrap: a step has begun: the gradients since the last zero_step were not used");
}

int zero_unwrap(zero_ctx **z)
{
    if (!z || !*z)
        return 0;
    struct zero_ctx *ctx = *z;
    if (zr_engine_check_process(ctx->engine)) {
        leave(ctx);
        *z = NULL;
        return zr_fail_more(ZERO_ERR_ORDER, "zero_unwrap");
    }
    zr_engine_enter(ctx->engine, ZR_CALL_UNWRAP, 0, -1);
    struct zr_saved_error save;
    zr_error_save(&save, zr_save_end(ctx));
    int err = zr_engine_check(ctx->engine);
    if (ctx->is_shifting[0] || ctx->is_shifting[1])
        zr_warn(ctx->config.options.log, "zero_unwrap: zero_shift_end is missing for a shift that is open");
    if (!err) {
        report_unused_gradients(ctx);
        zr_engine_called(ctx->engine, 0);
        err = zr_engine_barrier(ctx->engine);
    }
    if (!err && save.code)
        err = zr_error_restore(&save);
    zr_engine_leave(ctx->engine);
    zr_engine_unpoint(ctx->engine);
    zr_tear_down(ctx);
    *z = NULL;
    return err;
}
