/* SPDX-License-Identifier: Apache-2.0 */
/* held_port.c: reserves ports for held_port.h. */
#include "test/held_port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static int hold(int *s, int family)
{
    struct sockaddr_in6 a = {.sin6_family = (sa_family_t)family}; /* any address and port of the family */
    socklen_t n = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof a;
    const int on = 1, off = 0;
    *s = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* The option lets sockets with the same option, as the rendezvous has, listen here. With port 0 no
     * other socket shares it. */
    if (*s >= 0 && setsockopt(*s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        (family == AF_INET || setsockopt(*s, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off) == 0) &&
        bind(*s, (struct sockaddr *)&a, n) == 0 && getsockname(*s, (struct sockaddr *)&a, &n) == 0)
        return ntohs(a.sin6_port); /* at the same offset as in an IPv4 address */
    if (*s >= 0)
        close(*s);
    *s = -1;
    return -1;
}

int held_port(void)
{
    static int held[2] = {-1, -1}, n_given;
    int *s = &held[n_given++ % 2];
    if (*s >= 0)
        close(*s);
    int port = hold(s, AF_INET6); /* also holds it for IPv4 */
    if (port < 0)
        port = hold(s, AF_INET);
    if (port < 0) {
        perror("no port can be had");
        abort();
    }
    return port;
}
