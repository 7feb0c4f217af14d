/* SPDX-License-Identifier: Apache-2.0 */
/* environment.h: sets the environment that a launcher would make. */
#ifndef ZR_TEST_COMM_ENVIRONMENT_H
#define ZR_TEST_COMM_ENVIRONMENT_H

/* Sets these variables (name, value, ..., NULL) and removes every other one by which libzero finds its
 * rank. */
void environment(const char *name, ...);

#endif
