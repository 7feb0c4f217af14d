/* SPDX-License-Identifier: Apache-2.0 */
/* model_check.h: the model, watched (cfg.debug.check): what it does between its brackets is told to a check
 * (kernels/check/check_device.h) as reads and writes, and at stages 2 and 3, on the host, it is given copies
 * of its parameters and gradients in guarded memory (kernels/check/guard.h), closed outside brackets.
 *
 * A touch of closed memory, a write to a parameter, a pointer kept from an earlier bracket (each bracket's
 * copy lies elsewhere) are the model's fault; they end the context with ZR_ERR_ORDER and a message that names
 * unit and tensor, found by the next call. On a GPU, whose memory cannot be closed, the copies are filled
 * with NaN instead (places.h). At stages 0 and 1 the model has its memory without brackets, too, so
 * there is no such guard there; what it writes beyond the end of a gradient is found by stored.c.
 *
 * Every function may be given NULL for a watch, and does nothing then. */
#ifndef ZR_SHARD_ENGINE_CHECK_H
#define ZR_SHARD_ENGINE_CHECK_H

#include "kernels/check/check_device.h"
#include "shard/layout.h"

struct zr_engine;
struct zr_model_check;

/* After the engine's streams and layout are there. */
int zr_model_check_open(struct zr_engine *e, struct zr_check *check, struct zr_model_check **out);
/* Gives back what is the device's; before the device is closed, and not where its work never ends. */
void zr_model_check_give_back(struct zr_model_check *w);
void zr_model_check_close(struct zr_model_check *w);

/* The model's thread makes a call; the loop carries a job out. name: a literal. */
void zr_model_check_call(struct zr_model_check *w, const char *name, int32_t unit, const char *phase,
                         uint32_t step);
void zr_model_check_job(struct zr_model_check *w, const char *name, int32_t unit, uint32_t step);
/* A job goes to the loop, and arrives there. */
struct zr_vclock *zr_model_check_hand(struct zr_model_check *w);
void zr_model_check_take(struct zr_model_check *w, struct zr_vclock *known);

/* Where the model's pointer to a piece goes while its unit is open, and to a tensor while it is not. NULL:
 * nothing is guarded. */
char *zr_model_check_param(const struct zr_model_check *w, const struct zr_piece *p);
char *zr_model_check_grad(const struct zr_model_check *w, const struct zr_piece *p);
char *zr_model_check_closed(const struct zr_model_check *w, int32_t tensor, bool grad);

/* The unit's parameters (gradient: grad) were handed to the model, or it is about to give them back; slot as
 * in struct zr_action. */
int zr_model_check_hand_out(struct zr_engine *e, int32_t unit, int32_t slot, bool grad);
int zr_model_check_take_back(struct zr_engine *e, int32_t unit, int32_t slot, bool grad);
/* All parameters, whole, where zr_model_check_closed points: open to be written (open), then to be read, or
 * closed again. Nothing where nothing is guarded. */
int zr_model_check_all(struct zr_engine *e, bool open);
int zr_model_check_all_read(struct zr_engine *e);
/* The model's thread may have read every parameter that it was told is there, brackets or not. A fault of
 * the model's that only a look at the GPU's memory shows ends the context here. */
int zr_model_check_step(struct zr_engine *e);
/* The last step was skipped: a gradient is not finite. */
void zr_model_check_skipped(struct zr_engine *e);

/* A snapshot is ordered, and a thread of the program will read it; and: it has. */
void zr_model_check_reader(struct zr_engine *e);
void zr_model_check_reader_done(struct zr_model_check *w);

/* The first fault found so far: 0, or its code with the message set, and told to the log. */
int zr_model_check_look(struct zr_engine *e);

#endif
