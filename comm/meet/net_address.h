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

/* An address of AF_INET or AF_INET6, with a port. */
union zr_address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

/* "[fe80::1%eth0]:29500" */
enum { ZR_ADDRESS_CHARS = 96, ZR_INTERFACE_CHARS = 48 };

/* Reads a numeric address of either family; an IPv6 one without brackets, possibly with a zone. Makes no
 * look-up. Returns false if it is not numeric. */
bool zr_address_parse(const char *number, int port, union zr_address *out);
/* Writes "10.77.0.1:29500" or "[fd77::1]:29500"; without the port "10.77.0.1" or "fd77::1". */
void zr_address_print(const union zr_address *a, char text[ZR_ADDRESS_CHARS]);
void zr_address_print_host(const union zr_address *a, char text[ZR_ADDRESS_CHARS]);
/* Whether it is in 127/8, also in its IPv6 form, or ::1. */
bool zr_address_is_loopback(const union zr_address *a);
/* Whether it stands for all addresses of this host: 0.0.0.0 or ::. */
bool zr_address_is_any(const union zr_address *a);
/* Whether it is neither loopback nor link-local (fe80::/10, 169.254/16). */
bool zr_address_reaches_far(const union zr_address *a);
/* Compares host and port. An IPv4 address is the same in its IPv6 form. */
bool zr_address_same(const union zr_address *a, const union zr_address *b);
int zr_address_port(const union zr_address *a);
void zr_address_set_port(union zr_address *a, int port);

/* Makes a TCP socket that is bound to the address. Other sockets with SO_REUSEADDR may listen there until it
 * does. :: includes the IPv4 addresses of this host. Returns a descriptor, or a negative errno. */
int zr_address_bind(const union zr_address *at);
/* The same for all addresses of this host, or all IPv4 addresses on a host without IPv6. Sets *at to :: or
 * 0.0.0.0. */
int zr_address_bind_all(int port, union zr_address *at);

/* Finds the local address of a connection to `to`; its port is 0. Sends nothing. Returns 0, or an errno:
 * ENETUNREACH if there is no route. */
int zr_address_source(const union zr_address *to, union zr_address *from);

/* ---- network interfaces ---- */

/* An address of this host, and the network interface that has it. */
struct zr_interface {
    char name[ZR_INTERFACE_CHARS];
    union zr_address address;
};
struct zr_interfaces {
    int n;
    struct zr_interface of[32];
};
/* Lists all addresses: IPv4 first, loopback last, and link-local ones only if their interface has no
 * others. */
int zr_interfaces_all(struct zr_interfaces *out);
/* Lists in the same order the addresses of the interface that want names ("eth0"), or that has the address
 * want ("10.77.0.2", "fd77::2"). name is the name of want in messages.
 * Errors: ARG  there are none; the message says what there is: "interface is "eth9": this host has eth0
 *              (10.77.0.2, fd77::2), lo (127.0.0.1, ::1)" */
int zr_interfaces_find(const char *name, const char *want, struct zr_interfaces *out);
/* Whether some of them are of the family, and reach beyond loopback and a single link. */
bool zr_interfaces_reach_far(const struct zr_interfaces *c, int family);
/* Writes "eth0 (10.77.0.2, fd77::2), lo (127.0.0.1, ::1)", cut to n_text bytes. */
void zr_interfaces_list(const struct zr_interfaces *c, char *text, size_t n_text);
/* Finds the interface that has the address, whatever its port. "": none. */
void zr_interface_of(const union zr_address *a, char name[ZR_INTERFACE_CHARS]);

/* ---- the addresses of a name ----
 *
 * The system's resolver may take half a minute and more, and cannot be stopped. So it runs on another thread,
 * which is left behind if the caller stops waiting. */

enum { ZR_LOOKUP_MAX = 8 };

struct zr_looked_up {
    /* Addresses of both families, in the resolver's order. */
    int n;
    union zr_address at[ZR_LOOKUP_MAX];
    /* Why there are none. "": there are some. */
    char why[160];
};

struct zr_lookup;

/* Starts a look-up. done is called once, on the loop's thread, when nothing of it is left on the loop; *out
 * is invalid then. If this returns ZERO_ERR_NOMEM or ZERO_ERR_SYSTEM, done is not called. */
int zr_lookup_start(uv_loop_t *loop, const char *host, int port,
                    void (*done)(void *arg, const struct zr_looked_up *found), void *arg,
                    struct zr_lookup **out);

/* Stops waiting for the resolver. done is called in the next round of the loop. On the loop's thread. */
void zr_lookup_leave(struct zr_lookup *l);

/* ---- text with ports: one rank sends it to another, so the input may be anything ---- */

enum { ZR_ADDRESS_LIST_CHARS = ZR_LOOKUP_MAX * ZR_ADDRESS_CHARS };

/* Reads n characters, "10.77.0.1:4000" or "[fd77::1]:4000". Returns false if they are neither. An address
 * with a zone is refused, because zones differ between hosts. */
bool zr_address_read(const char *text, size_t n, union zr_address *out);

/* Writes "10.77.0.1:4000 [fd77::1]:4000". n is at most ZR_LOOKUP_MAX. */
void zr_address_list_print(const union zr_address *at, int n, char text[ZR_ADDRESS_LIST_CHARS]);
/* Reads such a list of n characters; "" is empty. Returns how many there are, or -1 if it is no list. */
int zr_address_list_read(const char *text, size_t n, union zr_address at[ZR_LOOKUP_MAX]);

/* Lists the addresses by which other hosts reach a socket that is bound to all addresses of its family, with
 * its port. Loopback and link-local addresses are left out. Returns how many, up to most. */
int zr_address_list_reaching(const struct zr_interfaces *mine, const union zr_address *bound, int most,
                             union zr_address *at);

#endif
