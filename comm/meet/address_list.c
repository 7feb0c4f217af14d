/* SPDX-License-Identifier: Apache-2.0 */
/* address_list.c: see address_list.h. */
#include "comm/meet/address_list.h"

#include <stdio.h>
#include <string.h>

/* A decimal number without zeros before it, from 1 to 65535. */
static int read_port(const char *text)
{
    int port = 0;
    size_t n = strlen(text);
    if (n < 1 || n > 5 || strspn(text, "0123456789") != n || text[0] == '0')
        return 0;
    for (size_t i = 0; i < n; i++)
        port = port * 10 + (text[i] - '0');
    return port <= 65535 ? port : 0;
}

bool zr_address_read(const char *text, size_t n, union zr_address *out)
{
    char copy[ZR_ADDRESS_CHARS], *host = copy;
    if (n >= sizeof copy || memchr(text, 0, n))
        return false;
    memcpy(copy, text, n);
    copy[n] = 0;
    char *colon = strrchr(copy, ':');
    int port = colon ? read_port(colon + 1) : 0;
    if (!port || colon == copy || strchr(copy, '%'))
        return false;
    bool in_brackets = *copy == '[' && colon[-1] == ']';
    *colon = 0;
    if (in_brackets) {
        host++;
        colon[-1] = 0;
    }
    return zr_address_parse(host, port, out) && (out->any.sa_family == AF_INET6) == in_brackets;
}

void zr_address_list_print(const union zr_address *at, int n, char text[ZR_ADDRESS_LIST_CHARS])
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < n; i++) {
        char one[ZR_ADDRESS_CHARS];
        zr_address_print(&at[i], one);
        used += (size_t)snprintf(text + used, ZR_ADDRESS_LIST_CHARS - used, "%s%s", i ? " " : "", one);
    }
}

int zr_address_list_read(const char *text, size_t n, union zr_address at[ZR_LOOKUP_MOST])
{
    int found = 0;
    for (size_t from = 0; from < n || (n && from == n);) {
        const char *space = memchr(text + from, ' ', n - from);
        size_t length = space ? (size_t)(space - text) - from : n - from;
        if (found == ZR_LOOKUP_MOST || !zr_address_read(text + from, length, &at[found++]))
            return -1;
        from += length + 1;
    }
    return found;
}

int zr_address_list_reaching(const struct zr_interfaces *mine, const union zr_address *bound, int most,
                             union zr_address *at)
{
    const bool is_v6 = bound->any.sa_family == AF_INET6; /* which has the others with it */
    int n = 0;
    for (int i = 0; i < mine->n && n < most; i++) {
        const union zr_address *one = &mine->of[i].address;
        if (!zr_address_reaches_far(one) || (!is_v6 && one->any.sa_family != AF_INET))
            continue;
        at[n] = *one;
        zr_address_set_port(&at[n++], zr_address_port(bound));
    }
    return n;
}
