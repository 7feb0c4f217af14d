/* SPDX-License-Identifier: Apache-2.0 */
/* address_list.h: addresses with ports as text, as one rank tells them another. What is read may come from
 * anywhere. */
#ifndef ZR_COMM_ADDRESS_LIST_H
#define ZR_COMM_ADDRESS_LIST_H

#include "comm/meet/net_lookup.h"

enum { ZR_ADDRESS_LIST_CHARS = ZR_LOOKUP_MOST * ZR_ADDRESS_CHARS };

/* "10.77.0.1:4000" or "[fd77::1]:4000", n characters of it; false: it is neither. One with a zone is of one
 * host only, and none. */
bool zr_address_read(const char *text, size_t n, union zr_address *out);

/* "10.77.0.1:4000 [fd77::1]:4000"; n up to ZR_LOOKUP_MOST. */
void zr_address_list_print(const union zr_address *at, int n, char text[ZR_ADDRESS_LIST_CHARS]);
/* n characters; "" is a list of none. Their number, or -1: it is no such list. */
int zr_address_list_read(const char *text, size_t n, union zr_address at[ZR_LOOKUP_MOST]);

/* By which addresses of mine other hosts reach a socket that is bound on all addresses of its family, with
 * its port, most at most: loopback's and those of one link alone are left out. Returns their number. */
int zr_address_list_reaching(const struct zr_interfaces *mine, const union zr_address *bound, int most,
                             union zr_address *at);

#endif
