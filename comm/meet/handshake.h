/* SPDX-License-Identifier: Apache-2.0 */
/* handshake.h: how a rank and rank 0 prove to each other that they have the job's key, without sending it.
 *
 * Rank 0 begins with a nonce. The rank answers with another nonce and a proof, and rank 0 with its own proof.
 * A proof is an HMAC-SHA256 under the job's key. It covers the protocol's version, the direction, both
 * nonces, rank, world, attempt, the names of job and context, and how the rank was started. Fresh nonces on
 * both sides make recorded messages useless afterwards. The direction is part of the proof, so a proof that
 * is sent back proves nothing.
 *
 * Traffic after the meeting is neither encrypted nor signed. An attacker who can change packets between two
 * hosts can change what ranks send. Without a key the name of the job takes its place. That keeps two jobs
 * apart but no attacker out, so ranks then meet on loopback only. */
#ifndef ZR_COMM_HANDSHAKE_H
#define ZR_COMM_HANDSHAKE_H

#include "comm/meet/frame.h"
#include "comm/meet/rendezvous.h"

enum { ZR_NONCE_BYTES = 32, ZR_PROOF_BYTES = 32 };

/* The contents of a handshake, which both sides know before either proves anything. */
struct zr_shake {
    /* Nonces of rank 0 and of the rank. */
    uint8_t nonce_0[ZR_NONCE_BYTES], nonce[ZR_NONCE_BYTES];
    /* The numbers that the rank claims. */
    int32_t rank, world, attempt;
    char name[ZR_NAME_CHARS + 1];
    struct zr_start start;
};

/* The payload of a HELLO. */
struct zr_hello {
    uint8_t nonce[ZR_NONCE_BYTES], proof[ZR_PROOF_BYTES];
    /* The context's name, terminated. */
    char name[ZR_NAME_CHARS + 1];
    struct zr_start start;
};

/* Fills bytes with n random bytes, or fails. */
int zr_shake_random(uint8_t *bytes, size_t n);

/* Makes the proof of a HELLO or an ACCEPT (code 0, no text), a REFUSE (its code and message) or an AGAIN (its
 * message). */
void zr_shake_prove(const struct zr_world *w, const struct zr_shake *s, enum zr_frame_type type, int32_t code,
                    const char *text, uint8_t proof[ZR_PROOF_BYTES]);

/* Writes 32 hex digits that follow from the job's name and key. The ranks of a job recognize their files by
 * them. They prove nothing, and do not reveal the key. */
void zr_shake_mark(const struct zr_world *w, char mark[33]);

/* Both take a whole frame from any sender, and return whether it proves what it claims. */

/* Rank 0: reads a HELLO. s has rank 0's nonce, and gets the rest from the frame. */
bool zr_shake_hello(const struct zr_world *w, struct zr_shake *s, const struct zr_frame *f,
                    const char *payload);
/* A rank: reads an ACCEPT, or a REFUSE or AGAIN. Their message is then *text, inside payload and
 * terminated. */
bool zr_shake_answer(const struct zr_world *w, const struct zr_shake *s, const struct zr_frame *f,
                     const char *payload, const char **text);

#endif
