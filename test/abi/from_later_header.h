/* SPDX-License-Identifier: Apache-2.0 */
/* from_later_header.h: what only code that was compiled with the later zero.h can see. No type of zero.h is
 * named here: the two sides have different ones of the same name. */
#ifndef ZR_TEST_ABI_FROM_LATER_HEADER_H
#define ZR_TEST_ABI_FROM_LATER_HEADER_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of the later structs, by the name after zero_; 0 of an unknown one. */
size_t later_size_of(const char *name);

/* The field that the later zero.h added, of a configuration of today's as the library takes it over; -1 with
 * a message where it refuses it. */
int64_t later_field_of_config(const void *todays_config);

#endif
