/* SPDX-License-Identifier: Apache-2.0 */
/* held_port.h: a TCP port for the ranks of a test that nobody else is given, however many tests run side by
 * side. */
#ifndef ZR_TEST_HELD_PORT_H
#define ZR_TEST_HELD_PORT_H

/* A port that this process holds on all addresses until the second call after this one: bound, so that the
 * system gives it to no other, but not listened on, so that a rank may. One thread at a time. Ends the
 * program where there is none. */
int held_port(void);

#endif
