/* SPDX-License-Identifier: Apache-2.0 */
/* cmocka.h: cmocka, behind the headers that it needs first. */
#ifndef ZR_TEST_CMOCKA_H
#define ZR_TEST_CMOCKA_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#endif
