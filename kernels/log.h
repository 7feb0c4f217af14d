/* SPDX-License-Identifier: Apache-2.0 */
/* log.h: lines that tell what is going on, and warnings, which somebody has to see.
 *
 * A line goes to the program's own function where there is one, and to the standard error or the file that
 * ZERO_LOG names. With neither, information is dropped, and a warning goes to the standard error: a line that
 * nobody receives is silence. */
#ifndef ZR_KERNELS_LOG_H
#define ZR_KERNELS_LOG_H

#define ZR_LOG_BYTES 2304 /* of a line, its terminating zero included: an error's text and some words */

struct zr_log;

/* fn: the program's, or NULL. where: the value of ZERO_LOG: "off", "stderr" or a file, to which lines are
 * added; NULL or "": not set. ZR_ERR_ARG when the file cannot be opened, ZR_ERR_NOMEM. Closed by
 * zr_log_close. */
int zr_log_open(void (*fn)(void *arg, const char *line), void *fn_arg, const char *where,
                struct zr_log **out);
/* NULL is allowed. */
void zr_log_close(struct zr_log *log);

/* Says whose lines these are, in the standard error and files. name is that of the context, up to 63
 * characters, or "". Before other threads write. */
void zr_log_set_rank(struct zr_log *log, int rank, const char *name);

/* The program's function is called no more, but for a call that is under way. Any thread. */
void zr_log_let_go(struct zr_log *log);

/* One line, without newline. NULL is allowed: nobody listens. Any thread. */
void zr_info(struct zr_log *log, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* What is likely a mistake, or costs the user something that he may not know of; "warning: " is put before
 * it. The same text is given out once. Any thread. */
void zr_warn(struct zr_log *log, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
