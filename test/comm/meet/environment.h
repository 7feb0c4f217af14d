/* SPDX-License-Identifier: Apache-2.0 */
/* environment.h: the environment that a launcher would have made. */
#ifndef ZR_TEST_COMM_ENVIRONMENT_H
#define ZR_TEST_COMM_ENVIRONMENT_H

/* Makes it hold these and no other variable that ranks are found by: name, value, ..., NULL. */
void environment(const char *name, ...);

#endif
