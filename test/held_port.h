/* SPDX-License-Identifier: Apache-2.0 */
/* held_port.h: reserves a TCP port for the ranks of a test, so that tests can run at the same time. */
#ifndef ZR_TEST_HELD_PORT_H
#define ZR_TEST_HELD_PORT_H

/* Returns a port that this process holds on all addresses until the second call after this one. The port
 * is bound, so that the system gives it to no other process, but nobody listens on it, so that a rank may.
 * For one thread at a time. Ends the program if there is no free port. */
int held_port(void);

#endif
