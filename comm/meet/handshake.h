/* SPDX-License-Identifier: Apache-2.0 */
/* handshake.h: how a rank and rank 0 show each other that they have the job's key, without sending it.
 *
 * Rank 0 begins with a nonce of its own. The rank answers with another and a proof: HMAC-SHA256 under the
 * job's key over the protocol's version, who speaks to whom, both nonces, rank, world, attempt, the job's
 * name and the context's, and how the rank was started. Rank 0 answers with its own. Fresh nonces on both
 * sides make what was heard once useless afterwards; the side that speaks is part of the proof, so that one's
 * own proof sent back is none.
 *
 * What travels after the meeting is neither encrypted nor signed: whoever can change the packets between two
 * hosts can change what ranks say. Where there is no key the name of the job takes its place, which keeps two
 * jobs apart but no attacker out; ranks then meet on loopback only. */
#ifndef ZR_COMM_HANDSHAKE_H
#define ZR_COMM_HANDSHAKE_H

#include "comm/meet/frame.h"
#include "comm/meet/rendezvous.h"

enum { ZR_NONCE_BYTES = 32, ZR_PROOF_BYTES = 32 };

/* What both sides know before either proves anything. */
struct zr_shake {
    /* of rank 0 and of the rank */
    uint8_t nonce_0[ZR_NONCE_BYTES], nonce[ZR_NONCE_BYTES];
    /* of the rank, as it claims them */
    int32_t rank, world, attempt;
    char name[ZR_NAME_CHARS + 1];
    struct zr_start start;
};

/* Payload of a HELLO. */
struct zr_hello {
    uint8_t nonce[ZR_NONCE_BYTES], proof[ZR_PROOF_BYTES];
    /* of the context, terminated */
    char name[ZR_NAME_CHARS + 1];
    struct zr_start start;
};

/* Fills n random bytes, or fails. */
int zr_shake_random(uint8_t *bytes, size_t n);

/* The proof of a HELLO (code 0, no text), an ACCEPT (likewise), a REFUSE (its code and message) or an
 * AGAIN (its message). */
void zr_shake_prove(const struct zr_world *w, const struct zr_shake *s, enum zr_frame_type type, int32_t code,
                    const char *text, uint8_t proof[ZR_PROOF_BYTES]);

/* 32 hex digits that follow from the job's name and key, by which its ranks know what is theirs where others
 * leave things too. They prove nothing, and do not say the key. */
void zr_shake_mark(const struct zr_world *w, char mark[33]);

/* Each takes a whole frame, from anybody, and returns whether what it claims is proved. */

/* Rank 0: s has rank 0's nonce; the rest is taken from the frame, which is a HELLO. */
bool zr_shake_hello(const struct zr_world *w, struct zr_shake *s, const struct zr_frame *f,
                    const char *payload);
/* A rank: an ACCEPT, or a REFUSE or AGAIN, whose message is then *text (inside payload, terminated). */
bool zr_shake_answer(const struct zr_world *w, const struct zr_shake *s, const struct zr_frame *f,
                     const char *payload, const char **text);

#endif
