/* SPDX-License-Identifier: Apache-2.0 */
/* model_check.h: checks what a model does with its memory (cfg.debug.check).
 *
 * The recorder (kernels/check/check_device.h) gets what the model may read and write, as operations of the
 * model. At stages 2 and 3 on the host, the model gets copies of its parameters and gradients in guarded
 * memory (kernels/check/guard.h), in each bracket at another address. That memory is closed outside brackets.
 * So a touch outside, a write to a parameter and a pointer kept from an earlier bracket are found. On a GPU,
 * whose memory cannot be closed, the copies are filled with NaN instead (places.h). At stages 0 and 1 the
 * model has its memory without brackets too, so nothing is guarded there.
 *
 * A fault ends the context with ZERO_ERR_ORDER and a message that names unit and tensor. The next call of the
 * program finds it. Each function does nothing if w, or the engine's, is NULL. */
#ifndef ZR_SHARD_CHECK_MODEL_CHECK_H
#define ZR_SHARD_CHECK_MODEL_CHECK_H

#include "kernels/check/check_device.h"
#include "shard/layout.h"

struct zr_engine;
struct zr_model_check;

/* For messages: the call that the model's thread makes, and the job that the loop's thread carries out. name
 * must be a literal. */
void zr_model_check_call(struct zr_model_check *w, const char *name, int32_t unit, const char *phase,
                         uint32_t step);
void zr_model_check_job(struct zr_model_check *w, const char *name, int32_t unit, uint32_t step);
/* Pass what the model's thread knows to the loop's thread, with a job. hand: when the job is given to the
 * loop. take: when it is carried out. */
struct zr_vclock *zr_model_check_hand(struct zr_model_check *w);
void zr_model_check_take(struct zr_model_check *w, struct zr_vclock *known);

/* Return where the model's pointer to a piece points while its unit is open, and where a tensor's pointer
 * points otherwise. NULL if nothing is guarded. */
char *zr_model_check_param(const struct zr_model_check *w, const struct zr_piece *p);
char *zr_model_check_grad(const struct zr_model_check *w, const struct zr_piece *p);
char *zr_model_check_closed(const struct zr_model_check *w, int32_t tensor, bool grad);

/* Open all closed parameters for writing (open), close them again (not open), or open them for reading. */
int zr_model_check_all(struct zr_engine *e, bool open);
int zr_model_check_all_read(struct zr_engine *e);

/* Report that a snapshot is on the reduce stream, so that a thread of the program will read it, and that the
 * thread has read it. */
void zr_model_check_reader(struct zr_engine *e);
void zr_model_check_reader_done(struct zr_model_check *w);

/* Returns 0, or the code of the first fault so far, with its message set and logged. */
int zr_model_check_look(struct zr_engine *e);

#endif
