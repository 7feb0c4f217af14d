/* held_port.c: see held_port.h. */
#include "test/held_port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

int held_port(void)
{
    static int held[2] = {-1, -1}, n_given;
    int *s = &held[n_given++ % 2];
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    int on = 1;
    if (*s >= 0)
        close(*s);
    *s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    /* So that others with the same option, as libuv's are, may listen here. With port 0 nobody shares it. */
    if (*s < 0 || setsockopt(*s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) ||
        bind(*s, (struct sockaddr *)&a, n) || getsockname(*s, (struct sockaddr *)&a, &n)) {
        perror("no port of loopback can be had");
        abort();
    }
    return ntohs(a.sin_port);
}
