/* SPDX-License-Identifier: Apache-2.0 */
/* net_address.h: addresses of either family, alone and in lists; the network interfaces of this host that
 * have them; and the addresses of a name. */
#ifndef ZR_COMM_NET_ADDRESS_H
#define ZR_COMM_NET_ADDRESS_H

#include "kernels/error.h"

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>
#include <uv.h>

/* Of AF_INET or AF_INET6, with a port. */
union zr_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

/* "[fe80::1%eth0]:29500" */
enum { ZR_ADDRESS_CHARS = 96, ZR_INTERFACE_CHARS = 48 };

/* A number of either family, an IPv6 one without brackets and maybe with a zone; false: it is none.
 * Nothing is looked up. */
bool zr_address_parse(const char *number, int port, union zr_address *out);
/* "10.77.0.1:29500", "[fd77::1]:29500"; without its port "10.77.0.1", "fd77::1". */
void zr_address_print(const union zr_address *a, char text[ZR_ADDRESS_CHARS]);
void zr_address_print_host(const union zr_address *a, char text[ZR_ADDRESS_CHARS]);
/* 127/8, ::1, and the first as an IPv6 address. */
bool zr_address_is_loopback(const union zr_address *a);
/* All addresses of this host: 0.0.0.0 and ::. */
bool zr_address_is_any(const union zr_address *a);
/* Neither that of loopback nor of a single link, as fe80::/10 and 169.254/16 are. */
bool zr_address_reaches_far(const union zr_address *a);
/* Host and port; an IPv4 address and the same as an IPv6 one are one. */
bool zr_address_same(const union zr_address *a, const union zr_address *b);
int zr_address_port(const union zr_address *a);
void zr_address_set_port(union zr_address *a, int port);

/* An address of this host, and the network interface that has it. */
struct zr_interface {
    char name[ZR_INTERFACE_CHARS];
    union zr_address address;
};
struct zr_interfaces {
    int n;
    struct zr_interface of[32];
};
/* Of all interfaces: IPv4 first, loopback last, link-local ones only where an interface has no others. */
int zr_interfaces_all(struct zr_interfaces *out);
/* Of the interface, or with the address, that want names ("eth0", "10.77.0.2", "fd77::2"), in that order.
 * ZR_ERR_ARG where there is no such, with what there is: "interface is "eth9": this host has eth0 (10.77.0.2,
 * fd77::2), lo (127.0.0.1, ::1)"; name: what the text is called in messages. */
int zr_interfaces_find(const char *name, const char *want, struct zr_interfaces *out);
/* Some of them are of the family, and of more than loopback and a single link. */
bool zr_interfaces_reach_far(const struct zr_interfaces *c, int family);
/* "eth0 (10.77.0.2, fd77::2), lo (127.0.0.1, ::1)", cut where there is no more room. */
void zr_interfaces_list(const struct zr_interfaces *c, char *text, size_t n_text);
/* The interface that has the address, whatever its port; "": none. */
void zr_interface_of(const union zr_address *a, char name[ZR_INTERFACE_CHARS]);

/* A TCP socket that is bound to it; others with SO_REUSEADDR may listen there while it does not. ::, all
 * addresses of this host, has the IPv4 ones with it. A descriptor, or a negative errno. */
int zr_address_bind(const union zr_address *at);
/* The same on all addresses of this host; without IPv6 on all of IPv4. *at: which of the two. */
int zr_address_bind_all(int port, union zr_address *at);

/* From which address of this host a connection to it would leave; nothing is sent. 0, or an errno:
 * ENETUNREACH, there is no route. The port is 0. */
int zr_address_source(const union zr_address *to, union zr_address *from);

/* ---- the addresses of a name ---- */

enum { ZR_LOOKUP_MOST = 8 };

/* What became of it. */
struct zr_looked_up {
    /* addresses of both families, in the resolver's order */
    int n;
    union zr_address at[ZR_LOOKUP_MOST];
    /* "": there are some; else why there are none */
    char why[160];
};

struct zr_lookup;

/* done is called once, on the loop's thread, when nothing of it is left on the loop; *out is gone then.
 * Returns ZR_ERR_NOMEM or ZR_ERR_SYSTEM where it could not begin: then done is not called. */
int zr_lookup_start(uv_loop_t *loop, const char *host, int port,
                    void (*done)(void *arg, const struct zr_looked_up *found), void *arg,
                    struct zr_lookup **out);

/* On the loop's thread: nobody waits for the resolver any more; done comes in the next round of the loop. */
void zr_lookup_leave(struct zr_lookup *l);

/* ---- as text, with ports ---- */

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
