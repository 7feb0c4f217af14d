/* SPDX-License-Identifier: Apache-2.0 */
/* generate.c: generates text by forward passes between brackets, as an evaluation makes them. For each token
 * the model sees the whole row again. All ranks compute the same row. */
#include "bench/sample/sample.h"
#include "bench/train/run.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>

/* A text that grows, and the buffers to choose its next token. */
struct text {
    /* NULL: tokens are bytes */
    struct tokenizer *tokenizer;
    /* the prompt and what was generated */
    int32_t *ids;
    int64_t n, n_prompt;
    /* (V) each; allocated on the last pipeline stage */
    float *logits;
    struct sample_token *room;
};

static int open_text(const struct run *r, struct text *t)
{
    const struct train_options *o = r->o;
    const int64_t V = o->model.config.vocab;
    int32_t *prompt = NULL;
    int err = o->sample->tokenizer ? tokenizer_open(&t->tokenizer, o->sample->tokenizer) : 0;
    err = err ? err : sample_encode(t->tokenizer, o->sample->prompt, V, &prompt, &t->n_prompt);
    err = err ? err : ZR_ALLOC(t->ids, t->n_prompt + o->sample->n_tokens, "the text");
    err = err ? err : ZR_ALLOC(t->logits, V, "the logits of %lld ids", (long long)V);
    err = err ? err : ZR_ALLOC(t->room, V, "the logits of %lld ids", (long long)V);
    if (!err)
        memcpy(t->ids, prompt, (size_t)t->n_prompt * sizeof *prompt);
    t->n = t->n_prompt;
    free(prompt);
    return err;
}

/* Fills in the next row with the end of the text. Returns the position of the last token. The row is padded
 * behind it; attention is causal, so the padding has no effect. */
static int64_t fill_row(struct run *r, const struct text *t)
{
    const int64_t T = r->o->model.config.context, n = t->n < T ? t->n : T;
    memset(r->whole.tokens, 0, (size_t)T * sizeof *r->whole.tokens);
    memcpy(r->whole.tokens, t->ids + t->n - n, (size_t)n * sizeof *t->ids);
    return n - 1;
}

/* Chooses the next token, on the ranks of the last pipeline stage. */
static int choose(struct run *r, struct text *t, int64_t position, int32_t *id)
{
    struct model *last = &r->model[r->n_own - 1];
    const int64_t V = r->o->model.config.vocab;
    if (r->at.stage < r->at.n_stages - 1)
        return 0;
    TRY(model_take_logits(last, position, t->logits));
    TRY(train_reduce_tp(last, t->logits, V, /* largest */ false)); /* others have zeros for a rank's ids */
    *id = sample_choose(r->o->sample, t->n - t->n_prompt, t->logits, V, t->room);
    return 0;
}

/* Sends the chosen token to all pipeline stages. The message is in memory of the model's device. It uses the
 * memory of the batch's tokens, which the next row overwrites. */
static int share(struct run *r, int32_t *id)
{
    const struct compute *on = &r->compute;
    void *there = r->model[0].batch.tokens;
    if (r->at.n_stages == 1)
        return 0;
    TRY(on->dev->ops->copy(on->stream, there, id, sizeof *id));
    TRY_ZERO(zero_broadcast(r->z, ZERO_AXIS_PP, r->at.n_stages - 1, there, sizeof *id));
    TRY(on->dev->ops->copy(on->stream, id, there, sizeof *id));
    return on->dev->ops->stream_sync(on->stream);
}

static int next_token(struct run *r, struct text *t, train_forward *forward)
{
    int64_t position = fill_row(r, t);
    int32_t id = 0;
    TRY(forward(r, 1, train_next_whole));
    TRY(choose(r, t, position, &id));
    TRY(share(r, &id));
    if (id < 0)
        return zr_fail(ZERO_ERR_ARG,
                       "the logit of id %d after %lld tokens is not a finite number: the weights are of no "
                       "use, or of another --dtype",
                       -1 - id, (long long)t->n);
    t->ids[t->n++] = id;
    return 0;
}

/* Prints tokens [from, to) for people. */
static void print(const struct run *r, const struct text *t, int64_t from)
{
    if (!r->reports || r->o->json)
        return;
    for (; from < t->n; from++)
        sample_print(t->tokenizer, t->ids[from]);
    fflush(stdout);
}

static json_t *ids_json(const int32_t *ids, int64_t n)
{
    json_t *array = json_array();
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(array, json_integer(ids[i]));
    return array;
}

static void end_text(const struct run *r, const struct text *t)
{
    if (r->reports && r->o->json)
        report_line(json_pack("{s:s,s:o,s:o}", "event", "sample", "prompt", ids_json(t->ids, t->n_prompt),
                              "tokens", ids_json(t->ids + t->n_prompt, t->n - t->n_prompt)));
    else if (r->reports)
        putchar('\n');
}

/* Gathers all parameters once, for all tokens. In a pipeline, or if any rank lacks the budget or the memory,
 * the brackets of each forward pass gather one unit after another instead. */
static int gather(struct run *r, bool *gathered)
{
    *gathered = false;
    if (r->at.n_stages > 1)
        return 0;
    int err = take_libzero_error(zero_gather_all(r->z, 0));
    *gathered = !err;
    return err == ZERO_ERR_BUDGET || err == ZERO_ERR_NOMEM ? 0 : err;
}

static int generate(struct run *r, struct text *t, train_forward *forward)
{
    bool gathered;
    TRY(open_text(r, t));
    TRY(train_open_rows(r));
    for (int32_t k = 0; k < r->n_own; k++)
        r->model[k].only_logits = true;
    TRY(gather(r, &gathered));
    print(r, t, 0);
    while (t->n < t->n_prompt + r->o->sample->n_tokens) {
        TRY(next_token(r, t, forward));
        print(r, t, t->n - 1);
        if (sample_ends(t->tokenizer, t->ids[t->n - 1]))
            break;
    }
    end_text(r, t);
    return gathered ? take_libzero_error(zero_release_all(r->z)) : 0;
}

int sample_generate(struct run *r, train_forward *forward)
{
    struct text t = {0};
    int err = generate(r, &t, forward);
    tokenizer_close(t.tokenizer);
    free(t.ids);
    free(t.logits);
    free(t.room);
    return err;
}
