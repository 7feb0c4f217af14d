/* SPDX-License-Identifier: Apache-2.0 */
/* guard_report.h: a thread that tells of a guard's first touch at once, while the thread that touched waits.
 *
 * What a touch found may end the program a moment later: an index made of NaN bytes, a division by them. So
 * the report is out before the program goes on, and as a handler of a signal may neither format nor write
 * through a program's own function, another thread does. The wait is bounded: that function may want a lock
 * that the waiting thread holds. */
#ifndef ZR_KERNELS_GUARD_REPORT_H
#define ZR_KERNELS_GUARD_REPORT_H

struct zr_reporter;

/* report(arg) runs on the thread when it was asked for, once at most. ZR_ERR_NOMEM, ZR_ERR_SYSTEM. */
int zr_reporter_open(void (*report)(void *arg), void *arg, struct zr_reporter **out);
/* Waits for a call of report that is under way. NULL is allowed. */
void zr_reporter_close(struct zr_reporter *r);

/* Both from any thread, and from a handler of a signal. */
void zr_report_ask(struct zr_reporter *r);
/* Waits until it is reported, 2 s at most; not on the reporter's thread, nor in a forked child, which does
 * not have it, nor again after a wait that was in vain. */
void zr_report_wait(struct zr_reporter *r);

#endif
