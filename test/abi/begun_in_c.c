/* SPDX-License-Identifier: Apache-2.0 */
/* begun_in_c.c: the configuration that ZERO_CONFIG_INIT makes in C, for a program in C++ to compare with. */
#include <zero/zero.h>

extern const struct zero_config begun_in_c;
const struct zero_config begun_in_c = ZERO_CONFIG_INIT;
