/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz_frames.c: parses arbitrary bytes as what another process sends to a rendezvous. The first byte decides
 * in which pieces they arrive; the frames must not depend on this. Handshakes are tried again with the right
 * proof, to get past its check. Without it they must be refused. */
#include "comm/meet/handshake.h"
#include "comm/meet/net_address.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void demand(int ok)
{
    if (!ok)
        abort();
}

static const struct zr_world world = {
    .rank = 1, .world = 3, .job = "fuzz", .key = {.n_bytes = 16, .bytes = "a key of 16 byte"}};

static void try_hello(const struct zr_frame *f, char *payload)
{
    struct zr_shake s = {.nonce_0 = "rank 0's"};
    demand(!zr_shake_hello(&world, &s, f, payload));
    if (f->type != ZR_FRAME_HELLO || f->version != ZR_FRAME_VERSION || f->n_bytes != sizeof(struct zr_hello))
        return;
    demand(s.rank == f->rank && s.world == f->world && s.attempt == f->about);
    zr_shake_prove(&world, &s, ZR_FRAME_HELLO, 0, "", (uint8_t *)payload + ZR_NONCE_BYTES);
    demand(zr_shake_hello(&world, &s, f, payload));
}

static void try_answer(const struct zr_frame *f, char *payload)
{
    struct zr_shake s = {.nonce_0 = "rank 0's", .nonce = "mine", .rank = 1, .world = 3};
    const char *text;
    demand(!zr_shake_answer(&world, &s, f, payload, &text));
    bool refuses = (f->type == ZR_FRAME_REFUSE || f->type == ZR_FRAME_AGAIN) && f->n_bytes >= ZR_PROOF_BYTES;
    bool accepts = f->type == ZR_FRAME_ACCEPT && f->n_bytes == ZR_PROOF_BYTES;
    if (f->version != ZR_FRAME_VERSION || !(refuses || accepts))
        return;
    demand(strlen(text) <= f->n_bytes - ZR_PROOF_BYTES);
    zr_shake_prove(&world, &s, (enum zr_frame_type)f->type, refuses ? f->about : 0, text, (uint8_t *)payload);
    demand(zr_shake_answer(&world, &s, f, payload, &text));
}

/* A list of addresses, as rank 0 sends it over a communicator. Printing and reading it again must give the
 * same addresses. */
static void try_list(const struct zr_frame *f, const char *payload)
{
    union zr_address at[ZR_LOOKUP_MAX], again[ZR_LOOKUP_MAX];
    char text[ZR_ADDRESS_LIST_CHARS];
    int n = zr_address_list_read(payload ? payload : "", f->n_bytes, at);
    demand(n >= -1 && n <= ZR_LOOKUP_MAX && (n == 0) == (f->n_bytes == 0));
    if (n < 1)
        return;
    zr_address_list_print(at, n, text);
    demand(zr_address_list_read(text, strlen(text), again) == n);
    for (int i = 0; i < n; i++)
        demand(zr_address_same(&at[i], &again[i]));
}

/* Reads all bytes in pieces of at most `piece` bytes. Returns a hash of the frames and of the final state. */
static uint64_t read_all(const uint8_t *data, size_t n, size_t piece, bool try)
{
    struct zr_frame_reader r = {.most_bytes = ZR_FRAME_SHAKE_BYTES};
    enum zr_frame_state state = ZR_FRAME_UNFINISHED;
    uint64_t sum = 14695981039346656037u;
    while (n && state == ZR_FRAME_UNFINISHED) {
        size_t room;
        char *at = zr_frame_room(&r, &room);
        size_t take = room < piece ? room : piece;
        take = take < n ? take : n;
        demand(room > 0);
        memcpy(at, data, take);
        data += take;
        n -= take;
        state = zr_frame_took(&r, take);
        if (state != ZR_FRAME_WHOLE)
            continue;
        demand(r.head.n_bytes <= ZR_FRAME_SHAKE_BYTES && (!r.payload || !r.payload[r.head.n_bytes]));
        sum = (sum ^ r.head.type ^ (uint64_t)r.head.n_bytes << 16) * 1099511628211u;
        for (uint32_t i = 0; i < r.head.n_bytes; i++)
            sum = (sum ^ (uint8_t)r.payload[i]) * 1099511628211u;
        if (try) {
            try_hello(&r.head, r.payload);
            try_answer(&r.head, r.payload);
            try_list(&r.head, r.payload);
        }
        zr_frame_next(&r);
        state = ZR_FRAME_UNFINISHED;
    }
    if (state == ZR_FRAME_LARGE) { /* now allow the large frame */
        r.most_bytes = r.head.n_bytes < 1 << 16 ? r.head.n_bytes : r.most_bytes;
        demand(zr_frame_took(&r, 0) ==
               (r.most_bytes == r.head.n_bytes ? ZR_FRAME_UNFINISHED : ZR_FRAME_LARGE));
    }
    zr_frame_next(&r);
    return sum * 31 + (uint64_t)state;
}

static void try_input(const uint8_t *data, size_t n)
{
    if (n < 1)
        return;
    uint64_t whole = read_all(data + 1, n - 1, SIZE_MAX, true);
    demand(read_all(data + 1, n - 1, 1 + data[0], false) == whole);
}

/* Seeds may be text: a # followed by hex digits. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char digits[] = "0123456789abcdef";
    try_input(data, n);
    if (n < 1 || data[0] != '#')
        return 0;
    uint8_t *bytes = calloc(n, 1);
    size_t n_digits = 0;
    for (size_t i = 1; bytes && i < n; i++) {
        const char *d = data[i] ? strchr(digits, data[i]) : NULL;
        if (!d)
            continue;
        bytes[n_digits / 2] |= (uint8_t)((d - digits) << (n_digits % 2 ? 0 : 4));
        n_digits++;
    }
    if (bytes)
        try_input(bytes, n_digits / 2);
    free(bytes);
    return 0;
}
