/* SPDX-License-Identifier: Apache-2.0 */
/* guard_report.h: a thread that reports a guard's first touch at once, while the thread that touched waits.
 *
 * The program may end a moment after the touch, for example by an index made of NaN bytes. So the report must
 * be out before the program goes on. A signal handler may neither format text nor call a program's function,
 * so another thread does. The wait is bounded, because that function may need a lock that the waiting thread
 * holds. */
#ifndef ZR_KERNELS_GUARD_REPORT_H
#define ZR_KERNELS_GUARD_REPORT_H

struct zr_reporter;

/* Starts the thread. report(arg) runs on it at most once, when it is asked for. Errors: ZERO_ERR_NOMEM,
 * ZERO_ERR_SYSTEM. */
int zr_reporter_open(void (*report)(void *arg), void *arg, struct zr_reporter **out);
/* Waits for a call of report that is under way. r may be NULL. */
void zr_reporter_close(struct zr_reporter *r);

/* These two may be called from any thread, and from a signal handler. */
void zr_report_ask(struct zr_reporter *r);
/* Waits for the end of the report, 2 s at most. It does not wait on the reporter's thread, in a forked child
 * (which does not have that thread), or after a wait that timed out. */
void zr_report_wait(struct zr_reporter *r);

#endif
