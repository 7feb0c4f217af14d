/* SPDX-License-Identifier: Apache-2.0 */
/* log.h: log lines: information about what the library does, and warnings.
 *
 * A line goes to the program's callback if there is one, and to stderr or the file that ZERO_LOG names. With
 * neither, information is dropped, and warnings go to stderr so that somebody sees them. ZERO_LOG=off drops
 * those, too. */
#ifndef ZR_KERNELS_LOG_H
#define ZR_KERNELS_LOG_H

#define ZR_LOG_BYTES 2304 /* bytes of a line with its zero byte: an error message and some words */

struct zr_log;

/* Opens a log, which zr_log_close closes. fn is the program's callback, or NULL. where is the value of
 * ZERO_LOG: "off", "stderr" or a file, to which lines are appended. NULL or "" means that it is not set.
 * Returns ZERO_ERR_ARG if the file cannot be opened, ZERO_ERR_NOMEM or ZERO_ERR_SYSTEM. */
int zr_log_open(void (*fn)(void *arg, const char *line), void *fn_arg, const char *where,
                struct zr_log **out);
/* log may be NULL. */
void zr_log_close(struct zr_log *log);

/* Sets the rank and the context's name that precede lines on stderr and in files. name has up to 63
 * characters, or is "". Call it before other threads write. */
void zr_log_set_rank(struct zr_log *log, int rank, const char *name);

/* Stops calling the program's callback. A call that has begun may still run. Any thread. */
void zr_log_let_go(struct zr_log *log);

/* Writes one line of information, without newline. log may be NULL. Any thread. */
void zr_info(struct zr_log *log, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Writes a warning: a likely mistake, or a cost that the user may not know of. "warning: " precedes the text.
 * A text that was written recently is not repeated. log may be NULL. Any thread. */
void zr_warn(struct zr_log *log, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
